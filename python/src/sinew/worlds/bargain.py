"""Negotiation and a board game against scripted opponents, whose strength is a part of the task.

`Bargain` divides items that both sides value differently; `ConnectThree` is a game on a small board against an opponent that searches
`depth` moves ahead. Both are played by one policy against a fixed one.
"""

import copy
import itertools
import random

from sinew import Done, Env, ToolError, tool

ITEMS = ["apples", "books", "coins"]


class Bargain(Env):
    system = "Two sides divide items. Only you know what they are worth to you. Offer what you keep; the other side takes the rest or offers something else."
    rounds = 5

    def start(self, task):
        self.task = {key: task[key] for key in ("counts", "mine", "theirs", "patience")}
        self.s = {"round": 0, "deal": None, "offer": None}
        worth = ", ".join(f"{n} {item} worth {v} each" for item, n, v in zip(ITEMS, task.counts, task.mine))
        return f"There are {worth}. You have {self.rounds} rounds."

    def value(self, of, items):
        return sum(v * n for v, n in zip(self.task[of], items))

    @tool
    def propose(self, apples: int, books: int, coins: int):
        "Offer a division: what you keep. The rest is for the other side."
        keep, counts = [apples, books, coins], self.task["counts"]
        for item, n, count in zip(ITEMS, keep, counts):
            if not 0 <= n <= count:
                raise ToolError(f"{item} is {n}; allowed: 0 to {count}")
        self.s["round"] += 1
        rest = [count - n for n, count in zip(keep, counts)]
        whole, at = self.value("theirs", counts), self.s["round"]
        # The other side asks for less with every round.
        wants = whole * (self.task["patience"] - 0.1 * (at - 1))
        if self.value("theirs", rest) >= wants:
            self.s["deal"] = keep
            return Done("Accepted.")
        if at >= self.rounds:
            return Done("The other side leaves. There is no deal.")
        # Its own offer: the items that it values least, as long as it has what it wants.
        theirs = list(counts)
        for i in sorted(range(3), key=lambda i: self.task["theirs"][i]):
            while theirs[i] > 0 and self.value("theirs", theirs) - self.task["theirs"][i] >= wants:
                theirs[i] -= 1
        self.s["offer"] = [count - n for count, n in zip(counts, theirs)]
        left = ", ".join(f"{n} {item}" for item, n in zip(ITEMS, self.s["offer"]))
        return f"Refused. The other side offers you: {left}. {self.rounds - at} rounds are left."

    @tool
    def accept(self):
        "Accept the last offer of the other side."
        if self.s["offer"] is None:
            raise ToolError("there is no offer yet")
        self.s["deal"] = self.s["offer"]
        return Done("Agreed.")

    def reward(self, task):
        """The share of the best deal that the other side would have taken."""
        got = self.value("mine", self.s["deal"]) if self.s["deal"] else 0
        share = min(got / max(self.best()[0], 1), 1.0)
        return {"reward": share, "success": share >= 0.9, "deal": self.s["deal"] is not None}

    def state(self):
        return self.s

    def snapshot(self):
        return {"s": self.s, "task": self.task}

    def restore(self, snapshot):
        self.s, self.task = snapshot["s"], snapshot["task"]

    @classmethod
    def tasks(cls, split, seed):
        for i in range(2000 if split == "train" else 200):
            draw = random.Random(f"bargain {split} {seed} {i}")
            counts = [draw.randint(1, 4) for _ in ITEMS]
            worth = [[draw.randint(1, 9) for _ in ITEMS] for _ in range(2)]
            patience = draw.choice([0.5, 0.6, 0.7])
            prompt = "Divide the items so that you get as much as you can."
            yield {
                "prompt": prompt,
                "kind": f"patience {patience}",
                "counts": counts,
                "mine": worth[0],
                "theirs": worth[1],
                "patience": patience,
                "number": i,
            }

    def best(self):
        """Worth of the best division that the other side accepts, the round in which it does, and what is kept."""
        counts, found = self.task["counts"], []
        for at in range(self.rounds):
            wants = self.value("theirs", counts) * (self.task["patience"] - 0.1 * at)
            for keep in itertools.product(*(range(n + 1) for n in counts)):
                rest = [count - n for n, count in zip(keep, counts)]
                if self.value("theirs", rest) >= wants:
                    found.append((self.value("mine", keep), -at, list(keep)))
        worth, at, keep = max(found)
        return worth, -at, keep

    @classmethod
    def gold(cls, task):
        world = cls()
        world.start(task)
        _, at, keep = world.best()
        wait = ("propose", dict(zip(ITEMS, task.counts)))
        return [wait] * at + [("propose", dict(zip(ITEMS, keep)))]


