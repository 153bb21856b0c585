"""An agent: any program that calls a model at OPENAI_BASE_URL, with any SDK. Its last line is the answer."""

import json
import os
import urllib.request


def ask(text):
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


print(ask(os.environ["SINEW_TASK"]))
