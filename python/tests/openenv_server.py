"""A server of OpenEnv's own package for the tests: guess a number below 100. It takes two sessions."""

import random
import socket
from typing import Any, Optional

import uvicorn
from openenv.core import Action, Environment, HTTPEnvServer, Observation, State
from fastapi import FastAPI


class Guess(Action):
    guess: int


class Hint(Observation):
    hint: str = ""


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.steps = None, 0

    def reset(self, seed: Optional[int] = None, episode_id: Optional[str] = None, **more: Any) -> Hint:
        self.number, self.steps = random.Random(seed).randrange(100), 0
        return Hint(hint=f"Guess a number below {more.get('below', 100)}.", reward=0.0, done=False)

    def step(self, action: Guess, timeout_s: Optional[float] = None, **more: Any) -> Hint:
        self.steps += 1
        if action.guess == self.number:
            return Hint(hint="right", reward=1.0, done=True)
        return Hint(hint="more" if action.guess < self.number else "less", reward=0.0, done=False)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


app = FastAPI()
HTTPEnvServer(Numbers, Guess, Hint, max_concurrent_envs=2).register_routes(app)
sock = socket.create_server(("127.0.0.1", 0))
print(f"listens on http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[sock])
