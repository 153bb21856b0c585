# The zygote: an interpreter with its modules loaded, whose forks become Python programs in
# rooms. It holds no secret and starts no thread; it only ever runs this file. A fork enters the
# room and gives up every privilege by carrying out a plan (see plan.rs), all before it gets the
# program.
import ctypes, gc, os, sys
import _socket, array, json
import bisect, collections, copy, datetime, decimal, fractions, functools, heapq, io, itertools
import math, operator, random, re, statistics, string, struct, textwrap, time, traceback, typing

CONTROL, NOTICES = 3, 4
REPORT = 3
MAX_PROGRAM, MAX_PLAN = 160 << 10, 1 << 16
REHEARSAL = bytes(4) + b'x = [str(i) for i in range(9)]; print(*x, sep="+")'
READY, FORKED, FAILED, ZYGOTE = 0, 1, 2, 3
SYS_CLONE, SYS_SETNS, SIGCHLD = CALL_CLONE, CALL_SETNS, 17
SYS_MMAP, SYS_MPROTECT = CALL_MMAP, CALL_MPROTECT
CODE = bytes.fromhex('CODE_SERVE')
# What comes back where a plan failed, where there was none, and in the zygote; see enter.rs.
PLAN_FAILED, NO_PLAN, NO_REQUEST = 1 << 40, 1 << 41, 1 << 42
CLONE_NEWPID, CLONE_PARENT = 0x20000000, 0x8000

library = ctypes.PyDLL(None, use_errno=True)
syscall = library.syscall
syscall.argtypes = [ctypes.c_long] * 7
syscall.restype = ctypes.c_long
before_fork = ctypes.pythonapi.PyOS_BeforeFork
after_in_parent = ctypes.pythonapi.PyOS_AfterFork_Parent
after_in_child = ctypes.pythonapi.PyOS_AfterFork_Child
for hook in (before_fork, after_in_parent, after_in_child):
    hook.argtypes, hook.restype = [], None
get_errno, leave = ctypes.get_errno, os._exit
program = bytearray(MAX_PROGRAM)
program_view = memoryview(program)
kept = []
unpack = struct.Struct('=3i').unpack
from_buffer, address_of = ctypes.c_char.from_buffer, ctypes.addressof


def tell(id, room, kind, value, errno):
    os.write(NOTICES, struct.pack('=QIIii', id, room, kind, value, errno))


def receive(socket, most):
    data, control, flags, _ = socket.recvmsg(most, 64)
    fds = array.array('i')
    for level, kind, content in control:
        fds.frombytes(content[:len(content) - len(content) % 4])
    return data, fds


def carry_out(packet, given):
    """Rows of a plan (plan.rs); returns step and errno of the first that failed."""
    count = int.from_bytes(packet[:8], 'little')
    rows = memoryview(packet[8:8 + 80 * count]).cast('q')
    blob = bytearray(packet[8 + 80 * count:])
    base = address_of(from_buffer(blob))
    for i in range(0, len(rows), 10):
        nr, a, b, c, d, e, f, kinds, _, step = rows[i:i + 10]
        if nr == -2:
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
        if syscall(nr, a, b, c, d, e, f) == -1:
            return step, get_errno()
    return None


def message(most):
    """A struct msghdr for packets of so many bytes; the packet and the descriptors after it."""
    packet, control, vector, header = map(ctypes.create_string_buffer, (most, 64, 16, 56))
    # struct iovec, struct msghdr.
    struct.pack_into('=QQ', vector, 0, ctypes.addressof(packet), most)
    struct.pack_into('=QQQQQQQ', header, 0, 0, 0, ctypes.addressof(vector), 1,
                     ctypes.addressof(control), 64, 0)
    kept.append(vector)
    return header, packet, control


def serve_in_code(code, control):
    """Forks as enter.rs says; in forks: request, socket, what became of the plan."""
    serve = ctypes.PYFUNCTYPE(*[ctypes.c_long] * 6)(code)
    (request, packet, fds), (plan, *rest) = message(12), message(MAX_PLAN)
    kept.extend(rest)
    before_fork()
    done = serve(control.fileno(), ctypes.addressof(request), ctypes.addressof(plan), NOTICES,
                 CLONE_PARENT | SIGCHLD)
    if done == -NO_REQUEST:
        leave(0)
    after_in_child()
    return struct.unpack_from('=QI', packet), struct.unpack_from('=i', fds, 20)[0], -done


def serve_in_python(control):
    """The same where there is no code for the processor."""
    while True:
        packet, fds = receive(control, 64)
        if not packet:
            leave(0)
        id, room = struct.unpack('=QI', packet)
        pid = syscall(SYS_SETNS, fds[0], CLONE_NEWPID, 0, 0, 0, 0)
        if pid == 0:
            before_fork()
            pid = syscall(SYS_CLONE, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0, 0)
            if pid == 0:
                after_in_child()
                return (id, room), fds[1], carry_out_from(fds[1])
            errno = get_errno()
            after_in_parent()
        else:
            errno = get_errno()
        for fd in fds:
            os.close(fd)
        tell(id, room, FORKED, pid, errno if pid == -1 else 0)


