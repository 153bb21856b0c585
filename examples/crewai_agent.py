"""An agent on CrewAI: a crew of one with a tool, or with AGENT_ANSWER=structured a typed result.

It reads its task, base URL and key from the environment. AGENT_LITELLM=1 makes CrewAI call LiteLLM
instead of its own OpenAI client.
"""

import os

# Nothing of it may leave the host: CrewAI reports usage and traces otherwise.
os.environ.update(CREWAI_DISABLE_TELEMETRY="true", OTEL_SDK_DISABLED="true", CREWAI_TRACING_ENABLED="false")

from crewai import Agent, Crew, LLM, Task
from crewai.tools import tool
from pydantic import BaseModel

from calculator import calculate
from prompts import MAX_TURNS


class Result(BaseModel):
    answer: int


@tool("calculator")
def calculator(expression: str) -> str:
    """Evaluates arithmetic."""
    return calculate(expression)


def main() -> None:
    structured = os.environ.get("AGENT_ANSWER") == "structured"
    model = LLM(
        model="openai/policy",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_litellm=os.environ.get("AGENT_LITELLM") == "1",
    )
    agent = Agent(
        role="mathematician",
        goal="Answer the question.",
        backstory="You use a calculator.",
        llm=model,
        tools=[] if structured else [calculator],
        max_iter=MAX_TURNS,
        verbose=False,
    )
    task = Task(
        description=os.environ["SINEW_TASK"],
        expected_output="The number." if structured else "Answer: NUMBER",
        agent=agent,
        response_model=Result if structured else None,
    )
    result = Crew(agents=[agent], tasks=[task], verbose=False).kickoff()
    print(result.raw)


if __name__ == "__main__":
    main()
