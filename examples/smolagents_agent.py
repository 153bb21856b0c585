"""A code agent on smolagents: the model writes Python, the framework runs it.

It reads OPENAI_BASE_URL, OPENAI_API_KEY and SINEW_TASK, and prints its answer.
"""

import os

from smolagents import CodeAgent, LogLevel, OpenAIModel, tool

from calculator import calculate
from prompts import MAX_TURNS


@tool
def calculator(expression: str) -> str:
    """Evaluates arithmetic.

    Args:
        expression: numbers, + - * / // % and parentheses
    """
    return calculate(expression)


def main() -> None:
    model = OpenAIModel(
        model_id="policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    agent = CodeAgent(
        tools=[calculator], model=model, max_steps=MAX_TURNS, verbosity_level=LogLevel.OFF
    )
    print(f"Answer: {agent.run(os.environ['SINEW_TASK'])}")


if __name__ == "__main__":
    main()
