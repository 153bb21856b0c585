"""An agent on the OpenAI Agents SDK, over either of its two APIs.

It reads OPENAI_BASE_URL, OPENAI_API_KEY, SINEW_TASK, and AGENT_API: `responses` (the SDK's
default) or `chat_completions`. It prints its answer.
"""

import asyncio
import os

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)

from calculator import calculate
from prompts import MAX_TURNS, SYSTEM


@function_tool
def calculator(expression: str) -> str:
    """Evaluates arithmetic."""
    return calculate(expression)


async def main() -> None:
    set_tracing_disabled(True)
    set_default_openai_api(os.environ.get("AGENT_API", "responses"))
    agent = Agent(name="mathematician", instructions=SYSTEM, tools=[calculator], model="policy")
    try:
        result = await Runner.run(agent, os.environ["SINEW_TASK"], max_turns=MAX_TURNS)
        print(result.final_output)
    except (MaxTurnsExceeded, ModelBehaviorError) as e:
        print(f"gave up: {type(e).__name__}")


if __name__ == "__main__":
    asyncio.run(main())
