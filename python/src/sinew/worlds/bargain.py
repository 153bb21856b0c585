"""Negotiation and a board game against scripted opponents, whose strength is a part of the task.

`Bargain` divides items that both sides value differently; `ConnectThree` is a game on a small board against an opponent that searches
`depth` moves ahead. Both are played by one policy against a fixed one.
"""

import copy
import functools
import itertools
import random
from typing import Literal

from sinew import Done, Env, ToolError, tool

ITEMS = ["apples", "books", "coins"]
#: What one of an item is worth to a side, in another order for each; and the share of all that the other side settles for.
WORTHS, PATIENCE = (1, 2, 8), (0.6, 0.7, 0.8)


class Bargain(Env):
    """The other side never gives in by itself. What pays is to know what it wants: it says so, if it is asked."""

    system = (
        "Two sides divide items. Only you know what they are worth to you. `ask` what an item is worth to the other side: it says the truth. "
        "Then propose what you keep. Each refusal makes a deal worth a fifth less to you."
    )
    #: Proposals until the other side leaves, and the share of a deal's worth that is left after each refusal.
    rounds = 4
    after_refusal = 0.8
    #: What the other side offers leaves it so much more than what it settles for, as a share of all.
    margin = 0.25
    #: Questions that it answers.
    questions = 6

    def start(self, task):
        self.task = {key: task[key] for key in ("counts", "mine", "theirs", "patience")}
        self.s = {"round": 0, "asked": [], "deal": None, "offer": None}
        worth = ", ".join(f"{n} {item} worth {v} each" for item, n, v in zip(ITEMS, task.counts, task.mine))
        return f"There are {worth}. You have {self.rounds} proposals."

    @tool
    def ask(self, item: Literal["apples", "books", "coins"]):
        "Ask what one of an item is worth to the other side."
        if len(self.s["asked"]) >= self.questions:
            raise ToolError("the other side answers no more questions")
        self.s["asked"].append(item)
        return "To the other side: " + ", ".join(self.told())

    def told(self):
        """What the other side said so far."""
        return [f"{item} {v}" for item, v in zip(ITEMS, self.task["theirs"]) if item in self.s["asked"]]

    @tool
    def propose(self, apples: int, books: int, coins: int):
        "Offer a division: what you keep. The rest is for the other side."
        keep, counts = [apples, books, coins], self.task["counts"]
        for item, n, count in zip(ITEMS, keep, counts):
            if not 0 <= n <= count:
                raise ToolError(f"{item} is {n}; allowed: 0 to {count}")
        self.s["round"] += 1
        if accepts(self.task, keep, 0.0):
            self.s["deal"] = keep
            return Done("Accepted.")
        left = self.rounds - self.s["round"]
        if not left:
            return Done("The other side leaves. There is no deal.")
        self.s["offer"] = offer(self.task, self.margin)
        return f"Refused. The other side offers you: {listed(self.s['offer'])}. {left} proposals are left."

    @tool
    def accept(self):
        "Accept the last offer of the other side."
        if self.s["offer"] is None:
            raise ToolError("there is no offer yet")
        self.s["deal"] = self.s["offer"]
        return Done("Agreed.")

    def reward(self, task):
        """What a deal adds to that of a player who never asks, as a share of what can be added."""
        row = {key: task[key] for key in ("counts", "mine", "theirs", "patience")}
        deal = self.s["deal"]
        unasked, best = self.unasked(row), worth(row["mine"], self.best(row))
        got = worth(row["mine"], deal) if deal else 0
        refusals = self.s["round"] - (deal is not None and deal != self.s["offer"])
        added = max(0.0, (got - unasked) / (best - unasked)) * self.after_refusal**refusals
        return {"reward": added, "success": added >= 0.6, "deal": deal is not None, "share": got / best}

    def state(self):
        return self.s

    def snapshot(self):
        return {"s": self.s, "task": self.task}

    def restore(self, snapshot):
        self.s, self.task = snapshot["s"], snapshot["task"]

    @classmethod
    def tasks(cls, split, seed):
        made, i = 0, 0
        while made < (1000 if split == "train" else 200):
            draw = random.Random(f"bargain {split} {seed} {i}")
            i += 1
            values = [draw.sample(WORTHS, len(ITEMS)) for _ in range(2)]
            row = {
                "counts": [draw.randint(1, 4) for _ in ITEMS],
                "mine": values[0],
                "theirs": values[1],
                "patience": draw.choice(PATIENCE),
            }
            best = worth(row["mine"], cls.best(row))
            # Where one who never asks does as well, there is nothing to learn.
            if best - cls.unasked(row) < 0.25 * best:
                continue
            made += 1
            prompt = "Divide the items so that you get as much as you can."
            yield {"prompt": prompt, "kind": f"patience {row['patience']}", **row, "number": i}

    @staticmethod
    def best(row):
        """What is kept in the best division that the other side accepts."""
        every = itertools.product(*(range(n + 1) for n in row["counts"]))
        return list(max((k for k in every if accepts(row, k, 0.0)), key=lambda k: (worth(row["mine"], k), k)))

    @classmethod
    def unasked(cls, row):
        """Worth of the deal of a player who never asks: it takes the first offer, or gives what is worth least to it, one after
        another, from the best of six beginnings."""
        own, found = sorted(range(len(ITEMS)), key=lambda i: row["mine"][i]), [worth(row["mine"], offer(row, cls.margin))]
        given = [i for i in own for _ in range(row["counts"][i])]
        for begin in range(6):
            for more in range(cls.rounds - 1):
                gone = given[: begin + more]
                keep = [n - gone.count(i) for i, n in enumerate(row["counts"])]
                if accepts(row, keep, 0.0):
                    found.append(worth(row["mine"], keep))
                    break
        return max(found)

    @classmethod
    def gold(cls, task):
        return [[("ask", {"item": item}) for item in ITEMS], ("propose", dict(zip(ITEMS, cls.best(task))))]


