"""Peer of `sinew bench env`: the environment `tiny` in Python, under the vector API of Gymnasium.

    gymnasium_corridor.py ENVIRONMENTS

Prints steps a second of `SyncVectorEnv`, one value a repetition. Every world walks to its goal; a world that has ended is reset by the
step that follows, which is counted as Gymnasium counts it.
"""

import json
import sys
import time

import gymnasium
from gymnasium.spaces import Discrete, Text
from gymnasium.vector import SyncVectorEnv

COUNT, STEPS, REPETITIONS = int(sys.argv[1]), 20_000, 5
WIDTH = 10


class Corridor(gymnasium.Env):
    """A walker and a goal one or two cells away; the observation is a picture."""

    def __init__(self):
        self.observation_space = Text(WIDTH, charset=".A<>")
        self.action_space = Discrete(2)
        self.number = 0

    def picture(self):
        goal = "<" if self.goal < self.at else ">"
        return "".join("A" if c == self.at else goal if c == self.goal else "." for c in range(WIDTH))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number += 1
        self.at = self.number % (WIDTH - 2)
        self.goal = self.at + 1 + self.number % 2
        return self.picture(), {}

    def step(self, action):
        self.at = max(0, min(WIDTH - 1, self.at + (1 if action else -1)))
        done = self.at == self.goal
        return self.picture(), float(done), done, False, {}


envs = SyncVectorEnv([Corridor] * COUNT)
envs.reset(seed=0)
right = [1] * COUNT
values = []
for repetition in range(REPETITIONS + 1):
    begin = time.perf_counter()
    for _ in range(STEPS // COUNT):
        envs.step(right)
    if repetition:
        values.append(STEPS // COUNT * COUNT / (time.perf_counter() - begin))
print(json.dumps({"version": f"Gymnasium {gymnasium.__version__}, SyncVectorEnv", "values": values}))
