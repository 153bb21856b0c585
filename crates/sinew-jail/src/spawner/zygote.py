# The zygote: an interpreter with its modules loaded, whose forks become Python programs in
# sandboxes. It holds no secret and starts no thread; it only ever runs this file. A fork enters the
# namespaces and gives up every privilege by carrying out a plan (see plan.rs), all before it gets
# the program.
import _socket, array, ctypes, gc, json, os, sys
import bisect, collections, copy, datetime, decimal, fractions, functools, heapq, io, itertools
import math, operator, random, re, statistics, string, struct, textwrap, time, traceback, typing

CONTROL, NOTICES, PROGRAM = 3, 4, 3
MAX_PROGRAM, MAX_PLAN = 160 << 10, 1 << 16
FORKED, FAILED, ZYGOTE = 1, 2, 3
SYS_CLONE, SYS_SETNS, SIGCHLD = CALL_CLONE, CALL_SETNS, 17
CLONE_NEWPID, CLONE_PARENT = 0x20000000, 0x8000
# Behind the last descriptor of a fork.
FILES = 256
WARM_UP = b'x = [str(i) for i in range(9)]; print(*x, sep="+")'

syscall = ctypes.PyDLL(None, use_errno=True).syscall
syscall.argtypes = [ctypes.c_long] * 7
syscall.restype = ctypes.c_long
before_fork = ctypes.pythonapi.PyOS_BeforeFork
after_in_parent = ctypes.pythonapi.PyOS_AfterFork_Parent
after_in_child = ctypes.pythonapi.PyOS_AfterFork_Child
for hook in (before_fork, after_in_parent, after_in_child):
    hook.argtypes, hook.restype = [], None
leave = os._exit


def tell(id, serial, kind, value, errno):
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
    """Rows of a plan (plan.rs); returns step and errno of the first that failed."""
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


def child(id, serial, fd, main, known):
    """In a fork: its plan, then its program."""
    packet, given = receive(fd, MAX_PLAN)
    if not packet:
        leave(1)
    failed = carry_out(packet, given)
    if failed:
        tell(id, serial, FAILED, *failed)
        leave(1)
    if fd != PROGRAM:
        os.dup2(fd, PROGRAM)
    os.closerange(PROGRAM + 1, FILES)
    program, files = receive(PROGRAM, MAX_PROGRAM)
    if len(files) != 3:
        leave(1)
    for target, file in enumerate(files):
        os.dup2(file, target)
    os.closerange(3, FILES)
    run(program, main, known)


def close_files(main, known):
    """What the end of an interpreter does for open files: drop what holds them."""
    main.clear()
    # New modules come last.
    if len(sys.modules) != len(known) or next(reversed(sys.modules)) not in known:
        for name in [n for n in sys.modules if n not in known]:
            module = sys.modules[name]
            if hasattr(module, '__dict__'):
                module.__dict__.clear()
    gc.collect()


def flush():
    bad = False
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            bad = True
    return bad


def run(program, main, known, flush=flush, leave=leave, close_files=close_files):
    """Length of the environment, its words (each ends in a zero byte), code; see live.rs."""
    start = 4 + int.from_bytes(program[:4], 'little')
    code = str(program[start:], 'utf-8')
    for word in program[4:start].split(b'\0')[:-1]:
        name, value = word.split(b'=', 1)
        os.environb[name] = value
    status = 0
    try:
        exec(compile(code, '<string>', 'exec'), main)
    except SystemExit as e:
        status = 0 if e.code is None else e.code
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as e:
        status = 1
        # Without the line of this file that called it.
        e.__traceback__ = e.__traceback__.tb_next
        try:
            sys.excepthook(type(e), e, e.__traceback__)
        except BaseException:
            pass
    try:
        if 'threading' in sys.modules:
            sys.modules['threading']._shutdown()
        if 'atexit' in sys.modules:
            sys.modules['atexit']._run_exitfuncs()
        bad = flush()
        close_files(main, known)
        bad = flush() or bad
        if bad and status == 0:
            status = 120
    except BaseException:
        pass
    leave(status & 0xff)


def warm_up(main, known):
    """Runs a program once into /dev/null: what happens at the first time only is done for all forks."""
    saved, null = [os.dup(n) for n in (1, 2)], os.open('/dev/null', os.O_WRONLY)
    kept = dict(main)
    for target in (1, 2):
        os.dup2(null, target)
    run(bytes(4) + WARM_UP, main, known, leave=abs)
    main.update(kept)
    for target, fd in zip((1, 2), saved):
        os.dup2(fd, target)
        os.close(fd)
    os.close(null)


def serve(main):
    packet, _ = receive(CONTROL, MAX_PLAN)
    failed = carry_out(packet, ())
    if failed:
        tell(0, 0, FAILED, *failed)
        leave(1)
    main.pop('sys', None)
    sys.argv = ['-c']
    known = set(sys.modules)
    warm_up(main, known)
    gc.collect()
    gc.freeze()
    tell(0, 0, ZYGOTE, os.getpid(), 0)
    while True:
        packet, fds = receive(CONTROL, 64)
        if not packet:
            leave(0)
        id, serial = struct.unpack('=QI', packet)
        init, socket = fds
        pid, errno = fork(init)
        if pid == 0:
            child(id, serial, socket, main, known)
        for fd in fds:
            os.close(fd)
        tell(id, serial, FORKED, pid, errno)


serve(sys.modules['__main__'].__dict__)
