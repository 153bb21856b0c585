"""JSON over HTTP/1.1, one kept connection for each thread."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.parse
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Mapping

from .errors import ApiError, ConnectionFailed, SinewError

if TYPE_CHECKING:
    from typing_extensions import Self

#: Statuses that say "later": the request was not carried out.
_LATER = frozenset({429, 503})
#: Longest wait between two tries, in seconds.
_MAX_WAIT_S = 8.0
#: Largest answer that is read, in bytes.
_MAX_BODY = 256 << 20


class _Connection(http.client.HTTPConnection):
    """Without Nagle's algorithm: a request goes out as soon as it is written."""

    def connect(self) -> None:
        super().connect()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Http:
    """Sends requests to one server. Safe to use from threads."""

    def __init__(self, url: str, token: str | None, timeout_s: float, tries: int) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.username is not None or parts.password is not None:
            # Neither is shown: the URL is part of every error.
            raise SinewError("url has a user or a password: give the token as `token`")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SinewError(f"url is {url!r}: expected http://HOST:PORT or https://HOST:PORT")
        if not timeout_s > 0:
            raise SinewError(f"timeout_s is {timeout_s}: expected a number of seconds above 0")
        if tries < 1:
            raise SinewError(f"tries is {tries}: expected 1 or more")
        self.url = url.rstrip("/")
        self._parts = parts
        self._prefix = parts.path.rstrip("/")
        self._token = None if token is None else _plain(token)
        self._timeout_s = timeout_s
        self._tries = tries
        self._local = threading.local()
        # A thread that ends takes its connection along.
        self._all: weakref.WeakSet[http.client.HTTPConnection] = weakref.WeakSet()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Closes every connection."""
        with self._lock:
            connections = list(self._all)
            self._all.clear()
        for connection in connections:
            connection.close()

    def json(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        repeatable: bool = False,
        wait_s: float | None = None,
    ) -> Any:
        """Sends `body` as JSON and returns the answer's JSON.

        A request that never reached the server, or that the server put off, is tried again;
        one whose answer was lost only if it is `repeatable`. `wait_s` is how long the server
        may work on it, beside the connection's own time.
        """
        data = None if body is None else json.dumps(body).encode()
        kind = "application/json"
        answer = self.send(method, path, data, kind, repeatable=repeatable, wait_s=wait_s)
        if not answer:
            return None
        try:
            return json.loads(answer)
        except ValueError as e:
            raise SinewError(f"{method} {self.url}{path}: the answer is not JSON: {e}") from e

    def send(
        self,
        method: str,
        path: str,
        data: bytes | None,
        content_type: str,
        *,
        repeatable: bool = False,
        wait_s: float | None = None,
    ) -> bytes:
        """Sends bytes and returns the answer's."""
        pause_s = 0.1
        for attempt in range(1, self._tries + 1):
            last = attempt == self._tries
            try:
                status, headers, answer = self._once(method, path, data, content_type, wait_s)
            except _NotSent as e:
                if last:
                    raise ConnectionFailed(method, self.url + path, str(e)) from e
            except (OSError, http.client.HTTPException) as e:
                if last or not repeatable:
                    raise ConnectionFailed(method, self.url + path, repr(e)) from e
            else:
                if status < 400:
                    return answer
                if status not in _LATER or last:
                    message, code = _error(answer)
                    raise ApiError(method, self.url + path, status, message, code)
                pause_s = _retry_after(headers, pause_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_WAIT_S)
        raise AssertionError("the last try returns or raises")

    def _once(
        self, method: str, path: str, data: bytes | None, content_type: str, wait_s: float | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        connection = self._connection()
        headers = {} if data is None else {"Content-Type": content_type}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            kept = connection.sock is not None
            if not kept:
                try:
                    connection.connect()
                except OSError as e:
                    raise _NotSent(str(e)) from e
            connection.sock.settimeout(self._timeout_s + (wait_s or 0.0))
            connection.request(method, self._prefix + path, body=data, headers=headers)
            try:
                answer = connection.getresponse()
            except http.client.RemoteDisconnected as e:
                if not kept:
                    raise
                # It had closed the connection that was kept, before it read the request.
                raise _NotSent("the server closed the connection") from e
            body = answer.read(_MAX_BODY + 1)
            if len(body) > _MAX_BODY:
                raise SinewError(f"{method} {self.url}{path}: the answer is over {_MAX_BODY} bytes")
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, body
        except BaseException:
            connection.close()
            raise

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            secure = self._parts.scheme == "https"
            kind = http.client.HTTPSConnection if secure else _Connection
            host = self._parts.hostname or ""
            connection = kind(host, self._parts.port, timeout=self._timeout_s)
            self._local.connection = connection
            with self._lock:
                self._all.add(connection)
        return connection


def _plain(token: str) -> str:
    """A token as it goes into a header. Files of tokens end with a new line, which would be
    refused further down by an error that shows the token."""
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise SinewError("token: expected printable ASCII without spaces, on one line")
    return token


class _NotSent(OSError):
    """The server has not seen the request."""


def _retry_after(headers: Mapping[str, str], wait_s: float) -> float:
    try:
        asked = float(headers.get("retry-after", ""))
    except ValueError:
        return wait_s
    return min(max(asked, wait_s), _MAX_WAIT_S)


def _error(body: bytes) -> tuple[str, str | None]:
    """The text of an error body, `{"error": {"message": ...}}`, `{"error": ...}` or plain, and its code."""
    try:
        value = json.loads(body)
    except ValueError:
        return body[:2000].decode(errors="replace") or "no message", None
    error = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(error, dict) and "message" in error:
        code = error.get("code")
        return str(error["message"]), code if isinstance(code, str) else None
    return str(error), None


class Closing:
    """Usable in `with`, whose end closes it."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class HttpClient(Closing):
    """A client of one server; usable in `with`, safe to use from threads."""

    def __init__(
        self, url: str, token: str | None = None, *, timeout_s: float = 60.0, tries: int = 5
    ) -> None:
        self._http = Http(url, token, timeout_s, tries)

    def close(self) -> None:
        """Closes the connections; what was made on the server stays."""
        self._http.close()
