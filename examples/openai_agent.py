"""An agent on the openai SDK: chat completions with tools.

It reads its task, base URL and key from the environment, as it would anywhere, and prints its
answer. Run it against any server: OPENAI_BASE_URL, OPENAI_API_KEY, SINEW_TASK.
"""

import json
import os

from openai import OpenAI

from calculator import calculate
from prompts import MAX_TURNS, SYSTEM, WORKED

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


def worked_examples() -> list[dict]:
    messages = []
    for number, (question, expression, result) in enumerate(WORKED):
        call = {
            "id": f"example{number}",
            "type": "function",
            "function": {"name": "calculator", "arguments": json.dumps({"expression": expression})},
        }
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
            {"role": "assistant", "content": f"Answer: {result}"},
        ]
    return messages


def run_tool(call) -> str:
    if call.function.name != "calculator":
        return f"Error: no tool {call.function.name}"
    try:
        return calculate(json.loads(call.function.arguments)["expression"])
    except (ValueError, KeyError, TypeError) as e:
        return f"Error: arguments must be a JSON object with expression: {e}"


def main() -> None:
    client = OpenAI()
    messages = [
        {"role": "system", "content": SYSTEM},
        *worked_examples(),
        {"role": "user", "content": os.environ["SINEW_TASK"]},
    ]
    answer = ""
    for _ in range(MAX_TURNS):
        completion = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        reply = completion.choices[0].message
        answer = reply.content or answer
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run_tool(call)})
    print(answer)


if __name__ == "__main__":
    main()
