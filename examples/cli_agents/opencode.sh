#!/bin/sh
# OpenCode on one task, without a terminal: the task is in SINEW_TASK, the model at OPENAI_BASE_URL. CLI_AGENTS is where its npm
# package is; its settings and sessions go into the current folder.
set -eu
export HOME="$PWD" OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1
cat > opencode.json <<JSON
{
  "model": "sinew/policy", "small_model": "sinew/policy", "share": "disabled", "permission": {"*": "allow"},
  "provider": {"sinew": {
    "npm": "@ai-sdk/openai-compatible", "name": "sinew", "models": {"policy": {"name": "policy"}},
    "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"}
  }}
}
JSON
case $(uname -m) in aarch64) arch=arm64 ;; *) arch=x64 ;; esac
exec "$CLI_AGENTS"/node_modules/opencode-linux-$arch/bin/opencode run "$SINEW_TASK" </dev/null
