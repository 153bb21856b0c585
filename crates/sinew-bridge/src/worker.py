"""The program of a worker: runs the environments and the reward functions of a user.

It follows `guard.py`, `schema.py` and `rows.py`, and runs inside a sandbox, as `python -c PROGRAM PORT`. It connects to
127.0.0.1:PORT, where the host accepts one connection. Frames in both directions are JSON (UTF-8) after their
length in four bytes, big-endian. The first frame of the host describes the work. Each later one has an `id`,
which the answer repeats. Answers come in any order.

Standard output and error are not part of the protocol: what the user's code prints is kept for the answer of
the call that printed it, up to a limit.

Threads: the one that holds the lock `reading` takes the next frame, releases the lock and runs the call.
Coroutines run on one event loop in a thread of its own. Python 3.8 or later, standard library only.
"""

import asyncio
import collections.abc
import concurrent.futures
import contextvars
import errno
import faulthandler
import hashlib
import importlib
import importlib.abc
import importlib.util
import inspect
import io
import json
import os
import socket
import struct
import sys
import threading
import time
import traceback
import types

#: Maximum characters of one observation, of one error message, and of what one call prints.
MAX_OBSERVATION, MAX_MESSAGE, MAX_PRINTED = 64 << 10, 2000, 4 << 10

#: Maximum characters of a snapshot of an episode.
MAX_SNAPSHOT = 1 << 20
#: Maximum length of a state at the end that rewards of the recipe see, as JSON.
MAX_STATE = 256 << 10

#: Folders inside of the sandbox and the folders of the host that they show, for messages.
PLACES = []

# Code of the model: what a call of an episode or a reward starts, or runs from a text.

#: Whether all targets are loaded, whether several episodes share this worker, and whether code ran in it.
LOADED, SHARED, RAN_CODE = [False], [False], [False]
#: Processes that were there when everything was loaded.
HELPERS = set()
#: What runs now is the author's own: rows of tasks, actions of a gold policy.
TRUSTED = contextvars.ContextVar("trusted", default=False)


def is_own(file):
    """Whether a file is the user's, not one of installed packages."""
    return any(
        file.startswith(inside + "/") and not host.endswith(("site-packages", "dist-packages"))
        for inside, host in PLACES
    )


def place_of_code(thing):
    """Where the modules of a function, or of a class and its bases, run code, as `file:line: what`; None if they do
    not. Its attribute `runs_code` decides, if it has one."""
    said = getattr(thing, "runs_code", None)
    if said is not None:
        return "%s: runs_code" % shown_place(thing) if said else None
    # Modules of the standard library start no code of a model (their names are known from Python 3.10 on).
    known = {"sinew.env", *getattr(sys, "stdlib_module_names", ("builtins",))}
    names = {kind.__module__ for kind in getattr(thing, "__mro__", (thing,))}
    bases = [sys.modules.get(name) for name in names if not {name, name.partition(".")[0]} & known]
    folders = tuple(os.path.dirname(file_of(base)) + "/" for base in bases if is_own(file_of(base)))
    near = [module for module in list(sys.modules.values()) if file_of(module).startswith(folders) and is_own(file_of(module))]
    for module in sorted({*bases, *near} - {None}, key=file_of):
        try:
            found = code_in(module.__spec__.loader.get_source(module.__name__) or "")
        except (AttributeError, ImportError):
            continue
        if found is not None:
            return "%s:%d: %s" % (shown_path(file_of(module)), *found)
    return None


def file_of(module):
    return getattr(module, "__file__", None) or ""


def starts_code(what, server):
    """Before a process starts, or a text runs as code. It does not where others share this worker."""
    if not LOADED[0] or TRUSTED.get() or server.forked:
        return
    if server.harmless:
        return
    if SHARED[0] or any(t.is_async and not t.code for t in server.running()):
        raise RuntimeError(
            "%s: other calls share this worker, and what code starts could reach them: set `runs_code = True` on "
            "the class or function, which gives it workers of its own; `False` if no code of the model runs" % what
        )
    RAN_CODE[0] = True


# Errors.


def shown_path(path):
    """A path as it is on the host."""
    for inside, host in PLACES:
        if path == inside or path.startswith(inside.rstrip("/") + "/"):
            return host + path[len(inside) :]
    return path


def cut(text, limit):
    return text if len(text) <= limit else text[:limit] + "... [%d more characters]" % (len(text) - limit)


