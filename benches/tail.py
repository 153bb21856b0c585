"""Synchronous steps with a long tail: in the order of the draws, longest first, with more groups than are trained.

Each run trains the same tiny model from scratch on as many groups, whole and sampled by the weights of their step, against an
HTTP environment whose calls sleep. How long depends on the task (lognormal, a tenth of the tasks takes 5 times the median or
more), and for a quarter as much on the episode. All runs have the same number of places for episodes: by default as many as
a plain step has episodes. Needs Python 3.10 and a `sinew` program, nothing else:

    python3 benches/tail.py target/release/sinew
    python3 benches/tail.py target/release/sinew --places 32 --tasks 48

With `--tasks` there are so many of them, so that a run comes back to each.

Prints an object a line: `name`, `value` (episodes trained a second of rollout), `unit`, `ratio` (of this run to plain `sync`
with the same seed), and what the run showed.
"""

import argparse
import collections
import hashlib
import json
import math
import pathlib
import random
import subprocess
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TURNS = 2
GROUPS, SIZE = 16, 4
RECIPE = """
name = "tail-bench"
seed = {seed}
model = {{ type = "scratch", d_model = 32, layers = 1, heads = 2, kv_heads = 1, d_ff = 64 }}

[env]
type = "http"
url = "{url}"

[tasks]
source = "{tasks}"

[rollout]
tasks_per_step = {groups}
group_size = {size}
max_in_flight = {places}
max_turns = {turns}
max_turn_tokens = 2
max_context_tokens = 256
{keys}

[algorithm]
type = "grpo"

[train]
steps = {steps}
checkpoint_every = 1000

[eval]
tasks = 1
"""
RUNS = {
    "sync": "",
    "sync, longest first": 'order = "longest_first"',
    "sync, over-sampled": "over_sample = 4",
    "sync, both": 'order = "longest_first"\nover_sample = 4',
}
SPREAD, NOISE, LONGEST = 1.3, 0.3, 20.0


def times(task, episode, call):
    """How many times the median a call takes, from names alone."""
    def normal(key):
        return random.Random(hashlib.blake2b(key.encode()).digest()).gauss(0, 1)
    return min(LONGEST, math.exp(SPREAD * normal(f"task {task}") + NOISE * normal(f"{episode} {call}")))


class World(BaseHTTPRequestHandler):
    """An episode of TURNS answers; the more digits among them, the better."""

    protocol_version = "HTTP/1.1"
    episodes = {}
    median = 0.5

    def answer(self, body, status=200):
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self):
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")

    def do_GET(self):
        self.answer({"name": "sleeper", "version": "1", "protocol": 1, "tools": [],
                     "max_episodes": 256, "lease_s": 60})

    def do_DELETE(self):
        self.episodes.pop(self.path.split("/")[2], None)
        self.answer(None, 204)

    def do_POST(self):
        body, parts = self.body(), self.path.strip("/").split("/")
        if len(parts) == 1:
            self.episodes[body["episode"]] = (body["task"]["id"], [])
            self.answer({})
            return
        task, calls = self.episodes.get(parts[1], ("", []))
        if parts[2] == "calls":
            time.sleep(self.median * times(task, parts[1], len(calls)))
            calls.append(any(c.isdigit() for c in body.get("text", "")))
            self.answer({"content": "go on", "done": len(calls) >= TURNS})
        elif parts[2] == "score":
            share = sum(calls) / TURNS
            self.answer({"rewards": {"reward": share, "success": float(share == 1.0)}, "status": "scored"})
        else:
            self.answer(None, 204)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True


def run(sinew, folder, url, args, seed, keys):
    """One run; gives the seconds of its rollouts, its last line and its episodes stopped."""
    folder.mkdir()
    tasks = folder / "tasks.jsonl"
    count = args.tasks or GROUPS * args.steps * 3 // 2
    # The tasks of another seed are other ones.
    rows = (json.dumps({"id": f"s{seed}-t{n}", "prompt": str(n)}) for n in range(count))
    tasks.write_text("".join(f"{row}\n" for row in rows))
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(url=url, tasks=tasks, steps=args.steps, seed=seed, keys=keys, groups=GROUPS,
                                    size=SIZE, places=args.places, turns=TURNS))
    command = [sinew, "train", recipe, "--run-dir", folder / "run", "--json"]
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    rollout = sum(r["rollout_s"] for r in records)
    stopped = sum(r["dropped"].get("stopped: enough groups", 0) for r in records)
    return rollout, stopped, json.loads(out.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sinew", type=pathlib.Path)
    # Four steps put off what the fifth runs.
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--places", type=int, default=GROUPS * SIZE)
    parser.add_argument("--tasks", type=int)
    parser.add_argument("--median", type=float, default=0.5, help="seconds of a call")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    args = parser.parse_args()
    World.median = args.median
    server = Server(("127.0.0.1", 0), World)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, ratios = f"http://127.0.0.1:{server.server_port}", collections.defaultdict(list)
    trained = args.steps * GROUPS * SIZE
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            plain = None
            for name, keys in ((name, RUNS[name]) for name in args.runs):
                place = pathlib.Path(folder) / f"{seed}-{name}"
                rollout, stopped, last = run(args.sinew.resolve(), place, url, args, seed, keys)
                plain = plain or rollout
                ratios[name].append(plain / rollout)
                print(json.dumps({
                    "name": f"tail/{name}", "seed": seed, "value": round(trained / rollout, 2), "unit": "episodes/s",
                    "ratio": round(plain / rollout, 2), "rollout_s": round(rollout, 1), "stopped": stopped,
                    "samples": last["samples"],
                }), flush=True)
    for name, of in ratios.items():
        mean, spread = sum(of) / len(of), (max(of) - min(of)) / 2
        print(json.dumps({"name": f"tail/{name}", "value": round(mean, 2), "unit": "x", "spread": round(spread, 2)}))


if __name__ == "__main__":
    main()
