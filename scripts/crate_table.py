#!/usr/bin/env python3
"""Writes the table of crates in ARCHITECTURE.md from the manifests.

    python3 scripts/crate_table.py            # rewrites the rows
    python3 scripts/crate_table.py --check    # fails if they differ

The layer of a crate is one above the highest layer that it uses, so no arrow stays within a layer. Standard library only.
"""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = "| layer | crate | one line | uses |\n|---|---|---|---|\n"
#: Crates that ship nothing by themselves.
DEV = {"sinew-amx-emulator", "sinew-bench", "sinew-fuzz", "sinew-lab"}
MANIFESTS = {p.parent.name: tomllib.loads(p.read_text()) for p in sorted(ROOT.glob("crates/*/Cargo.toml"))}


def used(crate: str) -> list[str]:
    return [name for name in MANIFESTS[crate].get("dependencies", {}) if name.startswith("sinew")]


@cache
def layer(crate: str) -> int:
    return max((layer(name) + 1 for name in used(crate)), default=0)


def row(crate: str) -> str:
    uses = sorted(used(crate), key=lambda name: (layer(name), name))
    names = ", ".join(name.removeprefix("sinew-") for name in uses) or "-"
    at = "dev" if crate in DEV else str(layer(crate))
    return f"| {at} | `{crate}` | {MANIFESTS[crate]['package']['description'].rstrip('.')} | {names} |\n"


def main() -> int:
    page = ROOT / "ARCHITECTURE.md"
    text = page.read_text()
    crates = sorted(MANIFESTS, key=lambda name: (name in DEV, layer(name), name))
    table = HEAD + "".join(row(name) for name in crates)
    new = re.sub(r"\| layer \| crate \|.*?\n(?=\n)", lambda _: table, text, flags=re.DOTALL)
    if "--check" in sys.argv:
        return int(new != text)
    page.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
