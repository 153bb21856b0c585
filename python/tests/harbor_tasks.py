"""Generated tasks in the format of Harbor: solutions win, nothing wins nothing, half a solution earns at most half.

Run by the tests of the `sinew` crate. Standard library only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import harbor_tasks  # noqa: E402
from harbor_families import FAMILIES, HELD_OUT  # noqa: E402

#: Characters of the longest solution: about 40 tokens.
LONGEST = 110


def generate(place: Path, *more: str) -> str:
    command = [sys.executable, SCRIPTS / "harbor_tasks.py", "--out", place, "--tasks", "1", "--held-out-tasks", "1", *more]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def contents(place: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in place.rglob("*") if path.is_file()]
    return {str(path.relative_to(place)): (path.read_bytes(), path.stat().st_mode) for path in files}


def equal_arguments_write_equal_files(place: Path) -> Path:
    for name in ("a", "b", "other"):
        said = generate(place / name, "--seed", "3" if name == "other" else "2")
        assert said.startswith(f"{len(FAMILIES)} tasks of {len(FAMILIES)} families"), said
    assert contents(place / "a") == contents(place / "b")
    assert contents(place / "a") != contents(place / "other")
    held_out = sorted(path.name[4:] for path in (place / "a/held-out").iterdir())
    assert held_out == sorted(HELD_OUT), held_out
    return place / "a"


def a_folder_is_not_written_twice(place: Path) -> None:
    command = [sys.executable, SCRIPTS / "harbor_tasks.py", "--out", place]
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1 and "exists already" in again.stderr, again.stderr
    unknown = subprocess.run([*command, "--families", "fly"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "fly: no such family" in unknown.stderr, unknown.stderr


def every_task_is_short_and_complete(place: Path) -> None:
    for task in harbor_tasks.tasks_in(place):
        config = tomllib.loads((task / "task.toml").read_text())
        assert config["metadata"]["category"] == task.name[4:]
        lines = (task / "solution/solve.sh").read_text().splitlines()
        assert lines[0] == "#!/bin/sh" and 2 <= len(lines) <= 3, task
        assert sum(map(len, lines[1:])) <= LONGEST, task
        for script in ("tests/test.sh", "solution/solve.sh"):
            assert (task / script).stat().st_mode & 0o111, script
        # The prompt names what the solution needs, and is not it.
        prompt = (task / "instruction.md").read_text()
        assert len(prompt) < 200 and not any(line in prompt for line in lines[1:]), task


def solutions_win_and_nothing_does_not(place: Path) -> None:
    count, wrong = harbor_tasks.check(place)
    assert count == len(FAMILIES) and not wrong, "\n".join(wrong)


def graded(task: Path, *commands: str) -> float:
    """The reward after other commands than the solution's."""
    with tempfile.TemporaryDirectory() as other:
        copy = Path(other) / "task"
        subprocess.run(["cp", "-r", task, copy], check=True)
        (copy / "solution/solve.sh").write_text("\n".join(["#!/bin/sh", *commands]) + "\n")
        return harbor_tasks.reward_of(copy, True)


def made(place: Path, family: str) -> Path:
    generate(place / family, "--families", family)
    (task,) = harbor_tasks.tasks_in(place / family)
    return task


def parts_of_a_solution_earn_at_most_half(place: Path) -> None:
    # One of two files, and one of two lines.
    task = made(place, "replace-in-two-files")
    command = (task / "solution/solve.sh").read_text().splitlines()[1]
    first_only = command.rsplit(" ", 1)[0]
    assert graded(task, first_only) == 0.5
    task = made(place, "append-two-lines")
    command = (task / "solution/solve.sh").read_text().splitlines()[1]
    assert 0.0 < graded(task, command) <= 0.5
    # A copy instead of a move.
    task = made(place, "rename-file")
    assert graded(task, (task / "solution/solve.sh").read_text().splitlines()[1].replace("mv", "cp")) == 0.5


def what_must_stay_must_stay(place: Path) -> None:
    task = made(place, "delete-file")
    assert graded(task, "rm *.txt") == 0.0
    task = made(place, "make-executable")
    (name,) = [path.name for path in (task / "environment/files").iterdir()]
    assert graded(task, f"chmod +x {name}", f"echo '# more' >> {name}") == 1.0
    task = made(place, "count-lines")
    (name,) = [path.name for path in (task / "environment/files").iterdir()]
    solution = (task / "solution/solve.sh").read_text().splitlines()[1]
    assert graded(task, solution, f"rm {name}") == 0.0


def odd_files_fail_and_do_not_break_the_verifier(place: Path) -> None:
    task = made(place, "json-set")
    (name,) = [path.name for path in (task / "environment/files").iterdir()]
    for command in (f"echo '{{' > {name}", f"rm {name}", f"rm {name} && mkdir {name}", f"rm {name} && ln -s {name} {name}"):
        assert graded(task, command) == 0.0, command
    task = made(place, "repair-colon")
    (name,) = [path.name for path in (task / "environment/files").iterdir()]
    assert graded(task, f"echo 'import sys; sys.exit(3)' > {name}") == 0.0
    # Modules of the agent are not imported by the verifier.
    assert graded(task, "echo 'raise SystemExit' > json.py", "cp json.py pathlib.py") == 0.0


def main() -> None:
    assert len(FAMILIES) >= 40 and set(HELD_OUT) < set(FAMILIES)
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        tasks = equal_arguments_write_equal_files(base)
        a_folder_is_not_written_twice(tasks)
        every_task_is_short_and_complete(tasks)
        solutions_win_and_nothing_does_not(tasks)
        parts_of_a_solution_earn_at_most_half(base)
        what_must_stay_must_stay(base)
        odd_files_fail_and_do_not_break_the_verifier(base)
    print("ok")


if __name__ == "__main__":
    main()
