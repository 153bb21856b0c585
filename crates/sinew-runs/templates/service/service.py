"""A service that runs already: it answers POST /ask, many requests at a time, with one model behind it.

The model's address is that of the gateway, the same for all requests. The key is that of the request: it says which
rollout the calls belong to. With the OpenAI SDK two lines do it, and change nothing outside of training:

    client = AsyncOpenAI(api_key=sinew.key)
    app.add_middleware(sinew.asgi)
"""

import json
import os
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")


def ask(text, authorization):
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": authorization, "Content-Type": "application/json"}
    request = urllib.request.Request(MODEL + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


class Service(BaseHTTPRequestHandler):
    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"answer": ask(question["text"], self.headers["Authorization"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        """One line for each request is too much."""


class Server(ThreadingHTTPServer):
    request_queue_size = 128


if __name__ == "__main__":
    Server(("127.0.0.1", int(os.environ.get("PORT", "9000"))), Service).serve_forever()
