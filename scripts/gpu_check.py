#!/usr/bin/env python3
"""Measures the PyTorch trainer on one GPU, without a network: see `gpu_check.sh`.

| part | rows |
|---|---|
| `golden` | scores and gradients of tiny models against plain `transformers`, f32 and bf16 |
| `full`, `lora` | tokens/s, MFU and memory of updates of 8 tasks x 8 samples, flat rows and shared prefixes |
| `plain` | the same rows in a plain PyTorch loop |
| `files` | save, load and publish |
| `trl` | the same rows through TRL's `GRPOTrainer`, if it is installed |
| `memory` | a request that cannot fit is answered with `memory` and the key to change |

Every part has a limit of time; a part that fails or is cut is a row with the reason. Tokens/s count each row
whole, shared prompts too. MFU counts the operations of what is computed: 6 (LoRA: 4) for each weight of a
matrix and token, the output matrix only for trained tokens; for attention 12 for each layer, pair of tokens
and hidden number. Recomputed activations do not count. The peak is that of the data sheet for dense bf16 with
f32 sums, or measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NEEDED = ("torch", "transformers", "peft", "safetensors", "msgspec", "blake3", "numpy")
ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benches/peers"
sys.path[:0] = [str(ROOT / "scripts"), str(PEERS), str(ROOT / "python/tests/torch")]

#: Shapes of Qwen2.5; weights are random.
QWEN = {"vocab_size": 151_936, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "max_position_embeddings": 32_768, "rope_theta": 1e6}
SHAPES = {
    "0.5B": QWEN | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                    "num_attention_heads": 14},
    "1.5B": QWEN | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                    "num_attention_heads": 12},
}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4}
SIZES = {"tasks": 8, "samples": 8, "shared": 1024, "own": 512}
TINY_SIZES = {"tasks": 2, "samples": 4, "shared": 24, "own": 8}
LORA = 32
#: Operations a second of dense bf16 products with f32 sums, by a part of the device's name; the first counts.
PEAKS = [("B200", 2250e12), ("H200", 989e12), ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12),
         ("H20", 148e12), ("A100", 312e12), ("A800", 312e12), ("A40", 150e12), ("A10", 125e12),
         ("L40S", 362e12), ("L40", 181e12), ("L4", 121e12), ("RTX 6000 Ada", 364e12), ("RTX 5090", 209e12),
         ("RTX 4090", 165e12), ("MI300X", 1307e12)]
#: Least ratios hoped for. The one of shared prefixes is a share of the tokens that need not be computed.
TARGETS = {"shared": 0.85, "plain flat": 0.95, "plain shared": 1.0, "TRL flat": 1.0, "TRL shared": 1.3}
GOLDEN = 1e-5
TRAINED = {"of": "policy", "values": False, "backward": True}
ROOMY = 100e9
"""Device memory from which activations are kept, and peers run beside the idle server."""


def fields(shape: str, tiny: bool) -> dict[str, Any]:
    """The configuration of a shape."""
    return SHAPES[shape] | (TINY if tiny else {})


def operations(config: dict[str, Any], sizes: dict[str, int], flat: bool, lora: bool) -> float:
    """Floating-point operations of an update."""
    h, f, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    head = h // config["num_attention_heads"]
    weights = layers * (2 * h * h + 2 * h * head * config["num_key_value_heads"] + 3 * h * f)
    tasks, samples, shared, own = (sizes[name] for name in ("tasks", "samples", "shared", "own"))
    rows = tasks * samples
    if flat:
        tokens, pairs = rows * (shared + own), rows * (shared + own) ** 2 / 2
    else:
        tokens = tasks * (shared + samples * own)
        pairs = tasks * shared**2 / 2 + rows * (own * shared + own**2 / 2)
    factor = 4 if lora else 6
    linear = factor * (weights * tokens + config["vocab_size"] * h * rows * own)
    # Two products of a pair in the forward pass, four in the backward pass, 2 operations each.
    return linear + 12 * layers * h * pairs


class Run:
    """The state of the check: device, rows, server, models."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        import torch

        self.args, self.device, self.tiny = args, device, args.tiny
        self.cuda = device == "cuda"
        self.begin = time.monotonic()
        self.end = self.begin + args.limit
        self.until = self.end
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.file = open(self.out / "rows.jsonl", "w", encoding="utf-8")  # noqa: SIM115
        self.rows: list[dict[str, Any]] = []
        self.work = tempfile.TemporaryDirectory(prefix="gpu-check-", dir=args.work)
        self.folder = Path(self.work.name)
        self.held: Any = None
        self.opened: tuple[str, str] | None = None
        self.number = 0
        self.found: dict[tuple[str, str], dict[str, float]] = {}
        self.sizes = TINY_SIZES if args.tiny else SIZES
        self.name = torch.cuda.get_device_name() if self.cuda else "cpu"
        self.memory = torch.cuda.get_device_properties(0).total_memory if self.cuda else 0
        self.roomy = self.memory >= ROOMY or not self.cuda
        self.checkpointing = "none" if self.roomy else "full"
        self.peak, self.peak_source = peak_of(self.name, device)

    def row(self, name: str, value: float | None = None, unit: str = "", **more: Any) -> None:
        """Writes a row at once."""
        made = {"name": name, "value": value, "unit": unit} | {k: v for k, v in more.items() if v is not None}
        target, ratio = made.get("target"), made.get("ratio")
        if target is not None and "met" not in made:
            judged = ratio if ratio is not None else value
            made["met"] = judged is not None and judged >= target
        if value is None:
            made.setdefault("met", False)
        made["at_s"] = round(time.monotonic() - self.begin, 1)
        self.rows.append(made)
        self.file.write(json.dumps(made) + "\n")
        self.file.flush()
        print(text_of(made), flush=True)

    def hoped(self, target: float) -> float | None:
        """A target of speed; tiny shapes have none."""
        return None if self.tiny else target

    def server(self) -> Any:
        """The running server."""
        from gpu_server import Server

        if self.held is None or not self.held.alive:
            self.held, self.opened = Server(not self.cuda, self.until), None
        return self.held

    def call(self, verb: str, **body: Any) -> dict[str, Any]:
        """A command within the part's time."""
        return self.server().call(verb, self.until, **body)

    def free(self) -> None:
        """Ends the server, so that a peer has its memory."""
        if self.held is not None:
            self.held.close()
            self.held = None

    def open(self, model: Path, max_tokens: int, **more: Any) -> dict[str, Any]:
        """Opens a model."""
        base = {"model": str(model), "dtype": "bf16", "attention": "auto", "sharing": "auto",
                "checkpointing": self.checkpointing, "max_tokens": max_tokens, "head_chunk": None,
                "deterministic": False, "seed": 1, "lora": None, "critic": None, "frozen": {}}
        server = self.server()
        answer = server.call("open", self.until, **(base | more))
        server.peak, self.number, self.opened = 0, 0, None
        return answer

    def model(self, shape: str) -> Path:
        """A folder with random weights."""
        import torch
        import transformers

        path = self.folder / shape
        if not path.exists():
            transformers.utils.logging.disable_progress_bar()
            torch.manual_seed(1)
            config = transformers.Qwen2Config(**fields(shape, self.tiny))
            with torch.device(self.device):
                made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            made.save_pretrained(path)
            del made
            if self.cuda:
                torch.cuda.empty_cache()
        return path