def carry_out_from(socket):
    socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, socket)
    packet, fds = receive(socket, MAX_PLAN)
    socket.detach()
    if not packet:
        return NO_PLAN
    failed = carry_out(packet, fds)
    return PLAN_FAILED + (failed[0] << 16) + failed[1] if failed else 0


def map_code():
    """Where the code is; 0 if it cannot be run."""
    if not CODE:
        return 0
    # PROT_READ and PROT_WRITE, then PROT_READ and PROT_EXEC; MAP_PRIVATE and MAP_ANONYMOUS.
    at = syscall(SYS_MMAP, 0, 4096, 3, 0x22, -1, 0)
    if at == -1:
        return 0
    ctypes.memmove(at, CODE, len(CODE))
    return 0 if syscall(SYS_MPROTECT, at, 4096, 5, 0, 0, 0) else at


def child(id, room, socket, failed, main, known):
    if failed == NO_PLAN:
        leave(1)
    if failed:
        tell(id, room, FAILED, failed - PLAN_FAILED >> 16, failed & 0xffff)
        leave(1)
    # Where the end is told; see report.rs.
    if socket != REPORT:
        os.dup2(socket, REPORT, False)
    os.closerange(REPORT + 1, 256)
    socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, REPORT)
    sys.argv = ['-c']
    number = os.fstat(REPORT).st_ino
    # From here on, somebody may be waiting.
    while (given := receive_program(socket, 0)) is None:
        rehearse(main, known)
    code, env, fds = given
    take_files(fds)
    gc.enable()
    run(socket, number, code, env, main, known)


def take_files(fds, dup=os.dup2, close=os.closerange):
    """Standard streams of a program; nothing but the socket stays beside them."""
    for target, fd in enumerate(fds):
        dup(fd, target)
    close(REPORT + 1, 256)


def receive_program(socket, flags):
    """Length of the environment, its words (each ends in a zero byte), code; see live.rs.
    None stands for a rehearsal; see quiet.rs."""
    size, control, _, _ = socket.recvmsg_into([program], 64, flags)
    if not size:
        leave(1)
    if not control:
        return None
    start = 4 + int.from_bytes(program_view[:4], 'little')
    code = str(program_view[start:size], 'utf-8')
    return code, program_view[4:start].tobytes(), unpack(control[0][2])


def rehearse(main, known):
    """Runs a program from its arrival to its end, into /dev/null: memory that programs make an
    interpreter write to is copied now and not while somebody waits."""
    null = os.open('/dev/null', os.O_RDWR)
    for target in (1, 2):
        os.dup2(null, target)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array('i', [null] * 3))
    kept = dict(main)
    # Twice: the second time takes memory that the first did not.
    for _ in range(2):
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        ours.sendmsg([REHEARSAL], [rights])
        ours.shutdown(_socket.SHUT_WR)
        code, env, fds = receive_program(theirs, _socket.MSG_DONTWAIT)
        number = os.fstat(theirs.fileno()).st_ino
        take_files(fds, close=stay)
        gc.enable()
        run(theirs, number, code, env, main, known, leave=abs)
        gc.disable()
        main.update(kept)
        for fd in fds:
            os.close(fd)
        ours.close()
        theirs.close()
    os.close(null)
    gc.freeze()


def stay(first, last):
    pass


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


def report(socket, number, status, inode=os.fstat, MSG=_socket.MSG_DONTWAIT):
    """Says how it ends, if the program left the socket where it was."""
    try:
        if inode(socket.fileno()).st_ino == number:
            socket.send(bytes((69, status)), MSG)
            # Until it is killed, or told to end by itself: taking its memory apart must not keep
            # the processor from those who pass its end on.
            socket.recv(1)
    except BaseException:
        pass


def run(socket, number, code, env, main, known, flush=flush, leave=leave,
        close_files=close_files, report=report):
    for word in env.split(b'\0')[:-1]:
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
    report(socket, number, status & 0xff)
    leave(status & 0xff)


def serve(main):
    control = _socket.socket(fileno=CONTROL)
    packet, _ = receive(control, MAX_PLAN)
    failed = carry_out(packet, ())
    if failed:
        tell(0, 0, FAILED, *failed)
        leave(1)
    del packet
    code = map_code()
    known = set(sys.modules)
    main.pop('sys', None)
    gc.collect()
    gc.freeze()
    gc.disable()
    tell(0, 0, ZYGOTE, os.getpid(), 0)
    (id, room), socket, failed = serve_in_code(code, control) if code else serve_in_python(control)
    # Another file takes its number.
    control.detach()
    child(id, room, socket, failed, main, known)


serve(sys.modules['__main__'].__dict__)
