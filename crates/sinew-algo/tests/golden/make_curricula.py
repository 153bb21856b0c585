"""Golden vectors of the curricula, from their definitions in plain Python.

Run with any Python: `python make_curricula.py > curricula.json`. Written apart from the Rust code: lists instead
of rings, exact fractions instead of floating point.

- turn stages: h(t) = rounds[min(floor(t / N), last)], ScalingInter of AgentGym-RL (arXiv 2509.08755)
- progress: |mean of the last W outcomes - mean of the W before|, W = window
- aim: d <- clamp(d + gain (s - target), 0, L - 1); level floor(d) has the share 1 - frac(d), the next one frac(d)
- pools: shares of (hard, normal, easy) over the pools that have tasks
"""

import json
import random
from fractions import Fraction as F

random.seed(18)


def stages():
    cases = []
    for rounds, every in [([10, 20, 30], 100), ([8, 12, 15], 80), ([5], 7)]:
        steps = [0, 1, every - 1, every, 2 * every - 1, 2 * every, 10 * every]
        cases.append({"rounds": rounds, "every": every, "steps": steps,
                      "turns": [rounds[min(t // every, len(rounds) - 1)] for t in steps]})
    return cases


def progress():
    cases = []
    for window, floor, length in [(4, F(1, 5), 30), (8, F(0), 40), (3, F(1, 2), 5)]:
        kinds = {k: [int(random.random() < F(i + 1, 4) + F(n, 2 * length)) for n in range(length - i)]
                 for i, k in enumerate("abc")}
        weights = {}
        for k, seen in kinds.items():
            if len(seen) < 2 * window:
                weights[k] = F(1)
            else:
                after, before = seen[-window:], seen[-2 * window:-window]
                weights[k] = abs(F(sum(after), window) - F(sum(before), window))
        total = sum(weights.values())
        shares = [floor / 3 + (1 - floor) * weights[k] / total if total else F(1, 3) for k in "abc"]
        cases.append({"window": window, "floor": float(floor), "outcomes": kinds,
                      "weights": [float(weights[k]) for k in "abc"], "shares": [float(s) for s in shares]})
    return cases


def aim():
    cases = []
    for levels, gain, target, floor in [(4, F(1, 2), F(1, 2), F(1, 5)), (3, F(2), F(1, 4), F(0)), (1, F(1), F(1, 2), F(0))]:
        d, path = F(0), []
        for s in [F(1), F(1), F(3, 4), F(1), F(1, 4), F(0), F(1, 2), F(1), F(1), F(1), F(0), F(0)]:
            d = min(max(d + gain * (s - target), F(0)), F(levels - 1))
            below = d.numerator // d.denominator
            above = min(below + 1, levels - 1)
            shares = [floor / levels] * levels
            shares[below] += (1 - floor) * (1 - (d - below))
            shares[above] += (1 - floor) * (d - below)
            path.append({"success": float(s), "shares": [float(p) for p in shares]})
        cases.append({"levels": levels, "gain": float(gain), "target": float(target), "floor": float(floor), "path": path})
    return cases


def pools():
    cases = []
    for hard, easy, sizes in [(F(1, 10), F(1, 10), [5, 80, 15]), (F(1, 5), F(1, 20), [0, 3, 9]),
                              (F(1, 4), F(1, 4), [1, 0, 0]), (F(0), F(0), [3, 0, 1])]:
        raw = [hard, 1 - hard - easy, easy]
        raw = [share if n else F(0) for share, n in zip(raw, sizes)]
        total = sum(raw)
        shares = [r / total for r in raw] if total else [F(n, sum(sizes)) for n in sizes]
        cases.append({"hard": float(hard), "easy": float(easy), "sizes": sizes, "shares": [float(s) for s in shares]})
    return cases


print(json.dumps({"stages": stages(), "progress": progress(), "aim": aim(), "pools": pools()}, indent=1))
