"""An agent on the Anthropic SDK: messages with tool use, streamed.

It reads ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and SINEW_TASK, and prints its answer.
"""

import os

from anthropic import Anthropic

from calculator import calculate
from prompts import MAX_TURNS, SYSTEM, WORKED

TOOLS = [
    {
        "name": "calculator",
        "description": "Evaluates arithmetic.",
        "input_schema": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    }
]


def worked_examples() -> list[dict]:
    messages = []
    for number, (question, expression, result) in enumerate(WORKED):
        use = {
            "type": "tool_use",
            "id": f"example{number}",
            "name": "calculator",
            "input": {"expression": expression},
        }
        output = {"type": "tool_result", "tool_use_id": use["id"], "content": result}
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [output]},
            {"role": "assistant", "content": f"Answer: {result}"},
        ]
    return messages


def main() -> None:
    client = Anthropic()
    messages = [*worked_examples(), {"role": "user", "content": os.environ["SINEW_TASK"]}]
    answer = ""
    for _ in range(MAX_TURNS):
        with client.messages.stream(
            model="policy", max_tokens=256, system=SYSTEM, messages=messages, tools=TOOLS
        ) as stream:
            reply = stream.get_final_message()
        answer = "".join(block.text for block in reply.content if block.type == "text") or answer
        uses = [block for block in reply.content if block.type == "tool_use"]
        if not uses:
            break
        messages.append({"role": "assistant", "content": reply.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": use.id,
                "content": calculate(use.input.get("expression", "")),
            }
            for use in uses
        ]
        messages.append({"role": "user", "content": results})
    print(answer)


if __name__ == "__main__":
    main()
