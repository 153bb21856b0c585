"""A household in text: find a thing, clean, heat or cool it if that is asked, and bring it where it belongs.

Only the room is seen, and only what is open: the rest has to be found. `rooms` and `things` set the difficulty.
"""

import random
from typing import Literal

from sinew import Done, Env, ToolError, tool

ROOMS = {
    "kitchen": ["fridge", "sink", "stove", "counter", "cupboard"],
    "bathroom": ["basin", "cabinet", "shelf"],
    "bedroom": ["bed", "drawer", "desk"],
    "hall": ["chest", "bench", "wardrobe"],
    "study": ["bookcase", "table", "safe"],
}
CLOSED = {"fridge", "cupboard", "cabinet", "drawer", "chest", "wardrobe", "safe"}
#: What is done to a thing, and where.
TREAT = {"clean": "sink", "heat": "stove", "cool": "fridge"}
THINGS = "apple book bowl candle egg key lamp mug pen plate potato soap spoon towel".split()


class Household(Env):
    system = "You are in a house. Reach the goal with the tools. Look for things in every room, and open what is closed."
    #: Rooms of the house, the kitchen among them.
    rooms = 3
    #: Things that lie around.
    things = 6
    #: Calls of tools until the day is over.
    limit = 40
    #: Grabs at things where they are not, until something breaks: to look is free, to try every place is not.
    fumbles = 2

    def start(self, task):
        self.s = self.house(task.world)
        self.goal = task.goal
        return self.seen()

    @classmethod
    def house(cls, world):
        """The house of a seed, as it is in the morning."""
        draw = random.Random(world)
        rooms = ["kitchen"] + draw.sample([r for r in ROOMS if r != "kitchen"], cls.rooms - 1)
        places = {place: room for room in rooms for place in ROOMS[room]}
        at = {thing: draw.choice(sorted(places)) for thing in draw.sample(THINGS, cls.things)}
        return {"room": rooms[-1], "rooms": rooms, "at": at, "open": [], "done": {}, "used": 0, "fumbles": 0}

    def seen(self):
        s = self.s
        lines = [f"You are in the {s['room']}. Rooms: {', '.join(s['rooms'])}."]
        for place in ROOMS[s["room"]]:
            inside = sorted(thing for thing, where in s["at"].items() if where == place)
            if place in CLOSED and place not in s["open"]:
                lines.append(f"The {place} is closed.")
            else:
                lines.append(f"{place}: {', '.join(inside) or 'nothing'}.")
        held = [thing for thing, where in s["at"].items() if where == "hand"]
        lines.append(f"You hold {held[0] if held else 'nothing'}.")
        return "\n".join(lines)

    def spend(self):
        self.s["used"] += 1
        if self.s["used"] > self.limit or self.s["fumbles"] >= self.fumbles:
            raise ToolError("The day is over: end your turn without a call.")

    def here(self, place):
        if place not in ROOMS[self.s["room"]]:
            raise ToolError(f"there is no {place} in the {self.s['room']}")

    def reach(self, place):
        self.here(place)
        if place in CLOSED and place not in self.s["open"]:
            raise ToolError(f"the {place} is closed")

    def held(self, thing):
        if self.s["at"].get(thing) != "hand":
            raise ToolError(f"you do not hold the {thing}")

    def after(self):
        return Done("You reached the goal.") if self.reached() else self.seen()

    @tool
    def look(self):
        "Look around the room."
        self.spend()
        return self.seen()

    @tool
    def go(self, room: Literal["kitchen", "bathroom", "bedroom", "hall", "study"]):
        "Go to another room."
        self.spend()
        if room not in self.s["rooms"]:
            raise ToolError(f"there is no {room}; rooms: {', '.join(self.s['rooms'])}")
        self.s["room"] = room
        return self.seen()

    @tool
    def open(self, place: str):
        "Open a place that is closed."
        self.spend()
        self.here(place)
        if place not in CLOSED:
            raise ToolError(f"the {place} cannot be opened")
        if place not in self.s["open"]:
            self.s["open"] = sorted([*self.s["open"], place])
        return self.seen()

    @tool
    def take(self, thing: str, place: str):
        "Take a thing that you see from its place. You can hold one."
        self.spend()
        self.reach(place)
        if self.s["at"].get(thing) != place:
            self.s["fumbles"] += 1
            broken = " Something falls down and breaks." if self.s["fumbles"] >= self.fumbles else ""
            raise ToolError(f"there is no {thing} in the {place}.{broken}")
        if "hand" in self.s["at"].values():
            raise ToolError("your hand is full")
        self.s["at"][thing] = "hand"
        return self.after()

    @tool
    def put(self, thing: str, place: str):
        "Put the thing that you hold into a place."
        self.spend()
        self.reach(place)
        self.held(thing)
        self.s["at"][thing] = place
        return self.after()

    @tool
    def treat(self, thing: str, how: Literal["clean", "heat", "cool"]):
        "Clean the thing that you hold at the sink, heat it on the stove, or cool it in the fridge."
        self.spend()
        self.reach(TREAT[how])
        self.held(thing)
        self.s["done"][thing] = how
        return self.after()

    def reached(self):
        thing, how, place = self.goal["thing"], self.goal["how"], self.goal["place"]
        treated = how is None or self.s["done"].get(thing) == how
        return treated and self.s["at"].get(thing) == place

    def reward(self, task):
        return {"reward": self.reached(), "calls_used": self.s["used"], "fumbles": self.s["fumbles"]}

    def state(self):
        return {key: value for key, value in self.s.items() if key != "used"}

    def snapshot(self):
        return {"s": self.s, "goal": self.goal}

    def restore(self, snapshot):
        self.s, self.goal = snapshot["s"], snapshot["goal"]

    @classmethod
    def tasks(cls, split, seed):
        for i in range(2000 if split == "train" else 200):
            world = f"household {split} {seed} {i}"
            house = cls.house(world)
            draw = random.Random(f"goal {world}")
            thing = draw.choice(sorted(house["at"]))
            places = sorted(p for room in house["rooms"] for p in ROOMS[room] if p != house["at"][thing])
            how, place = draw.choice([None, *TREAT]), draw.choice(places)
            asked = (
                f"Put the {thing} into the {place}."
                if how is None
                else f"{how.capitalize()} the {thing}, then put it into the {place}."
            )
            kind = how or "move"
            yield {
                "prompt": asked,
                "kind": kind,
                "world": world,
                "goal": {"thing": thing, "how": how, "place": place},
            }

    @classmethod
    def gold(cls, task):
        """The shortest way, for a player that knows where everything is."""
        house, goal, way = cls.house(task.world), task.goal, []
        room, opened = house["room"], set()

        def to(place):
            nonlocal room
            target = next(r for r in house["rooms"] if place in ROOMS[r])
            if target != room:
                way.append(("go", {"room": target}))
                room = target
            if place in CLOSED and place not in opened:
                way.append(("open", {"place": place}))
                opened.add(place)

        thing, start = goal["thing"], house["at"][goal["thing"]]
        to(start)
        way.append(("take", {"thing": thing, "place": start}))
        if goal["how"]:
            to(TREAT[goal["how"]])
            way.append(("treat", {"thing": thing, "how": goal["how"]}))
        to(goal["place"])
        way.append(("put", {"thing": thing, "place": goal["place"]}))
        return way
