"""Structured output with the clients of the providers: what comes back is an object."""

from typing import Literal

import anthropic
import openai
from pydantic import BaseModel


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[7, 8]


class Add(BaseModel):
    a: Literal[40, 41]
    b: Literal[2, 3]


client = openai.OpenAI(max_retries=0, timeout=30)
asked = [{"role": "user", "content": "who?"}]

# Chat completions, whole and streamed.
answer = client.chat.completions.parse(model="gpt-x", messages=asked, response_format=Person)
assert answer.choices[0].message.parsed == Person(name="Ann", age=7), answer
with client.chat.completions.stream(model="gpt-x", messages=asked, response_format=Person) as stream:
    for _ in stream:
        pass
    final = stream.get_final_completion()
assert final.choices[0].message.parsed == Person(name="Ann", age=7), final

# Whatever the model would say.
other = [{"role": "user", "content": "anything"}]
answer = client.chat.completions.parse(model="gpt-x", messages=other, response_format=Person)
assert isinstance(answer.choices[0].message.parsed, Person), answer

# Strict tools.
tool = openai.pydantic_function_tool(Add, name="add")
assert tool["function"]["strict"] is True
called = [{"role": "user", "content": "call"}]
answer = client.chat.completions.parse(model="gpt-x", messages=called, tools=[tool])
assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == Add(a=40, b=2), answer

# Responses.
answer = client.responses.parse(model="gpt-x", input="who?", text_format=Person)
assert answer.output_parsed == Person(name="Ann", age=7), answer
with client.responses.stream(model="gpt-x", input="who?", text_format=Person) as stream:
    for _ in stream:
        pass
    final = stream.get_final_response()
assert final.output_parsed == Person(name="Ann", age=7), final

# Messages.
claude = anthropic.Anthropic(max_retries=0, timeout=30)
answer = claude.messages.parse(model="claude-x", max_tokens=200, messages=asked, output_format=Person)
assert answer.parsed_output == Person(name="Ann", age=7), answer
answer = claude.beta.messages.parse(model="claude-x", max_tokens=200, messages=asked, output_format=Person)
assert answer.parsed_output == Person(name="Ann", age=7), answer
print("ok")
