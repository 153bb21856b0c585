"""Makes `peft/`: an adapter of the tiny llama model as PEFT saves it, and the logits that it gives there.

Run: python make_peft.py              (torch 2.15, transformers 5.23, peft 0.21, safetensors 0.8)
     python make_peft.py check DIR    loads an adapter that `Lora::save` wrote over the same model and
                                      compares its logits with those of the golden adapter
"""
import json
import pathlib
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def logits(model):
    golden = load_file(HERE / "llama" / "golden.safetensors")
    tokens, at, out = golden["tokens"].long(), 0, []
    for n in golden["lengths"].long().tolist():
        out.append(model(tokens[at:at + n][None]).logits[0])
        at += n
    return torch.cat(out).detach()


def base():
    return AutoModelForCausalLM.from_pretrained(HERE / "llama", dtype=torch.float32)


def main():
    if sys.argv[1:2] == ["check"]:
        found = logits(PeftModel.from_pretrained(base(), sys.argv[2]))
        expected = load_file(HERE / "peft" / "golden.safetensors")["logits"]
        error = ((found - expected).norm() / expected.norm()).item()
        print(f"relative error of the logits: {error:.1e}")
        sys.exit(error > 1e-5)
    model = get_peft_model(base(), LoraConfig(r=3, lora_alpha=5, target_modules=ALL, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(11)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = 0.1 * torch.randn(p.shape, generator=generator)
    out = HERE / "peft"
    model.save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)
    config = json.loads((out / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "llama"
    config["target_modules"].sort()
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    plain = logits(base())
    adapted = logits(model)
    print("the adapter moves the logits by", ((adapted - plain).norm() / plain.norm()).item())
    save_file({"logits": adapted.contiguous()}, out / "golden.safetensors")


main()
