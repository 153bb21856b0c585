"""Types and values of tools: JSON schemas from type hints, arguments from JSON, scores from returned values.

The first part of the program of a worker; `worker.py` follows it.
"""

import collections.abc
import dataclasses
import enum
import inspect
import json
import math
import sys
import types
import typing

#: The module that user code imports: the file `env.py` of the Python package. `prepare` fills it.
sinew = types.ModuleType("sinew")


class SchemaError(Exception):
    """A tool without a JSON schema. The text begins with file and line."""


def place_of(function):
    """File and line of a function or class, as `file:line`."""
    function = inspect.unwrap(function)
    try:
        file = inspect.getsourcefile(function) or "?"
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return "%s:%s" % (getattr(code, "co_filename", "?"), getattr(code, "co_firstlineno", 0))
    for offset, line in enumerate(lines):
        if line.lstrip().startswith(("def ", "async def ", "class ")):
            return "%s:%d" % (file, first + offset)
    return "%s:%d" % (file, first)


def _hints(function):
    names = {"include_extras": True} if sys.version_info >= (3, 9) else {}
    try:
        return typing.get_type_hints(function, **names)
    except Exception as e:
        raise SchemaError("%s: type hints of %s: %s" % (place_of(function), function.__name__, e))


_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}
_NONE = type(None)
_ALLOWED = (
    "str, int, float, bool, None, list, tuple, set, dict, Optional, Union, Literal, Enum, dataclass, "
    "TypedDict, a pydantic model, Annotated"
)


def _is_union(hint):
    new = getattr(types, "UnionType", None)
    return typing.get_origin(hint) is typing.Union or (new is not None and isinstance(hint, new))


def _is_typed_dict(hint):
    return isinstance(hint, type) and issubclass(hint, dict) and hasattr(hint, "__total__")


def _fields(hint):
    """Names, types and whether each is required, of a dataclass or a TypedDict."""
    hints = _hints(hint)
    if _is_typed_dict(hint):
        needed = getattr(hint, "__required_keys__", None)
        if needed is None:
            needed = set(hints) if hint.__total__ else set()
        return [(key, _bare(h), key in needed) for key, h in hints.items()]
    missing = dataclasses.MISSING
    return [
        (f.name, hints[f.name], f.default is missing and f.default_factory is missing)
        for f in dataclasses.fields(hint)
    ]


def _bare(hint):
    """Without `Required` and `NotRequired`."""
    origin = typing.get_origin(hint)
    known = [getattr(typing, n, None) for n in ("Required", "NotRequired")]
    return typing.get_args(hint)[0] if origin is not None and origin in known else hint


def schema_of(hint, where):
    """JSON Schema of a type. `where` begins the message of an error."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return {}
    if hint is None or hint is _NONE:
        return {"type": "null"}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if hasattr(hint, "__metadata__"):
        schema = dict(schema_of(hint.__origin__, where))
        texts = [m for m in hint.__metadata__ if isinstance(m, str)]
        return dict(schema, description=" ".join(texts)) if texts else schema
    if origin is typing.Literal:
        return _enumerated(args)
    if _is_union(hint):
        return {"anyOf": [schema_of(arg, where) for arg in args]}
    base = origin if isinstance(origin, type) else hint
    if not isinstance(base, type):
        raise SchemaError("%s: no JSON schema for %r; allowed: %s" % (where, hint, _ALLOWED))
    return _schema_of_class(hint, base, args, where)


def _enumerated(values):
    kinds = {_PLAIN.get(type(v)) for v in values}
    kind = {"type": kinds.pop()} if len(kinds) == 1 and None not in kinds else {}
    return dict(kind, enum=list(values))


def _schema_of_class(hint, base, args, where):
    if issubclass(base, enum.Enum):
        return _enumerated([member.value for member in base])
    if _is_typed_dict(base) or dataclasses.is_dataclass(base):
        fields = _fields(base)
        return {
            "type": "object",
            "properties": {key: schema_of(h, "%s: %s" % (where, key)) for key, h, _ in fields},
            "required": [key for key, _, needed in fields if needed],
        }
    if hasattr(base, "model_json_schema"):
        return base.model_json_schema()
    if issubclass(base, tuple) and args and args[-1] is not Ellipsis:
        items = [schema_of(arg, where) for arg in args if arg != ()]
        count = len(items)
        return {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}
    if issubclass(base, (list, tuple, set, frozenset, collections.abc.Sequence)) and base is not str:
        unique = {"uniqueItems": True} if issubclass(base, (set, frozenset)) else {}
        return dict(unique, type="array", **({"items": schema_of(args[0], where)} if args else {}))
    if issubclass(base, (dict, collections.abc.Mapping)):
        more = {"additionalProperties": schema_of(args[1], where)} if len(args) == 2 else {}
        return dict(more, type="object")
    raise SchemaError("%s: no JSON schema for %r; allowed: %s" % (where, hint, _ALLOWED))


def convert(value, hint, name):
    """A JSON value as an instance of a type.

    Raises sinew.ToolError with the name of the argument if it does not fit.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hasattr(hint, "__metadata__"):
        return convert(value, hint.__origin__, name)
    if hint is typing.Any:
        return value
    if origin is typing.Literal:
        if any(value == a and type(value) is type(a) for a in args):
            return value
        raise _wrong(name, value, "one of " + ", ".join(map(repr, args)))
    if _is_union(hint):
        for arg in args:
            try:
                return convert(value, arg, name)
            except sinew.ToolError:
                continue
        raise _wrong(name, value, " or ".join(_called(a) for a in args))
    if hint is None or hint is _NONE:
        return _fits(value, value is None, hint, name)
    if hint is bool or hint is str:
        return _fits(value, isinstance(value, hint), hint, name)
    if hint in (int, float):
        return _number(value, hint, name)
    base = origin if isinstance(origin, type) else hint
    return _convert_class(value, base, args, name)