def peak_of(name: str, device: str) -> tuple[float, str]:
    """Operations a second of the device, and where the number is from."""
    import torch

    for part, peak in PEAKS:
        if device == "cuda" and part in name:
            return peak, f"data sheet of {part}, dense bf16"
    size = 8192 if device == "cuda" else 512
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        left @ left
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / min(times), f"measured: a product of {size} x {size} in bf16"


def text_of(row: dict[str, Any]) -> str:
    """A row for people."""
    value = row["value"]
    shown = "-" if value is None else f"{value:.6g}"
    parts = [f"{row['name']:58} {shown:>11} {row['unit']:6}"]
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.3f}")
    if "peak_bytes" in row:
        parts.append(f"peak {row['peak_bytes'] / 1e9:.1f} GB")
    if "peer" in row:
        parts.append(f"{row['peer']} {row['peer_value']:.6g}")
    if "ratio" in row:
        parts.append(f"ratio {row['ratio']:.2f}")
    if "target" in row:
        parts.append(f"target {row['target']:.3g} {'met' if row['met'] else 'NOT met'}")
    parts += [f"({row[key]})" for key in ("note", "why") if key in row]
    return " ".join(parts)


# golden


class OnHost:
    """A model whose answers are in host memory, differentiably, for `worlds.plain`."""

    def __init__(self, model: Any, device: str) -> None:
        self.model, self.device = model, device

    def __call__(self, input_ids: Any, **_more: Any) -> Any:
        logits = self.model(input_ids=input_ids.to(self.device), use_cache=False).logits.float().cpu()
        return SimpleNamespace(logits=logits, hidden_states=[logits])


