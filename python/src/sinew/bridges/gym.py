"""Environments of Gymnasium: any id with discrete or text actions, and others as JSON.

The model acts with the tool `act`, or with a turn of plain text. An observation becomes text by `describe`: a grid of MiniGrid as
what is seen and where, texts as they are, other values as numbers. The reward is the sum of the raw rewards.
"""

import json
import math

from sinew import Done, Env, Step, ToolError, tool
from sinew.bridges import Spares, chosen, package, seeds

#: Names of actions of packages whose ids begin so.
NAMES = {
    "MiniGrid-": ["turn left", "turn right", "move forward", "pick up", "drop", "toggle", "done"],
    "BabyAI-": ["turn left", "turn right", "move forward", "pick up", "drop", "toggle", "done"],
    "FrozenLake": ["left", "down", "right", "up"],
    "CliffWalking": ["up", "right", "down", "left"],
    "Taxi": ["south", "north", "east", "west", "pick up", "drop off"],
    "Blackjack": ["stick", "hit"],
    "CartPole": ["left", "right"],
    "MountainCar": ["left", "nothing", "right"],
    "Acrobot": ["left", "nothing", "right"],
}
#: Names of the numbers of an observation, by the begin of the id.
NUMBERS = {
    "CartPole": ["cart position", "cart velocity", "pole angle (radians, right is positive)", "pole angular velocity"],
    "MountainCar": ["position", "velocity"],
    "Acrobot": ["cos of joint 1", "sin of joint 1", "cos of joint 2", "sin of joint 2", "velocity of joint 1", "velocity of joint 2"],
    "Pendulum": ["cos of the angle", "sin of the angle", "angular velocity"],
    "Blackjack": ["your sum", "the dealer's card", "usable ace"],
}
#: What is asked for, by the begin of the id.
GOALS = {
    "CartPole": "Keep the pole upright: each step that it stands earns 1.",
    "MountainCar": "Reach the flag on the right hill, at position 0.5 (0.45 with continuous actions); build up speed.",
    "Acrobot": "Swing the tip above the line.",
    "Pendulum": "Swing the pendulum upright, and hold it there.",
    "Blackjack": "Come closer to 21 than the dealer, and not above it.",
    "FrozenLake": "Walk from S to G over F. H is a hole, which ends the walk. The brackets are around your place.",
    "CliffWalking": "Walk from the left end of the last row to T without falling off the cliff, C. x is your place.",
    "Taxi": "Pick the passenger up, and drop them off at the goal. R, G, Y and B are places; the brackets are around the taxi.",
}
#: Ids whose observation is a number of a state: what they draw as text is shown.
DRAWN = ("FrozenLake", "CliffWalking", "Taxi")
#: Packages that register ids, by the begin of the id.
PACKAGES = {"MiniGrid-": "minigrid", "BabyAI-": "minigrid", "miniwob/": "miniwob"}
KINDS = {4: "door", 5: "key", 6: "ball", 7: "box", 8: "goal", 9: "lava"}
COLOURS = ["red", "green", "blue", "purple", "yellow", "grey"]
STATES = ["open", "closed", "locked"]


