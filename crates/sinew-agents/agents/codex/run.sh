export CODEX_HOME="$HOME/.codex"
settings .codex/config.toml <<TOML
model = "$SINEW_MODEL"
model_provider = "sinew"
model_context_window = $SINEW_CONTEXT_TOKENS
check_for_update_on_startup = false
web_search = "disabled"
[analytics]
enabled = false
[model_providers.sinew]
name = "sinew"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
$SINEW_MCP_SERVERS
TOML
kept 262144 "$SINEW_AGENTS"/codex/node_modules/@openai/codex-linux-x64/vendor/*/bin/codex exec --json --skip-git-repo-check \
    --dangerously-bypass-approvals-and-sandbox "$@" -- "$SINEW_TASK"