def place_of_error(error):
    """The innermost line of the user's code on the way to an error, as `file:line`."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        return "%s:%s" % (shown_path(error.filename), error.lineno)
    own = [f for f in frames if any(f.filename.startswith(inside + "/") for inside, _ in PLACES)]
    last = (own or [f for f in frames if f.filename != "<string>"] or [None])[-1]
    return None if last is None else "%s:%s" % (shown_path(last.filename), last.lineno)


def described(error):
    """An exception as the host receives it."""
    message = str(error)
    if isinstance(error, SystemExit):
        message = "the code called exit(%s)" % ("" if error.code is None else error.code)
    for inside, host in PLACES:
        message = message.replace(inside + "/", host + "/")
    no_process = isinstance(error, OSError) and error.errno == errno.EAGAIN
    return {
        "type": type(error).__name__,
        "message": cut(message, MAX_MESSAGE),
        "place": place_of_error(error),
        # The limit of processes is reached: what holds them is not known, so the worker is of no use.
        "fatal": no_process or (isinstance(error, RuntimeError) and message == "can't start new thread"),
    }


def sentence(error):
    """An exception in one line: place, type, message."""
    d = described(error)
    first = d["message"].split("\n")[0]
    if isinstance(error, (BindError, SchemaError)):
        return first
    text = "%s: %s" % (d["type"], first) if first else d["type"]
    return "%s: %s" % (d["place"], text) if d["place"] else text


def reason(error, thing):
    """An exception as the reason of a missing score, with the place of `thing` if it has none of its own."""
    text = sentence(error)
    if place_of_error(error) or isinstance(error, (BindError, SchemaError)):
        return text
    return "%s: %s" % (shown_place(thing), text)


# Captures the output of the user's code.

PRINTED = contextvars.ContextVar("printed", default=None)


class Output(io.TextIOBase):
    """Standard output of the user's code."""

    encoding = "utf-8"

    def writable(self):
        return True

    def write(self, text):
        into = PRINTED.get()
        if into is not None and len(into[0]) < MAX_PRINTED:
            into[0] += text[: MAX_PRINTED - len(into[0])]
        return len(text)


# Calls of the user's code.

LOOP = None
LOOP_LOCK = threading.Lock()


def loop():
    """The event loop of all coroutines."""
    global LOOP
    with LOOP_LOCK:
        if LOOP is None:
            LOOP = asyncio.new_event_loop()
            LOOP.create_task(beat())
            threading.Thread(target=LOOP.run_forever, daemon=True).start()
    return LOOP


#: Seconds in which some coroutine held the event loop, so far.
BLOCKED = [0.0]
#: Seconds between two looks at the loop, and the delay from which on a coroutine counts as held up.
BEAT_S, LATE_S = 0.05, 0.1


async def beat():
    """Measures how long coroutines hold the loop."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(BEAT_S)
        BLOCKED[0] += max(0.0, time.monotonic() - before - BEAT_S)


def finished(value, timeout_s=None):
    """The value, awaited if it is a coroutine."""
    if not inspect.isawaitable(value):
        return value

    async def wait():
        return await asyncio.wait_for(value, TIMEOUT_S if timeout_s is None else timeout_s)

    return asyncio.run_coroutine_threadsafe(wait(), loop()).result()


#: Seconds of one coroutine. The host kills workers that take longer.
TIMEOUT_S = 1e9


class Record(dict):
    """A dict whose keys are attributes, too."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError("no field %r; there are: %s" % (name, ", ".join(self) or "none")) from None


def task_of(task):
    """A task with its columns as attributes. The fields of every task hide columns of the same name."""
    data = task.get("data")
    columns = dict(data) if isinstance(data, dict) else {}
    return Record(columns, **task)


def columns_of(task):
    """What a parameter can be bound to because the task has it."""
    return dict(task, task=task)


def parameters_of(function):
    """Names and whether each is needed, and whether the function takes all names."""
    names, everything = [], False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.VAR_KEYWORD:
            everything = True
        elif p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY):
            raise BindError(
                "%s: parameter %s of %s has no name to bind by"
                % (place_of(function), p.name, function.__name__)
            )
        else:
            names.append((p.name, p.default is p.empty))
    return names, everything


class BindError(TypeError):
    """A parameter without a value. The text begins with file and line."""


class Bound:
    """A function whose arguments are bound by name."""

    def __init__(self, function, skip_self=False):
        self.function = function
        names, self.everything = parameters_of(function)
        self.names = names[1:] if skip_self else names

    def __call__(self, available, *before):
        if self.everything:
            return self.function(*before, **available)
        given = {}
        for name, needed in self.names:
            if name in available:
                given[name] = available[name]
            elif needed:
                # Only here: it is not needed in a run.
                import difflib

                near = difflib.get_close_matches(name, sorted(available), 1)
                raise BindError(
                    "%s: no value for the parameter %s of %s%s; valid names: %s"
                    % (
                        place_of(self.function),
                        name,
                        self.function.__name__,
                        "; did you mean `%s`?" % near[0] if near else "",
                        ", ".join(sorted(available)),
                    )
                )
        return self.function(*before, **given)


