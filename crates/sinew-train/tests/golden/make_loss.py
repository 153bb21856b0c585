"""Golden vectors for the losses: values by the published formulas, gradients by autograd (f64).

Run: python make_loss.py > loss.json      (needs torch; the tests do not)

The formulas are written down here once more, vectorised and with torch.where / torch.clamp, so
that the Rust code (token by token, derivatives by hand) and this file can only agree by both
being right. Row 0 mixes trained and untrained tokens; row 1 is short; row 2 holds large gaps.
"""
import json
import torch

torch.manual_seed(7)
BOUND = 20.0
NAN = float("nan")


def f32(x):
    return torch.tensor(x, dtype=torch.float32).to(torch.float64)


def make_rows():
    rows = []
    shapes = [
        ([0, 1, 1, 0, 1, 1, 0, 1, 1, 1], 0.30),
        ([0, 1, 1], 0.15),
        ([0, 1, 1, 1, 1, 0, 1, 1], 1.2),
    ]
    for n, (mask, spread) in enumerate(shapes):
        k = len(mask)
        m = torch.tensor(mask, dtype=torch.bool)
        b = -torch.rand(k) * 2.5 - 0.05
        prox = b + torch.randn(k) * spread
        pi = prox + torch.randn(k) * spread
        ref = pi + torch.randn(k) * spread
        adv = torch.randn(k) if n != 1 else torch.full((k,), -0.75)
        weights = torch.where(m, torch.rand(k) * 0.2 + 0.02, torch.zeros(k))
        ent = torch.rand(k) * 3
        cols = dict(advantages=adv, behaviour=b, prox=prox, reference=ref, logprobs=pi, entropies=ent)
        cols = {name: [round(v, 4) for v in c.tolist()] for name, c in cols.items()}
        row = dict(weights=[round(v, 4) for v in weights.tolist()], mask=mask, **cols)
        rows.append(row)
    return rows


def log_ratio_exp(x):
    return torch.exp(torch.clamp(x, -BOUND, BOUND))


def loss_of(spec, row):
    idx = torch.tensor([i for i, m in enumerate(row["mask"]) if m])
    col = {k: f32(v)[idx] for k, v in row.items() if k != "mask"}
    pi = col["logprobs"].clone().requires_grad_(True)
    ent = col["entropies"].clone().requires_grad_(True)
    c = spec["correction"]
    gap = col["prox"] - col["behaviour"]
    keep = torch.ones_like(gap, dtype=torch.bool)
    factor = torch.ones_like(gap)
    old = col["behaviour"] if c["type"] == "none" else col["prox"]
    w = log_ratio_exp(gap)
    if c["type"] == "truncate":
        factor = torch.clamp(w, c["low"], c["high"])
    elif c["type"] == "mask":
        factor = torch.where((w >= c["low"]) & (w <= c["high"]), w, torch.zeros_like(w))
    elif c["type"] == "sequence_mask":
        product = log_ratio_exp(gap.sum())
        factor = torch.where(product <= c["high"], product, torch.zeros_like(product)).expand_as(gap)
    elif c["type"] == "reject":
        factor = w
        value = {"ratio": w, "kl_k1": -gap, "kl_k2": gap**2 / 2, "kl_k3": w - 1 - gap}[c["metric"]]
        if c["level"] == "sequence":
            mean = torch.exp(gap.mean()) if c["metric"] == "ratio" else value.mean()
            value = mean.expand_as(gap)
        keep = value <= c["upper"]

    s = spec["surrogate"]
    A, n = col["advantages"], keep.sum().clamp(min=1)
    r = log_ratio_exp(pi - old)
    if s["type"] == "sequence_clip":
        r = log_ratio_exp(torch.where(keep, pi - old, torch.zeros_like(pi)).sum() / n).expand_as(pi)
    if s["type"] in ("reinforce", "cross_entropy"):
        L = -A * pi
    elif s["type"] in ("clip", "sequence_clip"):
        L = torch.maximum(-r * A, -torch.clamp(r, 1 - s["low"], 1 + s["high"]) * A)
        if s.get("dual") is not None:
            L = torch.where(A < 0, torch.minimum(L, -s["dual"] * A), L)
    elif s["type"] == "cispo":
        L = -torch.clamp(r, 1 - s["low"], 1 + s["high"]).detach() * A * pi
    elif s["type"] == "soft":
        tau = torch.where(A > 0, torch.tensor(s["tau_pos"]).double(), torch.tensor(s["tau_neg"]).double())
        L = -(4 / tau) * torch.sigmoid(tau * (r - 1)) * A
    elif s["type"] == "trust_region":
        q = (torch.exp(pi) - torch.exp(old)).detach()
        left = torch.where(A > 0, q > s["limit"], q < -s["limit"])
        L = torch.where(left, torch.zeros_like(r), -A * r) + s["penalty"] * (pi - old) ** 2
    L = L * factor.detach()

    if spec["kl"] is not None:
        d = pi - col["reference"]
        k = {"k1": d, "k2": d**2 / 2, "k3": log_ratio_exp(-d) - 1 + d}[spec["kl"]["estimator"]]
        L = L + spec["kl"]["coefficient"] * k
    L = L - spec["entropy"] * ent
    loss = (col["weights"] * torch.where(keep, L, torch.zeros_like(L))).sum()
    loss.backward()

    def spread(g):
        out = [0.0] * len(row["mask"])
        for i, v in zip(idx.tolist(), g.tolist()):
            out[i] = float(f"{v:.7g}")
        return out

    zeros = torch.zeros_like(pi)
    grad = lambda x: x.grad if x.grad is not None else zeros
    return dict(loss=float(f"{loss.item():.9g}"), d_logprob=spread(grad(pi)), d_entropy_sum=float(f"{grad(ent).sum().item():.7g}"))


