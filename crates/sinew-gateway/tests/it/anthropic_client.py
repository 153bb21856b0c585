"""What an agent does with Anthropic's client: messages, tools, streams, counts."""

import anthropic

client = anthropic.Anthropic(max_retries=0, timeout=30)
TOOLS = [
    {
        "name": "add",
        "description": "Adds two numbers",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
        "cache_control": {"type": "ephemeral"},
    }
]


def create(messages, **fields):
    fields = {"max_tokens": 200, **fields}
    return client.messages.create(model="claude-x", messages=messages, **fields)


def user(content):
    return {"role": "user", "content": content}


# A text, and why it ended.
answer = create([user("hi")], system=[{"type": "text", "text": "Be brief."}])
assert answer.content[0].text == "you said: hi", answer
assert answer.stop_reason == "end_turn" and answer.stop_sequence is None, answer
assert answer.usage.output_tokens == len("you said: hi") + 1, answer.usage
answer = create([user("hello")], max_tokens=3)
assert (answer.stop_reason, answer.content[0].text) == ("max_tokens", "you"), answer
answer = create([user("hello")], stop_sequences=["aid", "x"])
assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "aid"), answer
assert answer.content[0].text == "you s", answer

# Tools in parallel; what came back goes back as it is.
messages = [user("40 + 2?")]
answer = create(messages, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
kinds = [block.type for block in answer.content]
assert kinds == ["thinking", "tool_use", "tool_use"], kinds
assert answer.stop_reason == "tool_use", answer
assert answer.content[0].thinking == "A sum.", answer
assert answer.content[1].input == {"a": 40, "b": 2}, answer
messages.append({"role": "assistant", "content": answer.content})
results = [
    {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "42"}]}
    for block in answer.content[1:]
]
results[1]["is_error"] = True
messages.append(user([*results, {"type": "text", "text": "go on"}]))
answer = create(messages, tools=TOOLS)
assert answer.content[0].text == "you said: go on", answer

# Streams: the client's own accumulation.
with client.messages.stream(model="claude-x", max_tokens=200, messages=[user("héllo")]) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == final.content[0].text == "you said: héllo", final
assert final.stop_reason == "end_turn", final
assert final.usage.input_tokens > 0 and final.usage.output_tokens > 10, final.usage
names = []
with client.messages.stream(
    model="claude-x", max_tokens=200, messages=[user("40 + 2?")], tools=TOOLS
) as stream:
    for event in stream:
        names.append(event.type)
    final = stream.get_final_message()
assert [block.type for block in final.content] == ["thinking", "tool_use", "tool_use"], final
assert final.content[2].input == {"a": 40, "b": 2} and final.stop_reason == "tool_use", final
assert names[0] == "message_start" and names[-1] == "message_stop", names
assert names.count("content_block_start") == names.count("content_block_stop") == 3, names

# Counting; it grows with what is said.
short = client.messages.count_tokens(model="claude-x", messages=[user("a")]).input_tokens
long = client.messages.count_tokens(
    model="claude-x", messages=[user("a")], system="Be brief.", tools=TOOLS
).input_tokens
assert 0 < short < long, (short, long)

# The client's own loop over tools, which asks the server to keep the conversation.
@anthropic.beta_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


runner = client.beta.messages.tool_runner(
    model="claude-x", max_tokens=200, messages=[user("40 + 2?")], tools=[add]
)
answers = list(runner)
assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"], answers
assert answers[1].content[0].text == "you said: 40 + 2?", answers

# Errors come in Anthropic's form, with the name of the field.
for fields, name in [
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
    ({"temperature": 1.5}, "temperature"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"messages": [user([{"type": "image"}])]}, "messages[0].content[0].source"),
    ({"messages": [user([{"type": "document"}])]}, "messages[0].content[0].source"),
    ({"messages": [user([{"type": "video"}])]}, "messages[0].content[0].type"),
    ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "b"}]}, "messages[0].role"),
]:
    try:
        create([user("hello")], extra_body=fields)
        raise AssertionError(f"not refused: {fields}")
    except anthropic.BadRequestError as error:
        assert error.body["type"] == "error", error.body
        assert error.body["error"]["type"] == "invalid_request_error", error.body
        assert name in error.body["error"]["message"], (fields, error.body)
try:
    anthropic.Anthropic(api_key="wrong", max_retries=0).messages.create(
        model="claude-x", max_tokens=1, messages=[user("x")]
    )
    raise AssertionError("not refused")
except anthropic.AuthenticationError as error:
    assert error.body["error"]["type"] == "authentication_error", error.body
print("ok")