def golden_model(run: Run, family: str) -> Path:
    """A tiny random model whose heads are as wide as FlexAttention needs."""
    import torch
    import transformers

    config = getattr(transformers, family + "Config")(
        vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.1)
    torch.manual_seed(3)
    transformers.utils.logging.disable_progress_bar()
    path = run.folder / f"golden-{family}"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def golden_slopes() -> tuple[Any, Any]:
    """Derivatives by log-probs and entropies."""
    import numpy as np

    random = np.random.default_rng(5)
    return random.normal(size=30).astype("<f4"), random.normal(size=30).astype("<f4")


def golden_plain(run: Run, path: Path, world: dict[str, Any], dtype: Any) -> tuple[Any, dict[str, Any]]:
    """Scores and gradients of plain `transformers`, each row computed by itself."""
    import torch
    import transformers
    import worlds

    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(path, dtype=dtype, local_files_only=True).to(run.device)
    logprobs, entropies, _ = worlds.plain(OnHost(model, run.device), world)
    first, second = (torch.from_numpy(slope) for slope in golden_slopes())
    ((logprobs * first).sum() + (entropies * second).sum()).backward()
    grads = {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None}
    return torch.stack([logprobs, entropies]).detach(), grads


def golden_pass(run: Run, world: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward pass through the server; the scores."""
    from gpu_server import lane

    score = run.call("forward", wave=[lane(**world)], entropies=True, **TRAINED)
    first, second = golden_slopes()
    run.call("backward", grads=[{"logprobs": first.tobytes(), "entropies": second.tobytes(), "values": b""}])
    return score["scores"][0]


def golden_ours(run: Run, path: Path, world: dict[str, Any], dtype: str, like: dict[str, Any]) -> Any:
    """Scores and gradients of the server. Gradients are first moments after an update with beta1 = 0."""
    import numpy as np
    import torch
    import torch.distributed.checkpoint as dcp
    from gpu_server import f32

    opened = run.open(path, 256, dtype=dtype, head_chunk=8, checkpointing="none")
    scores = golden_pass(run, world)
    run.call("apply", number=1, lr=0.0, beta1=0.0, beta2=0.0, eps=1.0, decay=0.0, max_grad_norm=None)
    folder = run.folder / "golden-saved"
    folder.mkdir()
    run.call("save", folder=str(folder))
    read = {f"m.{name}": torch.zeros(grad.shape) for name, grad in like.items()}
    dcp.load(read, storage_reader=dcp.FileSystemReader(folder / "optimizer"))
    shutil.rmtree(folder)
    found = np.stack([f32(scores["logprobs"]), f32(scores["entropies"])])
    return torch.from_numpy(found.copy()), {name[2:]: grad for name, grad in read.items()}, opened


def gaps(found: tuple[Any, ...], truth: tuple[Any, ...]) -> tuple[float, float]:
    """Largest difference of scores, and the relative one of all gradients together."""
    import torch

    scores = float((found[0] - truth[0]).abs().max())
    apart = torch.cat([(found[1][n] - grad).flatten() for n, grad in truth[1].items()]).norm()
    return scores, float(apart / torch.cat([grad.flatten() for grad in truth[1].values()]).norm())


def golden(run: Run) -> None:
    """Scores and gradients against `transformers`. bf16 may be off f32 by twice of what plain bf16 is off."""
    import torch
    import worlds

    world = worlds.tree(9, 512, 40)
    for family in ("Llama", "Qwen2", "Qwen3"):
        path = golden_model(run, family)
        truth = golden_plain(run, path, world, torch.float32)
        rounded = gaps(golden_plain(run, path, world, torch.bfloat16), truth)
        for dtype, limits in (("f32", (GOLDEN, GOLDEN)), ("bf16", [2 * gap + 1e-3 for gap in rounded])):
            *found, opened = golden_ours(run, path, world, dtype, truth[1])
            form = "shared" if opened["shared"] else f"flat ({opened['why_flat']})"
            names = (("scores", "nats"), ("gradients", "rel"))
            for (what, unit), gap, limit in zip(names, gaps(tuple(found), truth), limits, strict=True):
                name = f"golden {family} {dtype}: {what}, at most {limit:.2g}"
                run.row(name, gap, unit, limit=limit, met=gap <= limit, form=form)
    repeated(run, run.folder / "golden-Llama", world)
    if run.cuda:
        # A process compiles attention for a limited number of forms, and these were many.
        run.free()


def repeated(run: Run, path: Path, world: dict[str, Any]) -> None:
    """With `deterministic`, equal passes give equal bits."""
    run.open(path, 256, dtype="bf16", checkpointing="none", deterministic=True)
    step = {"lr": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 1.0, "decay": 0.0, "max_grad_norm": None}
    seen = []
    for number in (1, 2):
        scores = golden_pass(run, world)
        norm = run.call("apply", number=number, **step)["grad_norm"]
        run.call("zero")
        seen.append((scores, norm))
    equal = seen[0] == seen[1]
    run.row("golden: deterministic passes have equal bits", float(equal), "", met=equal)


# updates


def update(run: Run, lanes: list[dict[str, Any]], items: int) -> float:
    """Seconds that the server computes of one update: forward and backward of each lane, AdamW."""
    import numpy as np
    from gpu_server import f32

    server_s = 0.0
    for one in lanes:
        scores = run.call("forward", wave=[one], entropies=True, **TRAINED)
        # The ratio to the sampling policy is 1 and all advantages are 1.
        slope = np.full(len(f32(scores["scores"][0]["logprobs"])), -1.0 / items, "<f4")
        done = run.call("backward", grads=[{"logprobs": slope.tobytes(), "entropies": b"", "values": b""}])
        server_s += scores["seconds"] + done["seconds"]
    run.number += 1
    server_s += run.call("apply", number=run.number, lr=1e-5, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.0,
                         max_grad_norm=1.0)["seconds"]
    return server_s + run.call("zero")["seconds"]


def measure(run: Run, shape: str, kind: str, flat: bool) -> None:
    """Updates in one form; a row with tokens/s, MFU, memory and the share of the protocol."""
    from gpu_server import Failed, waves
    from torch_update import rows

    sizes, config = run.sizes, fields(shape, run.tiny)
    samples, shared, own = sizes["samples"], sizes["shared"], sizes["own"]
    whole = rows(sizes, config["vocab_size"]).numpy()
    lora = {"rank": LORA, "alpha": 2.0 * LORA, "targets": [], "seed": 1} if kind == "lora" else None
    form = {"sharing": "flat", "attention": "sdpa"} if flat else {"attention": "flex" if run.cuda else "auto"}
    name, most = f"{shape} {kind}, {'flat rows' if flat else 'shared prefixes'}", samples * (shared + own)
    try:
        opened = run.open(run.model(shape), most, lora=lora, **form)
    except Failed as failed:
        if flat or failed.kind != "input":
            raise
        run.row(f"{name}, FlexAttention", why=str(failed))
        opened = run.open(run.model(shape), most, lora=lora)
    if not flat and not opened["shared"]:
        run.row(name, why=f"prefixes are not shared: {opened['why_flat']}")
        return
    # Flat, a lane is a task; shared, two tasks have no more tokens than that.
    lanes = list(waves(whole, samples, shared, 1 if flat else 2))
    items, tokens = len(whole) * own, len(whole) * (shared + own)
    begin = time.perf_counter()
    update(run, lanes, items)
    warm = time.perf_counter() - begin
    walls, servers = [], []
    for _ in range(run.args.steps):
        begin = time.perf_counter()
        servers.append(update(run, lanes, items))
        walls.append(time.perf_counter() - begin)
    seconds = sorted(walls)[len(walls) // 2]
    peak = run.server().peak
    run.found[shape, f"{kind} {'flat' if flat else 'shared'}"] = {"rate": tokens / seconds, "peak": peak}
    done = operations(config, sizes, flat, kind == "lora")
    slow = "attention is not compiled any more: see recompile_limit"
    run.row(name, tokens / seconds, "tok/s", seconds=seconds, spread=max(walls) - min(walls), first_s=warm,
            why=slow if run.server().warns("recompile_limit") else None, mfu=done / seconds / run.peak,
            peak_bytes=peak, protocol=1 - sum(servers) / sum(walls), operations=done,
            devices=opened["devices"], versions=opened["versions"],
            checkpointing=run.checkpointing)
    run.opened = (shape, kind)


def updates(run: Run, shape: str, kind: str) -> None:
    """Flat rows and shared prefixes, and the two compared."""
    measure(run, shape, kind, True)
    measure(run, shape, kind, False)
    flat, shared = (run.found.get((shape, f"{kind} {form}")) for form in ("flat", "shared"))
    if flat and shared:
        ops = [operations(fields(shape, run.tiny), run.sizes, form, kind == "lora") for form in (True, False)]
        sizes = run.sizes
        row = (sizes["shared"] + sizes["own"]) * sizes["samples"]
        tree = sizes["shared"] + sizes["samples"] * sizes["own"]
        compare(run, f"{shape} {kind}, shared prefixes against flat rows", shared, flat, "flat rows",
                TARGETS["shared"] * row / tree, tokens_saved=row / tree, operations_saved=ops[0] / ops[1])


def compare(run: Run, name: str, ours: dict[str, float], peer: dict[str, float], of: str, target: float,
            **more: Any) -> None:
    """A row with the ratio of two rates."""
    run.row(name, ours["rate"], "tok/s", peer=of, peer_value=peer["rate"], ratio=ours["rate"] / peer["rate"],
            target=run.hoped(target), peak_bytes=ours["peak"], peer_peak_bytes=peer["peak"], **more)


# peers


def peer(run: Run, script: str, specs: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Lines of a peer, and why there are no more."""
    if not run.roomy:
        run.free()
    left = run.until - time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        text = json.dumps([one | {"limit_s": left / 3} for one in specs])
        command = [sys.executable, str(PEERS / script), text]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, text=True)
        try:
            out, _ = process.communicate(timeout=max(left, 0.1))
            why = "" if process.returncode == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            why = f"cut after {left:.0f} s"
        errors.seek(0)
        lines = [line for line in errors.read().splitlines() if line.strip()]
    if why and lines:
        why += f": {lines[-1][:300]}"
    return [json.loads(line) for line in out.splitlines() if line.startswith('{"version"')], why


