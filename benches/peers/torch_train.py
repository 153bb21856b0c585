"""Tokens a second of forward, backward and AdamW. Arguments: dtype, eager|compile, sequences, length."""
import sys

import torch
import torch.nn.functional as F
from common import DTYPES, SHAPE, Decoder, report, timed, torch_version

dtype, mode, rows, length = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
model = Decoder().to(DTYPES[dtype])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
ids = torch.randint(0, SHAPE["vocab"], (rows, length + 1))


def loss_of(x, y):
    return F.cross_entropy(model(x).view(-1, SHAPE["vocab"]).float(), y.reshape(-1))


loss = torch.compile(loss_of) if mode == "compile" else loss_of


def step():
    loss(ids[:, :-1], ids[:, 1:]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


report(torch_version(), [rows * length / s for s in timed(step, 4, warm=2 if mode == "compile" else 1)])
