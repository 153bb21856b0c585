"""Golden scores of reward models, from the formulas of transformers in plain Python (double precision).

The weights are a formula of the tensor's name and the place, so that the Rust test makes the same files. Run: python3
make_scorer.py
"""
import math, struct

def f32(x): return struct.unpack("f", struct.pack("f", x))[0]

D, LAYERS, HEADS, KV, FF, VOCAB = 16, 2, 4, 2, 24, 40
HD = D // HEADS

def tensor(name, shape):
    seed = sum(name.encode()) % 97
    n = math.prod(shape)
    base, scale = (1.0, 0.1) if "norm" in name else (0.0, 0.4)
    flat = [f32(base + scale * math.sin(0.37 * i + seed)) for i in range(n)]
    if len(shape) == 1: return flat
    return [flat[r * shape[1]:(r + 1) * shape[1]] for r in range(shape[0])]

def mat(w, x): return [sum(a * b for a, b in zip(row, x)) for row in w]
def norm(x, w, eps=1e-5):
    s = math.sqrt(sum(v * v for v in x) / len(x) + eps)
    return [v / s * g for v, g in zip(x, w)]
def rope(x, pos, theta=10000.0):
    half = HD // 2
    out = list(x)
    for h in range(len(x) // HD):
        for i in range(half):
            a = pos * theta ** (-2 * i / HD)
            p, q = x[h * HD + i], x[h * HD + half + i]
            out[h * HD + i] = p * math.cos(a) - q * math.sin(a)
            out[h * HD + half + i] = q * math.cos(a) + p * math.sin(a)
    return out

def score(tokens, bias):
    embed = tensor("model.embed_tokens.weight", (VOCAB, D))
    xs = [list(embed[t]) for t in tokens]
    for l in range(LAYERS):
        p = f"model.layers.{l}."
        t = lambda n, *s: tensor(p + n, s)
        ln = t("input_layernorm.weight", D)
        q, k, v, o = (t(f"self_attn.{n}_proj.weight", r, c) for n, r, c in
                      [("q", D, D), ("k", KV * HD, D), ("v", KV * HD, D), ("o", D, D)])
        biases = [("q", D), ("k", KV * HD), ("v", KV * HD)]
        bq, bk, bv = ((t(f"self_attn.{n}_proj.bias", r) if bias else [0.0] * r) for n, r in biases)
        add = lambda x, b: [a + c for a, c in zip(x, b)]
        hs = [norm(x, ln) for x in xs]
        qs = [rope(add(mat(q, h), bq), i) for i, h in enumerate(hs)]
        ks = [rope(add(mat(k, h), bk), i) for i, h in enumerate(hs)]
        vs = [add(mat(v, h), bv) for h in hs]
        for i in range(len(xs)):
            out = []
            for h in range(HEADS):
                g = h // (HEADS // KV)
                qh = qs[i][h * HD:(h + 1) * HD]
                key = lambda j: ks[j][g * HD:(g + 1) * HD]
                sc = [sum(a * b for a, b in zip(qh, key(j))) / math.sqrt(HD) for j in range(i + 1)]
                m = max(sc); e = [math.exp(s - m) for s in sc]; z = sum(e)
                out += [sum(e[j] / z * vs[j][g * HD + c] for j in range(i + 1)) for c in range(HD)]
            xs[i] = add(xs[i], mat(o, out))
        ln = t("post_attention_layernorm.weight", D)
        gate, up = t("mlp.gate_proj.weight", FF, D), t("mlp.up_proj.weight", FF, D)
        down = t("mlp.down_proj.weight", D, FF)
        for i in range(len(xs)):
            h = norm(xs[i], ln)
            a = [x / (1 + math.exp(-x)) * y for x, y in zip(mat(gate, h), mat(up, h))]
            xs[i] = add(xs[i], mat(down, a))
    last = norm(xs[-1], tensor("model.norm.weight", (D,)))
    return mat(tensor("score.weight", (1, D)), last)[0]

for family, bias in (("llama", False), ("qwen2", True)):
    sequences = [3, 1, 4, 1, 5, 9, 2, 6], [39], [0, 7, 7, 20, 11]
    print(family, [round(score(s, bias), 6) for s in sequences])