class ConnectThree(Env):
    system = "You are X on a board of 4 columns and 4 rows. A stone falls to the lowest free row. Three in a row, column or diagonal win."
    #: Moves that the opponent looks ahead; 0 plays at random.
    depths = (0, 2)
    width = height = 4

    def start(self, task):
        self.task = {"depth": task.depth, "world": task.world}
        self.s = {"board": ["." * self.width] * self.height, "winner": None, "moves": 0}
        if task.first == "O":
            self.opponent()
        return self.seen()

    def seen(self):
        return "\n".join(["1234", *reversed(self.s["board"])])

    @staticmethod
    def lines(board):
        h, w = len(board), len(board[0])
        for y in range(h):
            for x in range(w):
                for dx, dy in ((1, 0), (0, 1), (1, 1), (1, -1)):
                    cells = [(x + k * dx, y + k * dy) for k in range(3)]
                    if all(0 <= i < w and 0 <= j < h for i, j in cells):
                        yield "".join(board[j][i] for i, j in cells)

    @classmethod
    def winner(cls, board):
        found = set(cls.lines(board)) & {"XXX", "OOO"}
        return found.pop()[0] if found else "draw" if all("." not in row for row in board) else None

    @staticmethod
    def drop(board, x, stone):
        for y, row in enumerate(board):
            if row[x] == ".":
                return [*board[:y], row[:x] + stone + row[x + 1 :], *board[y + 1 :]]
        return None

    @classmethod
    def worth(cls, board, stone, depth):
        """Of a position for the side that moves: 1 wins, -1 loses."""
        won = cls.winner(board)
        if won or depth == 0:
            return 0 if won in (None, "draw") else (1 if won == stone else -1)
        other = "O" if stone == "X" else "X"
        after = (cls.drop(board, x, stone) for x in range(cls.width))
        return max(-cls.worth(board, other, depth - 1) for board in after if board)

    @classmethod
    def best(cls, board, stone, depth, draw):
        other = "O" if stone == "X" else "X"
        moves = [(x, cls.drop(board, x, stone)) for x in range(cls.width)]
        moves = [(x, after) for x, after in moves if after]
        worths = [(-cls.worth(after, other, depth - 1) if depth else 0, x) for x, after in moves]
        top = max(worths)[0]
        return draw.choice([x for worth, x in worths if worth == top])

    def opponent(self):
        draw = random.Random(f"{self.task['world']} {self.s['moves']}")
        x = self.best(self.s["board"], "O", self.task["depth"], draw)
        self.s["board"] = self.drop(self.s["board"], x, "O")
        self.s["moves"] += 1

    @tool
    def play(self, column: int):
        "Drop a stone into a column, 1 to 4."
        if not 1 <= column <= self.width:
            raise ToolError(f"column is {column}; allowed: 1 to {self.width}")
        after = self.drop(self.s["board"], column - 1, "X")
        if after is None:
            raise ToolError(f"column {column} is full")
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
        for i in range(2000 if split == "train" else 200):
            # Against a strong opponent that begins there may be no way to win.
            depth = cls.depths[i % len(cls.depths)]
            first = "X" if depth else "XO"[i // 2 % 2]
            prompt = "You begin." if first == "X" else "The other side began."
            yield {
                "prompt": prompt,
                "kind": f"depth {depth}",
                "depth": depth,
                "first": first,
                "world": f"connect {split} {seed} {i}",
            }

    @classmethod
    def gold(cls, task):
        """Moves that win against this opponent, which plays the same each time."""
        game = cls()
        game.start(task)

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

        return search(game, []) or "There is no way to win."
