#!/bin/sh
# Runs in the working folder, after the agent. The reward is the number in reward.txt.
reward=0
[ -f count.txt ] && reward=0.1
[ "$(tr -d ' \n' <count.txt 2>/dev/null)" = "4" ] && reward=1
echo "$reward" >"${VERIFIER_LOGS:-/logs/verifier}/reward.txt"
