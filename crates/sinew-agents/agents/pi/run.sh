export PI_OFFLINE=1 PI_TELEMETRY=0
settings .pi/agent/models.json <<JSON
{"providers": {"sinew": {
  "baseUrl": "$OPENAI_BASE_URL", "api": "openai-completions", "apiKey": "\$OPENAI_API_KEY",
  "models": [{
    "id": "$SINEW_MODEL", "name": "$SINEW_MODEL", "reasoning": false, "input": ["text"],
    "contextWindow": $SINEW_CONTEXT_TOKENS, "maxTokens": $SINEW_TURN_TOKENS,
    "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
  }]
}}}
JSON
settings .pi/agent/mcp.json <<JSON
{"mcpServers": $mcp_servers}
JSON
kept 262144 node "$SINEW_AGENTS/pi/node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js" --provider sinew \
    --model "$SINEW_MODEL" --print --no-session --offline "$@" -- "$SINEW_TASK"