def worth(values, items):
    return sum(v * n for v, n in zip(values, items))


def accepts(row, keep, more):
    """Whether a division leaves the other side what it settles for, and a share more of all."""
    rest = [count - n for n, count in zip(keep, row["counts"])]
    wants = worth(row["theirs"], row["counts"]) * min(1.0, row["patience"] + more)
    return worth(row["theirs"], rest) >= wants - 1e-9


def offer(row, margin):
    """What the other side offers: the items that it values least, as long as it keeps what it asks for."""
    keep = [0] * len(ITEMS)
    for i in sorted(range(len(ITEMS)), key=lambda i: row["theirs"][i]):
        while keep[i] < row["counts"][i]:
            keep[i] += 1
            if not accepts(row, keep, margin):
                keep[i] -= 1
                break
    return keep


def listed(items):
    return ", ".join(f"{n} {item}" for item, n in zip(ITEMS, items))


class ConnectThree(Env):
    system = "You are X on a board of 4 columns and 4 rows. A stone falls to the lowest free row. Three in a row, column or diagonal win."
    #: Moves that the opponent looks ahead. One that plays at random loses to fixed columns; from 2 on it sees threats.
    depths = (2, 4)
    #: Stones on the board at the start: no fixed columns fit all openings. On an empty board who begins wins by force.
    stones = 4
    width = height = 4

    def start(self, task):
        self.task = {"depth": task.depth, "world": task.world}
        self.s = {"board": self.opening(task.world), "winner": None, "moves": 0}
        return self.seen()

    @classmethod
    def opening(cls, world):
        """The board of a seed, on which X is to move."""
        draw, board = random.Random(f"opening {world}"), ["." * cls.width] * cls.height
        for turn in range(cls.stones):
            after = [cls.drop(board, x, "XO"[turn % 2]) for x in range(cls.width)]
            board = draw.choice([board for board in after if board])
        return board

    def seen(self):
        return "\n".join(["1234", *reversed(self.s["board"])])

    @classmethod
    def winner(cls, board):
        return found_winner(tuple(board))

    @staticmethod
    def drop(board, x, stone):
        for y, row in enumerate(board):
            if row[x] == ".":
                return [*board[:y], row[:x] + stone + row[x + 1 :], *board[y + 1 :]]
        return None

    @classmethod
    def best(cls, board, stone, depth, draw):
        other = "O" if stone == "X" else "X"
        moves = [(x, cls.drop(board, x, stone)) for x in range(cls.width)]
        moves = [(x, after) for x, after in moves if after]
        worths = [(-position(tuple(after), other, depth - 1) if depth else 0, x) for x, after in moves]
        top = max(worths)[0]
        return draw.choice([x for worth, x in worths if worth == top])

    def opponent(self):
        draw = random.Random(f"{self.task['world']} {self.s['moves']}")
        x = self.best(self.s["board"], "O", self.task["depth"], draw)
        self.s["board"] = self.drop(self.s["board"], x, "O")
        self.s["moves"] += 1

    @tool
    def play(self, column: Literal[1, 2, 3, 4]):
        "Drop a stone into a column, 1 to 4. One for a full column loses the game."
        if not 1 <= column <= self.width:
            raise ToolError(f"column is {column}; allowed: 1 to {self.width}")
        after = self.drop(self.s["board"], column - 1, "X")
        if after is None:
            self.s["winner"] = "O"
            return Done(f"Column {column} is full. The end: O.")
        self.s["board"] = after
        self.s["moves"] += 1
        self.s["winner"] = self.winner(after)
        if not self.s["winner"]:
            self.opponent()
            self.s["winner"] = self.winner(self.s["board"])
        if self.s["winner"]:
            return Done(f"{self.seen()}\nThe end: {self.s['winner']}.")
        return self.seen()

    def reward(self, task):
        won = self.s["winner"]
        return {
            "reward": {"X": 1.0, "draw": 0.5}.get(won, 0.0),
            "success": won == "X",
            "moves": self.s["moves"],
        }

    def state(self):
        return self.s["board"]

    def snapshot(self):
        return {"s": self.s, "task": self.task}

    def restore(self, snapshot):
        self.s, self.task = snapshot["s"], snapshot["task"]

    @classmethod
    def tasks(cls, split, seed):
        made, i = 0, 0
        while made < (300 if split == "train" else 100):
            depth = cls.depths[made % len(cls.depths)]
            row = {
                "prompt": "It is your turn.",
                "kind": f"depth {depth}",
                "depth": depth,
                "world": f"connect {split} {seed} {i}",
            }
            i += 1
            # No opening is over, or won by one move; each can be won.
            board = cls.opening(row["world"])
            after = [cls.drop(board, x, "X") for x in range(cls.width)]
            if not any(map(cls.winner, filter(None, [board, *after]))) and cls.way(row):
                made += 1
                yield row

    @classmethod
    def gold(cls, task):
        return cls.way(task)

    @classmethod
    def way(cls, row):
        """Moves that win against this opponent, which plays the same each time. None: there are none."""
        game = cls()
        game.task = {"depth": row["depth"], "world": row["world"]}
        game.s = {"board": cls.opening(row["world"]), "winner": None, "moves": 0}

        def search(game, way):
            for column in range(1, cls.width + 1):
                if cls.drop(game.s["board"], column - 1, "X") is None:
                    continue
                after = cls()
                after.restore(copy.deepcopy(game.snapshot()))
                after.play(column)
                here = [*way, ("play", {"column": column})]
                if after.s["winner"] == "X":
                    return here
                found = None if after.s["winner"] else search(after, here)
                if found:
                    return found
            return None

        return search(game, [])


