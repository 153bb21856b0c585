"""Function calling with the data and the simulators of BFCL (`bfcl-eval`).

`Calls` has one question and one turn: the calls are compared with the allowed values. `Turns` has several questions and simulators
with state (files, messages, tickets, trading, travel, a car). After each question their state is compared with that of the reference
calls, and the results of the reference calls must be among those that the model has seen, so that silence does not win where nothing
changes.
"""

import ast
import copy
import functools
import inspect
import json
import os
import threading
import types

from sinew import Done, Env, ToolError
from sinew.bridges import belongs, package

DOCS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
SOURCES = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code."
#: The simulators' logarithm sets the precision of `mpmath` for all threads: one at a time.
LOGARITHM = threading.Lock()


def folder():
    return os.path.join(os.path.dirname(package("bfcl_eval", "--no-deps bfcl-eval==2026.3.23").__file__), "data")


@functools.lru_cache(maxsize=None)
def lines(name):
    with open(os.path.join(folder(), name), encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def entries(category, split, whole):
    """Questions with their answers. Every fifth is held out, or all."""
    name = f"BFCL_v4_{category}.json"
    answers = {row["id"]: row["ground_truth"] for row in lines(os.path.join("possible_answer", name))}
    for i, row in enumerate(lines(name)):
        if belongs(i, split, whole):
            yield row, answers[row["id"]]


def plain_name(name):
    """A name that every template of calls can say: some have dots."""
    return name.replace(".", "_")


class Calls(Env):
    system = "Answer the question by calls of the functions that you have. Call all that are needed, in one turn."
    #: Files of the data with one turn each.
    categories = ["simple_python", "multiple", "parallel", "parallel_multiple"]
    #: All questions are held out, to be measured only.
    whole = False

    def start(self, task):
        self.functions, self.made = task.functions, []

    def offered(self):
        """The functions of this question."""
        for function in self.functions:
            name = plain_name(function["name"])
            yield {
                "name": name,
                "description": function.get("description", ""),
                "parameters": function["parameters"],
                "call": functools.partial(self.called, name),
            }

    def called(self, name, arguments):
        self.made.append({name: arguments})
        return "noted"

    def step(self, text):
        return Done("")

    def reward(self, task):
        return {"reward": float(matches(self.made, task.truth)), "calls": len(self.made)}

    @classmethod
    def tasks(cls, split, seed):
        for category in cls.categories:
            for row, truth in entries(category, split, cls.whole):
                said = row["question"][0]
                functions, prompt = row["function"], "\n\n".join(message["content"] for message in said)
                yield {"id": row["id"], "kind": category, "prompt": prompt, "functions": functions, "truth": truth}

    @staticmethod
    def gold(task):
        calls = []
        for call in task.truth:
            ((name, given),) = call.items()
            chosen = {key: first(values) for key, values in given.items() if "" not in values}
            calls.append((plain_name(name), chosen))
        return [calls, "Done."]


def first(values):
    value = values[0]
    if isinstance(value, dict):
        return {key: first(inner) for key, inner in value.items() if "" not in inner}
    if isinstance(value, list):
        return [first([inner]) if isinstance(inner, dict) else inner for inner in value]
    return value


def matches(made, truth):
    """Whether calls and allowed calls pair up, in any order."""
    left = [next(iter(call.items())) for call in truth]
    for call in made:
        ((name, arguments),) = call.items()
        found = next((t for t in left if plain_name(t[0]) == name and allowed(arguments, t[1])), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def allowed(arguments, values):
    """Whether each argument has an allowed value, and each that is needed is there."""
    if not isinstance(arguments, dict) or set(arguments) - set(values):
        return False
    return all(
        any(same(arguments[name], value) for value in options) if name in arguments else "" in options
        for name, options in values.items()
    )


def same(got, want):
    if isinstance(want, str):
        return isinstance(got, str) and folded(got) == folded(want)
    if isinstance(want, bool) or isinstance(got, bool):
        return got is want
    if isinstance(want, dict):
        return isinstance(got, dict) and allowed(got, want)
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(map(same, got, want))
    return got == want


def folded(text):
    """A text without what does not count: case, spaces, and marks within."""
    return "".join(c for c in text.lower() if c not in " ,./-_*^'\"")


class Turns(Env):
    system = "You work with tools. After each request, call what it needs, then answer in plain text; the next request follows."
    #: A file of the data with several turns.
    category = "multi_turn_base"
    #: All entries are held out, to be measured only.
    whole = False

    def start(self, task):
        self.classes, self.config = task.classes, task.config
        self.questions, self.truth = task.questions, task.truth
        self.own = self.simulators()
        self.reference = self.simulators()
        self.turn, self.right, self.results = 0, [], []

    def simulators(self):
        made = {}
        for name in self.classes:
            cls = getattr(package(SOURCES + DOCS[name], "--no-deps bfcl-eval==2026.3.23"), name)
            made[name] = cls()
            if name in self.config and hasattr(made[name], "_load_scenario"):
                made[name]._load_scenario(copy.deepcopy(self.config[name]), long_context=False)
        return made

    def offered(self):
        for name in self.classes:
            for function in lines(os.path.join("multi_turn_func_doc", f"{DOCS[name]}.json")):
                yield {
                    "name": function["name"],
                    "description": function["description"].rpartition("Tool description: ")[2],
                    "parameters": function["parameters"],
                    "call": functools.partial(self.seen, self.own[name], function["name"]),
                }

    def seen(self, simulator, name, arguments):
        result = self.called(simulator, name, arguments)
        self.results.append(repr(result))
        return result

    @staticmethod
    def called(simulator, name, arguments):
        method = method_of(simulator, name)
        try:
            inspect.signature(method).bind(**arguments)
        except TypeError as error:
            raise ToolError(f"{name}: {error}") from None
        try:
            return method(**arguments)
        except Exception as error:
            # The simulators check little of what they are given: their error is the model's.
            raise ToolError(f"{name}: {error}") from None

    def step(self, text):
        """The model has answered a request: the state counts, and the next request follows."""
        wanted = [repr(replay(self.reference, call)) for call in self.truth[self.turn]]
        same = all(alike(self.own[n], self.reference[n]) for n in self.classes)
        self.right.append(same and all(want in self.results for want in wanted if want != "None"))
        self.turn += 1
        if self.turn >= len(self.questions):
            return Done("")
        return "\n\n".join(message["content"] for message in self.questions[self.turn])

    def reward(self):
        share = sum(self.right) / len(self.questions)
        return {"reward": float(share == 1.0), "turns_right": share}

    @classmethod
    def tasks(cls, split, seed):
        for row, truth in entries(cls.category, split, cls.whole):
            yield {
                "id": row["id"],
                "kind": cls.category,
                "prompt": "\n\n".join(message["content"] for message in row["question"][0]),
                "questions": row["question"],
                "classes": [name for name in row["involved_classes"] if name in DOCS],
                "config": row["initial_config"],
                "truth": truth,
            }

    @classmethod
    def gold(cls, task):
        world, turns = cls(), []
        world.start(task)
        for calls in task.truth:
            named = []
            for call in calls:
                name, arguments = parsed(world.reference, call)
                named.append((name, arguments))
            turns += [[one] for one in named] + ["Done."]
        return turns


def method_of(simulator, name):
    """A method of a simulator, as it is where no other episode runs."""
    method = getattr(simulator, name)
    return method if (type(simulator).__name__, name) != ("MathAPI", "logarithm") else logarithm(method)


def logarithm(method):
    """The package's logarithm with a precision of its own, which its result keeps when it is shown."""

    @functools.wraps(method)
    def alone(**arguments):
        module = inspect.getmodule(type(method.__self__))
        with LOGARITHM:
            context = package("mpmath", "mpmath==1.3.0").MPContext()
            module.mpmath = types.SimpleNamespace(mp=context, log=context.log)
            return method(**arguments)

    return alone


def parsed(simulators, call):
    """Name and arguments of a call as Python writes it. Values are plain: nothing is run."""
    node = ast.parse(call.strip(), mode="eval").body
    name = node.func.id
    method = next(getattr(s, name) for s in simulators.values() if hasattr(s, name))
    positional = [ast.literal_eval(argument) for argument in node.args]
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return name, dict(inspect.signature(method).bind(*positional, **named).arguments)


def replay(simulators, call):
    """The result of a reference call."""
    name, arguments = parsed(simulators, call)
    method = next(method_of(s, name) for s in simulators.values() if hasattr(s, name))
    try:
        return method(**arguments)
    except Exception:
        # Some reference calls fail on purpose, as the model's may.
        return None


def alike(a, b):
    """Whether two simulators have one state. Names with an underscore are their own business."""
    state = lambda thing: {k: v for k, v in vars(thing).items() if not k.startswith("_")}  # noqa: E731
    return repr(sorted(state(a).items())) == repr(sorted(state(b).items())) or state(a) == state(b)
