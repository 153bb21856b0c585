//! Attacks on privileges, the kernel and the network: cases 46 to 58 of the list.
//!
//! | cases | attack | what holds it |
//! |---|---|---|
//! | 46, 47, 48 | set-user-id programs, capabilities, other users | no-new-privileges, an empty bounding set, one user in the namespace |
//! | 49, 50, 51 | rare system calls, other calling conventions, flags of clone | a seccomp list of what is allowed; foreign conventions end the program |
//! | 52 | user namespaces | seccomp |
//! | 53 | sockets of other families | seccomp looks at the family |
//! | 54, 55 | scheduling, locked memory, devices | limits, control groups, a `/dev` with harmless nodes alone |
//! | 56, 57, 58 | the network, the host's sockets, name servers | a network namespace without an interface but loopback |
//!
//! A refused call must fail with an error that a program of good will understands: `EPERM` or `ENOSYS`, or
//! the errors of the kernel itself.

use crate::attack::{Case, Expect};

/// The cases in the order of their numbers, except that 49 has a second part behind 51.
///
/// Numbers of system calls are those of x86-64; elsewhere cases with raw calls are skipped, as the same
/// number would be another call.
///
/// - 46: `su`, `sudo`, `newuidmap` and `mount` of the system, where they exist; none may succeed.
/// - 47: calls that change the user or take a capability, and the `prctl` options that would keep one
///   (ambient, keep-caps, bounding set, secure bits).
/// - 48: all five capability sets are zero, before and behind an `exec`, with no-new-privileges and a
///   filter.
/// - 49: 41 calls that programs do not need (`bpf`, `io_uring`, keys, modules, clocks, swap and more) fail
///   with `EPERM` or `ENOSYS`, and `clone3` with `ENOSYS`, so that libraries fall back to `clone`, whose
///   flags can be checked.
/// - 49, flags: calls that programs do need, with the arguments that reach out of a sandbox: `ioctl` on the
///   system's files, leases and notifications, huge pages, filters on sockets, priority inheritance.
/// - 50: `int 0x80` has other numbers and would pass a filter that checks only the number: the program is
///   ended as `Denied`. The kernel may lack the x32 convention altogether, which also counts as held.
/// - 51: the kernel reads the lower half of the flags of `clone`; a filter that compares all 64 bits could
///   be misled by the upper half. And each single flag that changes whose child a process is, or its
///   namespaces.
/// - 52: a user namespace would give all capabilities inside of it, and so the kernel's larger attack
///   surface.
/// - 53: fourteen families with four kinds each, from Internet to `AF_ALG` and vsock. Only Unix sockets are
///   allowed.
/// - 54: a better priority, real-time scheduling, and all memory locked.
/// - 55: only harmless nodes may be in `/dev`; others must not open in any mode.
/// - 56: the host's trap on the loopback interface, the metadata service of clouds, a private and a public
///   address.
/// - 57: the abstract Unix socket of the trap, which has no file, and sockets of daemons in `/run`.
/// - 58: a name server by way of the library and directly. Eight seconds, as resolvers retry.
pub(crate) const CASES: &[Case] = &[
    Case::new(46, "set-user-id programs of the system", Expect::Done, 8000, "
import subprocess
for argv in (['su', '-c', 'id -u'], ['sudo', '-n', 'id', '-u'], ['newuidmap', '1', '0', '0', '1'], ['mount', '-t', 'tmpfs', 'x', '/tmp']):
    try: r = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3)
    except (OSError, subprocess.TimeoutExpired): continue
    if r.returncode == 0: print('ESCAPED', argv, r.stdout)
print('DONE')
"),
    Case::new(47, "takes a capability or another user", Expect::Done, 5000, "
for name, nr, args in (('setuid', 105, (0,)), ('setgid', 106, (0,)), ('setresuid', 117, (0, 0, 0)), ('setgroups', 116, (0, 0)), ('capset', 126, (bytes(8), bytes(24)))):
    refused(name, sc(nr, *args))
for option, value in ((47, 2), (28, 0), (24, 0), (8, 1)): refused('prctl %d' % option, sc(157, option, value, 1, 0, 0))
tries('setxattr', lambda: os.setxattr('/work', 'security.capability', bytes(20)))
print('DONE')
"),
    Case::new(48, "keeps a capability over exec", Expect::Done, 5000, "
import subprocess
for text in (open('/proc/self/status').read(), subprocess.run(['cat', '/proc/self/status'], capture_output=True, text=True).stdout):
    lines = dict(l.split(':', 1) for l in text.splitlines())
    for name in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb'):
        if int(lines[name], 16): print('ESCAPED', name, lines[name])
    if lines['NoNewPrivs'].strip() != '1' or lines['Seccomp'].strip() != '2': print('ESCAPED', text)
print('DONE')
"),
    Case::new(49, "system calls that no program needs", Expect::Done, 5000, "
for nr in (321, 298, 323, 425, 426, 427, 250, 248, 249, 246, 320, 175, 313, 176, 167, 168, 169, 179, 135, 300, 163, 170, 171, 172, 173, 103, 153, 134, 180, 212, 227, 305, 159, 154, 237, 238, 239, 256, 279, 447, 453):
    r = sc(nr, 0, 0, 0, 0, 0, 0)
    if r[0] != -1 or r[1] not in (1, 38): print('ESCAPED', nr, r)
if sc(435, 0, 0) != (-1, 38): print('ESCAPED clone3')
print('DONE')
"),
    Case::new(50, "32-bit system calls", Expect::Denied, 5000, "
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')
f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
print('ESCAPED', f())
"),
    Case::new(50, "x32 system calls", Expect::DoneOrDenied, 5000, "
for nr in (39, 57, 165, 272, 520, 521): refused('x32 %d' % nr, sc(0x40000000 | nr, 0, 0, 0, 0, 0))
print('DONE')
"),
    Case::new(51, "hides flags of clone in the upper half", Expect::Done, 5000, "
refused('clone', sc(56, (1 << 32) | 0x10000000 | 17, 0, 0, 0, 0))
refused('clone', sc(56, -(1 << 62) | 0x20000 | 17, 0, 0, 0, 0))
print('DONE')
"),
    Case::new(51, "clones children for its parent, tracers and namespaces", Expect::Done, 5000, "
for flag in (0x1000, 0x2000, 0x8000, 0x20000, 0x800000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80000000):
    for signal in (0, 17):
        r = sc(56, flag | signal, 0, 0, 0, 0)
        if r[0] == 0: os._exit(0)
        refused('clone %#x' % (flag | signal), r)
print('DONE')
"),
    Case::new(49, "flags of calls that reach out of the sandbox", Expect::Done, 5000, "
import fcntl, socket, struct
usr = os.open('/usr', os.O_RDONLY)
program = os.open(sys.executable or '/usr/bin/python3', os.O_RDONLY)
for name, request in (('FIEMAP', 0xc020660b), ('FIBMAP', 1), ('GETUUID', 0x80111500), ('GETFLAGS', 0x80086601), ('FICLONE', 0x40049409), ('TIOCSTI', 0x5412)):
    for fd in (usr, program): refused(name, sc(16, fd, request, bytes(200)))
for name, command, value in (('NOTIFY', 1026, 0x80000001), ('SETLEASE', 1024, 0), ('SETSIG', 10, 31), ('SETDELEG', 1040, 0)):
    refused(name, sc(72, usr, command, value))
open('a', 'w').close()
refused('WHITEOUT', sc(316, -100, b'a', -100, b'b', 4))
refused('HUGETLB', sc(9, 0, 2 << 20, 3, 0x40022, -1, 0))
refused('memfd HUGETLB', sc(319, b'x', 4))
refused('MERGEABLE', sc(28, 0, 4096, 12))
refused('notification pipe', sc(293, bytes(8), 0x80))
a, b = socket.socketpair()
for fd in (a.fileno(), 3): refused('PEERPIDFD', sc(55, fd, 1, 77, bytes(4), struct.pack('i', 4)))
refused('PASSPIDFD', sc(54, a.fileno(), 1, 76, struct.pack('i', 1), 4))
refused('ATTACH_FILTER', sc(54, a.fileno(), 1, 26, bytes(16), 16))
tries('OOB', lambda: a.send(b'x', socket.MSG_OOB))
for family in (2, 30, 40): refused('socketpair %d' % family, sc(53, family, 1, 0, bytes(8)))
refused('PI', sc(202, bytes(4), 6, 0, 0, 0, 0))
print('DONE')
"),
    Case::new(52, "nested user namespace", Expect::Done, 5000, "
import subprocess
refused('unshare', sc(272, 0x10000000))
refused('fsopen', sc(430, b'ext4', 0))
r = subprocess.run(['unshare', '-Ur', 'id', '-u'], capture_output=True)
if r.returncode == 0: print('ESCAPED', r.stdout)
print('DONE')
"),
    Case::new(53, "sockets of other families", Expect::Done, 5000, "
import socket
for family in (2, 4, 5, 9, 10, 15, 16, 17, 21, 29, 31, 38, 40, 44):
    for kind in (1, 2, 3, 5): tries('%d/%d' % (family, kind), lambda: socket.socket(family, kind))
print('DONE')
"),
    Case::new(54, "takes the processor or the memory", Expect::Done, 5000, "
tries('nice', lambda: os.setpriority(os.PRIO_PROCESS, 0, -5))
tries('fifo', lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))
if sc(151, 3)[0] == 0: print('ESCAPED mlockall')
print('DONE')
"),
    Case::new(55, "devices of the host", Expect::Done, 5000, "
allowed = {'null', 'zero', 'full', 'random', 'urandom', 'fd', 'stdin', 'stdout', 'stderr', 'shm'}
# Engines of containers put more names there: terminals of a file system of their own, and links
# behind which nothing is.
for name in os.listdir('/dev'):
    path = '/dev/' + name
    if name in allowed or name == 'ptmx' and os.path.islink(path): continue
    if os.path.isdir(path):
        if set(os.listdir(path)) - {'ptmx'}: print('ESCAPED', name, os.listdir(path))
        continue
    for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR): tries(name, lambda: os.open(path, mode | os.O_NONBLOCK))
print('DONE')
"),
    Case::new(56, "connects to the host and beyond", Expect::Done, 5000, "
import socket
for address in (('127.0.0.1', PORT), ('169.254.169.254', 80), ('10.0.0.1', 80), ('1.1.1.1', 53)):
    tries(address, lambda: socket.create_connection(address, timeout=1))
for address in (('::1', PORT),): tries(address, lambda: socket.create_connection(address, timeout=1))
print('DONE')
"),
    Case::new(57, "connects to Unix sockets of the host", Expect::Done, 5000, "
import socket
def connect(name):
    s = socket.socket(socket.AF_UNIX); s.settimeout(1); s.connect(name); return s
for name in ('\\0' + ABSTRACT, '/run/docker.sock', '/var/run/docker.sock', '/run/dbus/system_bus_socket', '/run/systemd/private'):
    tries(repr(name), lambda: connect(name))
print('DONE')
"),
    Case::new(58, "asks a name server", Expect::Done, 8000, "
import socket
tries('getaddrinfo', lambda: socket.getaddrinfo('example.com', 80))
tries('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.53', 53)))
print('DONE')
"),
];

/// Reason for the absence of attacks on the egress proxy.
const PROXY: &str =
    "attacked sandboxes have no way out: the proxy is attacked by the tests of sinew-egress";

/// Cases that this level or this version cannot meet, and why.
///
/// They are rows of the table too, so that no number of the list is missing. 24 and 40 are ruled out by how
/// the sandbox is built; 59 to 63 need a sandbox with a way out, which no attacked one has; the cases from
/// 72 on belong to the suites of their own levels.
pub(crate) const ABSENT: &[(u32, &str, &str)] = &[
    (
        24,
        "link races during host reads",
        "the file interface borrows the sandbox: nothing runs in it meanwhile",
    ),
    (
        40,
        "races on masked paths",
        "no protection is a mask that a program could race: files of proc are closed by user, landlock and read-only rules, and what a runtime masks is masked before the program starts",
    ),
    (59, "egress proxy by-pass", PROXY),
    (60, "rebinding of names", PROXY),
    (61, "header smuggling", PROXY),
    (62, "cache poisoning", PROXY),
    (63, "port scan through the proxy", PROXY),
    (72, "wasm: endless loop", "wasm level"),
    (73, "wasm: memory growth", "wasm level"),
    (74, "wasm: deep recursion", "wasm level"),
    (75, "wasm: preopen escape", "wasm level"),
    (76, "wasm: huge lengths to host functions", "wasm level"),
    (77, "wasm: sleep past the deadline", "wasm level"),
    (78, "wasm: malformed module", "wasm level"),
    (79, "wasm: compile bomb", "wasm level"),
    (80, "microvm: guest panic loop", "microvm level"),
    (81, "microvm: serial flood", "microvm level"),
    (82, "microvm: balloon over-commit", "microvm level"),
    (83, "microvm: malicious virtio ring", "microvm level"),
    (84, "microvm: clock and entropy", "microvm level"),
];
