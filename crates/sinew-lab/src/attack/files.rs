//! Attacks on files and on `/proc`: cases 21 to 45 of the list.
//!
//! | cases | attack | what holds it |
//! |---|---|---|
//! | 21 | files and environment of the host | a root of its own with the system's folders read-only, an empty environment |
//! | 25, 27, 28 | hard links, device nodes, mounts | no capabilities, seccomp, a file system mounted without devices |
//! | 29, 30, 31 | chroot, namespaces, file handles | seccomp refuses the calls |
//! | 32, 33, 36 | writes to the system, set-user-id files, the program itself | read-only mounts, no-new-privileges |
//! | 37 | descriptors that leaked in | all but the three standard ones are closed before exec |
//! | 38, 39, 41, 42 | `/proc`, other processes, the supervisor | a PID namespace and a `/proc` of its own, undumpable processes |
//! | 43, 44, 45 | terminals, forged reports, signals | no terminal, one socket for one program, namespaces |
//!
//! `SECRET` is a file that only the host can read; printing its content is an escape, whatever else happens.

use crate::attack::{Case, Expect};

/// The cases in the order of their numbers.
///
/// Each case prints `DONE` if everything that it tried was refused, and `ESCAPED` with the first thing that
/// was not. The deadline of all is five seconds. An empty folder counts as refused, since engines of
/// containers cannot leave out some folders of the host.
///
/// - 21: opens the secret and folders that only the host has; then compares the names of its environment
///   with the five that a sandbox sets.
/// - 25, 27, 28: `link`, `mknod` and every call that mounts, old and new ones (`open_tree` to
///   `mount_setattr`).
/// - 29: the classic way out of a `chroot` needs the call itself, and is over if that is refused.
/// - 30, 31: `pivot_root`, seven kinds of namespaces by `unshare` and by `clone`, the eighth (time) by
///   `unshare`, `setns`, and file handles, which ignore the root of a process.
/// - 32: writes to the system's folders and to the files of `/proc` and `/sys` by which a program could make
///   the kernel run something as the host's first user (`core_pattern`, `modprobe`, `release_agent`).
/// - 33: a separate program with a set-user-id bit must run as the same user.
/// - 36: `/proc/self/exe` opened for writing is how a container overwrote its runtime (CVE-2019-5736).
/// - 37: from descriptor 3 on nothing may lead outside. The one socket by which a Python program reports its
///   end may be there; it has to be empty, one-way and without a named peer.
/// - 38, 39: the first process's root, memory and files, and the kernel's own interfaces. Kernel addresses
///   may be listed as zeros only.
/// - 41: at most two processes are to be seen: the first of the namespace and the program.
/// - 42: traces, reads the memory of, and changes the limits of its parent and of the first process.
/// - 43: types into a terminal, which would run in the caller's shell.
/// - 44: writes a forged report to each descriptor and exits with 7; 7 must be the ending.
/// - 45: sends three signals to the first process and to all that it can reach. It survives itself, and the
///   sibling answers afterwards.
pub(crate) const CASES: &[Case] = &[
    Case::new(21, "reads the host's files", Expect::Done, 5000, "
for p in (SECRET, '/etc/shadow', '/etc/gshadow', '/etc/ssh', '/root', '/home', '/var', '/run', '/boot', '/mnt', '/srv', '/opt', '/sys'):
    # An empty folder shows nothing: engines of containers cover what they cannot leave out.
    if os.path.exists(p) and not (os.path.isdir(p) and not os.listdir(p)): print('ESCAPED', p)
    tries(p, lambda: open(p).read())
print('DONE')
"),
    Case::new(21, "sees the host's environment", Expect::Done, 5000, "
for name in os.environ:
    if name not in ('PATH', 'HOME', 'TMPDIR', 'LANG', 'LC_CTYPE'): print('ESCAPED', name)
print('DONE')
"),
    Case::new(25, "hard link to a system file", Expect::Done, 5000, "
for p in ('/usr/bin/env', '/etc/passwd', '/dev/null'): tries(p, lambda: os.link(p, '/work/link'))
print('DONE')
"),
    Case::new(27, "makes device nodes", Expect::Done, 5000, "
import stat
for kind in (stat.S_IFBLK, stat.S_IFCHR):
    tries('mknod', lambda: os.mknod('/work/dev', kind | 0o666, os.makedev(254, 0)))
    tries('mknod tmp', lambda: os.mknod('/tmp/dev', kind | 0o666, os.makedev(1, 1)))
print('DONE')
"),
    Case::new(28, "mounts, remounts and unmounts", Expect::Done, 5000, "
refused('remount', sc(165, 0, b'/', 0, 32, 0))
refused('bind', sc(165, b'/', b'/work', 0, 4096, 0))
refused('tmpfs', sc(165, b'tmpfs', b'/tmp', b'tmpfs', 0, 0))
refused('umount', sc(166, b'/proc', 2))
for name, nr in (('open_tree', 428), ('move_mount', 429), ('fsopen', 430), ('fsconfig', 431), ('fsmount', 432), ('fspick', 433), ('mount_setattr', 442)):
    refused(name, sc(nr, -100, b'/', 0, 0, 0))
print('DONE')
"),
    Case::new(29, "leaves through chroot", Expect::Done, 5000, "
os.mkdir('/work/r')
refused('chroot', sc(161, b'/work/r'))
d = os.open('/', os.O_RDONLY)
for _ in range(64): os.chdir('..')
if os.path.exists(SECRET): print('ESCAPED')
print('DONE')
"),
    Case::new(30, "namespaces and roots of its own", Expect::Done, 5000, "
refused('pivot_root', sc(155, b'.', b'.'))
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000):
    refused('unshare', sc(272, flag))
    refused('clone', sc(56, flag | 17, 0, 0, 0, 0))
refused('unshare time', sc(272, 0x80))
for ns in ('mnt', 'pid', 'net', 'user'):
    try: fd = os.open('/proc/self/ns/' + ns, os.O_RDONLY)
    except OSError: continue
    refused('setns', sc(308, fd, 0))
print('DONE')
"),
    Case::new(31, "opens by file handle", Expect::Done, 5000, "
refused('open_by_handle_at', sc(304, -100, bytes(64), 0))
refused('name_to_handle_at', sc(303, -100, b'/', bytes(64), bytes(8), 0))
print('DONE')
"),
    Case::new(32, "writes to the system", Expect::Done, 5000, "
for p in ('/x', '/usr/x', '/usr/bin/env', '/etc/passwd', '/bin/x', '/lib/x', '/dev/x', '/proc/sys/kernel/core_pattern', '/proc/sys/kernel/modprobe', '/proc/self/oom_score_adj', '/proc/sysrq-trigger', '/sys/fs/cgroup/memory/release_agent', '/sys/kernel/uevent_helper', '/proc/self/uid_map'):
    def write():
        with open(p, 'w') as f: f.write('0')
    tries(p, write)
print('DONE')
"),
    Case::new(33, "leaves a set-user-id program", Expect::Done, 5000, "
import shutil, subprocess
shutil.copy('/usr/bin/id', '/work/id')
try: os.chmod('/work/id', 0o6755)
except OSError: pass
out = subprocess.run(['/work/id', '-u'], capture_output=True, text=True).stdout.strip()
if out != str(os.getuid()): print('ESCAPED', out)
print('DONE')
"),
    Case::new(36, "overwrites the program that runs it", Expect::Done, 5000, "
for p in ('/proc/self/exe', '/proc/1/exe'): tries(p, lambda: open(p, 'r+b'))
print('DONE')
"),
    Case::new(37, "leaked descriptors", Expect::Done, 5000, "
import socket
for fd in range(3, 64):
    try: target = os.readlink('/proc/self/fd/%d' % fd)
    except OSError: continue
    if fd == 3 and target.startswith('socket:'):
        # Where a Python program tells its end, one way.
        end = socket.socket(fileno=os.dup(fd))
        end.setblocking(False)
        try: got = end.recvmsg(64, 256)
        except OSError as e: got = (b'', [], 0, None)
        if got[0] or got[1] or end.getpeername(): print('ESCAPED', got)
        end.close()
        continue
    if not target.startswith(('/proc', '/usr')): print('ESCAPED', fd, target)
    tries('..', lambda: open('/proc/self/fd/%d/../../../%s' % (fd, SECRET)).read())
print(os.path.realpath('/proc/self/cwd'))
print('DONE')
"),
    Case::new(38, "reads the first process", Expect::Done, 5000, "
for f in (lambda: os.readlink('/proc/1/root'), lambda: os.readlink('/proc/1/cwd'), lambda: open('/proc/1/environ').read(), lambda: open('/proc/1/mem', 'rb').read(1), lambda: open('/proc/1/maps').read(), lambda: os.listdir('/proc/1/fd')):
    tries('/proc/1', f)
print('DONE')
"),
    Case::new(39, "kernel interfaces in proc", Expect::Done, 5000, "
for p in ('/proc/kcore', '/proc/kmsg', '/proc/sysrq-trigger', '/proc/sys/kernel/core_pattern', '/proc/sys/vm/drop_caches'):
    tries(p, lambda: os.close(os.open(p, os.O_WRONLY)))
for p in ('/proc/kcore', '/proc/kmsg', '/proc/kpagecount'): tries(p, lambda: open(p, 'rb').read(64))
try: addresses = {line.split()[0] for line in open('/proc/kallsyms')}
except OSError: addresses = set()
if addresses - {'0000000000000000', '(null)'}: print('ESCAPED', 'kernel addresses')
print('DONE')
"),
    Case::new(41, "sees other sandboxes' processes", Expect::Done, 5000, "
pids = [int(p) for p in os.listdir('/proc') if p.isdigit()]
if len(pids) > 2: print('ESCAPED', pids)
print('DONE')
"),
    Case::new(42, "reaches into its supervisor", Expect::Done, 5000, "
for name, nr in (('ptrace', 101), ('process_vm_readv', 310), ('process_vm_writev', 311), ('kcmp', 312), ('pidfd_getfd', 438), ('process_madvise', 440)):
    for pid in (1, os.getppid()): refused(name, sc(nr, 16 if nr == 101 else pid, pid, 0, 0, 0, 0))
for resource in (0, 6, 7): refused('prlimit', sc(302, 1, resource, bytes(16), 0))
print('DONE')
"),
    Case::new(43, "types into a terminal", Expect::Done, 5000, "
tries('/dev/tty', lambda: open('/dev/tty', 'r+b'))
for fd in (0, 1, 2): refused('TIOCSTI', sc(16, fd, 0x5412, b'x')); refused('TIOCLINUX', sc(16, fd, 0x541C, b'x'))
print('DONE')
"),
    Case::new(44, "forges the report of its end", Expect::Exited(7), 5000, "
import struct
forged = struct.pack('<IiIIQ', 0, 0, 0, 0, 0)
for fd in range(3, 256):
    try:
        os.write(fd, forged)
        if fd != 3: print('ESCAPED', fd)
    except OSError: pass
os.write(1, forged)
os._exit(7)
"),
    Case::new(45, "signals all it can", Expect::Done, 5000, "
import signal
for pid in (1, -1):
    for s in (9, 15, 19):
        try: os.kill(pid, s)
        except OSError: pass
print('DONE')
"),
];
