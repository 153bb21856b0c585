"""An agent of the OpenAI SDK that runs as a service. Three lines are new: the import, the key, the middleware."""

import os

import sinew
import uvicorn
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

client = AsyncOpenAI(api_key=sinew.key)


async def ask(request: Request) -> JSONResponse:
    text = (await request.json())["text"]
    messages = [{"role": "user", "content": text}]
    completion = await client.chat.completions.create(model="policy", messages=messages)
    return JSONResponse({"answer": completion.choices[0].message.content})


app = Starlette(routes=[Route("/ask", ask, methods=["POST"])])
app.add_middleware(sinew.asgi)
if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "9000")), log_level="warning")
