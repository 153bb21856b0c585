"""One service with one pooled client serves 200 requests, 64 at once: each call is captured under the
rollout of its request, whether that travels as the API key or as trace context. SINEW_URL and SINEW_TOKEN
name the gateway, whose engine may be a fake one."""

import asyncio
import os

import httpx
import sinew
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, AuthenticationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

CALLS, AT_ONCE = 200, 64
BASE = os.environ["SINEW_URL"] + "/v1"

by_key = AsyncOpenAI(api_key=sinew.key, base_url=BASE)
by_trace = AsyncOpenAI(api_key="sk-of-production", base_url=BASE)
graph = ChatOpenAI(model="policy", api_key=sinew.key, base_url=BASE)


async def ask(request: Request) -> JSONResponse:
    asked = await request.json()
    messages = [{"role": "user", "content": asked["text"]}]
    # The handler is interrupted in the middle, as handlers are.
    await asyncio.sleep(0.001 * (hash(asked["text"]) % 7))
    if asked["way"] == "graph":
        return JSONResponse({"answer": (await graph.ainvoke(asked["text"])).content})
    client, more = by_key, {}
    if asked["way"] == "trace":
        client, more = by_trace, {"traceparent": request.headers["traceparent"]}
    completion = await client.chat.completions.create(
        model="policy", messages=messages, extra_headers=more
    )
    return JSONResponse({"answer": completion.choices[0].message.content})


app = Starlette(routes=[Route("/ask", ask, methods=["POST"])])
app.add_middleware(sinew.asgi)


async def captured(gateway: sinew.Client, way: str) -> int:
    """Calls that are in the trace of their own rollout, and in no other one."""
    rollouts = [gateway.rollout(task=f"{way}-{n}") for n in range(CALLS)]
    gate = asyncio.Semaphore(AT_ONCE)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as users:

        async def one(n: int) -> None:
            rollout = rollouts[n]
            headers = {"traceparent": rollout.traceparent}
            if way != "trace":
                headers["Authorization"] = f"Bearer {rollout.api_key}"
            async with gate:
                body = {"text": f"question {way} {n}", "way": way}
                answer = await users.post("/ask", json=body, headers=headers)
                assert answer.status_code == 200, answer.text

        await asyncio.gather(*(one(n) for n in range(CALLS)))
    right = 0
    for n, rollout in enumerate(rollouts):
        trace = rollout.trace()
        said = [m["content"] for node in trace.nodes for m in node.messages if m["role"] == "user"]
        right += said == [f"question {way} {n}"]
        rollout.finish()
    return right


async def main() -> None:
    with sinew.Client(os.environ["SINEW_URL"], os.environ["SINEW_TOKEN"]) as gateway:
        for way in ("key", "trace", "graph"):
            right = await captured(gateway, way)
            assert right == CALLS, f"{way}: {right} of {CALLS}"
        # Outside of a rollout the normal key is used, and the gateway takes it for no rollout's.
        os.environ["OPENAI_API_KEY"] = "sk-of-production"
        assert await sinew.key() == "sk-of-production"
        with sinew.using("sk-of-a-user"):
            assert sinew.key_sync() == "sk-of-production", "a user's own key is not passed on"
        try:
            messages = [{"role": "user", "content": "hi"}]
            await by_key.chat.completions.create(model="policy", messages=messages)
        except AuthenticationError as e:
            assert "sinew.key" in str(e), e
        else:
            raise AssertionError("a call without a rollout was answered")
        del os.environ["OPENAI_API_KEY"]
        try:
            sinew.key_sync()
        except sinew.RolloutError:
            pass
        else:
            raise AssertionError("no key at all is an error that says so")
    print("ok")


asyncio.run(main())
