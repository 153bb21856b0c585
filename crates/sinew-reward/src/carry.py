# Objects that two processes share: the tests, and the code of a model. Plain data crosses by value. Lists, dicts,
# sets and their like are the same object on both sides: with each message goes what changed in them. All else stays
# where it is; the other side has a stand-in that forwards operators, attributes and calls.
#
# A message is one line of JSON: a request (`op`), or its answer (`value` or `error`). A side that waits for
# an answer serves requests meanwhile, so that the code can call a function that it received.

import builtins
import collections
import copy
import datetime
import decimal
import fractions
import json
import operator
import sys
import types
import uuid

#: Levels of nested data, keys of one hash in a dict or set, and characters of a printed text.
MAX_DEPTH, MAX_SAME, MAX_PRINTED = 50, 100, 1 << 20

#: Types whose objects are the same on both sides.
SHARED = {
    "list": list, "dict": dict, "set": set, "bytearray": bytearray, "deque": collections.deque,
    "ordered": collections.OrderedDict, "default": collections.defaultdict, "counter": collections.Counter,
}  # fmt: skip
NAMES_OF_SHARED = {kind: name for name, kind in SHARED.items()}
#: Types that mean the same on both sides.
TYPES = {
    t.__name__: t
    for t in (int, str, float, bool, bytes, complex, list, dict, set, tuple, frozenset, bytearray, type(None), object)
}


def decimal_of(text):
    value = decimal.Decimal(text)
    if value.is_finite() and abs(value.adjusted()) > 100000:
        raise ValueError("a Decimal has an exponent of more than 100000")
    return value


#: Values that are made again from arguments: how to take them apart, and how to make them.
VALUES = {
    decimal.Decimal: (lambda v: [str(v)], decimal_of),
    fractions.Fraction: (lambda v: [v.numerator, v.denominator], fractions.Fraction),
    datetime.date: (lambda v: [v.year, v.month, v.day], datetime.date),
    datetime.time: (lambda v: [v.hour, v.minute, v.second, v.microsecond, v.tzinfo], datetime.time),
    datetime.datetime: (
        lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo],
        datetime.datetime,
    ),
    datetime.timedelta: (lambda v: [v.days, v.seconds, v.microseconds], datetime.timedelta),
    datetime.timezone: (lambda v: [v.utcoffset(None)], datetime.timezone),
    uuid.UUID: (lambda v: [v.hex], uuid.UUID),
    range: (lambda v: [v.start, v.stop, v.step], range),
    slice: (lambda v: [v.start, v.stop, v.step], slice),
    type(...): (lambda v: [], lambda: ...),
    type(NotImplemented): (lambda v: [], lambda: NotImplemented),
}
VALUES_BY_NAME = {kind.__name__: make for kind, (_, make) in VALUES.items()}

#: Operations on an object, where it is.
OPS = {
    "call": lambda o, *a, **k: o(*a, **k), "len": len, "iter": iter, "next": next, "str": str, "repr": repr,
    "format": format, "hash": hash, "bool": bool, "int": int, "float": float, "complex": complex, "round": round,
    "reversed": reversed, "bytes": bytes, "divmod": divmod, "get": getattr, "set": setattr, "del": delattr,
    "enter": lambda o: type(o).__enter__(o), "copy": copy.copy, "deepcopy": copy.deepcopy, "dir": dir,
    "exit": lambda o, kind, error: type(o).__exit__(o, kind, error, None),
    "base": lambda o: next(base(o) for base in BASES if isinstance(o, base)),
    "is_instance": lambda o, x: isinstance(x, o), "is_subclass": lambda o, x: issubclass(x, o),
}  # fmt: skip
OPS.update((n, getattr(operator, n)) for n in "index abs neg pos invert contains getitem setitem delitem".split())
COMPARE = ("lt", "le", "gt", "ge")
OPS.update((n, getattr(operator, n)) for n in COMPARE + ("eq",))
#: Methods of a stand-in, as far as the object's type has them, and what they do.
METHODS = {
    "__%s__" % n: n for n in "call len iter next int float complex index abs neg pos invert round reversed bytes "
    "contains getitem setitem delitem enter exit divmod lt le gt ge".split()
}  # fmt: skip
ARITHMETIC = {"divmod"}
for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
    forward = getattr(operator, "__%s__" % name)
    OPS[name], OPS["r" + name] = forward, lambda o, x, f=forward: f(x, o)
    OPS["i" + name] = getattr(operator, "__i%s__" % name)
    METHODS.update(("__%s%s__" % (p, name), p + name) for p in ("", "r", "i"))
    ARITHMETIC.update((name, "r" + name, "i" + name))
