"""Runs the same tasks by Harbor (the package `harbor` of PyPI) and by `sinew env check`, and compares their rewards.

    python3 scripts/harbor_compare.py --setup
    python3 scripts/harbor_compare.py .cache/harbor-tasks --limit 50
    python3 scripts/harbor_compare.py TASKS --agents oracle --json > compared.json

Two agents play each task: `oracle` runs its solution and `nop` does nothing. Harbor builds and runs the containers with podman, Sinew
by its own level `container`; `--sinew-level process` plays tasks of files alone without a container. `--setup` makes
.cache/venv-harbor with Python 3.12 or newer. Where no registry can be reached, `harbor_tasks.py --base` makes the image of the
generated tasks; podman may need a file that CONTAINERS_CONF names.

Exit codes: 0 all rewards agree, 1 some do not or are missing, 2 wrong use. Standard library only, but for Harbor itself.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from harbor_tasks import tasks_in

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".cache/venv-harbor"
PACKAGES = ("harbor==0.26.0", "podman-compose==1.6.0")
#: Agents of Harbor, and the fields of `sinew env check` for the same.
AGENTS = {"oracle": "oracle", "nop": "null"}
#: Seconds of one task at most, with the build of its image.
TASK_S = 900
#: Rewards that differ by less are equal: Harbor reads a text of them.
CLOSE = 1e-9


def modern(name):
    """Whether a program is a Python that Harbor runs with. A name in PATH may be a shim without a program behind it."""
    try:
        code = "import sys, venv; sys.exit(sys.version_info < (3, 12))"
        return subprocess.run([name, "-c", code], capture_output=True).returncode == 0
    except OSError:
        return False


def setup():
    """Makes the environment with Harbor."""
    found = [name for name in (sys.executable, "python3.14", "python3.13", "python3.12") if name and modern(name)]
    if not found:
        raise SystemExit("--setup: Harbor needs Python 3.12 or newer\n  hint: apt-get install python3.12-venv, uv python install "
                         "3.12, or run this script with such a Python")
    subprocess.run([found[0], "-m", "venv", "--clear", VENV], check=True)
    subprocess.run([VENV / "bin/pip", "install", "--quiet", *PACKAGES], check=True)
    print(f"{VENV / 'bin/harbor'} is ready")


def spread(tasks, limit):
    """At most so many of the tasks, evenly over their order."""
    count = min(limit, len(tasks))
    return [tasks[i * len(tasks) // count] for i in range(count)]


def copied(tasks, place):
    """The tasks side by side in one folder, as Harbor wants them; `train/x` and `held-out/x` are two."""
    names = {}
    for task in tasks:
        name = f"{task.parent.name}-{task.name}" if len(tasks) > 1 else task.name
        if name in names:
            raise SystemExit(f"{task} and {names[name]} have one name: compare them apart")
        names[name] = task
        shutil.copytree(task, place / name, symlinks=True)
    return sorted(names)


def by_harbor(args, folder, agent, names):
    """Rewards by Harbor: a table of rewards for each task, or the error of its trial.

    Tasks without a reward are played once more, one at a time: builds that podman runs at once disturb each other.
    """
    found = played(args, folder, agent, len(names), args.at_once)
    missing = [name for name in names if not found.get(name, {}).get("rewards")]
    if missing and args.at_once > 1:
        again = folder.parent / f"{agent}-again"
        for name in missing:
            shutil.copytree(folder / name, again / name, symlinks=True)
        found |= played(args, again, again.name, len(missing), 1, agent)
    if not found:
        raise SystemExit(f"harbor left no result in {args.out / 'harbor' / agent}")
    return found


def played(args, folder, job, count, at_once, agent=None):
    """The results of one job of Harbor, by the names of the tasks. The job has the agent's name, if none is given."""
    out = args.out / "harbor"
    shutil.rmtree(out / job, ignore_errors=True)
    command = [args.harbor, "run", "-p", folder, "-a", agent or job, "-e", args.engine, "-o", out, "--job-name", job]
    command += ["-n", at_once, "-y", "-q"]
    path = f"{pathlib.Path(args.harbor).absolute().parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    env = {**os.environ, "PATH": path, "HARBOR_TELEMETRY": "off"}
    subprocess.run([str(part) for part in command], env=env, timeout=count * TASK_S, stdout=sys.stderr)
    found = {}
    for result in sorted((out / job).glob("*/result.json")):
        trial = json.loads(result.read_text(encoding="utf-8"))
        name = pathlib.Path(trial["config"]["task"]["path"]).name
        verdict, failed = trial.get("verifier_result") or {}, trial.get("exception_info") or {}
        error = failed.get("exception_message") or failed.get("exception_type")
        found[name] = {"rewards": verdict.get("rewards"), "error": error}
    return found


def rows_of(text):
    """Objects that name a task in what `sinew env check` printed: the lines themselves, or lists in them."""
    rows = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "task" in value:
            rows.append(value)
        elif isinstance(value, dict):
            lists = (v for v in value.values() if isinstance(v, list))
            rows += [row for v in lists for row in v if isinstance(row, dict) and "task" in row]
    return rows


