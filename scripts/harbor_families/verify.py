"""The verifier of a generated task: compares the working directory with `expected.json` and prints a reward from 0 to 1.

It runs in the image of the task, so it uses the standard library only. An untouched working directory earns 0 and a whole
solution 1. What is between them earns at most half, so that a task counts as solved only if all of it is.
"""

import json
import os
import pathlib
import subprocess

#: Largest reward of work that is not whole.
PARTIAL = 0.5
#: Bytes of a file that are read: a larger one is wrong.
MOST_BYTES = 1 << 20
#: Seconds of a program that a task asks to repair.
PROGRAM_S = 10


def text_of(path):
    """The text of a file without the end of its last line; `None` if there is no such file."""
    file = pathlib.Path(path)
    if not file.is_file() or file.stat().st_size > MOST_BYTES:
        return None
    return file.read_text(encoding="utf-8", errors="replace").rstrip("\n")


def agreement(text, wanted):
    """Lines at their place, as a share of the longer text."""
    ours, theirs = (text or "").split("\n"), wanted.split("\n")
    same = sum(a == b for a, b in zip(ours, theirs))
    return same / max(len(ours), len(theirs))


def progress(path, wanted, before):
    """The share of the way from the first text to the wanted one, by lines. A new file of one line has no half."""
    wanted, now = wanted.rstrip("\n"), text_of(path)
    if now is None:
        return 0.0
    if now == wanted:
        return 1.0
    first = 0.0 if before is None else agreement(before.rstrip("\n"), wanted)
    return PARTIAL * max(0.0, (agreement(now, wanted) - first) / (1.0 - first)) if first < 1.0 else 0.0


def said(argv):
    """The output of a program in the working directory; `None` if it fails."""
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=PROGRAM_S, stdin=subprocess.DEVNULL)
    return ran.stdout.rstrip("\n") if ran.returncode == 0 else None


def score(check):
    """The share of one check that holds, 0 to 1."""
    kind, path = check["type"], check["path"]
    if kind == "text":
        return progress(path, check["text"], check.get("before"))
    if kind == "gone":
        return float(not os.path.lexists(path))
    if kind == "folder":
        return float(os.path.isdir(path))
    if kind == "link":
        return float(os.path.islink(path) and os.readlink(path) == check["target"])
    if kind == "executable":
        return float(bool(os.stat(path).st_mode & 0o100) == check["is"])
    if kind == "writable":
        return float(bool(os.stat(path).st_mode & 0o222) == check["is"])
    if kind == "json":
        return float(json.loads(text_of(path) or "null") == check["value"])
    if kind == "output":
        return float(said(check["argv"]) == check["text"].rstrip("\n"))
    raise ValueError(f"type {kind!r}: allowed: text, gone, folder, link, executable, writable, json, output")


def safe(check):
    """A check that cannot be carried out does not hold: the agent's files may be anything."""
    try:
        return score(check)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0.0


def reward(expected):
    """All checks in equal parts; 0 if a file was changed that had to stay as it was."""
    if any(text_of(path) != text.rstrip("\n") for path, text in expected["keep"].items()):
        return 0.0
    scores = [safe(check) for check in expected["checks"]]
    mean = sum(scores) / len(scores)
    return 1.0 if mean == 1.0 else min(mean, PARTIAL)


if __name__ == "__main__":
    beside = pathlib.Path(__file__).with_name("expected.json")
    print(round(reward(json.loads(beside.read_text(encoding="utf-8"))), 4))
