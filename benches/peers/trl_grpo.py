"""Seconds of whole GRPO steps of TRL on the CPU: sampling, log-probabilities, gradients, AdamW. Arguments: tasks,
samples, prompt tokens, sampled tokens. A model of SmolLM2-135M's shape with random weights; a tokenizer of one
word for each token; as many tokens sampled as asked, whatever they are; f32, no reference model."""
import os
import sys
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import trl
from common import SHAPE, report
from datasets import Dataset
from datasets.table import InMemoryTable
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

tasks, samples, prompt, sampled = map(int, sys.argv[1:5])
torch.manual_seed(0)
STEPS = 1
s = SHAPE
words = {f"t{i}": i for i in range(s["vocab"])}
inner = Tokenizer(models.WordLevel(words, unk_token="t0"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="t2", pad_token="t3", unk_token="t0")
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=s["vocab"], hidden_size=s["width"], num_hidden_layers=s["layers"], num_attention_heads=s["heads"],
    num_key_value_heads=s["kv_heads"], intermediate_size=s["ffn"], rms_norm_eps=s["eps"], tie_word_embeddings=True,
    max_position_embeddings=8192, eos_token_id=2, pad_token_id=3))
texts = [" ".join(f"t{(1000 + n * 1009 + i * 31) % s['vocab']}" for i in range(prompt)) for n in range(tasks)]
times = []


class Clock(TrainerCallback):
    def on_step_begin(self, *_args, **_kwargs):
        self.begin = time.perf_counter()

    def on_step_end(self, *_args, **_kwargs):
        times.append(time.perf_counter() - self.begin)


trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=lambda completions, **_: [float(i % 3 == 0) for i in range(len(completions))],
    # With a fingerprint of its own, since what would compute one fails on some versions of pyarrow.
    train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": texts * STEPS * 2}), fingerprint="prompts"),
    args=GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, max_steps=STEPS + 1, beta=0.0, save_strategy="no",
        per_device_train_batch_size=tasks * samples, num_generations=samples, max_completion_length=sampled,
        generation_kwargs={"min_new_tokens": sampled}, temperature=1.0, gradient_checkpointing=False,
        report_to=[], disable_tqdm=True, logging_strategy="no", learning_rate=1e-6),
    callbacks=[Clock()],
)
trainer.train()
report("TRL " + trl.__version__, times[1:])
