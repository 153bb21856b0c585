"""The rollout travels as the API key: one client, made once, serves many rollouts.

A service that works on many requests at a time makes its client as always, with a function as key::

    client = AsyncOpenAI(api_key=sinew.key)     # asked at each call
    app.add_middleware(sinew.asgi)              # keeps the key of each request

`OPENAI_BASE_URL` is the gateway's address, the same for all rollouts. Outside of training there is no
rollout: the key is that of `OPENAI_API_KEY`, and without `OPENAI_BASE_URL` the calls go where they
always went.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Callable

from .errors import RolloutError

#: What the key of a rollout begins with; other keys are not ours, and are left alone.
PREFIX = "sk-sinew-"

_Scope = MutableMapping[str, Any]
_Asgi = Callable[[_Scope, Any, Any], Awaitable[None]]

_key: ContextVar[str | None] = ContextVar("sinew_key", default=None)


def key_sync() -> str:
    """The key of the rollout that the calling code belongs to, else `OPENAI_API_KEY`."""
    found = _key.get() or os.environ.get("OPENAI_API_KEY")
    if not found:
        raise RolloutError(
            "no rollout and no OPENAI_API_KEY: outside of training set the normal key; in training "
            "the request must come with a rollout's key (sinew.asgi), or run inside `with rollout:`"
        )
    return found


async def key() -> str:
    """`key_sync()` as clients for asyncio want it: `AsyncOpenAI(api_key=sinew.key)`."""
    return key_sync()


@contextmanager
def using(value: str | None) -> Iterator[None]:
    """Calls inside belong to the rollout of this key; with `None`, or a key that is no rollout's,
    to none."""
    known = value if value is not None and value.startswith(PREFIX) else None
    token = _key.set(known)
    try:
        yield
    finally:
        _key.reset(token)


def _bearer(scope: _Scope) -> str | None:
    for name, value in scope.get("headers", ()):
        if name.lower() == b"authorization":
            scheme, _, rest = value.decode("latin-1").partition(" ")
            return rest.strip() if scheme.lower() == "bearer" else None
    return None


def asgi(app: _Asgi) -> _Asgi:
    """Middleware for ASGI (FastAPI, Starlette, ...): what a request's handler does belongs to the
    rollout whose key the request has in `Authorization`."""

    async def with_key(scope: _Scope, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await app(scope, receive, send)
            return
        with using(_bearer(scope)):
            await app(scope, receive, send)

    return with_key
