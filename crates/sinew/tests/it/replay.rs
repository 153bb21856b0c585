//! Repeated episodes and steps, and episodes that continue from their middle.

use crate::resume::{done, recipe, train};
use crate::{json_lines, sinew};
use serde_json::{Value, json};
use std::fs;
#[cfg(feature = "egress")]
use std::io::{Read, Write};
#[cfg(feature = "egress")]
use std::net::TcpListener;
use std::path::Path;
#[cfg(feature = "egress")]
use std::path::PathBuf;
use std::process::Output;
#[cfg(feature = "egress")]
use std::sync::{Arc, Mutex};

/// A command about a run.
fn ask(run: &Path, arguments: &[&str]) -> Output {
    let mut command = sinew();
    command.args(arguments).arg("--run-dir").arg(run);
    command.output().unwrap()
}

/// Its one JSON object and its exit code.
fn answer(run: &Path, arguments: &[&str]) -> (Value, i32) {
    let output = ask(run, &[arguments, &["--json"]].concat());
    let code = output.status.code().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let said = serde_json::from_str(text.trim());
    let errors = String::from_utf8_lossy(&output.stderr);
    (said.unwrap_or_else(|e| panic!("{e}: {text}{errors}")), code)
}

/// Episodes of training with at least so many turns.
fn episodes(run: &Path, turns: u64) -> Vec<String> {
    let output = ask(run, &["episodes", "--purpose", "train", "--json"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let rows = json_lines(&text).into_iter();
    let long = rows.filter(|e: &Value| e["turns"].as_u64().unwrap() >= turns);
    long.map(|e| e["episode"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn episodes_and_steps_come_out_again_and_forks_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, &[]);
    let run = dir.path().join("run");
    done(&recipe, &run, &[]);
    let long = episodes(&run, 3);
    for episode in long.iter().take(3) {
        let (again, code) = answer(&run, &["replay", episode]);
        assert_eq!((code, &again["equal"]), (0, &json!(true)), "{again}");
        assert!(again["compared"].as_u64().unwrap() >= 5, "{again}");
    }
    // Step 4 has a checkpoint before it and its own; step 1 has neither, and the run starts again.
    for (step, from, kept) in [(4, 2, true), (1, 0, false)] {
        let (again, code) = answer(&run, &["replay", "--step", &step.to_string()]);
        assert_eq!((code, &again["equal"]), (0, &json!(true)), "{again}");
        assert_eq!(again["from"], from);
        assert_eq!(again["weights"].is_object(), kept, "{again}");
    }
    // The recorded metrics are changed: the first difference is named.
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let changed = metrics.lines().map(|line| {
        let mut record: Value = serde_json::from_str(line).unwrap();
        if record["step"] == 3 {
            record["grad_norm"] = json!(123.5);
        }
        format!("{record}\n")
    });
    fs::write(run.join("metrics.jsonl"), changed.collect::<String>()).unwrap();
    let output = ask(&run, &["replay", "--step", "4"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.contains("step 3 is not as recorded: first grad_norm"),
        "{text}"
    );
    assert_eq!(output.status.code(), Some(1));
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 2, "the copy is gone: {left:?}");

    let episode = &long[0];
    let asked = ["fork", episode, "--at-turn", "2", "--count", "2"];
    let output = ask(&run, &[&asked[..], &["--json"]].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    let forks = json_lines(&text);
    assert_eq!(
        forks.len(),
        2,
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let (was, _) = answer(&run, &["show", episode]);
    for fork in &forks {
        let nodes = fork["trace"]["nodes"].as_array().unwrap();
        assert_eq!(nodes[1]["tokens"], was["nodes"][1]["tokens"]);
        assert_eq!(nodes[1]["versions"][0]["version"], 0);
        let sampled = nodes
            .iter()
            .find(|n| n["turn"] == 2 && n["kind"] == "sampled");
        assert_eq!(sampled.unwrap()["versions"][0]["version"], 4, "{fork}");
        // It is stored, and is nothing that is trained.
        let id = fork["episode"].as_str().unwrap();
        let (stored, _) = answer(&run, &["show", id]);
        assert_eq!(stored["origin"]["purpose"], "fork");
    }
    let resumed = done(&recipe, &run, &["--resume"]);
    assert_eq!(resumed["samples"]["trained_twice"], 0);
}

/// An environment of a file, which counts.
fn counting(word: &str) -> String {
    format!(
        "from sinew import Env\n\nclass Count(Env):\n    n = 0\n\n    def step(self, text):\n        self.n += 1\n        \
         return f'{word} {{self.n}}'\n\n    def reward(self, task):\n        return 1.0 if self.n else 0.0\n\n    \
         @staticmethod\n    def tasks(split, seed):\n        return [{{'prompt': f'{{split}} {{i}}'}} for i in range(4)]\n"
    )
}

#[test]
fn a_world_that_changed_is_named_with_its_first_difference() {
    let dir = tempfile::tempdir().unwrap();
    let module = dir.path().join("count.py");
    fs::write(&module, counting("tick")).unwrap();
    let recipe = dir.path().join("own.toml");
    let text = format!(
        "seed = 1\n[model]\ntype = \"scratch\"\nd_model = 32\nlayers = 1\nheads = 2\nkv_heads = 1\nd_ff = 64\n\
         [env]\ntype = \"python\"\nmodule = \"{}:Count\"\n[algorithm]\ntype = \"grpo\"\n\
         [rollout]\ntasks_per_step = 2\ngroup_size = 2\nmax_turns = 3\nmax_turn_tokens = 4\nmax_context_tokens = 256\n\
         [train]\nsteps = 1\n[eval]\ntasks = 1\n",
        module.display()
    );
    fs::write(&recipe, text).unwrap();
    let run = dir.path().join("run");
    let output = train(&recipe, &run, &[]).output().unwrap();
    // Equal rewards teach nothing, which the last line reports; only the episodes count here.
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("\"samples\""), "{text}");
    let episode = &episodes(&run, 2)[0];
    let (again, code) = answer(&run, &["replay", episode]);
    assert_eq!((code, &again["equal"]), (0, &json!(true)), "{again}");
    let (forked, code) = answer(
        &run,
        &["fork", episode, "--at-turn", "2", "--say", "Go on."],
    );
    assert_eq!(code, 0, "{forked}");
    let nodes = forked["trace"]["nodes"].as_array().unwrap();
    let seen = nodes
        .iter()
        .find(|n| n["turn"] == 1 && n["kind"] == "observation");
    let messages = seen.unwrap()["messages"].as_array().unwrap();
    assert_eq!(
        messages.last().unwrap()["content"],
        "Go on.",
        "{messages:?}"
    );

    fs::write(&module, counting("tock")).unwrap();
    let (again, code) = answer(&run, &["replay", episode]);
    assert_eq!((code, &again["equal"]), (1, &json!(false)), "{again}");
    let first = &again["changes"][0];
    assert_eq!(
        (&first["turn"], &first["field"]),
        (&json!(1), &json!("messages"))
    );
    assert_eq!(
        (&first["was"], &first["is"]),
        (&json!("tick 1"), &json!("tock 1"))
    );
    assert_eq!(again["drift"][0]["part"], "environment", "{again}");
    let output = ask(&run, &["fork", episode, "--at-turn", "3"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("the world cannot be restored"), "{text}");
    // A step runs no episode: it comes out again, and changes are reported. Later edits of the recipe do not
    // matter.
    let edited = fs::read_to_string(run.join("recipe.toml")).unwrap();
    assert!(edited.contains("group_size = 2"), "{edited}");
    fs::write(
        run.join("recipe.toml"),
        edited.replace("group_size = 2", "group_size = 4"),
    )
    .unwrap();
    let (again, code) = answer(&run, &["replay", "--step", "1"]);
    assert_eq!((code, &again["equal"]), (0, &json!(true)), "{again}");
    let told = again["changed_since"].as_array().unwrap();
    let names = |word: &str| told.iter().any(|t| t.as_str().unwrap().contains(word));
    assert!(names("env.version") && !names("group_size"), "{again}");
}

#[test]
fn what_cannot_be_done_again_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 1, &[]);
    let run = dir.path().join("run");
    let last = done(&recipe, &run, &[]);
    assert!(last["eval"].is_object());
    let episode = &episodes(&run, 1)[0];
    for (arguments, said) in [
        (&["replay", "nothing"][..], "episode nothing is not in"),
        (
            &["replay", "--step", "9"],
            "--step 9: the run has steps 1 to 1",
        ),
        (&["fork", episode, "--at-turn", "99"], "allowed: 1 to"),
        (&["replay"], "required arguments"),
    ] {
        let output = ask(&run, arguments);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains(said), "{arguments:?}: {text}");
    }
}

/// A server that answers a word, which can be changed, and counts what it was asked.
#[cfg(feature = "egress")]
fn server() -> (u16, Arc<Mutex<(&'static str, usize)>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let says = Arc::new(Mutex::new(("yes", 0)));
    let own = Arc::clone(&says);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, mut head) = (stream.unwrap(), Vec::new());
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) == 1 {
                head.push(byte[0]);
            }
            let mut own = own.lock().unwrap();
            own.1 += 1;
            let (word, bytes) = (own.0, own.0.len());
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {bytes}\r\nconnection: close");
            let _ = write!(stream, "{head}\r\n\r\n{word}");
        }
    });
    (port, says)
}