@functools.lru_cache(maxsize=4)
def lines(w, h):
    """Cells of each three in a row, column or diagonal."""
    ways, found = ((1, 0), (0, 1), (1, 1), (1, -1)), []
    for x, y, (dx, dy) in itertools.product(range(w), range(h), ways):
        cells = [(x + k * dx, y + k * dy) for k in range(3)]
        if all(0 <= i < w and 0 <= j < h for i, j in cells):
            found.append(cells)
    return found


@functools.lru_cache(maxsize=1 << 16)
def found_winner(board):
    for (a, b), (c, d), (e, f) in lines(len(board[0]), len(board)):
        if board[b][a] != "." and board[b][a] == board[d][c] == board[f][e]:
            return board[b][a]
    return "draw" if all("." not in row for row in board) else None


@functools.lru_cache(maxsize=1 << 16)
def position(board, stone, depth):
    """Worth of a position for the side that moves: 1 wins, -1 loses. It looks `depth` moves ahead."""
    won = found_winner(board)
    if won or depth == 0:
        return 0 if won in (None, "draw") else (1 if won == stone else -1)
    other = "O" if stone == "X" else "X"
    after = (ConnectThree.drop(list(board), x, stone) for x in range(len(board[0])))
    return max(-position(tuple(board), other, depth - 1) for board in after if board)
