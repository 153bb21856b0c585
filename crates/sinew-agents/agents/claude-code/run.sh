# No update, no telemetry, no call of a model but for the task. As root it skips permissions only where it is told of a sandbox.
export IS_SANDBOX=1 DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_DISABLE_TERMINAL_TITLE=1
kept 65536 "$SINEW_AGENTS/claude-code/node_modules/@anthropic-ai/claude-code-linux-x64/claude" --print --output-format json \
    --model "$SINEW_MODEL" --dangerously-skip-permissions "$@" -- "$SINEW_TASK"
