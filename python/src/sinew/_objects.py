"""Recipes with Python objects in them: rows and functions become files, which the program reads.

A file is named by the hash of its content, so that the same recipe is the same text and a run can be resumed.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import json
import math
import os
import re
import sys
import sysconfig
import textwrap
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import SinewError

#: Keys of a recipe whose values are rows, or tables with rows in `source` and `held_out`.
_ROWS = ("source", "held_out")


def plain(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with paths in the place of objects.

    `tasks` (or its `source` and `held_out`) may be a list of dicts, a data frame of pandas or polars, a table of
    Arrow or a data set of `datasets`; `reward` a function, or a dict with functions as keys; `env` a class.
    Raises `SinewError` for an object that cannot leave this process, with the reason.
    """
    made = dict(recipe)
    for key in ("env", "stage"):
        if isinstance(made.get(key), (list, tuple)):
            made[key] = [plain(part) if isinstance(part, Mapping) else part for part in made[key]]
    if "tasks" in made:
        made["tasks"] = _tasks(made["tasks"])
    if "reward" in made:
        made["reward"] = _reward(made["reward"])
    if isinstance(made.get("env"), type):
        made["env"] = {"type": "python", "module": made["env"]}
    if isinstance(made.get("env"), Mapping) and callable(made["env"].get("module")):
        made["env"] = {**made["env"], "module": place(made["env"]["module"])}
    if callable(made.get("module")):
        made["module"] = place(made["module"])
    return made


def _tasks(tasks: Any) -> Any:
    if callable(tasks):
        return place(tasks)
    rows = _rows(tasks)
    if rows is not None:
        return _rows_file(rows, "tasks")
    if not isinstance(tasks, Mapping):
        return tasks
    made = dict(tasks)
    for key in _ROWS:
        rows = _rows(made.get(key))
        if rows is not None:
            made[key] = _rows_file(rows, f"tasks.{key}")
        elif callable(made.get(key)):
            made[key] = place(made[key])
    return made


def _reward(reward: Any) -> Any:
    if callable(reward):
        return place(reward)
    if isinstance(reward, Mapping):
        return {place(name) if callable(name) else name: weight for name, weight in reward.items()}
    return reward


def _rows(value: Any) -> list[Any] | None:
    """The rows of an object that holds some; `None` if it is none of the known kinds."""
    if isinstance(value, (str, bytes, Mapping)) or value is None:
        return None
    if isinstance(value, (list, tuple)):
        return list(value) if value and all(isinstance(row, Mapping) for row in value) else None
    for method, words in (("to_pylist", ()), ("to_dicts", ()), ("to_list", ()), ("to_dict", ("records",))):
        if hasattr(value, method) and hasattr(value, "columns" if method != "to_list" else "column_names"):
            rows: Any = getattr(value, method)(*words)
            return list(rows)
    return None


def _rows_file(rows: list[Any], key: str) -> str:
    lines = []
    for index, row in enumerate(rows):
        try:
            lines.append(json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, default=_value) + "\n")
        except (TypeError, ValueError) as e:
            raise SinewError(f"recipe: {key}: row {index}: {e}: expected what JSON can hold") from None
    return str(_write("tasks.jsonl", "".join(lines)))


def _finite(value: Any) -> Any:
    """Missing cells of data frames, which are NaN, as null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _value(value: Any) -> Any:
    """Scalars of NumPy and dates, as JSON has them."""
    for method in ("tolist", "isoformat"):
        if callable(getattr(value, method, None)):
            return _finite(getattr(value, method)())
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def place(thing: Any) -> str:
    """`FILE:NAME` of a function or class. One of a script or a notebook is written to a file, with the imports,
    constants, functions and classes that it uses."""
    name = getattr(thing, "__qualname__", type(thing).__name__)
    if not isinstance(thing, (types.FunctionType, type)):
        raise SinewError(f"recipe: {thing!r}: expected a function or a class that `def` or `class` made")
    if "<lambda>" in name or "<locals>" in name:
        raise SinewError(f"recipe: {name} stands within a function: define it at the top of a module, with `def`")
    module = sys.modules.get(thing.__module__)
    file = getattr(module, "__file__", None)
    if thing.__module__ != "__main__" and file:
        return f"{os.path.abspath(file)}:{name}"
    text = "from __future__ import annotations\n\n" + "\n\n".join(_Slice(module).of(thing)) + "\n"
    return f"{_write(f'{name}.py', text)}:{name}"


class _Slice:
    """The parts of a module that one of its functions uses, in the order in which they are needed."""

    def __init__(self, module: Any) -> None:
        self._names: dict[str, Any] = vars(module)
        self._seen: set[str] = set()
        self._parts: list[str] = []

    def of(self, thing: Any) -> list[str]:
        """Imports, constants and definitions, `thing` last."""
        try:
            source = textwrap.dedent(inspect.getsource(thing))
        except (OSError, TypeError):
            raise SinewError(f"recipe: the source of {thing.__qualname__} is not to be had: put it into a file") from None
        self._seen.add(thing.__name__)
        for name in _used(ast.parse(source)):
            if name in self._names and name not in self._seen:
                self._seen.add(name)
                self._take(name, self._names[name], thing.__qualname__)
        self._parts.append(source.rstrip())
        return self._parts

    def _take(self, name: str, value: Any, user: str) -> None:
        if isinstance(value, types.ModuleType):
            self._import(f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}"), value, user)
            return
        home = getattr(value, "__module__", None)
        if isinstance(value, (types.FunctionType, type)) and home == self._names.get("__name__"):
            self.of(value)
            return
        known = sys.modules.get(home) if isinstance(home, str) else None
        own = str(getattr(value, "__name__", ""))
        if known is not None and getattr(known, own, None) is value:
            self._import(f"from {home} import {own} as {name}", known, user)
            return
        self._parts.append(f"{name} = {_constant(name, value, user)}")

    def _import(self, statement: str, module: Any, user: str) -> None:
        file = getattr(module, "__file__", None)
        if file and module.__name__.split(".")[0] != "sinew" and not _installed(file):
            raise SinewError(
                f"recipe: {user} uses {file}, which its worker cannot import: put both into one file and name the "
                f"function there, such as reward='score.py:{user}'"
            )
        self._parts.insert(0, statement)


def _used(tree: ast.AST) -> Iterable[str]:
    """Names that are read, less those of annotations, which nothing evaluates."""
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                setattr(node, field, None)
    names = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return [name for name in dict.fromkeys(names) if not hasattr(builtins, name)]


def _constant(name: str, value: Any, user: str) -> str:
    if isinstance(value, re.Pattern):
        return f"__import__('re').compile({value.pattern!r}, {value.flags})"
    try:
        same = ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        same = False
    if not same:
        raise SinewError(
            f"recipe: {user} uses {name}, a {type(value).__name__}, which cannot be written to a file: make it inside "
            "the function, or put both into a module"
        )
    return repr(value)


def _installed(file: str) -> bool:
    """Whether a worker with this interpreter can import it: the standard library and packages."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(Path(file).is_relative_to(root) for root in roots)


def _write(name: str, text: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "sinew" / "python" / hashlib.sha256(text.encode()).hexdigest()[:16]
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{name}.{os.getpid()}"
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return path