# Targets: what a recipe names.


def load(target):
    """The class or function of a target."""
    if target["source"]:
        module = types.ModuleType(target["module"])
        exec(compile(target["source"], target["module"] + ".py", "exec"), vars(module))
    elif target["file"]:
        name = "user_%s" % hashlib.blake2b(target["file"].encode(), digest_size=8).hexdigest()
        module = sys.modules.get(name)
        if module is None:
            spec = importlib.util.spec_from_file_location(name, target["file"])
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
    else:
        module = importlib.import_module(target["module"])
    found = module
    for part in target["name"].split("."):
        if not hasattr(found, part):
            kinds = type if target["kind"] == "env" else types.FunctionType
            own = [(n, v) for n, v in vars(module).items() if isinstance(v, kinds)]
            names = [n for n, v in own if v.__module__ == module.__name__]
            file = shown_path(getattr(module, "__file__", None) or target["module"])
            known = ", ".join(names) or "nothing of its kind"
            raise AttributeError("%s has no %s; it defines: %s" % (file, target["name"], known))
        found = getattr(found, part)
    set_options(found, target["options"])
    return found


def set_options(cls, options):
    """Sets attributes of a class of environments to what the recipe says."""
    own = {}
    for base in reversed(cls.__mro__ if options else ()):
        own.update(vars(base))
    settable = {n: v for n, v in own.items() if is_option(n, v)}
    for name, value in options.items():
        where = "%s: options.%s" % (shown_place(cls), name)
        if name not in settable:
            known = ", ".join(sorted(settable)) or "none"
            raise AttributeError("%s: the class has no such option; it has: %s" % (where, known))
        default = settable[name]
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if default is not None and type(value) is not type(default):
            kinds = type(value).__name__, type(default).__name__
            raise TypeError("%s = %r: it is of type %s, expected %s" % (where, value, *kinds))
        setattr(cls, name, value)


def is_option(name, value):
    """Whether a recipe can set an attribute: plain data that is not the class's own business."""
    plain = value is None or isinstance(value, (bool, int, float, str, list, dict))
    return plain and not name.startswith("_")


#: Methods of a class of environments that an episode calls.
METHODS = ("start", "reset", "offered", "step", "reward", "state", "snapshot", "restore", "close")


class EnvTarget:
    """A class of environments."""

    def __init__(self, cls):
        if not isinstance(cls, type):
            raise TypeError("%r is no class: an environment is a class" % (cls,))
        self.cls = self.thing = cls
        self.is_async = False
        self.tools = tools_of(cls)
        rows = getattr(cls, "tasks", None)
        self.rows = None if rows is None else RowSource(rows, shown_place(cls))
        self.methods = {}
        for name in METHODS:
            function = getattr(cls, name, None)
            if function is not None:
                self.methods[name] = Bound(function, skip_self=True)
        if "start" not in self.methods and "reset" in self.methods:
            self.methods["start"] = self.methods["reset"]
        if not self.tools and not {"offered", "step", "reward"} & set(self.methods):
            raise TypeError(
                "%s: class %s has no @tool method, no step and no reward: a model could do nothing in it"
                % (place_of(cls), cls.__name__)
            )
        if ("snapshot" in self.methods) != ("restore" in self.methods):
            raise TypeError("%s: snapshot and restore belong together: one is missing" % place_of(cls))
        setup = getattr(cls, "setup_worker", None)
        if setup is not None:
            finished(setup())

    def describe(self):
        tools = [
            {"name": t.name, "description": t.description, "parameters": t.parameters}
            for t in self.tools.values()
        ]
        return {
            "tools": tools,
            "offered": "offered" in self.methods,
            "state": "state" in self.methods,
            "snapshots": "snapshot" in self.methods,
            "gold": hasattr(self.cls, "gold"),
            "tasks": self.rows is not None,
            "splits": self.rows is not None and self.rows.splits,
            "place": shown_place(self.cls),
            "code": self.code,
        }

    def page(self, split, seed, offset):
        """Some rows of a split, from `offset`."""
        return self.rows.page(split, seed, offset)

    def gold(self, task):
        task = task_of(task)
        actions = finished(Bound(self.cls.gold)(columns_of(task)))
        return {"actions": [_action(a) for a in actions]}


def _action(action):
    """An action of a gold policy: text, (tool, arguments), or a list of such pairs."""
    if isinstance(action, str):
        return {"text": action, "calls": []}
    calls = action if isinstance(action, list) else [action]
    if not all(isinstance(c, tuple) and len(c) == 2 and isinstance(c[1], dict) for c in calls):
        raise TypeError(
            "gold gives %r: expected a text, (tool, {arguments}), or a list of such pairs" % (action,)
        )
    return {"text": "", "calls": [{"name": name, "arguments": arguments} for name, arguments in calls]}


