"""The HTTP server of rank 0: authorization, order of commands (fence, seq), kept answers, status.

HTTP threads only queue commands and wait; the main thread computes them one at a time.
"""

from __future__ import annotations

import hmac
import queue
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from .errors import STATUS, Refused, wrong

BODY_LIMIT = 1 << 30
LIMIT_U64 = 1 << 64


class Job:
    """A command in the queue, and its answer when it is done."""

    def __init__(self, verb: str, body: dict[str, Any]) -> None:
        self.verb, self.body = verb, body
        self.done, self.sent = threading.Event(), threading.Event()
        self.status, self.answer = 200, b""

    def finish(self, answer: dict[str, Any]) -> None:
        """Success."""
        if not self.done.is_set():
            self.status, self.answer = 200, msgspec.msgpack.encode(answer)
            self.done.set()

    def fail(self, error: dict[str, Any]) -> None:
        """Failure; the first end counts."""
        if not self.done.is_set():
            self.status, self.answer = STATUS[error["kind"]], msgspec.msgpack.encode({"error": error})
            self.done.set()


class Desk:
    """Decides which commands run, and keeps the last answer."""

    def __init__(self, verbs: set[str]) -> None:
        self.verbs = verbs
        self.lock = threading.Lock()
        self.jobs: queue.Queue[Job] = queue.Queue()
        self.fence: int | None = None
        self.seq: int | None = None
        self.last: Job | None = None
        self.broken: dict[str, Any] | None = None
        self.current: tuple[str, float] | None = None
        self.running: Job | None = None

    def submit(self, verb: str, body: dict[str, Any]) -> Job:
        """The job of a command: a new one, or the last one if the command is repeated."""
        fence, seq = number(body, "fence"), number(body, "seq")
        with self.lock:
            if self.fence is not None and fence < self.fence:
                raise Refused(
                    f"fence is {fence}, allowed is {self.fence} or more: a later owner has taken over",
                    "fence",
                )
            repeated = self.last is not None and fence == self.fence and seq == self.seq
            if repeated and self.last is not None and self.last.verb == verb:
                return self.last
            if self.broken is not None:
                raise Refused(self.broken["text"], "broken", self.broken["rank"], self.broken["phase"])
            if verb != "open":
                if self.seq is None or fence != self.fence:
                    raise Refused("open comes first: it sets fence and seq", "gap")
                if seq != self.seq + 1:
                    raise Refused(f"seq is {seq}, allowed is {self.seq} (again) or {self.seq + 1}", "gap")
            self.fence, self.seq = fence, seq
            self.last = Job(verb, body)
            self.jobs.put(self.last)
            return self.last

    def next(self) -> Job:
        """The main thread's next job."""
        job = self.jobs.get()
        with self.lock:
            self.current, self.running = (job.verb, time.monotonic()), job
        return job

    def ended(self) -> None:
        """The main thread has no job."""
        with self.lock:
            self.current, self.running = None, None

    def fail(self, error: dict[str, Any]) -> None:
        """Marks the server broken and answers all that wait."""
        with self.lock:
            if self.broken is not None:
                return
            self.broken = error
            waiting = [job for job in (self.running, self.last, *self.jobs.queue) if job is not None]
        for job in waiting:
            job.fail(error)


def number(body: dict[str, Any], name: str) -> int:
    """A field that is a u64."""
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < LIMIT_U64:
        raise wrong(name, value, "a whole number from 0 to 2^64 - 1")
    return value


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: errors are in answers."""

    def _send(self, status: int, body: bytes, close: bool = False) -> None:
        head = f"HTTP/1.1 {status} {self.responses.get(status, ('Error',))[0]}\r\n"
        head += f"Content-Type: application/msgpack\r\nContent-Length: {len(body)}\r\n"
        if close:
            head += "Connection: close\r\n"
            self.close_connection = True
        self.wfile.write(head.encode() + b"\r\n" + body)

    def _refuse(self, error: Refused, status: int | None = None, close: bool = False) -> None:
        body = msgspec.msgpack.encode({"error": error.report()})
        self._send(status or STATUS[error.kind], body, close)

    def _authorized(self) -> bool:
        given = self.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, b"Bearer " + self.server.token)

    def do_GET(self) -> None:
        """Every command is a POST."""
        if not self._authorized():
            self._send(401, b"", close=True)
            return
        self._refuse(Refused("method is GET, allowed is POST"), 405, close=True)

    def do_POST(self) -> None:
        """Reads, checks and answers one command."""
        if not self._authorized():
            self._send(401, b"", close=True)
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or "Transfer-Encoding" in self.headers:
            self._refuse(wrong("Content-Length", length, "the body's length in bytes"), close=True)
            return
        if int(length) > BODY_LIMIT:
            self._refuse(wrong("Content-Length", int(length), f"at most {BODY_LIMIT} bytes"), 413, close=True)
            return
        data = self.rfile.read(int(length))
        if len(data) != int(length):
            self.close_connection = True
            return
        try:
            verb = self.path.strip("/")
            if verb == "status":
                self._send(200, msgspec.msgpack.encode(self.server.status()))
                return
            if verb not in self.server.desk.verbs:
                raise wrong("verb", verb, "one of " + ", ".join(sorted(self.server.desk.verbs | {"status"})))
            try:
                body = msgspec.msgpack.decode(data)
            except (msgspec.DecodeError, ValueError) as error:
                raise wrong("body", f"{len(data)} bytes", f"a MessagePack map ({error})") from error
            if not isinstance(body, dict):
                raise wrong("body", type(body).__name__, "a MessagePack map")
            del data
            if verb == "close" and self.server.desk.broken is not None:
                self._send(200, msgspec.msgpack.encode({}), close=True)
                self.server.end()
                return
            job = self.server.desk.submit(verb, body)
        except Refused as error:
            self._refuse(error)
            return
        job.done.wait()
        try:
            self._send(job.status, job.answer)
        finally:
            job.sent.set()


class Server(ThreadingHTTPServer):
    """Listens; `status` and `end` are set by the owner of the ranks."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], token: bytes, desk: Desk, status: Any, end: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.token, self.desk, self.status, self.end = token, desk, status, end
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        """Binds without the look-up of the host's name that `http.server` does."""
        import socketserver

        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Reports nothing: a client may close its connection at any time."""

    @property
    def url(self) -> str:
        """The address for clients."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}"
