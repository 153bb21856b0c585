#!/usr/bin/env python3
"""Prints docs/python-reference.md, the reference of the Python package, from its docstrings and `#:` comments.

    python3 python/reference.py > docs/python-reference.md

Standard library only. The package is read, not imported.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent / "src" / "sinew"
#: Sections of the page: title and modules.
SECTIONS = (
    ("Runs", ("runs", "records")),
    ("Stored episodes", ("stored",)),
    ("Environments", ("env",)),
    ("Environments for other programs", ("served", "gym")),
    ("Gateway", ("client", "agent", "dataset", "service")),
    ("Data pool", ("pool",)),
    ("Sandboxes", ("sandboxes",)),
    ("Errors", ("errors",)),
)
HEAD = """# Reference of the Python package

Made by `python3 python/reference.py > docs/python-reference.md` from the docstrings. [python.md](python.md) shows how the package is used.
"""


def exported(tree: ast.Module) -> list[str]:
    """Public names of a module: those of the package's `__all__`, or all of a module that is exported as such."""
    top = ast.parse((PACKAGE / "__init__.py").read_text())
    names: set[str] = set()
    for node in top.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = set(ast.literal_eval(node.value))
    here = [n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
    public = [name for name in here if name in names]
    return list(dict.fromkeys(public or [name for name in here if not name.startswith("_")]))


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, skip_first: bool) -> str:
    """As it is called, with types."""
    arguments = node.args
    if skip_first and arguments.args:
        arguments = ast.arguments(
            posonlyargs=arguments.posonlyargs,
            args=arguments.args[1:],
            vararg=arguments.vararg,
            kwonlyargs=arguments.kwonlyargs,
            kw_defaults=arguments.kw_defaults,
            kwarg=arguments.kwarg,
            defaults=arguments.defaults[-len(arguments.args) + 1 :] if len(arguments.args) > 1 else [],
        )
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    before = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{before}{node.name}({ast.unparse(arguments)}){returns}"


def text(node: ast.AST) -> str:
    """The docstring, with its `::` examples as code."""
    doc = ast.get_docstring(node) or ""  # type: ignore[arg-type]
    out: list[str] = []
    code: list[str] = []
    for line in doc.splitlines():
        if code and (line.startswith("    ") or not line.strip()):
            code.append(line)
            continue
        if code:
            out += block(code)
            code = []
        if line.endswith("::"):
            out.append(line[:-1])
            code = [""]
        else:
            out.append(line)
    if code:
        out += block(code)
    return "\n".join(out).strip()


def block(code: list[str]) -> list[str]:
    body = textwrap.dedent("\n".join(code)).strip("\n")
    return ["", "```python", body, "```", ""]


def has(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    return any(ast.unparse(d) == name for d in node.decorator_list)


def fields(node: ast.ClassDef, source: list[str]) -> list[str]:
    """Rows of the table of attributes: annotated ones of the class and of `__init__`, with their `#:` comments."""
    rows = []
    init = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    for statement in [*node.body, *(s for n in init for s in n.body)]:
        if isinstance(statement, ast.AnnAssign):
            target, kind = statement.target, ast.unparse(statement.annotation)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute):
            target, kind = statement.targets[0], ""
        else:
            continue
        name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
        comment = above(source, statement.lineno)
        if name and not name.startswith("_") and (comment or isinstance(target, ast.Name)):
            rows.append(f"| `{name}` | {code_cell(kind)} | {comment} |")
    return rows


def code_cell(kind: str) -> str:
    shown = kind.replace("|", "\\|")
    return f"`{shown}`" if kind else ""


def above(source: list[str], line: int) -> str:
    """The `#:` comment that ends above a line (from 1)."""
    found: list[str] = []
    for before in reversed(source[: line - 1]):
        match = re.fullmatch(r"\s*#: ?(.*)", before)
        if not match:
            break
        found.insert(0, match[1])
    return " ".join(found)


def class_page(node: ast.ClassDef, source: list[str]) -> str:
    bases = [ast.unparse(b) for b in node.bases if ast.unparse(b) not in ("HttpClient", "Closing")]
    out = [f"### class `{node.name}`" + (f" ({', '.join(bases)})" if bases else ""), "", text(node), ""]
    rows = fields(node, source)
    if rows:
        out += ["| attribute | type | |", "|---|---|---|", *rows, ""]
    for method in node.body:
        if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) or has(method, "overload"):
            continue
        doc = text(method)
        if method.name.startswith("_") or not doc:
            continue
        if has(method, "property"):
            kind = f": {ast.unparse(method.returns)}" if method.returns else ""
            out += [f"- `{method.name}{kind}`"]
        else:
            out += [f"- `{signature(method, not has(method, 'staticmethod'))}`"]
        out += ["", textwrap.indent(doc, "  "), ""]
    return "\n".join(out)


def module_page(name: str) -> str:
    path = PACKAGE / f"{name}.py"
    if not path.exists():
        return ""
    code = path.read_text()
    tree, source = ast.parse(code), code.splitlines()
    public, out = exported(tree), []
    for node in tree.body:
        if getattr(node, "name", None) not in public:
            continue
        if isinstance(node, ast.ClassDef):
            out.append(class_page(node, source))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not has(node, "overload"):
            out.append(f"### `{signature(node, False)}`\n\n{text(node)}\n")
    return "\n".join(out)


def main() -> None:
    sections = (
        f"## {title}\n\n" + "\n".join(page for page in map(module_page, modules) if page)
        for title, modules in SECTIONS
    )
    page = "\n".join([HEAD, *sections])
    print(re.sub(r"\n{3,}", "\n\n", page).strip())


if __name__ == "__main__":
    main()
