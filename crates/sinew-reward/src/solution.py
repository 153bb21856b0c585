# The process of a model's code. It follows carry.py, and never sees the tests. Descriptors 0 and 1 lead to them.

import io
import os
import threading

if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(100000)
requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
nothing = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(nothing, fd)


class Code(Link):
    """This end. One thread speaks at a time."""

    def __init__(self):
        super().__init__(1)
        self.lock, self.printed, self.patched = threading.RLock(), [], {}

    def write(self, message):
        answers.write(json.dumps(message).encode() + b"\n")
        answers.flush()

    def read(self):
        line = requests.readline()
        if not line:
            os._exit(0)
        return json.loads(line)

    def more(self):
        printed, self.printed[:] = self.printed[:], []
        return {"printed": printed} if printed else {}

    def send(self, **message):
        with self.lock:
            super().send(**message)

    def ask(self, op, *args, **named):
        with self.lock:
            self.send(op=op, args=args, named=named)
            message = self.wait()
            if "error" in message:
                raise self.error_of(message["error"])
            return self.unpack(message["value"])

    def unpack_other(self, kind, value):
        if kind == "m":
            return __import__(value, fromlist=["x"])
        if kind == "g":
            found = __import__(value[0], fromlist=["x"])
            for part in value[1].split("."):
                found = getattr(found, part)
            return found
        if kind == "E":
            return self.mirror(value[0])(*[self.unpack(a) for a in value[1]])
        return super().unpack_other(kind, value)

    def pack_other(self, value, inner):
        if isinstance(value, types.CoroutineType):
            return {"a": self.keep(value)}
        return super().pack_other(value, inner)

    def do_load(self, code):
        module = types.ModuleType("solution")
        sys.modules["solution"] = module
        self.keep(module)
        exec(compile(code, "solution.py", "exec"), vars(module))
        return [n for n, v in vars(module).items() if not n.startswith("_") and not isinstance(v, types.ModuleType)]

    def do_name(self, name):
        return getattr(self.kept[0], name)

    def do_await(self, coroutine):
        import asyncio

        return asyncio.run(coroutine)

    def do_environment(self, variables):
        os.environ.clear()
        os.environ.update(variables)

    def do_seed(self, state):
        import random

        random.setstate(state)

    def do_patch(self, module, name, *value):
        """Puts a value into a module; without one, what was there before the last."""
        place, before = __import__(module, fromlist=["x"]), self.patched.setdefault((module, name), [])
        if value:
            before.append(getattr(place, name, None))
        setattr(place, name, value[0] if value else before.pop())


class Printed(io.TextIOBase):
    """Standard output or error of the code: the tests may look at it."""

    encoding, errors = "utf-8", "strict"

    def __init__(self, name):
        self.stream = name

    def writable(self):
        return True

    def write(self, text):
        if not isinstance(text, str):
            raise TypeError("write() argument must be str, not %s" % type(text).__name__)
        code.printed.append([self.stream, text])
        if sum(len(t) for _, t in code.printed) > MAX_PRINTED:
            del code.printed[0]
        return len(text)


class Typed(io.TextIOBase):
    """Standard input of the code: what the tests put there."""

    def readable(self):
        return True

    def read(self, size=-1):
        return code.ask("read", "read", size)

    def readline(self, size=-1):
        return code.ask("read", "readline", size)


code = Code()
sys.stdout, sys.stderr, sys.stdin = Printed("stdout"), Printed("stderr"), Typed()
builtins.input = lambda prompt="": code.ask("input", str(prompt))

while True:
    message = code.read()
    code.take(message)
    code.respond(message)
