"""An agent that runs already: one client, many requests at a time, and it never restarts.

In training it opens a rollout for each request at `sinew train recipes/agent-live.toml --serve ...`, and says
what the answer was worth. SINEW_URL and SINEW_TOKEN_FILE name the run, OPENAI_BASE_URL is SINEW_URL and /v1.
"""

import asyncio

import sinew
from openai import AsyncOpenAI, OpenAIError

client = AsyncOpenAI(api_key=sinew.key)
gateway = sinew.Client.from_env()
TOPICS = ["rain", "snow", "wind", "hail", "mist", "dust"]


async def agent(topic: str) -> str:
    messages = [{"role": "user", "content": f"Write one word about {topic}, in small letters."}]
    completion = await client.chat.completions.create(model="policy", messages=messages)
    return completion.choices[0].message.content or ""


def worth(answer: str) -> float:
    text = answer.strip()
    return sum("a" <= c <= "z" for c in text) / max(len(text), 1)


async def request(topic: str) -> None:
    async with gateway.arollout(task=topic) as rollout:
        rollout.reward(worth(await agent(topic)))


async def user(topic: str) -> None:
    """One of many who use the agent, until the run has ended."""
    while True:
        try:
            await request(topic)
        except (sinew.SinewError, OpenAIError):
            # The run and its gateway are gone.
            return


async def main() -> None:
    await asyncio.gather(*(user(topic) for topic in TOPICS * 8))


if __name__ == "__main__":
    asyncio.run(main())
