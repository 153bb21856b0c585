"""Steps a second of the environment `tiny` through the bridges, one value a repetition.

    SINEW_BIN=target/debug/sinew PYTHONPATH=python/src .cache/venv-games/bin/python3 benches/bridge_steps.py

Prints a JSON line for `sinew.gym` alone, for its vector of 8, and, for comparison, one for the same environment in Python under
Gymnasium's vector API (benches/peers/gymnasium_corridor.py).
"""

import json
import pathlib
import statistics
import subprocess
import sys
import time

import sinew.gym
from sinew.served import Served

REPETITIONS = 5


def show(name, values):
    print(json.dumps({"name": name, "value": round(statistics.median(values)), "values": [round(v) for v in values], "unit": "1/s"}))


def measured(act, steps):
    values = []
    for repetition in range(REPETITIONS + 1):
        begin = time.perf_counter()
        done = act(steps)
        # The first one warms up.
        if repetition:
            values.append(done / (time.perf_counter() - begin))
    return values


with Served("tiny") as served:
    env = sinew.gym.make(served)

    def alone(steps):
        over = True
        for _ in range(steps):
            if over:
                env.reset()
            _, _, over, _, _ = env.step("l")
        return steps

    show("sinew.gym, one environment", measured(alone, 300))
vector = sinew.gym.make_vec("tiny", 8)
vector.reset(seed=0)


def together(steps):
    for _ in range(steps // 8):
        vector.step(("l",) * 8)
    return steps // 8 * 8


show("sinew.gym, vector of 8", measured(together, 320))
vector.close()
peer = pathlib.Path(__file__).parent / "peers" / "gymnasium_corridor.py"
found = json.loads(subprocess.run([sys.executable, peer, "8"], stdout=subprocess.PIPE, check=True).stdout)
show(f"the same in Python, {found['version']} of 8", found["values"])
