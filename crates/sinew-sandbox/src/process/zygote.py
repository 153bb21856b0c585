# The zygote: an interpreter with its modules loaded, whose forks become Python programs in
# rooms. It holds no secret and starts no thread; it only ever runs this file. A fork enters the
# room and gives up every privilege by carrying out a plan (see plan.rs), all before it gets the
# program.
import ctypes, gc, os, sys
hooks, register = [], os.register_at_fork
os.register_at_fork = lambda **given: hooks.append(given) or register(**given)
import _socket, array, json
import bisect, collections, copy, datetime, decimal, fractions, functools, heapq, io, itertools
import math, operator, random, re, statistics, string, struct, textwrap, time, traceback, typing
os.register_at_fork = register

CONTROL, NOTICES = 3, 4
REPORT = 3
MAX_PROGRAM, MAX_PLAN = 160 << 10, 1 << 16
# What a fork needs of PyOS_BeforeFork and PyOS_AfterFork_Child where no other thread ever was:
# the hooks, and of those only that of `random`, which Python would spend thirty pages on.
PLAIN = hooks == [{'after_in_child': random._inst.seed}]
reseed = super(random.Random, random._inst).seed
# How often the zygote itself rehearses: what is done once, such as finding the functions of
# libraries and specializing Python's code, is done for all forks.
REHEARSALS = 12
REHEARSAL = bytes(4) + b'x = [str(i) for i in range(9)]; print(*x, sep="+")'
READY, FORKED, FAILED, ZYGOTE = 0, 1, 2, 3
SYS_CLONE, SYS_SETNS, SIGCHLD = CALL_CLONE, CALL_SETNS, 17
SYS_MMAP, SYS_MPROTECT, SYS_MUNMAP = CALL_MMAP, CALL_MPROTECT, CALL_MUNMAP
SYS_MADVISE, SYS_MREMAP = CALL_MADVISE, CALL_MREMAP
CODE = bytes.fromhex('CODE_SERVE')
# What comes back where a plan failed, where there was none, and in the zygote; see enter.rs.
PLAN_FAILED, NO_PLAN, NO_REQUEST, NO_PROGRAM = 1 << 40, 1 << 41, 1 << 42, 1 << 43
# Behind the last descriptor that anybody has.
ALL = 1 << 30
CLONE_NEWPID, CLONE_PARENT = 0x20000000, 0x8000

library = ctypes.PyDLL(None, use_errno=True)
syscall = library.syscall
syscall.argtypes = [ctypes.c_long] * 7
syscall.restype = ctypes.c_long
before_fork = ctypes.pythonapi.PyOS_BeforeFork
after_in_child = ctypes.pythonapi.PyOS_AfterFork_Child
for hook in (before_fork, after_in_child):
    hook.argtypes, hook.restype = [], None
get_errno, leave = ctypes.get_errno, os._exit
cookie = _socket.SOL_SOCKET, 57, 8
# What the code reads and writes, together: its places, three struct msghdr and what they name, the
# cookie of a socket, the descriptors of a request and the others', packets.
PLACES, REQUEST, PLAN, PROGRAM, COOKIE, FDS, FIRST = 0, 64, 160, 256, 352, 384, 512
memory = ctypes.create_string_buffer(FIRST + MAX_PLAN + MAX_PROGRAM)
at = ctypes.addressof(memory)
program = memoryview(memory).cast('B')[FIRST + MAX_PLAN:]
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
        if syscall(nr, a, b, c, d, e, f) == -1 and step != STEP_OPTIONAL:
            return step, get_errno()
    return None


def message(place, packet, most, fds):
    """A struct msghdr for packets of so many bytes and the struct iovec that it names."""
    struct.pack_into('=QQQQQQQ', memory, place, 0, 0, at + place + 64, 1, at + fds, 64, 0)
    struct.pack_into('=QQ', memory, place + 64, at + packet, most)


def lay_out():
    message(REQUEST, COOKIE + 16, 12, FDS)
    message(PLAN, FIRST, MAX_PLAN, FDS + 64)
    message(PROGRAM, FIRST + MAX_PLAN, MAX_PROGRAM, FDS + 64)
    struct.pack_into('=6Q', memory, PLACES, at + REQUEST, at + PLAN, at + PROGRAM, NOTICES,
                     CLONE_PARENT | SIGCHLD, at + COOKIE)


def code_at(code):
    return ctypes.PYFUNCTYPE(*[ctypes.c_long] * 4)(code)


