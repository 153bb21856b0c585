"""Environments in Python: a class whose methods are the tools of the model.

A recipe names the class (`[env] type = "python"`, `module = "shop.py:Shop"`). Sinew runs it in sandboxed
worker processes, one instance for each episode::

    from sinew import Env, tool

    class Shop(Env):
        def start(self, task):
            self.cart = []

        @tool
        def add(self, item: str, count: int = 1):
            "Put an item in the cart."
            self.cart += [item] * count

        def reward(self, task):
            return self.cart == task.want

Python 3.8 or later, standard library only. Workers carry this file, so that nothing is installed there.
"""

from __future__ import annotations

from typing import Any, Callable, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])


class ToolError(Exception):
    """An error that the model made. Its text is the observation, and the episode continues."""


class Unscored(Exception):
    """A missing score with its reason, returned or raised. It is never replaced with 0."""

    def __init__(self, reason: str = "no reason was given") -> None:
        super().__init__(str(reason))


class Step:
    """Observation of a turn or a tool call, with a reward of the turn. `done` ends the episode.

    `fresh` takes all that came before out of the model's context: from here on it sees the system message and the
    observation, and what follows. So an environment can ask for what the model kept, and not for what it can still read.
    """

    def __init__(self, observation: Any = None, reward: float = 0.0, done: bool = False, fresh: bool = False) -> None:
        self.observation = observation
        self.reward = reward
        self.done = done
        self.fresh = fresh


class Done(Step):
    """Ends the episode at once: later calls of the same turn do not run. The model does not see `value`."""

    def __init__(self, value: Any = None, reward: float = 0.0) -> None:
        super().__init__(value, reward, True)


class Ran:
    """How code ended, and what it wrote. `exit` is its exit code; `None` if it ended otherwise, as `ending` says:
    `timeout`, `out_of_memory`, `signalled 9`, ... `cut`: it wrote more than is kept."""

    def __init__(self, exit: int | None, ending: str, stdout: str, stderr: str, cut: bool = False) -> None:
        self.exit, self.ending, self.stdout, self.stderr, self.cut = exit, ending, stdout, stderr, cut


def run_code(code: str, files: dict[str, str] | None = None, stdin: str = "", timeout_s: float = 5.0) -> Ran:
    """Runs Python code of a model in a fresh sandbox of its own, where it finds `files` in its folder `/work`, and nothing
    of the environment, its module, its memory or its processes. What it starts ends with it.

    That is so in workers. In plain Python, as in tests of a class, the code runs in a child process without a sandbox.
    """
    import os
    import subprocess
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for name, text in (files or {}).items():
            with open(os.path.join(folder, name), "w") as file:
                file.write(text)
        words = [sys.executable, "-I", "-S", "-c", code]
        try:
            done = subprocess.run(
                words, input=stdin.encode(), capture_output=True, timeout=timeout_s, cwd=folder
            )
        except subprocess.TimeoutExpired:
            return Ran(None, "timeout", "", "")
    stdout, stderr = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    if done.returncode < 0:
        return Ran(None, f"signalled {-done.returncode}", stdout, stderr)
    return Ran(done.returncode, f"exited {done.returncode}", stdout, stderr)


def ask_user(messages: list[dict[str, str]], seed: int = 0) -> str:
    """The next message of the simulated user of the recipe's table `[user]`. In `messages` (dicts with `role` and
    `content`) the user is the assistant: they begin with its instructions as the system message, and end with what the
    model said, as a message of the role `user`.

    That is so in workers of a recipe with `[user]`. Without one, and in plain Python, it raises an error: tests of a
    class set another function.
    """
    raise RuntimeError("there is no simulated user outside of a worker: set a function of your own in its place")


class Env:
    """Base class of environments. An instance is used for one episode.

    All methods are optional and may be `async`. Parameters are bound by name: `task`, its columns, `seed`,
    and in `reward` also `output`, `reasoning`, `calls` and `messages`.

    - `system`: text of the system message.
    - `runs_code`: whether code of the model runs, in a process or by `exec`. `True`: an episode has a worker of its
      own, which ends with it if code ran. `False`: episodes share workers, whatever is started. Left out: the
      source of the class decides, and where it does not show, code does not start in a worker that is shared.
    - `start(self, task)`: begins the episode. A returned text follows the prompt; a returned list of messages
      replaces system message and prompt.
    - methods with `@tool`: the tools of the model.
    - `offered(self)`: tools of this episode alone, after `start`: dicts with `name`, `description`, `parameters`
      (a JSON Schema) and `call`, a function of the dict of arguments, which are unchecked.
    - `step(self, text)`: answers a turn without tool calls. Without it, such a turn ends the episode.
    - `reward(self, task)`: score of the episode: a bool, a number, `None`, `Unscored(...)`, or a dict with
      the key `reward` whose other entries are metrics.
    - `state(self)`: a JSON value that is equal exactly in equal states.
    - `snapshot(self)` and `restore(self, snapshot)`: all of the state as a JSON value, and an instance that goes
      on from it in place of `start`, when another episode has ended the worker.
    - `close(self)`: called at the end, also after errors.
    - `tasks(split, seed)` (static): rows of tasks. `gold(task)` (static): actions that solve a task.
    - `setup_worker(cls)` (class method): called once in each worker process.
    """

    system: str | None = None
    runs_code: bool | None = None


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, name: str | None = None) -> Callable[[F], F]: ...
def tool(function: Any = None, *, name: str | None = None) -> Any:
    """Makes a method a tool. Type hints give its JSON schema, the first paragraph of the docstring its
    description. Texts of arguments come from `Annotated[type, "text"]` or from an `Args:` section."""

    def mark(f: Any) -> Any:
        f.__sinew_tool__ = name or f.__name__
        return f

    return mark if function is None else mark(function)
