"""Random walks of the tiny world, as an outside system would push them: each with its tokens, their
log-probabilities and the version that sampled them.

    PYTHONPATH=python/src python3 examples/walks.py http://127.0.0.1:8086 token 320

pushes 320 groups of 8 walks; `token` is the file with the server's control token.
"""

import math
import random
import sys

from sinew import pool

WIDTH = 10
GROUP = 8
END, USER, MODEL, TOOL = 0, 2, 3, 4
NAMES = [b"<end>", b"<system>", b"<user>", b"<model>", b"<tool>"]
TOKENS = NAMES + [c.encode() for c in ".A<>lr"]
#: Walks of one request.
BATCH = 2048


def ids(text):
    return [5 + ".A<>lr".index(c) for c in text]


def picture(at, goal):
    cells = ["."] * WIDTH
    cells[goal] = "<" if goal < at else ">"
    cells[at] = "A"
    return "".join(cells)


def walk(dice, start, goal, name, group, size):
    """Four turns at most; left and right are equally likely, and the turn always ends."""
    nodes = [pool.prompt([USER, *ids(picture(start, goal)), END, MODEL])]
    at = start
    for _ in range(4):
        move = dice.choice("lr")
        logprobs = [math.log(0.5), 0.0]
        nodes.append(pool.sampled(len(nodes) - 1, [*ids(move), END], logprobs, 0))
        at = min(max(at + (1 if move == "r" else -1), 0), WIDTH - 1)
        if at == goal:
            break
        nodes.append(pool.observation(len(nodes) - 1, [TOOL, *ids(picture(at, goal)), END, MODEL]))
    if nodes[-1]["kind"] == "observation":
        nodes.pop()
    won = float(at == goal)
    return {"id": name, "task": f"{start}-{goal}", "task_kind": f"corridor-{abs(start - goal)}",
            "group": group, "group_size": size, "reward": won, "nodes": nodes}


def walks(groups, prefix="w"):
    """Groups of walks, the same for the same number."""
    dice = random.Random(0)
    out = []
    for g in range(groups):
        start = dice.randrange(WIDTH)
        goal = dice.choice([c for c in range(WIDTH) if 1 <= abs(c - start) <= 2])
        names = [f"{prefix}{g}-{k}" for k in range(GROUP)]
        out += [walk(dice, start, goal, name, f"{prefix}-g{g}", GROUP) for name in names]
    return out


def main():
    url, token_file, groups = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open(token_file, encoding="utf-8") as file:
        token = file.read().strip()
    made = walks(groups)
    tokenizer = pool.tokenizer_hash(TOKENS)
    admitted = 0
    with pool.Pool(url, token) as target:
        for first in range(0, len(made), BATCH):
            told = target.push(made[first : first + BATCH], tokenizer=tokenizer, source="walks")
            admitted += sum(t.status == "admitted" for t in told)
    print(f"{admitted} of {len(made)} walks admitted")


if __name__ == "__main__":
    main()
