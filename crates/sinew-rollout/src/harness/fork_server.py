"""One interpreter that has imported what an agent imports; each episode is a fork of it.

Follows the guard of the sandbox's crate, and runs inside a sandbox. Arguments: port, script, the script's own arguments.
Lines of JSON over a connection to 127.0.0.1:port. With the script's arguments `--sinew-call NAME`, an episode is a call
of that function of it, and not a run of the whole script. In: {"id", "env", "cpu_s", "alone"} starts an episode, {"kill"}
ends one. Out: {"ready", "code"}, where `code` says what in the script runs code, then {"id", "code" or "signal",
"stdout", "stderr", "value"} for each that ended.

Episodes share a sandbox only where no code of a model runs: a fork that is not `alone` is ended before it starts a
process or runs a text as code, and its value is `!` and the reason. The value of a function comes on a descriptor that
no program started by the agent has, and no process may read the memory or the descriptors of another.
"""

import ast
import asyncio
import atexit
import fcntl
import gc
import importlib
import inspect
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types

MAX_OUTPUT = 1 << 20
PIECE = 1 << 16


def preload(script):
    """Imports what the script imports at its top level; what fails will fail in the fork."""
    with open(script, "rb") as file:
        tree = ast.parse(file.read(), script)
    for node in tree.body:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for name in names:
            try:
                importlib.import_module(name)
            except Exception:
                traceback.print_exc()
    gc.collect()
    gc.freeze()


CALL = "--sinew-call"
# Descriptor of the value of a function, as JSON, in a fork.
VALUE = 3


def is_own(script):
    """Whether a file is of the script's folder, not of an installed package."""
    folder = os.path.dirname(os.path.abspath(script)) + "/"
    return lambda file: file.startswith(folder) and "/site-packages/" not in file and "/dist-packages/" not in file


def code_of(script):
    """What in the script, or in modules of its folder, runs code: `file:line: what`; None if nothing does."""
    own = is_own(script)
    files = {getattr(m, "__file__", None) or "" for m in list(sys.modules.values())}
    for file in sorted({script, *(f for f in files if f.endswith(".py") and own(f))}):
        try:
            with open(file, "rb") as source:
                found = code_in(source.read())
        except OSError:
            continue
        if found is not None:
            return "%s:%d: %s" % (os.path.basename(file), *found)
    return None


def refuse(what):
    """Ends a fork that would start code next to other episodes."""
    os.write(VALUE, b"!" + what.encode())
    os._exit(os.EX_TEMPFAIL)


class Model:
    """Where an agent finds its model; as `sinew.Model`."""

    def __init__(self, base_url, api_key):
        self.base_url, self.api_key, self.name = base_url, api_key, "policy"
        self.openai = {"base_url": base_url, "api_key": api_key}
        self.anthropic = {"base_url": base_url.removesuffix("/v1"), "api_key": api_key}


def call(script, name):
    """Calls a function of the script for the episode's task; its value goes to a descriptor of its own."""
    function = runpy.run_path(script, run_name="sinew_agent").get(name)
    if not callable(function):
        raise SystemExit(f"{os.path.basename(script)} has no function {name}")
    # A function that `@rollout` wrapped is called without the wrapper.
    function = inspect.unwrap(function)
    base_url, api_key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    task = types.SimpleNamespace(
        id=os.environ["SINEW_TASK_ID"],
        kind=os.environ["SINEW_TASK_KIND"],
        prompt=os.environ["SINEW_TASK"],
        data=json.loads(os.environ.get("SINEW_TASK_DATA", "{}")),
    )
    values = {"task": task, "model": Model(base_url, api_key)}
    values |= {"base_url": base_url, "api_key": api_key}
    names = list(inspect.signature(function).parameters)
    unknown = [n for n in names if n not in values]
    if unknown:
        raise SystemExit(f"{name}: unknown parameters {unknown}; allowed: {', '.join(values)}")
    value = function(**{n: values[n] for n in names})
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    if isinstance(value, bool):
        value = {"reward": float(value), "success": value}
    elif isinstance(value, (int, float)):
        value = {"reward": value}
    text = json.dumps(value).encode()
    if len(text) > MAX_OUTPUT // 2:
        raise SystemExit(f"{name}: its value has {len(text)} bytes, allowed: {MAX_OUTPUT // 2}")
    while text:
        text = text[os.write(VALUE, text) :]


