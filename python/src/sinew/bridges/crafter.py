"""Crafter: a world of which a part is seen, where one gathers, crafts, eats and fights for 22 achievements.

The package draws pictures. Here the part of the world that they show is described in words: what lies ahead, the nearest of each kind, what is
carried. The reward is the package's: 1 for each first achievement, and a tenth of each point of health.
"""

from sinew.bridges import package
from sinew.bridges.gym import Gym

#: What lies everywhere is not described.
COMMON = ("grass", "path", "sand")
#: Values of the player that are no things that it carries.
VALUES = ("health", "food", "drink", "energy")


class World:
    """`crafter.Env` with the methods of Gymnasium."""

    spec = None

    def __init__(self, crafter, arguments):
        self.env = crafter.Env(**arguments)
        self.unwrapped, self.action_space = self, self.env.action_space
        # Creatures of an area are a set, in the order of their addresses: equal worlds need one order.
        balance = self.env._balance_object
        self.env._balance_object = lambda chunk, things, *rest: balance(chunk, sorted(things, key=at), *rest)
        self.actions = [name.replace("_", " ") for name in self.env.action_names]

    def reset(self, seed):
        # The package draws a world from its seed and the number of the episode.
        self.env._seed, self.env._episode = int(seed), 0
        self.env.reset()
        return None, {}

    def step(self, action):
        _, reward, done, info = self.env.step(action)
        dead = info["discount"] == 0
        return None, reward, dead, bool(done) and not dead, info

    def close(self):
        self.env = None


class Crafter(Gym):
    id = "Crafter"
    #: Of `crafter.Env`: `length` steps an episode, `area`, `view`.
    arguments = {"length": 200}
    #: One achievement.
    solved_at = 1.0

    @classmethod
    def setup_worker(cls):
        cls.crafter = package("crafter", "crafter==1.8.3")
        probe = cls.made()
        cls.space, cls.first, cls.actions = probe.action_space, 0, probe.actions
        cls.threshold = cls.solved_at
        cls.back(probe)

    @classmethod
    def made(cls):
        return cls.spares.take(lambda: World(cls.crafter, cls.arguments))

    def describe(self, seen, info):
        env = self.env.env
        player, world = env._player, env._world
        x, y = (int(v) for v in player.pos)
        ahead = world[(x + int(player.facing[0]), y + int(player.facing[1]))]
        lines = [f"You face {named(*ahead)}."]
        width, height = (int(v) for v in env._view)
        # The rows below show what is carried.
        right, down = width // 2, (height - 2) // 2
        nearest = {}
        for dy in range(-down, down + 1):
            for dx in range(-right, right + 1):
                what = named(*world[(x + dx, y + dy)])
                if (dx or dy) and what not in (*COMMON, "nothing"):
                    nearest[what] = min(nearest.get(what, (99,)), (abs(dx) + abs(dy), dx, dy))
        found = [f"{what} {place(dx, dy)}" for what, (_, dx, dy) in sorted(nearest.items(), key=lambda f: (f[1], f[0]))]
        lines.append(f"You see: {'; '.join(found) or 'nothing'}.")
        lines.append(", ".join(f"{name} {player.inventory[name]}" for name in VALUES) + ".")
        carried = [f"{count} {name.replace('_', ' ')}" for name, count in player.inventory.items() if count and name not in VALUES]
        lines.append(f"You carry {', '.join(carried) or 'nothing'}.")
        if player.sleeping:
            lines.append("You sleep.")
        elif world.daylight < 0.3:
            lines.append("It is night.")
        return "\n".join(lines)

    def reward(self):
        found = super().reward()
        done = self.env.env._player.achievements.values()
        return found and dict(found, achievements=sum(count > 0 for count in done))


def named(material, thing):
    """What stands at a place: a creature before the ground."""
    if thing is not None:
        return type(thing).__name__.lower()
    return material or "nothing"


def at(thing):
    return tuple(int(v) for v in thing.pos)


def place(right, down):
    parts = [f"{abs(down)} {'down' if down > 0 else 'up'}"] if down else []
    parts += [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
    return " ".join(parts)
