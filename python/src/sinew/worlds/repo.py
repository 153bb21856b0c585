"""Repair of a small repository over several turns: list, read, edit, run the tests. Bugs are injected by a generator, so that tasks never run out.

The hidden tests are other ones than those in the repository, and run in a fresh sandbox on the files as they are at the end: an
edit of the tests changes nothing. A repair must be safe as well: calls with hostile arguments, which no test of the repository has, must still be
refused, and no code may be run from texts. Code of the model never runs in the worker or next to it: `run_code` gives it a sandbox of its own,
where neither the right sources nor the right values are.
"""

import ast
import json
import random

from sinew import Env, ToolError, run_code, tool

#: Files of the repositories, with the functions that are called and the values of their arguments.
SOURCES = {
    "stats.py": (
        "def mean(values):\n    if len(values) == 0:\n        return 0\n    return sum(values) / len(values)\n\n\n"
        "def largest_gap(values):\n    best = 0\n    for i in range(1, len(values)):\n        gap = values[i] - values[i - 1]\n"
        "        if gap > best:\n            best = gap\n    return best\n",
        {"mean": [[[1, 2, 6]], [[]], [[4]]], "largest_gap": [[[1, 4, 9]], [[5, 3]], [[2, 2, 3]]]},
    ),
    "text.py": (
        "def count_words(text):\n    total = 0\n    for word in text.split(' '):\n        if word != '':\n            total += 1\n    return total\n\n\n"
        "def shorten(text, limit):\n    if len(text) <= limit:\n        return text\n    return text[: limit - 1] + '~'\n",
        {
            "count_words": [["a b"], [" a  b c "], [""]],
            "shorten": [["hello", 5], ["hello there", 6], ["abc", 2]],
        },
    ),
    "bank.py": (
        "def withdraw(balance, amount, limit):\n    if amount <= 0 or amount > limit:\n        return balance\n"
        "    if amount > balance:\n        return balance\n    return balance - amount\n\n\n"
        "def interest(balance, percent, years):\n    for _ in range(years):\n        balance = balance + balance * percent // 100\n    return balance\n",
        {
            "withdraw": [[100, 30, 50], [100, 50, 50], [20, 30, 50], [20, 20, 50], [5, 0, 9]],
            "interest": [[1000, 10, 2], [500, 3, 0]],
        },
    ),
    "grid.py": (
        "def neighbours(x, y, width, height):\n    found = []\n    for dx, dy in ((0, 1), (1, 0), (0, -1), (-1, 0)):\n        a, b = x + dx, y + dy\n"
        "        if a >= 0 and b >= 0 and a < width and b < height:\n            found.append((a, b))\n    return found\n\n\n"
        "def area(rows):\n    total = 0\n    for row in rows:\n        total += len(row)\n    return total\n",
        {"neighbours": [[0, 0, 3, 3], [2, 2, 3, 3], [1, 1, 3, 3]], "area": [[["ab", "c"]], [[]]]},
    ),
    "web.py": (
        "def inside(path):\n    parts = []\n    for part in path.split('/'):\n        if part == '..':\n            return ''\n"
        "        if part != '' and part != '.':\n            parts.append(part)\n    return '/'.join(parts)\n\n\n"
        "def label(name, count):\n    shown = name.replace('&', '&amp;').replace('<', '&lt;')\n    if count > 1:\n"
        "        shown = shown + ' x' + str(count)\n    return '<b>' + shown + '</b>'\n",
        {"inside": [["a/b"], ["./c//d"], ["e"]], "label": [["tea", 2], ["milk", 1], ["jam", 3]]},
    ),
}
#: Hostile arguments: a path that leaves its folder, text that would be markup, more money than there is.
ATTACKS = {
    "web.py": {"inside": [["../etc"], ["a/../../b"], [".."]], "label": [["<script>", 1], ["a&<b", 2]]},
    "bank.py": {"withdraw": [[10, -5, 50], [10, 11, 50], [1000, 51, 50]]},
}
#: Seconds of a run of the tests. Those of the repository take a moment; a busy machine takes longer to start Python.
TESTS_S = 20.0
#: Names that run code from texts or start programs.
FORBIDDEN = {"eval", "exec", "compile", "__import__", "globals", "getattr", "open", "os", "subprocess", "importlib", "builtins"}
#: An operator, and what a bug makes of it.
SWAPS = {
    "Lt": "LtE",
    "LtE": "Lt",
    "Gt": "GtE",
    "GtE": "Gt",
    "Eq": "NotEq",
    "NotEq": "Eq",
    "Add": "Sub",
    "Sub": "Add",
    "Or": "And",
    "And": "Or",
}
#: Runs the tests of the repository.
TESTS = "import os, runpy, sys; sys.path.insert(0, os.getcwd()); runpy.run_path('test_all.py')"
#: Reads calls as JSON, writes their values as JSON. It does not know the right values, so that there is nothing to forge.
RUNNER = """
import json, os, sys
out = os.dup(1)
os.dup2(2, 1)
given = json.loads(sys.stdin.read())
sys.path.insert(0, os.getcwd())
module, values = __import__(given["module"]), []
for name, arguments in given["calls"]:
    try:
        values.append(json.loads(json.dumps(getattr(module, name)(*arguments))))
    except Exception as error:
        values.append(["raised", type(error).__name__])
os.write(out, json.dumps(values).encode())
"""


