"""Shared by the peers: the decoder in PyTorch, written for speed with the library's own fused parts, and
the one line of output."""
import json
import os
import resource
import sys
import time

import torch
import torch.nn.functional as F

THREADS = int(os.environ.get("PEER_THREADS", "2"))
torch.set_num_threads(THREADS)
SHAPE = dict(vocab=49152, width=576, layers=30, heads=9, kv_heads=3, head=64, ffn=1536, eps=1e-5, base=1e5)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def report(version, values):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"version": version, "values": values, "peak_bytes": peak}))
    sys.stdout.flush()


def torch_version():
    return "PyTorch " + torch.__version__.split("+")[0]


def timed(body, steps, warm=1):
    """Seconds of each of `steps` calls after `warm` more."""
    out = []
    for i in range(warm + steps):
        begin = time.perf_counter()
        body()
        if i >= warm:
            out.append(time.perf_counter() - begin)
    return out


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Layer(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s
        q, kv = s["heads"] * s["head"], s["kv_heads"] * s["head"]
        linear = lambda i, o: torch.nn.Linear(i, o, bias=False)
        self.qkv = linear(s["width"], q + 2 * kv)
        self.out = linear(q, s["width"])
        self.gate_up = linear(s["width"], 2 * s["ffn"])
        self.down = linear(s["ffn"], s["width"])
        self.norm1 = torch.nn.RMSNorm(s["width"], s["eps"])
        self.norm2 = torch.nn.RMSNorm(s["width"], s["eps"])

    def forward(self, x, cos, sin, cache, past):
        s, (b, t, _) = self.s, x.shape
        q, kv = s["heads"] * s["head"], s["kv_heads"] * s["head"]
        parts = self.qkv(self.norm1(x)).split((q, kv, kv), -1)
        queries, keys, values = (p.view(b, t, -1, s["head"]).transpose(1, 2) for p in parts)
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        if cache is not None:
            cache[0][:, :, past : past + t] = keys
            cache[1][:, :, past : past + t] = values
            keys, values = (c[:, :, : past + t] for c in cache)
        y = F.scaled_dot_product_attention(queries, keys, values, is_causal=t > 1, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, q))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(torch.nn.Module):
    def __init__(self, s=SHAPE, context=1024):
        super().__init__()
        self.embed = torch.nn.Embedding(s["vocab"], s["width"])
        torch.nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = torch.nn.ModuleList(Layer(s) for _ in range(s["layers"]))
        self.norm = torch.nn.RMSNorm(s["width"], s["eps"])
        inverse = s["base"] ** (-torch.arange(0, s["head"], 2) / s["head"])
        angles = torch.arange(context)[:, None] * inverse
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids, caches=None, past=0):
        x, t = self.embed(ids), ids.shape[1]
        cos, sin = (v[past : past + t].to(x.dtype) for v in (self.cos, self.sin))
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, caches and caches[i], past)
        if caches is not None:
            x = x[:, -1:]
        return F.linear(self.norm(x), self.embed.weight)
