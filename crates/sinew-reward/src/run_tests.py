"""Runs the tests of a task against code of a model. The code is hostile: it must not pass by other means than right
answers.

It runs in a process of its own (SOLUTION below), which never sees the tests. Here, functions of the solution are
stand-ins: a call sends plain data and gets plain data back, which is compared here. So what the code patches, prints,
writes or exits is its own alone. It shares a user with this process and can end it, which is no verdict; the verdict is
one line with a number that this process alone knows, and other processes cannot read its memory or files.

What the tests import is loaded before the code runs, and never from the folder that the code can write.

Input: JSON with `code`, `tests`, `seconds` (for all tests) and `secret`. Output: JSON with `secret`, and either `passed`
and `total`, or `broken` or `missing`: why these tests cannot run here, whatever the code.
"""

import ast
import builtins
import ctypes
import functools
import importlib
import inspect
import json
import os
import re
import select
import subprocess
import sys
import time
import types
import unittest

#: Bytes of one answer of the solution, starts of it, and seconds of one call.
MAX_ANSWER, MAX_STARTS, CALL_S = 4 << 20, 4, 5.0
#: Decimal digits of an integer as text: more take too long, and the default, 4300, is too few for some tasks.
MAX_DIGITS = 100000
PR_SET_DUMPABLE = 4

# What both processes send each other: plain data. Everything else stays where it is and has a number.
PLAIN = r'''
def packed(value, other, depth=0):
    kind = type(value)
    if depth > 50:
        raise ValueError("data is nested more than 50 times")
    if value is None or kind in (bool, str):
        return value
    inner = lambda v: packed(v, other, depth + 1)
    if isinstance(value, int):
        return {"i": hex(int(value))}
    if isinstance(value, float):
        return {"f": float(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, dict):
        return {"d": [[inner(k), inner(v)] for k, v in value.items()]}
    for name, group in (("l", list), ("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, group):
            return {name: [inner(v) for v in value]}
    return other(value)


def unpacked(data, other):
    if data is None or isinstance(data, (bool, str)):
        return data
    ((kind, value),) = data.items()
    if kind == "i":
        return int(value, 16)
    if kind == "f":
        return float.fromhex(value)
    if kind == "c":
        return complex(*map(float.fromhex, value))
    if kind == "b":
        return bytes.fromhex(value)
    if kind == "d":
        return {unpacked(k, other): unpacked(v, other) for k, v in value}
    if kind in ("l", "t", "s", "z"):
        group = {"l": list, "t": tuple, "s": set, "z": frozenset}[kind]
        return group(unpacked(v, other) for v in value)
    return other(kind, value)
'''

SOLUTION = PLAIN + r'''
import itertools, json, os, sys, types

if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(100000)
requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
nothing = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(nothing, fd)
kept = []


def keep(value):
    kept.append(value)
    return {"h": [len(kept) - 1, callable(value)]}


def mine(kind, value):
    return kept[value[0]]


def run(request):
    op, target = request["op"], request.get("target")
    if op == "load":
        module = types.ModuleType("solution")
        sys.modules["solution"] = module
        kept.append(module)
        exec(compile(request["code"], "solution.py", "exec"), vars(module))
        names = [n for n, v in vars(module).items() if not n.startswith("_") and not isinstance(v, types.ModuleType)]
        return names
    value = kept[target]
    if op == "call":
        given = [unpacked(a, mine) for a in request["args"]]
        return value(*given, **{k: unpacked(v, mine) for k, v in request["named"].items()})
    if op == "get":
        return getattr(value, request["name"])
    if op == "item":
        return value[unpacked(request["key"], mine)]
    if op == "len":
        return len(value)
    return list(itertools.islice(value, 100000))


for line in requests:
    try:
        answer = {"value": packed(run(json.loads(line)), keep)}
    except BaseException as e:
        answer = {"error": [c.__name__ for c in type(e).__mro__], "text": str(e)[:500]}
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()
'''

exec(PLAIN)


class Gone(Exception):
    """The solution gave no answer."""


class SolutionError(Exception):
    """An exception of the solution that is no built-in one."""


