"""Writes small tasks in the format of Harbor, a folder each: file edits, searches, tables, moves, repairs.

    python3 scripts/harbor_tasks.py --out .cache/harbor-tasks
    python3 scripts/harbor_tasks.py --out .cache/harbor-two-steps --families two-steps
    python3 scripts/harbor_tasks.py --out .cache/harbor-tasks --families sort-file,count-lines --tasks 5 --seed 3
    python3 scripts/harbor_tasks.py --out .cache/harbor-tasks --check
    python3 scripts/harbor_tasks.py --base
    python3 scripts/harbor_tasks.py --list

Training tasks are in DIR/train, tasks of families that are not trained on in DIR/held-out. Names begin with a number, so that the
first tasks in their order are of all families. Equal arguments write equal files.

`--check` runs the solution and, apart, nothing in a copy of each task's files on this machine, without containers: a solution must earn
1 and nothing 0. `--base` makes an image with Python for machines that reach no registry: Debian's packages under the name that the
tasks' Dockerfiles have. That is for tests, as the Python in it is Debian's. It needs mmdebstrap and podman.

Needs Python 3.11 and a POSIX shell, nothing else.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

from harbor_families import FAMILIES, HELD_OUT, SETS

IMAGE = "docker.io/library/python:3.12-slim"
PACKAGES = "python3,ca-certificates"
SUITE = "bookworm"
HERE = pathlib.Path(__file__).resolve().parent
#: Seconds of one script of a check.
SCRIPT_S = 30
#: Attempts to make a task of a family that differs from those before it.
ATTEMPTS = 50

DOCKERFILE = f"""FROM {IMAGE}
WORKDIR /app
COPY files/ /app/
"""
TEST = """#!/bin/sh
logs="${VERIFIER_LOGS:-/logs/verifier}"
mkdir -p "$logs"
python3 -I "$(dirname "$0")/verify.py" > "$logs/reward.txt"
"""
CONFIG = """schema_version = "1.4"

[metadata]
category = "{category}"
difficulty = "{difficulty}"
tags = ["{group}", "generated"]

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 60.0

[environment]
build_timeout_sec = 600.0
"""


def write(path, content, mode=0o644):
    """Writes a file with its folders. The mode does not depend on the umask."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8", newline="\n")
    path.chmod(mode)


def expected(made):
    """What the verifier compares with: the checks, and the files that must stay."""
    checked = {check["path"] for check in made.checks} | made.free
    keep = {path: content for path, content in made.files.items() if path not in checked}
    return {"checks": made.checks, "keep": keep}


def write_task(folder, family, made):
    """Writes one task."""
    config = CONFIG.format(category=family.name, difficulty=family.difficulty, group=family.group)
    write(folder / "task.toml", config)
    write(folder / "instruction.md", made.instruction + "\n")
    write(folder / "environment/Dockerfile", DOCKERFILE)
    for path, content in made.files.items():
        mode = 0o755 if path in made.executable else 0o644
        write(folder / "environment/files" / path, content, mode)
    write(folder / "tests/test.sh", TEST, 0o755)
    write(folder / "tests/verify.py", (HERE / "harbor_families/verify.py").read_text(encoding="utf-8"))
    write(folder / "tests/expected.json", json.dumps(expected(made), indent=1) + "\n")
    write(folder / "solution/solve.sh", "\n".join(["#!/bin/sh", *made.solution]) + "\n", 0o755)


def made_tasks(family, count, seed):
    """Different tasks of a family; fewer where it has no more."""
    seen, tasks = set(), []
    for index in range(count):
        for attempt in range(ATTEMPTS):
            made = family.make(random.Random(f"{seed}/{family.name}/{index}/{attempt}"))
            key = made.instruction + json.dumps(made.files)
            if key not in seen:
                seen.add(key)
                tasks.append(made)
                break
    return tasks


def write_all(out, args):
    """Writes both splits; returns their folders."""
    written = []
    for split, names, count in (
        ("train", [name for name in args.families if name not in args.held_out_families], args.tasks),
        ("held-out", args.held_out_families, args.held_out_tasks),
    ):
        if not names:
            continue
        place = out / split
        if place.exists():
            raise SystemExit(f"--out {out}: {place} exists already\n  hint: remove it, or name another folder")
        for name in names:
            for index, made in enumerate(made_tasks(FAMILIES[name], count, args.seed)):
                folder = place / f"{index:03}-{name}"
                write_task(folder, FAMILIES[name], made)
                written.append(folder)
    return written


