export QWEN_CODE_SUPPRESS_YOLO_WARNING=1
settings .qwen/settings.json <<JSON
{"general": {"enableAutoUpdate": false}, "telemetry": {"enabled": false}, "privacy": {"usageStatisticsEnabled": false},
 "mcpServers": $mcp_servers}
JSON
kept 65536 node "$SINEW_AGENTS/qwen-code/node_modules/@qwen-code/qwen-code/cli.js" --auth-type openai --model "$SINEW_MODEL" \
    --approval-mode yolo --chat-recording false --output-format stream-json "$@" --prompt="$SINEW_TASK"