class Gym(Env):
    #: The id, as in `gymnasium.make(id, **arguments)`.
    id = "CartPole-v1"
    arguments = {}
    #: Modules that register the id. Those of well-known ids are known.
    imports = []
    #: Names of the discrete actions in their order. Those of well-known ids are known; others are numbers.
    actions = []
    #: Show what the environment draws as text (`render_mode = "ansi"`) in place of the observation. Well-known ids whose
    #: observation says nothing by itself are drawn in any case.
    drawn = False
    #: Sum of rewards from which on an episode is solved. 0: the threshold of the id, or any reward above 0.
    solved_at = 0.0
    #: Tasks of each split: seeds of `reset`.
    train, held_out = 1000, 100

    spares = Spares()

    @classmethod
    def setup_worker(cls):
        cls.gymnasium = package("gymnasium", "gymnasium==1.4.0")
        for begin, name in PACKAGES.items():
            if cls.id.startswith(begin):
                package(name, name)
        for name in cls.imports:
            package(name, name.partition(".")[0])
        cls.drawn = cls.drawn or cls.id.startswith(DRAWN)
        cls.arguments = dict(cls.arguments, **({"render_mode": "ansi"} if cls.drawn else {}))
        probe = cls.made()
        cls.space = probe.action_space
        if not cls.actions:
            cls.actions = next((names for begin, names in NAMES.items() if cls.id.startswith(begin)), [])
        if hasattr(cls.space, "n"):
            cls.first, count = int(getattr(cls.space, "start", 0)), int(cls.space.n)
            if len(cls.actions) != count:
                cls.actions = [str(cls.first + i) for i in range(count)]
        else:
            cls.actions = []
        threshold = getattr(probe.spec, "reward_threshold", None)
        cls.threshold = cls.solved_at or threshold
        cls.back(probe)

    @classmethod
    def made(cls):
        # `reset` cleans an environment, so that the next episode can have it.
        return cls.spares.take(lambda: cls.gymnasium.make(cls.id, **cls.arguments))

    @classmethod
    def back(cls, env):
        if not cls.spares.give(env):
            env.close()

    @property
    def system(self):
        goal = self.known(GOALS)
        text = f"You act in {self.id}, one action a turn. {goal + ' ' if goal else ''}"
        if self.actions:
            return f"{text}Actions: {', '.join(self.actions)}."
        return f"{text}An action is {self.space}, as JSON."

    @classmethod
    def known(cls, table):
        """What a table has for the id. None: nothing."""
        return next((value for begin, value in table.items() if cls.id.startswith(begin)), None)

    def start(self, task):
        self.env, self.total, self.over, self.steps = self.made(), 0.0, False, 0
        self.taken = []
        seen, info = self.env.reset(seed=task.seed)
        self.seen = self.describe(seen, info)
        return self.seen

    def describe(self, seen, info):
        """An observation as text. A class of your own can say more."""
        if self.drawn:
            return plain(self.env.render())
        if isinstance(seen, dict) and "mission" in seen and "image" in seen:
            carried = getattr(self.env.unwrapped, "carrying", None)
            return grid(seen, carried)
        if isinstance(seen, str):
            return seen
        shown, names = values(seen), self.known(NUMBERS)
        if names and isinstance(shown, list) and len(shown) == len(names):
            return ", ".join(f"{name} {json.dumps(value)}" for name, value in zip(names, shown))
        return json.dumps(shown)

    def parsed(self, text):
        """The action of a text."""
        if self.actions:
            name = chosen(text, self.actions)
            if name is None:
                raise ToolError(f"{text[:80]!r} is no action; allowed: {', '.join(self.actions)}")
            return self.first + self.actions.index(name)
        if type(self.space).__name__ == "Text":
            return text
        try:
            action = self.space.dtype.type(json.loads(text)) if self.space.shape == () else json.loads(text)
            action = package("numpy", "numpy").asarray(action, dtype=self.space.dtype)
        except (ValueError, TypeError) as error:
            raise ToolError(f"{text[:80]!r} is no JSON of {self.space}: {error}") from None
        if not self.space.contains(action):
            raise ToolError(f"{text[:80]!r} is not in {self.space}")
        return action

    def one(self, text):
        if self.over:
            raise ToolError("the episode is over")
        action = self.parsed(text)
        seen, reward, terminated, truncated, info = self.env.step(action)
        self.total += float(reward)
        self.steps += 1
        self.taken.append(action if isinstance(action, (int, str)) else values(action))
        self.ended, self.over = bool(terminated), bool(terminated or truncated)
        self.seen = self.describe(seen, info)
        return (Done if self.over else Step)(self.seen)

    @tool
    def act(self, action: str):
        "Do one action."
        return self.one(action)

    def step(self, text):
        return self.one(text)

    def reward(self):
        if not math.isfinite(self.total):
            return None
        solved = self.total >= self.threshold if self.threshold is not None else self.total > 0
        return {"reward": self.total, "success": solved, "steps": self.steps, "ended": self.over and self.ended}

    def close(self):
        if getattr(self, "env", None) is not None:
            self.back(self.env)
            self.env = None

    def state(self):
        # Environments do not tell their whole state: what was done since the seed stands for it.
        return [self.seen, self.taken]

    @classmethod
    def tasks(cls, split, seed):
        for number in seeds(split, seed, cls.train, cls.held_out):
            yield {"prompt": f"Begin with {cls.id}.", "kind": cls.id, "seed": number}


def values(seen):
    """An observation as JSON has it. Numbers are rounded, as texts of many digits teach nothing."""
    if isinstance(seen, dict):
        return {str(key): values(value) for key, value in seen.items()}
    if isinstance(seen, (list, tuple)):
        return [values(value) for value in seen]
    if hasattr(seen, "tolist"):
        return values(seen.tolist())
    return round(seen, 3) if isinstance(seen, float) else seen


def plain(text):
    """A drawing without colours of terminals; the marked place stands in brackets."""
    import re

    text = re.sub(r"\x1b\[4[0-9]m(.)\x1b\[0m", r"[\1]", str(text))
    return re.sub(r"\x1b\[[0-9;]*m", "", text).strip("\n")


def grid(seen, carried):
    """What an agent of MiniGrid sees: it stands in the middle of the last row and looks along the first index."""
    image = seen["image"]
    width, depth = image.shape[0], image.shape[1]
    middle, found = width // 2, []
    for x in range(width):
        for y in range(depth):
            kind, colour, state = (int(v) for v in image[x, y])
            if kind in KINDS and (x, y) != (middle, depth - 1):
                found.append((depth - 1 - y, x - middle, thing(kind, colour, state)))
    ahead = 0
    while depth - 2 - ahead >= 0 and int(image[middle, depth - 2 - ahead, 0]) in (1, 3):
        ahead += 1
    lines = [f"Mission: {seen['mission']}.", f"Free steps ahead: {ahead}."]
    lines += [f"You see {what} {place(forward, right)}." for forward, right, what in sorted(found)]
    held = f"a {carried.color} {carried.type}" if carried is not None else "nothing"
    return "\n".join([*lines, f"You carry {held}."])


def thing(kind, colour, state):
    if KINDS[kind] in ("goal", "lava"):
        return KINDS[kind]
    return f"a {STATES[state] + ' ' if kind == 4 else ''}{COLOURS[colour]} {KINDS[kind]}"


def place(forward, right):
    parts = [f"{forward} ahead"] if forward else []
    parts += [f"{abs(right)} to the {'right' if right > 0 else 'left'}"] if right else []
    return " and ".join(parts)
