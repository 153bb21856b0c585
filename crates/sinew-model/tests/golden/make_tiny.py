"""Makes the tiny models and their golden logits and gradients (PyTorch + transformers, f32, CPU).

Run: python make_tiny.py     (torch 2.15, transformers 5.23, safetensors 0.8, gguf 0.19)

Each folder is a random model as `transformers` saves it, in another storage: llama F32 in one file,
qwen2 BF16 in two shards, qwen3 F16. `golden.safetensors` beside the weights holds
  tokens, lengths      packed sequences
  logits               [rows, vocab]
  weight, entropy_weight [rows]: loss = sum(weight * logprob(next token) + entropy_weight * entropy)
  logprob, entropy     [rows], 0 where a sequence ends
  grad.NAME            gradient of the loss by each parameter
`llama.gguf` is the llama model with q/k rows in the order of llama.cpp, some tensors as F16/BF16.
"""
import json
import pathlib
import shutil

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

HERE = pathlib.Path(__file__).parent
LENGTHS = [23, 1, 17]
VOCAB = 97


def configs():
    base = dict(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, max_position_embeddings=256,
                bos_token_id=None, pad_token_id=None, attention_dropout=0.0)
    yield "llama", torch.float32, LlamaConfig(
        **base, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80, rms_norm_eps=1e-5,
        eos_token_id=[1, 2], tie_word_embeddings=True,
        rope_parameters=dict(rope_theta=500.0, rope_type="llama3", factor=4.0, low_freq_factor=1.0,
                             high_freq_factor=4.0, original_max_position_embeddings=64))
    yield "qwen2", torch.bfloat16, Qwen2Config(
        **base, num_attention_heads=4, num_key_value_heads=1, intermediate_size=80, rms_norm_eps=1e-6,
        eos_token_id=3, tie_word_embeddings=True, rope_theta=1000000.0)
    yield "qwen3", torch.float16, Qwen3Config(
        **base, num_attention_heads=2, num_key_value_heads=1, head_dim=32, intermediate_size=60,
        rms_norm_eps=1e-6, eos_token_id=3, tie_word_embeddings=False, rope_theta=10000.0)


def randomize(model, generator):
    # Larger than the usual start, so that every tensor matters to the logits.
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        with torch.no_grad():
            p.copy_(1.0 + 0.3 * noise if "norm" in name else noise * (0.4 if "bias" in name else 0.14))


def golden(model, generator):
    tokens = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=generator)
    weight = torch.randn(len(tokens), generator=generator)
    entropy_weight = 0.3 * torch.randn(len(tokens), generator=generator)
    logits, logprob, entropy, at = [], [], [], 0
    for n in LENGTHS:
        part = tokens[at:at + n]
        out = model(part[None]).logits[0]
        lp = torch.log_softmax(out, -1)
        target = torch.cat([part[1:], part[:1]])
        has_next = (torch.arange(n) < n - 1).float()
        logits.append(out)
        logprob.append(lp.gather(1, target[:, None])[:, 0] * has_next)
        entropy.append(-(lp.exp() * lp).sum(-1) * has_next)
        at += n
    logits, logprob, entropy = map(torch.cat, (logits, logprob, entropy))
    (weight * logprob + entropy_weight * entropy).sum().backward()
    result = dict(tokens=tokens.float(), lengths=torch.tensor(LENGTHS).float(), weight=weight,
                  entropy_weight=entropy_weight, logits=logits, logprob=logprob, entropy=entropy)
    for name, p in model.named_parameters():
        result["grad." + name] = p.grad
    return {k: v.detach().contiguous() for k, v in result.items()}


def permute(w, heads):
    """The row order of q and k in a llama GGUF."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write_gguf(path, model, config):
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("tiny")
    w.add_block_count(config.num_hidden_layers)
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_rope_freq_base(500.0)
    w.add_rope_dimension_count(12)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list([f"t{i}" for i in range(VOCAB)])
    w.add_token_types([3 if i < 3 else 1 for i in range(VOCAB)])
    w.add_token_merges(["t 1", "t 2"])
    w.add_bos_token_id(0)
    w.add_eos_token_id(2)
    w.add_eot_token_id(1)
    w.add_add_bos_token(False)
    w.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    plain = {k: v.detach().numpy() for k, v in model.named_parameters()}
    for name, value in plain.items():
        if "q_proj" in name:
            value = permute(value, config.num_attention_heads)
        if "k_proj" in name:
            value = permute(value, config.num_key_value_heads)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if "up_proj" in name:
            w.add_tensor(target, value.astype(np.float16))
        elif "down_proj" in name:
            bits = torch.tensor(value).bfloat16().view(torch.int16).numpy().view(np.uint16)
            w.add_tensor(target, bits.view(np.uint8).reshape(value.shape[0], -1),
                         raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            w.add_tensor(target, value)
    # Divisors as Llama 3 files have them, of the same scaling as the configuration.
    inv = model.model.rotary_emb.inv_freq.numpy()
    plain_inv = 1.0 / 500.0 ** (np.arange(0, 12, 2, dtype=np.float32) / 12)
    w.add_tensor("rope_freqs.weight", (plain_inv / inv).astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


for seed, (name, dtype, config) in enumerate(configs()):
    generator = torch.Generator().manual_seed(seed)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, generator)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    stored = AutoModelForCausalLM.from_config(config, dtype=dtype)
    stored.load_state_dict(model.state_dict())
    stored.save_pretrained(folder, max_shard_size="40KB" if name == "qwen2" else "1GB")
    model.load_state_dict(stored.float().state_dict())
    save_file(golden(model, generator), folder / "golden.safetensors")
    if name == "llama":
        write_gguf(HERE / "llama.gguf", model, config)
    print(name, sorted(p.name for p in folder.iterdir()))