def against(run: Run, shape: str, script: str, label: str) -> None:
    """The same rows through a peer, full and LoRA."""
    kinds = ("full", "lora")
    base = run.sizes | {"part": "update", "model": str(run.model(shape)), "batch": run.sizes["samples"],
                        "steps": run.args.steps, "device": run.device, "dtype": "bf16",
                        "checkpointing": run.checkpointing}
    lines, why = peer(run, script, [base | {"lora": LORA if kind == "lora" else None} for kind in kinds])
    sizes, config = run.sizes, fields(shape, run.tiny)
    tokens = sizes["tasks"] * sizes["samples"] * (sizes["shared"] + sizes["own"])
    for index, kind in enumerate(kinds):
        if index >= len(lines):
            run.row(f"{shape} {kind}, {label}", unit="tok/s", why=why or "it wrote no result")
            continue
        line = lines[index]
        seconds = sorted(line["values"])[len(line["values"]) // 2]
        found = {"rate": tokens / seconds, "peak": line["peak_bytes"]}
        done = operations(config, sizes, True, kind == "lora")
        run.row(f"{shape} {kind}, {label}: {line['version']}", found["rate"], "tok/s", seconds=seconds,
                mfu=done / seconds / run.peak, peak_bytes=found["peak"])
        for form in ("flat", "shared"):
            ours = run.found.get((shape, f"{kind} {form}"))
            if ours:
                compare(run, f"{shape} {kind}, {form} against {label}", ours, found, line["version"],
                        TARGETS[f"{'TRL' if 'TRL' in label else 'plain'} {form}"])


def plain(run: Run, shape: str) -> None:
    """A plain loop."""
    against(run, shape, "torch_update.py", "plain loop")
    if run.cuda:
        # The next shape is compiled in a new process.
        run.free()


def trl(run: Run, shape: str) -> None:
    """TRL's update."""
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        run.row(f"{shape}, TRL's update", unit="tok/s", met=False, skipped=True,
                why=f"not in this Python: {', '.join(missing)} (trl 1.16.0 is known to work; see $WHEELS)")
        return
    against(run, shape, "trl_update.py", "TRL's update")


# files and memory


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def trained(run: Run, shape: str) -> None:
    """Opens a model and takes a short update, so that it has moments."""
    from gpu_server import waves
    from torch_update import rows

    sizes = run.sizes
    one = sizes | {"tasks": 1}
    whole = rows(one, fields(shape, run.tiny)["vocab_size"]).numpy()
    most = sizes["samples"] * (sizes["shared"] + sizes["own"])
    run.open(run.model(shape), most, sharing="flat", attention="sdpa")
    update(run, list(waves(whole, sizes["samples"], sizes["shared"], 1)), len(whole) * sizes["own"])
    run.opened = (shape, "full")


def files(run: Run, shape: str) -> None:
    """Save with moments, load, publish, of a model whose weights are all trained."""
    if run.opened != (shape, "full") or run.held is None or not run.held.alive:
        trained(run, shape)
    saved = run.folder / "saved"
    for verb, form in (("save", {}), ("load", {"number": run.number}),
                       ("publish", {"form": "full", "dtype": "bf16", "untied": False})):
        folder = saved if verb != "publish" else run.folder / "published"
        folder.mkdir(exist_ok=True)
        answer = run.call(verb, folder=str(folder), **form)
        done = size_of(folder)
        seconds = answer["seconds"]
        run.row(f"{shape} full, {verb}", seconds, "s", bytes=done, gb_per_s=done / 1e9 / seconds,
                note=f"{done / 1e9:.2f} GB", folder=str(run.args.work or tempfile.gettempdir()))
    for folder in (saved, run.folder / "published"):
        shutil.rmtree(folder, ignore_errors=True)


def too_large(run: Run) -> dict[str, Any]:
    """Opens a model and returns a lane whose activations do not fit."""
    import numpy as np
    from gpu_server import lane

    config = fields("0.5B", run.tiny)
    if run.cuda:
        # A bf16 decoder keeps at least this many bytes of a token for its backward pass.
        each = 2 * config["num_hidden_layers"] * (8 * config["hidden_size"] + 4 * config["intermediate_size"])
        length, count = (512, 2) if run.tiny else (16_384, int(1.5 * run.memory / each / 16_384) + 1)
    else:
        length, count = 4096, 16
    total = length * count
    run.open(run.model("0.5B"), total, sharing="flat", attention="sdpa", checkpointing="none")
    if not run.cuda:
        # The server may map only little more than it has.
        pid = run.server().process.pid
        mapped = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (mapped + (32 << 20),) * 2)
    tokens = np.arange(total) * 7919 % config["vocab_size"]
    segments = [(i * length, length, 0, 0) for i in range(count)]
    return lane(tokens, segments, [i * length for i in range(count)], [1] * count)


