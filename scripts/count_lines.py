#!/usr/bin/env python3
"""Counts the lines that an author writes: lines that are not blank and not only a comment.

    python3 scripts/count_lines.py                  # the four cases of docs/compare.md, from examples/first/
    python3 scripts/count_lines.py FILE...          # the same rule for other files

Docstrings, imports and configuration count; rows of data do not. Standard library only.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Case and the files that its author writes. What follows a file is a word: the agent was there before, and only its
#: lines with that word are new.
CASES = {
    "own JSONL + reward function": [("tasks/recipe.toml", ""), ("tasks/score.py", "")],
    "Python environment with two tools": [("env/recipe.toml", ""), ("env/shop.py", "")],
    "LangGraph agent": [("langgraph/recipe.toml", ""), ("langgraph/agent.py", "")],
    "running OpenAI-SDK agent": [("service/recipe.toml", ""), ("tasks/score.py", ""), ("service/service.py", "sinew")],
}


def counted(text: str, word: str = "") -> int:
    lines = (line.strip() for line in text.splitlines())
    return sum(bool(line) and not line.startswith("#") and word in line for line in lines)


def main() -> None:
    if len(sys.argv) > 1:
        counts = {name: counted(Path(name).read_text()) for name in sys.argv[1:]}
        for name, count in counts.items():
            print(f"{count:6} {name}")
        print(f"{sum(counts.values()):6} in all")
        return
    for case, files in CASES.items():
        counts = {name: counted((ROOT / "examples/first" / name).read_text(), word) for name, word in files}
        parts = ", ".join(f"`{name}` {count}" for name, count in counts.items())
        print(f"| {case} | {sum(counts.values())} | {parts} |")


if __name__ == "__main__":
    main()
