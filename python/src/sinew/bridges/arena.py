"""Games of TextArena that need no network: one player, or two against an opponent that draws among the moves it is shown.

TextArena hands out rewards at the end of a game, and ends a game after moves that are not allowed.
"""

import contextlib
import importlib.util
import random
import re
import threading

from sinew import Done, Env, ToolError
from sinew.bridges import draw, package, seeds


class Arena(Env):
    #: The id, as in `textarena.make`.
    id = "TicTacToe-v0"
    #: Players of the game: 1 or 2.
    players = 2
    #: Moves of the opponent, such as `["[0]", "[1]"]`. Empty: those in brackets in the last lines that it is shown.
    replies = []
    train, held_out = 1000, 100
    lock = threading.Lock()

    @classmethod
    def setup_worker(cls):
        cls.textarena = package("textarena", "textarena==0.7.4")
        # A few games draw with NumPy, if it is there.
        cls.numpy = importlib.util.find_spec("numpy") and package("numpy.random", "numpy")
        if cls.players not in (1, 2):
            raise ValueError(f"players is {cls.players}; allowed: 1, 2")

    def start(self, task):
        self.side, self.seed, self.moves, self.over = task.side, task.seed, 0, False
        numbers = self.numpy and self.numpy.RandomState(self.seed % (1 << 32)).get_state()
        self.drawn = random.Random(self.seed).getstate(), numbers
        with self.drawing():
            self.env = self.textarena.make(self.id)
            self.env.reset(num_players=self.players, seed=self.seed)
        return self.turns()

    @contextlib.contextmanager
    def drawing(self):
        """Games draw from the generators that all of Python shares: one at a time, each from its own state."""
        with self.lock:
            others = self.drawing_from(self.drawn)
            try:
                yield
            finally:
                self.drawn = self.drawing_from(others)

    def drawing_from(self, states):
        """Sets the states of the shared generators. The states before."""
        before = random.getstate(), self.numpy and self.numpy.get_state()
        random.setstate(states[0])
        if self.numpy:
            self.numpy.set_state(states[1])
        return before

    def turns(self):
        """The opponent's moves until the model is to move. What the model is shown."""
        while not self.over:
            with self.drawing():
                player, seen = self.env.get_observation()
            if player == self.side:
                return text_of(seen)
            self.advance(self.reply(text_of(seen)))
        return "The game is over."

    def reply(self, seen):
        last = [line for line in seen.splitlines() if "[" in line][-1:] or [""]
        moves = self.replies or re.findall(r"\[[^\[\]]+\]", last[0]) or ["[0]"]
        return draw(self.seed, self.moves).choice(moves)

    def advance(self, text):
        self.moves += 1
        with self.drawing():
            done, _ = self.env.step(action=text)
        self.over = bool(done)
        if self.over:
            self.rewards, self.info = self.env.close()

    def step(self, text):
        if self.over:
            raise ToolError("the game is over")
        self.advance(text)
        seen = self.turns()
        return Done(seen) if self.over else seen

    def reward(self):
        """The game's own reward; -1 for a game that is not over."""
        value = float(self.rewards.get(self.side, 0.0)) if self.over else -1.0
        return {"reward": value, "success": value > 0, "moves": self.moves}

    @classmethod
    def tasks(cls, split, seed):
        for i, number in enumerate(seeds(split, seed, cls.train, cls.held_out)):
            side = i % cls.players
            yield {"prompt": f"{cls.id}, player {side}.", "kind": f"player {side}", "seed": number, "side": side}


def text_of(seen):
    """What a player is shown: a text, or the messages of the game."""
    if isinstance(seen, str):
        return seen
    return "\n".join(part[1] if isinstance(part, (tuple, list)) else str(part) for part in seen)
