"""Seconds of updates of TRL's `GRPOTrainer` on the rows of `torch_update.py`, whose argument this takes too: loss,
backward, clipping and AdamW as TRL does them, without sampling and rewards. The method that would sample returns
the rows; gradients are those of `batch` rows at a time."""
import os
import sys
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import trl
from datasets import Dataset
from datasets.table import InMemoryTable
from tokenizers import Tokenizer, models, pre_tokenizers
from torch_update import RATE, measure, rows, wait
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Seconds of each optimizer step."""

    def __init__(self, spec):
        self.spec, self.values = spec, []

    def on_step_begin(self, *_args, **_kwargs):
        self.begin = time.perf_counter()

    def on_step_end(self, *_args, **_kwargs):
        wait(self.spec)
        self.values.append(time.perf_counter() - self.begin)


class Fixed(GRPOTrainer):
    """Trains on the same rows at each step."""

    def _generate_and_score_completions(self, inputs):
        ids = self.fixed.to(self.accelerator.device)
        shared = self.prompt_tokens
        whole = torch.ones_like(ids)
        answers = whole[:, shared:]
        return {
            "prompt_ids": ids[:, :shared], "prompt_mask": whole[:, :shared], "completion_ids": ids[:, shared:],
            "completion_mask": answers, "advantages": torch.ones(len(ids), device=ids.device),
            "num_items_in_batch": answers.sum()}


def tokenizer():
    """Any: only its special tokens are read."""
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<pad>"}
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(special.values())}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def settings(spec, count):
    """The part of the configuration that this needs."""
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=spec["device"] == "cpu", bf16=spec["dtype"] == "bf16",
        max_steps=spec["steps"] + 1, beta=0.0, save_strategy="no", per_device_train_batch_size=spec["batch"],
        gradient_accumulation_steps=count // spec["batch"], num_generations=spec["samples"],
        max_completion_length=spec["own"], gradient_checkpointing=spec["checkpointing"] == "full", report_to=[],
        disable_tqdm=True, logging_strategy="no", learning_rate=RATE, optim="adamw_torch_fused", max_grad_norm=1.0,
        loss_type="dapo")


def update(spec):
    """Seconds of each update after one that is not counted."""
    model = AutoModelForCausalLM.from_pretrained(
        spec["model"], dtype=torch.float32, attn_implementation="sdpa", local_files_only=True)
    lora = None
    if spec["lora"]:
        from peft import LoraConfig

        model.to(torch.bfloat16 if spec["dtype"] == "bf16" else torch.float32)
        lora = LoraConfig(r=spec["lora"], lora_alpha=2 * spec["lora"], target_modules="all-linear",
                          task_type="CAUSAL_LM")
    fixed, clock = rows(spec, model.config.vocab_size), Clock(spec)
    trainer = Fixed(
        model=model, processing_class=tokenizer(), reward_funcs=lambda completions, **_: [0.0] * len(completions),
        # With a fingerprint of its own, since what would compute one fails on some versions of pyarrow.
        train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": ["x"] * len(fixed)}), fingerprint="prompts"),
        args=settings(spec, len(fixed)), peft_config=lora, callbacks=[clock])
    trainer.fixed, trainer.prompt_tokens = fixed, spec["shared"]
    trainer.train()
    return "TRL " + trl.__version__, clock.values[1:]


if __name__ == "__main__":
    measure(sys.argv[1], {"update": update})
