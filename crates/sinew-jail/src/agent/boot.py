def take(fork):
    import os, sys
    import array, bisect, collections, copy, datetime, decimal, fractions, functools, heapq, io
    import itertools, json, math, operator, random, re, statistics, string, struct, textwrap, time
    import traceback, typing
    import atexit, gc
    try:
        import resource
    except ImportError:
        # The limit that it was started with stays.
        resource = None
    def unpack(data):
        # Seconds of processor time, environment, code.
        at = 8
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
        # Copies of a machine share this interpreter.
        random.seed()
        os.environ.clear()
        os.environ.update((os.fsdecode(k), os.fsdecode(v)) for k, _, v in env)
        return cpu_s, text().decode()
    def flush():
        bad = False
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None and not stream.closed:
                    stream.flush()
            except Exception:
                bad = True
        return bad
    def run(code, leave, names):
        status = 0
        try:
            exec(compile(code, '<string>', 'exec'), names)
        except SystemExit as e:
            status = 0 if e.code is None else e.code
            if not isinstance(status, int):
                print(status, file=sys.stderr)
                status = 1
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            status = 1
            # Without the line of this file that called it.
            e.__traceback__ = e.__traceback__.tb_next
            sys.excepthook(type(e), e, e.__traceback__)
        if 'threading' in sys.modules:
            sys.modules['threading']._shutdown()
        atexit._run_exitfuncs()
        bad = flush()
        # Its objects end; modules end with the process, which takes a tenth of the time.
        names.clear()
        gc.collect()
        if (flush() or bad) and status == 0:
            status = 120
        leave(status & 0xff)
    def rehearse():
        # What is done once in an interpreter is done before somebody waits: a program from its
        # arrival to its end, into /dev/null.
        # Threads are awaited at the end of an interpreter, and that is once.
        if 'threading' in sys.modules:
            return
        try:
            null = os.open('/dev/null', os.O_WRONLY)
        except OSError:
            return
        env = dict(os.environb)
        code = b'x = [str(i) for i in range(9)]; print(*x, sep="+")'
        def text(part):
            return len(part).to_bytes(4, 'little') + part
        parts = [text(k + b'=' + v) for k, v in env.items()]
        data = b''.join([bytes(8), text(b'1'), len(parts).to_bytes(4, 'little'), *parts, text(code)])
        kept = os.dup(1)
        os.dup2(null, 1)
        for _ in range(2):
            run(unpack(data)[1], abs, {'__builtins__': __builtins__})
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)
    rehearse()
    # The end of a program looks at what the program made.
    gc.collect()
    gc.freeze()
    wall = None
    if sys.argv[1:]:
        wall = fork(bytes.fromhex(sys.argv[1]))
        sys.argv[1:] = []
    pieces, had, size = [], 0, 8
    while had < size:
        piece = os.read(3, 1 << 16)
        if not piece:
            os._exit(0)
        pieces.append(piece)
        had += len(piece)
        if had >= 8 == size:
            pieces = [b''.join(pieces)]
            size += int.from_bytes(pieces[0][:8], 'little')
    os.closerange(3, 64)
    if wall is not None:
        wall()
    cpu_s, code = unpack(b''.join(pieces))
    if resource is not None:
        # What getting ready took is not the program's.
        until = math.ceil(time.process_time()) + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (until, until + 1))
    return functools.partial(run, code, os._exit)
def fork(code):
    # Stays as it is and forks an interpreter for each program; returns in the fork. Whoever asks
    # opens the other ends of its streams. Nobody without privileges sees it or a fork that waits
    # (PR_SET_DUMPABLE); the filter of system calls, which forbids to change that, comes with a program.
    import ctypes, gc, os
    control = ctypes.CDLL(None, use_errno=True).prctl
    control.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    if control(4, 0, 0, 0, 0):
        os._exit(1)
    filter = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog.
    place = ctypes.addressof(filter).to_bytes(8, 'little')
    head = ctypes.create_string_buffer((len(code) // 8).to_bytes(8, 'little') + place, 16)
    def wall():
        # PR_SET_SECCOMP, SECCOMP_MODE_FILTER.
        if control(4, 1, 0, 0, 0) or control(22, 2, ctypes.addressof(head), 0, 0) or not filter:
            os._exit(126)
    gc.collect()
    gc.freeze()
    os.write(3, b'R')
    while True:
        if not os.read(3, 1):
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
    said = os.dup(3)
    for target, (ends, mine) in enumerate(zip(pipes, (0, 1, 1, 0))):
        os.dup2(ends[mine], target, target < 3)
    os.write(said, b'%8d' % os.getpid())
    os.close(said)
    # Both ends stay until the program has come: its other ends are opened meanwhile.
    return wall
def main(take, fork):
    names = globals()
    for name in ('take', 'fork', 'main'):
        del names[name]
    return take(fork), names
def start(pair):
    del pair[1]['start']
    pair[0](pair[1])
start(main(take, fork))
