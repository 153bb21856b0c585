"""A taskset of `verifiers` for the tests of its bridge: sums."""

import verifiers.v1 as vf


class AddData(vf.TaskData):
    answer: str = ""


class AddTask(vf.Task[AddData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class TinyAdd(vf.Taskset[AddTask]):
    def load(self):
        for i in range(40):
            data = AddData(prompt=f"{i} + 1 =", answer=str(i + 1), system_prompt="Add.")
            yield AddTask(data, self.config.task)


__all__ = ["TinyAdd"]