def episode(script, arguments, env, cpu_s, alone, pipes):
    """The fork: becomes the program, and never returns."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        # The numbers of the pipes are above those that they get.
        ends = [fcntl.fcntl(write, fcntl.F_DUPFD_CLOEXEC, 8) for _, write in pipes]
        for fd, end in zip((1, 2, VALUE), ends):
            os.dup2(end, fd, fd != VALUE)
        os.closerange(VALUE + 1, 4096)
        os.register_at_fork(after_in_child=lambda: os.close(VALUE))
        if not alone:
            watch(is_own(script), refuse)
        os.environ.update(env)
        sys.argv = [script, *arguments]
        try:
            if arguments[:1] == [CALL]:
                call(script, arguments[1])
            else:
                runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as e:
            if e.code is None:
                code = 0
            elif isinstance(e.code, int):
                code = e.code
            else:
                print(e.code, file=sys.stderr)
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stderr.flush()
        finally:
            os._exit(code & 0xFF)


class Server:
    def __init__(self, control, script, arguments):
        self.control = control
        self.script = script
        self.arguments = arguments
        self.selector = selectors.DefaultSelector()
        self.line = b""
        self.live = {}
        self.pids = {}
        read, write = os.pipe()
        os.set_blocking(write, False)
        os.set_blocking(read, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.wakeup = read
        self.selector.register(read, selectors.EVENT_READ, self.reap)
        self.selector.register(control, selectors.EVENT_READ, self.receive)

    def serve(self):
        self.tell({"ready": True, "code": code_of(self.script)})
        while True:
            for key, _ in self.selector.select():
                key.data(key.fd)

    def tell(self, message):
        self.control.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, _):
        data = self.control.recv(PIECE)
        if not data:
            os._exit(0)
        *lines, self.line = (self.line + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "kill" in message:
                self.kill(message["kill"])
            else:
                self.start(message)

    def start(self, message):
        pipes = []
        try:
            pipes += [os.pipe(), os.pipe(), os.pipe()]
            pid = os.fork()
        except OSError as e:
            # Other forks hold all processes or files: this episode fails, those that run continue.
            for end in sum(pipes, ()):
                os.close(end)
            why = "the episode did not start, as other episodes of its sandbox hold what it needs: %s" % e
            self.tell({"id": message["id"], "code": os.EX_OSERR, "stdout": "", "stderr": why, "value": ""})
            return
        if pid == 0:
            episode(
                self.script,
                self.arguments,
                message["env"],
                message["cpu_s"],
                message["alone"],
                pipes,
            )
        run = {"id": message["id"], "pid": pid, "output": [b"", b"", b""], "open": 3, "status": None}
        run["alone"] = message["alone"]
        self.live[message["id"]] = run
        self.pids[pid] = run
        for index, (read, write) in enumerate(pipes):
            os.close(write)
            os.set_blocking(read, False)
            drain = lambda fd, run=run, index=index: self.drain(fd, run, index)
            self.selector.register(read, selectors.EVENT_READ, drain)

    def kill(self, episode_id):
        run = self.live.get(episode_id)
        if run is not None and run["alone"]:
            kill_others()
        elif run is not None:
            try:
                os.killpg(run["pid"], signal.SIGKILL)
            except ProcessLookupError:
                pass

    def drain(self, fd, run, index):
        """Keeps the end of what an episode writes."""
        try:
            data = os.read(fd, PIECE)
        except BlockingIOError:
            return
        if data:
            run["output"][index] = (run["output"][index] + data)[-MAX_OUTPUT:]
            return
        self.selector.unregister(fd)
        os.close(fd)
        run["open"] -= 1
        self.ended(run)

    def reap(self, fd):
        try:
            os.read(fd, PIECE)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            run = self.pids.pop(pid, None)
            if run is not None:
                run["status"] = status
                # Processes that the program left behind hold its pipes open.
                if run["alone"]:
                    kill_others()
                try:
                    os.killpg(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
                self.ended(run)

    def ended(self, run):
        if run["open"] or run["status"] is None:
            return
        del self.live[run["id"]]
        status = run["status"]
        message = {
            "id": run["id"],
            "stdout": run["output"][0].decode(errors="replace"),
            "stderr": run["output"][1].decode(errors="replace"),
            "value": run["output"][2].decode(errors="replace"),
        }
        if os.WIFSIGNALED(status):
            message["signal"] = os.WTERMSIG(status)
        else:
            message["code"] = os.WEXITSTATUS(status)
        self.tell(message)


def main():
    hide()
    port, script, *arguments = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(script))
    preload(script)
    control = socket.create_connection(("127.0.0.1", int(port)), timeout=30)
    control.settimeout(None)
    Server(control, script, arguments).serve()


main()