def by_sinew(args, folder):
    """Rewards by Sinew: for each task, those of both agents, or the reason why it was left out."""
    command = [args.sinew, "env", "check", folder, "--all", "--json", "--sessions", args.at_once, "--level", args.sinew_level]
    ran = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    rows = rows_of(ran.stdout)
    if not rows:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {ran.returncode} and named no task")
    return {pathlib.PurePosixPath(str(row["task"])).name: row for row in rows}


def as_rewards(row, key):
    """The rewards of a row of Sinew as the table that Harbor has; `None` if there are none."""
    value = row.get(key)
    if value is None:
        return None
    return {"reward": float(value), **row.get(f"{key}_parts", {})}


def equal(ours, theirs):
    """Whether two tables of rewards are equal. Without one there is nothing to compare."""
    if ours is None or theirs is None or ours.keys() != theirs.keys():
        return False
    return all(abs(ours[key] - theirs[key]) <= CLOSE for key in ours)


def compared(names, agents, harbor, sinew):
    """A row for each task and agent."""
    rows = []
    for name in names:
        mine = sinew.get(name, {})
        for agent in agents:
            other = harbor[agent].get(name, {"rewards": None, "error": "no result"})
            value = as_rewards(mine, AGENTS[agent])
            rows.append({
                "task": name, "agent": agent, "harbor": other["rewards"], "sinew": value,
                "equal": equal(value, other["rewards"]),
                "harbor_error": other["error"],
                "sinew_error": mine.get("skipped") or mine.get("why") or (None if mine else "no result"),
            })
    return rows


def shown(rewards):
    """A table of rewards in a few characters."""
    if rewards is None:
        return "none"
    return " ".join(f"{value:g}" if key == "reward" else f"{key}={value:g}" for key, value in rewards.items())


def summary(rows, agents):
    """Counts by agent."""
    found = {}
    for agent in agents:
        own = [row for row in rows if row["agent"] == agent]
        both = [row for row in own if row["harbor"] is not None and row["sinew"] is not None]
        found[agent] = {
            "tasks": len(own), "compared": len(both), "equal": sum(row["equal"] for row in own),
            "harbor_solved": sum((row["harbor"] or {}).get("reward", 0) >= 1 for row in own),
            "sinew_solved": sum((row["sinew"] or {}).get("reward", 0) >= 1 for row in own),
        }
    return found


def report(rows, counts):
    """The table, then the counts."""
    print("| task | agent | harbor | sinew | equal |\n|---|---|---|---|---|")
    for row in rows:
        why = row["harbor_error"] or row["sinew_error"]
        verdict = "yes" if row["equal"] else "NO" + (f": {str(why).splitlines()[0][:80]}" if why else "")
        print(f"| {row['task']} | {row['agent']} | {shown(row['harbor'])} | {shown(row['sinew'])} | {verdict} |")
    print()
    for agent, n in counts.items():
        print(f"{agent}: {n['equal']} of {n['tasks']} equal ({n['compared']} have both rewards); solved by Harbor "
              f"{n['harbor_solved']}, by Sinew {n['sinew_solved']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="?", type=pathlib.Path, help="folder with tasks at any depth")
    parser.add_argument("--limit", type=int, default=50, help="tasks at most, evenly over the names (50)")
    parser.add_argument("--agents", type=lambda text: text.split(","), default=list(AGENTS))
    parser.add_argument("--harbor", default=VENV / "bin/harbor", help="the program of Harbor")
    parser.add_argument("--engine", default="podman", help="environment of Harbor: podman or docker")
    parser.add_argument("--sinew", default=ROOT / "target/debug/sinew", help="the program of Sinew, with --features full")
    parser.add_argument("--sinew-level", default="container", choices=("container", "process"))
    parser.add_argument("--at-once", type=int, default=1, help="tasks at once (1)")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs/harbor-compare", help="folder of Harbor's jobs")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.add_argument("--setup", action="store_true", help="make the environment with Harbor")
    args = parser.parse_args()
    if args.setup:
        setup()
        return 0
    if args.tasks is None or args.limit < 1 or args.at_once < 1:
        parser.error("a folder of tasks is needed, and --limit and --at-once of 1 or more")
    if unknown := sorted(set(args.agents) - set(AGENTS)):
        parser.error(f"--agents {', '.join(unknown)}: allowed: {', '.join(AGENTS)}")
    tasks = tasks_in(args.tasks)
    if not tasks:
        parser.error(f"{args.tasks} holds no tasks")
    for program in (args.harbor, args.sinew):
        if not shutil.which(program):
            parser.error(f"{program} is not there\n  hint: --setup installs Harbor; cargo build -p sinew --features full makes Sinew")
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "tasks"
        names = copied(spread(tasks, args.limit), folder)
        harbor = {agent: by_harbor(args, folder, agent, names) for agent in args.agents}
        rows = compared(names, args.agents, harbor, by_sinew(args, folder))
    counts = summary(rows, args.agents)
    if args.json:
        print(json.dumps({"tasks": rows, "counts": counts}))
    else:
        report(rows, counts)
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
