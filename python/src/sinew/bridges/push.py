"""A disc that a rod pushes to a target, in the physics of pymunk: an example of an environment in that library.

The simulation is exact to the bit for equal pushes, so that an episode can be replayed.
"""

import math

from sinew import Done, Env, ToolError, tool
from sinew.bridges import draw, package, seeds


class Push(Env):
    system = "A disc lies on a table of 100 by 100. Push it: an angle in degrees (0 is to the right, 90 is up) and a strength of 1 to 100."
    #: Pushes of an episode, and how near to the target counts.
    limit, near = 6, 6.0
    train, held_out = 1000, 100

    @classmethod
    def setup_worker(cls):
        cls.pymunk = package("pymunk", "pymunk==7.3.1")

    def start(self, task):
        self.target, self.pushes = task.target, []
        self.space = self.pymunk.Space()
        self.space.damping = 0.2
        self.disc = self.pymunk.Body(1, self.pymunk.moment_for_circle(1, 0, 3))
        self.disc.position = tuple(task.start)
        shape = self.pymunk.Circle(self.disc, 3)
        walls = []
        for a, b in (((0, 0), (100, 0)), ((100, 0), (100, 100)), ((100, 100), (0, 100)), ((0, 100), (0, 0))):
            walls.append(self.pymunk.Segment(self.space.static_body, a, b, 1))
        for part in (shape, *walls):
            part.elasticity = 0.5
        self.space.add(self.disc, shape, *walls)
        return self.seen()

    def seen(self):
        x, y = self.disc.position
        left = self.limit - len(self.pushes)
        return f"The disc is at ({x:.1f}, {y:.1f}), the target at ({self.target[0]}, {self.target[1]}). {left} pushes are left."

    def distance(self):
        return math.dist(self.disc.position, self.target)

    @tool
    def push(self, angle: float, strength: float):
        "Push the disc, and wait until it rests."
        if not 1 <= strength <= 100:
            raise ToolError(f"strength is {strength}; allowed: 1 to 100")
        if len(self.pushes) >= self.limit or self.distance() < self.near:
            raise ToolError("the episode is over")
        self.pushes.append([angle, strength])
        way = math.radians(angle)
        self.disc.apply_impulse_at_world_point(
            (math.cos(way) * strength, math.sin(way) * strength), self.disc.position
        )
        for _ in range(400):
            self.space.step(1 / 60)
        self.disc.velocity, self.disc.angular_velocity = (0, 0), 0
        over = self.distance() < self.near or len(self.pushes) >= self.limit
        return Done(self.seen()) if over else self.seen()

    def reward(self):
        hit = self.distance() < self.near
        return {"reward": 1.0 if hit else 0.0, "distance": self.distance(), "pushes": len(self.pushes)}

    def state(self):
        return self.pushes

    @classmethod
    def tasks(cls, split, seed):
        for number in seeds(split, seed, cls.train, cls.held_out):
            random = draw("push", number)
            start, target = ([random.randint(15, 85) for _ in range(2)] for _ in range(2))
            yield {"prompt": "Push the disc onto the target.", "start": start, "target": target, "seed": number}

    @classmethod
    def gold(cls, task):
        # A push of strength 1 moves the disc by this much, without walls in the way.
        per_strength = 1 / 60 / (1 - 0.2 ** (1 / 60))
        (x, y), (to_x, to_y) = task.start, task.target
        away = math.dist(task.start, task.target)
        angle = math.degrees(math.atan2(to_y - y, to_x - x))
        if away < cls.near:
            return [("push", {"angle": angle, "strength": 1})]
        return [("push", {"angle": angle, "strength": min(100, away / per_strength)})]
