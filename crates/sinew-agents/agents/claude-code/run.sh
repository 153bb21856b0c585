# No update, no telemetry, no call of a model but for the task. As root it skips permissions only where it is told of a sandbox.
export IS_SANDBOX=1 DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_DISABLE_TERMINAL_TITLE=1
if [ -n "$SINEW_MCP_SERVERS" ]; then
    # The first turn waits for the servers, and every turn has all of their tools.
    export MCP_CONNECTION_NONBLOCKING=false ENABLE_TOOL_SEARCH=false
    settings .sinew/mcp.json <<JSON
{"mcpServers": $SINEW_MCP_SERVERS}
JSON
    set -- --mcp-config "$HOME/.sinew/mcp.json" --strict-mcp-config "$@"
fi
kept 65536 "$SINEW_AGENTS/claude-code/node_modules/@anthropic-ai/claude-code-linux-x64/claude" --print --output-format json \
    --model "$SINEW_MODEL" --dangerously-skip-permissions "$@" -- "$SINEW_TASK"