class RewardTarget:
    """A reward function."""

    def __init__(self, function):
        if not callable(function):
            raise TypeError("%r is no function" % (function,))
        self.bound = Bound(function)
        self.function = self.thing = function
        self.is_async = inspect.iscoroutinefunction(function)
        self.group = any(name == "group" for name, _ in self.bound.names)

    def describe(self):
        return {
            "parameters": [{"name": name, "needed": needed} for name, needed in self.bound.names],
            "everything": self.bound.everything,
            "async": self.is_async,
            "group": self.group,
            "place": shown_place(self.function),
            "code": self.code is not None,
        }

    def bind(self, request):
        """The arguments of a call, and what makes scores of its value."""
        members = [_member(sample) for sample in request["samples"]]
        names = columns_of(members[0]["task"])
        if request["compares"]:
            a, b = members
            return dict(names, a=a, b=b), lambda value: [scored(lambda: preferred(value, a, b))]
        if self.group:
            return dict(names, group=members), lambda value: of_group(value, len(members))
        return dict(names, **members[0]), lambda value: [scored(lambda: value)]

    def named(self, error, timeout_s):
        """An error of this function as the reason of a missing score."""
        if isinstance(error, (asyncio.TimeoutError, concurrent.futures.TimeoutError)):
            return "%s: it took longer than %g s" % (shown_place(self.function), timeout_s)
        return reason(error, self.function)

    def failed(self, request, error):
        own = isinstance(error, sinew.Unscored)
        why = str(error) if own else self.named(error, request["timeout_s"])
        # A comparison of two samples has one value.
        count = 1 if request["compares"] else len(request["samples"])
        return {"scores": [{"unscored": why}] * count, "fatal": described(error)["fatal"]}

    def score(self, request):
        try:
            given, results = self.bind(request)
            value = finished(self.bound(given), request["timeout_s"])
            return {"scores": self.checked(results(value)), "fatal": False}
        except BaseException as e:
            return self.failed(request, e)

    def checked(self, scores):
        for score in scores:
            if "wrong" in score:
                score["unscored"] = "%s: %s" % (shown_place(self.function), score.pop("wrong"))
        return scores

    async def score_async(self, request):
        timeout_s, began, blocked = request["timeout_s"], time.monotonic(), BLOCKED[0]
        try:
            given, results = self.bind(request)
            value = await asyncio.wait_for(self.bound(given), timeout_s)
            return {"scores": self.checked(results(value)), "fatal": False}
        except asyncio.TimeoutError as e:
            # Time in which another coroutine held the loop is not this one's.
            late = time.monotonic() - began > timeout_s + LATE_S
            if late or BLOCKED[0] - blocked > LATE_S:
                return {"blocked": True, "fatal": False}
            return self.failed(request, e)
        except BaseException as e:
            return self.failed(request, e)


def of_group(value, members):
    """Scores of the members of a group."""
    if not isinstance(value, (list, tuple)) or len(value) != members:
        got = "%d values" % len(value) if isinstance(value, (list, tuple)) else type(value).__name__
        raise TypeError("it returned %s for a group of %d samples: one value each is needed" % (got, members))
    return [scored(lambda v=v: v) for v in value]


def preferred(value, a, b):
    """The probability that `a` is better than `b`."""
    if value is a or (isinstance(value, str) and value == "a"):
        return 1.0
    if value is b or (isinstance(value, str) and value == "b"):
        return 0.0
    if value is None or isinstance(value, sinew.Unscored):
        return value
    if isinstance(value, (str, collections.abc.Mapping)) or not hasattr(type(value), "__float__"):
        raise TypeError(
            "it returned %s: return a, b, a probability of a (0 to 1), or None" % type(value).__name__
        )
    if not 0.0 <= float(value) <= 1.0:
        raise ValueError("it returned %s: the probability of a is 0 to 1" % float(value))
    return float(value)


def shown_place(thing):
    file, _, line = place_of(thing).rpartition(":")
    return "%s:%s" % (shown_path(file), line)


def _member(sample):
    return Record(
        task=task_of(sample["task"]),
        output=sample.get("output", ""),
        reasoning=sample.get("reasoning"),
        messages=[Record(m) for m in sample.get("messages", ())],
        calls=[Record(c) for c in sample.get("calls", ())],
        metrics=Record(sample.get("metrics", {})),
        env=Record(sample.get("env", {})),
    )


