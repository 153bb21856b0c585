# Keeps a process that judges code of a model, or knows what it must not know, apart from that code. Part of
# the programs of Sinew that run in sandboxes; standard library, Python 3.8 or later.

import ast
import os
import signal
import sys
import time

#: Modules that start processes.
STARTERS = ("subprocess", "multiprocessing", "pty", "pexpect")
#: Functions that start processes or run a text as code: names of modules, and how their names begin.
CALLS = {
    "os": ("system", "popen", "fork", "spawn", "posix_spawn", "exec"),
    "asyncio": ("create_subprocess",),
    "concurrent.futures": ("ProcessPoolExecutor",),
}
#: Events of the interpreter before a process starts (PEP 578).
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")
#: Programs by which packages ask what system this is. They run no code of anybody.
FACTS = ("lsb_release", "uname", "ldconfig")


def hide():
    """Lets no other process of this user read the memory, the environment or the descriptors of this one. Forks
    inherit it; a program that is started does not. It cannot be undone inside of a sandbox."""
    try:
        import ctypes
    except ImportError:
        raise OSError("the interpreter lacks the module ctypes, by which its memory is hidden") from None
    if ctypes.CDLL(None, use_errno=True).prctl(4, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the memory of the interpreter cannot be hidden")


def code_in(source):
    """The first line of a module, and what there starts a process or runs a text as code; None without any."""
    try:
        nodes = ast.walk(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError):
        return None
    found = []
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] in STARTERS]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            starts = CALLS.get(node.module, ())
            names = [alias.name for alias in node.names if starts and alias.name.startswith(starts)]
            if node.module.partition(".")[0] in STARTERS:
                names = [node.module]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [n for n in ("exec", "eval") if n == node.func.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            starts = CALLS.get(node.value.id, ())
            names = [node.attr] if starts and node.attr.startswith(starts) else []
        found.extend((node.lineno, name) for name in names)
    return min(found, default=None)


def watch(own, started):
    """Calls `started(what)` before this process starts another one, and before a file for which `own(file)` holds
    runs a text as code. What that raises keeps it from happening."""

    def hook(event, args):
        if event == "exec":
            if own(sys._getframe(1).f_code.co_filename):
                started("exec")
        elif event in STARTS:
            if event == "subprocess.Popen" and os.path.basename(os.fsdecode(args[0])) in FACTS:
                return
            started(event)

    sys.addaudithook(hook)


def parents():
    """Numbers of the processes that can be seen, with those of their parents. One that hides is not among them."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as file:
                    # A name may hold spaces and brackets.
                    found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                pass
    return found


def children():
    """Numbers of the children of this process, ended ones among them."""
    found = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            with open("/proc/self/task/%s/children" % thread) as file:
                found.update(map(int, file.read().split()))
        except OSError:
            pass
    return found


def is_alone():
    """Whether no process is here but this one and the first."""
    try:
        os.kill(-1, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def processes():
    """Numbers of all processes here but this one and the first, of those too that hide."""
    if is_alone():
        return set()
    import ctypes

    signal_thread = ctypes.CDLL(None).tgkill
    with open("/proc/loadavg") as file:
        last = int(file.read().split()[-1])
    # Only the first thread of a process has its number.
    return {n for n in range(2, last + 1) if n != os.getpid() and signal_thread(n, n, 0) == 0}


def confined():
    """Whether this process stands in a sandbox: it can gain no privileges, and a filter checks its system calls."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return fields.get("NoNewPrivs", "").strip() == "1" and fields.get("Seccomp", "").strip() == "2"


def kill_others():
    """Kills all processes of this user here but this one. The kernel does it in one step, so none can fork away."""
    if not confined():
        raise RuntimeError("processes are ended inside of a sandbox only")
    try:
        os.kill(-1, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def end_orphans(keep=()):
    """Kills what processes that have ended left behind, but for those of the numbers `keep`, and waits until it is gone.
    Children of this process and what they started go on, unless what is to end keeps forking away."""
    for turn in range(200):
        left = processes()
        held = children() | set(keep) if left else set()
        seen, grown = parents() if held else {}, held
        while grown:
            grown = {n for n, parent in seen.items() if parent in grown} - held
            held |= grown
        orphans = left - held
        if not orphans:
            return
        if not held or turn == 100:
            kill_others()
        for number in orphans if held else ():
            try:
                os.kill(number, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        # A process that is killed is not gone at once.
        time.sleep(0.004)
