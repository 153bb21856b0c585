"""Sampled tokens a second of transformers' generate, without the prompt. Arguments: dtype, batch."""
import sys
import time

import torch
import transformers
from common import DTYPES, SHAPE, report

PROMPT, SHORT, LONG = 64, 4, 20
dtype, batch = DTYPES[sys.argv[1]], int(sys.argv[2])
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=SHAPE["vocab"],
    hidden_size=SHAPE["width"],
    intermediate_size=SHAPE["ffn"],
    num_hidden_layers=SHAPE["layers"],
    num_attention_heads=SHAPE["heads"],
    num_key_value_heads=SHAPE["kv_heads"],
    head_dim=SHAPE["head"],
    rms_norm_eps=SHAPE["eps"],
    tie_word_embeddings=True,
)
model = transformers.LlamaForCausalLM(config).to(dtype).eval()
ids = torch.randint(0, SHAPE["vocab"], (batch, PROMPT))


def seconds(count):
    begin = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0, max_new_tokens=count, min_new_tokens=count)
    assert out.shape[1] == PROMPT + count
    return time.perf_counter() - begin


seconds(2)
values = []
for _ in range(3):
    short, long = seconds(SHORT), seconds(LONG)
    values.append(batch * (LONG - SHORT) / max(long - short, 1e-9))
report("transformers " + transformers.__version__, values)
