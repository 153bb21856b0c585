//! Weights between processes: a run publishes, a server follows, and either is killed or stopped.

use crate::resume::{done, recipe, start};
use crate::serve::{Serving, post, serving, signal};
use crate::sinew;
use serde_json::{Value, json};
use std::path::Path;

/// A server of `model`, and of the weights in `follow`.
fn server(model: &Path, follow: Option<&Path>) -> Serving {
    let model = model.to_str().unwrap();
    let mut options = vec!["--engine", "embedded", "--model", model, "--context", "64"];
    if let Some(folder) = follow {
        options.extend(["--follow", folder.to_str().unwrap()]);
    }
    serving(&options)
}

/// The next version that a server reports, and the one that it came as a difference of.
fn next(server: &mut Serving) -> (u64, Option<u64>) {
    loop {
        let said = server.line();
        if let Some(version) = said["weights"]["version"].as_u64() {
            return (version, said["weights"]["base"].as_u64());
        }
    }
}

/// Answers of a server to a few pictures, with log-probabilities and the versions that sampled them.
fn answers(server: &Serving, rollout: &str) -> (Vec<Value>, Vec<u64>) {
    let open = json!({ "id": rollout, "task": "t" });
    let (status, opened) = post(&server.address, "/rollouts", &server.token, &open);
    assert_eq!(status, 201, "{opened}");
    let key = opened["api_key"].as_str().unwrap();
    for picture in ["A>........", "......<A.."] {
        let messages = json!([{ "role": "user", "content": picture }]);
        let ask = json!({ "model": "m", "temperature": 0, "max_tokens": 3, "messages": messages });
        let path = format!("/r/{rollout}/v1/chat/completions");
        let (status, said) = post(&server.address, &path, key, &ask);
        assert_eq!(status, 200, "{said}");
    }
    let path = format!("/rollouts/{rollout}");
    let (status, trace) = crate::serve::get(&server.address, &path, &server.token);
    assert_eq!(status, 200, "{trace}");
    let nodes = trace["trace"]["nodes"]
        .as_array()
        .unwrap_or_else(|| panic!("{trace}"));
    let sampled = nodes.iter().filter(|n| n["kind"] == "sampled");
    let said = sampled.clone().map(|n| json!([n["tokens"], n["logprobs"]]));
    let spans = sampled.flat_map(|n| n["versions"].as_array().unwrap());
    let versions = spans.map(|span| span["version"].as_u64().unwrap());
    (said.collect(), versions.collect())
}

#[test]
fn a_server_follows_a_run_through_kills_and_holds_nothing_up() {
    let dir = tempfile::tempdir().unwrap();
    // Shared memory, where the machine has it.
    let memory = tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap();
    let published = memory.path().join("weights");
    let first = dir.path().join("first");
    done(&recipe(dir.path(), 1, &[]), &first, &[]);
    let mut followed = server(&first, Some(&published));
    let (_, versions) = answers(&followed, "before");
    assert!(versions.iter().all(|v| *v == 0), "{versions:?}");

    let text = format!("{:?}", published.display().to_string());
    let learns = recipe(dir.path(), 12, &[("engine.weights_dir", &text)]);
    let run = dir.path().join("run");
    let mut child = start(&learns, &run, &[]);
    let (before_kill, _) = next(&mut followed);
    child.kill();
    // A version that was published whole is still served.
    answers(&followed, "orphaned");

    // A server that is stopped, and one that is dead, delay nothing.
    let mut stopped = server(&first, Some(&published));
    let (orphaned, _) = next(&mut stopped);
    signal(stopped.pid(), "STOP");
    let last = done(&learns, &run, &["--resume"]);
    assert_eq!(last["samples"]["trained_twice"], 0, "{last}");
    assert_eq!(last["samples"]["lost"], 0, "{last}");
    signal(stopped.pid(), "CONT");
    let trained = server(&run, None);
    let (expected, _) = answers(&trained, "expected");
    for (server, mut at) in [(&mut followed, before_kill), (&mut stopped, orphaned)] {
        while at != 12 {
            at = next(server).0;
        }
        let (said, versions) = answers(server, "after");
        assert_eq!(said, expected);
        assert!(
            !versions.is_empty() && versions.iter().all(|v| *v == 12),
            "{versions:?}"
        );
    }
    damaged(&first, &published);
}

/// Weights of which a byte was changed are refused by name, and those of before are served on.
fn damaged(first: &Path, published: &Path) {
    let latest = std::fs::read_to_string(published.join("LATEST")).unwrap();
    let folder = published.join(latest.trim());
    let file = ["deltas.zst", "model.safetensors"].map(|name| folder.join(name));
    let file = file.iter().find(|path| path.exists()).unwrap();
    let mut bytes = std::fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 64;
    std::fs::write(file, bytes).unwrap();
    let mut server = server(first, Some(published));
    let said = server.line();
    let why = said["weights"]["kept"]
        .as_str()
        .unwrap_or_else(|| panic!("{said}"));
    assert!(why.contains("tensor `"), "{why}");
    let (_, versions) = answers(&server, "damaged");
    assert!(versions.iter().all(|v| *v == 0), "{versions:?}");
}

#[test]
fn an_engine_that_follows_nothing_is_refused() {
    let refused = sinew()
        .args(["serve", "--engine", "fake", "--follow", "/dev/shm/none"])
        .output()
        .unwrap();
    let errors = crate::failure(&refused, 2);
    assert!(
        errors.contains("--follow") && errors.contains("leave it out"),
        "{errors}"
    );
}
