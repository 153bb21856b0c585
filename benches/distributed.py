"""One process against several on the same cores: throughput, the times of the hops between them, and the plan.

Pairs of runs train the same tiny model by the same recipe with the same seed: one process, and an owner with rollout workers that
it starts itself (`[launch]`). With `--engine` a further process serves the newest weights. All processes of a run are pinned to
the same cores, so that the ratio is what the hops cost. Pairs alternate which run is first. Needs Linux, Python 3.10 and a
`sinew` program, nothing else:

    python3 benches/distributed.py target/release/sinew
    python3 benches/distributed.py target/release/sinew --pairs 5 --cores 0,1 --out /tmp/distributed

Prints tables; with `--json` an object a line. The times of hops are those of the program (`hops` in metrics.jsonl). The times of
the last one-process run and of the last run on workers are written as calibration files (`sinew sim --calibrate RUN --write FILE`),
and the plan of the recipe with each is held against the run on workers (`sinew sim RECIPE --calibration FILE --against RUN`).

The ratio is of trained episodes a second, from the end of the first step to the end of the last: what a process needs to start,
and the first step, which waits for it, are left out. Exit code 1 if the median ratio is below `--least`.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

RECIPE = """
name = "distributed"
seed = {seed}
model = {{ type = "scratch", d_model = {width}, layers = 4, heads = {heads}, kv_heads = 2, d_ff = {ff} }}
env = {{ type = "tiny" }}
algorithm = {{ type = "grpo" }}

[rollout]
tasks_per_step = {groups}
group_size = 8
max_in_flight = {flight}
max_turns = 4
max_turn_tokens = 3
max_context_tokens = 64

[train]
steps = {steps}
learning_rate = 4e-4
micro_batch_tokens = 8192
checkpoint_every = 1000

[eval]
tasks = 1
episodes_per_task = 1
every = 1000

