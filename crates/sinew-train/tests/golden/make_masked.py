"""Golden vector of GRPO on tokens that were drawn from some of the vocabulary alone.

Run: python make_masked.py > masked.json              (torch 2.15, transformers 5.23)

The tiny llama of sinew-model in f64: PPO's clip, KL (k3) to a reference, an entropy bonus and the reverse divergence
to a teacher's top tokens, each of the softmax of `logits / temperature` over the tokens that were allowed, by autograd.
"""

import json
import math
import pathlib

import torch
from transformers import AutoModelForCausalLM

LLAMA = pathlib.Path(__file__).parents[3] / "sinew-model" / "tests" / "golden" / "llama"
CLIP, KL, ENTROPY, TEACHER, WEIGHT, VOCAB = 0.2, 0.05, 0.01, 0.3, 1 / 32, 97
# tokens, first trained position, advantage; the first two share a start, whose masks differ once
ROWS = [
    ([5, 9, 14, 20, 27, 35, 44, 54, 65, 77], 4, 1.0),
    ([5, 9, 14, 20, 27, 35, 47, 57, 69, 82, 96, 8], 4, -0.6),
    ([5, 9, 15, 22, 30, 39, 49, 60, 72], 3, 0.4),
    ([5, 9, 15, 22, 31, 41, 52], 3, -0.8),
]
# Number of allowed tokens, by turns; 0: no mask.
COUNTS = [2, 0, 31, 33, 3, 96, 32, 50]
TOP = [0.5, 0.3]


def allowed(row, t, token):
    """The token and others, spread over the vocabulary."""
    count = COUNTS[(t + (row if t > 4 else 0)) % len(COUNTS)]
    if count == 0:
        return None
    order = [token] + [v for i in range(VOCAB) if (v := (token + 1 + 37 * i) % VOCAB) != token]
    return sorted(order[:count])


def offset(row, t, size):
    return size * math.sin(1.3 * row + 0.7 * t)


model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float64)
loss, rows = 0.0, []
for r, (tokens, first, advantage) in enumerate(ROWS):
    n = len(tokens)
    logits = model(torch.tensor([tokens])).logits[0]
    out = {"tokens": tokens, "first": first, "advantage": advantage, "temperatures": [1.0] * n,
           "behaviour": [0.0] * n, "reference": [0.0] * n, "allowed": [None] * n, "teacher": [[]] * n}
    for t in range(first, n):
        T = [0.7, 1.2, 1.0][(t + t // 6) % 3]
        ids = allowed(r, t, tokens[t])
        kept = torch.tensor(ids if ids is not None else list(range(VOCAB)))
        logp = (logits[t - 1] / T)[kept].log_softmax(-1)
        own = logp[(kept == tokens[t]).nonzero().item()]
        behaviour = round(own.item() + offset(r, t, 0.3), 6)
        reference = round(own.item() + offset(r, t + 1, 0.2), 6)
        ratio = (own - behaviour).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        policy = torch.maximum(-ratio * advantage, -clipped * advantage)
        d = own - reference
        kl = (-d).exp() - 1 + d
        entropy = -(logp.exp() * logp).sum()
        # The teacher's two top tokens are the first and the last allowed one; all others are one more outcome.
        top = [int(kept[0]), int(kept[-1])]
        p = torch.tensor(TOP, dtype=torch.float64)
        q = logp[[0, -1]]
        rest = 1 - q.exp().sum()
        # Two allowed tokens leave nothing for others: their share is constant, as in `teacher_divergence`.
        q_rest = rest if rest.item() > 1e-6 else torch.tensor(1e-6, dtype=torch.float64)
        p_rest = 1 - p.sum()
        teacher = (q.exp() * (q - p.log())).sum() + q_rest * (q_rest / p_rest).log()
        loss = loss + WEIGHT * (policy + KL * kl - ENTROPY * entropy + TEACHER * teacher)
        out["temperatures"][t], out["behaviour"][t], out["reference"][t] = T, behaviour, reference
        out["allowed"][t] = ids
        out["teacher"][t] = list(zip(top, TOP))
    rows.append(out)
loss.backward()
grads = {name: p.grad for name, p in model.named_parameters()}
golden = {
    "clip": CLIP, "kl": KL, "entropy": ENTROPY, "teacher": TEACHER, "weight": WEIGHT, "rows": rows,
    "loss": loss.item(), "norms": {name: float(f"{g.norm().item():.7g}") for name, g in grads.items()},
    "final_norm": [float(f"{g:.6g}") for g in grads["model.norm.weight"].tolist()],
}
print(json.dumps(golden, separators=(",", ":")))