/// A run whose episodes are scored by a program that asks the network.
#[cfg(feature = "egress")]
fn asks_the_network(dir: &Path, mode: &str, port: u16) -> PathBuf {
    let program = format!(
        "import sys, urllib.request\nurl = 'http://127.0.0.1:{port}/open/x'\n\
         body = urllib.request.urlopen(url, timeout=20).read().decode()\nsys.exit(body != 'yes')\n"
    );
    let row = |i: usize| json!({ "question": format!("Say {i}"), "check": program }).to_string();
    let rows: Vec<String> = (0..20).map(row).collect();
    fs::write(dir.join("tasks.jsonl"), rows.join("\n")).unwrap();
    let text = format!(
        "seed = 1\ntasks = {{ source = \"tasks.jsonl\", prompt = \"{{{{ question }}}}\" }}\n\
         reward = \"program(check)\"\n[model]\ntype = \"scratch\"\nd_model = 32\nlayers = 1\nheads = 2\n\
         kv_heads = 1\nd_ff = 64\n[rollout]\ntasks_per_step = 2\ngroup_size = 2\nmax_turn_tokens = 4\n\
         max_context_tokens = 160\n[train]\nsteps = 1\n[eval]\ntasks = 1\n[sandbox.egress]\n\
         mode = \"{mode}\"\n[[sandbox.egress.rules]]\nhost = \"127.0.0.1\"\nscheme = \"http\"\n\
         ports = [{port}]\npaths = [\"/open/*\"]\naddresses = [\"127.0.0.1/32\"]\n"
    );
    fs::write(dir.join("net.toml"), text).unwrap();
    let mut command = sinew();
    let arguments = ["train", "net.toml", "--json", "--run-dir", mode];
    let output = command.current_dir(dir).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("\"samples\""), "{text}{errors}");
    dir.join(mode)
}

