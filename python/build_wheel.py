#!/usr/bin/env python3
"""Builds the wheel that carries the `sinew` binary. Standard library only, no network.

    python3 python/build_wheel.py [--binary target/release/sinew] [--out dist]

The binary goes to the wheel's scripts, so that `pip install` puts it on the path as it is. The
platform tag comes from the newest glibc symbol that the binary asks for (PEP 600). The same
input gives the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import re
import stat
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
#: Date of every entry: the oldest that ZIP knows.
EPOCH = (1980, 1, 1, 0, 0, 0)
#: Oldest glibc that has a tag of its own name form.
OLDEST_GLIBC = (2, 17)
#: Names of `e_machine` in an ELF header.
MACHINES = {0x3E: "x86_64", 0xB7: "aarch64"}


def fail(message: str) -> None:
    sys.exit(f"build_wheel: {message}")


def field(name: str, text: str) -> str:
    """A text field of pyproject.toml; enough TOML for the few that are needed."""
    found = re.search(rf'^{name} = "([^"]*)"$', text, re.MULTILINE)
    if not found:
        fail(f"pyproject.toml has no {name}")
        raise AssertionError
    return found.group(1)


def extras(text: str) -> list[str]:
    """The fields of the optional dependencies, which have a line each."""
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0]
    out = []
    for extra, packages in re.findall(r"^(\w+) = \[(.*)\]$", section, re.MULTILINE):
        needed = re.findall(r'"([^"]+)"', packages)
        out += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {name}; extra == "{extra}"' for name in needed)]
    return out


def find_binary() -> Path:
    """The newest of the release and the debug build."""
    found = [p for p in (ROOT / "target" / kind / "sinew" for kind in ("release", "debug")) if p.is_file()]
    if not found:
        fail("no target/release/sinew or target/debug/sinew: run `cargo build --release -p sinew --features full`")
    return max(found, key=lambda p: p.stat().st_mtime)


def tag(binary: bytes) -> str:
    """Platform tag of a binary, from its header and its symbol versions. It may be for another machine than this."""
    if binary[:4] != b"\x7fELF":
        fail("the binary is not an ELF file; wheels are built for Linux only")
    number = int.from_bytes(binary[18:20], "little")
    machine = MACHINES.get(number)
    if machine is None:
        fail(f"the binary is for the ELF machine {number}; allowed: {MACHINES}")
    if b"ld-linux" not in binary[:4096] and b"ld-linux" not in binary:
        return f"linux_{machine}"
    versions = {
        tuple(map(int, m.split(b".")[:2]))
        for m in re.findall(rb"\x00GLIBC_(\d+\.\d+(?:\.\d+)?)(?=\x00)", binary)
    }
    major, minor = max(versions | {OLDEST_GLIBC})
    return f"manylinux_{major}_{minor}_{machine}"


class Wheel:
    """A wheel being written, with the hashes that its RECORD needs."""

    def __init__(self, path: Path, info: str, level: int) -> None:
        self.level = level
        self.zip = zipfile.ZipFile(path, "w")
        self.info = info
        self.record: list[str] = []

    def add(self, name: str, data: bytes, mode: int = 0o644) -> None:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self.record.append(f"{name},sha256={digest},{len(data)}")
        self._write(name, data, mode)

    def _write(self, name: str, data: bytes, mode: int) -> None:
        entry = zipfile.ZipInfo(name, EPOCH)
        entry.external_attr = (stat.S_IFREG | mode) << 16
        kind = zipfile.ZIP_DEFLATED if self.level else zipfile.ZIP_STORED
        self.zip.writestr(entry, data, kind, self.level or None)

    def close(self) -> None:
        name = f"{self.info}/RECORD"
        text = "\n".join([*self.record, f"{name},,", ""])
        self._write(name, text.encode(), 0o644)
        self.zip.close()


def build(binary: Path, out: Path, level: int) -> Path:
    text = (HERE / "pyproject.toml").read_text()
    name, version = field("name", text), field("version", text)
    data = binary.read_bytes()
    platform_tag = tag(data)
    info = f"{name}-{version}.dist-info"
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}-{version}-py3-none-{platform_tag}.whl"
    wheel = Wheel(path, info, level)
    # The package, and the module that `verifiers` finds by its name.
    for file in sorted((HERE / "src").rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            wheel.add(file.relative_to(HERE / "src").as_posix(), file.read_bytes())
    wheel.add(f"{name}-{version}.data/scripts/sinew", data, 0o755)
    metadata = [
        "Metadata-Version: 2.4",
        f"Name: {name}",
        f"Version: {version}",
        f"Summary: {field('description', text)}",
        f"License-Expression: {field('license', text)}",
        f"Requires-Python: {field('requires-python', text)}",
        *(f"Classifier: {c}" for c in re.findall(r'^    "(.* :: .*)",$', text, re.MULTILINE)),
        *extras(text),
        "Description-Content-Type: text/markdown",
        "",
        (HERE / "README.md").read_text(),
    ]
    wheel.add(f"{info}/METADATA", "\n".join(metadata).encode())
    tags = f"Wheel-Version: 1.0\nGenerator: sinew\nRoot-Is-Purelib: false\nTag: py3-none-{platform_tag}\n"
    wheel.add(f"{info}/WHEEL", tags.encode())
    wheel.add(f"{info}/licenses/LICENSE", (ROOT / "LICENSE").read_bytes())
    wheel.close()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, help="default: the newest build in target/")
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "wheels", help="folder of the wheel")
    parser.add_argument("--compression", type=int, default=6, choices=range(10), help="0 stores")
    args = parser.parse_args()
    binary = args.binary or find_binary()
    if not binary.is_file() or not os.access(binary, os.X_OK):
        fail(f"{binary} is not an executable file")
    print(build(binary, args.out, args.compression))


if __name__ == "__main__":
    main()
