"""Tiny random models of twelve families, random trees, and plain `transformers` computations to compare
with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCABULARY = 97
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", MOE),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR),
    "gemma3": ("Gemma3TextConfig", {"layer_types": SLIDING, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "layer_types": SLIDING,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "phi3": ("Phi3Config", {}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1], "layer_types": ["full_attention"] * 3}),
    "olmo2": ("Olmo2Config", {}),
    "glm4": ("Glm4Config", {}),
}


def make(family: str, folder: Path, seed: int = 3) -> Path:
    """Writes a tiny model of a family."""
    import transformers

    name, more = FAMILIES[family]
    config = getattr(transformers, name)(**(SMALL | more))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            # Fresh models have parameters that are 0 or 1: random ones show more.
            if tensor.dim() < 2:
                tensor.add_(0.1 * torch.randn_like(tensor))
            elif "expert" in key:
                tensor.normal_(0, 0.2)
    path = folder / family
    model.save_pretrained(path)
    return path


def tree(seed: int, vocabulary: int = VOCABULARY, first: int = 12) -> dict[str, Any]:
    """A random forest with items at every row but some, temperatures and masks: arguments of
    `serving.lane`."""
    random = np.random.default_rng(seed)
    lengths = [first, 4, 3, 5, 4, 6]
    parents = [0, 1, 2, 2, 1, 0]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = [0] * 6
    for i, parent in enumerate(parents):
        if parent:
            positions[i] = positions[parent - 1] + lengths[parent - 1]
    tokens = random.integers(0, vocabulary, starts[-1])
    rows = np.sort(random.integers(0, starts[-1], 30))
    targets = random.integers(0, vocabulary, 30)
    words = (vocabulary + 31) // 32
    table = random.integers(0, 1 << 32, (2, words), dtype=np.uint64)
    masks = np.where(random.random(30) < 0.4, random.integers(0, 2, 30), 0xFFFFFFFF)
    for target, mask in zip(targets, masks, strict=True):
        if mask < 2:
            table[mask, target // 32] |= np.uint64(1 << int(target % 32))
    return {
        "tokens": tokens,
        "segments": list(zip(starts[:-1], lengths, positions, parents, strict=True)),
        "rows": rows,
        "targets": targets,
        "temperatures": random.uniform(0.5, 1.5, 30).astype(np.float32),
        "masks": masks,
        "table": table,
    }


def plain(model: Any, world: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, entropies and hidden states of the items, row by row: no tree, no chunks, no batch."""
    segments = world["segments"]
    logprobs, entropies, states = [], [], []
    for i, row in enumerate(world["rows"]):
        own = next(k for k, s in enumerate(segments) if s[0] <= row < s[0] + s[1])
        path = list(range(segments[own][0], row + 1))
        at = segments[own][3]
        while at:
            path = list(range(segments[at - 1][0], segments[at - 1][0] + segments[at - 1][1])) + path
            at = segments[at - 1][3]
        ids = torch.from_numpy(world["tokens"][path])[None]
        out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
        logits = out.logits[0, -1].float() / float(world["temperatures"][i])
        mask = int(world["masks"][i])
        if mask != 0xFFFFFFFF:
            bits = [(int(world["table"][mask, t // 32]) >> (t % 32)) & 1 for t in range(logits.shape[0])]
            logits = logits.masked_fill(torch.tensor(bits) == 0, float("-inf"))
        scores = torch.log_softmax(logits, dim=-1)
        logprobs.append(scores[int(world["targets"][i])])
        kept = scores[scores > -1e30]
        entropies.append(-(kept.exp() * kept).sum())
        states.append(out.hidden_states[-1][0, -1])
    return torch.stack(logprobs), torch.stack(entropies), torch.stack(states)
