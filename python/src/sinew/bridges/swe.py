"""Tasks in the form of SWE-bench: repair a repository so that failing tests pass, and passing ones still do.

Rows are those of SWE-bench (`instance_id`, `problem_statement`, `test_patch`, `FAIL_TO_PASS`, `PASS_TO_PASS`), given by the recipe's
`[tasks]`. A row with the column `image` runs in that image of `sandbox.images`, which has the repository in `folder` and the packages of
its tests. Else a class of yours stands next to a folder with the sources of each row at its base commit, as an archive without history::

    git archive --format tar --output repos/INSTANCE.tar BASE_COMMIT

    from sinew.bridges.swe import Swe

    class Mine(Swe):
        archives = "repos"

Code of the model runs in the worker: set `sessions_per_worker = 1`. As in SWE-bench, the tests run in one process with that code.
"""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

from sinew import Done, Env, ToolError, tool

#: Bytes of a file that is shown or written, and characters of output of a command.
MAX_FILE, MAX_OUTPUT = 256 << 10, 8000


@functools.lru_cache(maxsize=None)
def has_pytest(interpreter):
    """Whether an interpreter can import pytest; empty: the one of the worker. The answer is kept: asking starts a process."""
    if not interpreter:
        return importlib.util.find_spec("pytest") is not None
    command = [interpreter, "-c", "import pytest"]
    env = dict(os.environ, PYTHONPATH="")
    asked = subprocess.run(command, cwd="/", env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    return asked.returncode == 0


class Swe(Env):
    system = "You repair a repository. Look at it with tools, change files, run its tests, and call `submit` when the issue is solved."
    #: Folder of archives, relative to the file of the class.
    archives = "repos"
    #: Folder of the repository in images, and the interpreter that runs its tests; empty: the one of the worker.
    folder, interpreter = "/testbed", ""
    #: Whether an image may have `.git` in that folder: code of the model can read it, with commits after the base if there are some.
    history = False
    #: `pytest` or `unittest`: how test ids are written and run.
    runner = "pytest"
    #: Seconds of one run of tests, and calls of an episode.
    run_s, limit = 20, 60

    def start(self, task):
        self.task = task
        self.root = tempfile.mkdtemp(prefix="swe-")
        self.used = 0
        self.check_runner()
        if not self.in_image():
            self.unpack(self.root)
            return
        if not os.path.isdir(self.folder):
            raise FileNotFoundError(f"{self.folder}: not in image {task.image}; set `folder` to where its repository is")
        if not self.history and os.path.exists(os.path.join(self.folder, ".git")):
            raise RuntimeError(f"{self.folder}/.git is in image {task.image}: remove it, or its later commits, and set `history`")
        copied(self.folder, self.root)

    def check_runner(self):
        """Says that pytest is missing: without it all tests would count as failed, whatever the model did."""
        if self.runner == "pytest" and not has_pytest(self.interpreter):
            raise RuntimeError(f"{self.interpreter or sys.executable} cannot import pytest: pip install pytest there, or set `runner`")

    def in_image(self):
        return "image" in self.task

    def unpack(self, folder):
        file = getattr(sys.modules[type(self).__module__], "__file__", None)
        base = os.path.join(os.path.dirname(file or ""), self.archives)
        path = os.path.join(base, f"{self.task.instance_id}.tar")
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path}: make it with git archive --format tar, at the base commit")
        with tarfile.open(path) as archive:
            for member in archive:
                inside = os.path.realpath(os.path.join(folder, member.name))
                plain = member.isfile() or member.isdir()
                if plain and inside.startswith(os.path.realpath(folder)):
                    # Sandboxes let no one set owners and times.
                    archive.extract(member, folder, set_attrs=False)

    def path(self, name):
        """A path within the repository."""
        self.used += 1
        if self.used > self.limit:
            raise ToolError("no calls are left: submit")
        found = os.path.realpath(os.path.join(self.root, name))
        if found != os.path.realpath(self.root) and not found.startswith(os.path.realpath(self.root) + os.sep):
            raise ToolError(f"{name}: outside of the repository")
        return found

    @tool
    def list_files(self, folder: str = "."):
        "List files below a folder."
        base, names = self.path(folder), []
        for at, folders, files in os.walk(base):
            folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
            names += [os.path.relpath(os.path.join(at, name), self.root) for name in sorted(files)]
        return "\n".join(names[:500]) or "there is nothing"

    @tool
    def read_file(self, path: str):
        "Read a file."
        found = self.path(path)
        if not os.path.isfile(found):
            raise ToolError(f"{path}: no such file")
        with open(found, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_FILE)

    @tool
    def edit_file(self, path: str, old: str, new: str):
        "Replace a text that occurs once in a file. With an empty `old`, the file is written anew."
        found = self.path(path)
        if old == "":
            os.makedirs(os.path.dirname(found), exist_ok=True)
            text = new
        else:
            if not os.path.isfile(found):
                raise ToolError(f"{path}: no such file")
            with open(found, encoding="utf-8") as file:
                before = file.read()
            if before.count(old) != 1:
                raise ToolError(f"the text occurs {before.count(old)} times; once is needed")
            text = before.replace(old, new)
        if len(text) > MAX_FILE:
            raise ToolError(f"a file has at most {MAX_FILE} characters")
        with open(found, "w", encoding="utf-8") as file:
            file.write(text)
        return "written"

    @tool
    def run_tests(self, path: str = ""):
        "Run the tests of the repository, or those of one file."
        self.path(path or ".")
        return self.ran(self.root, [path] if path else [])[1]

    @tool
    def submit(self):
        "End the episode: the issue is solved."
        return Done("submitted")

    def command(self, names):
        python = self.interpreter or sys.executable
        if self.runner == "pytest":
            return [python, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *names]
        modules = [name[: -len(".py")].replace("/", ".") for name in names]
        return [python, "-m", "unittest", "-v", *modules]

    def ran(self, root, names):
        """Results by test id, and what was printed."""
        # Packages of the worker are of no use to another interpreter.
        path = os.pathsep.join([root, *(p for p in sys.path if p and not self.interpreter)])
        env = dict(os.environ, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
        try:
            done = subprocess.run(
                self.command(names), cwd=root, env=env, timeout=self.run_s, text=True, errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            said = done.stdout
        except subprocess.TimeoutExpired:
            return {}, f"the tests took longer than {self.run_s} s"
        if self.runner == "pytest":
            found = {name: word == "PASSED" for word, name in re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", said, re.M)}
        else:
            found = {name: word == "ok" for name, word in re.findall(r"^(\w+ \([\w.]+\)).* \.\.\. (\w+)", said, re.M)}
        return found, said[-MAX_OUTPUT:]

    def reward(self, task):
        """Whether all tests have the result that the row wants, with its own files of tests in place."""
        with tempfile.TemporaryDirectory(prefix="swe-") as folder:
            copied(self.root, folder)
            files = re.findall(r"^\+\+\+ b/(\S+)", task.test_patch, re.M)
            self.restored(folder, files)
            applied = subprocess.run(
                ["git", "apply", "--whitespace=nowarn", "-"], cwd=folder, input=task.test_patch, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60,
            )
            if applied.returncode:
                raise RuntimeError(f"test_patch does not apply: {applied.stdout[:500]}")
            results, _ = self.ran(folder, files)
        wanted = {key: names(task[key]) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        right = {key: sum(results.get(name, False) for name in found) for key, found in wanted.items()}
        solved = all(right[key] == len(found) for key, found in wanted.items())
        return {"reward": solved, "repaired": right["FAIL_TO_PASS"], "kept": right["PASS_TO_PASS"], "calls": self.used}

    def restored(self, folder, files):
        """Puts the files of tests back as they were: the model may have changed them."""
        with tempfile.TemporaryDirectory(prefix="swe-") as first:
            if self.in_image():
                first = self.folder
            else:
                self.unpack(first)
            for name in files:
                source, target = os.path.join(first, name), os.path.join(folder, name)
                if os.path.exists(source):
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    shutil.copyfile(source, target)
                elif os.path.exists(target):
                    os.remove(target)

    def close(self):
        shutil.rmtree(getattr(self, "root", ""), ignore_errors=True)


def copied(source, target):
    """Copies a tree without owners and times, which a sandbox does not let one set."""
    for at, folders, files in os.walk(source):
        folders[:] = [name for name in folders if name not in ("__pycache__", ".git")]
        into = os.path.join(target, os.path.relpath(at, source))
        os.makedirs(into, exist_ok=True)
        for name in files:
            if not os.path.islink(os.path.join(at, name)):
                shutil.copyfile(os.path.join(at, name), os.path.join(into, name))


def names(value):
    """Test ids of a row: a list, or one as JSON text."""
    return json.loads(value) if isinstance(value, str) else list(value)
