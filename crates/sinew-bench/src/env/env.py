"""The class and the functions that `sinew bench env` measures."""

import os
import time

from sinew import Env, tool

#: Differs between worker processes.
PROCESS = os.urandom(8).hex()


class Counter(Env):
    def start(self, task):
        self.count = 0

    @tool
    def add(self, amount: int) -> int:
        "Add an amount."
        self.count += amount
        return self.count

    @tool
    def direct(self, calls: int) -> float:
        "Seconds of one call of `add` within Python."
        started = time.perf_counter()
        for _ in range(calls):
            self.add(amount=1)
        return (time.perf_counter() - started) / calls

    @tool
    def memory(self) -> dict:
        "Resident bytes of the worker process."
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return {PROCESS: pages * os.sysconf("SC_PAGE_SIZE")}

    def reward(self):
        return self.count


def exact(output, answer):
    return output.strip() == answer


async def exact_async(output, answer):
    return output.strip() == answer
