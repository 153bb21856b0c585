"""A survival grid with crafting: gather, craft and eat in a world of which a small part is seen.

The goal is an item of the tree wood -> table -> pickaxe -> stone -> furnace ...; `goals` sets how far the tree goes.
"""

import random
from typing import Literal

from sinew import Done, Env, ToolError, tool

SIZE = 9
VIEW = 2
MOVES = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}
#: What a cell gives, and what is needed for that.
GIVES = {
    "T": ("wood", None),
    "S": ("stone", "pickaxe"),
    "I": ("iron", "stone pickaxe"),
    "B": ("berries", None),
}
#: What an item costs, and what must have been made before.
RECIPES = {
    "table": ({"wood": 2}, None),
    "pickaxe": ({"wood": 1}, "table"),
    "sword": ({"wood": 1}, "table"),
    "stone pickaxe": ({"wood": 1, "stone": 1}, "table"),
    "furnace": ({"stone": 2}, "table"),
    "iron tool": ({"iron": 1, "wood": 1}, "furnace"),
}


class Survival(Env):
    system = (
        "You are @ on a map. T tree, S stone, I iron, B berries, # water, . ground. Gather what is next to you. "
        "Craft: table 2 wood; pickaxe and sword 1 wood (table); stone pickaxe 1 wood 1 stone (table); furnace 2 stone (table); "
        "iron tool 1 iron 1 wood (furnace). Stone needs a pickaxe, iron a stone pickaxe. Eat berries before your food is 0."
    )
    #: Items that are asked for.
    goals = ("table", "pickaxe", "sword", "stone pickaxe", "furnace", "iron tool")
    #: Actions that one has food for at the start; berries give 20. To gather where nothing is costs `vain`.
    food = 60
    vain = 15

    def start(self, task):
        self.goal = task.goal
        self.s = {"cells": self.land(task.world), "at": [SIZE // 2, SIZE // 2], "has": {}, "food": self.food}
        return self.seen()

    @staticmethod
    def land(world):
        """The land of a seed. The middle is ground, and there is enough of everything next to ground."""
        draw = random.Random(world)
        cells = [["."] * SIZE for _ in range(SIZE)]
        # Every second cell of every second row stays ground, so that each cell can be reached.
        spots = [(x, y) for y in range(SIZE) for x in range(SIZE) if (x % 2 == 1 and y % 2 == 1)]
        draw.shuffle(spots)
        for kind in "TTTTTTSSSSIIBB##":
            x, y = spots.pop()
            cells[y][x] = kind
        return ["".join(row) for row in cells]

    def seen(self):
        s, (x, y) = self.s, self.s["at"]
        rows = []
        for j in range(y - VIEW, y + VIEW + 1):
            row = ""
            for i in range(x - VIEW, x + VIEW + 1):
                inside = 0 <= i < SIZE and 0 <= j < SIZE
                row += "@" if (i, j) == (x, y) else s["cells"][j][i] if inside else " "
            rows.append(row)
        has = ", ".join(f"{n} {item}" for item, n in sorted(s["has"].items()) if n) or "nothing"
        return "\n".join([*rows, f"At {x},{y}. You have {has}. Food {s['food']}."])

    def spend(self, actions=1):
        if self.s["food"] <= 0:
            raise ToolError("You starved: end your turn without a call.")
        self.s["food"] -= actions

    @tool
    def move(self, direction: Literal["north", "south", "west", "east"], steps: int = 1):
        "Go north, south, west or east, 1 to 8 steps. Only ground can be walked on."
        if not 1 <= steps <= 8:
            raise ToolError(f"steps is {steps}; allowed: 1 to 8")
        (x, y), (dx, dy) = self.s["at"], MOVES[direction]
        for _ in range(steps):
            self.spend()
            inside = 0 <= x + dx < SIZE and 0 <= y + dy < SIZE
            if not inside or self.s["cells"][y + dy][x + dx] != ".":
                break
            x, y = x + dx, y + dy
            self.s["at"] = [x, y]
        return self.seen()

    @tool
    def gather(self, direction: Literal["north", "south", "west", "east"]):
        """Gather from the cell next to you: wood from T, stone from S, iron from I, berries from B. The cell is
        ground then. In vain it tires."""
        self.spend()
        x, y = (a + b for a, b in zip(self.s["at"], MOVES[direction]))
        cell = self.s["cells"][y][x] if 0 <= x < SIZE and 0 <= y < SIZE else " "
        item, needs = GIVES.get(cell, (None, None))
        if item is None or needs and not self.s["has"].get(needs):
            self.s["food"] = max(0, self.s["food"] - self.vain)
            raise ToolError(f"{item} needs a {needs}" if item else f"there is nothing to gather in the {direction}")
        row = self.s["cells"][y]
        self.s["cells"][y] = row[:x] + "." + row[x + 1 :]
        self.s["has"][item] = self.s["has"].get(item, 0) + 1
        return self.seen()

    @tool
    def craft(self, item: Literal["table", "pickaxe", "sword", "stone pickaxe", "furnace", "iron tool"]):
        "Make an item from what you have."
        self.spend()
        cost, needs = RECIPES[item]
        has = self.s["has"]
        if needs and not has.get(needs):
            raise ToolError(f"a {item} needs a {needs}")
        for part, count in cost.items():
            if has.get(part, 0) < count:
                raise ToolError(f"a {item} needs {count} {part}; you have {has.get(part, 0)}")
        for part, count in cost.items():
            has[part] -= count
        has[item] = has.get(item, 0) + 1
        return Done(f"You have the {item}.") if item == self.goal else self.seen()

    @tool
    def eat(self):
        "Eat berries that you have."
        self.spend()
        if not self.s["has"].get("berries"):
            raise ToolError("you have no berries")
        self.s["has"]["berries"] -= 1
        self.s["food"] += 20
        return self.seen()

    def reward(self, task):
        made = [item for item in RECIPES if self.s["has"].get(item)]
        return {"reward": self.goal in made, "items": len(made), "food": self.s["food"]}

    def state(self):
        return {key: value for key, value in self.s.items() if key != "food"}

    def snapshot(self):
        return {"s": self.s, "goal": self.goal}

    def restore(self, snapshot):
        self.s, self.goal = snapshot["s"], snapshot["goal"]

    @classmethod
    def tasks(cls, split, seed):
        for i in range(2000 if split == "train" else 200):
            goal = cls.goals[i % len(cls.goals)]
            yield {
                "prompt": f"Make: {goal}.",
                "kind": goal,
                "goal": goal,
                "world": f"survival {split} {seed} {i}",
            }

    @classmethod
    def gold(cls, task):
        """Gathers the nearest cell of each kind that is needed, and crafts."""
        cells, at, way = cls.land(task.world), [SIZE // 2, SIZE // 2], []
        has, food = {}, cls.food

        def walk(x, y):
            # Obstacles stand at odd columns of odd rows, so a way along even columns and rows is free.
            moves = []
            cx, cy = at
            if cx % 2 == 1 and cy % 2 == 0 and y != cy:
                moves.append((1, 0))
                cx += 1
            if cy % 2 == 1 and cx % 2 == 0 and x != cx and cy != y:
                moves.append((0, 1))
                cy += 1
            if cx % 2 == 0:
                moves += [(0, 1 if y > cy else -1)] * abs(y - cy)
                moves += [(1 if x > cx else -1, 0)] * abs(x - cx)
            else:
                moves += [(1 if x > cx else -1, 0)] * abs(x - cx)
                moves += [(0, 1 if y > cy else -1)] * abs(y - cy)
            names = {delta: name for name, delta in MOVES.items()}
            for delta in moves:
                if way and way[-1][0] == "move" and way[-1][1]["direction"] == names[delta]:
                    way[-1][1]["steps"] += 1
                else:
                    way.append(("move", {"direction": names[delta], "steps": 1}))
            at[:] = [x, y]
            return len(moves)

        def get(item):
            nonlocal food
            letter = next(c for c, (gives, _) in GIVES.items() if gives == item)
            spots = [(x, y) for y in range(SIZE) for x in range(SIZE) if cells[y][x] == letter]
            x, y = min(spots, key=lambda p: abs(p[0] - at[0]) + abs(p[1] - at[1]))
            # What can be gathered stands at odd columns of odd rows: the cell to its north is ground.
            food -= walk(x, y - 1) + 1
            way.append(("gather", {"direction": "south"}))
            cells[y] = cells[y][:x] + "." + cells[y][x + 1 :]
            has[item] = has.get(item, 0) + 1

        def need(item, count):
            nonlocal food
            while has.get(item, 0) < count:
                if item not in RECIPES:
                    tool_of = next(needs for gives, needs in GIVES.values() if gives == item)
                    if tool_of:
                        need(tool_of, 1)
                    get(item)
                else:
                    cost, after = RECIPES[item]
                    if after:
                        need(after, 1)
                    for _ in range(2):
                        for part, n in cost.items():
                            need(part, n)
                    for part, n in cost.items():
                        has[part] -= n
                    way.append(("craft", {"item": item}))
                    has[item] = has.get(item, 0) + 1
                    food -= 1
                if food < 25 and has.get("berries") is None:
                    get("berries")
                    way.append(("eat", {}))
                    food += 19

        need(task.goal, 1)
        return way
