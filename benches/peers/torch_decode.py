"""Sampled tokens a second with a cache of keys and values. Arguments: dtype, batch."""
import sys

import torch
from common import DTYPES, SHAPE, Decoder, report, timed, torch_version

PROMPT, STEPS = 64, 24
dtype, batch = DTYPES[sys.argv[1]], int(sys.argv[2])
torch.manual_seed(0)
torch.set_grad_enabled(False)
model = Decoder().to(dtype)
room = (batch, SHAPE["kv_heads"], PROMPT + STEPS + 8, SHAPE["head"])
caches = [(torch.zeros(room, dtype=dtype), torch.zeros(room, dtype=dtype)) for _ in range(SHAPE["layers"])]
logits = model(torch.randint(0, SHAPE["vocab"], (batch, PROMPT)), caches, 0)
past = PROMPT


def step():
    global logits, past
    token = torch.multinomial(logits[:, -1].float().softmax(-1), 1)
    logits = model(token, caches, past)
    past += 1


report(torch_version(), [batch / s for s in timed(step, STEPS, warm=3)])
