# Its loop detector and its check of who speaks next would be more calls of the model.
settings .gemini/settings.json <<JSON
{
  "security": {"auth": {"selectedType": "gemini-api-key"}}, "general": {"enableAutoUpdate": false},
  "privacy": {"usageStatisticsEnabled": false}, "telemetry": {"enabled": false},
  "model": {"disableLoopDetection": true, "skipNextSpeakerCheck": true}, "mcpServers": $mcp_servers
}
JSON
kept 262144 node "$SINEW_AGENTS/gemini-cli/node_modules/@google/gemini-cli/bundle/gemini.js" --model "$SINEW_MODEL" \
    --approval-mode yolo --skip-trust --output-format json "$@" --prompt="$SINEW_TASK"
