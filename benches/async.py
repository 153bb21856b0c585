"""Generation and training at once, measured where tools dominate: `train.mode` "sync", "one_step_off" and "async".

Each mode trains the same tiny model from scratch on as many episodes, against an HTTP environment whose calls sleep
between 50 and 1000 ms with a long tail. Needs Python 3.10 and a `sinew` program, nothing else:

    python3 benches/async.py target/release/sinew

Prints an object a line: `name`, `value` (wall time of the steps in seconds), `unit`, `ratio` (of sync to this mode), and what
the run showed. Wall times are from the first step's start to the last one's end: loading and measurements are left out.
"""

import argparse
import hashlib
import json
import pathlib
import subprocess
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TURNS = 3
RECIPE = """
name = "async-bench"
seed = 0
model = {{ type = "scratch", d_model = 64, layers = 2, heads = 4, kv_heads = 2, d_ff = 128 }}

[env]
type = "http"
url = "{url}"

[tasks]
source = "{tasks}"

[rollout]
tasks_per_step = 8
group_size = 4
max_in_flight = 256
max_turns = 3
max_turn_tokens = 2
max_context_tokens = 256

[algorithm]
type = "grpo"
correction = {{ type = "truncate", low = 0.0, high = 2.0 }}

[train]
mode = "{mode}"
{staleness}steps = {steps}
learning_rate = 3e-3
checkpoint_every = 1000

[eval]
tasks = 8
"""


def delay(key):
    """Seconds of a call, from its name alone: a third of a second on average, a second for one in ten."""
    u = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") / 2**32
    return min(1.0, 0.05 / (1.0 - u) ** 1.3)


class World(BaseHTTPRequestHandler):
    """An episode of TURNS answers; the more digits among them, the better."""

    protocol_version = "HTTP/1.1"
    episodes = {}

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
            self.episodes[body["episode"]] = []
            self.answer({})
        elif parts[2] == "calls":
            calls = self.episodes[parts[1]]
            time.sleep(delay(f"{parts[1]} {len(calls)}"))
            text = body.get("text", "")
            calls.append(any(c.isdigit() for c in text))
            self.answer({"content": "go on", "done": len(calls) >= TURNS})
        elif parts[2] == "score":
            calls = self.episodes[parts[1]]
            share = sum(calls) / TURNS
            self.answer({"rewards": {"reward": share, "success": float(share == 1.0)}, "status": "scored"})
        else:
            self.answer(None, 204)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True


def run(sinew, folder, url, mode, steps):
    """One run; gives the seconds of its steps and its last line."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"id": f"t{n}", "prompt": str(n)}) + "\n" for n in range(200)))
    staleness = "max_staleness = 2\n" if mode == "async" else ""
    recipe = folder / f"{mode}.toml"
    recipe.write_text(RECIPE.format(url=url, tasks=tasks, mode=mode, staleness=staleness, steps=steps))
    args = [sinew, "train", recipe, "--run-dir", folder / mode, "--json"]
    out = subprocess.run(args, stdout=subprocess.PIPE, check=True, text=True).stdout
    records = [json.loads(line) for line in (folder / mode / "metrics.jsonl").read_text().splitlines()]
    begun = records[0]["wall_s"] - sum(records[0][k] for k in ("rollout_s", "train_s", "publish_s"))
    return records[-1]["wall_s"] - begun, json.loads(out.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sinew", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    server = Server(("127.0.0.1", 0), World)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, sync = f"http://127.0.0.1:{server.server_port}", None
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("sync", "one_step_off", "async"):
            wall, last = run(args.sinew.resolve(), pathlib.Path(folder), url, mode, args.steps)
            sync = sync or wall
            print(json.dumps({
                "name": f"async/{mode}", "value": round(wall, 2), "unit": "s", "ratio": round(sync / wall, 2),
                "reward": last["eval"]["after"]["reward"], "samples": last["samples"],
                "staleness": last["staleness"], "waits": last["waits"],
            }), flush=True)


if __name__ == "__main__":
    main()
