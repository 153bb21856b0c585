//! Rollouts of a plain OpenAI client at `sinew serve --queue`, trained by a run that reads the queue.

use crate::queue::Served;
use crate::{last_line, python3, run_ok, sinew, steps};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

/// Four groups of four rollouts: each uses only the SDK, as if there were no training.
const AGENT: &str = r#"
import json, sys, urllib.request
from openai import OpenAI
url, token = sys.argv[1:3]
def control(path, body):
    headers = {"Authorization": "Bearer " + token, "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers, method="POST")
    return json.load(urllib.request.urlopen(request))
for group in range(4):
    for member in range(4):
        rollout = {"id": f"g{group}-e{member}", "group": f"g{group}", "task": f"t{group}"}
        rollout["seed"] = 4 * group + member
        opened = control("/rollouts", rollout)
        client = OpenAI(base_url=opened["base_url"], api_key=opened["api_key"])
        said = [{"role": "user", "content": f"Write a word, number {group}."}]
        for _ in range(2):
            reply = client.chat.completions.create(model="policy", messages=said, max_tokens=4)
            said.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
            said.append({"role": "user", "content": "Another one."})
        path = "/rollouts/" + opened["id"]
        control(path + "/reward", {"reward": member % 2})
        control(path + "/finish", {})
"#;

const RECIPE: &str = r#"
model = MODEL
reward = 'regex("[a-z]")'
tasks = { source = "tasks.jsonl", prompt = "{{ question }}" }
DATA
[algorithm]
type = "grpo"
correction = { type = "truncate", low = 0.0, high = 2.0 }
[rollout]
tasks_per_step = 2
group_size = 4
max_turn_tokens = 4
max_context_tokens = 512
[train]
steps = STEPS
learning_rate = 3e-3
"#;

/// Runs a recipe in the folder of its tasks; gives the last line of its run.
fn train(dir: &Path, name: &str, (model, data, steps): (&str, &str, u32)) -> Value {
    let rows: String = (0..20)
        .map(|n| format!("{{\"question\": \"Write word {n}\"}}\n"))
        .collect();
    std::fs::write(dir.join("tasks.jsonl"), rows).unwrap();
    let text = RECIPE
        .replace("MODEL", model)
        .replace("DATA", data)
        .replace("STEPS", &steps.to_string());
    let recipe = dir.join(format!("{name}.toml"));
    std::fs::write(&recipe, text).unwrap();
    let mut command = crate::resume::train(&recipe, &dir.join(name), &[]);
    // The paths of a recipe are relative to the current folder.
    last_line(&command.current_dir(dir).output().unwrap())
}

#[test]
fn rollouts_of_a_plain_openai_client_are_queued_and_trained() {
    let dir = tempfile::tempdir().unwrap();
    let queue = Served::start(dir.path());
    let scratch =
        "{ type = \"scratch\", d_model = 64, layers = 2, heads = 4, kv_heads = 2, d_ff = 128 }";
    // The policy that answers: a run of one step.
    train(dir.path(), "policy", (scratch, "", 1));
    let policy = dir.path().join("policy");
    let (url, token) = (queue.url(), queue.token());
    let store = dir.path().join("served");
    let options = [
        ["--engine", "embedded"],
        ["--model", policy.to_str().unwrap()],
        ["--context", "512"],
        ["--store", store.to_str().unwrap()],
        ["--queue", &url],
        ["--queue-token-file", token.to_str().unwrap()],
        ["--queue-group", "4"],
        ["--queue-source", "app"],
    ];
    let served = crate::serve::serving(&options.concat());
    let mut agent = Command::new(python3());
    agent.args(["-c", AGENT, &format!("http://{}", served.address)]);
    run_ok(agent.arg(&served.token).stderr(Stdio::inherit()));
    // Every rollout that was finished is in the queue: the server is not needed any more.
    drop(served);
    let rows = queue.stats()["rows"].as_u64().unwrap();
    assert_eq!(rows, 16);
    let data = format!(
        "data = {{ type = \"queue\", queue = {url:?}, token_file = {token:?}, wait_s = 1 }}"
    );
    let model = format!("{:?}", format!("run:{}", policy.display()));
    let last = train(dir.path(), "trained", (&model, &data, 2));
    let samples = &last["samples"];
    assert_eq!(samples["trained"], 16, "{last}");
    assert_eq!(
        (&samples["lost"], &samples["trained_twice"]),
        (&0.into(), &0.into())
    );
    assert_eq!(queue.count("trainer", "acked"), 16);
    // The first step trains what its own weights sampled: the log-probabilities are the same to the bit.
    let first = &steps(&dir.path().join("trained"))[0];
    assert_eq!(first["logprob_gap_max"], 0.0, "{first}");
    assert_eq!(first["rows"], 8, "{first}");
    let mut list = sinew();
    list.args(["episodes", "--json", "--purpose", "train"]);
    let trained = run_ok(list.arg(dir.path().join("trained")));
    let named = trained.lines().filter(|l| l.contains("queue-app:g"));
    assert_eq!(named.count(), 16, "{trained}");
}
