"""A taskset of `verifiers` for the tests of its bridge: answers in boxes, compared by math-verify."""

import verifiers.v1 as vf


class HalfTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace) -> float:
        return vf.verify_boxed_math_answer(trace.last_reply, "0.5")


class TinyBoxed(vf.Taskset[HalfTask]):
    def load(self):
        for _ in range(2):
            yield HalfTask(vf.TaskData(prompt="1 / 2 ="), self.config.task)


__all__ = ["TinyBoxed"]