def scored(value):
    """A score, or `wrong` with the reason why a value is none."""
    try:
        return score_of(value())
    except (TypeError, ValueError) as e:
        return {"wrong": str(e)}


# Episodes.


#: Maximum number of tools that an episode has for itself.
MAX_OFFERED = 256


def offered_tool(offer):
    """A tool of one episode, from the dict of `offered`."""
    keys = {"name": str, "description": str, "parameters": dict}
    wrong = not isinstance(offer, collections.abc.Mapping) or not callable(offer.get("call"))
    if wrong or any(not isinstance(offer.get(key), kind) for key, kind in keys.items()):
        raise TypeError(
            "offered gives %r: expected dicts with name, description, parameters (a JSON Schema) and call" % (offer,)
        )
    if not offer["name"] or len(offer["name"]) > 128:
        raise TypeError("offered: a tool's name has 1 to 128 characters, not %r" % offer["name"])
    return Record(offer)


class Session:
    """One episode: an instance of the user's class."""

    def __init__(self, target, task):
        self.target = target
        self.task = task_of(task)
        self.lock = threading.Lock()
        self.object = target.cls()
        self.output = ""
        self.reasoning = None
        self.calls = []
        self.messages = []
        self.rewarded = False
        self.outcome = None
        # Tools of this episode alone, by name.
        self.offered = {}
        # Observations of this turn since the model's context began anew; none: it did not.
        self.fresh = []

    def call(self, method, available=None):
        bound = self.target.methods[method]
        return finished(bound(self.names() if available is None else available, self.object))

    def names(self):
        said = dict(output=self.output, reasoning=self.reasoning, calls=self.calls, messages=self.messages)
        return dict(columns_of(self.task), **said)

    def state_text(self):
        if "state" not in self.target.methods:
            return None
        return json.dumps(self.call("state"), sort_keys=True, default=_jsonable)

    def state(self):
        text = self.state_text()
        if text is None:
            return None
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def open(self):
        said = self.call("start", columns_of(self.task)) if "start" in self.target.methods else None
        system = getattr(self.object, "system", None)
        if isinstance(said, (list, tuple)):
            self.messages = [_message(m) for m in said]
        elif said is None or isinstance(said, str):
            text = "\n\n".join(part for part in (self.task.get("prompt"), said) if part)
            self.messages = [Record(role="system", content=system)] if system else []
            self.messages.append(Record(role="user", content=text))
        else:
            raise TypeError(
                "start returned %s: return None, a text or a list of messages" % type(said).__name__
            )
        begin = {"messages": list(self.messages), "state": self.state(), "snapshot": self.snapshot()}
        return dict(begin, tools=self.offer())

    def offer(self):
        """Takes the tools of this episode. They are described as the model sees them."""
        if "offered" not in self.target.methods:
            return []
        for offer in self.call("offered", columns_of(self.task)):
            made = offered_tool(offer)
            if made.name in self.target.tools or made.name in self.offered:
                raise TypeError("offered: two tools are called %s" % made.name)
            self.offered[made.name] = made
        if len(self.offered) > MAX_OFFERED:
            raise TypeError("offered gives %d tools; allowed: %d" % (len(self.offered), MAX_OFFERED))
        tools = self.offered.values()
        return [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools]

    def snapshot(self):
        """The episode as text, for another worker. None without snapshots, or if it is too long."""
        if "snapshot" not in self.target.methods:
            return None
        said = [self.output, self.reasoning, self.calls, self.messages, self.rewarded]
        kept = [self.call("snapshot", {}), *said]
        text = json.dumps(kept, allow_nan=False)
        return text if len(text) <= MAX_SNAPSHOT else None

    def restore(self, text):
        value, self.output, self.reasoning, calls, messages, self.rewarded = json.loads(text)
        self.calls, self.messages = [Record(c) for c in calls], [Record(m) for m in messages]
        self.call("restore", dict(columns_of(self.task), snapshot=value))
        self.offer()
        return {"messages": [], "state": self.state(), "snapshot": text}

    def run_tool(self, call):
        """Observation, whether it is an error, reward, and whether the episode ends."""
        name, arguments = call["name"], call["arguments"]
        tool, offered = self.target.tools.get(name), self.offered.get(name)
        try:
            if offered is not None:
                if not isinstance(arguments, dict):
                    raise sinew.ToolError("the arguments of %s are no object" % name)
                return self.step_of(finished(offered.call(arguments)))
            if tool is None:
                known = ", ".join([*self.target.tools, *self.offered]) or "none"
                raise sinew.ToolError("there is no tool %s; the tools are: %s" % (name, known))
            arguments = tool.arguments(arguments)
            return self.step_of(finished(getattr(self.object, tool.attribute)(**arguments)))
        except sinew.ToolError as e:
            return self.seen("Error: %s" % e), True, 0.0, False

    def seen(self, text):
        """Notes an observation behind a context that began anew in this turn."""
        if self.fresh:
            self.fresh.append(text)
        return text

    def step_of(self, value):
        if not isinstance(value, sinew.Step):
            return self.seen(text_of(value)), False, 0.0, False
        reward = _finite(value.reward, "the reward of a step")
        self.rewarded = self.rewarded or reward != 0.0
        text = text_of(value.observation)
        if value.fresh:
            self.fresh = [text]
        else:
            self.seen(text)
        return text, False, reward, bool(value.done)

    def renewed(self):
        """Messages of a context that began anew in this turn. None: it goes on."""
        if not self.fresh:
            return None
        system = getattr(self.object, "system", None)
        said = {"role": "user", "content": cut("\n".join(self.fresh), MAX_OBSERVATION)}
        return ([{"role": "system", "content": system}] if system else []) + [said]

    def step(self, turn):
        self.output, self.reasoning = turn["text"], turn.get("reasoning")
        said = Record(role="assistant", content=turn["text"])
        if self.reasoning is not None:
            said["reasoning"] = self.reasoning
        if turn["calls"]:
            said["tool_calls"] = turn["calls"]
        self.messages.append(said)
        self.fresh = []
        answer = {"results": [], "reward": 0.0, "done": False}
        for call in turn["calls"]:
            call = Record(call)
            self.calls.append(call)
            text, error, reward, answer["done"] = self.run_tool(call)
            message = Record(role="tool", name=call.name, tool_call_id=call.id)
            self.observed(answer, message, text, error, reward)
            if answer["done"]:
                break
        if turn["call_error"] and not answer["done"]:
            text = self.seen("Error: %s" % turn["call_error"])
            self.observed(answer, Record(role="user"), text, True, 0.0)
        elif not turn["calls"]:
            self.plain(turn["text"], answer)
        answer["outcome"] = self.score() if answer["done"] else None
        answer["state"] = None if answer["done"] else self.state()
        answer["snapshot"] = None if answer["done"] else self.snapshot()
        answer["renewed"] = None if answer["done"] else self.renewed()
        return answer

    def plain(self, text, answer):
        """A turn without calls."""
        if "step" not in self.target.methods:
            answer["done"] = True
            return
        try:
            value = self.call("step", dict(self.names(), text=text))
            if value is None:
                raise TypeError("step returned None: return an observation, Step(...) or Done(...)")
            text, error, reward, answer["done"] = self.step_of(value)
        except sinew.ToolError as e:
            text, error, reward = "Error: %s" % e, True, 0.0
        self.observed(answer, Record(role="user"), text, error, reward)

    def observed(self, answer, message, text, error, reward):
        message["content"] = cut(text, MAX_OBSERVATION)
        self.messages.append(message)
        answer["results"].append({"message": message, "error": error})
        answer["reward"] += reward

    def score(self):
        """The outcome, made once, with the state at the end for rewards of the recipe."""
        if self.outcome is None:
            self.outcome = dict(self.made_score(), state=self.end_state())
        return self.outcome

    def end_state(self):
        """The state for rewards of the recipe. None if it is too long, or gone with the end of the episode."""
        try:
            text = self.state_text()
        except Exception:
            return None
        return json.loads(text) if text is not None and len(text) <= MAX_STATE else None

    def made_score(self):
        cls = self.target.cls
        if "reward" not in self.target.methods:
            if self.rewarded:
                return {"value": 0.0, "parts": {}}
            why = "%s has no method reward, and no turn had a reward" % cls.__name__
            return {"unscored": "%s: %s" % (shown_place(cls), why)}
        function = self.target.methods["reward"].function
        try:
            return score_of(self.call("reward"))
        except sinew.Unscored as e:
            return {"unscored": str(e)}
        except BaseException as e:
            if described(e)["fatal"]:
                raise
            return {"unscored": reason(e, function)}

    def close(self):
        if "close" in self.target.methods:
            self.call("close", {})


