"""An agent on LiteLLM: a loop of completion() with a tool, or with AGENT_ANSWER=structured a typed answer.

It reads its task, base URL and key from the environment. Assistant messages go back to the server as
LiteLLM prints them, with all the fields that it adds. AGENT_MODEL may name another provider prefix,
such as anthropic/policy.
"""

import json
import os

import litellm
from pydantic import BaseModel

from calculator import calculate
from prompts import MAX_TURNS, SYSTEM

MODEL = os.environ.get("AGENT_MODEL", "openai/policy")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates arithmetic.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


class Result(BaseModel):
    answer: int


def structured(task: str) -> str:
    messages = [{"role": "user", "content": task}]
    completion = litellm.completion(model=MODEL, messages=messages, response_format=Result)
    return Result.model_validate_json(completion.choices[0].message.content).model_dump_json()


def tool_loop(task: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    for _ in range(MAX_TURNS):
        reply = litellm.completion(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        messages.append(reply.model_dump())
        if not reply.tool_calls:
            return reply.content
        for call in reply.tool_calls:
            result = calculate(json.loads(call.function.arguments).get("expression"))
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})
    return ""


def main() -> None:
    litellm.suppress_debug_info = True
    run = structured if os.environ.get("AGENT_ANSWER") == "structured" else tool_loop
    print(run(os.environ["SINEW_TASK"]))


if __name__ == "__main__":
    main()
