"""The smallest agent: one question with the openai SDK, streamed.

It reads OPENAI_BASE_URL, OPENAI_API_KEY and SINEW_TASK, and prints the answer.
"""

import os

from openai import OpenAI


def main() -> None:
    stream = OpenAI().chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": os.environ["SINEW_TASK"]}],
        stream=True,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
