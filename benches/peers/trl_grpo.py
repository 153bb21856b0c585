"""Seconds of whole GRPO steps of TRL on the CPU: sampling, a call of a Python tool, sampling again,
log-probabilities, gradients, AdamW. Arguments: tasks, samples, prompt tokens, tokens of each of the two turns, tokens
of the tool's answer. A model of SmolLM2-135M's shape with random weights; a tokenizer of one word for each token; f32,
no reference model. Random weights ask for no tool, so that every first turn is taken as the same call; the rest of the
tool loop is TRL's own. Gradients are those of BATCH samples at a time, of which the activations fit in 24 GB."""
import contextlib
import io
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
from trl.trainer import grpo_trainer

tasks, samples, prompt, turn, answer = map(int, sys.argv[1:6])
torch.manual_seed(0)
STEPS = 1
BATCH = 16
CALL = {"type": "function", "function": {"name": "python", "arguments": {"code": "print(17 * 23)"}}}
s = SHAPE
# Special tokens are found inside of words too: their names are no part of others.
special = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<pad>"}
words = {name: i for i, name in enumerate(special.values())}
words |= {f"t{i}": i for i in range(len(words), s["vocab"])}
inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
tokenizer.chat_template = (
    "{% for m in messages %}{{ m['content'] }}{% for c in m.get('tool_calls') or [] %}"
    " {{ c['function']['name'] }} {{ c['function']['arguments'] }}{% endfor %} {% endfor %}")
# Any: it only has to be there for TRL to take tools.
tokenizer.response_schema = {"type": "object", "properties": {}}
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=s["vocab"], hidden_size=s["width"], num_hidden_layers=s["layers"], num_attention_heads=s["heads"],
    num_key_value_heads=s["kv_heads"], intermediate_size=s["ffn"], rms_norm_eps=s["eps"], tie_word_embeddings=True,
    max_position_embeddings=8192, eos_token_id=1, pad_token_id=2))
texts = [" ".join(f"t{(1000 + n * 1009 + i * 31) % s['vocab']}" for i in range(prompt)) for n in range(tasks)]
prompts = [[{"role": "user", "content": text}] for text in texts]
times, calls = [], []


def python(code: str) -> str:
    """Runs Python.

    Args:
        code: The program.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    calls.append(out.getvalue())
    said = [f"t{5000 + ord(c)}" for c in out.getvalue()]
    return " ".join((said + ["t5000"] * answer)[:answer])


def parse(_tokenizer, _ids, prefix=None, **_):
    first = len(prefix) == prompt
    return {"role": "assistant", "content": "t5000"} | ({"tool_calls": [CALL]} if first else {})


grpo_trainer.parse_response = parse


class Clock(TrainerCallback):
    def on_step_begin(self, *_args, **_kwargs):
        self.begin = time.perf_counter()

    def on_step_end(self, *_args, **_kwargs):
        times.append(time.perf_counter() - self.begin)


batch = min(BATCH, tasks * samples)
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    tools=[python],
    reward_funcs=lambda completions, **_: [float(i % 3 == 0) for i in range(len(completions))],
    # With a fingerprint of its own, since what would compute one fails on some versions of pyarrow.
    train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": prompts * STEPS * 2}), fingerprint="prompts"),
    args=GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, max_steps=STEPS + 1, beta=0.0, save_strategy="no",
        per_device_train_batch_size=batch, gradient_accumulation_steps=tasks * samples // batch,
        num_generations=samples, max_completion_length=2 * turn + answer, max_tool_calling_iterations=1,
        temperature=1.0, gradient_checkpointing=False, report_to=[], disable_tqdm=True, logging_strategy="no",
        learning_rate=1e-6),
    callbacks=[Clock()],
)
trainer.generation_config.max_new_tokens = trainer.generation_config.min_new_tokens = turn
trainer.train()
tokens = trainer.state.num_input_tokens_seen
sampled = (STEPS + 1) * tasks * samples * (prompt + 2 * turn)
assert len(calls) == (STEPS + 1) * tasks * samples, f"{len(calls)} calls"
assert tokens == sampled, f"{tokens} tokens of prompts and turns, {sampled} were asked for"
report("TRL " + trl.__version__, times[1:])
