"""The worlds in few words, for models from scratch that read bytes: a turn is text, one command a line, and observations are short.

`Commands` makes that of any world: `take egg, fridge` is its tool `take` with two arguments. Rules, rewards and gold policies are those of the
world; only the texts and the sizes differ.
"""

import inspect
import random
import typing

from sinew import Done, Env, Step, ToolError, tool
from sinew.worlds import bargain, household, memory, phone, physics, survival

#: Commands of one turn; what follows is not run.
LINES = 4


class Commands(Env):
    """Runs a world whose actions are lines of text: the name of a tool, then its arguments with commas between them."""

    #: The class of the world.
    world = None

    @staticmethod
    def prompt(row):
        "The prompt of a task."
        return row["prompt"]

    @classmethod
    def commands(cls):
        "Tools of the world: their names, and their parameters with types."
        found = {}
        for name in dir(cls.world):
            function = getattr(cls.world, name)
            if hasattr(function, "__sinew_tool__"):
                kept = list(inspect.signature(function).parameters.values())[1:]
                found[name] = {p.name: p.annotation for p in kept}
        return found

    @classmethod
    def line(cls, name, arguments):
        "A call as a line."
        flat = []
        for parameter in cls.commands()[name]:
            value = arguments.get(parameter, "")
            flat += value if isinstance(value, list) else [str(value)]
        return f"{name} {', '.join(flat)}".strip()

    @classmethod
    def call(cls, line):
        "A line as a call. Raises ToolError."
        name, _, rest = line.strip().partition(" ")
        known = cls.commands()
        if name not in known:
            raise ToolError(f"allowed: {', '.join(known)}, done")
        parts = [part.strip() for part in rest.split(",")] if rest.strip() else []
        arguments = {}
        for parameter, kind in known[name].items():
            allowed = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
            kind = type(allowed[0]) if allowed else kind
            if kind not in (int, float, str):
                arguments[parameter], parts = parts, []
                continue
            # A text at the end may hold commas itself.
            last = parameter == list(known[name])[-1]
            value, parts = (", ".join(parts), []) if last else (parts[0] if parts else "", parts[1:])
            arguments[parameter] = value = cls.value(parameter, kind, value)
            if allowed and value not in allowed:
                raise ToolError(f"{parameter}: allowed: {', '.join(map(str, allowed))}")
        return name, arguments

    @staticmethod
    def value(parameter, kind, text):
        "An argument. Numbers are finite."
        try:
            value = kind(text)
        except (ValueError, OverflowError):
            raise ToolError(f"{parameter} is no {kind.__name__}") from None
        if kind is not str and not abs(value) < 1e9:
            raise ToolError(f"{parameter} is no {kind.__name__}")
        return value

    def start(self, task):
        self.inner = self.world()
        return self.inner.start(task)

    def step(self, text):
        lines, seen, fresh = [line for line in text.split("\n") if line.strip()], "nothing done", False
        for line in lines[:LINES]:
            if line.strip() == "done":
                return Done("The end.")
            try:
                name, arguments = self.call(line)
                seen = getattr(self.inner, name)(**arguments)
            except ToolError as error:
                if not fresh:
                    raise
                # What a line before took out of the context stays out of it.
                return Step(f"Error: {error}", fresh=True)
            if isinstance(seen, Step):
                if seen.done:
                    return seen
                seen, fresh = seen.observation, fresh or seen.fresh
        return Step(", ".join(seen) if isinstance(seen, list) else seen, fresh=fresh)

    def reward(self, task):
        return self.inner.reward(task)

    def state(self):
        return self.inner.state()

    def snapshot(self):
        return self.inner.snapshot()

    def restore(self, snapshot):
        self.inner = self.world()
        self.inner.restore(snapshot)

    @classmethod
    def tasks(cls, split, seed):
        for row in cls.world.tasks(split, seed):
            yield {**row, "prompt": cls.prompt(row)}

    @classmethod
    def gold(cls, task):
        way = cls.world.gold(task)
        if isinstance(way, str):
            return "done"
        turns = []
        for action in way:
            calls = action if isinstance(action, list) else [action]
            turns.append("done" if isinstance(action, str) else "\n".join(cls.line(*call) for call in calls))
        return turns


