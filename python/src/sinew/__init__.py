"""Client of the Sinew gateway: run agents, score them, read what was captured.

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

Standard library only, synchronous, safe to use from threads.
"""

from . import pool
from .agent import RolloutFunction, RolloutResult, current, reward, rollout
from .client import Client, Rollout, Trace, TraceNode
from .dataset import Dataset, DatasetError, Task
from .env import Done, Env, Step, ToolError, Unscored, tool
from .errors import (
    ApiError,
    ConnectionFailed,
    NoReward,
    RolloutError,
    SinewError,
)
from .sandboxes import ExecResult, Sandbox, Sandboxes

__version__ = "0.1.0"

__all__ = [
    "ApiError",
    "Client",
    "ConnectionFailed",
    "Dataset",
    "DatasetError",
    "Done",
    "Env",
    "ExecResult",
    "NoReward",
    "Rollout",
    "RolloutError",
    "RolloutFunction",
    "RolloutResult",
    "Sandbox",
    "Sandboxes",
    "SinewError",
    "Step",
    "Task",
    "ToolError",
    "Trace",
    "TraceNode",
    "Unscored",
    "current",
    "pool",
    "reward",
    "rollout",
    "tool",
]
