"""An agent on DSPy: ReAct with a tool, or with AGENT_ANSWER=structured a typed prediction.

It reads its task, base URL and key from the environment.
"""

import os

import dspy
from pydantic import BaseModel

from calculator import calculate
from prompts import MAX_TURNS


class Result(BaseModel):
    answer: int


def calculator(expression: str) -> str:
    """Evaluates arithmetic."""
    return calculate(expression)


def main() -> None:
    model = dspy.LM("openai/policy", api_base=os.environ["OPENAI_BASE_URL"], cache=False)
    task = os.environ["SINEW_TASK"]
    if os.environ.get("AGENT_ANSWER") == "structured":
        dspy.configure(lm=model, adapter=dspy.JSONAdapter())
        answer = dspy.Predict(dspy.Signature("question: str -> result: Result", custom_types={"Result": Result}))
        print(answer(question=task).result.model_dump_json())
    else:
        dspy.configure(lm=model)
        agent = dspy.ReAct("question -> answer", tools=[calculator], max_iters=MAX_TURNS)
        print(agent(question=task).answer)


if __name__ == "__main__":
    main()