def _number(value, hint, name):
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    # A float that is none overflows in the arithmetic of an environment, which would fail the episode.
    real = real and abs(value) < 1e300
    whole = real and (isinstance(value, int) or value.is_integer())
    return hint(_fits(value, whole if hint is int else real, hint, name))


def _convert_class(value, base, args, name):
    if issubclass(base, enum.Enum):
        for member in base:
            if member.value == value and type(member.value) is type(value):
                return member
        raise _wrong(name, value, "one of " + ", ".join(repr(m.value) for m in base))
    if _is_typed_dict(base) or dataclasses.is_dataclass(base):
        return _convert_record(value, base, name)
    if hasattr(base, "model_validate"):
        try:
            return base.model_validate(value)
        except Exception as e:
            raise sinew.ToolError("%s: %s" % (name, e))
    if issubclass(base, (dict, collections.abc.Mapping)):
        _fits(value, isinstance(value, dict), dict, name)
        if len(args) != 2:
            return value
        return {key: convert(v, args[1], "%s.%s" % (name, key)) for key, v in value.items()}
    _fits(value, isinstance(value, list), list, name)
    if issubclass(base, tuple) and args and args[-1] is not Ellipsis:
        hints = [a for a in args if a != ()]
        if len(hints) != len(value):
            raise _wrong(name, value, "%d items" % len(hints))
    else:
        hints = [args[0] if args else typing.Any] * len(value)
    items = [convert(v, h, "%s[%d]" % (name, i)) for i, (v, h) in enumerate(zip(value, hints))]
    return base(items) if base in (tuple, set, frozenset) else items


def _convert_record(value, base, name):
    _fits(value, isinstance(value, dict), dict, name)
    fields = _fields(base)
    unknown = sorted(set(value) - {key for key, _, _ in fields})
    missing = [key for key, _, needed in fields if needed and key not in value]
    if unknown or missing:
        what = "unknown %s" % ", ".join(unknown) if unknown else "missing %s" % ", ".join(missing)
        known = ", ".join(f[0] for f in fields)
        raise sinew.ToolError("%s: %s; it has the fields %s" % (name, what, known))
    made = {key: convert(value[key], h, "%s.%s" % (name, key)) for key, h, _ in fields if key in value}
    return made if _is_typed_dict(base) else base(**made)


def _called(hint):
    return "null" if hint in (None, _NONE) else getattr(hint, "__name__", None) or str(hint)


def _wrong(name, value, expected):
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return sinew.ToolError("argument %s is %s: expected %s" % (name, shown, expected))


def _fits(value, fits, hint, name):
    if not fits:
        raise _wrong(name, value, _called(hint))
    return value


