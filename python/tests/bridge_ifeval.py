"""Scores of IFEval are those of a single thread from the first one on, when many threads ask at once."""

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

from sinew.bridges.ifeval import IfEval

THREADS = 8
#: Threads take turns so often that one which loads something is nearly always interrupted.
sys.setswitchinterval(1e-5)

IfEval.setup_worker()
arguments = [{"language": "sw"}]
task = SimpleNamespace(prompt="Use Swahili.", instruction_id_list=["language:response_language"], kwargs=arguments)
barrier = Barrier(THREADS)


def score(reply):
    barrier.wait(60)
    return IfEval().reward(task, reply)["reward"]


with ThreadPoolExecutor(THREADS) as threads:
    replies = ["Mwaka, mwaka, mwaka, mwaka, mwaka, mwaka.", "The year is over."] * (THREADS // 2)
    scores = list(threads.map(score, replies))
assert scores == [1.0, 0.0] * (THREADS // 2), scores

print("ok")