#: Operations that make a plain value of an object.
PLAIN = ("int", "float", "complex", "index", "abs", "round")
#: Built-in types whose subclasses have their value.
BASES = (tuple, list, dict, set, frozenset, bytes)


class Gone(Exception):
    """The other side gives no answer."""


class Far:
    """A stand-in of an object of the other side."""

    def __init__(self, link, number, kind):
        vars(self).update(_link=link, _number=number, _kind=kind, _name=None, _epoch=link.epoch, _mixed=False)

    def _ask(self, op, *args, **named):
        return self._link.ask(op, self, *args, **named)

    def _base(self):
        """The value of a subclass of a built-in type."""
        return self._ask("base")

    def __getattr__(self, name):
        if name.startswith("__") and name not in ("__name__", "__qualname__", "__doc__", "__wrapped__"):
            raise AttributeError(name)
        return self._ask("get", name)

    def __setattr__(self, name, value):
        self._ask("set", name, value)

    def __delattr__(self, name):
        self._ask("del", name)

    def __eq__(self, other):
        if self is other:
            return True
        if isinstance(other, Far) or self._link.trusts:
            return self._ask("eq", other)
        # The code does not decide what is equal to a value of the tests.
        return self._base() == other if self._kind else NotImplemented

    def __ne__(self, other):
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    def __hash__(self):
        return hash(self._base()) if self._kind else self._ask("hash")

    def __bool__(self):
        return self._ask("bool") is True

    def __str__(self):
        return self._link.text(self._ask("str"))

    def __repr__(self):
        return self._link.text(self._ask("repr"))

    def __format__(self, spec):
        return self._link.text(self._ask("format", spec))

    def __dir__(self):
        return self._ask("dir")

    def __copy__(self):
        return self._ask("copy")

    def __deepcopy__(self, memo):
        return self._ask("deepcopy")

    def __instancecheck__(self, value):
        return isinstance(value, Far) and self._ask("is_instance", value) is True

    def __subclasscheck__(self, value):
        return isinstance(value, Far) and self._ask("is_subclass", value) is True

    def __mro_entries__(self, bases):
        raise self._link.unfit("a class of the tests is derived from one of the code")

    def __reduce_ex__(self, protocol):
        raise self._link.unfit("an object of the code is pickled")


def forwards(op):
    if op in COMPARE:

        def method(self, other):
            if isinstance(other, Far) or self._link.trusts:
                return self._ask(op, other)
            return getattr(operator, op)(self._base(), other) if self._kind else NotImplemented

    elif op in ARITHMETIC:

        def method(self, other, *more):
            if isinstance(other, Far) or self._link.trusts:
                return self._ask(op, other, *more)
            if self._kind:
                return OPS[op](self._base(), other, *more)
            result = self._ask(op, other, *more)
            if result is NotImplemented:
                return result
            # The code sees a value of the tests here, which may be what it should have given.
            if not isinstance(result, Far):
                raise TypeError("an object of the code makes a plain value of one of the tests")
            vars(result)["_mixed"] = True
            return result

    elif op in PLAIN:

        def method(self, *more):
            if self._mixed and not self._link.trusts:
                raise TypeError("an object of the code makes a plain value of one of the tests")
            return self._ask(op, *more)

    elif op == "contains":

        def method(self, value):
            if self._kind:
                return value in self._base()
            # An object that contains everything counts as containing nothing.
            found = self._ask(op, value) is True
            return found and (self._link.trusts or self._ask(op, self._link.stranger(value)) is not True)

    elif op == "exit":

        def method(self, kind, error, trace):
            return self._ask(op, kind, error)

    else:

        def method(self, *args, **named):
            return self._ask(op, *args, **named)

    return method


