"""Environments of Sinew under Gymnasium: its checker, its registry and its vector API."""

import json

import gymnasium
from gymnasium.utils.env_checker import check_env

import sinew.gym
from sinew.served import Served
from sinew.worlds.household import Household


class Task(dict):
    __getattr__ = dict.__getitem__


def gold(served, split, index):
    """The actions that solve a task, as JSON."""
    task = served.task(split, index)
    turns = Household.gold(Task(task["data"], **task))
    calls = [call for turn in turns for call in (turn if isinstance(turn, list) else [turn])]
    return [c if isinstance(c, str) else json.dumps({"tool": c[0], "arguments": c[1]}) for c in calls]


with Served("sinew.worlds.household:Household", arguments=["--workers", "1"]) as served:
    env = sinew.gym.make(served)
    check_env(env, skip_render_check=True)
    first, info = env.reset(seed=5)
    assert first == env.reset(seed=5)[0] != env.reset(seed=6)[0]
    assert "look" in [tool["name"] for tool in info["tools"]]
    for split, index in (("train", 0), ("train", 1), ("held-out", 0)):
        env.reset(options={"split": split, "index": index})
        total = 0.0
        for action in gold(served, split, index):
            seen, reward, terminated, truncated, info = env.step(action)
            total += reward
            if terminated:
                break
        if not terminated:
            seen, reward, terminated, truncated, info = env.step("Done.")
            total += reward
        assert terminated and total == 1.0 and info["success"] == 1.0, (total, info)
    # A call that was cut is no turn of text, which would end this episode.
    env.reset(seed=5)
    for action in ('{"tool": "look", "argum', '{"to', '{"tool": "go", "arguments": {"room": "ki'):
        seen, reward, terminated, truncated, info = env.step(action)
        assert info["truncated"] and info["error"] and "whole call" in seen and not terminated, (action, seen)
    assert not env.step('{"tool": "look", "arguments": {}}')[4].get("truncated")
    assert env.step("{Done}")[2]
    env.close()

registered = gymnasium.make("sinew/Env-v0", target="recipes/tiny.toml", disable_env_checker=True)
seen, _ = registered.reset(seed=1)
assert "A" in seen, seen
registered.step("l")
registered.close()

vector = sinew.gym.make_vec("recipes/tiny.toml", 3)
seen, _ = vector.reset(seed=1)
assert len(seen) == 3
seen, rewards, terminated, truncated, _ = vector.step(("l", "r", "l"))
assert len(seen) == 3 and rewards.shape == (3,)
vector.close()
print("ok")