def memory(run: Run) -> None:
    """A lane that is too large: the error names the key to change."""
    from gpu_server import Failed

    one = too_large(run)
    name = "out of memory is reported as `memory`"
    try:
        run.call("forward", wave=[one], entropies=False, **TRAINED)
        run.row(name, 0.0, "", met=False, why="the lane fitted")
    except Failed as failed:
        run.row(name, float(failed.kind == "memory"), "", met=failed.kind == "memory", why=str(failed)[:400])


#: Parts in the order of their value, with their limits in seconds.
PARTS: list[tuple[str, float, Callable[[Run], None]]] = [
    ("golden", 130, golden),
    ("full 0.5B", 120, lambda run: updates(run, "0.5B", "full")),
    ("files 0.5B", 50, lambda run: files(run, "0.5B")),
    ("lora 0.5B", 70, lambda run: updates(run, "0.5B", "lora")),
    ("plain 0.5B", 70, lambda run: plain(run, "0.5B")),
    ("full 1.5B", 110, lambda run: updates(run, "1.5B", "full")),
    ("lora 1.5B", 80, lambda run: updates(run, "1.5B", "lora")),
    ("plain 1.5B", 70, lambda run: plain(run, "1.5B")),
    ("trl 1.5B", 70, lambda run: trl(run, "1.5B")),
    ("trl 0.5B", 50, lambda run: trl(run, "0.5B")),
    ("files 1.5B", 60, lambda run: files(run, "1.5B")),
    ("memory", 40, memory),
]


