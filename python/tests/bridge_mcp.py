"""The client of the MCP SDK against `sinew env serve --protocol mcp`: `bridge_mcp.py URL SINEW`."""

import asyncio
import json
import subprocess
import sys

from mcp import Client, StdioServerParameters, stdio_client

URL, SINEW = sys.argv[1:]


def text(result):
    return "\n".join(part.text for part in result.content)


async def play(server):
    async with Client(server) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert {"look", "go", "take", "say"} <= set(names), names
        prompt = await client.get_prompt("task")
        task = prompt.messages[-1].content.text
        assert "room" in task, task
        looked = await client.call_tool("look", {})
        assert not looked.is_error and text(looked)
        wrong = await client.call_tool("look", {"far": 1})
        assert wrong.is_error, wrong
        unknown = await client.call_tool("fly", {})
        assert unknown.is_error and "there is no tool fly" in text(unknown)
        score = json.loads((await client.read_resource("sinew://score")).contents[0].text)
        assert score["reward"] == 0.0 and score["success"] is False, score
        over = await client.call_tool("look", {})
        assert over.is_error and "the episode is over" in text(over)
        return task


async def main():
    first, second = await play(URL), await play(URL)
    assert first != second, "each session has the next task"
    held_out = await play(f"{URL}/held-out/0")
    assert held_out == await play(f"{URL}/held-out/0") != first
    # The system message, which prompts of the protocol do not have, is a part of the instructions.
    words = [SINEW, "env", "serve", "sinew.worlds.household:Household", "--protocol", "mcp", "--stdio", "--workers", "1"]
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}}
    answer = subprocess.run(words, input=json.dumps(hello) + "\n", capture_output=True, text=True, check=True).stdout
    assert "You are in a house" in json.loads(answer.splitlines()[-1])["result"]["instructions"], answer
    words = ["env", "serve", "sinew.worlds.household:Household", "--protocol", "mcp", "--stdio", "--workers", "1"]
    assert await play(stdio_client(StdioServerParameters(command=SINEW, args=words))) == first


asyncio.run(main())
print("ok")
