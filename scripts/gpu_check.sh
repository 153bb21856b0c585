#!/bin/sh
# Measures the PyTorch trainer on one GPU, in at most 10 minutes and without a network.
#
#     scripts/gpu_check.sh [--out FOLDER] [--limit SECONDS] [--work FOLDER] [--only PART,...]
#     scripts/gpu_check.sh --device cpu --tiny        every part with tiny shapes, to try the script
#
# Needs a Python with torch, transformers, peft, safetensors, msgspec and blake3: $PYTHON, else the one of
# `sinew setup torch`, else python3. Packages that it lacks can lie as wheels in $WHEELS, a folder. With `trl` and `datasets`
# it also measures TRL. Writes rows.jsonl and table.txt into --out (default: gpu-check). Exit codes: 0 done, 1 a
# row missed its target or has no value, 3 something outside is missing.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
own="${SINEW_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sinew}/torch/bin/python"
python="${PYTHON:-$own}"
command -v "$python" >/dev/null 2>&1 || python=python3
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl
    PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONPATH
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
status=0
"$python" "$root/scripts/gpu_check.py" "$@" || status=$?
exit "$status"