def parts(run: Run) -> None:
    """Runs all parts, each within its limit."""
    from gpu_server import Cut

    for name, limit, call in PARTS:
        if run.args.only and not any(name.startswith(only) for only in run.args.only):
            continue
        begin = time.monotonic()
        run.until = min(begin + limit, run.end)
        if begin >= run.end - 3:
            run.row(name, why=f"not begun: {run.args.limit:.0f} s are over")
            continue
        try:
            call(run)
        except Cut as cut:
            run.row(name, why=f"cut after {time.monotonic() - begin:.0f} of {run.until - begin:.0f} s: {cut}")
        except Exception as error:  # a part that fails is a row
            run.row(name, why=f"{type(error).__name__}: {str(error)[-500:]}")
            if "out of memory" in str(error).lower() or getattr(error, "kind", "") in ("rank", "broken"):
                run.free()
    run.free()


def arguments() -> argparse.Namespace:
    """The command line."""
    about = "Measures the PyTorch trainer on one GPU."
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=about)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: speeds mean nothing")
    parser.add_argument("--out", default="gpu-check", help="folder of rows.jsonl and table.txt")
    parser.add_argument("--work", help="folder for models and checkpoints (30 GB); default: the system's")
    parser.add_argument("--limit", type=float, default=560, help="seconds of all parts together")
    parser.add_argument("--steps", type=int, default=3, help="measured updates, after one more")
    names = ", ".join(name for name, _, _ in PARTS)
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"beginnings of parts: {names}")
    return parser.parse_args()