def _documented(function):
    """Description and texts of arguments of a docstring."""
    lines = inspect.cleandoc(function.__doc__ or "").split("\n")
    paragraph = []
    for line in lines:
        if not line.strip():
            break
        paragraph.append(line.strip())
    texts, within, last = {}, False, None
    for line in lines:
        if line.strip() in ("Args:", "Arguments:", "Parameters:"):
            within = True
        elif within and line.strip() and not line.startswith((" ", "\t")):
            within = False
        elif within and ":" in line and line.split(":")[0].split("(")[0].strip().isidentifier():
            last = line.split(":")[0].split("(")[0].strip()
            texts[last] = line.split(":", 1)[1].strip()
        elif within and last and line.strip():
            texts[last] += " " + line.strip()
    return " ".join(paragraph), texts


class Tool:
    """One tool: its specification for the model, and how it is called."""

    def __init__(self, attribute, function):
        self.attribute = attribute
        self.name = function.__sinew_tool__
        self.description, texts = _documented(function)
        hints, where = _hints(function), place_of(function)
        self.hints, self.required = {}, []
        properties = {}
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise SchemaError(
                    "%s: %s takes *%s: a tool has named parameters only" % (where, self.name, parameter.name)
                )
            if parameter.name not in hints:
                raise SchemaError(
                    "%s: parameter %s of the tool %s has no type hint; write %s: str, or another of: %s"
                    % (where, parameter.name, self.name, parameter.name, _ALLOWED)
                )
            hint = self.hints[parameter.name] = hints[parameter.name]
            schema = schema_of(hint, "%s: parameter %s" % (where, parameter.name))
            if parameter.name in texts and "description" not in schema:
                schema = dict(schema, description=texts[parameter.name])
            if parameter.default is parameter.empty:
                self.required.append(parameter.name)
            elif _is_json(parameter.default):
                schema = dict(schema, default=parameter.default)
            properties[parameter.name] = schema
        self.parameters = {"type": "object", "properties": properties, "required": self.required}

    def arguments(self, given):
        """Arguments of a call, converted. Raises sinew.ToolError."""
        if not isinstance(given, dict):
            raise _wrong("list", given, "an object")
        unknown = sorted(set(given) - set(self.hints))
        missing = [name for name in self.required if name not in given]
        if unknown or missing:
            what = "unknown argument " + unknown[0] if unknown else "missing argument " + missing[0]
            raise sinew.ToolError("%s; %s takes: %s" % (what, self.name, ", ".join(self.hints) or "nothing"))
        return {name: convert(value, self.hints[name], name) for name, value in given.items()}


def _is_json(value):
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def tools_of(cls):
    """All tools of a class by name, in the order of their definition. Raises SchemaError."""
    found = {}
    for base in reversed(cls.__mro__):
        for attribute, function in vars(base).items():
            if hasattr(function, "__sinew_tool__"):
                made = Tool(attribute, function)
                other = found.get(made.name)
                if other is not None and other.attribute != attribute:
                    raise SchemaError("%s: two tools are called %s" % (place_of(function), made.name))
                found[made.name] = made
    return found


def text_of(value):
    """An observation as text: texts as they are, None as `ok`, everything else as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return "ok"
    return json.dumps(value, default=_jsonable, ensure_ascii=False)


def _jsonable(value):
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)


def score_of(value):
    """A returned reward as `{"value", "parts"}` or `{"unscored"}`. Raises TypeError and ValueError."""
    if isinstance(value, sinew.Unscored):
        return {"unscored": str(value)}
    if value is None:
        return {"unscored": "it returned None"}
    if isinstance(value, collections.abc.Mapping):
        if "reward" not in value:
            keys = ", ".join(map(str, value)) or "no key"
            raise TypeError("it returned a dict without the key 'reward' (found: %s)" % keys)
        if value["reward"] is None or isinstance(value["reward"], sinew.Unscored):
            return score_of(value["reward"])
        parts = {str(k): _finite(v, k) for k, v in value.items() if k != "reward" and v is not None}
        return {"value": _finite(value["reward"], "reward"), "parts": parts}
    return {"value": _finite(value, "the reward"), "parts": {}}


def _finite(value, name):
    # numpy's numbers are no subclass of float, but convert.
    if isinstance(value, (str, bytes, list, tuple, dict)) or not hasattr(type(value), "__float__"):
        raise TypeError(
            "%s is of type %s: return a bool, a number, None, Unscored('why'), or a dict with 'reward'"
            % (name, type(value).__name__)
        )
    number = float(value)
    if not abs(number) <= 1e30:
        raise ValueError("%s is %s: a finite number of magnitude up to 1e30 is needed" % (name, number))
    return number
