"""Logarithms of BFCL are those of a single thread when episodes of several precisions run at once."""

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

from sinew.bridges.bfcl import Turns

THREADS, TURNS = 8, 40
#: Threads take turns so often that a call is often interrupted.
sys.setswitchinterval(1e-5)


def task(precision):
    truth = [[f"logarithm(value={7.5 + i}, base=10, precision={precision})"] for i in range(TURNS)]
    questions = [[{"content": "Compute."}]] * TURNS
    return SimpleNamespace(classes=["MathAPI"], config={}, questions=questions, truth=truth)


def played(task, barrier):
    """The score, and what the model is shown."""
    episode, shown = Turns(), []
    episode.start(task)
    calls = {tool["name"]: tool["call"] for tool in episode.offered()}
    barrier.wait(60)
    for turn in Turns.gold(task):
        if isinstance(turn, str):
            episode.step(turn)
        else:
            ((name, arguments),) = turn
            shown.append(str(calls[name](arguments)["result"]))
    return episode.reward()["reward"], shown


tasks = [task(5 + 12 * i) for i in range(THREADS)]
alone = [played(one, Barrier(1)) for one in tasks]
barrier = Barrier(THREADS)
with ThreadPoolExecutor(THREADS) as threads:
    found = list(threads.map(lambda one: played(one, barrier), tasks))
scores = [score for score, _ in found]
assert [len(shown[0]) for _, shown in alone] == [7 + 12 * i for i in range(THREADS)], alone
assert scores == [1.0] * THREADS, scores
assert found == alone, "observations differ"

print("ok")
