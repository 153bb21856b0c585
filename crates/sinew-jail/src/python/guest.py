# The interpreter of a guest. Arguments: the filter of system calls in hexadecimal, if it is to stay
# and fork another one for each program, as in machines, where a start takes seconds.
try:
    import resource
except ImportError:
    # The limit that it was started with stays.
    resource = None

# A program comes on this descriptor; no file of an interpreter is above FILES.
PROGRAM, FILES = 3, 64


def receive():
    """Length (eight bytes), then as many bytes."""
    data, size = b'', 8
    while len(data) < size:
        piece = os.read(PROGRAM, 1 << 16)
        if not piece:
            os._exit(0)
        data += piece
        if len(data) >= 8 == size:
            size += int.from_bytes(data[:8], 'little')
    return data[8:]


def unpack(data):
    """Seconds of processor time, environment, code (Put in wire.rs)."""
    at = 0

    def number():
        nonlocal at
        at += 4
        return int.from_bytes(data[at - 4:at], 'little')

    def text():
        nonlocal at
        size = number()
        at += size
        return data[at - size:at]

    cpu_s = int(text())
    env = [text().partition(b'=') for _ in range(number())]
    return cpu_s, env, text().decode()


def fork_server(filter):
    """Stays as it is and forks an interpreter for each program; returns in the fork, with what sets
    the filter. The agent opens the other ends of a fork's streams. No process without privileges
    sees it or a fork that waits (PR_SET_DUMPABLE); the filter, which forbids to change that, comes
    with a program."""
    import ctypes
    control = ctypes.CDLL(None, use_errno=True).prctl
    control.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    if control(4, 0, 0, 0, 0):
        os._exit(1)
    code = ctypes.create_string_buffer(filter, len(filter))
    # struct sock_fprog.
    place = ctypes.addressof(code).to_bytes(8, 'little')
    head = ctypes.create_string_buffer((len(filter) // 8).to_bytes(8, 'little') + place, 16)

    def confine():
        # PR_SET_SECCOMP, SECCOMP_MODE_FILTER.
        if control(4, 1, 0, 0, 0) or control(22, 2, ctypes.addressof(head), 0, 0) or not code:
            os._exit(126)

    settle()
    os.write(PROGRAM, b'R')
    while True:
        if not os.read(PROGRAM, 1):
            os._exit(0)
        # The first process of the machine becomes the parent.
        middle = os.fork()
        if not middle:
            if os.fork():
                os._exit(0)
            break
        os.waitpid(middle, 0)
    os.setsid()
    pipes = [os.pipe() for _ in range(4)]
    said = os.dup(PROGRAM)
    for target, (ends, mine) in enumerate(zip(pipes, (0, 1, 1, 0))):
        os.dup2(ends[mine], target, target < 3)
    os.write(said, b'%8d' % os.getpid())
    os.close(said)
    # Both ends stay until the program has come: its other ends are opened meanwhile.
    return confine


def wait(filter):
    main, known = prepare()
    warm_up(main, known)
    confine = None
    if filter:
        confine = fork_server(bytes.fromhex(filter[0]))
    else:
        settle()
    data = receive()
    os.closerange(PROGRAM, FILES)
    if confine is not None:
        confine()
    cpu_s, env, code = unpack(data)
    # Copies of a machine share this interpreter.
    random.seed()
    os.environ.clear()
    os.environ.update((os.fsdecode(k), os.fsdecode(v)) for k, _, v in env)
    if resource is not None:
        # The time for getting ready does not count for the program.
        until = math.ceil(time.process_time()) + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (until, until + 1))
    run(code, main, known)


wait(sys.argv[2:])
