"""Golden vectors of the surrogates without a bound, of DRO and of GSPO-token: gradients by autograd (f64).

Run: python make_surrogates.py > surrogates.json      (needs torch; the tests do not)

The formulas are those of the papers in their `detach` form, over whole columns:
GSPO-token is section 4.3 of Zheng et al. 2025 (arXiv 2507.18071), DRO is Richemond et al. 2024 (arXiv 2405.19107) as
Kimi Team 2025 (arXiv 2501.12599) uses it. Bounds by token and marks for the sequence's ratio are columns of their own.
"""
import json
import torch

torch.manual_seed(11)


def f64(column):
    return torch.tensor(column, dtype=torch.float32).double()


def make_row(n, spread, off):
    pi = -torch.rand(n) * 3 - 0.05
    columns = {
        "weights": torch.where(torch.arange(n) % 5 == off, torch.zeros(n), torch.rand(n) + 0.1),
        "advantages": torch.randn(n),
        "behaviour": pi + torch.randn(n) * spread,
        "logprobs": pi,
        "clip_low": 0.5 + torch.rand(n) * 0.45,
        "clip_high": 1.02 + torch.rand(n) * 0.5,
    }
    row = {name: [round(v, 4) for v in column.tolist()] for name, column in columns.items()}
    row["in_ratio"] = [i % 3 != 1 for i in range(n)]
    return row


def terms(spec, row, idx, by_token, marked):
    a, old, pi = (f64(row[k])[idx] for k in ("advantages", "behaviour", "logprobs"))
    pi.requires_grad_(True)
    kind = spec["type"]
    if by_token:
        low, high = f64(row["clip_low"])[idx], f64(row["clip_high"])[idx]
    else:
        low, high = 1 - spec.get("low", 0.0), 1 + spec.get("high", 0.0)
    if kind == "importance":
        loss = -torch.exp(pi - old) * a
    elif kind == "dro":
        loss = -(pi * a - 0.5 * spec["beta"] * (pi - old) ** 2)
    elif kind == "cispo":
        loss = -torch.clamp(torch.exp(pi - old), low, high).detach() * pi * a
    elif kind == "clip":
        ratio = torch.exp(pi - old)
        loss = -torch.minimum(ratio * a, torch.clamp(ratio, low, high) * a)
    else:
        mask = torch.tensor(row["in_ratio"])[idx] if marked else torch.ones_like(a, dtype=torch.bool)
        mean = (pi - old)[mask].mean()
        ratio = torch.exp(mean).expand_as(pi)
        if kind == "sequence_token_clip":
            ratio = torch.exp(mean.detach() + pi - pi.detach())
        loss = -torch.minimum(ratio * a, torch.clamp(ratio, low, high) * a)
    return pi, loss


def case(spec, rows, by_token=False, marked=False):
    out = []
    for row in rows:
        weights = f64(row["weights"])
        idx = weights.nonzero()[:, 0]
        pi, loss = terms(spec, row, idx, by_token, marked)
        total = (weights[idx] * loss).sum()
        total.backward()
        slopes = torch.zeros_like(weights).index_put((idx,), pi.grad)
        out.append({"loss": float(f"{total.item():.10g}"), "d_logprob": [float(f"{v:.8g}") for v in slopes.tolist()]})
    return {"surrogate": spec, "by_token": by_token, "marked": marked, "rows": out}


rows = [make_row(9, 0.2, 0), make_row(6, 0.6, 1), make_row(14, 0.05, 2)]
token_clip = {"type": "sequence_token_clip", "low": 0.05, "high": 0.08}
cases = [case({"type": "importance"}, rows), case({"type": "dro", "beta": 0.05}, rows), case({"type": "dro", "beta": 0.7}, rows)]
cases += [case(token_clip, rows, by_token, marked) for by_token in (False, True) for marked in (False, True)]
sequence = {"type": "sequence_clip", "low": 0.05, "high": 0.08}
cases += [case(sequence, rows, by_token, True) for by_token in (False, True)]
cases += [case({"type": kind, "low": 0.2, "high": 0.2}, rows, True) for kind in ("clip", "cispo")]
lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)
print('{"rows":%s,\n"cases":[\n%s\n]}' % (json.dumps(rows, separators=(",", ":")), lines))
