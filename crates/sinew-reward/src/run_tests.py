"""Runs the tests of a task against code of a model. The code is hostile: it must not pass by other means than right
answers.

It runs in a process of its own (solution.py), which never sees the tests. What both share, and how objects of one are
used by the other, is in carry.py. So what the code patches, prints, writes or exits is its own alone. It shares a user
with this process and can end it, which is no verdict; the verdict is one line with a number that this process alone
knows, and other processes cannot read its memory or files.

The code reaches no attribute of an object of the tests but those that classes of the tests define, and says of no value
of the tests whether it is equal to an object of its own. What the tests import is loaded before the code runs, and
never from the folder that the code can write.

Input: JSON with `code`, `tests`, `seconds` (for all tests), `secret`, and the programs `carry` and `solution`. Output:
JSON with `secret`, and either `passed` and `total`, or `broken` or `missing`: why these tests cannot run here, whatever
the code.
"""

import ast
import builtins
import ctypes
import functools
import importlib
import inspect
import io
import json
import os
import random
import re
import select
import subprocess
import sys
import time
import types
import unittest
import weakref

#: Bytes of one answer of the solution, starts of it, and seconds of one call.
MAX_ANSWER, MAX_STARTS, CALL_S = 4 << 20, 4, 5.0
#: Decimal digits of an integer as text: more take too long, and the default, 4300, is too few for some tasks.
MAX_DIGITS = 100000
PR_SET_DUMPABLE = 4
#: Objects that both sides share; from then on, the oldest are forgotten.
MAX_SHARED = 256

given = json.load(sys.stdin)
exec(compile(given["carry"], "carry.py", "exec"))


class SolutionError(Exception):
    """An exception of the solution that means something else here."""


class Unfit(Exception):
    """Tests need more than this runner has."""


#: What the solution cannot raise here: what would end an iteration of the tests quietly, or the tests.
UNTRUSTED = (StopIteration, StopAsyncIteration, KeyboardInterrupt, GeneratorExit)
#: Types of the standard library whose attributes the code may use, without those that begin with `_`.
OPEN = (io.StringIO, io.BytesIO, re.Match, types.SimpleNamespace)
#: Types that are used by calls and iteration alone.
CLOSED = (
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.GeneratorType, functools.partial,
    types.MethodDescriptorType, types.WrapperDescriptorType, type,
)  # fmt: skip


def opened():
    """Types of open attributes: mocks are loaded where tests import them alone."""
    mock = sys.modules.get("unittest.mock")
    return OPEN if mock is None else (*OPEN, mock.NonCallableMock)


def of_tests(kind):
    return kind.__module__ == "tests"


def open_to_code(value, name):
    """Whether the code may use an attribute of an object of the tests."""
    if not isinstance(name, str) or name.startswith("_"):
        return name in ("__name__", "__qualname__", "__doc__") and isinstance(value, CLOSED)
    if isinstance(value, opened()):
        return True
    kinds = [k for k in (value if isinstance(value, type) else type(value)).__mro__ if of_tests(k)]
    own = getattr(value, "__dict__", {})
    return any(name in vars(k) for k in kinds) or bool(kinds) and name in own


