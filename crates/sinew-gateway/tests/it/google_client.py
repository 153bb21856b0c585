"""What an agent does with Google's client: contents, functions, streams, counts."""

from google import genai
from google.genai import errors, types

client = genai.Client()
ADD = types.FunctionDeclaration(
    name="add",
    description="Adds two numbers",
    parameters=types.Schema(
        type="OBJECT",
        properties={"a": types.Schema(type="INTEGER"), "b": types.Schema(type="INTEGER")},
    ),
)
TOOLS = [types.Tool(function_declarations=[ADD])]
OFF = types.AutomaticFunctionCallingConfig(disable=True)


def config(**fields):
    return types.GenerateContentConfig(automatic_function_calling=OFF, **fields)


def create(contents, **fields):
    return client.models.generate_content(model="gemini-x", contents=contents, config=config(**fields))


# A text, and why it ended.
answer = create("hi", system_instruction="Be brief.", max_output_tokens=200)
assert answer.text == "you said: hi", answer
candidate = answer.candidates[0]
assert candidate.finish_reason == types.FinishReason.STOP, answer
assert answer.usage_metadata.candidates_token_count == len("you said: hi") + 1, answer.usage_metadata
assert answer.usage_metadata.total_token_count > answer.usage_metadata.prompt_token_count, answer
assert answer.model_version == "gemini-x", answer
answer = create("hello", max_output_tokens=3)
assert (answer.candidates[0].finish_reason, answer.text) == (types.FinishReason.MAX_TOKENS, "you"), answer
answer = create("hello", stop_sequences=["aid", "x"])
assert (answer.candidates[0].finish_reason, answer.text) == (types.FinishReason.STOP, "you s"), answer
answer = create("hello", candidate_count=2, response_logprobs=True, logprobs=2)
assert len(answer.candidates) == 2, answer
chosen = answer.candidates[0].logprobs_result.chosen_candidates
assert "".join(one.token for one in chosen) == "you said: hello", chosen
assert all(one.log_probability <= 0 for one in chosen), chosen

# Functions in parallel; the turn goes back as it came, and its thoughts with it.
for thoughts in (True, False):
    thinking = types.ThinkingConfig(include_thoughts=thoughts, thinking_budget=1024)
    history = [types.Content(role="user", parts=[types.Part(text="40 + 2?")])]
    answer = create(history, tools=TOOLS, thinking_config=thinking)
    parts = answer.candidates[0].content.parts
    assert [part.text for part in parts if part.thought] == (["A sum."] if thoughts else []), parts
    calls = answer.function_calls
    assert [(call.name, call.args) for call in calls] == [("add", {"a": 40, "b": 2})] * 2, calls
    assert answer.usage_metadata.thoughts_token_count == len("A sum."), answer.usage_metadata
    history.append(answer.candidates[0].content)
    results = [types.FunctionResponse(id=call.id, name=call.name, response={"output": "42"}) for call in calls]
    parts = [types.Part(function_response=result) for result in results]
    history.append(types.Content(role="user", parts=[*parts, types.Part(text="go on")]))
    answer = create(history, tools=TOOLS, thinking_config=thinking)
    assert answer.text == "you said: go on", answer

# Streams, and the client's own history, which has each chunk apart.
chunks = list(client.models.generate_content_stream(model="gemini-x", contents="héllo", config=config()))
assert "".join(chunk.text or "" for chunk in chunks) == "you said: héllo", chunks
assert len(chunks) > 2, chunks
assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP, chunks[-1]
assert chunks[-1].usage_metadata.candidates_token_count > 10, chunks[-1]
chat = client.chats.create(model="gemini-x", config=config(system_instruction="Be brief."))
for text in ("one", "two", "three"):
    said = "".join(chunk.text or "" for chunk in chat.send_message_stream(text))
    assert said == f"you said: {text}", said
assert len(chat.get_history(curated=True)) >= 6, chat.get_history()


# The client's own loop over functions.
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


answer = client.models.generate_content(
    model="gemini-x", contents="40 + 2?", config=types.GenerateContentConfig(tools=[add])
)
assert answer.text == "you said: 40 + 2?", answer

# Counting; it grows with what is said.
short = client.models.count_tokens(model="gemini-x", contents="a").total_tokens
long = client.models.count_tokens(model="gemini-x", contents="a" * 100).total_tokens
assert 0 < short < long, (short, long)

# Models.
names = [model.name for model in client.models.list()]
assert names == ["models/policy"], names
model = client.models.get(model="anything")
assert model.name == "models/anything" and model.input_token_limit > 0, model

# Refusals, in the words of the API.
for fields, name in [
    ({"presence_penalty": 0.5}, "generationConfig.presencePenalty"),
    ({"temperature": 2.5}, "generationConfig.temperature"),
    ({"cached_content": "c"}, "cachedContent"),
    ({"response_modalities": ["IMAGE"]}, "generationConfig.responseModalities"),
    ({"tool_config": {"function_calling_config": {"mode": "ANY"}}}, "toolConfig"),
]:
    try:
        create("hello", **fields)
        raise AssertionError(f"not refused: {fields}")
    except errors.ClientError as error:
        assert (error.code, error.status) == (400, "INVALID_ARGUMENT"), error
        assert name in str(error.details), (fields, error.details)
# A client that nobody holds closes its connections.
stranger = genai.Client(api_key="wrong")
try:
    stranger.models.generate_content(model="gemini-x", contents="x")
    raise AssertionError("not refused")
except errors.ClientError as error:
    assert (error.code, error.status) == (401, "UNAUTHENTICATED"), error
print("ok")
