"""Train language-model agents, run agents on a model that is trained, read what was captured.

A recipe is trained by the `sinew` program, which the wheel carries::

    import sinew

    for step in sinew.train("recipe.toml"):
        print(step.number, step.reward)

An agent needs no Sinew: it talks to the base URL that a rollout gives it, with the dialect it
already speaks. This package opens rollouts, hands agents their URL and key, gives rewards, and
reads traces::

    from sinew import Client, rollout

    @rollout
    def solve(task, base_url, api_key):
        model = OpenAI(base_url=base_url, api_key=api_key)
        answer = my_agent(model, task.prompt)
        return float(answer == task.data["answer"])

    with Client("http://127.0.0.1:8080", token) as client:
        for result in solve.run_all(client, Dataset.from_jsonl("tasks.jsonl"), concurrency=16):
            print(result.task.id, result.reward)

Standard library only.
"""

from . import pool
from .agent import Model, RolloutFunction, RolloutResult, Worked, current, reward, rollout
from .client import AsyncRollout, Client, Rollout, Trace, TraceNode
from .dataset import Dataset, DatasetError, Task
from .env import Done, Env, Ran, Step, ToolError, Unscored, ask_user, run_code, tool
from .errors import (
    ApiError,
    BinaryNotFound,
    ConnectionFailed,
    NoReward,
    OutsideMissing,
    RecipeError,
    RolloutError,
    RunFailed,
    RunStopped,
    SinewError,
)
from .keys import asgi, key, key_sync, using
from .records import Check, Measurement, Measures, Result, TrainStep
from .runs import Run, check, eval, export, train
from .sandboxes import ExecResult, Sandbox, Sandboxes
from .stored import Episode, Episodes, episode, episodes

__version__ = "0.1.0"

__all__ = [
    "ApiError",
    "AsyncRollout",
    "BinaryNotFound",
    "Check",
    "Client",
    "ConnectionFailed",
    "Dataset",
    "DatasetError",
    "Done",
    "Env",
    "Episode",
    "Episodes",
    "ExecResult",
    "Measurement",
    "Measures",
    "Model",
    "NoReward",
    "OutsideMissing",
    "Ran",
    "RecipeError",
    "Result",
    "Rollout",
    "RolloutError",
    "RolloutFunction",
    "RolloutResult",
    "Run",
    "RunFailed",
    "RunStopped",
    "Sandbox",
    "Sandboxes",
    "SinewError",
    "Step",
    "Task",
    "ToolError",
    "Trace",
    "TraceNode",
    "TrainStep",
    "Unscored",
    "Worked",
    "asgi",
    "ask_user",
    "check",
    "current",
    "episode",
    "episodes",
    "eval",
    "export",
    "key",
    "key_sync",
    "pool",
    "reward",
    "rollout",
    "run_code",
    "tool",
    "train",
    "using",
]
