"""Makes tokenizer.json and templates.json beside it.

Usage: python make_golden.py MODEL.gguf, with gguf, tokenizers, transformers and jinja2.

Tokenizer: ids of texts under the whole SmolLM2 vocabulary, with the pre-tokenizer that the model
was made with (single digits, then the cuts of GPT-2; `smollm` in GGUF). The file holds only those
tokens and merges that can matter for the texts: a merge whose result occurs in no text cannot
apply, so the ids are those of the whole vocabulary.

Templates: what transformers renders for the conversations, text for text.
"""

import json
import sys
from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent


def texts():
    rows = (HERE / "../../../../data/gsm8k-200.jsonl").read_text().splitlines()[:40]
    out = []
    for row in map(json.loads, rows):
        out += [row["question"], row["answer"]]
    out += [
        "",
        " ",
        "  \n\n\t x",
        "a  12",
        "What is 318 * 27 + 145?",
        "<tool>318 * 27 + 145</tool>",
        "Answer: 8731",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "text<|im_end|>more <|endoftext|><repo_name>x",
        "<|im_end|><|im_end|>",
        "< |im_end|> <|im_end |>",
        "def f(n):\n    return [n ** 2 for n in range(10)]\n\n\nprint(f(3))  # done\r\n",
        "I'm sure they'll say it's DON'T, we've I'D",
        "naïve café über straße Größe Ærøskøbing",
        "日本語のテキスト、中文字符。한국어",
        "emoji 😀👍🏽 and ZWJ 👨‍👩‍👧",
        "\u0301combining e\u0301 nbsp\u00a0thin\u2009",
        "١٢٣ ½ ² Ⅷ 12³4",
        "x" * 300,
        "!" * 50 + "?" * 7,
        "Error: ZeroDivisionError: division by zero",
        '{"name": "python", "arguments": {"code": "1 + 1"}}',
        "\x00\x01\x7f\x80",
        "tab\tsep\tcsv,1,22,333\n4444;5",
        "https://example.com/a_b-c?d=e&f=%20#frag",
        "CamelCaseAndSNAKE_CASE kebab-case 3.14e-10 0xFF",
    ]
    return out


def byte_text(text, chars):
    return "".join(chars[b] for b in text.encode())


def main():
    reader = gguf.GGUFReader(sys.argv[1])
    field = lambda name: reader.fields["tokenizer.ggml." + name].contents()
    tokens, types, merges = field("tokens"), field("token_type"), field("merges")
    assert field("model") == "gpt2" and field("pre") == "smollm"
    pairs = [tuple(m.split(" ")) for m in merges]
    full = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))
    full.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    full.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types) if kind == 3]
    full.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])

    path = Path(sys.argv[1])
    auto = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    cases, differ = [], []
    for text in texts():
        ids = full.encode(text, add_special_tokens=False).ids
        if ids != auto(text, add_special_tokens=False)["input_ids"]:
            differ.append(text)
        cases.append({"text": text, "ids": ids})
    print(f"{len(cases)} texts; transformers' own GGUF conversion, which does not cut at digits,"
          f" differs on {len(differ)}: {[d[:40] for d in differ]}")

    # The alphabet is in order of ids right after the control tokens.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    chars = {}
    for b in range(256):
        c = chr(b)
        chars[b] = c if c in alphabet else None
    shifted = iter(chr(256 + n) for n in range(256))
    chars = {b: (c if c is not None else next(shifted)) for b, c in chars.items()}
    whole = "\0".join(byte_text(t, chars) for t in texts())
    kept_merges = [m for m, (a, b) in zip(merges, pairs) if a + b in whole]
    used = set(special) | {t for t in tokens if len(t) == 1} | {"".join(m.split(" ")) for m in kept_merges}
    kept = [[i, t] for i, t in enumerate(tokens) if t in used]
    golden = {
        "vocab_size": len(tokens),
        "control": [t for t in special],
        "tokens": kept,
        "merges": kept_merges,
        "cases": cases,
    }
    (HERE / "tokenizer.json").write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")
    templates()


TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs code <b>& prints</b> 'é'",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"], "x": [1, 2.5, None, True]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "python", "arguments": {"code": "1 < 2", "n": 1}}}
CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": " be brief \n"},
        {"role": "user", "content": "what's 1 < 2?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "  sure?\n"},
    ],
    [
        {"role": "user", "content": "run"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nok", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "True", "tool_call_id": "c1", "name": "python"},
        {"role": "tool", "content": "x\ny", "tool_call_id": "c1", "name": "python"},
    ],
]


def templates():
    out = []
    for path in sorted((HERE / "templates").glob("*.jinja")):
        # Compared without the newline at the end of the file, which Jinja drops as well.
        source = path.read_text()
        for number, conversation in enumerate(CONVERSATIONS):
            for tools in ([], [TOOL]):
                for generation in (False, True):
                    try:
                        text, _ = render_jinja_template(
                            [conversation], tools=tools or None, chat_template=source,
                            add_generation_prompt=generation, bos_token="<s>", eos_token="</s>",
                        )
                        text = text[0]
                    except Exception as error:
                        text = None
                    out.append({"template": path.stem, "conversation": number, "tools": bool(tools),
                                "generation": generation, "text": text})
    golden = {"tool": TOOL["function"], "conversations": CONVERSATIONS, "renders": out}
    (HERE / "templates.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")
    print(f"{len(out)} renders, {sum(r['text'] is None for r in out)} refused by their template")


main()
