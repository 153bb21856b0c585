"""Parts of generated tasks: names, texts, checks, and the register of families."""

import dataclasses

WORDS = """apple amber anchor basil beach berry bird blue bread brick candle castle cedar cherry clay cloud coal copper
coral cotton crane daisy delta dove eagle ember fern field flint forest frost garden ginger grape green harbor hazel
honey iron island ivory jade lake lemon lily lime linen maple marble meadow melon mint moon moss oak ocean olive onyx
orange orchid otter palm peach pearl pepper pine plum pond poppy quartz rain raven red reed river robin rose ruby
saffron sage salt sand silver snow spruce stone storm straw sugar sun swan thyme tiger topaz tulip valley velvet violet
walnut water wheat willow wind wolf wood yellow zinc""".split()
FILES = """notes list items data words names orders log report plan draft letter menu stock rooms books tools parts
colors places plants trips songs tasks""".split()
FOLDERS = "archive backup docs done old out pages public saved shared temp work".split()
ANSWERS = "answer result output found total summary".split()
OPTIONS = "color level mode theme shape place owner group".split()


@dataclasses.dataclass
class Made:
    """One task before it is written to a folder."""

    instruction: str
    #: Texts of the first files by path.
    files: dict
    #: Lines of the shell script that solves it.
    solution: list
    #: Checks of the verifier, as `verify.py` reads them.
    checks: list
    #: Paths that may change without a check, such as files that move.
    free: frozenset = frozenset()
    #: Files that can be executed at the start.
    executable: frozenset = frozenset()
    #: Empty folders at the start.
    folders: tuple = ()


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of task: equal instructions but for their names, numbers and files."""

    name: str
    group: str
    make: object
    difficulty: str


FAMILIES = {}


def family(name, group, difficulty="easy"):
    """Registers a function from random numbers to a task."""

    def register(make):
        if name in FAMILIES:
            raise ValueError(f"family {name!r} exists twice")
        FAMILIES[name] = Family(name, group, make, difficulty)
        return make

    return register


def text(lines):
    """A file of lines."""
    return "".join(f"{line}\n" for line in lines)


def words(r, count):
    """Different words."""
    return r.sample(WORDS, count)


def file(r, ending="txt"):
    """The name of a file."""
    return f"{r.choice(FILES)}.{ending}"


def files(r, count, ending="txt"):
    """Names of different files."""
    return [f"{name}.{ending}" for name in r.sample(FILES, count)]


def answer(r):
    """The name of a file that does not exist yet."""
    return f"{r.choice(ANSWERS)}.txt"


def phrases(r, count, use=()):
    """Lines of two or three words, in which every word of `use` stands in one or two lines at random places."""
    pool = [word for word in WORDS if word not in use]
    lines = [r.sample(pool, r.choice((2, 3))) for _ in range(count)]
    for word in use:
        for at in r.sample(range(count), min(count, r.choice((1, 2)))):
            places = [i for i, other in enumerate(lines[at]) if other not in use]
            lines[at][r.choice(places)] = word
    return [" ".join(line) for line in lines]


def is_text(path, lines, before=None):
    """The file has these lines. With `before`, lines that are right already earn nothing."""
    check = {"type": "text", "path": path, "text": lines if isinstance(lines, str) else text(lines)}
    return check if before is None else {**check, "before": before if isinstance(before, str) else text(before)}


def gone(path):
    """There is nothing at this path."""
    return {"type": "gone", "path": path}


def output(argv, lines):
    """The program prints these lines and ends well."""
    return {"type": "output", "path": argv[-1], "argv": list(argv), "text": text(lines)}


def edit(instruction, name, before, after, command):
    """A task that changes the lines of one file."""
    return Made(instruction, {name: text(before)}, [command], [is_text(name, after, before)])


def ask(instruction, given, name, lines, command):
    """A task that writes what it finds in some files into a new one."""
    return Made(instruction, given, [command], [is_text(name, lines)])
