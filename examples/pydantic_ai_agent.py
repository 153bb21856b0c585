"""An agent on pydantic-ai: a tool loop, or with AGENT_ANSWER=structured a typed answer.

It reads its task, base URL and key from the environment. AGENT_API chooses the model class:
chat_completions, responses or anthropic.
"""

import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.usage import UsageLimits

from calculator import calculate
from prompts import MAX_TURNS, SYSTEM

# Any name is taken; by it pydantic-ai decides what a model of Anthropic's can do.
MODELS = {
    "chat_completions": lambda: OpenAIChatModel("policy"),
    "responses": lambda: OpenAIResponsesModel("policy"),
    "anthropic": lambda: AnthropicModel("claude-sonnet-4-5"),
}


class Result(BaseModel):
    answer: int


def calculator(expression: str) -> str:
    """Evaluates arithmetic."""
    return calculate(expression)


def main() -> None:
    model = MODELS[os.environ.get("AGENT_API", "chat_completions")]()
    limits = UsageLimits(request_limit=MAX_TURNS)
    task = os.environ["SINEW_TASK"]
    if os.environ.get("AGENT_ANSWER") == "structured":
        agent = Agent(model, output_type=NativeOutput(Result))
        print(agent.run_sync(task, usage_limits=limits).output.model_dump_json())
    else:
        agent = Agent(model, system_prompt=SYSTEM, tools=[calculator])
        print(agent.run_sync(task, usage_limits=limits).output)


if __name__ == "__main__":
    main()