[engine]
kv_tokens = 32768
max_num_seqs = 128
max_batched_tokens = 1024
"""
LAUNCH = """
[launch]
[launch.rollout]
count = {workers}
"""
#: Names of the hops in the order of an episode.
HOPS = {
    "put": "owner puts tickets",
    "lease": "worker gets tickets",
    "ack": "worker brings traces",
    "take": "owner checks and stores traces",
    "report": "worker reports",
    "weights": "new weights: named to loaded",
}
PARTS = ("rollout_s", "train_s", "publish_s", "checkpoint_s")


def pinned(command, cores, **more):
    """A process on these cores; the processes that it starts are on them, too."""
    return subprocess.Popen([str(c) for c in command], preexec_fn=lambda: os.sched_setaffinity(0, cores), text=True, **more)


def others_cpu(cores):
    """Busy seconds of these cores so far, whoever used them."""
    ticks = os.sysconf("SC_CLK_TCK")
    busy = 0.0
    for line in pathlib.Path("/proc/stat").read_text().splitlines():
        fields = line.split()
        if fields[0].startswith("cpu") and fields[0][3:].isdigit() and int(fields[0][3:]) in cores:
            numbers = [int(n) for n in fields[1:]]
            busy += (sum(numbers[:8]) - numbers[3] - numbers[4]) / ticks
    return busy


def own_cpu():
    """Seconds of the children that have ended."""
    usage = os.times()
    return usage.children_user + usage.children_system


class Run:
    """A finished run."""

    def __init__(self, folder, took_s, others):
        self.folder, self.others = folder, others
        self.steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        later = self.steps[1:]
        self.step_s = (self.steps[-1]["wall_s"] - self.steps[0]["wall_s"]) / len(later)
        self.episodes_per_s = statistics.mean(s["rollout"]["episodes"] for s in later) / self.step_s
        self.tokens_per_s = statistics.mean(s["trained_tokens"] for s in later) / self.step_s
        self.parts = {name: statistics.mean(s[name] for s in later) for name in PARTS}
        self.busy_s = statistics.mean(s["waits"]["engine_busy_s"] for s in later)
        self.took_s = took_s

    def hops(self):
        """Calls, items and milliseconds of each hop over all steps."""
        sums = {}
        for step in self.steps:
            for name, hop in step.get("hops", {}).items():
                if hop["calls"]:
                    own = sums.setdefault(name, [0, 0, 0.0])
                    own[0] += hop["calls"]
                    own[1] += hop["items"]
                    own[2] += hop["total_s"]
        return sums


def train(args, recipe, folder, cores):
    """Trains a recipe, and its workers end with it."""
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    command = ["nice", "-n", args.nice, args.sinew, "train", recipe, "--run-dir", folder, "--json"]
    began, busy, own = time.monotonic(), others_cpu(cores), own_cpu()
    with open(log, "w") as out:
        main = pinned(command, cores, stdout=out, stderr=subprocess.STDOUT)
        engine = None
        try:
            if args.engine and "workers" in folder.name:
                engine = follow(args, folder, cores, main)
            if main.wait(timeout=args.limit):
                raise SystemExit(f"{recipe} ended with {main.returncode}:\n{log.read_text()[-2000:]}")
        finally:
            for process in (main, engine):
                if process and process.poll() is None:
                    process.terminate()
                    process.wait(timeout=60)
    took_s = time.monotonic() - began
    others = others_cpu(cores) - busy - (own_cpu() - own)
    return Run(folder, took_s, max(0.0, others) / took_s / len(cores))


def follow(args, folder, cores, main):
    """A server of the run's newest weights, as a further process."""
    place = folder / "control.json"
    while not place.exists():
        if main.poll() is not None:
            return None
        time.sleep(0.02)
    owner = json.loads(place.read_text())
    command = ["nice", "-n", args.nice, args.sinew, "worker", "--role", "engine", "--owner", owner["url"], "--token-file",
               owner["token_file"], "--listen", "127.0.0.1:0", "--json"]
    return pinned(command, cores, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def spread(values):
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def say(args, line, text):
    print(json.dumps(line) if args.json else text, flush=True)


def pairs(args, recipes, out, cores):
    """Alternating pairs of runs: ratio of throughput, and the runs."""
    ratios, runs = [], {"one": [], "workers": []}
    for pair in range(args.pairs):
        for name in ("one", "workers") if pair % 2 == 0 else ("workers", "one"):
            runs[name].append(train(args, recipes[name], out / f"{name}-{pair}", cores))
        one, workers = runs["one"][-1], runs["workers"][-1]
        ratios.append(workers.episodes_per_s / one.episodes_per_s)
        for name, run in (("one", one), ("workers", workers)):
            parts = "  ".join(f"{k[:-2]} {v:.3f}" for k, v in run.parts.items())
            line = {"name": f"distributed/{name}", "pair": pair, "step_s": run.step_s, "episodes_per_s": run.episodes_per_s,
                    "trained_tokens_per_s": run.tokens_per_s, "engine_busy_s": run.busy_s, "others_cpu": run.others,
                    **run.parts}
            say(args, line, f"{pair} {name:8} step {run.step_s:.3f} s  {parts}  engine {run.busy_s:.3f}  "
                            f"others use {run.others:.0%} of the cores")
        say(args, {"name": "distributed/ratio", "pair": pair, "ratio": ratios[-1]}, f"{pair} ratio    {ratios[-1]:.3f}")
    return ratios, runs


def hop_table(args, runs):
    """Mean milliseconds of each hop over all runs on workers."""
    sums = [run.hops() for run in runs]
    if not any(sums):
        say(args, {"name": "distributed/hops", "why": "this program records none"}, "hops: this program records none")
        return
    for name, what in HOPS.items():
        of = [hops[name] for hops in sums if name in hops]
        if not of:
            continue
        calls, items = sum(o[0] for o in of), sum(o[1] for o in of)
        means = [1000 * o[2] / o[0] for o in of]
        steps = sum(len(run.steps) for run in runs)
        each = 1000 * sum(o[2] for o in of) / max(1, items)
        line = {"name": f"distributed/hop/{name}", "calls_a_step": calls / steps, "items_a_call": items / calls,
                "ms_a_call": statistics.median(means), "ms_a_call_spread": [min(means), max(means)], "ms_an_item": each}
        say(args, line, f"hop {name:8} {what:32} {statistics.median(means):8.2f} ms a call ({min(means):.2f} to {max(means):.2f})  "
                        f"{each:7.2f} ms each  {calls / steps:6.1f} calls a step")


def plans(args, recipes, out, runs):
    """Calibration files of the last runs, and the plan of the recipe by each, next to the last run on workers."""
    measured = runs["workers"][-1]
    for name in ("one", "workers"):
        file = out / f"calibration-{name}.toml"
        fitted = subprocess.run([args.sinew, "sim", "--calibrate", runs[name][-1].folder, "--write", file, "--json"],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if fitted.returncode:
            say(args, {"name": "distributed/plan", "why": fitted.stderr.strip()}, f"no plan: {fitted.stderr.strip()[:300]}")
            return
        plan = subprocess.run([args.sinew, "sim", recipes["workers"], "--calibration", file, "--against", measured.folder,
                               "--no-advice", "--json"], stdout=subprocess.PIPE, check=True, text=True)
        told = json.loads(plan.stdout.splitlines()[-1])
        for row in told["against"]["rows"]:
            line = {"name": "distributed/plan", "times_of": name, **row, "file": str(file)}
            say(args, line, f"plan by times of {name:8} {row['what']:20} measured {row['measured']:9.3f}  "
                            f"predicted {row['predicted']:9.3f}  {row['error']:+.1%}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sinew", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=16, help="groups of 8 episodes in a step")
    parser.add_argument("--width", type=int, default=320, help="width of the model, a multiple of 32")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", action="store_true", help="a further process that serves the newest weights")
    parser.add_argument("--cores", default="0,1", help="cores of all processes of a run")
    parser.add_argument("--nice", default="0")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a run, at most")
    parser.add_argument("--least", type=float, default=0.9, help="median ratio below which the exit code is 1")
    parser.add_argument("--out", type=pathlib.Path, help="folder for runs and calibration files; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.sinew = args.sinew.resolve()
    cores = {int(core) for core in args.cores.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        out = (args.out or pathlib.Path(folder)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        # Workers have 32 places each.
        text = RECIPE.format(seed=1, groups=args.groups, steps=args.steps, flight=min(8 * args.groups, 32 * args.workers),
                             width=args.width, heads=args.width // 32, ff=args.width * 14 // 5)
        recipes = {"one": out / "one.toml", "workers": out / "workers.toml"}
        recipes["one"].write_text(text)
        recipes["workers"].write_text(text + LAUNCH.format(workers=args.workers))
        ratios, runs = pairs(args, recipes, out, cores)
        hop_table(args, runs["workers"])
        plans(args, recipes, out, runs)
    median = statistics.median(ratios)
    say(args, {"name": "distributed/ratio", "value": median, "spread": [min(ratios), max(ratios)], "target": args.least,
               "met": median >= args.least}, f"ratio of throughput, workers to one process: {spread(ratios)}, target {args.least}")
    return 0 if median >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
