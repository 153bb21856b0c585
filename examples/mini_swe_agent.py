"""mini-swe-agent on LiteLLM: its default loop with a shell as its only tool.

It reads its task, base URL and key from the environment and works in the current folder. What it submits
is its answer.
"""

import os

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_COST_TRACKING", "ignore_errors")

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from prompts import MAX_TURNS

SYSTEM = "You are a helpful assistant that can interact with a computer."
INSTANCE = (
    "{{task}}\n\nUse the bash tool. When you are done, print COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT "
    "on a line of its own, then your answer."
)


def main() -> None:
    agent = DefaultAgent(
        LitellmModel(model_name="openai/policy"),
        LocalEnvironment(timeout=20),
        system_template=SYSTEM,
        instance_template=INSTANCE,
        step_limit=MAX_TURNS,
    )
    print(agent.run(os.environ["SINEW_TASK"])["submission"].strip())


if __name__ == "__main__":
    main()
