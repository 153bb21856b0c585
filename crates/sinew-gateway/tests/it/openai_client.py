"""What an agent does with OpenAI's client: base URL and key come from the environment."""

import openai

client = openai.OpenAI(max_retries=0, timeout=30)
assert [m.id for m in client.models.list()] == ["policy"]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]

# Tools, in parallel, and their answers.
messages = [{"role": "user", "content": "40 + 2?"}]
answer = client.chat.completions.create(model="gpt-x", messages=messages, tools=TOOLS)
choice = answer.choices[0]
assert choice.finish_reason == "tool_calls", choice
assert len(choice.message.tool_calls) == 2, choice
assert choice.message.reasoning_content == "A sum.", choice
messages.append(
    {
        "role": "assistant",
        "content": choice.message.content,
        "tool_calls": [call.model_dump() for call in choice.message.tool_calls],
    }
)
for call in choice.message.tool_calls:
    assert call.function.name == "add" and call.function.arguments == '{"a":40,"b":2}', call
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
answer = client.chat.completions.create(model="gpt-x", messages=messages, tools=TOOLS)
assert answer.choices[0].message.content == "you said: 40 + 2?", answer
assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

# The whole message object goes back as it came.
messages.append(answer.choices[0].message.model_dump())
messages.append({"role": "user", "content": "ok"})
answer = client.chat.completions.create(model="gpt-x", messages=messages, tools=TOOLS)
assert answer.choices[0].message.content == "you said: ok", answer

# A stream of text, and one of calls.
hello = [{"role": "user", "content": "héllo"}]
text, usage = "", None
with client.chat.completions.create(
    model="gpt-x", messages=hello, stream=True, stream_options={"include_usage": True}
) as stream:
    for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.choices:
            text += part.delta.content or ""
assert text == "you said: héllo", text
assert usage.completion_tokens == len(text.encode()) + 1, usage
with client.chat.completions.stream(model="gpt-x", messages=hello, tools=TOOLS) as stream:
    for _ in stream:
        pass
    final = stream.get_final_completion()
assert len(final.choices[0].message.tool_calls) == 2, final

# Several choices with log-probabilities.
answer = client.chat.completions.create(
    model="gpt-x", messages=hello, n=2, seed=3, logprobs=True, top_logprobs=2, max_tokens=5
)
assert [c.index for c in answer.choices] == [0, 1], answer
for choice in answer.choices:
    assert choice.finish_reason == "length", choice
    content = choice.logprobs.content
    assert len(content) == 5 and all(t.logprob <= 0 for t in content), content
    assert "".join(t.token for t in content) == "you s", content

# Text completions.
answer = client.completions.create(model="gpt-x", prompt="abc", max_tokens=3)
assert answer.choices[0].text == "you", answer

# Errors name the field.
try:
    client.chat.completions.create(model="gpt-x", messages=hello, presence_penalty=1)
    raise AssertionError("not refused")
except openai.BadRequestError as error:
    assert error.param == "presence_penalty" and error.code == "unsupported_value", error
try:
    openai.OpenAI(api_key="wrong", max_retries=0).models.list()
    raise AssertionError("not refused")
except openai.AuthenticationError:
    pass

# Leaving a stream in the middle.
stream = client.chat.completions.create(
    model="gpt-x", messages=[{"role": "user", "content": "count"}], stream=True, max_tokens=1500
)
for index, _ in enumerate(stream):
    if index == 3:
        break
stream.close()
print("ok")
