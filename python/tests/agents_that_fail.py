"""Agents that fail, hang, are cancelled or call no model, and a gateway that goes away: every rollout is ended, and
the others go on. The gateway is a small one of this file. Standard library only.

Run by the tests of the `sinew` crate, under every Python from 3.10 on.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import logging
import socket
import threading
import time
import urllib.request
from typing import Any, Callable

import sinew
from sinew import ApiError, Client, ConnectionFailed, Task

logging.getLogger("sinew").addHandler(logging.NullHandler())


class Gateway:
    """Rollouts with their calls, rewards and ends, over HTTP. After `most` ends it says that it stops."""

    def __init__(self, most: int = 10**6) -> None:
        self.most = most
        self.rollouts: dict[str, dict[str, Any]] = {}
        self.lock = threading.Lock()
        #: Rewards are refused; opening takes so long.
        self.refuses, self.opens_s = False, 0.0
        #: Requests to open a rollout, answered or not.
        self.opening = 0
        self.server: http.server.ThreadingHTTPServer | None = None
        # Holds the port while nothing listens there, so that no other program gets it.
        self.held = socket.socket()
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.held.bind(("127.0.0.1", 0))
        self.port = self.held.getsockname()[1]
        self.listen()

    def listen(self) -> None:
        handler = type("Handler", (_Handler,), {"gateway": self})
        server = self.server = _Server(("127.0.0.1", self.port), handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        assert self.server is not None
        self.server.shutdown()
        self.server.server_close()
        self.server = None

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is not None:
            self.close()
        self.held.close()

    def client(self, **options: Any) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", "t", timeout_s=60.0, **options)

    def ends(self) -> list[str]:
        """How each rollout ended, `open` for those that did not."""
        return [r["end"] for r in self.rollouts.values()]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        parts = path.strip("/").split("/")
        if parts == ["rollouts"]:
            with self.lock:
                self.opening += 1
            time.sleep(self.opens_s)
        with self.lock:
            if parts == ["rollouts"]:
                if sum(r["end"] != "open" for r in self.rollouts.values()) >= self.most:
                    return 503, error("stopping", "the gateway is stopping")
                name = f"r{len(self.rollouts)}"
                self.rollouts[name] = {"calls": 0, "rewards": [], "end": "open"}
                url = f"http://127.0.0.1:{self.port}/r/{name}/v1"
                return 201, {"id": name, "base_url": url, "api_key": f"sk-sinew-{name}"}
            rollout = self.rollouts[parts[1]]
            if parts[2] == "v1":
                rollout["calls"] += 1
            elif parts[2] == "reward":
                if self.refuses:
                    return 400, error("invalid_request", "reward is refused")
                rollout["rewards"].append(body["reward"])
            elif rollout["end"] == "open":
                end = body.get("end", {"type": "terminated"})
                rollout["end"] = end["type"]
                if rollout["calls"] == 0 and end["type"] != "failed":
                    rollout["end"] = "failed"
                    return 409, error("no_model_call", f"rollout {parts[1]} called no model")
            return 200, {}


def error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


class _Server(http.server.ThreadingHTTPServer):
    #: Connections that wait to be accepted. More than the default of 5 come at once here, and the kernel resets those
    #: beyond it.
    request_queue_size = 128


class _Handler(http.server.BaseHTTPRequestHandler):
    gateway: Gateway
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        status, answer = self.gateway.answer(self.path, body)
        if self.gateway.server is None:
            self.close_connection = True
            return
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def call(model: sinew.Model) -> None:
    """One call of the model."""
    request = urllib.request.Request(model.base_url + "/chat", b"{}", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def raised(kind: type[BaseException], function: Callable[[], Any]) -> Any:
    try:
        function()
    except kind as e:
        return e
    raise AssertionError(f"{kind.__name__} was not raised")


def a_rollout_without_a_call_fails_alone() -> None:
    """Of every four one calls no model, and one raises."""
    count = iter(range(10**6))

    @sinew.rollout
    def agent(task: Task, model: sinew.Model) -> float:
        n = next(count)
        if n % 4 != 1:
            call(model)
        if n % 4 == 3:
            raise ValueError("an agent's own error")
        return 0.5

    with Gateway(most=64) as gateway, gateway.client() as client:
        worked = asyncio.run(agent.train(client, ["a", "b"], concurrency=4, group_size=2))
        ended = gateway.ends()
        assert ended.count("open") == 0 and len(ended) >= 64, ended
        assert worked.good == ended.count("terminated") >= 28, worked
        assert worked.causes.keys() == {"no_model_call", "ValueError"}, worked
        assert worked.failed == sum(worked.causes.values()) == ended.count("failed"), worked


def a_run_whose_agents_call_no_model_is_an_error() -> None:
    @sinew.rollout
    async def mute(task: Task) -> float:
        return 1.0

    with Gateway() as gateway, gateway.client() as client:
        told = raised(ApiError, lambda: asyncio.run(mute.train(client, ["a"], concurrency=2, group_size=3)))
        assert told.code == "no_model_call" and "called no model" in str(told), told
        assert len(gateway.rollouts) <= 6 + 2 and gateway.ends().count("open") == 0
        # By itself it is in the result.
        for result in (mute.run(client, "a"), asyncio.run(mute.arun(client, "a")), *mute.run_all(client, ["a"])):
            assert isinstance(result.error, ApiError) and not result.ok and result.reward is None, result


def agents_that_block_do_not_wait_for_each_other() -> None:
    at_once = 48
    barrier, count = threading.Barrier(at_once), iter(range(10**6))

    @sinew.rollout
    def agent(task: Task, model: sinew.Model) -> float:
        call(model)
        if next(count) < at_once:
            barrier.wait(60)
        return 1.0

    with Gateway(most=at_once) as gateway, gateway.client() as client:
        worked = asyncio.run(agent.train(client, ["a"], concurrency=at_once))
        assert worked.good >= at_once and worked.failed == 0, worked


def a_gateway_that_comes_back_is_found_again() -> None:
    @sinew.rollout
    async def agent(task: Task, model: sinew.Model) -> float:
        await asyncio.to_thread(call, model)
        return 1.0

    with Gateway(most=60) as gateway, gateway.client(tries=1) as client:
        async def work() -> sinew.Worked:
            working = asyncio.create_task(agent.train(client, ["a"], concurrency=3))
            while gateway.ends().count("terminated") < 20:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(gateway.close)
            await asyncio.sleep(1)
            gateway.listen()
            return await working

        worked = asyncio.run(work())
        assert worked.good >= 50 and gateway.ends().count("terminated") >= 50, worked

    # One that does not come back has ended its run; one that was never there is an error.
    with Gateway() as gateway, gateway.client(tries=1) as client:
        async def lost() -> sinew.Worked:
            working = asyncio.create_task(agent.train(client, ["a"], concurrency=3, reconnect_s=0.3))
            # The answers to three ends may be lost with the gateway.
            while gateway.ends().count("terminated") < 5 + 3:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(gateway.close)
            return await working

        assert asyncio.run(lost()).good >= 5
        raised(ConnectionFailed, lambda: asyncio.run(agent.train(client, ["a"], reconnect_s=60.0)))


def what_is_cancelled_leaves_no_rollout_open() -> None:
    @sinew.rollout
    async def hangs(task: Task, model: sinew.Model) -> float:
        await asyncio.to_thread(call, model)
        await asyncio.sleep(600)
        return 1.0

    @sinew.rollout
    def blocks(task: Task, model: sinew.Model) -> float:
        call(model)
        time.sleep(600)
        return 1.0

    async def cancelled(client: Client, agent: Any, gateway: Gateway) -> None:
        working = asyncio.create_task(agent.train(client, ["a"], concurrency=4))
        while gateway.opening < 4:
            await asyncio.sleep(0.01)
        # With `opens_s` the rollouts are still being opened then, else their agents run.
        await asyncio.sleep(0.1)
        working.cancel()
        try:
            await working
        except asyncio.CancelledError:
            return
        raise AssertionError("it was not cancelled")

    for agent, opens_s in ((hangs, 0.0), (hangs, 0.4), (blocks, 0.0)):
        with Gateway() as gateway, gateway.client() as client:
            gateway.opens_s = opens_s
            asyncio.run(cancelled(client, agent, gateway))
            assert gateway.ends() == ["failed"] * 4, gateway.ends()

    async def inside(client: Client, gateway: Gateway) -> None:
        async def use() -> None:
            async with client.arollout(task="t"):
                await asyncio.sleep(600)

        using = asyncio.create_task(use())
        while gateway.opening < 1:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        using.cancel()
        await asyncio.wait({using})

    for opens_s in (0.0, 0.5):
        with Gateway() as gateway, gateway.client() as client:
            gateway.opens_s = opens_s
            asyncio.run(inside(client, gateway))
            assert gateway.ends() == ["failed"], gateway.ends()


def an_interrupt_leaves_no_rollout_open() -> None:
    @sinew.rollout
    def interrupted(task: Task) -> float:
        raise KeyboardInterrupt

    @sinew.rollout
    def exits(task: Task) -> float:
        raise SystemExit(3)

    @sinew.rollout
    async def exits_async(task: Task) -> float:
        raise SystemExit(3)

    with Gateway() as gateway, gateway.client() as client:
        raised(KeyboardInterrupt, lambda: interrupted.run(client, "a"))
        results = list(exits.run_all(client, ["a"]))
        results += [asyncio.run(agent.arun(client, "a")) for agent in (exits, exits_async)]
        assert all("SystemExit" in repr(r.error) or "SystemExit" in str(r.error) for r in results), results
        assert gateway.ends() == ["failed"] * 4, gateway.ends()


def a_refused_reward_ends_its_rollout() -> None:
    @sinew.rollout
    async def agent(task: Task, model: sinew.Model) -> float:
        await asyncio.to_thread(call, model)
        return 1.0

    async def noted(client: Client) -> None:
        async with client.arollout(task="t") as rollout:
            rollout.reward(1.0)

    with Gateway() as gateway, gateway.client() as client:
        gateway.refuses = True
        for result in (agent.run(client, "a"), asyncio.run(agent.arun(client, "a"))):
            assert isinstance(result.error, ApiError) and result.error.status == 400, result
        raised(ApiError, lambda: asyncio.run(noted(client)))
        assert gateway.ends() == ["failed"] * 3, gateway.ends()


def the_timeout_of_a_tool_is_not_that_of_the_rollout() -> None:
    async def tool() -> None:
        await asyncio.wait_for(asyncio.sleep(600), 0.05)

    @sinew.rollout
    async def agent(task: Task, model: sinew.Model) -> float:
        await asyncio.to_thread(call, model)
        if task.prompt == "async":
            await tool()
        if task.prompt == "plain":
            raise TimeoutError("of a socket")
        await asyncio.sleep(600)
        return 1.0

    with Gateway() as gateway, gateway.client() as client:
        for prompt, timeout_s in (("async", 60.0), ("plain", 60.0), ("hang", 3.0)):
            result = asyncio.run(agent.arun(client, prompt, timeout_s=timeout_s))
            cut = prompt == "hang"
            assert result.timed_out == cut and "Timeout" in type(result.error).__name__, result
        assert gateway.ends() == ["failed", "failed", "truncated"], gateway.ends()


def main() -> None:
    a_rollout_without_a_call_fails_alone()
    a_run_whose_agents_call_no_model_is_an_error()
    agents_that_block_do_not_wait_for_each_other()
    a_gateway_that_comes_back_is_found_again()
    what_is_cancelled_leaves_no_rollout_open()
    an_interrupt_leaves_no_rollout_open()
    a_refused_reward_ends_its_rollout()
    the_timeout_of_a_tool_is_not_that_of_the_rollout()
    print("ok")


if __name__ == "__main__":
    main()
