# The zygote: an interpreter whose forks become Python programs in sandboxes. It holds no secret and
# starts no thread; it only ever runs this file. A fork enters the namespaces and gives up every
# privilege by carrying out a plan (see walls.rs), all before it gets the program.
import _socket, ctypes, select

CONTROL, NOTICES, PROGRAM = 3, 4, 3
MAX_PROGRAM, MAX_PLAN = 160 << 10, 1 << 16
FORKED, FAILED, ZYGOTE = 1, 2, 3
SYS_CLONE, SYS_SETNS, SIGCHLD = CALL_CLONE, CALL_SETNS, 17
CLONE_NEWPID, CLONE_PARENT = 0x20000000, 0x8000
# This number is above the last descriptor of a fork.
FILES = 256

syscall = ctypes.PyDLL(None, use_errno=True).syscall
syscall.argtypes = [ctypes.c_long] * 7
syscall.restype = ctypes.c_long
before_fork = ctypes.pythonapi.PyOS_BeforeFork
after_in_parent = ctypes.pythonapi.PyOS_AfterFork_Parent
after_in_child = ctypes.pythonapi.PyOS_AfterFork_Child
for hook in (before_fork, after_in_parent, after_in_child):
    hook.argtypes, hook.restype = [], None


def notice(id, serial, kind, value, errno):
    os.write(NOTICES, struct.pack('=QIIii', id, serial, kind, value, errno))


def receive(fd, limit):
    """A packet and the descriptors that came with it."""
    socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, fd)
    data, control, _, _ = socket.recvmsg(limit, 64)
    socket.detach()
    fds = array.array('i')
    for _, _, content in control:
        fds.frombytes(content[:len(content) - len(content) % 4])
    return data, fds


def carry_out(packet, given):
    """Rows of a plan (walls.rs); returns step and errno of the first that failed."""
    count = int.from_bytes(packet[:8], 'little')
    rows = memoryview(packet[8:8 + 72 * count]).cast('q')
    blob = bytearray(packet[8 + 72 * count:])
    base = ctypes.addressof(ctypes.c_char.from_buffer(blob))
    for i in range(0, len(rows), 9):
        nr, a, b, c, d, e, f, kinds, step = rows[i:i + 9]
        if nr == -1:
            blob[a:a + 8] = (base + b).to_bytes(8, 'little')
            continue
        if kinds:
            values = [a, b, c, d, e, f]
            for n in range(6):
                kind = kinds >> 2 * n & 3
                if kind == 1:
                    values[n] += base
                elif kind == 2:
                    values[n] = given[values[n]]
            a, b, c, d, e, f = values
        if syscall(nr, a, b, c, d, e, f) == -1 and step != STEP_OPTIONAL:
            return step, ctypes.get_errno()
    return None


def fork(init):
    """A child of the spawner in the PID namespace of `init`: its number, 0 in it, or -1 and errno."""
    if syscall(SYS_SETNS, init, CLONE_NEWPID, 0, 0, 0, 0) == -1:
        return -1, ctypes.get_errno()
    before_fork()
    pid = syscall(SYS_CLONE, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0, 0)
    if pid == 0:
        after_in_child()
        return 0, 0
    errno = ctypes.get_errno()
    after_in_parent()
    return pid, errno if pid == -1 else 0


def unpack(packet):
    """Length of the environment, its words (each ends in a zero byte), code; see live.rs."""
    start = 4 + int.from_bytes(packet[:4], 'little')
    for word in packet[4:start].split(b'\0')[:-1]:
        name, value = word.split(b'=', 1)
        os.environb[name] = value
    return str(packet[start:], 'utf-8')


def child(id, serial, fd, main, known):
    """In a fork: its plan, then its program."""
    packet, given = receive(fd, MAX_PLAN)
    if not packet:
        os._exit(1)
    failed = carry_out(packet, given)
    if failed:
        notice(id, serial, FAILED, *failed)
        os._exit(1)
    if fd != PROGRAM:
        os.dup2(fd, PROGRAM)
    os.closerange(PROGRAM + 1, FILES)
    # Memory that it shares with the zygote is copied where it writes: now, not when somebody waits.
    if not select.select([PROGRAM], [], [], 0)[0]:
        warm_up(main, known)
    program, files = receive(PROGRAM, MAX_PROGRAM)
    if len(files) != 3:
        os._exit(1)
    for target, file in enumerate(files):
        os.dup2(file, target)
    os.closerange(3, FILES)
    run(unpack(program), main, known)


def serve():
    packet, _ = receive(CONTROL, MAX_PLAN)
    failed = carry_out(packet, ())
    if failed:
        notice(0, 0, FAILED, *failed)
        os._exit(1)
    main, known = prepare()
    warm_up(main, known)
    settle()
    notice(0, 0, ZYGOTE, os.getpid(), 0)
    while True:
        packet, fds = receive(CONTROL, 64)
        if not packet:
            os._exit(0)
        id, serial = struct.unpack('=QI', packet)
        init, socket = fds
        pid, errno = fork(init)
        if pid == 0:
            child(id, serial, socket, main, known)
        for fd in fds:
            os.close(fd)
        notice(id, serial, FORKED, pid, errno)


serve()
