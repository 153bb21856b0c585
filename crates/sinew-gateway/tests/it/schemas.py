"""Every answer and event of the five dialects, against the models that the providers' packages ship:
strictly typed, nothing missing, nothing that the schema does not know but what is documented, no field
that is null where the provider leaves it out."""

import json
import os
import urllib.error
import urllib.request

import anthropic.types
import anthropic.types.beta
import google.genai.types
import openai.types
import openai.types.chat
import openai.types.responses
import pydantic
from openai.types.shared import ErrorObject

BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]

# Fields of answers beyond the schemas, as the page of the dialects lists them.
BEYOND = {"reasoning_content", "token_ids", "prompt_token_ids"}
# The providers write these as null; everything else that is not there is left out.
NULLS = {
    # chat and text completions
    "content", "refusal", "logprobs", "finish_reason", "usage",
    # responses
    "error", "incomplete_details", "instructions", "max_output_tokens", "previous_response_id", "temperature",
    "top_p", "metadata", "user", "safety_identifier", "prompt_cache_key", "effort", "summary", "encrypted_content",
    # messages
    "stop_reason", "stop_sequence",
    # errors
    "param", "request_id",
}


def post(path, body, status=200, headers=None):
    request = urllib.request.Request(
        BASE + path,
        data=json.dumps(body).encode() if body is not None else None,
        headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **(headers or {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            told, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        told, text = error.code, error.read().decode()
    assert told == status, (path, body, told, text)
    return text


def extras(value, where):
    """Fields that no model knows, wherever they are."""
    if isinstance(value, pydantic.BaseModel):
        unknown = set(value.model_extra or {}) - BEYOND
        assert not unknown, f"{where}: unknown to {type(value).__name__}: {sorted(unknown)}"
        for name in type(value).model_fields:
            extras(getattr(value, name), f"{where}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            extras(item, f"{where}[{index}]")


def nulls(value, where):
    if isinstance(value, dict):
        for name, item in value.items():
            assert item is not None or name in NULLS, f"{where}.{name} is null"
            # A tool's arguments and schema are not checked.
            if name not in ("input", "parameters"):
                nulls(item, f"{where}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            nulls(item, f"{where}[{index}]")


def check(schema, text, where):
    raw = json.loads(text)
    value = pydantic.TypeAdapter(schema).validate_json(text, strict=True)
    extras(value, where)
    nulls(raw, where)
    return raw


def events(text):
    """Name and data of each event."""
    for event in filter(None, text.split("\n\n")):
        if event.startswith(":"):
            continue
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        yield lines.get("event"), lines["data"]


USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat():
    function = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}
    plain = {"model": "m", "messages": [USER]}
    for more in (
        {},
        {"tools": [function]},
        {"max_tokens": 3},
        {"stop": ["aid"]},
        {"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    ):
        body = {**plain, **more}
        raw = check(openai.types.chat.ChatCompletion, post("/chat/completions", body), f"chat {more}")
        assert all("citations" not in c["message"] for c in raw["choices"])
        for options in ({}, {"stream_options": {"include_usage": True}}):
            text = post("/chat/completions", {**body, "stream": True, **options})
            chunks = [data for _, data in events(text)]
            assert chunks.pop() == "[DONE]"
            for chunk in chunks:
                raw = check(openai.types.chat.ChatCompletionChunk, chunk, f"chunk {more}")
                # The original has it: null in all chunks but the last, if it is asked for.
                assert ("usage" in raw) == bool(options), raw
            assert (raw.get("usage") is not None) == bool(options), raw


def completions():
    for more in ({}, {"max_tokens": 3}, {"n": 2, "logprobs": 2, "return_token_ids": True}):
        body = {"model": "m", "prompt": "hi", **more}
        check(openai.types.Completion, post("/completions", body), f"text {more}")
        text = post("/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
        chunks = [data for _, data in events(text)]
        assert chunks.pop() == "[DONE]"
        for chunk in chunks:
            # The package has one model for both, in which every choice has ended.
            raw = json.loads(chunk)
            for choice in raw["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            check(openai.types.Completion, json.dumps(raw), f"text chunk {more}")


def responses():
    function = {"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA}
    for more in (
        {},
        {"tools": [function], "tool_choice": {"type": "function", "name": "add"}},
        {"tools": [function], "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u"},
        {"max_output_tokens": 3},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "store": False},
    ):
        body = {"model": "m", "input": "hi", **more}
        check(openai.types.responses.Response, post("/responses", body), f"response {more}")
        for name, data in events(post("/responses", {**body, "stream": True})):
            raw = check(openai.types.responses.ResponseStreamEvent, data, f"event {name} {more}")
            assert raw["type"] == name, raw


def messages():
    tool = {"name": "add", "description": "adds", "input_schema": SCHEMA}
    for more in (
        {},
        {"tools": [tool]},
        {"tools": [tool], "tool_choice": {"type": "tool", "name": "add"}},
        {"max_tokens": 3},
        {"stop_sequences": ["aid"]},
    ):
        body = {"model": "m", "max_tokens": 200, "messages": [USER], **more}
        text = post("/messages", body)
        for schema in (anthropic.types.Message, anthropic.types.beta.BetaMessage):
            raw = check(schema, text, f"message {more}")
        assert "citations" not in text, text
        for name, data in events(post("/messages", {**body, "stream": True})):
            for schema in (anthropic.types.RawMessageStreamEvent, anthropic.types.beta.BetaRawMessageStreamEvent):
                raw = check(schema, data, f"event {name} {more}")
            assert raw["type"] == name, raw
            assert "citations" not in data, data
    body = {"model": "m", "messages": [USER]}
    check(anthropic.types.MessageTokensCount, post("/messages/count_tokens", body), "count")


def google_contents():
    function = {"name": "add", "description": "adds", "parametersJsonSchema": SCHEMA}
    tools = [{"functionDeclarations": [function]}]
    for more in (
        {},
        {"tools": tools},
        {"tools": tools, "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
        {"generationConfig": {"maxOutputTokens": 3, "candidateCount": 2}},
        {"generationConfig": {"responseLogprobs": True, "logprobs": 2}},
        {"tools": tools, "generationConfig": {"thinkingConfig": {"includeThoughts": True}}},
    ):
        body = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}], **more}
        path = "/v1beta/models/m:"
        answers = [json.loads(post(path + "generateContent", body))]
        answers += json.loads(post(path + "streamGenerateContent", body))
        stream = post(path + "streamGenerateContent?alt=sse", body).split("\n\n")
        answers += [json.loads(event.removeprefix("data: ")) for event in stream if event]
        for answer in answers:
            # Its models forbid fields that they do not know.
            google.genai.types.GenerateContentResponse.model_validate(answer)
            nulls(answer, f"generateContent {more}")
            assert answer["candidates"] and answer["candidates"][0]["content"]["parts"], answer
    counted = json.loads(post("/v1beta/models/m:countTokens", {"contents": {"parts": {"text": "hi"}}}))
    assert counted.keys() == {"totalTokens"}, counted
    for model in json.loads(post("/v1beta/models", None))["models"]:
        assert model["name"] == "models/policy", model
    raw = json.loads(post("/v1beta/models/m:generateContent", {"contents": 7}, status=400))
    assert raw["error"]["code"] == 400 and raw["error"]["status"] == "INVALID_ARGUMENT", raw


def refusals():
    wrong = {"model": "m", "messages": 7, "max_tokens": 1}
    for path, body in (
        ("/chat/completions", wrong),
        ("/completions", {"model": "m"}),
        ("/responses", {"model": "m"}),
    ):
        raw = json.loads(post(path, body, status=400))
        check(ErrorObject, json.dumps(raw["error"]), f"error of {path}")
    check(anthropic.types.ErrorResponse, post("/messages", wrong, status=400), "error of /messages")
    check(openai.types.Model, post("/models/policy", None), "model")
    raw = json.loads(post("/models", None))
    assert raw["object"] == "list", raw
    for model in raw["data"]:
        check(openai.types.Model, json.dumps(model), "model")


for part in (chat, completions, responses, messages, google_contents, refusals):
    part()
print("ok")