def _message(message):
    if not isinstance(message, collections.abc.Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(
            "start returned the message %r: expected {'role': ..., 'content': ...}" % (message,)
        )
    return Record(dict({"content": None}, **message))


# The protocol.

TARGETS = {"env": EnvTarget, "reward": RewardTarget, "tasks": TasksTarget}


class Server:
    """Takes frames and answers them."""

    def __init__(self, connection):
        self.connection = connection
        self.reading, self.writing = threading.Lock(), threading.Lock()
        self.counting = threading.Lock()
        self.idle = self.threads = 1
        self.max_threads = 1
        self.max_frame = 16 << 20
        self.targets, self.sessions = [], {}
        # Coroutines that run, by the ids of their calls.
        self.pending = {}
        self.forked = False
        # Requests to the host, by number: an event, and the answer.
        self.ran, self.runs = {}, itertools.count(1)
        # No target lets code of the model run, as its author says.
        self.harmless = False
        os.register_at_fork(after_in_child=self.after_fork)

    def after_fork(self):
        # A child of the user's code must not speak for its parent.
        self.forked = True
        self.connection.close()

    def receive(self):
        header = self.exactly(4)
        return json.loads(self.exactly(struct.unpack(">I", header)[0]))

    def exactly(self, size):
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            n = self.connection.recv_into(view[at:])
            if n == 0:
                os._exit(0)
            at += n
        return data

    def send(self, message):
        try:
            data = encoded(message)
        except (TypeError, ValueError, RecursionError) as e:
            why = ValueError("the answer of the code is no JSON: %s" % e)
            data = encoded({"id": message["id"], "error": described(why)})
        if len(data) > self.max_frame:
            why = "the answer has %d bytes: at most %d are allowed" % (len(data), self.max_frame)
            error = ValueError(why)
            data = encoded({"id": message["id"], "error": described(error)})
        with self.writing:
            self.connection.sendall(struct.pack(">I", len(data)) + data)

    def start(self, hello):
        """Loads all targets. The answer describes them."""
        self.max_frame = hello["max_frame"]
        try:
            prepare(hello, self)
            for target in hello["targets"]:
                made = TARGETS[target["kind"]](load(target))
                made.code = None if made.thing is None else place_of_code(made.thing)
                self.targets.append(made)
            self.harmless = all(getattr(t.thing, "runs_code", None) is False for t in self.targets)
            SHARED[0] = hello["shared"] and all(t.code is None for t in self.targets)
            HELPERS.update(processes())
            found = [target.describe() for target in self.targets]
            self.send({"id": 0, "ok": {"targets": found, "python": sys.version.split()[0]}})
        except BaseException as e:
            self.send({"id": 0, "error": described(e)})
            # The host ends this process once it has read why: an exit of its own could come before that.
            self.exactly(1)
            os._exit(1)
        self.max_threads = hello["threads"]
        LOADED[0] = True

    def serve(self):
        while True:
            with self.reading:
                request = self.receive()
                self.grow()
            printed = [""]
            token = PRINTED.set(printed)
            try:
                self.answer(request, printed)
            finally:
                PRINTED.reset(token)
            if self.forked:
                os._exit(1)
            with self.counting:
                self.idle += 1

    def grow(self):
        """Makes sure that a thread takes the next frame while this one works."""
        with self.counting:
            self.idle -= 1
            if self.idle > 0 or self.threads >= self.max_threads:
                return
            self.idle += 1
            self.threads += 1
        try:
            threading.Thread(target=self.serve, daemon=True).start()
        except RuntimeError:
            with self.counting:
                self.idle -= 1
                self.threads -= 1

    def answer(self, request, printed):
        op, number = request["op"], request["id"]
        if op == "cancel":
            self.cancel(request["call"])
            return
        if op == "ran":
            self.answered(request)
            return
        if op == "reward":
            target = self.targets[request["target"]]
            if target.is_async:
                self.answer_later(target, request, printed)
                return
        trusted = TRUSTED.set(op in ("tasks", "gold"))
        try:
            message = {"id": number, "ok": getattr(self, "do_" + op)(request)}
        except BaseException as e:
            message = {"id": number, "error": described(e)}
        finally:
            TRUSTED.reset(trusted)
        self.settle(op == "close")
        self.reply(message, printed)

    def settle(self, over):
        """After a call: what code left behind ends, and at the end of an episode even what hid from the watch."""
        if self.harmless or SHARED[0] or self.forked:
            return
        if over and not RAN_CODE[0]:
            RAN_CODE[0] = bool(processes() - HELPERS)
        if RAN_CODE[0]:
            end_orphans(HELPERS)

    def running(self):
        """Targets of the coroutines that run."""
        return [target for _, target in list(self.pending.values())]

    def reply(self, message, printed):
        if self.forked:
            return
        if printed[0]:
            message["printed"] = printed[0]
        if RAN_CODE[0]:
            message["code"] = True
        self.send(message)

    def answer_later(self, target, request, printed):
        number = request["id"]
        # The started task must find the entry here.
        self.pending[number] = None, target
        future = asyncio.run_coroutine_threadsafe(target.score_async(request), loop())
        self.pending[number] = future, target

        def done(future):
            self.pending.pop(number, None)
            # No one waits for the value of a call that was given up, but its id must be answered.
            value = None if future.cancelled() else future.result()
            self.reply({"id": number, "ok": value}, printed)

        future.add_done_callback(done)

    def cancel(self, number):
        """Ends a coroutine whose caller has given it up."""
        future, _ = self.pending.get(number, (None, None))
        if future is not None:
            future.cancel()

    def run_code(self, code, files=None, stdin="", timeout_s=5.0):
        """Has the host run code in a fresh sandbox; as `sinew.run_code`."""
        files = [[str(name), str(text)] for name, text in (files or {}).items()]
        run = {"code": str(code), "files": files, "stdin": str(stdin), "timeout_s": float(timeout_s)}
        answer = self.requested("run", run)
        if "error" in answer:
            raise RuntimeError("the code could not run: %s" % answer["error"])
        return sinew.Ran(answer["exit"], answer["ending"], answer["stdout"], answer["stderr"], answer["cut"])

    def ask_user(self, messages, seed=0):
        """Has the host ask the simulated user; as `sinew.ask_user`."""
        said = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
        answer = self.requested("ask", {"messages": said, "seed": int(seed) % 2**63})
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["text"]

    def requested(self, kind, request):
        """The host's answer to a request."""
        number, done = next(self.runs), threading.Event()
        self.ran[number] = [done, None]
        self.send({"id": 0, kind: dict(request, number=number)})
        # A single thread for calls gets the answer as the next frame.
        if self.max_threads == 1 and threading.current_thread() is threading.main_thread():
            while not done.is_set():
                self.answer(self.receive(), [""])
        done.wait()
        return self.ran.pop(number)[1]

    def answered(self, answer):
        kept = self.ran.get(answer["number"])
        if kept is not None:
            kept[1] = answer
            kept[0].set()

    def session(self, request):
        return self.sessions[request["session"]]

    def do_open(self, request):
        session = Session(self.targets[request["target"]], request["task"])
        self.sessions[request["session"]] = session
        with session.lock:
            saved = request["restore"]
            return session.open() if saved is None else session.restore(saved)

    def do_step(self, request):
        session = self.session(request)
        with session.lock:
            return session.step(request["turn"])

    def do_score(self, request):
        session = self.session(request)
        with session.lock:
            return session.score()

    def do_close(self, request):
        session = self.sessions.pop(request["session"], None)
        if session is not None:
            with session.lock:
                session.close()
        return {}

    def do_reward(self, request):
        return self.targets[request["target"]].score(request)

    def do_tasks(self, request):
        return self.targets[request["target"]].page(request["split"], request["seed"], request["offset"])

    def do_gold(self, request):
        return self.targets[request["target"]].gold(request["task"])


def encoded(message):
    # Half of a surrogate pair is no UTF-8.
    text = json.dumps(message, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace")


class Worlds(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    """Imports the environments that the host sent: source text by the module's name."""

    def __init__(self, sources):
        self.sources = sources

    def find_spec(self, name, path=None, target=None):
        if name in self.sources:
            return importlib.util.spec_from_loader(name, self, is_package=self.is_package(name))
        return None

    def is_package(self, name):
        return name in ("sinew.worlds", "sinew.bridges")

    def get_source(self, name):
        return self.sources[name]

    def get_filename(self, name):
        return name.replace(".", "/") + ("/__init__.py" if self.is_package(name) else ".py")


def prepare(hello, server):
    """Makes the process ready for the user's code: module `sinew`, search path, standard output."""
    global TIMEOUT_S
    TIMEOUT_S = hello["timeout_s"]
    PLACES.extend((inside, host) for inside, host in hello["places"])
    exec(compile(hello["env_source"], "sinew/env.py", "exec"), vars(sinew))
    sinew.__getattr__ = _missing
    sinew.run_code, sinew.ask_user = server.run_code, server.ask_user
    sys.modules["sinew"] = sys.modules["sinew.env"] = sinew
    sinew.__path__ = []
    sys.meta_path.insert(0, Worlds(hello["worlds"]))
    sys.path[:] = hello["path"] + [p for p in sys.path if p and p not in hello["path"]]
    sys.argv = ["sinew-worker"]


def _missing(name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name in ("worlds", "bridges"):
        return importlib.import_module("sinew." + name)
    # `from sinew import ...` would not show the text of an AttributeError.
    raise ImportError(
        "sinew.%s is not available in a worker; it has: Env, tool, Step, Done, ToolError, Unscored, run_code, Ran, ask_user"
        % name
    )


def main():
    hide()
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=30)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    kept = os.dup(2)
    faulthandler.enable(file=kept)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    sys.stdout = sys.stderr = Output()
    server = Server(connection)
    watch(is_own, lambda what: starts_code(what, server))
    server.start(server.receive())
    server.serve()


main()
