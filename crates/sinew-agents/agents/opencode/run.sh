export OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1
# A title of its own would be one more call of the model.
settings .config/opencode/opencode.json <<JSON
{
  "model": "sinew/$SINEW_MODEL", "small_model": "sinew/$SINEW_MODEL", "share": "disabled", "autoupdate": false,
  "permission": {"*": "allow"}, "agent": {"title": {"disable": true}}, "mcp": $mcp_servers,
  "provider": {"sinew": {
    "npm": "@ai-sdk/openai-compatible", "name": "sinew",
    "models": {"$SINEW_MODEL": {"name": "$SINEW_MODEL", "limit": {"context": $SINEW_CONTEXT_TOKENS, "output": $SINEW_TURN_TOKENS}}},
    "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"}
  }}
}
JSON
kept 262144 "$SINEW_AGENTS/opencode/node_modules/opencode-linux-x64/bin/opencode" run --format json --title task "$@" -- "$SINEW_TASK"
