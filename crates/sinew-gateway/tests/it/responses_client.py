"""What an agent does with OpenAI's client and the responses API."""

import json

import openai

client = openai.OpenAI(max_retries=0, timeout=30)
TOOLS = [
    {
        "type": "function",
        "name": "add",
        "description": "Adds two numbers",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    }
]


def create(**fields):
    return client.responses.create(model="gpt-x", **fields)


# A text, and what is told about it.
answer = create(input="hi", instructions="Be brief.", max_output_tokens=100)
assert answer.output_text == "you said: hi", answer
assert answer.status == "completed" and answer.instructions == "Be brief.", answer
assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens

# Going on from it; instructions are not carried over, so they are given again.
again = create(input="ok", instructions="Be brief.", previous_response_id=answer.id)
assert again.output_text == "you said: ok", again
assert again.previous_response_id == answer.id
assert again.usage.input_tokens > answer.usage.input_tokens, again.usage

# A limit.
cut = create(input="hello", max_output_tokens=3)
assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens", cut
assert cut.output_text == "you", cut

# Tools in parallel, with the whole output sent back as it came.
history = [{"role": "user", "content": "40 + 2?"}]
answer = create(input=history, tools=TOOLS, store=False)
kinds = [item.type for item in answer.output]
assert kinds == ["reasoning", "function_call", "function_call"], kinds
assert answer.output[0].content[0].text == "A sum.", answer.output[0]
assert answer.usage.output_tokens_details.reasoning_tokens == len("A sum."), answer.usage
assert json.loads(answer.output[1].arguments) == {"a": 40, "b": 2}, answer.output[1]
history += [item.model_dump(exclude_none=True) for item in answer.output]
for item in answer.output[1:]:
    history.append({"type": "function_call_output", "call_id": item.call_id, "output": "42"})
answer = create(input=history, tools=TOOLS)
assert answer.output_text == "you said: 40 + 2?", answer

# The same by reference: only the results are sent.
first = create(input="40 + 2?", tools=TOOLS, parallel_tool_calls=True)
calls = [item for item in first.output if item.type == "function_call"]
results = [{"type": "function_call_output", "call_id": c.call_id, "output": "42"} for c in calls]
answer = create(input=results, tools=TOOLS, previous_response_id=first.id)
assert answer.output_text == "you said: 40 + 2?", answer

# A stream: the client's own accumulation must agree with the last event.
names, numbers, text = [], [], ""
with client.responses.create(model="gpt-x", input="héllo", stream=True) as stream:
    for event in stream:
        names.append(event.type)
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
assert numbers == list(range(len(numbers))), numbers
assert names[:4] == [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
], names
assert names[-4:] == [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
], names
assert text == "you said: héllo", text
with client.responses.stream(model="gpt-x", input="40 + 2?", tools=TOOLS) as stream:
    names = [event.type for event in stream]
    final = stream.get_final_response()
for name in (
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
):
    assert name in names, (name, names)
assert [item.type for item in final.output] == ["reasoning", "function_call", "function_call"]
assert final.usage.output_tokens > 0, final.usage
with client.responses.stream(model="gpt-x", input="hello", max_output_tokens=3) as stream:
    names = [event.type for event in stream]
assert names[-1] == "response.incomplete", names

# Log-probabilities.
answer = create(input="hello", include=["message.output_text.logprobs"], top_logprobs=2)
logprobs = answer.output[0].content[0].logprobs
assert "".join(t.token for t in logprobs).startswith("you said"), logprobs
assert all(t.logprob <= 0 for t in logprobs), logprobs

# Errors name the field.
for fields, param, code in [
    ({"conversation": "c"}, "conversation", "unsupported_value"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_value"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "invalid_value"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name", "missing_field"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"previous_response_id": "resp_x"}, "previous_response_id", "previous_response_not_found"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "item_not_found"),
    ({"input": [{"type": "computer_call", "call_id": "x"}]}, "input[0].action", "missing_field"),
    ({"input": [{"type": "daydream"}]}, "input[0].type", "unsupported_value"),
    ({"input": [{"role": "user", "content": [{"type": "input_video"}]}]}, "input[0].content[0].type", "unsupported_value"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "add", "arguments": "{"}]}, "input[0].arguments", "invalid_value"),
]:
    try:
        create(input="hello", extra_body=fields)
        raise AssertionError(f"not refused: {fields}")
    except openai.BadRequestError as error:
        assert (error.param, error.code) == (param, code), (fields, error)
try:
    openai.OpenAI(api_key="wrong", max_retries=0).responses.create(model="gpt-x", input="x")
    raise AssertionError("not refused")
except openai.AuthenticationError:
    pass
print("ok")