SURROGATES = [
    dict(type="reinforce"),
    dict(type="clip", low=0.2, high=0.2, dual=None),
    dict(type="clip", low=0.2, high=0.28, dual=3.0),
    dict(type="clip", low=0.25, high=0.25, dual=1.3),
    dict(type="sequence_clip", low=0.05, high=0.1),
    dict(type="sequence_clip", low=0.5, high=0.5),
    dict(type="cispo", low=0.5, high=0.28),
    dict(type="soft", tau_pos=1.0, tau_neg=1.05),
    dict(type="trust_region", limit=0.2, penalty=1e-3),
    dict(type="trust_region", limit=0.02, penalty=0.1),
    dict(type="cross_entropy"),
]
CORRECTIONS = [dict(type="none"), dict(type="truncate", low=0.0, high=1.3), dict(type="mask", low=0.5, high=1.5)]
for metric, upper in [("ratio", 1.3), ("kl_k1", 0.2), ("kl_k2", 0.03), ("kl_k3", 0.03)]:
    for level in ("token", "sequence"):
        CORRECTIONS.append(dict(type="reject", metric=metric, level=level, upper=upper))
CORRECTIONS += [dict(type="sequence_mask", high=h) for h in (1.1, 1000.0)]
KLS = [None] + [dict(estimator=e, coefficient=0.05) for e in ("k1", "k2", "k3")]


def value_golden():
    v = f32([0.1, 0.9, -0.4, 1.5, 0.0]).requires_grad_(True)
    old, ret = f32([0.0, 0.2, -0.3, 1.6, 0.5]), f32([0.3, 1.0, -1.0, 1.2, -0.2])
    w = f32([0.1, 0.2, 0.3, 0.25, 0.15])
    clipped = old + torch.clamp(v - old, -0.2, 0.2)
    loss = (w * 0.5 * torch.maximum((v - ret) ** 2, (clipped - ret) ** 2)).sum()
    loss.backward()
    return dict(values=v.tolist(), old=old.tolist(), returns=ret.tolist(), weights=w.tolist(), clip=0.2,
                loss=loss.item(), d_value=v.grad.tolist())


def main():
    rows, cases = make_rows(), []
    for s in SURROGATES:
        for c in CORRECTIONS:
            if s["type"] == "cross_entropy" and c["type"] != "none":
                continue
            # A KL term is added after surrogate and correction, and a correction multiplies any surrogate:
            # the later forms need no case with each, and the file stays small.
            few = ("none",) if s.get("limit") == 0.02 else ("none", "truncate")
            if s["type"] == "trust_region" and c["type"] not in few:
                continue
            alone = s["type"] == "trust_region" or c["type"] == "sequence_mask"
            for n, kl in enumerate(KLS[:1] if alone else KLS):
                spec = dict(surrogate=s, correction=c, kl=kl, entropy=0.01 * (n % 2), value=None)
                cases.append(dict(spec=spec, rows=[loss_of(spec, r) for r in rows]))
    lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)
    print('{"rows":%s,\n"value":%s,\n"cases":[\n%s\n]}' % (json.dumps(rows), json.dumps(value_golden()), lines))


main()
