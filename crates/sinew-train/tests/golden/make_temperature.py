"""Golden vector of GRPO on tokens that were sampled at temperatures other than 1.

Run: python make_temperature.py > temperature.json              (torch 2.15, transformers 5.23)

The tiny llama of sinew-model in f64: PPO's clip, KL (k3) to a reference and an entropy bonus, each of
`softmax(logits / temperature)` with every token's own temperature, differentiated by autograd.
"""

import json
import math
import pathlib

import torch
from transformers import AutoModelForCausalLM

LLAMA = pathlib.Path(__file__).parents[3] / "sinew-model" / "tests" / "golden" / "llama"
CLIP, KL, ENTROPY, WEIGHT = 0.2, 0.05, 0.01, 1 / 32
# tokens, first trained position, advantage
ROWS = [
    ([5, 9, 14, 20, 27, 35, 44, 54, 65, 77], 4, 1.0),
    ([5, 9, 14, 20, 27, 36, 46, 57, 69, 82, 96, 8], 4, -0.6),
    ([5, 9, 15, 22, 30, 39, 49, 60, 72], 3, 0.4),
    ([5, 9, 15, 22, 31, 41, 52], 3, -0.8),
]


def temperature(case, row, t):
    """All at 1.2; or rows at different ones, and turns of a row as well."""
    return 1.2 if case == "grpo at 1.2" else [0.7, 1.2, 1.0, 1.2][(row + t // 6) % 4]


def offset(row, t, size):
    return size * math.sin(1.3 * row + 0.7 * t)


def run(case):
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float64)
    loss, rows = 0.0, []
    for r, (tokens, first, advantage) in enumerate(ROWS):
        n = len(tokens)
        logits = model(torch.tensor([tokens])).logits[0]
        out = {"tokens": tokens, "first": first, "advantage": advantage, "temperatures": [1.0] * n,
               "behaviour": [0.0] * n, "reference": [0.0] * n}
        for t in range(first, n):
            T = temperature(case, r, t)
            logp = (logits[t - 1] / T).log_softmax(-1)
            own = logp[tokens[t]]
            behaviour = round(own.item() + offset(r, t, 0.3), 6)
            reference = round(own.item() + offset(r, t + 1, 0.2), 6)
            ratio = (own - behaviour).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            policy = torch.maximum(-ratio * advantage, -clipped * advantage)
            d = own - reference
            kl = (-d).exp() - 1 + d
            entropy = -(logp.exp() * logp).sum()
            loss = loss + WEIGHT * (policy + KL * kl - ENTROPY * entropy)
            out["temperatures"][t], out["behaviour"][t], out["reference"][t] = T, behaviour, reference
        rows.append(out)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    norms = {name: float(f"{g.norm().item():.7g}") for name, g in grads.items()}
    final = [float(f"{g:.6g}") for g in grads["model.norm.weight"].tolist()]
    return {"name": case, "rows": rows, "loss": loss.item(), "norms": norms, "final_norm": final}


cases = [run(case) for case in ("grpo at 1.2", "mixed temperatures")]
golden = {"clip": CLIP, "kl": KL, "entropy": ENTROPY, "weight": WEIGHT, "cases": cases}
print(json.dumps(golden, separators=(",", ":")))
