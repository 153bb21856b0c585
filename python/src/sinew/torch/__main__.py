"""Start of one rank: `python -m sinew.torch`, with the variables of `torchrun`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

# Read when torch is imported: without it each lost connection prints a stack of C++ frames.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from .ranks import Prefixed, Ranks, Watch, watch_stdin  # noqa: E402

#: Longest wait for the answer to `close` to leave, in seconds.
ANSWER_S = 10.0


def token() -> bytes:
    """The bearer token."""
    path = os.environ.get("SINEW_TORCH_TOKEN_FILE", "")
    try:
        with open(path, "rb") as file:
            found = file.read().strip()
    except OSError as error:
        sys.exit(f"SINEW_TORCH_TOKEN_FILE is {path!r}, allowed is a readable file with the token ({error})")
    if not found:
        sys.exit(f"SINEW_TORCH_TOKEN_FILE is {path!r}, which is empty")
    return found


def listen_address() -> tuple[str, int]:
    """Host and port to listen at."""
    given = os.environ.get("SINEW_TORCH_LISTEN", "127.0.0.1:0")
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        sys.exit(f"SINEW_TORCH_LISTEN is {given!r}, allowed is HOST:PORT")
    return host.strip("[]"), int(port)


def write_ready(url: str) -> None:
    """Writes where the server listens, by rename."""
    path = os.environ.get("SINEW_TORCH_READY")
    if path:
        with open(path + ".part", "w", encoding="utf-8") as file:
            json.dump({"url": url}, file)
        os.replace(path + ".part", path)


def serve(ranks: Ranks, secret: bytes) -> None:
    """Rank 0: HTTP server, watch and the loop of commands."""
    from .commands import Commands, lead
    from .server import Desk, Server

    desk = Desk(Commands.verbs())
    watch = Watch(ranks, desk.fail)

    def status() -> dict[str, Any]:
        current = desk.current
        fields = ("host", "device", "phase", "since_s", "bytes")
        beats = [{"rank": i, **{f: beat.get(f) for f in fields}} for i, beat in enumerate(watch.beats)]
        return {
            "seq": desk.seq,
            "verb": current[0] if current else None,
            "since_s": time.monotonic() - current[1] if current else 0.0,
            "broken": desk.broken,
            "ranks": beats,
        }

    def end() -> None:
        ranks.store.add("close", 1)
        time.sleep(0.8)  # the other ranks look every 0.5 s
        os._exit(0)

    server = Server(listen_address(), secret, desk, status, end)
    watch.start()
    threading.Thread(target=server.serve_forever, daemon=True, name="http").start()
    write_ready(server.url)
    print(f"listens at {server.url}", file=sys.stderr)
    # The answer to `close` leaves on another thread.
    lead(ranks, Commands(ranks), desk).sent.wait(ANSWER_S)


def main() -> None:
    """Joins the ranks and serves until `close`."""
    rank = int(os.environ.get("RANK", "0"))
    watch_stdin()
    secret = token() if rank == 0 else b""
    sys.stdout = sys.stderr = Prefixed(sys.stderr, rank)
    ranks = Ranks()
    if ranks.rank == 0:
        serve(ranks, secret)
    else:
        from .commands import Commands, follow

        follow(ranks, Commands(ranks))
    os._exit(0)


if __name__ == "__main__":
    main()
