"""Recipes as TOML text: the few types that a recipe holds, written so that nothing is changed on the way."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from .errors import SinewError

#: Keys that need no quotes.
_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
#: What TOML integers hold.
_INTEGERS = range(-(1 << 63), 1 << 63)
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def dumps(recipe: Mapping[str, Any]) -> str:
    """A recipe as TOML: its plain keys first, then a table for each mapping.

    Raises `SinewError` with the path of a value that TOML cannot hold: `None`, NaN, an integer beyond 64 bits,
    an object of another type.
    """
    plain: list[str] = []
    tables: list[str] = []
    for name, value in recipe.items():
        key = _key(name, "")
        if isinstance(value, Mapping) and value:
            tables.append(_table(f"[{key}]", value, str(name)))
        elif isinstance(value, (list, tuple)) and value and all(isinstance(v, Mapping) and v for v in value):
            rows = enumerate(value)
            tables.extend(_table(f"[[{key}]]", row, f"{name}[{index}]") for index, row in rows)
        else:
            plain.append(f"{key} = {_value(value, str(name))}\n")
    return "\n".join(["".join(plain), *tables]).lstrip("\n")


def _table(head: str, table: Mapping[Any, Any], path: str) -> str:
    lines = (f"{_key(k, path)} = {_value(v, f'{path}.{k}')}\n" for k, v in table.items())
    return head + "\n" + "".join(lines)


def _key(name: Any, path: str) -> str:
    if not isinstance(name, str):
        raise SinewError(f"recipe: {path or 'its top'} has the key {name!r}: expected text")
    return name if _BARE.match(name) else _text(name)


def _text(text: str) -> str:
    def escaped(c: str) -> str:
        if c in _ESCAPES:
            return _ESCAPES[c]
        return f"\\u{ord(c):04X}" if ord(c) < 0x20 or c == "\x7f" else c

    return '"' + "".join(map(escaped, text)) + '"'


def _value(value: Any, path: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if value not in _INTEGERS:
            raise SinewError(f"recipe: {path} = {value}: expected an integer of 64 bits")
        return str(int(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SinewError(f"recipe: {path} = {value}: expected a finite number")
        return repr(float(value))
    if isinstance(value, str):
        _encodable(value, path)
        return _text(value)
    if isinstance(value, os.PathLike):
        return _value(os.fsdecode(value), path)
    if isinstance(value, Mapping):
        items = (f"{_key(k, path)} = {_value(v, f'{path}.{k}')}" for k, v in value.items())
        return "{ " + ", ".join(items) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(v, f"{path}[{i}]") for i, v in enumerate(value)) + "]"
    hint = "leave the key out instead" if value is None else "expected text, number, bool, list or dict"
    raise SinewError(f"recipe: {path} = {value!r}: {hint}")


def _encodable(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise SinewError(f"recipe: {path}: the text is not Unicode: {e}") from e
