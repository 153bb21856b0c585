"""Rewards of `verifiers` that compare by math-verify give the same scores in the threads of a worker as in the main thread."""

import asyncio
import threading
from types import SimpleNamespace

from sinew.bridges.verifiers import Verifiers

Verifiers.taskset = "tiny_boxed"
Verifiers.setup_worker()
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()


async def scored(replies):
    given = [[{"role": "user", "content": "1 / 2 ="}, {"role": "assistant", "content": reply}] for reply in replies]
    task = SimpleNamespace(row=0)
    return await asyncio.gather(*(Verifiers().reward(task, messages[-1]["content"], messages) for messages in given))


replies = [r"It is \boxed{\frac{1}{2}}.", r"It is \boxed{\frac{1}{3}}."] * 4
scores = [score["reward"] for score in asyncio.run_coroutine_threadsafe(scored(replies), loop).result(60)]
assert scores == [1.0, 0.0] * 4, scores

print("ok")
