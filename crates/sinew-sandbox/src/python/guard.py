# Keeps a process that judges code of a model, or knows what it must not know, apart from that code. Part of
# the programs of Sinew that run in sandboxes; standard library, Python 3.8 or later.

import ast
import os
import signal
import sys

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


def processes():
    """Processes here but this one and the first: (number, its parent's)."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            try:
                with open("/proc/%s/stat" % name, "rb") as file:
                    # A name may hold spaces and brackets.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state != b"Z":
                found.append((int(name), int(parent)))
    return found


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
    """Kills what processes that have ended left behind, but for those of the numbers `keep`. Children of this process
    go on, unless what is to end keeps forking away."""
    for _ in range(20):
        left = [(number, parent) for number, parent in processes() if number not in keep]
        orphans = [number for number, parent in left if parent == 1]
        if not orphans:
            return
        if not keep and all(parent != os.getpid() for _, parent in left):
            break
        for number in orphans:
            try:
                os.kill(number, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
    kill_others()
