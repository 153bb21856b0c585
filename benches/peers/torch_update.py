"""A plain PyTorch loop over flat rows of groups, and a checkpoint of its state.

One argument, a JSON object or a list of them, each of which makes a line of output: `part` (`update`:
seconds of forward, loss, backward, clipping and AdamW over all rows; `save`: seconds of
`torch.distributed.checkpoint.save` of weights and moments), `model` (a folder), `tasks`, `samples`,
`shared` and `own` (tokens of a prompt and of an answer), `batch` (rows of a pass), `steps`, and as options
`device` (cpu, cuda), `dtype` (f32; bf16: autocast over f32 weights), `lora` (rank), `checkpointing` (none,
full), `folder` (for `save`), `limit_s` (no step begins later). Every row is computed whole, shared prompts
too; logits only for trained tokens."""
import contextlib
import gc
import json
import os
import resource
import shutil
import sys
import time

import torch

EXTRA = {"device": "cpu", "dtype": "f32", "lora": None, "checkpointing": "none", "limit_s": 1e9}
RATE = 1e-5


def token(vocabulary, number):
    """Any token, the same for the same number, and the same as in `sinew bench torch`."""
    return number * 7919 % vocabulary


def row(spec, vocabulary, sample):
    """Prompt and answer of a sample; samples of a task share the prompt."""
    task = sample // spec["samples"]
    prompt = [token(vocabulary, 1 + task * 1009 + t * 31) for t in range(spec["shared"])]
    return prompt + [token(vocabulary, 5 + sample * 2003 + t * 17) for t in range(spec["own"])]


def rows(spec, vocabulary):
    """All rows, `[tasks * samples, shared + own]`."""
    return torch.tensor([row(spec, vocabulary, n) for n in range(spec["tasks"] * spec["samples"])])


def build(spec):
    """The model and its trained parameters: in f32, with LoRA the frozen ones in the computing type."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    device = torch.device(spec["device"])
    causal = transformers.AutoModelForCausalLM.from_pretrained(
        spec["model"], dtype=torch.float32, attn_implementation="sdpa", local_files_only=True).to(device)
    causal.config.use_cache = False
    if spec["lora"]:
        from peft import LoraConfig, get_peft_model

        kept = torch.bfloat16 if spec["dtype"] == "bf16" else torch.float32
        causal.to(kept)
        config = LoraConfig(r=spec["lora"], lora_alpha=2 * spec["lora"], target_modules="all-linear",
                            task_type="CAUSAL_LM")
        causal = get_peft_model(causal, config).get_base_model()
    causal.train()
    if spec["checkpointing"] == "full":
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return causal, [p for p in causal.parameters() if p.requires_grad]


def passes(causal, spec, ids):
    """Forward, loss and backward of all rows."""
    share = 1.0 / (len(ids) * spec["own"])
    narrow = spec["dtype"] == "bf16"
    for one in ids.split(spec["batch"]):
        auto = torch.autocast(one.device.type, torch.bfloat16) if narrow else contextlib.nullcontext()
        with auto:
            hidden = causal.model(input_ids=one, use_cache=False).last_hidden_state
            logits = causal.lm_head(hidden[:, spec["shared"] - 1 : -1]).float()
        targets = one[:, spec["shared"] :, None]
        scores = logits.gather(-1, targets).squeeze(-1) - logits.logsumexp(-1)
        ratio = torch.exp(scores - scores.detach())
        # All advantages are 1, as in the rows of `sinew bench torch`.
        loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).sum() * share
        loss.backward()


def wait(spec):
    """Waits for the device."""
    if spec["device"] == "cuda":
        torch.cuda.synchronize()


def peak(spec):
    """Most bytes in use: of the device's allocator, or of the process."""
    if spec["device"] == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def update(spec):
    """Seconds of each update after one that is not counted."""
    causal, trained = build(spec)
    ids = rows(spec, causal.config.vocab_size).to(spec["device"])
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(own):
        passes(causal, spec, own)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait(spec)

    began = time.perf_counter()
    # As on the other side, one task warms up what all tasks use.
    step(ids[: spec["batch"]])
    values = []
    while len(values) < spec["steps"] and (not values or time.perf_counter() - began < spec["limit_s"]):
        begin = time.perf_counter()
        step(ids)
        values.append(time.perf_counter() - begin)
    return values


def save(spec):
    """Seconds of each save of weights and moments of all trained tensors, files synced."""
    import torch.distributed.checkpoint as dcp

    causal, _ = build(spec)
    state = {f"{kind}.{name}": torch.zeros_like(p) for name, p in causal.named_parameters() for kind in "mv"}
    state |= {name: p.detach() for name, p in causal.named_parameters()}
    values = []
    for number in range(spec["steps"] + 1):
        inner = os.path.join(spec["folder"], f"plain-{number}")
        begin = time.perf_counter()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(inner))
        values.append(time.perf_counter() - begin)
        shutil.rmtree(inner)
    return values[1:]


def measure(text, parts):
    """Runs the parts that the argument names, and prints a line for each."""
    torch.set_num_threads(int(os.environ.get("PEER_THREADS", str(torch.get_num_threads()))))
    given = json.loads(text)
    for one in given if isinstance(given, list) else [given]:
        spec = EXTRA | one
        if spec["device"] == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        version, values = parts[spec["part"]](spec)
        print(json.dumps({"version": version, "values": values, "peak_bytes": peak(spec)}), flush=True)


def plain(part):
    """A part with the version of what it measures."""
    return lambda spec: ("PyTorch " + torch.__version__.split("+")[0], part(spec))


if __name__ == "__main__":
    measure(sys.argv[1], {"update": plain(update), "save": plain(save)})
