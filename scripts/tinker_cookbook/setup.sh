#!/bin/sh
# Installs the tinker cookbook and the SDK into .cache/venv-tinker, on the PyTorch of .cache/venv-torch: a file in the environment's
# packages adds that folder behind its own, so that PyTorch and CUDA (5 GB) are there once. Idempotent.
#
#   scripts/setup.sh process && scripts/tinker_cookbook/setup.sh
set -eu
cd "$(dirname "$0")/../.."
torch=.cache/venv-torch
venv=.cache/venv-tinker
list=scripts/tinker_cookbook/requirements.txt
[ -x "$torch/bin/python3" ] || { echo "setup: $torch is not there: run scripts/setup.sh process" >&2; exit 1; }
if ! cmp -s "$list" "$venv/installed.txt"; then
    echo "setup: installing $list into $venv"
    # The same interpreter: compiled packages of both folders are loaded by one.
    "$torch/bin/python3" -m venv --clear --without-pip "$venv"
    packages=$("$venv/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$torch/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$packages/torch.pth"
    .cache/uv/bin/uv pip install --quiet --python "$venv/bin/python3" --no-deps --compile-bytecode --requirement "$list"
    cp "$list" "$venv/installed.txt"
fi
"$venv/bin/python3" -c 'import tinker, tinker_cookbook, torch; print("setup: tinker", tinker.__version__, "torch", torch.__version__)'
