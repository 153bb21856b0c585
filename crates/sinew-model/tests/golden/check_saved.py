"""Checks by hand that `transformers` (and PEFT) load what this crate writes.

  for m in llama qwen2 qwen3; do
    cargo run -p sinew-model --example convert -- crates/sinew-model/tests/golden/$m /tmp/saved/$m
  done
  python check_saved.py /tmp/saved            (torch 2.15, transformers 5.23, safetensors 0.8)

Loads every folder with AutoModelForCausalLM and compares its logits with golden.safetensors. A
folder NAME-lora (example `convert` with `f32 x lora`) is loaded by PEFT over the model NAME, and
its logits are compared with those of the weights merged by hand.
"""
import json
import pathlib
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
saved = pathlib.Path(sys.argv[1])


def logits(model, tokens, lengths):
    parts, at = [], 0
    for n in lengths:
        with torch.no_grad():
            parts.append(model(tokens[at:at + n][None]).logits[0])
        at += n
    return torch.cat(parts)


for folder in sorted(saved.iterdir()):
    name, _, lora = folder.name.partition("-")
    golden = load_file(HERE / name / "golden.safetensors")
    tokens, lengths = golden["tokens"].long(), golden["lengths"].long().tolist()
    base = saved / name
    model, info = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32,
                                                       output_loading_info=True)
    assert not any(info.values()), info
    expected = golden["logits"]
    if lora:
        from peft import PeftModel
        config = json.loads((folder / "adapter_config.json").read_text())
        weights = load_file(folder / "adapter_model.safetensors")
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        for key, p in plain.named_parameters():
            a = weights.get("base_model.model." + key.replace(".weight", ".lora_A.weight"))
            if a is not None:
                b = weights["base_model.model." + key.replace(".weight", ".lora_B.weight")]
                p.data += config["lora_alpha"] / config["r"] * b @ a
        expected = logits(plain, tokens, lengths)
        model = PeftModel.from_pretrained(model, folder)
    error = (logits(model, tokens, lengths) - expected).abs().max() / expected.abs().max()
    print(f"{folder.name}: relative difference of logits {error:.1e}")
    assert error < 1e-5
