# A Python program from its start to its end, for interpreters that wait for one: the zygote of the process
# level (zygote.py) and the interpreters of guests (guest.py), one of which follows this text. It runs next to
# `__main__`, which stays empty for the program.
import array, bisect, collections, copy, datetime, decimal, fractions, functools, heapq, io, itertools
import json, math, operator, random, re, statistics, string, struct, textwrap, time, traceback, typing
import _signal, atexit, gc, os, sys

WARM_UP = 'x = [str(i) for i in range(9)]; print(*x, sep="+")'


def prepare():
    """The namespace of programs, and the modules that are loaded before any."""
    main = sys.modules['__main__'].__dict__
    main.pop('sys', None)
    sys.argv[:] = ['-c']
    return main, set(sys.modules)


def flush():
    bad = False
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            bad = True
    return bad


def close_files(main, known):
    """What the end of an interpreter does for open files: drops what holds them."""
    main.clear()
    # New modules come last.
    if len(sys.modules) != len(known) or next(reversed(sys.modules)) not in known:
        for name in [n for n in sys.modules if n not in known]:
            module = sys.modules[name]
            if hasattr(module, '__dict__'):
                module.__dict__.clear()
    gc.collect()


def end(status, main, known):
    """What an interpreter does after its program; the exit code."""
    try:
        if 'threading' in sys.modules:
            sys.modules['threading']._shutdown()
        atexit._run_exitfuncs()
        bad = flush()
        close_files(main, known)
        if (flush() or bad) and status == 0:
            status = 120
    except BaseException:
        pass
    return status & 0xff


def run(code, main, known, end=end, leave=os._exit, kill=os.kill):
    status, interrupted = 0, False
    try:
        exec(compile(code, '<string>', 'exec'), main)
    except SystemExit as e:
        status = 0 if e.code is None else e.code
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as e:
        status, interrupted = 1, isinstance(e, KeyboardInterrupt)
        # The line of this file that called the program is left out.
        e.__traceback__ = e.__traceback__.tb_next
        try:
            sys.excepthook(type(e), e, e.__traceback__)
        except BaseException:
            pass
    status = end(status, main, known)
    if interrupted:
        # A plain interpreter ends like this: by the signal.
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        kill(os.getpid(), _signal.SIGINT)
    leave(status)


def warm_up(main, known):
    """Runs a program into /dev/null, once: what happens at the first time only is done before a
    program comes."""
    # Threads are awaited once in the life of an interpreter.
    if 'threading' in sys.modules:
        return
    saved, null = [os.dup(n) for n in (1, 2)], os.open('/dev/null', os.O_WRONLY)
    kept = dict(main)
    for target in (1, 2):
        os.dup2(null, target)
    run(WARM_UP, main, known, leave=abs)
    main.update(kept)
    for target, fd in zip((1, 2), saved):
        os.dup2(fd, target)
        os.close(fd)
    os.close(null)


def settle():
    """The end of a program looks at what the program made, and at nothing older."""
    gc.collect()
    gc.freeze()


