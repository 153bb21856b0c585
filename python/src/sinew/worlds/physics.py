"""Manipulation by language in a small physics world: a gripper pushes and carries discs on a table with friction and collisions.

The world is two-dimensional and deterministic: the same actions give the same bits, on every machine with IEEE arithmetic. Distances are
in centimetres, times in seconds. `discs` sets the difficulty.
"""

import math
import random
from typing import Literal

from sinew import Done, Env, ToolError, tool

SIDE = 100.0
RADIUS = 4.0
#: Seconds of one step of the integration, and its number in one action.
DT, STEPS = 0.02, 100
FRICTION = 60.0
NEAR = 6.0
COLOURS = ["red", "blue", "green", "yellow", "white"]


class Tabletop(Env):
    system = "A gripper moves discs on a table of 100 x 100 cm. Bring the disc of the task onto its target. Discs that are pushed slide and push others."
    discs = 3
    limit = 25

    def start(self, task):
        self.task = {"disc": task.disc, "target": task.target}
        self.s = self.scene(task.world)
        return self.seen()

    @classmethod
    def scene(cls, world):
        draw, discs = random.Random(world), {}
        for colour in COLOURS[: cls.discs]:
            while True:
                at = [round(draw.uniform(10, 90), 1), round(draw.uniform(10, 90), 1)]
                if all(math.dist(at, other) > 3 * RADIUS for other in discs.values()):
                    break
            discs[colour] = at
        return {"discs": discs, "gripper": [50.0, 50.0], "holds": None, "used": 0}

    def seen(self):
        s, (x, y) = self.s, self.task["target"]
        discs = ", ".join(f"{colour} at ({a:.1f}, {b:.1f})" for colour, (a, b) in s["discs"].items())
        gx, gy = s["gripper"]
        return f"Gripper at ({gx:.1f}, {gy:.1f}), holds {s['holds'] or 'nothing'}. Discs: {discs}. Target ({x}, {y})."

    def spend(self):
        self.s["used"] += 1
        if self.s["used"] > self.limit:
            raise ToolError("The time is over: end your turn without a call.")

    def after(self):
        return Done("The disc is on its target.") if self.reached() else self.seen()

    @tool
    def move(self, x: float, y: float):
        "Move the gripper above a point. What it holds comes along."
        self.spend()
        if not (0 <= x <= SIDE and 0 <= y <= SIDE):
            raise ToolError(f"({x}, {y}) is not on the table; allowed: 0 to {SIDE:.0f}")
        self.s["gripper"] = [x, y]
        if self.s["holds"]:
            self.s["discs"][self.s["holds"]] = [x, y]
        return self.after()

    @tool
    def grip(self):
        "Close the gripper: it holds the disc below it, if there is one within 6 cm."
        self.spend()
        if self.s["holds"]:
            raise ToolError(f"the gripper holds {self.s['holds']}")
        near = [(math.dist(at, self.s["gripper"]), colour) for colour, at in self.s["discs"].items()]
        distance, colour = min(near)
        if distance > NEAR:
            raise ToolError(f"the nearest disc is {distance:.1f} cm away")
        self.s["holds"] = colour
        self.s["discs"][colour] = list(self.s["gripper"])
        return self.after()

    @tool
    def release(self):
        "Open the gripper. Discs that overlap then push each other apart."
        self.spend()
        if not self.s["holds"]:
            raise ToolError("the gripper holds nothing")
        self.s["holds"] = None
        self.slide({})
        return self.after()

    @tool
    def push(self, disc: Literal["red", "blue", "green", "yellow", "white"], angle: float, speed: float):
        """Give a disc a push.

        Args:
            disc: its colour
            angle: direction in degrees: 0 to the right, 90 up
            speed: centimetres a second, 0 to 100
        """
        self.spend()
        if disc not in self.s["discs"] or disc == self.s["holds"]:
            raise ToolError(
                f"{disc!r} cannot be pushed; on the table: {', '.join(d for d in self.s['discs'] if d != self.s['holds'])}"
            )
        if not 0 <= speed <= 100:
            raise ToolError(f"speed is {speed}; allowed: 0 to 100")
        if not -360 <= angle <= 360:
            raise ToolError(f"angle is {angle}; allowed: -360 to 360")
        way = math.radians(angle)
        self.slide({disc: [speed * math.cos(way), speed * math.sin(way)]})
        return self.after()

    def slide(self, speeds):
        """Semi-implicit Euler with Coulomb friction and elastic collisions of equal masses, until all discs rest."""
        free = [colour for colour in self.s["discs"] if colour != self.s["holds"]]
        at = {colour: list(self.s["discs"][colour]) for colour in free}
        speed = {colour: list(speeds.get(colour, (0.0, 0.0))) for colour in free}
        for _ in range(STEPS):
            for colour in free:
                v = math.hypot(*speed[colour])
                slower = max(0.0, v - FRICTION * DT) / v if v else 0.0
                for axis in (0, 1):
                    speed[colour][axis] *= slower
                    at[colour][axis] += speed[colour][axis] * DT
                    if not RADIUS <= at[colour][axis] <= SIDE - RADIUS:
                        at[colour][axis] = min(max(at[colour][axis], RADIUS), SIDE - RADIUS)
                        speed[colour][axis] *= -1
            for i, a in enumerate(free):
                for b in free[i + 1 :]:
                    self.collide(at[a], at[b], speed[a], speed[b])
        for colour in free:
            self.s["discs"][colour] = [round(value, 3) for value in at[colour]]

    @staticmethod
    def collide(a, b, va, vb):
        distance = math.dist(a, b)
        if distance >= 2 * RADIUS:
            return
        normal = [(q - p) / distance for p, q in zip(a, b)] if distance else [1.0, 0.0]
        closing = sum((p - q) * n for p, q, n in zip(va, vb, normal))
        overlap = (2 * RADIUS - distance) / 2
        for axis in (0, 1):
            a[axis] -= overlap * normal[axis]
            b[axis] += overlap * normal[axis]
            if closing > 0:
                va[axis] -= closing * normal[axis]
                vb[axis] += closing * normal[axis]

    def reached(self):
        disc = self.task["disc"]
        return self.s["holds"] is None and math.dist(self.s["discs"][disc], self.task["target"]) <= NEAR

    def reward(self, task):
        missing = math.dist(self.s["discs"][self.task["disc"]], self.task["target"])
        return {"reward": self.reached(), "distance_cm": missing, "calls_used": self.s["used"]}

    def state(self):
        return {key: value for key, value in self.s.items() if key != "used"}

    def snapshot(self):
        return {"s": self.s, "task": self.task}

    def restore(self, snapshot):
        self.s, self.task = snapshot["s"], snapshot["task"]

    @classmethod
    def tasks(cls, split, seed):
        for i in range(2000 if split == "train" else 200):
            world = f"tabletop {split} {seed} {i}"
            draw, scene = random.Random(f"target {world}"), cls.scene(world)
            disc = draw.choice(sorted(scene["discs"]))
            while True:
                target = [draw.randint(10, 90), draw.randint(10, 90)]
                if all(math.dist(target, at) > 4 * RADIUS for at in scene["discs"].values()):
                    break
            prompt = f"Bring the {disc} disc to ({target[0]}, {target[1]})."
            yield {"prompt": prompt, "kind": "bring", "world": world, "disc": disc, "target": target}

    @classmethod
    def gold(cls, task):
        x, y = cls.scene(task.world)["discs"][task.disc]
        a, b = task.target
        return [("move", {"x": x, "y": y}), ("grip", {}), ("move", {"x": a, "y": b}), ("release", {})]
