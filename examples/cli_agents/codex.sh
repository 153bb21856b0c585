#!/bin/sh
# Codex on one task, without a terminal: the task is in SINEW_TASK, the model at OPENAI_BASE_URL. CLI_AGENTS is where its npm
# package is; its settings and sessions go into the current folder.
set -eu
export HOME="$PWD" CODEX_HOME="$PWD/.codex"
mkdir -p "$CODEX_HOME"
cat > "$CODEX_HOME/config.toml" <<TOML
model = "policy"
model_provider = "sinew"
[model_providers.sinew]
name = "sinew"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
TOML
# The sandbox is Sinew's.
exec "$CLI_AGENTS"/node_modules/@openai/codex-linux-*/vendor/*/bin/codex exec --skip-git-repo-check \
    --dangerously-bypass-approvals-and-sandbox "$SINEW_TASK" </dev/null