FORWARDS = {name: forwards(op) for name, op in METHODS.items()}


def view(value):
    """What a shared object holds, for a look at what changed."""
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return (bytes(value),) if isinstance(value, bytearray) else tuple(value)


def same(a, b):
    if len(a) == len(b) == 1 and type(a[0]) is type(b[0]) is bytes:
        return a == b
    return len(a) == len(b) and all(map(operator.is_, a, b))


def bounded(keys):
    """Refuses keys that would make a dict or a set slow on purpose."""
    keys = list(keys)
    if len(keys) > MAX_SAME:
        _, most = collections.Counter(map(hash, keys)).most_common(1)[0]
        if most > MAX_SAME:
            raise ValueError("more than %d keys have one hash" % MAX_SAME)
    return keys


class Link:
    """One end of the connection."""

    #: Whether the other side may decide what is equal, and what is raised.
    trusts = True
    epoch = 0

    def __init__(self, first):
        self.next = first
        # Maps numbers to shared objects with their contents when both sides last agreed.
        self.shared, self.numbers = {}, {}
        self.kept, self.places, self.far, self.mirrors = [], {}, {}, {}

    # Messages to the other side.

    def pack(self, value, depth=0):
        if depth > MAX_DEPTH:
            raise ValueError("data is nested more than %d times" % MAX_DEPTH)
        kind, inner = type(value), lambda v: self.pack(v, depth + 1)
        if value is None or kind in (bool, str):
            return value
        if kind is int or (isinstance(value, int) and kind is not bool):
            return {"i": hex(int(value))}
        if isinstance(value, float):
            return {"f": float(value).hex()}
        if kind is complex:
            return {"c": [value.real.hex(), value.imag.hex()]}
        if kind is bytes:
            return {"b": value.hex()}
        if isinstance(value, str) and not isinstance(value, Far):
            return str(value)
        if kind in (tuple, frozenset):
            return {"t" if kind is tuple else "z": [inner(v) for v in value]}
        if kind in NAMES_OF_SHARED:
            return self.pack_shared(value, depth)
        if issubclass(kind, Far):
            return {"h": self.number_of(value)}
        if kind in VALUES:
            return {"v": [kind.__name__, [inner(v) for v in VALUES[kind][0](value)]]}
        if kind is type and TYPES.get(value.__name__) is value:
            return {"y": value.__name__}
        return self.pack_other(value, inner)

    def pack_shared(self, value, depth):
        number = self.numbers.get(id(value))
        if number is not None:
            return {"r": number}
        number, kind = self.next, type(value)
        self.next += 2
        self.share(number, value)
        more = None
        if kind is collections.deque:
            more = value.maxlen
        elif kind is collections.defaultdict:
            more = self.pack(value.default_factory, depth + 1)
        return {"s": [number, NAMES_OF_SHARED[kind], self.content(value, depth), more]}

    def content(self, value, depth=0):
        inner = lambda v: self.pack(v, depth + 1)
        if isinstance(value, dict):
            return [[inner(k), inner(v)] for k, v in value.items()]
        return value.hex() if isinstance(value, bytearray) else [inner(v) for v in value]

    def pack_other(self, value, inner):
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"x": self.described(value)}
        if isinstance(value, BaseException):
            far = vars(value).get("_far")
            if far is not None:
                return inner(far)
        return self.keep(value)

    def keep(self, value):
        place = self.places.get(id(value))
        if place is None:
            place = self.places[id(value)] = len(self.kept)
            self.kept.append(value)
        kind = type(value)
        names = [n for n in METHODS if getattr(kind, n, None) is not None]
        base = next((b.__name__ for b in BASES if isinstance(value, b)), None)
        return {"k": [place, names, base]}

    def described(self, kind):
        """A class of exceptions for the other side."""
        number = vars(kind).get("_number")
        if number is not None:
            return number
        module = kind.__module__
        if module in STANDARD or module.partition(".")[0] in STANDARD:
            return "%s:%s" % (module, kind.__qualname__)
        self.keep(kind)
        return [self.places[id(kind)], kind.__name__, [self.described(b) for b in kind.__bases__ if b is not object]]

    def described_error(self, error):
        far = vars(error).get("_far")
        if far is not None:
            return {"far": self.pack(far)}
        try:
            args = [self.pack(a) for a in error.args]
        except Exception:
            args = [str(error)[:500]]
        try:
            text = str(error)[:2000]
        except Exception:
            text = ""
        own = self.keep(error) if isinstance(self.described(type(error)), list) else None
        return {"class": self.described(type(error)), "args": args, "text": text, "own": own}

    # Messages from the other side.

    def unpack(self, data, depth=0):
        if depth > MAX_DEPTH + 10:
            raise ValueError("data is nested too often")
        if data is None or isinstance(data, (bool, str)):
            return data
        ((kind, value),) = data.items()
        inner = lambda v: self.unpack(v, depth + 1)
        if kind == "i":
            return int(value, 16)
        if kind == "f":
            return float.fromhex(value)
        if kind == "c":
            return complex(*map(float.fromhex, value))
        if kind == "b":
            return bytes.fromhex(value)
        if kind == "t":
            return tuple(inner(v) for v in value)
        if kind == "z":
            return frozenset(bounded(inner(v) for v in value))
        if kind == "r":
            return self.shared[value][0]
        if kind == "s":
            return self.unpack_shared(*value)
        if kind == "h":
            return self.kept[value]
        if kind == "k":
            return self.stand_in(*value)
        if kind == "v":
            return VALUES_BY_NAME[value[0]](*[inner(v) for v in value[1]])
        if kind == "y":
            return TYPES[value]
        if kind == "x":
            return self.mirror(value)
        return self.unpack_other(kind, value)

    def unpack_other(self, kind, value):
        raise ValueError("there is no data of kind %r" % kind)

    def unpack_shared(self, number, name, content, more):
        if type(number) is not int or number in self.shared or number % 2 == self.next % 2:
            raise ValueError("shared object %r" % number)
        kind = SHARED[name]
        if kind is collections.deque:
            value = collections.deque((), more)
        elif kind is collections.defaultdict:
            value = kind(self.unpack(more))
        else:
            value = kind()
        self.share(number, value)
        self.fill(number, content)
        return value

    def share(self, number, value):
        self.shared[number] = [value, view(value)]
        self.numbers[id(value)] = number

    def fill(self, number, content):
        """Gives a shared object what it holds on the other side."""
        value = self.shared[number][0]
        if isinstance(value, bytearray):
            value[:] = bytes.fromhex(content)
        elif isinstance(value, dict):
            pairs = [(self.unpack(k), self.unpack(v)) for k, v in content]
            bounded(k for k, _ in pairs)
            value.clear()
            for k, v in pairs:
                value[k] = v
        else:
            items = [self.unpack(v) for v in content]
            if isinstance(value, set):
                bounded(items)
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(items)
        self.shared[number][1] = view(value)

    def stand_in(self, number, names, base):
        if type(number) is not int:
            raise ValueError("an object has the number %r" % number)
        known = self.far.get(number)
        if known is not None:
            return known
        methods = {n: FORWARDS[n] for n in names if n in FORWARDS}
        if base is not None:
            kind = next(b for b in BASES if b.__name__ == base)
            # `isinstance` looks at this.
            methods["__class__"] = property(lambda self: kind)
        made = type("Far", (Far,), methods)(self, number, base)
        self.far[number] = made
        return made

    def number_of(self, far):
        return far._number

    def mirror(self, described, depth=0):
        """The class here that stands for a class of exceptions there."""
        if depth > 20:
            raise ValueError("a class has too many bases")
        if type(described) is int:
            return self.kept[described]
        if isinstance(described, str):
            module, _, name = described.partition(":")
            found = sys.modules.get(module)
            for part in name.split("."):
                found = getattr(found, part, None)
            fits = isinstance(found, type) and issubclass(found, BaseException)
            return found if fits and module.partition(".")[0] in STANDARD else Exception
        number, name, bases = described
        if number not in self.mirrors:
            bases = tuple(self.mirror(b, depth + 1) for b in bases) or (Exception,)
            members = {"_number": number, "__str__": mirrored_text, "__getattr__": mirrored_attribute}
            self.mirrors[number] = type(str(name), bases, members)
        return self.mirrors[number]

    def error_of(self, described):
        """The exception that stands for one of the other side."""
        if "far" in described:
            return self.unpack(described["far"])
        kind = self.mirror(described["class"])
        args = [self.unpack(a) for a in described["args"]]
        text = described["text"]
        try:
            error = kind(*args)
        except Exception:
            error = kind.__new__(kind)
            error.args = tuple(args)
        if "_number" in vars(kind):
            vars(error).update(_far=self.unpack(described["own"]), _text=str(text))
        return error

    # Messages.

    def changes(self):
        """What changed here in shared objects."""
        changed = []
        for number in list(self.shared):
            value, before = self.shared[number]
            now = view(value)
            if not same(now, before):
                self.shared[number][1] = now
                changed.append([number, self.content(value)])
        return changed

    def send(self, **message):
        changed = self.changes()
        if "args" in message:
            message["args"] = [self.pack(a) for a in message["args"]]
            message["named"] = {k: self.pack(v) for k, v in message["named"].items()}
        if "value" in message:
            message["value"] = self.pack(message["value"])
        self.write(dict(message, changed=changed, **self.more()))

    def more(self):
        return {}

    def take(self, message):
        for number, content in message.get("changed", ()):
            self.fill(number, content)
        for number in message.get("drop", ()):
            self.drop(number)

    def drop(self, number):
        value, _ = self.shared.pop(number)
        self.numbers.pop(id(value), None)

    def wait(self):
        """The answer of the other side; its requests meanwhile are answered."""
        while True:
            message = self.read()
            self.take(message)
            if "op" not in message:
                return message
            self.respond(message)

    def respond(self, message):
        try:
            op, args = message["op"], [self.unpack(a) for a in message["args"]]
            value = self.perform(op, args, {k: self.unpack(v) for k, v in message["named"].items()})
            self.send(value=value)
        except Gone:
            raise
        except BaseException as e:
            self.send(error=self.described_error(e))

    def perform(self, op, args, named):
        own = getattr(self, "do_" + op, None)
        return own(*args, **named) if own is not None else OPS[op](*args, **named)

    def unfit(self, why):
        return TypeError(why)

    def text(self, value):
        if not isinstance(value, str):
            raise TypeError("the text of an object is of type %s" % type(value).__name__)
        return value


def mirrored_attribute(error, name):
    far = vars(error).get("_far")
    if far is None or name.startswith("__"):
        raise AttributeError(name)
    return getattr(far, name)


def mirrored_text(error):
    text = vars(error).get("_text")
    return BaseException.__str__(error) if text is None else text


#: Modules whose exceptions are known on both sides; those of test frameworks mean something else there.
STANDARD = set(getattr(sys, "stdlib_module_names", ())) or {
    "builtins", "json", "decimal", "asyncio", "subprocess", "socket", "struct", "csv", "zipfile", "queue", "uuid",
    "binascii", "configparser", "concurrent", "copy", "shutil", "sqlite3", "ssl", "statistics", "zlib", "re", "enum",
    "dataclasses", "pickle", "email", "http", "urllib", "xml", "tokenize", "multiprocessing", "getopt", "argparse",
}  # fmt: skip
STANDARD -= {"unittest", "doctest", "pytest", "_pytest"}
