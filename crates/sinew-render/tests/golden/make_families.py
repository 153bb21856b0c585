"""Makes families.json beside it: what transformers renders with the templates that models ship.

Usage: python make_families.py [--show TEMPLATE], with transformers and jinja2, after scripts/templates.py.

Texts are kept as SHA-256. What a template expects of messages with calls is tried in the order in
which the renderer tries it.
"""

import datetime
import hashlib
import itertools
import json
import sys
from pathlib import Path

from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent
# Templates of packages, by family: file, start token, end-of-turn token.
PACKAGES = json.loads((HERE / "packages.json").read_text())
SHIPPED = HERE / "../../../../.cache/templates"


class FixedDay(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 1, 31)


chat_template_utils.datetime = FixedDay
TOOL = {
    "name": "python",
    "description": "Runs Python code.",
    "parameters": {
        "type": "object",
        "properties": {"code": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["code"],
    },
}


def user(text):
    return {"role": "user", "content": text}


def said(text, reasoning=None, calls=()):
    message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        arguments = {"code": 'if 1 < 2:\n    print("17" * 23, \'é\')', "limit": 5}
        message["tool_calls"] = [{"id": i, "name": "python", "arguments": arguments} for i in calls]
    return message


def result(call):
    return {"role": "tool", "content": '{"out": 391}', "tool_call_id": call, "name": "python"}


A, B, C = "aaaaaaaa1", "aaaaaaaa2", "aaaaaaaa3"
SYSTEM = {"role": "system", "content": "You are helpful."}
ASK = user("What is 17 * 23?")
CONVERSATIONS = [
    {"tools": False, "messages": [ASK]},
    {"tools": False, "messages": [SYSTEM, ASK, said("391"), user("sure?\n")]},
    {"tools": True, "messages": [ASK]},
    {"tools": True, "messages": [SYSTEM, ASK, said("", calls=[A]), result(A)]},
    {"tools": True, "messages": [ASK, said("", calls=[A]), result(A), said("It is 391."), user("And twice?")]},
    {"tools": True, "messages": [ASK, said("", calls=[B, C]), result(B), result(C)]},
    {"tools": True, "messages": [ASK, said("I will compute.", calls=[A]), result(A)]},
    {"tools": False, "messages": [ASK, said("391", reasoning="I know."), user("sure?")]},
    {"tools": True, "messages": [SYSTEM, ASK, said("", reasoning="I compute.", calls=[A]), result(A)]},
]


def reasoning_field(source):
    """The field of a message in which a template looks for reasoning."""
    if "reasoning_content" in source:
        return "reasoning_content"
    for name in ("thinking", "reasoning"):
        forms = (f".{name} ", f"['{name}']", f'["{name}"]', f"'{name}' in", f'"{name}" in', f".get('{name}')")
        if any(form in source for form in forms):
            return name
    return "reasoning_content"


def convert(message, style, field):
    null, text, _ = style
    out = {"role": message["role"], "content": message["content"]}
    if message.get("reasoning"):
        out[field] = message["reasoning"]
    if message.get("tool_calls"):
        if null and not message["content"]:
            out["content"] = None
        dump = lambda a: json.dumps(a, ensure_ascii=False) if text else a
        out["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": dump(c["arguments"])}}
            for c in message["tool_calls"]
        ]
    for key in ("tool_call_id", "name"):
        if message.get(key):
            out[key] = message[key]
    return out


def render(source, messages, tools, generation, style, tokens):
    try:
        texts, _ = render_jinja_template(
            [[convert(m, style, reasoning_field(source)) for m in messages]],
            tools=[{"type": "function", "function": TOOL}] if tools else None,
            chat_template=source,
            add_generation_prompt=generation,
            **tokens,
        )
        return texts[0]
    except Exception:
        return None


def style_of(source, tokens):
    key, name = "sinewprobekey", "sinewprobename"
    for short, text, null in itertools.product((False, True), repeat=3):
        call_id = "sinewprob" if short else "call_sinewprobe_0123"
        call = {"id": call_id, "name": name, "arguments": {key: "x"}}
        messages = [
            user("x"),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": call_id, "name": name},
        ]
        out = render(source, messages, False, False, (null, text, short), tokens) or ""
        if name in out and key in out and '\\"' + key not in out:
            return (null, text, short)
    return None


def main():
    show = sys.argv[2] if len(sys.argv) > 2 else None
    renders = []
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    paths = [(path.stem, path) for path in sorted((HERE / "../templates").glob("*.jinja"))]
    paths += [(name, SHIPPED / row[0]) for name, row in PACKAGES.items()]
    for name, path in paths:
        source = path.read_text()
        style = style_of(source, tokens)
        row = {"template": name, "calls": style is not None, "sha256": []}
        for conversation in CONVERSATIONS:
            calls = any("tool_calls" in m for m in conversation["messages"])
            text = None
            if style is not None or not calls:
                text = render(source, conversation["messages"], conversation["tools"], True,
                              style or (False, False, False), tokens)
            if show == name:
                print("-----", text)
            row["sha256"].append(text and hashlib.sha256(text.encode()).hexdigest())
        renders.append(row)
        print(name, style, sum(h is None for h in row["sha256"]), "refused")
    golden = {"tool": TOOL, "conversations": CONVERSATIONS, "renders": renders}
    (HERE / "families.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")


main()
