"""Runs the code cells of a notebook in order, as Jupyter does, and keeps what they show.

    python3 notebook.py NOTEBOOK

IPython's two functions that the package uses are stood in for by this file, so that no kernel is needed.
"""

from __future__ import annotations

import ast
import json
import sys
import types
from pathlib import Path
from typing import Any

#: HTML of each display, in order; an update replaces its own.
shown: list[str] = []


class Handle:
    def __init__(self, index: int) -> None:
        self.index = index
        self.updates = 0

    def update(self, value: Any) -> None:
        self.updates += 1
        shown[self.index] = value._repr_html_()


handles: list[Handle] = []


def display(value: Any, display_id: bool = False) -> Handle | None:
    shown.append(value._repr_html_())
    handles.append(Handle(len(shown) - 1))
    return handles[-1] if display_id else None


def stand_in() -> None:
    ipython, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    shell = types.SimpleNamespace(kernel=object())
    setattr(ipython, "get_ipython", lambda: shell)
    setattr(module, "display", display)
    sys.modules.update({"IPython": ipython, "IPython.display": module})


def run(source: str, names: dict[str, Any]) -> None:
    """A cell: its statements, and the value of a last expression shown."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if hasattr(value, "_repr_html_"):
            shown.append(value._repr_html_())


def main() -> None:
    notebook = json.loads(Path(sys.argv[1]).read_text())
    assert notebook["nbformat"] == 4
    stand_in()
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] for cell in cells), "outputs are not kept in the file"
    for cell in cells:
        run("".join(cell["source"]), names)
    progress, result = shown
    assert "<svg" in progress and "ended" in progress and handles[0].updates > 3, progress
    assert "before" in result and "<svg" in result, result
    assert names["result"].gain >= 0 and names["result"].after.reward > names["result"].before.reward + 0.3


if __name__ == "__main__":
    main()