def tasks_in(folder):
    """Folders of tasks below a folder, or the folder itself, in the order of their names."""
    if (folder / "task.toml").is_file():
        return [folder]
    return sorted(path.parent for path in folder.rglob("task.toml"))


def reward_of(task, solve):
    """The reward of a task's solution, or of nothing, in a copy of its files."""
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        work, logs = place / "app", place / "logs"
        shutil.copytree(task / "environment/files", work)
        env = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "HOME": str(work), "VERIFIER_LOGS": str(logs)}
        for script in [task / "solution/solve.sh"] * solve + [task / "tests/test.sh"]:
            ran = subprocess.run(["sh", script.resolve()], cwd=work, env=env, timeout=SCRIPT_S, stdin=subprocess.DEVNULL,
                                 capture_output=True, text=True)
            if ran.returncode:
                return f"{script.name} ends with {ran.returncode}: {ran.stderr.strip()}"
        return float((logs / "reward.txt").read_text())


def check(folder):
    """Runs every task below a folder by its solution and by nothing; returns what is wrong."""
    tasks, wrong = tasks_in(folder), []
    if not tasks:
        raise SystemExit(f"--check: {folder} holds no tasks\n  hint: leave --check out to write some")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        solved = pool.map(lambda task: reward_of(task, True), tasks)
        untouched = pool.map(lambda task: reward_of(task, False), tasks)
        for task, by_solution, by_nothing in zip(tasks, solved, untouched):
            if (by_solution, by_nothing) != (1.0, 0.0):
                wrong.append(f"{task}: solution {by_solution}, nothing {by_nothing}")
    return len(tasks), wrong


def make_base():
    """The image of the tasks from Debian's packages, in podman's store."""
    missing = [name for name in ("mmdebstrap", "podman") if not shutil.which(name)]
    if missing:
        raise SystemExit(f"--base: {' and '.join(missing)} not found\n  hint: apt-get install mmdebstrap podman")
    with tempfile.TemporaryDirectory() as place:
        root = pathlib.Path(place) / "base.tar"
        command = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "--components=main", SUITE, root]
        subprocess.run(command, check=True)
        subprocess.run(["podman", "import", "--quiet", root, IMAGE], check=True)
    print(f"{IMAGE}: made from packages of Debian {SUITE}; its Python is Debian's. For tests only.")


def names(text):
    """Names of families with commas between them."""
    found = [name for part in text.split(",") if part for name in SETS.get(part, [part])]
    unknown = sorted(set(found) - set(FAMILIES))
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such family; --list shows all")
    return list(dict.fromkeys(found))


def positive(text):
    """A number of tasks."""
    count = int(text)
    if not 1 <= count <= 999:
        raise argparse.ArgumentTypeError(f"{text}: allowed: 1 to 999")
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="folder of the tasks")
    parser.add_argument("--families", type=names, default=list(FAMILIES), help=f"families to write, by name or set ({', '.join(SETS)}); default: all")
    parser.add_argument("--held-out-families", type=names, default=None, metavar="NAMES",
                        help="those of them that are written to DIR/held-out; an empty text: none")
    parser.add_argument("--tasks", type=positive, default=20, help="training tasks of each family (20)")
    parser.add_argument("--held-out-tasks", type=positive, default=8, help="held-out tasks of each family (8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="check the tasks that are in the folder")
    parser.add_argument("--base", action="store_true", help="make the image of the tasks from Debian's packages")
    parser.add_argument("--list", action="store_true", help="print the families")
    args = parser.parse_args()
    if args.held_out_families is None:
        args.held_out_families = [name for name in args.families if name in HELD_OUT]
    elif set(args.held_out_families) - set(args.families):
        parser.error("--held-out-families: not among --families")
    if args.list:
        for family in FAMILIES.values():
            print(f"{family.name:24} {family.group:14} {family.difficulty:8} {'held out' * (family.name in HELD_OUT)}".rstrip())
        return 0
    if args.base:
        make_base()
        return 0
    if args.out is None:
        parser.error("--out is missing")
    if not args.check:
        written = write_all(args.out, args)
        print(f"{len(written)} tasks of {len(args.families)} families in {args.out}")
        return 0
    count, wrong = check(args.out)
    print("\n".join([*wrong, f"{count - len(wrong)} of {count} tasks are right"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
