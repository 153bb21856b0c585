export MSWEA_SILENT_STARTUP=1 MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors MSWEA_GLOBAL_CONFIG_DIR="$HOME/.mini"
export MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT=2 LITELLM_LOCAL_MODEL_COST_MAP=True HF_HUB_OFFLINE=1 OPENAI_API_BASE="$OPENAI_BASE_URL"
# The path of its packages is not that of the commands that it runs.
start='import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module("minisweagent.run.mini", run_name="__main__", alter_sys=True)'
code=0
kept 4096 python3 -c "$start" "$SINEW_AGENTS/mini-swe-agent/site" --yolo --exit-immediately --cost-limit 0 \
    --model "openai/$SINEW_MODEL" --config mini.yaml --output "$HOME/.mini/trajectory.json" "$@" --task "$SINEW_TASK" >/dev/null || code=$?
# The trajectory holds all messages: its end is enough.
python3 - <<'PY'
import json, os
with open(os.path.expanduser("~/.mini/trajectory.json")) as file:
    info = json.load(file)["info"]
print(json.dumps({name: info.get(name) for name in ("exit_status", "submission")}))
PY
exit "$code"