# What the solution cannot raise here: a failed assert, and what would end an iteration of the tests quietly.
UNTRUSTED = (AssertionError, StopIteration, StopAsyncIteration)


class Solution:
    """The process of the model's code."""

    def __init__(self, code, until):
        self.code, self.until, self.starts, self.process = code, until, 0, None
        self.names = []

    def start(self):
        self.starts += 1
        if self.starts > MAX_STARTS:
            raise Gone("the solution ended too often")
        python = sys.executable or "python3"
        self.process = subprocess.Popen(
            [python, "-c", SOLUTION], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.unread = b""
        names = self.ask({"op": "load", "code": self.code})
        self.names = [n for n in names if isinstance(n, str)] if isinstance(names, list) else []

    def end(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
        self.process = None

    def ready(self):
        """A process that takes calls; one that ended is replaced."""
        if self.process is None or self.process.poll() is not None:
            self.end()
            self.start()

    def ask(self, request):
        answer = self.answer(request)
        if "error" in answer:
            self.fail(answer)
        return unpacked(answer["value"], lambda kind, value: Remote(self, self.process, value))

    def fail(self, answer):
        for name in answer["error"]:
            kind = getattr(builtins, str(name), None)
            if isinstance(kind, type) and issubclass(kind, Exception) and kind not in UNTRUSTED:
                raise kind(str(answer.get("text")))
        raise SolutionError(str(answer.get("text")))

    def answer(self, request):
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            line = self.line(min(time.monotonic() + CALL_S, self.until))
            answer = json.loads(line)
            if not isinstance(answer, dict) or not ({"value", "error"} & set(answer)):
                raise ValueError("no answer")
            return answer
        except (OSError, ValueError, RecursionError) as e:
            self.end()
            raise Gone("the solution gave no answer: %s" % e) from None

    def line(self, until):
        pipe = self.process.stdout.fileno()
        while b"\n" not in self.unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise ValueError("it took too long")
            data = os.read(pipe, 1 << 16)
            if not data or len(self.unread) > MAX_ANSWER:
                raise ValueError("it ended, or its answer is too long")
            self.unread += data
        line, self.unread = self.unread.split(b"\n", 1)
        return line


class Remote:
    """An object of the solution. It is equal to itself alone. What the module names survives a new process."""

    def __init__(self, solution, process, value):
        number, _ = value
        self.__dict__.update(_solution=solution, _process=process, _number=int(number), _name=None)

    def _fresh(self):
        solution = self._solution
        if solution.process is self._process:
            return
        if self._name is None:
            raise Gone("the solution was started again")
        solution.ready()
        again = solution.ask({"op": "get", "target": 0, "name": self._name})
        if not isinstance(again, Remote):
            raise Gone("the solution has another %s after a new start" % self._name)
        self.__dict__.update(_process=again._process, _number=again._number)

    def _ask(self, op, **more):
        self._fresh()
        return self._solution.ask(dict(more, op=op, target=self._number))

    def _pack(self, value):
        self._fresh()

        def other(value):
            if isinstance(value, Remote):
                value._fresh()
            if isinstance(value, Remote) and value._process is self._process:
                return {"h": [value._number]}
            raise TypeError("a call of the solution takes plain data, not %s" % type(value).__name__)

        return packed(value, other)

    def __call__(self, *args, **named):
        args = [self._pack(a) for a in args]
        return self._ask("call", args=args, named={k: self._pack(v) for k, v in named.items()})

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", name=name)

    def __getitem__(self, key):
        return self._ask("item", key=self._pack(key))

    def __len__(self):
        return self._ask("len")

    def __bool__(self):
        return True

    def __iter__(self):
        return iter(self._ask("list"))


class Module(types.ModuleType):
    """`solution` for tests that import from it."""

    def __init__(self, solution):
        super().__init__("solution")
        self.__dict__["_solution"] = solution

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        solution = self._solution
        solution.ready()
        value = solution.ask({"op": "get", "target": 0, "name": name})
        if isinstance(value, Remote):
            value.__dict__["_name"] = name
        return value


class Names(dict):
    """Names of the tests. Those that the tests do not define are the solution's, but for built-in names."""

    def __init__(self, module):
        super().__init__(__name__="tests", __builtins__=builtins)
        self.module = module

    def __missing__(self, name):
        if hasattr(builtins, name) or name not in self.module._solution.names:
            raise KeyError(name)
        return getattr(self.module, name)


def used(tree, module):
    """Global names of functions are not looked up in a dict of our own, so those that are used are put there."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    known = [n for n in names - own if n in module._solution.names and not hasattr(builtins, n)]
    return {name: getattr(module, name) for name in known}


def execute(body, space):
    exec(compile(ast.Module(body=body, type_ignores=[]), "tests.py", "exec"), space)


class Unfit(Exception):
    """Tests need more than this runner has."""


#: Modules that are imported where they may not be needed, and why the tests turned out to be unfit.
absent, unfit = set(), {}


def note(error, test=None):
    """Keeps an error that is the tests' own, whatever the code: they have no score then."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is not None and last.tb_frame.f_code is Solution.fail.__code__:
        return  # The code chose it.
    text = str(error)
    if isinstance(error, Unfit):
        unfit.setdefault("broken", text)
    elif isinstance(error, ModuleNotFoundError) and error.name in absent:
        unfit.setdefault("missing", error.name)
    elif isinstance(error, TypeError) and "() missing " in text:
        if text.partition("(")[0].rpartition(".")[2] == test:
            unfit.setdefault("broken", "%s: there are no fixtures" % text)


def whole(name, result):
    """Refuses what a test gives if its body has not run."""
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        getattr(result, "close", lambda: None)()
        raise Unfit("%s gives a %s, which does not run here" % (name, type(result).__name__))


def passes(body, tree, module, space, test=None):
    try:
        module._solution.ready()
        for name, value in used(tree, module).items():
            if isinstance(space.get(name, value), Remote):
                space[name] = value
        execute(body, space)
        return True
    except BaseException as e:
        note(e, test)
        return False


def done(solution, call, *given):
    """Whether a function of the tests ends well, with as many of the arguments as it takes."""
    name = getattr(call, "__name__", "a test")
    try:
        solution.ready()
        whole(name, call(*given[: len(inspect.signature(call).parameters)]))
        return True
    except BaseException as e:
        note(e, name)
        return False


def fixture(names, find, solution, *given):
    """Runs the first of these functions that is there; without any, all is well."""
    found = [f for f in map(find, names) if f is not None and not isinstance(f, Remote)]
    return not found or done(solution, found[0], *given)


class Own:
    """The tests' own module, for fixtures that take it."""


class Recorder(unittest.TestResult):
    """Which tests succeeded: those alone that ran to their end, and whose class could be taken down."""

    def __init__(self, solution):
        super().__init__()
        self.solution, self.good, self.last = solution, set(), None

    def startTest(self, test):
        super().startTest(test)
        self.last = id(test)
        try:
            self.solution.ready()
        except Exception:
            pass  # Its calls fail by themselves.

    def addSuccess(self, test):
        self.good.add(id(test))

    addExpectedFailure = lambda self, test, error: self.good.add(id(test))

    def addError(self, test, error):
        super().addError(test, error)
        note(error[1], getattr(test, "_testMethodName", None))
        if not isinstance(test, unittest.TestCase) and str(test).startswith("tearDown"):
            self.good.discard(self.last)

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            note(error[1])


def checked(method):
    """The method of a test, which must run to its end."""

    @functools.wraps(method)
    def call():
        whole(method.__name__, method())

    return call


def of_cases(cases, solution):
    """Results of subclasses of TestCase. A class that cannot be set up has run none of its tests."""
    tests = [test for case in cases for test in unittest.defaultTestLoader.loadTestsFromTestCase(case)]
    for test in tests:
        name = getattr(test, "_testMethodName", "")
        if not isinstance(test, unittest.IsolatedAsyncioTestCase) and hasattr(test, name):
            setattr(test, name, checked(getattr(test, name)))
    recorder = Recorder(solution)
    unittest.TestSuite(tests)(recorder)
    return [id(test) in recorder.good for test in tests]


def of_class(case, solution):
    """Results of a plain class `Test...`, each method with an instance of its own."""
    find = lambda name: getattr(case, name, None)
    names = [n for n in dir(case) if n.startswith("test") and callable(find(n))]
    ready = fixture(["setup_class"], find, solution, case)
    results = [ready and of_method(case, name, solution) for name in names]
    if not fixture(["teardown_class"], find, solution, case) and results:
        results[-1] = False
    return results


def of_method(case, name, solution):
    try:
        test = case()
    except BaseException:
        return False
    find = lambda name: getattr(test, name, None)
    method = find(name)
    result = fixture(["setup_method", "setup"], find, solution, method) and done(solution, method)
    return fixture(["teardown_method", "teardown"], find, solution, method) and result


def tests_in(tree):
    """Names of functions test_*, and classes, of the tests' text."""
    functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
    return functions, [n for n in tree.body if isinstance(n, ast.ClassDef)]


def of_text(tree, module):
    """Results of tests in one text: methods of classes and functions test_*, else asserts and calls one by one."""
    functions, classes = tests_in(tree)
    method = lambda n: isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name.startswith("test")
    planned = len(functions) + sum(method(n) for c in classes for n in c.body)
    if not planned and not any(derives(c, "TestCase", tree) for c in classes):
        return of_statements(tree, module, Names(module))
    space, solution = Names(module), module._solution
    if not passes(tree.body, tree, module, space):
        return [False] * max(1, planned)
    own = Own()
    own.__dict__ = space
    ready = fixture(["setUpModule", "setup_module"], space.get, solution, own)
    results = []
    for name in functions:
        set_up = ready and fixture(["setup_function"], space.get, solution, space[name])
        space["__whole"] = whole
        call = ast.parse("__whole(%r, %s())" % (name, name))
        result = set_up and passes(call.body, tree, module, space, name)
        results.append(fixture(["teardown_function"], space.get, solution, space[name]) and result)
    found = [(c.name, space.get(c.name)) for c in classes]
    found = [(name, case) for name, case in found if isinstance(case, type)]
    cases = [case for _, case in found if issubclass(case, unittest.TestCase)]
    results += of_cases(cases, solution)
    for name, case in found:
        if name.startswith("Test") and case not in cases:
            results += of_class(case, solution)
    down = fixture(["tearDownModule", "teardown_module"], space.get, solution, own)
    if not results:
        return of_statements(tree, module, Names(module))
    results[-1] = results[-1] and down
    return results if ready else [False] * len(results)


def of_statements(tree, module, space):
    results, ready = [], True
    for node in tree.body:
        done = ready and passes([node], tree, module, space)
        compound = isinstance(node, (ast.For, ast.While, ast.With, ast.If, ast.Try))
        asserts = compound and any(isinstance(n, ast.Assert) for n in ast.walk(node))
        if asserts or isinstance(node, (ast.Assert, ast.Expr)):
            results.append(done)
        else:
            ready = done
    return results


def aliases(tree):
    """What names of the text stand for, where it imports or assigns them."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known.update((a.asname, a.name) for a in node.names if a.asname)
        elif isinstance(node, ast.ImportFrom) and node.module:
            known.update((a.asname or a.name, "%s.%s" % (node.module, a.name)) for a in node.names)
        elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute, ast.Call)):
            value = resolved(node.value, known)
            known.update((t.id, value) for t in node.targets if isinstance(t, ast.Name))
    return known


def resolved(node, known):
    """Text of an expression, its first name as it was imported."""
    text = ast.unparse(node)
    first = re.match(r"\w*", text).group()
    return known.get(first, first) + text[len(first) :]


def derives(case, name, tree):
    """Whether a class of the text has a base whose name ends so, itself or by other classes of the text."""
    known, classes = aliases(tree), {c.name: c for c in tests_in(tree)[1]}
    seen, left = set(), [case.name]
    while left:
        at = left.pop()
        if at not in seen and at in classes:
            seen.add(at)
            left += [resolved(base, known) for base in classes[at].bases]
        elif at not in classes and at.endswith(name):
            return True
    return False


def suspends(function):
    """Whether a call does not run the body: of a coroutine or a generator."""
    left = [] if isinstance(function, ast.AsyncFunctionDef) else list(function.body)
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    while left:
        node = left.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(node, inner):
            left.extend(ast.iter_child_nodes(node))
    return isinstance(function, ast.AsyncFunctionDef)


FIXTURES = (
    "setUp", "tearDown", "setUpClass", "tearDownClass", "setUpModule", "tearDownModule", "setup", "teardown",
    "setup_method", "teardown_method", "setup_class", "teardown_class", "setup_function", "teardown_function",
    "setup_module", "teardown_module",
)  # fmt: skip


def run_here(tree):
    """Tests and fixtures of the text: (function, whether a method, whether it may be a coroutine)."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    named = lambda n: isinstance(n, kinds) and (n.name.startswith("test") or n.name in FIXTURES)
    yield from ((n, False, False) for n in tree.body if named(n))
    _, classes = tests_in(tree)
    bases = {ast.unparse(base) for c in classes for base in c.bases}
    loops = [c for c in classes if derives(c, "IsolatedAsyncioTestCase", tree)]
    awaited = {c.name for c in loops} | {ast.unparse(base) for c in loops for base in c.bases}
    for c in classes:
        if c.bases or c.name.startswith("Test") or c.name in bases:
            yield from ((n, True, c.name in awaited) for n in c.body if named(n))


def wrong(tree):
    """Why tests need more than this runner has, if they do."""
    known = aliases(tree)
    for node in ast.walk(tree):
        for decorator in getattr(node, "decorator_list", []):
            if resolved(decorator, known).startswith("pytest."):
                return "%s has the decorator %s: pytest itself does not run here" % (
                    node.name,
                    ast.unparse(decorator)[:60],
                )
    for node, method, may_wait in run_here(tree):
        test = node.name.startswith("test")
        waits = may_wait and test and isinstance(node, ast.AsyncFunctionDef)
        if suspends(node) and not waits:
            return "%s is a coroutine or generator: only unittest.IsolatedAsyncioTestCase awaits tests" % (
                node.name
            )
        given = (node.args.posonlyargs + node.args.args)[int(method) :]
        if test and len(given) > len(node.args.defaults) and not node.decorator_list:
            return "%s takes %s: there are no fixtures" % (node.name, given[0].arg)
    return None


def imported(tree):
    """Modules that the tests import, but for the solution, and whether they may do without."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        for name in names:
            if name.partition(".")[0] != "solution":
                yield name, node not in tree.body


def load(trees):
    """Imports all of it before the code of the model runs. Returns the first module that all tests lack."""
    for tree in trees:
        for name, may_fail in imported(tree):
            try:
                importlib.import_module(name)
            except ImportError as e:
                absent.add(e.name or name)
                if not may_fail:
                    return e.name or name
            except Exception:
                pass  # The tests find it again.
    return None


def unusable(trees):
    why = next(filter(None, map(wrong, trees)), None)
    if why is not None:
        return {"broken": why}
    missing = load(trees)
    return None if missing is None else {"missing": missing}


def scored(trees, solution):
    module = sys.modules["solution"] = Module(solution)
    results = []
    for tree in trees:
        try:
            solution.ready()
        except Exception:
            # Tests are counted all the same: none of them passes.
            solution.names = []
        results += of_text(tree, module)
    solution.end()
    return unfit or {"passed": sum(results), "total": len(results)}


def main():
    given = json.load(sys.stdin)
    # No other process may read this one's memory, files or input.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the process cannot be hidden from the solution")
    verdict = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # The code can write into this folder.
    sys.path[:] = [p for p in sys.path if p and os.path.realpath(p) != os.getcwd()]
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(MAX_DIGITS)
    until = time.monotonic() + given["seconds"]
    tests = given["tests"]
    try:
        trees = [ast.parse(text) for text in ([tests] if isinstance(tests, str) else tests)]
    except (SyntaxError, ValueError) as e:
        said = {"broken": "they are no Python: %s" % e}
    else:
        said = unusable(trees) or scored(trees, Solution(given["code"], until))
    print(json.dumps(dict(said, secret=given["secret"])), file=verdict, flush=True)


main()
