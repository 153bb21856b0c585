"""OpenEnv's own clients against `sinew env serve --protocol openenv`: `bridge_openenv.py URL TARGET`."""

import asyncio
import json
import sys

from openenv.core import GenericEnvClient, MCPToolClient
from websockets.asyncio.client import connect

URL, TARGET = sys.argv[1:]


def moves(seen):
    """What wins an episode of `tiny`: the way to the arrow."""
    picture = seen.rsplit("\n", 1)[-1]
    return "r" if ">" in picture else "l"


async def plays():
    async with GenericEnvClient(base_url=URL) as env:
        begun = await env.reset(seed=3)
        again = await env.reset(seed=3)
        assert begun.observation["text"] == again.observation["text"] and not begun.done
        other = await env.reset(split="held-out", index=0, episode_id="mine")
        assert other.observation["task"] != begun.observation["task"]
        assert (await env.state()) == {"episode_id": "mine", "step_count": 0}
        if TARGET == "tiny":
            total, seen = 0.0, other.observation["text"]
            for _ in range(4):
                result = await env.step({"text": moves(seen)})
                total, seen = total + result.reward, result.observation["text"]
                if result.done:
                    break
            assert result.done and total == 1.0, (result, total)
            assert result.observation["score"]["success"] is True
        else:
            names = [function["name"] for function in other.observation["functions"]]
            assert {"look", "go", "take"} <= set(names), names
            looked = await env.step({"tool": "look", "arguments": {}})
            assert looked.observation["text"] and not looked.observation["error"]
            wrong = await env.step({"tool": "look", "arguments": {"far": 1}})
            assert wrong.observation["error"], wrong
            assert (await env.state())["step_count"] == 2


async def tools():
    async with MCPToolClient(base_url=URL) as env:
        await env.reset(seed=1)
        assert "look" in [tool.name for tool in await env.list_tools()]
        assert await env.call_tool("look")


async def errors():
    async with connect(URL.replace("http", "ws") + "/ws") as socket:

        async def said(text):
            await socket.send(text)
            answer = json.loads(await socket.recv())
            return answer["data"].get("code", answer["type"])

        assert await said("no json") == "INVALID_JSON"
        assert await said('{"type": "nope"}') == "UNKNOWN_TYPE"
        assert await said('{"type": "step", "data": {"text": "x"}}') == "VALIDATION_ERROR"
        assert await said('{"type": "reset", "data": {"seed": -1}}') == "VALIDATION_ERROR"
        assert await said('{"type": "reset", "data": {"seed": 1}}') == "observation"
        assert await said('{"type": "step", "data": {"bad": 1}}') == "VALIDATION_ERROR"
        await socket.send('{"type": "close"}')


async def full():
    """The server takes two sessions: a third is refused until one has ended."""
    one, two, three = (GenericEnvClient(base_url=URL) for _ in range(3))
    async with one, two:
        await one.reset()
        await two.reset()
        try:
            await three.reset()
            raise AssertionError("a third session began")
        except RuntimeError as error:
            assert "CAPACITY_REACHED" in str(error), error
        await three.close()
    for _ in range(600):
        try:
            async with GenericEnvClient(base_url=URL) as env:
                await env.reset()
                return
        except RuntimeError:
            await asyncio.sleep(0.1)
    raise AssertionError("no session was freed")


async def main():
    await plays()
    if TARGET != "tiny":
        await tools()
    await errors()
    await full()


asyncio.run(main())
print("ok")
