#!/bin/sh
# Runs in the working folder, after the agent. The reward is the number in reward.txt.
reward=0
[ -f final.txt ] && reward=0.1
[ "$(cat final.txt 2>/dev/null)" = "Words stay." ] && [ ! -e draft.txt ] && reward=1
echo "$reward" >"${VERIFIER_LOGS:-/logs/verifier}/reward.txt"