def serve_in_python(control):
    """What the code does where there is none for the processor."""
    while True:
        packet, fds = receive(control, 64)
        if not packet:
            return -NO_REQUEST
        id, room = struct.unpack('=QI', packet)
        pid = syscall(SYS_SETNS, fds[0], CLONE_NEWPID, 0, 0, 0, 0)
        if pid == 0:
            pid = syscall(SYS_CLONE, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0, 0)
            if pid == 0:
                memory[COOKIE + 16:COOKIE + 28] = packet
                return carry_out_from(fds[1])
        errno = get_errno()
        for fd in fds:
            os.close(fd)
        tell(id, room, FORKED, pid, errno if pid == -1 else 0)


def carry_out_from(fd):
    socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, fd)
    packet, fds = receive(socket, MAX_PLAN)
    if not packet:
        return -NO_PLAN
    failed = carry_out(packet, fds)
    if failed:
        return -(PLAN_FAILED + (failed[0] << 16) + failed[1])
    os.dup2(socket.detach(), REPORT)
    os.closerange(REPORT + 1, 256)
    socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, REPORT)
    memory[COOKIE:COOKIE + 8] = socket.getsockopt(*cookie)
    socket.detach()
    return program_in_python(REPORT, 0, REPORT + 1)


def program_in_python(fd, _, first):
    socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, fd)
    size, control, _, _ = socket.recvmsg_into([program], 64)
    socket.detach()
    if not size:
        return -NO_PROGRAM
    if not control:
        return 0
    memory[FDS + 80:FDS + 92] = given = control[0][2][:12]
    for target, fd in enumerate(unpack(given)):
        os.dup2(fd, target)
    os.closerange(first, 256)
    return size


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


def segments():
    """Where the segments of the interpreter's program lie: flags, first and end address."""
    library.getauxval.restype = ctypes.c_ulong
    # AT_PHDR, AT_PHENT, AT_PHNUM; Elf64_Phdr.
    table, size, count = (library.getauxval(ctypes.c_ulong(n)) for n in (3, 4, 5))
    rows = [struct.unpack('=IIQQQQQQ', ctypes.string_at(table + i * size, 56))
            for i in range(count)]
    base = [table - row[3] for row in rows if row[0] == 6]
    for kind, flags, _, start, _, _, length, _ in rows:
        if kind == 1 and base:
            yield flags, base[0] + start & -4096, base[0] + start + length + 4095 & -4096


def enlarge_code():
    """Moves the code of the interpreter to pages of 2 MiB: all forks share them, and the kernel
    copies one entry of a page table for each where forks would have faults for pages of 4 KiB."""
    huge = 2 << 20
    fixed = [s for s in segments() if not s[0] & 2]
    for flags, start, end in fixed:
        for first in range(start & -huge if flags & 1 else end, end, huge):
            inside = [(f, max(a, first), min(b, first + huge)) for f, a, b in fixed
                      if a < first + huge and b > first]
            if sum(b - a for _, a, b in inside) != huge:
                continue
            # PROT_READ and PROT_WRITE, MAP_PRIVATE and MAP_ANONYMOUS.
            room = syscall(SYS_MMAP, 0, 2 * huge, 3, 0x22, -1, 0)
            if room == -1:
                return
            copy = room + huge - 1 & -huge
            ends = [(room, copy), (copy + huge, room + 2 * huge)]
            if not moved(copy, first, huge):
                ends.append((copy, copy + huge))
            for f, a, b in inside:
                if not f & 1:
                    # PROT_READ.
                    syscall(SYS_MPROTECT, a, b - a, 1, 0, 0, 0)
            for a, b in ends:
                if b > a:
                    syscall(SYS_MUNMAP, a, b - a, 0, 0, 0, 0)


def moved(copy, first, huge):
    """Whether what lies at `first` is now a copy, in one page."""
    # MADV_HUGEPAGE and MADV_COLLAPSE: where there are no such pages, nothing is gained.
    if syscall(SYS_MADVISE, copy, huge, 14, 0, 0, 0):
        return False
    ctypes.memmove(copy, first, huge)
    # PROT_READ and PROT_EXEC; MREMAP_MAYMOVE and MREMAP_FIXED.
    return (syscall(SYS_MADVISE, copy, huge, 25, 0, 0, 0) == 0
            and syscall(SYS_MPROTECT, copy, huge, 5, 0, 0, 0) == 0
            and syscall(SYS_MREMAP, copy, huge, huge, 3, first, 0) == first)


