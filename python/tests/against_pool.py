"""Random walks of the tiny world, played here and pushed: SINEW_URL, SINEW_TOKEN, and how many."""

import math
import os
import random
import sys

from sinew import ApiError, pool

WIDTH = 10
END, USER, MODEL, TOOL = 0, 2, 3, 4
NAMES = [b"<end>", b"<system>", b"<user>", b"<model>", b"<tool>"]
TOKENS = NAMES + [c.encode() for c in ".A<>lr"]


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


def main():
    groups, size = int(sys.argv[1]), 8
    dice = random.Random(0)
    walks = []
    for g in range(groups):
        start = dice.randrange(WIDTH)
        goal = dice.choice([c for c in range(WIDTH) if 1 <= abs(c - start) <= 2])
        walks += [walk(dice, start, goal, f"w{g}-{k}", f"g{g}", size) for k in range(size)]
    tokenizer = pool.tokenizer_hash(TOKENS)
    with pool.Pool(os.environ["SINEW_URL"], os.environ["SINEW_TOKEN"]) as target:
        assert target.status()["tokenizer"] == tokenizer
        told = target.push(walks, tokenizer=tokenizer, source="walks")
        assert all(t.status == "admitted" for t in told), told
        again = target.push(walks[:4], tokenizer=tokenizer, source="walks")
        assert [t.status for t in again] == ["duplicate"] * 4
        wrong = dict(walks[0], id="wrong", nodes=[walks[0]["nodes"][0], dict(walks[0]["nodes"][1], logprobs=[1.0, 0.0])])
        [held] = target.push([wrong], tokenizer=tokenizer, source="walks")
        assert (held.status, held.code) == ("quarantined", "logprob_value"), held
        [row] = target.quarantined(page=1)
        assert (row.id, row.source, row.item["id"]) == (held.quarantine, "walks", "wrong")
        assert target.release(row.id).code == "logprob_value"
        target.delete(row.id)
        assert list(target.quarantined()) == []
        try:
            target.delete(row.id)
        except ApiError as e:
            assert e.status == 404
        else:
            raise AssertionError("deleted twice")
    with pool.Pool(os.environ["SINEW_URL"], "another-token") as stranger:
        try:
            stranger.push(walks[:1], tokenizer=tokenizer)
        except ApiError as e:
            assert e.status == 401
        else:
            raise AssertionError("a stranger pushed")
    print("ok", len(walks))


main()