class Bargain(Commands):
    class world(bargain.Bargain):
        def start(self, task):
            super().start(task)
            return " ".join(f"{n}x{v}" for n, v in zip(task.counts, task.mine))

        @tool
        def ask(self, item: typing.Literal["apples", "books", "coins"]):
            super().ask(item)
            told = [str(v) if one in self.s["asked"] else "?" for one, v in zip(bargain.ITEMS, self.task["theirs"])]
            return "worth " + " ".join(told)

        @tool
        def propose(self, apples: int, books: int, coins: int):
            said = super().propose(apples, books, coins)
            return said if isinstance(said, Step) else "offer " + ", ".join(map(str, self.s["offer"]))


    @staticmethod
    def prompt(row):
        return "divide"


class Connect(Commands):
    class world(bargain.ConnectThree):
        depths = (2,)

        def seen(self):
            return "\n".join(reversed(self.s["board"]))


class House(Commands):
    class world(household.Household):
        rooms = 1
        things = 2

        def seen(self):
            shown = []
            for place in household.ROOMS[self.s["room"]]:
                inside = sorted(thing for thing, where in self.s["at"].items() if where == place)
                if place in household.CLOSED and place not in self.s["open"]:
                    inside = ["closed"]
                if inside:
                    shown.append(" ".join([place, *inside]))
            shown += [f"hold {thing}" for thing, where in self.s["at"].items() if where == "hand"]
            return ", ".join(shown)

    @staticmethod
    def prompt(row):
        goal = row["goal"]
        return " ".join([goal["how"] or "move", goal["thing"], "to", goal["place"]])


class Memory(Commands):
    """People are capital letters, what they have is a small one. All of it is asked for, so that all has to be kept."""

    class world(memory.Memory):
        pages = 3
        facts = 1
        room = 3
        questions = 1

        @classmethod
        def story(cls, world):
            draw, now = random.Random(world), {}
            book = [[(draw.choice("ABCD"), "has", draw.choice("stuvwxyz"))] for _ in range(cls.pages)]
            for ((who, _, what),) in book:
                now[who] = what
            who = draw.choice(sorted(now))
            return book, [(who, "has", now[who])]

        def page(self):
            return self.shown()

        def shown(self):
            at = self.s["page"]
            if at < len(self.book):
                return " ".join(f"{who} {what}" for who, _, what in self.book[at])
            return f"{self.asked[0][0]}?"

        @classmethod
        def gold(cls, task):
            book, ((_, _, what),) = cls.story(task.world)
            way = [[("store", dict(subject=who, relation="has", object=it)), ("next_page", {})] for ((who, _, it),) in book]
            return [*way, ("answer", {"word": what})]

    @staticmethod
    def prompt(row):
        return ""


class Phone(Commands):
    class world(phone.Phone):
        contacts = 3

        def seen(self):
            at, every = self.s["scroll"], self.elements()
            shown = [(i, text.split(" ", 1)[1]) for i, (text, _) in enumerate(every)]
            return "\n".join(f"{i} {text}" for i, text in shown[at : at + phone.SHOWN])


class Table(Commands):
    """Points are cells of 10 cm: cell 6, 5 has its middle at 65, 55."""

    class world(physics.Tabletop):
        discs = 1

        @classmethod
        def scene(cls, world):
            scene = super().scene(world)
            scene["discs"] = {colour: [v // 10 * 10 + 5 for v in at] for colour, at in scene["discs"].items()}
            return scene

        @classmethod
        def tasks(cls, split, seed):
            for row in super().tasks(split, seed):
                target = [v // 10 * 10 + 5 for v in row["target"]]
                if target not in cls.scene(row["world"])["discs"].values():
                    yield {**row, "target": target}

        @classmethod
        def gold(cls, task):
            return [(name, {k: int(v // 10) for k, v in given.items()}) for name, given in super().gold(task)]

        def seen(self):
            return " ".join(f"{a // 10:.0f}, {b // 10:.0f}" for a, b in self.s["discs"].values())

        @tool
        def move(self, x: int, y: int):
            return super().move(10 * x + 5, 10 * y + 5)


    @staticmethod
    def prompt(row):
        x, y = row["target"]
        return f"to {x // 10}, {y // 10}"

    @classmethod
    def gold(cls, task):
        return ["\n".join(super().gold(task))]


class Survival(Commands):
    class world(survival.Survival):
        goals = ("table",)

        def seen(self):
            rows = super().seen().split("\n")[:-1]
            return "\n".join([*(row.replace(" ", "#") for row in rows), f"wood {self.s['has'].get('wood', 0)}"])
