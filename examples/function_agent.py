"""An author's own loop, in plain asyncio with any SDK: one function of a task and a model.

`sinew train recipes/agent-function.toml` calls it for each episode, in a sandbox. Run by itself it works for a run
on another host: `sinew train recipes/agent-live.toml --serve ADDR`, with SINEW_URL and SINEW_TOKEN_FILE set here.
"""

import asyncio

from openai import AsyncOpenAI


# One for all rollouts: each new client reads the certificates again, which takes 50 ms.
client = AsyncOpenAI(api_key="none")


async def solve(task, model):
    messages = [{"role": "user", "content": task.prompt}]
    own = client.with_options(**model.openai)
    completion = await own.chat.completions.create(model=model.name, messages=messages)
    text = (completion.choices[0].message.content or "").strip()
    return sum("a" <= c <= "z" for c in text) / max(len(text), 1)


if __name__ == "__main__":
    from sinew import Client, rollout

    topics = ["rain", "snow", "wind", "hail", "mist", "dust"]
    tasks = [f"Write one word about {topic}, in small letters." for topic in topics]
    print(asyncio.run(rollout(solve).train(Client.from_env(), tasks)).good, "rollouts")