/// Like [`answer`], but in the folder of the recipe, whose tasks are found from there.
#[cfg(feature = "egress")]
fn again(dir: &Path, run: &Path, episode: &str) -> (Value, Option<i32>, String) {
    let mut command = sinew();
    command.current_dir(dir).args(["replay", episode, "--json"]);
    let output = command.arg("--run-dir").arg(run).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let said = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {errors}"));
    (said, output.status.code(), errors)
}

#[cfg(feature = "egress")]
#[test]
fn the_network_of_an_episode_answers_as_recorded_and_is_never_used() {
    let dir = tempfile::tempdir().unwrap();
    let (port, says) = server();
    let run = asks_the_network(dir.path(), "record", port);
    let episode = &episodes(&run, 1)[0];
    let (stored, _) = answer(&run, &["show", episode]);
    assert_eq!(stored["outcome"]["reward"], 1.0, "{stored}");
    let asked = says.lock().unwrap().1;
    assert!(asked >= 4, "{asked}");

    // The server has changed since: the recorded answer counts.
    says.lock().unwrap().0 = "no";
    let (same, code, errors) = again(dir.path(), &run, episode);
    assert_eq!(
        (code, &same["equal"]),
        (Some(0), &json!(true)),
        "{same}{errors}"
    );

    // The request is the first difference, by name, if its recording is missing.
    let request = format!("network request GET http://127.0.0.1:{port}/open/x");
    let recording = run.join(format!("network/episodes/{episode}.jsonl"));
    fs::remove_file(&recording).unwrap();
    let missed = |run: &Path, episode: &str| {
        let (other, code, errors) = again(dir.path(), run, episode);
        let first = &other["changes"][0];
        assert_eq!(
            (code, &first["field"]),
            (Some(1), &json!(request)),
            "{other}{errors}"
        );
        assert!(errors.contains(&format!("first {request}")), "{errors}");
        let fields: Vec<&Value> = other["changes"].as_array().unwrap().iter().collect();
        assert!(fields.iter().any(|c| c["field"] == "reward"), "{other}");
    };
    missed(&run, episode);

    // A run that recorded nothing is as one without this recording.
    says.lock().unwrap().0 = "yes";
    let live = asks_the_network(dir.path(), "live", port);
    let before = says.lock().unwrap().1;
    assert!(before > asked && !live.join("network").exists());
    missed(&live, &episodes(&live, 1)[0]);
    assert_eq!(says.lock().unwrap().1, before, "replays use no network");
}
