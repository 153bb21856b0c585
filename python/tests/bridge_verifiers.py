"""Environments of Sinew as a taskset of `verifiers`: a rollout of its null harness with a scripted model."""

import asyncio
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import verifiers.v1 as vf


class Model(BaseHTTPRequestHandler):
    """Answers chat completions: a call of the tool `look`, then a text."""

    seen = []

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Model.seen.append(body)
        looked = any(message["role"] == "tool" for message in body["messages"])
        call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        tools = [tool["function"]["name"] for tool in body.get("tools") or []]
        delta = {"role": "assistant", "content": "r"}
        if "look" in tools and not looked:
            delta = {"role": "assistant", "content": None, "tool_calls": [call]}
        reason = "tool_calls" if delta.get("tool_calls") else "stop"
        base = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        chunks = [
            {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
            {**base, "choices": [], "usage": usage},
        ]
        if not body.get("stream"):
            message = {k: v for k, v in delta.items()}
            whole = {**base, "object": "chat.completion", "usage": usage}
            whole["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
            payload, kind = json.dumps(whole), "application/json"
        else:
            payload = "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"
            kind = "text/event-stream"
        data = payload.encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


async def rollout(target, url):
    config = vf.SingleAgentEnvConfig(
        taskset={"id": "sinew-taskset", "target": target, "most": 2},
        agent={"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    )
    env = vf.load_environment(config)
    tasks = list(env.taskset)
    assert len(tasks) == 2, tasks
    client = vf.EvalClientConfig(base_url=url, api_key_var="SINEW_TEST_KEY")
    context = vf.ModelContext(client=client, model="m", sampling=vf.SamplingConfig())
    (slot,) = env.slots(tasks[0])
    episode = await env.run_slot(slot, context, None)
    return episode.traces[0]


async def main():
    os.environ["SINEW_TEST_KEY"] = "x"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    trace = await rollout("sinew.worlds.household:Household", url)
    assert not trace.errors, trace.errors
    assert trace.rewards["environment"].score == 0.0, trace.rewards
    roles = [node.message.role for node in trace.nodes]
    assert "tool" in roles, roles
    server.shutdown()


asyncio.run(main())
print("ok")
