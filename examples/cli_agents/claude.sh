#!/bin/sh
# Claude Code on one task, without a terminal: the task is in SINEW_TASK, the model at ANTHROPIC_BASE_URL. CLI_AGENTS is where
# its npm package is; its settings and sessions go into the current folder.
set -eu
export HOME="$PWD" IS_SANDBOX=1
# No update, no telemetry, and no call of a model but for the task.
export DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_DISABLE_TERMINAL_TITLE=1
exec "$CLI_AGENTS"/node_modules/@anthropic-ai/claude-code-linux-*/claude -p "$SINEW_TASK" --model policy --dangerously-skip-permissions
