//! Attacks on the host's resources: cases 1 to 20 of the list.
//!
//! | cases | attack | what holds it |
//! |---|---|---|
//! | 1, 2 | processes and threads without end | the control group's number of processes |
//! | 3, 4, 5, 6 | memory of the heap, of files, of page tables, of pipes and sockets | the control group's memory, which counts all of these |
//! | 7, 8, 9, 10 | files, bytes, sparse files, nested folders | bytes and inodes of the work folder's file system |
//! | 11 | descriptors | the limit of open files |
//! | 12, 14 | endless loops, sleep, a stopped program | the deadline, and CPU time for loops in many processes |
//! | 13 | output without end | bytes of output; the program is ended, and the result says that it was cut |
//! | 15 to 19 | daemons, kernel objects, closed output, argument lists, core dumps | the PID namespace, limits, no dumps |
//!
//! The result must name the limit that was hit: an algorithm reads it, and a policy learns from it.

use crate::attack::{Case, Expect};

/// The cases in the order of their numbers.
///
/// Cases, with the limits of `spec`: 64 MiB of memory, 16 processes, 4 MiB of files, 32 open files, 64 KiB
/// of output. A program that prints `ESCAPED` found more than its own bound, which leaves a margin for
/// rounding and for what the interpreter uses itself. The fourth field is the deadline in milliseconds.
///
/// - 1, Python: forks in a loop and lets each child sleep. The group's number of processes refuses a fork;
///   the program fails with it, and the ending names that limit. More than 64 children are an escape.
/// - 1, shell: a function that calls itself twice. Shells differ in what they do when a fork is refused, so
///   that any ending that the sandbox survives will do. The deadline is 1.5 s.
/// - 2: threads count as processes. More than 32 are an escape. The program catches the refusal and ends
///   well, and is therefore `Done`: a refusal that a program handles is not its end.
/// - 3, heap: writes each MiB that it takes, so that the kernel has to give real pages. Ends as
///   `OutOfMemory`.
/// - 3, pretends: prints `MemoryError` and raises it far below its limit. The ending is exit code 1: it
///   comes from what the kernel counted, never from text that a program wrote.
/// - 12, pretends: tries each way to send itself the signals that the supervisor uses for spent CPU time
///   (`SIGXCPU`) and for a forbidden call (`SIGSYS`). All have to be refused, or a program could choose its
///   own ending.
/// - 4: the pages of memory files belong to no process; the group counts them all the same. The program
///   keeps 3 MiB in each, more than 100 of them are an escape.
/// - 5: touches one byte in each 2 MiB of a 256 GiB mapping. Its page tables already pass the limit; if the
///   mapping itself is refused, the case is `Done`.
/// - 6: fills pipes without a reader until descriptors or memory run out. More than 48 MiB in buffers are an
///   escape.
/// - 7: empty files use inodes and no bytes. More than 20,000 are an escape.
/// - 8: fills `/work` and `/tmp` with files of 1 MiB. More than 16 MiB in both are an escape.
/// - 9: a file of 1 TiB without content, by `truncate` and by `fallocate`; both are to be refused.
/// - 10: 10,000 folders in each other, or as many as are allowed; the host must be able to remove them.
/// - 11: duplicates a descriptor. More than 100 are an escape.
/// - 12, loops: spins in one process, and in up to 16 of them. Ends as `Timeout`.
/// - 13: writes to standard output or standard error without a newline. Ends as `OutputLimit`, with the mark
///   that the output was cut.
/// - 14: ignores all signals that can be ignored, or stops itself. Only `SIGKILL` from outside ends it, at
///   the deadline.
/// - 15: children with separate sessions, whose parents are gone, sleep on. The program is `Done` at once; no
///   process may be left afterwards.
/// - 16: kernel objects of five kinds: shared memory segments, message queues, watches, keys, polls. 20,000
///   of one kind are an escape.
/// - 17: closes all its output and sleeps. The end of the output is not the end of the program.
/// - 18: an argument list of 8 MB, above what the kernel takes.
/// - 19: aborts. The ending names signal 6 (`SIGABRT`).
pub(crate) const CASES: &[Case] = &[
    Case::new(
        1,
        "fork bomb in Python",
        Expect::TooManyProcesses,
        3000,
        "
import time
n = 0
while True:
    if os.fork() == 0:
        time.sleep(9)
        os._exit(0)
    n += 1
    if n > 64: print('ESCAPED', n, 'processes')
",
    ),
    Case::new(
        1,
        "fork bomb in the shell",
        Expect::Bounded,
        1500,
        "
os.execv('/bin/sh', ['sh', '-c', 'f() { f | f & }; f; sleep 9'])
",
    ),
    Case::new(
        2,
        "thread bomb",
        Expect::Done,
        5000,
        "
import threading, time
n = 0
try:
    while n < 200:
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        n += 1
except RuntimeError:
    pass
if n > 32: print('ESCAPED', n, 'threads')
print('DONE', flush=True)
os._exit(0)
",
    ),
    Case::new(
        3,
        "memory bomb on the heap",
        Expect::OutOfMemory,
        8000,
        "
blocks = []
while True: blocks.append(bytearray(b'x') * (1 << 20))
",
    ),
    Case::new(
        3,
        "pretends to be out of memory",
        Expect::Exited(1),
        5000,
        "
sys.stderr.write('MemoryError\\n'); sys.stderr.flush()
raise MemoryError('MemoryError')
",
    ),
    Case::new(
        12,
        "pretends to have spent its time or to be denied",
        Expect::Done,
        5000,
        "
import fcntl, signal, threading
for s in (signal.SIGSYS, signal.SIGXCPU):
    tries('kill', lambda: os.kill(os.getpid(), s))
    tries('killpg', lambda: os.killpg(os.getpgrp(), s))
    tries('thread', lambda: signal.pthread_kill(threading.get_ident(), s))
    refused('clone', sc(56, int(s), 0, 0, 0, 0))
    refused('pidfd_send_signal', sc(424, 0, int(s), 0, 0))
    refused('sigqueue', sc(129, os.getpid(), int(s), bytes(128)))
    refused('timer_create', sc(222, 0, bytes(64), bytes(8)))
    r, w = os.pipe(); tries('setsig', lambda: fcntl.fcntl(r, 10, int(s)))
print('DONE')
",
    ),
    Case::new(
        4,
        "memory bomb through a memory file",
        Expect::OutOfMemory,
        8000,
        "
import resource
f = os.memfd_create('m')
files = []
while True:
    f = os.memfd_create('m'); files.append(f)
    for _ in range(3): os.write(f, b'x' * (1 << 20))
    if len(files) > 100: print('ESCAPED'); break
",
    ),
    Case::new(
        5,
        "page-table bomb",
        Expect::OutOfMemoryOrDone,
        8000,
        "
import mmap
try:
    m = mmap.mmap(-1, 256 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    for i in range(0, 256 << 30, 2 << 20): m[i] = 1
    print('ESCAPED')
except (OSError, MemoryError, ValueError): pass
print('DONE')
",
    ),
    Case::new(
        6,
        "pipe and socket buffers",
        Expect::Done,
        5000,
        "
import fcntl
kept, total = [], 0
try:
    while True:
        r, w = os.pipe(); kept += [r, w]
        try: fcntl.fcntl(w, 1031, 1 << 20)
        except OSError: pass
        os.set_blocking(w, False)
        try:
            while True: total += os.write(w, b'x' * 65536)
        except BlockingIOError: pass
except OSError: pass
if total > 48 << 20: print('ESCAPED', total)
print('DONE')
",
    ),
    Case::new(
        7,
        "a million empty files",
        Expect::OutOfMemoryOrDone,
        8000,
        "
n = 0
try:
    while n < 1000000:
        os.close(os.open('f%d' % n, os.O_CREAT)); n += 1
except OSError as e: print(e)
if n > 20000: print('ESCAPED', n)
print('DONE')
",
    ),
    Case::new(
        8,
        "disk fill in work and temporary folder",
        Expect::Done,
        8000,
        "
total = 0
for d in ('/work', '/tmp'):
    try:
        for i in range(100):
            with open(d + '/big%d' % i, 'wb', buffering=0) as f: total += f.write(b'x' * (1 << 20))
    except OSError as e: print(e)
if total > 16 << 20: print('ESCAPED', total)
print('DONE')
",
    ),
    Case::new(
        9,
        "sparse giant file",
        Expect::Done,
        5000,
        "
fd = os.open('sparse', os.O_CREAT | os.O_RDWR)
tries('truncate', lambda: os.truncate(fd, 1 << 40))
tries('fallocate', lambda: os.posix_fallocate(fd, 0, 1 << 40))
print('DONE')
",
    ),
    Case::new(
        10,
        "ten thousand nested folders",
        Expect::Done,
        8000,
        "
n = 0
try:
    while n < 10000:
        os.mkdir('d'); os.chdir('d'); n += 1
except OSError as e: print(n, e)
print('DONE')
",
    ),
    Case::new(
        11,
        "descriptor exhaustion",
        Expect::Done,
        5000,
        "
n = 0
try:
    while n < 5000: os.dup(0); n += 1
except OSError: pass
if n > 100: print('ESCAPED', n)
print('DONE')
",
    ),
    Case::new(
        12,
        "endless loop",
        Expect::Timeout,
        400,
        "
while True: pass
",
    ),
    Case::new(
        12,
        "endless loops in many processes",
        Expect::Timeout,
        500,
        "
for _ in range(4): os.fork()
while True: pass
",
    ),
    Case::new(
        13,
        "output flood without a newline",
        Expect::OutputLimit,
        8000,
        "
while True: os.write(1, b'x' * 65536)
",
    ),
    Case::new(
        13,
        "flood of standard error",
        Expect::OutputLimit,
        8000,
        "
while True: os.write(2, b'x' * 65536)
",
    ),
    Case::new(
        14,
        "sleep that ignores every signal",
        Expect::Timeout,
        400,
        "
import signal, time
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(99)
",
    ),
    Case::new(
        14,
        "stops itself",
        Expect::Timeout,
        400,
        "
os.kill(os.getpid(), 19)
",
    ),
    Case::new(
        15,
        "daemon that leaves session and parent",
        Expect::Done,
        5000,
        "
import time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(32):
                try: os.close(fd)
                except OSError: pass
            time.sleep(99)
        os._exit(0)
print('DONE', flush=True)
",
    ),
    Case::new(
        16,
        "kernel objects without end",
        Expect::Done,
        8000,
        "
def count(name, f):
    n = 0
    while n < 20000:
        if f()[0] == -1: break
        n += 1
    if n >= 20000: print('ESCAPED', name)
count('shmget', lambda: sc(29, 0, 1 << 20, 0o1666))
count('mq_open', lambda: sc(240, b'q', 0o102, 0o666, 0))
count('inotify_init', lambda: sc(253))
count('add_key', lambda: sc(248, b'user', b'k', b'x', 1, -3))
count('epoll_create', lambda: sc(213, 1))
print('DONE')
",
    ),
    Case::new(
        17,
        "closes its output and goes on",
        Expect::Timeout,
        400,
        "
import time
for fd in (0, 1, 2): os.close(fd)
time.sleep(99)
",
    ),
    Case::new(
        18,
        "huge argument list",
        Expect::Done,
        5000,
        "
tries('exec', lambda: os.execv('/bin/true', ['x' * 4096] * 2000))
print('DONE')
",
    ),
    Case::new(
        19,
        "core dump",
        Expect::Signalled(6),
        5000,
        "
os.abort()
",
    ),
];
