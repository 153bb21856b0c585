"""Runs the tests of a task against code of a model. The code is hostile: it must not pass by other means than right
answers.

It runs in a process of its own (SOLUTION below), which never sees the tests. Here, functions of the solution are
stand-ins: a call sends plain data and gets plain data back, which is compared here. So what the code patches, prints,
writes or exits is its own alone. It shares a user with this process and can end it, which is no verdict; the verdict is
one line with a number that this process alone knows, and other processes cannot read its memory or files.

Input: JSON with `code`, `tests`, `seconds` (for all tests) and `secret`. Output: JSON with `secret`, `passed`, `total`.
"""

import ast
import builtins
import ctypes
import json
import os
import select
import subprocess
import sys
import time
import types
import unittest

#: Bytes of one answer of the solution, starts of it, and seconds of one call.
MAX_ANSWER, MAX_STARTS, CALL_S = 4 << 20, 4, 5.0
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
        return {"i": str(int(value))}
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
        return int(value)
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
    """An object of the solution. It is equal to itself alone."""

    def __init__(self, solution, process, value):
        number, _ = value
        self.__dict__.update(_solution=solution, _process=process, _number=int(number))

    def _ask(self, op, **more):
        solution = self._solution
        if solution.process is not self._process:
            raise Gone("the solution was started again")
        return solution.ask(dict(more, op=op, target=self._number))

    def _pack(self, value):
        def other(value):
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
        return solution.ask({"op": "get", "target": 0, "name": name})


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


def passes(body, tree, module, space):
    try:
        module._solution.ready()
        for name, value in used(tree, module).items():
            if isinstance(space.get(name, value), Remote):
                space[name] = value
        execute(body, space)
        return True
    except BaseException:
        return False


def of_text(text, module):
    """Results of tests in one text: methods of TestCase, functions test_*, else asserts and calls one by one."""
    tree = ast.parse(text)
    space = Names(module)
    functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
    classes = [n.name for n in tree.body if isinstance(n, ast.ClassDef)]
    if not functions and not classes:
        return of_statements(tree, module, space)
    loaded = passes(tree.body, tree, module, space)
    results = []
    for name in functions:
        call = ast.parse("%s()" % name)
        results.append(loaded and passes(call.body, tree, module, space))
    cases = [space[c] for c in classes if isinstance(space.get(c), type)]
    for case in (c for c in cases if issubclass(c, unittest.TestCase)):
        for test in unittest.defaultTestLoader.loadTestsFromTestCase(case):
            try:
                module._solution.ready()
            except Exception:
                results.append(False)
                continue
            result = unittest.TestResult()
            test.run(result)
            results.append(result.wasSuccessful() and not result.skipped and result.testsRun == 1)
    return results if loaded else [False] * max(1, len(results) or len(classes))


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


def main():
    given = json.load(sys.stdin)
    # No other process may read this one's memory, files or input.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the process cannot be hidden from the solution")
    verdict = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    solution = Solution(given["code"], time.monotonic() + given["seconds"])
    module = sys.modules["solution"] = Module(solution)
    tests = given["tests"]
    results = []
    for text in [tests] if isinstance(tests, str) else tests:
        try:
            solution.ready()
        except Exception:
            # Tests are counted all the same: none of them passes.
            solution.names = []
        try:
            results += of_text(text, module)
        except SyntaxError as e:
            print(json.dumps({"secret": given["secret"], "broken": str(e)}), file=verdict)
            return
    solution.end()
    done = {"secret": given["secret"], "passed": sum(results), "total": len(results)}
    print(json.dumps(done), file=verdict, flush=True)


main()
