"""A reward server in plain Python: `python3 reward_server.py [PORT]`, then `reward = "http://127.0.0.1:PORT/score"`.

Replace `score`. It gets one sample: the task with its columns in `task["data"]`, `output`, `messages`, `calls` and
`metrics`. It returns a number, `None` to abstain, or a dict with `reward` and optionally `parts` (metrics) or `reason`.
With the variable REWARD_KEY set, requests must have it as bearer token.
"""

import hmac
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROTOCOL = 1
MAX_BODY = 256 << 20


def score(sample):
    """1 for an output that holds the expected answer; abstains where a task has none."""
    expected = sample["task"]["data"].get("answer")
    if expected is None:
        return None
    return float(str(expected) in sample["output"])


def is_sample(sample):
    """Whether it has what `score` reads."""
    return (
        isinstance(sample, dict)
        and isinstance(sample.get("task"), dict)
        and isinstance(sample["task"].get("data"), dict)
        and isinstance(sample.get("output"), str)
    )


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        key = os.environ.get("REWARD_KEY")
        given = self.headers.get("Authorization", "")
        if key and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            return self.answer(401, {"error": "wrong key"})
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY:
            return self.answer(413, {"error": "a body of up to 256 MiB with its length is expected"})
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError:
            return self.answer(400, {"error": "no JSON"})
        samples = body.get("samples") if isinstance(body, dict) else None
        if not isinstance(samples, list) or body.get("protocol") != PROTOCOL:
            return self.answer(400, {"error": f"protocol {PROTOCOL} and a list of samples are expected"})
        if not all(is_sample(sample) for sample in samples):
            return self.answer(400, {"error": "a sample is broken"})
        self.answer(200, {"scores": [score(sample) for sample in samples]})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Quiet: a run sends thousands of requests."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    # Connections that wait to be accepted: a batch sends more at once than the default of 5.
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(f"http://127.0.0.1:{server.server_port}/score", flush=True)
    server.serve_forever()