def child(socket, size, next_program, main, known):
    """In a fork: what became of its plan, and its program if there is one."""
    if size < 0:
        if size > -NO_PLAN:
            id, room = struct.unpack_from('=QI', memory, COOKIE + 16)
            failed = -size - PLAN_FAILED
            tell(id, room, FAILED, failed >> 16, failed & 0xffff)
        leave(1)
    # From here on, somebody may be waiting.
    while size == 0:
        rehearse(next_program, main, known, 2)
        size = next_program(REPORT, at, REPORT + 1)
    if size < 0:
        leave(1)
    run(socket, memory[COOKIE:COOKIE + 8], size, main, known)


def rehearse(next_program, main, known, times):
    """Runs a program from its arrival to its end, into /dev/null: memory that programs make an
    interpreter write to is copied now and not while somebody waits. The second time takes memory
    that the first did not."""
    # Threads are awaited at the end of an interpreter, and that is once.
    if 'threading' in sys.modules:
        return
    null = os.open('/dev/null', os.O_RDWR)
    for target in (1, 2):
        os.dup2(null, target)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array('i', [null] * 3))
    kept = dict(main)
    for _ in range(times):
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        ours.sendmsg([REHEARSAL], [rights])
        ours.shutdown(_socket.SHUT_WR)
        size = next_program(theirs.fileno(), at, ALL)
        if size < 0:
            leave(1)
        run(theirs, theirs.getsockopt(*cookie), size, main, known, leave=abs)
        main.update(kept)
        for fd in unpack(memory[FDS + 80:FDS + 92]):
            os.close(fd)
        ours.close()
        theirs.close()
    os.close(null)
    gc.freeze()


def close_files(main, known):
    """What the end of an interpreter does for open files: drop what holds them."""
    main.clear()
    # New modules come last.
    if len(sys.modules) != len(known) or next(reversed(sys.modules)) not in known:
        for name in [n for n in sys.modules if n not in known]:
            module = sys.modules[name]
            if hasattr(module, '__dict__'):
                module.__dict__.clear()
    # What is young is all that there is where nothing outlived a collection.
    gc.collect(2 if gc.get_objects(1) or gc.get_objects(2) else 0)


def flush():
    bad = False
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            bad = True
    return bad


def report(socket, expected, status, cookie=cookie, MSG=_socket.MSG_DONTWAIT):
    """Says how it ends, if the program left the socket where it was."""
    try:
        if socket.getsockopt(*cookie) == expected:
            socket.send(bytes((69, status)), MSG)
            # Until it is killed, or told to end by itself: taking its memory apart must not keep
            # the processor from those who pass its end on.
            socket.recv(1)
    except BaseException:
        pass


def run(socket, expected, size, main, known, flush=flush, leave=leave, close_files=close_files,
        report=report):
    """Length of the environment, its words (each ends in a zero byte), code; see live.rs."""
    start = 4 + int.from_bytes(program[:4], 'little')
    code = str(program[start:size], 'utf-8')
    for word in program[4:start].tobytes().split(b'\0')[:-1]:
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
    report(socket, expected, status & 0xff)
    leave(status & 0xff)


def serve(main):
    control = _socket.socket(fileno=CONTROL)
    packet, _ = receive(control, MAX_PLAN)
    failed = carry_out(packet, ())
    if failed:
        tell(0, 0, FAILED, *failed)
        leave(1)
    del packet
    lay_out()
    enlarge_code()
    code = map_code()
    next_program = code_at(code) if code else program_in_python
    known = set(sys.modules)
    main.pop('sys', None)
    sys.argv = ['-c']
    gc.collect()
    gc.freeze()
    saved = [os.dup(n) for n in range(3)]
    rehearse(next_program, main, known, REHEARSALS)
    for n, fd in enumerate(saved):
        os.dup2(fd, n)
        os.close(fd)
    tell(0, 0, ZYGOTE, os.getpid(), 0)
    if not PLAIN:
        before_fork()
    size = next_program(CONTROL, at, 0) if code else serve_in_python(control)
    if size == -NO_REQUEST:
        leave(0)
    if PLAIN:
        reseed()
        random._inst.gauss_next = None
    else:
        after_in_child()
    # The socket of a fork takes the number of that of the zygote.
    child(control, size, next_program, main, known)


serve(sys.modules['__main__'].__dict__)
