export CLINE_NO_AUTO_UPDATE=1 CLINE_SESSION_BACKEND_MODE=local
settings .cline/data/settings/global-settings.json <<JSON
{"telemetryOptOut": true, "autoUpdateEnabled": false}
JSON
settings .cline/data/settings/cline_mcp_settings.json <<JSON
{"mcpServers": $mcp_servers}
JSON
settings .cline/data/settings/providers.json <<JSON
{"version": 1, "lastUsedProvider": "openai-compatible", "modes": {}, "providers": {"openai-compatible": {
  "settings": {
    "provider": "openai-compatible", "apiKey": "$OPENAI_API_KEY", "model": "$SINEW_MODEL", "baseUrl": "$OPENAI_BASE_URL"
  },
  "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"
}}}
JSON
kept 65536 "$SINEW_AGENTS/cline/node_modules/@cline/cli-linux-x64/bin/cline" --json --auto-approve true --compaction off \
    --provider openai-compatible --model "$SINEW_MODEL" "$@" -- "$SINEW_TASK"
