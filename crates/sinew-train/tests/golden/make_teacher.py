"""Golden vector of the teacher term: a bigram table drawn towards another one.

Run with any Python that has torch: `python make_teacher.py > teacher.json`. The divergence is
taken between whole softmax distributions whose tail is summed up, and differentiated by autograd.
"""

import json

import torch

torch.set_default_dtype(torch.float64)
V = 8
TOP_K, COEFFICIENT = 3, 0.5
# tokens, first trained position, weight
ROWS = [
    ([1, 2, 3, 4, 5], 3, 0.125),
    ([1, 2, 6, 6, 7], 2, 0.125),
    ([1, 2, 3, 4, 6, 1], 3, 0.125),
    ([1, 2, 6, 5], 2, 0.125),
]


def table(f):
    return torch.tensor([f(i) for i in range(V * V)], dtype=torch.float32).double().reshape(V, V)


def coarse(p, top):
    head = p[top]
    return torch.cat([head, (1 - head.sum())[None]])


def loss_of(divergence):
    policy = table(lambda i: torch.tensor(i * 0.7).sin()).requires_grad_()
    teacher = table(lambda i: 2 * torch.tensor(i * 0.3).cos())
    loss = 0.0
    for tokens, first, weight in ROWS:
        for t in range(first, len(tokens)):
            p = teacher[tokens[t - 1]].softmax(-1)
            q = policy[tokens[t - 1]].softmax(-1)
            top = p.topk(TOP_K).indices
            p, q = coarse(p, top), coarse(q, top)
            a, b = (q, p) if divergence == "reverse" else (p, q)
            loss = loss + weight * COEFFICIENT * (a * (a / b).log()).sum()
    loss.backward()
    gradient = [float(f"{g:.7g}") for g in policy.grad.flatten().tolist()]
    return {"divergence": divergence, "loss": loss.item(), "gradient": gradient}


cases = [loss_of(d) for d in ("reverse", "forward")]
print(json.dumps({"top_k": TOP_K, "coefficient": COEFFICIENT, "cases": cases}, separators=(",", ":")))
