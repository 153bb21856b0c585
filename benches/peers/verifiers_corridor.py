"""Peer of `sinew bench env`: the environment `tiny` in Python, under the loop of `verifiers`.

    verifiers_corridor.py EPISODES

Prints steps a second of whole episodes, that many at once, one value a repetition. A model server in this process always walks to the
right, so that no model takes time, and every episode ends at its goal. The harness asks for turns in this process, too, which is the
fastest way that `verifiers` has: its own harness `null` starts a program for each turn.
"""

import asyncio
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

WIDTH, REPETITIONS = 10, 3


class Server(ThreadingHTTPServer):
    """Takes all connections at once."""

    request_queue_size, daemon_threads = 1024, True


class Right(BaseHTTPRequestHandler):
    """Chat completions that say `>`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        said = {"index": 0, "message": {"role": "assistant", "content": ">"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [said], "usage": usage}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Direct(vf.Harness[vf.HarnessConfig]):
    """One model call a turn, over the interception server that records it."""

    SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False
    client = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None))

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        body = {"model": ctx.model, "messages": [message_to_wire(message) for message in data.prompt]}
        answer = await self.client.post(f"{endpoint}/chat/completions", json=body, headers={"authorization": f"Bearer {secret}"})
        answer.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class Corridors(vf.Taskset[vf.Task]):
    """A walker and a goal one or two cells away, without end."""

    def load(self):
        for number in range(10**6):
            yield vf.Task(vf.TaskData(idx=number, prompt=None), self.config.task)


class Walk(vf.Env[vf.SingleAgentEnvConfig]):
    """Shows pictures until the goal is reached; counts steps."""

    steps = 0

    async def run(self, task, agents):
        at = task.data.idx % (WIDTH - 2)
        goal = at + 1 + task.data.idx % 2
        async with agents.agent.interaction(task) as walker:
            while at != goal:
                picture = "".join("A" if c == at else ">" if c == goal else "." for c in range(WIDTH))
                turn = await walker.turn(picture)
                if turn.terminated or turn.last_reply != ">":
                    raise RuntimeError(f"the turn ended with {turn.last_reply!r}")
                at += 1
                Walk.steps += 1


__all__ = ["Corridors", "Direct"]


async def main(count):
    os.environ["VERIFIERS_CORRIDOR_KEY"] = "x"
    server = Server(("127.0.0.1", 0), Right)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key_var="VERIFIERS_CORRIDOR_KEY")
    agent = {"harness": {"id": "verifiers_corridor"}, "runtime": {"type": "subprocess"}}
    env = Walk(vf.SingleAgentEnvConfig(taskset={"id": "verifiers_corridor"}, agent=agent))
    context = vf.ModelContext(client=client, model="m", sampling=vf.SamplingConfig())
    tasks, values = iter(env.taskset), []
    async with env.serving():
        for repetition in range(REPETITIONS + 1):
            slots = [slot for _ in range(count) for slot in env.slots(next(tasks))]
            begin, before = time.perf_counter(), Walk.steps
            episodes = await asyncio.gather(*(env.run_slot(slot, context, None) for slot in slots))
            failed = [episode.errors for episode in episodes if not episode.ok]
            if failed:
                raise SystemExit(f"{len(failed)} episodes failed: {failed[0]}")
            if repetition:
                values.append((Walk.steps - before) / (time.perf_counter() - begin))
    server.shutdown()
    print(json.dumps({"version": f"verifiers {version('verifiers')}, its loop in one process", "values": values}))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