def refuse(why: str) -> int:
    """What is needed, for people."""
    print(f"gpu_check: {why}\n  needs: one GPU (24 GB for 0.5B, 80 GB for all parts), a Python with "
          f"{', '.join(NEEDED)}; no network.\n  hint: `--device cpu --tiny` tries every part without a GPU",
          file=sys.stderr)
    return 3


def main() -> int:
    """Runs the check; its exit code."""
    args = arguments()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return refuse(f"{sys.executable} lacks {', '.join(missing)}")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if not args.tiny:
            return refuse("the shapes are too large for a CPU")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        return refuse(f"torch {torch.__version__} sees no GPU")
    run = Run(args, args.device)
    run.row("machine", run.peak / 1e12, "TFLOP/s", device=run.name,
            note=f"{run.name}; peak for MFU: {run.peak_source}", memory_bytes=run.memory,
            versions={name: importlib.metadata.version(name) for name in NEEDED}, sizes=run.sizes)
    parts(run)
    failed = [row for row in run.rows if row["value"] is None and not row.get("skipped")]
    wrong = [row for row in run.rows if row["name"].startswith("golden") and not row.get("met", True)]
    seconds = time.monotonic() - run.begin
    table = "\n".join(text_of(row) for row in run.rows)
    (run.out / "table.txt").write_text(f"{run.name}, {seconds:.0f} s\n{table}\n", encoding="utf-8")
    print(f"\n{len(run.rows)} rows in {run.out}, {len(failed)} without a value, {seconds:.0f} s", flush=True)
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
