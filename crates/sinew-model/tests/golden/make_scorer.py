"""Golden scores of reward models, by `transformers` in double precision.

Run: python make_scorer.py     (torch 2.15, transformers 5.23)

The weights are a formula of the tensor's name and the place, so that the test in Rust makes the same files. The heads
of qwen3 are wider than `hidden_size / num_attention_heads`, as in its released models.
"""
import math

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

SEQUENCES = [3, 1, 4, 1, 5, 9, 2, 6], [39], [0, 7, 7, 20, 11]
SIZES = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=24, rope_theta=10000.0, rms_norm_eps=1e-5, max_position_embeddings=64,
             tie_word_embeddings=False, num_labels=1)  # fmt: skip


def values(name, shape):
    seed = sum(name.encode()) % 97
    base, scale = (1.0, 0.1) if "norm" in name else (0.0, 0.4)
    flat = [base + scale * math.sin(0.37 * i + seed) for i in range(math.prod(shape))]
    return torch.tensor(flat, dtype=torch.float64).float().double().reshape(shape)


for family, own in ("llama", {}), ("qwen2", {}), ("qwen3", {"head_dim": 8}):
    config = AutoConfig.for_model(family, **SIZES, **own)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").double().eval()
    for name, parameter in model.named_parameters():
        parameter.data = values(name, parameter.shape)
    with torch.no_grad():
        print(family, [round(model(torch.tensor([s])).logits.item(), 6) for s in SEQUENCES])
