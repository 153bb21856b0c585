"""Measures tenants of a Tinker service: the time of their jobs at once, and one after another, and the memory of each.

    .cache/venv-tinker/bin/python scripts/tinker_tenants.py --url http://127.0.0.1:8000 --model NAME --pid PID

A job is a run of reinforcement learning with LoRA: in each step it samples from the newest weights, computes one
`forward_backward` and one `optim_step`. All jobs have their own model. Throughput counts sampled and trained tokens. With
`--pid`, the growth of the server's resident memory by each further model that was trained and rests is compared with its
adapters and their two moments.
"""

import argparse
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import tinker
from tinker import types


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, from /proc (proc(5))."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"--pid {pid}: no such process on this machine")


def job(service: tinker.ServiceClient, options: argparse.Namespace, seed: int) -> int:
    """One tenant's run; returns its sampled and trained tokens."""
    training = service.create_lora_training_client(options.model, rank=options.rank, seed=seed).result()
    random = np.random.default_rng(seed)
    prompt = random.integers(300, 20_000, options.prompt).tolist()
    tokens = 0
    for step in range(options.steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=options.sample, seed=seed * 1000 + step, stop=[])
        answer = sampler.sample(types.ModelInput.from_ints(prompt), options.group, params).result()
        data = []
        for sequence in answer.sequences:
            whole = prompt + list(sequence.tokens)
            first = len(prompt) - 1
            logprobs = np.zeros(len(whole) - 1, np.float32)
            logprobs[first:] = sequence.logprobs
            advantages = np.zeros(len(whole) - 1, np.float32)
            advantages[first:] = random.normal()
            inputs = {"target_tokens": np.array(whole[1:], np.int64), "logprobs": logprobs, "advantages": advantages}
            tensors = {name: types.TensorData.from_numpy(value) for name, value in inputs.items()}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=tensors))
            tokens += len(sequence.tokens) + len(whole)
        backward = training.forward_backward(data, "importance_sampling")
        update = training.optim_step(types.AdamParams(learning_rate=1e-5))
        backward.result()
        update.result()
    return tokens


def timed(options: argparse.Namespace, tenants: int, together: bool) -> tuple[float, int]:
    """Seconds and tokens of `tenants` jobs."""
    services = [tinker.ServiceClient(base_url=options.url, api_key=options.key) for _ in range(tenants)]
    tokens = [0] * tenants

    def run(index: int) -> None:
        tokens[index] = job(services[index], options, index)

    begin = time.monotonic()
    threads = [threading.Thread(target=run, args=(index,)) for index in range(tenants)]
    for thread in threads:
        thread.start()
        if not together:
            thread.join()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begin
    for service in services:
        service.close("success").result()
    if not all(tokens):
        raise SystemExit("a job failed; its error is above")
    return seconds, sum(tokens)


def grown_bytes(options: argparse.Namespace) -> tuple[float, int]:
    """Resident bytes of a further resting model, and those of its adapters and moments."""
    service = tinker.ServiceClient(base_url=options.url, api_key=options.key)
    data = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array([6, 7, 8], np.int64))},
    )
    models, sizes = [], []
    few, many = 8, 24
    for number in range(many):
        training = service.create_lora_training_client(options.model, rank=options.rank, seed=number).result()
        training.forward_backward([data], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-5)).result()
        models.append(training)
        sizes.append(resident_bytes(options.pid))
    service.close("success").result()
    return (sizes[many - 1] - sizes[few - 1]) / (many - few), 3 * 4 * options.adapter_values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default=os.environ.get("TINKER_BASE_URL"))
    parser.add_argument("--key", default=os.environ.get("TINKER_API_KEY"))
    parser.add_argument("--model", required=True, help="name of the base model at the service")
    parser.add_argument("--pid", type=int, help="process of the server, for its memory")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--sample", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--group", type=int, default=2, help="samples of a step")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--adapter-values", type=int, default=2_840_064, help="values of one model's adapters; default: SmolLM2-135M, rank 8")
    options = parser.parse_args()
    timed(options, 1, together=False)
    alone_s, tokens = timed(options, options.tenants, together=False)
    together_s, again = timed(options, options.tenants, together=True)
    result = {
        "tenants": options.tenants, "tokens": tokens, "one_after_another_s": round(alone_s, 1), "at_once_s": round(together_s, 1),
        "ratio": round((again / together_s) / (tokens / alone_s), 2),
    }  # fmt: skip
    if options.pid:
        grown, needed = grown_bytes(options)
        result |= {"further_model_mib": round(grown / 2**20, 1), "adapter_and_moments_mib": round(needed / 2**20, 1)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
