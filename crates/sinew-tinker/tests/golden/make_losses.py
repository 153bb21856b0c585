"""Golden vectors of `forward_backward` for every served loss: log-probabilities, loss and gradients in f64.

Run: python make_losses.py > losses.json      (torch 2.15, transformers 5.23)

The tiny llama of sinew-model. The losses are those of the documentation of the protocol, over whole columns and with
`detach`; prompts have advantage 0 and log-probability 0, as clients send them.
"""

import json
import math
import pathlib

import torch
from transformers import AutoModelForCausalLM

LLAMA = pathlib.Path(__file__).parents[3] / "sinew-model" / "tests" / "golden" / "llama"
# Tokens of the whole sequence and the length of its prompt; the first two share a start.
SEQUENCES = [
    ([5, 9, 14, 20, 27, 35, 44, 54, 65, 77], 4, 1.0),
    ([5, 9, 14, 20, 27, 35, 47, 57, 69, 82, 96, 8], 4, -0.6),
    ([7, 30, 2, 61, 61, 13, 90], 2, 0.4),
]
K = 3


def wave(row, t, size):
    return size * math.sin(1.3 * row + 0.7 * t + 0.2)


def tensor(values, shape=None, kind="f32"):
    return {"shape": shape or [len(values)], "values": {kind: values}}


model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float64)


def logprobs(datum):
    """Log-probabilities of a datum's targets, in their shape."""
    targets = datum["inputs"]["target_tokens"]
    rows = model(torch.tensor([datum["tokens"]])).logits[0].log_softmax(-1)
    ids = torch.tensor(targets["values"]["i64"]).reshape(len(datum["tokens"]), -1)
    return rows.gather(1, ids).reshape(targets["shape"])


def supervised():
    """Next tokens with weights, other tokens than the next ones, and several in a place."""
    data = []
    for r, (tokens, prompt, _) in enumerate(SEQUENCES):
        n = len(tokens) - 1
        targets = tokens[1:] if r != 1 else [(3 * t + 11 * i) % 97 for i, t in enumerate(tokens[1:])]
        weights = [0.0 if i + 1 < prompt else round(0.6 + wave(r, i, 0.4), 4) for i in range(n)]
        inputs = {"target_tokens": tensor(targets, kind="i64"), "weights": tensor(weights)}
        data.append({"tokens": tokens[:-1], "inputs": inputs})
    tokens, prompt, _ = SEQUENCES[1]
    n = len(tokens) - 1
    targets = [(tokens[i + 1] + 31 * k) % 97 for i in range(n) for k in range(K)]
    # Padding as clients send it: token 0 with weight 0.
    weights = [0.0 if i + 1 < prompt else [0.6, 0.3, 0.1][k] for i in range(n) for k in range(K)]
    targets = [t if w != 0.0 else 0 for t, w in zip(targets, weights)]
    inputs = {"target_tokens": tensor(targets, [n, K], "i64"), "weights": tensor(weights, [n, K])}
    return data + [{"tokens": tokens[:-1], "inputs": inputs}]


def sampled(more):
    """Sequences with a sampler's log-probabilities near the model's own, and inputs that only some losses have."""
    data = []
    for r, (tokens, prompt, advantage) in enumerate(SEQUENCES):
        n = len(tokens) - 1
        datum = {"tokens": tokens[:-1], "inputs": {"target_tokens": tensor(tokens[1:], kind="i64")}}
        own = logprobs(datum).detach()
        acts = [i + 1 >= prompt for i in range(n)]
        q = [round(own[i].item() + wave(r, i, 0.35), 5) if acts[i] else 0.0 for i in range(n)]
        a = [round(advantage + wave(r, i, 0.1), 4) if acts[i] else 0.0 for i in range(n)]
        datum["inputs"] |= {"logprobs": tensor(q), "advantages": tensor(a)}
        if "mask" in more:
            datum["inputs"]["sequence_ratio_mask"] = tensor([1.0 if act else 0.0 for act in acts])
        if "bounds" in more:
            lows = [round(0.85 + wave(r, i, 0.1), 4) for i in range(n)]
            highs = [round(1.15 + wave(r, i + 3, 0.1), 4) for i in range(n)]
            datum["inputs"] |= {"clip_low_threshold": tensor(lows), "clip_high_threshold": tensor(highs)}
        data.append(datum)
    return data


def column(datum, name):
    return torch.tensor(datum["inputs"][name]["values"]["f32"], dtype=torch.float32).double()


def loss_of(name, config, datum, lp):
    if name == "cross_entropy":
        return -(lp * column(datum, "weights").reshape(lp.shape)).sum()
    q, a = column(datum, "logprobs"), column(datum, "advantages")
    if name == "importance_sampling":
        return -(torch.exp(lp - q) * a).sum()
    if name == "dro":
        return -(lp * a - 0.5 * config["beta"] * (lp - q) ** 2).sum()
    ratio = torch.exp(lp - q)
    if name == "gspo":
        marked = column(datum, "sequence_ratio_mask") != 0
        ratio = torch.exp((lp.detach() - q)[marked].mean() + lp - lp.detach())
    defaults = {"cispo": (0.0, 4.0)}.get(name, (0.8, 1.2))
    bounds = []
    for key, default in zip(("clip_low_threshold", "clip_high_threshold"), defaults):
        by_position = key in datum["inputs"]
        bounds.append(column(datum, key) if by_position else torch.full_like(lp, config.get(key, default)))
    clipped = torch.minimum(torch.maximum(ratio, bounds[0]), bounds[1])
    if name == "cispo":
        return -(clipped.detach() * lp * a).sum()
    return -torch.minimum(ratio * a, clipped * a).sum()


def short(values, digits):
    return [float(f"{v:.{digits}g}") for v in values]


def case(name, config, data):
    model.zero_grad()
    found = [logprobs(datum) for datum in data]
    loss = sum(loss_of(name, config, datum, lp) for datum, lp in zip(data, found))
    loss.backward()
    grads = {key: p.grad.flatten() for key, p in model.named_parameters()}
    # Every n-th value of each tensor, so that there are about 16 of each.
    some = {key: g[:: max(1, g.numel() // 16)] for key, g in grads.items()}
    return {
        "loss": {"name": name, "config": config},
        "data": data,
        "logprobs": [short(lp.flatten().tolist(), 9) for lp in found],
        "loss_sum": float(f"{loss.item():.10g}"),
        "norms": {key: float(f"{g.norm().item():.8g}") for key, g in grads.items()},
        "some": {key: short(values.tolist(), 7) for key, values in some.items()},
    }


tight = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}
cases = [
    case("cross_entropy", {}, supervised()),
    case("importance_sampling", {}, sampled("")),
    case("ppo", {}, sampled("")),
    case("ppo", tight, sampled("")),
    case("ppo", {}, sampled("bounds")),
    case("cispo", {}, sampled("")),
    case("cispo", tight, sampled("")),
    case("dro", {"beta": 0.05}, sampled("")),
    case("gspo", tight, sampled("mask")),
    case("gspo", {}, sampled("mask bounds")),
]
print("[\n%s\n]" % ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases))
