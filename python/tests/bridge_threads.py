"""Episodes that run at once in threads are those that run one after another, though their packages share state.

The packages are large, so that what they share is made here: generators of random numbers, and parsers.
"""

import random
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, current_thread

import numpy

from sinew import ToolError
from sinew.bridges.arena import Arena
from sinew.bridges.browsergym import BrowserGym
from sinew.bridges.textworld import TextWorld

THREADS = 8
#: Threads take turns so often that a call is often interrupted.
sys.setswitchinterval(1e-5)


def at_once(function, arguments):
    barrier = Barrier(THREADS)

    def begun(argument):
        barrier.wait(60)
        return function(argument)

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(begun, arguments))


class Dice:
    """A game of one player as those of TextArena: seeded globally, and drawn from the global generators."""

    def reset(self, num_players, seed):
        random.seed(seed)
        self.turns, self.seen = 0, self.rolled()

    def rolled(self):
        return " ".join(str(random.randint(1, 6)) + str(numpy.random.randint(1, 6)) for _ in range(200))

    def get_observation(self):
        return 0, self.seen

    def step(self, action):
        self.turns, self.seen = self.turns + 1, self.rolled()
        return self.turns == 5, {}

    def close(self):
        return {0: 1.0}, {}


sys.modules["textarena"] = types.ModuleType("textarena")
sys.modules["textarena"].make = lambda id: Dice()
Arena.players = 1
Arena.setup_worker()


def rolls(seed):
    episode = Arena()
    seen = [episode.start(types.SimpleNamespace(side=0, seed=seed))]
    while not episode.over:
        answer = episode.step("[roll]")
        seen.append(getattr(answer, "observation", answer))
    return seen, episode.reward()["reward"]


seeds = [number // 2 for number in range(THREADS)]
alone = [rolls(seed) for seed in seeds]
random.seed(7)
assert at_once(rolls, seeds) == alone, "games differ"
assert random.random() == random.Random(7).random(), "the generator of others was used"
assert alone[0] == alone[1] != alone[2], alone


class Parser:
    """One that fails if it is asked while it works, as that of TextWorld."""

    works = False

    def parse(self, text):
        assert not self.works, "two threads use the parser"
        self.works = True
        for _ in range(100):
            # Other threads run.
            time.sleep(0)
        self.works = False
        return text


for name in ("textworld", "textworld.logic"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["textworld.logic"]._PARSER = parser = Parser()
TextWorld.setup_worker()
texts = list(map(str, range(THREADS)))
assert at_once(lambda text: parser.parse(text), texts) == texts


class Actions:
    """The set of actions of BrowserGym: its parser may be used by one thread."""

    action_set = {"click": None}

    def to_python_code(self, text):
        used.add(current_thread().name)
        if text == "click(":
            raise ValueError("Received an empty action.")


used = set()
BrowserGym.thread, BrowserGym.actions = ThreadPoolExecutor(1, "browser"), Actions()
assert at_once(BrowserGym().parsed, ["click('1')"] * THREADS) == ["click('1')"] * THREADS
try:
    BrowserGym().parsed("click(")
except ToolError as error:
    assert "is no action" in str(error), error
else:
    raise AssertionError("an action that is none was taken")
assert used == {"browser_0"}, used

print("ok")