class Solution(Link):
    """The process of the model's code, and this end of the connection to it."""

    trusts = False

    def __init__(self, code, until):
        super().__init__(0)
        self.code, self.until, self.starts, self.process = code, until, 0, None
        self.names, self.doubt, self.op = [], None, None
        self.environment, self.state = None, None

    def start(self):
        self.starts += 1
        if self.starts > MAX_STARTS:
            raise Gone("the solution ended too often")
        python = sys.executable or "python3"
        self.process = subprocess.Popen(
            [python, "-c", given["carry"] + given["solution"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.unread = b""
        # The objects of the last process ended with it.
        self.epoch += 1
        self.environment, self.state = dict(os.environ), None
        self.shared, self.numbers, self.far, self.mirrors = {}, {}, weakref.WeakValueDictionary(), {}
        names = self.ask("load", self.code)
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
        self.doubt = None
        if self.process is None or self.process.poll() is not None:
            self.end()
            self.start()

    def restart(self):
        """As `ready`, within a test."""
        doubt = self.doubt
        self.ready()
        self.doubt = doubt

    def named(self, name):
        value = self.ask("name", name)
        if isinstance(value, Far):
            vars(value)["_name"] = name
        return value

    def unfit(self, why):
        error = Unfit(why + ", which stays in a process of its own")
        unfit.setdefault("broken", str(error))
        return error

    def ask(self, op, *args, **named):
        if self.process is None:
            raise Gone("the solution has ended")
        try:
            self.surroundings()
            self.request(op, args, named)
            before, self.op = self.op, op
            try:
                message = self.wait()
            finally:
                self.op = before
            if "error" not in message:
                return self.unpack(message["value"])
            error = self.error_of(message["error"])
        except (Gone, Unfit):
            raise
        except Exception as e:
            # The fault lies with the other side, whatever it is.
            self.end()
            raise Gone("the solution gave no answer: %s" % e) from None
        self.fail(error, op)

    def request(self, op, args, named):
        try:
            self.send(op=op, args=args, named=named)
        except (OSError, Gone):
            raise Gone("the solution has ended") from None

    def fail(self, error, op):
        allowed = isinstance(error, Exception) or (op == "call" and isinstance(error, SystemExit))
        if (allowed and not isinstance(error, UNTRUSTED)) or (op == "next" and type(error) is StopIteration):
            raise error
        raise SolutionError("%s: %s" % (type(error).__name__, str(error)[:500]))

    def surroundings(self):
        """What tests set for the whole process: its environment and the state of `random`."""
        if self.op is not None:
            return
        if os.environ != self.environment:
            self.environment = dict(os.environ)
            self.tell("environment", self.environment)
        if "random" in used_modules:
            state = random.getstate()
            if state != self.state:
                self.state = state
                self.tell("seed", state)

    def tell(self, op, *args):
        self.op = op
        try:
            self.ask(op, *args)
        finally:
            self.op = None

    def write(self, message):
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def read(self):
        message = json.loads(self.line(min(time.monotonic() + CALL_S, self.until)))
        if not isinstance(message, dict) or not ({"value", "error", "op"} & set(message)):
            raise ValueError("no message")
        return message

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

    def more(self):
        drop = list(self.shared)[:-MAX_SHARED]
        for number in drop:
            self.drop(number)
        return {"drop": drop} if drop else {}

    def take(self, message):
        message.pop("drop", None)
        for name, text in message.get("printed", ()):
            stream = getattr(sys, name) if name in ("stdout", "stderr") else None
            if stream is not None and isinstance(text, str):
                stream.write(text)
        super().take(message)

    def pack_other(self, value, inner):
        if isinstance(value, types.ModuleType):
            return inner(getattr(value, "_module", None)) if isinstance(value, Module) else {"m": value.__name__}
        if isinstance(value, BaseException) and not of_tests(type(value)):
            number = vars(type(value)).get("_number")
            if vars(value).get("_far") is None:
                return {"E": [self.described(type(value)) if number is None else number, [inner(a) for a in value.args]]}
        name = getattr(value, "__qualname__", None)
        module = getattr(value, "__module__", None) or getattr(type(getattr(value, "__self__", None)), "__module__", "")
        if isinstance(value, (type, types.BuiltinFunctionType, types.FunctionType, types.MethodDescriptorType)):
            module = getattr(getattr(value, "__objclass__", None), "__module__", module)
            if module.partition(".")[0] in STANDARD and same_name(module, name, value):
                return {"g": [module, name]}
        kinds = [k for k in type(value).__mro__ if of_tests(k)]
        plain = isinstance(value, opened() + CLOSED) or hasattr(type(value), "__next__") or kinds
        if not plain and self.op is None:
            self.doubt = "%s.%s" % (type(value).__module__, type(value).__qualname__)
        return super().pack_other(value, inner)

    def unpack_other(self, kind, value):
        if kind == "a":
            far = self.stand_in(value["k"][0], [], None)

            async def later():
                return self.ask("await", far)

            return later()
        return super().unpack_other(kind, value)

    def error_of(self, described):
        if "far" in described:
            found = self.unpack(described["far"])
            return found if isinstance(found, BaseException) else SolutionError("no exception")
        return super().error_of(described)

    def number_of(self, far):
        far = fresh(far)
        return far._number

    def perform(self, op, args, named):
        """A request of the code, which is hostile."""
        if op in ("input", "read"):
            return getattr(self, "do_" + op)(*args)
        if op in ("get", "set", "del") and not open_to_code(args[0], args[1]):
            raise AttributeError("objects of the tests show no %s" % (args[1],))
        if op in ("set", "del") and isinstance(args[0], type):
            raise AttributeError("classes of the tests do not change")
        if op not in OPS or op in ("is_instance", "is_subclass", "copy", "deepcopy", "dir"):
            raise TypeError("objects of the tests have no %s" % (op,))
        return OPS[op](*args, **named)

    def do_input(self, prompt):
        return builtins.input(prompt)

    def do_read(self, name, size):
        if name not in ("read", "readline") or not isinstance(size, int):
            raise ValueError("no way to read")
        return getattr(sys.stdin, name)(size)

    def stranger(self, value):
        """A value of the same kind that is in nothing."""
        if isinstance(value, int):
            return random.SystemRandom().getrandbits(120) | 1 << 120
        return "%032x" % random.SystemRandom().getrandbits(128)


def same_name(module, name, value):
    found = sys.modules.get(module)
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    return found is value


def fresh(far):
    """The stand-in in the process that runs now. What the module names survives a new process."""
    solution = far._link
    if solution.epoch == far._epoch:
        return far
    if far._name is None:
        raise Gone("the solution was started again")
    again = solution.named(far._name)
    if not isinstance(again, Far):
        raise Gone("the solution has another %s after a new start" % far._name)
    vars(far).update(_epoch=again._epoch, _number=again._number)
    return far


class Module(types.ModuleType):
    """`solution` for tests that import from it."""

    def __init__(self, solution):
        super().__init__("solution")
        self.__dict__["_solution"] = solution

    def __getattr__(self, name):
        solution = self._solution
        if name == "__all__":
            return list(solution.names)
        if name == "_module":
            return Far(solution, 0, None)
        if name.startswith("__"):
            raise AttributeError(name)
        solution.restart()
        return solution.named(name)

    def __setattr__(self, name, value):
        self._solution.ask("set", Far(self._solution, 0, None), name, value)

    def __delattr__(self, name):
        self._solution.ask("del", Far(self._solution, 0, None), name)


class Names(dict):
    """Names of the tests. Those that the tests do not define are the solution's, but for built-in names."""

    def __init__(self, module):
        super().__init__(__name__="tests", __builtins__=builtins)
        self.module = module

    def __missing__(self, name):
        if hasattr(builtins, name) or name not in self.module._solution.names:
            raise KeyError(name)
        return getattr(self.module, name)


#: Top modules that the tests import.
used_modules = set()


def watch_patches(solution):
    """Patches of modules by `unittest.mock` hold in the process of the code as well."""
    mock = sys.modules.get("unittest.mock")
    if mock is None:
        return

    def carried(method, leaves):
        def call(patch, *args):
            before = getattr(patch, "target", None)
            result = method(patch, *args)
            module = before if leaves else patch.target
            own = isinstance(module, types.ModuleType) and not isinstance(module, Module)
            if own and module not in (sys, builtins) and solution.process is not None:
                value = [] if leaves else [getattr(module, patch.attribute, None)]
                solution.ask("patch", module.__name__, patch.attribute, *value)
            return result

        return call

    mock._patch.__enter__ = carried(mock._patch.__enter__, False)
    mock._patch.__exit__ = carried(mock._patch.__exit__, True)


def used(tree, module):
    """Global names of functions are not looked up in a dict of our own, so those that are used are put there."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    known = [n for n in names - own if n in module._solution.names and not hasattr(builtins, n)]
    return {name: getattr(module, name) for name in known}


def execute(body, space):
    exec(compile(ast.Module(body=body, type_ignores=[]), "tests.py", "exec"), space)


#: Modules that are imported where they may not be needed, and why the tests turned out to be unfit.
absent, unfit = set(), {}
#: The process of the code.
solution_now = []


def note(error, test=None):
    """Keeps an error that is the tests' own, whatever the code: they have no score then."""
    if solution_now[0].doubt is not None:
        unfit.setdefault("broken", "they give the code an object of type %s, which cannot be carried" % solution_now[0].doubt)
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
            if isinstance(space.get(name, value), Far):
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
    found = [f for f in map(find, names) if f is not None and not isinstance(f, Far)]
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


def parts(tree):
    """What may be modules of packages: names that the tests import from a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.partition(".")[0] not in ("solution", "__future__"):
                yield from ("%s.%s" % (node.module, a.name) for a in node.names if a.name != "*")


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
        for name in parts(tree):
            try:
                importlib.import_module(name)
            except Exception:
                pass  # It is no module.
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


class Nothing(io.TextIOBase):
    """What the tests print is not kept: the code could make it endless."""

    def writable(self):
        return True

    def write(self, text):
        return len(text)


def main():
    # No other process may read this one's memory, files or input.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the process cannot be hidden from the solution")
    verdict = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    sys.stdin = io.StringIO()
    sys.stdout = sys.stderr = Nothing()
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
        solution = Solution(given["code"], until)
        solution_now.append(solution)
        used_modules.update(name.partition(".")[0] for tree in trees for name, _ in imported(tree))
        said = unusable(trees)
        if said is None:
            watch_patches(solution)
            try:
                said = scored(trees, solution)
            except BaseException:
                # An exception that leaves the tests this way counts as no test passed.
                said = unfit or {"passed": 0, "total": 1}
    print(json.dumps(dict(said, secret=given["secret"])), file=verdict, flush=True)


main()