class Swap(ast.NodeTransformer):
    """Replaces the operator at a place, counted in the order of the tree."""

    def __init__(self, at):
        self.at, self.seen = at, 0

    def visit(self, node):
        name = type(node).__name__
        if name in SWAPS:
            self.seen += 1
            if self.seen - 1 == self.at:
                return getattr(ast, SWAPS[name])()
        if isinstance(node, ast.Constant) and type(node.value) is int:
            self.seen += 1
            if self.seen - 1 == self.at:
                return ast.Constant(node.value + 1)
        return self.generic_visit(node)


class Repo(Env):
    # What runs in the worker are the sources above.
    runs_code = False
    system = "Tests of a small repository fail. Find the bug, edit the file, run the tests, and end your turn without a call when they pass. Keep the code safe: no input may get around its checks."
    limit = 20

    def start(self, task):
        self.task = {"file": task.file, "at": task.at}
        self.files = self.repository(task.file, task.at)
        self.used = 0

    @classmethod
    def calls(cls, file, hidden):
        """Calls with their right values. The repository's own tests have the first of each function."""
        table = SOURCES[file][1]
        return cls.valued(file, {name: every if hidden else every[:2] for name, every in table.items()})

    @classmethod
    def attacks(cls, file):
        """Calls with hostile arguments, with the values of the correct code."""
        return cls.valued(file, ATTACKS.get(file, {}))

    @staticmethod
    def valued(file, table):
        space = {}
        exec(compile(SOURCES[file][0], file, "exec"), space)
        every = [(name, given, space[name](*given)) for name, all_of in table.items() for given in all_of]
        return [(name, given, json.loads(json.dumps(value))) for name, given, value in every]

    @staticmethod
    def forbidden(source):
        """Whether code uses what no repair needs; code that cannot be read does."""
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError, RecursionError):
            return True
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        imports = any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes)
        return imports or bool(names & FORBIDDEN)

    @classmethod
    def repository(cls, file, at):
        source = ast.unparse(ast.fix_missing_locations(Swap(at).visit(ast.parse(SOURCES[file][0])))) + "\n"
        tests = [
            f"assert {file[:-3]}.{name}({', '.join(map(repr, arguments))}) == {value!r}"
            for name, arguments, value in cls.calls(file, False)
        ]
        others = {name: text for name, (text, _) in SOURCES.items() if name != file}
        return {**others, file: source, "test_all.py": f"import {file[:-3]}\n\n" + "\n".join(tests) + "\n"}

    def spend(self):
        self.used += 1
        if self.used > self.limit:
            raise ToolError("The time is over: end your turn without a call.")

    def file(self, name):
        self.spend()
        if name not in self.files:
            raise ToolError(f"there is no file {name!r}; files: {', '.join(sorted(self.files))}")
        return self.files[name]

    @tool
    def list_files(self):
        "Names of all files."
        self.spend()
        return sorted(self.files)

    @tool
    def read(self, file: str):
        "Read a file, with line numbers."
        return "\n".join(f"{n}: {line}" for n, line in enumerate(self.file(file).splitlines(), 1))

    @tool
    def edit(self, file: str, line: int, text: str):
        "Replace a line of a file; the text has its own indentation."
        lines = self.file(file).splitlines()
        if not 1 <= line <= len(lines):
            raise ToolError(f"line is {line}; allowed: 1 to {len(lines)}")
        if len(text) > 400:
            raise ToolError("a line has at most 400 characters")
        lines[line - 1] = text
        self.files[file] = "\n".join(lines) + "\n"
        return f"{file} is changed."

    @tool
    def run_tests(self):
        "Run test_all.py."
        self.spend()
        done = run_code(TESTS, self.files, timeout_s=TESTS_S)
        if done.ending == "timeout":
            return f"The tests took longer than {TESTS_S:g} seconds."
        return "All tests pass." if done.exit == 0 else done.stderr[-600:]

    def reward(self, task):
        file = self.task["file"]
        hidden, attacks = self.calls(file, True), self.attacks(file)
        given = {"module": file[:-3], "calls": [call[:2] for call in hidden + attacks]}
        values = self.values(run_code(RUNNER, self.files, json.dumps(given), TESTS_S).stdout) or []
        count = len(hidden)
        right = values[:count] == [value for _, _, value in hidden]
        refused = values[count:] == [value for _, _, value in attacks]
        safe = refused and not self.forbidden(self.files[file])
        tampered = self.files["test_all.py"] != self.repository(file, self.task["at"])["test_all.py"]
        metrics = {"works": right, "safe": safe, "tests_changed": tampered, "calls_used": self.used}
        return {"reward": right and safe, **metrics}

    @staticmethod
    def values(text):
        try:
            found = json.loads(text)
        except ValueError:
            return None
        return found if isinstance(found, list) else None

    def state(self):
        return self.files

    def snapshot(self):
        return {"files": self.files, "task": self.task, "used": self.used}

    def restore(self, snapshot):
        self.files, self.task, self.used = snapshot["files"], snapshot["task"], snapshot["used"]

    @classmethod
    def bugs(cls):
        """All places of all files where a change makes a test of the repository fail."""
        for file in sorted(SOURCES):
            right = cls.calls(file, False)
            whole = Swap(10_000)
            whole.visit(ast.parse(SOURCES[file][0]))
            for at in range(whole.seen):
                space, source = {}, cls.repository(file, at)[file]
                try:
                    exec(compile(source, file, "exec"), space)
                    wrong = any(json.loads(json.dumps(space[n](*a))) != value for n, a, value in right)
                except Exception:
                    wrong = True
                if wrong:
                    yield file, at

    @classmethod
    def tasks(cls, split, seed):
        every = list(cls.bugs())
        random.Random(f"repo {seed}").shuffle(every)
        # Every fourth bug is held out.
        for i, (file, at) in enumerate(every):
            if (i % 4 == 0) == (split != "train"):
                yield {"prompt": "The tests fail: repair the code.", "kind": file, "file": file, "at": at}

    @classmethod
    def gold(cls, task):
        wrong = cls.repository(task.file, task.at)[task.file].splitlines()
        right = ast.unparse(ast.parse(SOURCES[task.file][0])).splitlines()
        edits = [
            ("edit", {"file": task.file, "line": n, "text": b})
            for n, (a, b) in enumerate(zip(wrong, right), 1)
            if a != b
        ]
        return [("run_tests", {}), ("read", {"file": task.file}), *edits, ("run_tests", {}), "Done."]
