"""An agent on Google's SDK: generateContent with function calls, streamed.

It reads GOOGLE_GEMINI_BASE_URL, GEMINI_API_KEY and SINEW_TASK, and prints its answer.
"""

import os

from google import genai
from google.genai import types

from calculator import calculate
from prompts import MAX_TURNS, SYSTEM, WORKED

CALCULATOR = {
    "name": "calculator",
    "description": "Evaluates arithmetic.",
    "parameters_json_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}


def content(role: str, *parts: types.Part) -> types.Content:
    return types.Content(role=role, parts=list(parts))


def worked_examples() -> list[types.Content]:
    contents = []
    for number, (question, expression, result) in enumerate(WORKED):
        name, call = "calculator", f"example{number}"
        called = types.FunctionCall(id=call, name=name, args={"expression": expression})
        output = types.FunctionResponse(id=call, name=name, response={"output": result})
        contents += [
            content("user", types.Part(text=question)),
            content("model", types.Part(function_call=called)),
            content("user", types.Part(function_response=output)),
            content("model", types.Part(text=f"Answer: {result}")),
        ]
    return contents


def main() -> None:
    client = genai.Client()
    config = types.GenerateContentConfig(
        system_instruction=SYSTEM,
        max_output_tokens=256,
        tools=[types.Tool(function_declarations=[CALCULATOR])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    task = types.Part(text=os.environ["SINEW_TASK"])
    contents = [*worked_examples(), content("user", task)]
    answer = ""
    for _ in range(MAX_TURNS):
        # Each chunk has a part of the turn: all of them are sent back, with their signatures.
        parts = []
        for chunk in client.models.generate_content_stream(model="policy", contents=contents, config=config):
            for candidate in chunk.candidates or []:
                parts += candidate.content.parts or []
        answer = "".join(part.text or "" for part in parts if not part.thought) or answer
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            break
        contents.append(content("model", *parts))
        outputs = [
            types.FunctionResponse(
                id=call.id, name=call.name, response={"output": calculate(call.args.get("expression", ""))}
            )
            for call in calls
        ]
        contents.append(content("user", *(types.Part(function_response=output) for output in outputs)))
    print(answer)


if __name__ == "__main__":
    main()
