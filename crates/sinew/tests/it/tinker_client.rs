//! Runs that train and sample at a Tinker service, which is this program, too: `sinew serve --tinker`.

use crate::first::{free_port, rises, tiny};
use crate::{Running, failure, last_line, newest_checkpoint, run_ok, sinew};
use serde_json::Value;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Name of the base model at the service.
const MODEL: &str = "tiny/model";
/// Key of the only tenant.
const KEY: &str = "tml-tests-0123456789abcdef";
/// Positions of the model.
const CONTEXT: &str = "1024";
/// Longer than anything takes that works.
const PATIENCE: Duration = Duration::from_secs(300);

/// A folder with a model of bytes that has learned nothing yet.
fn model(dir: &Path) -> PathBuf {
    let (run, folder) = (dir.join("base"), dir.join("model"));
    let recipe = tiny(dir, "tasks", 1);
    let mut train = sinew();
    train.arg("train").arg(recipe).arg("--run-dir").arg(&run);
    run_ok(&mut train);
    run_ok(sinew().arg("export").arg(&run).arg(&folder));
    folder
}

/// A service, which can be killed and started again at its port with its state.
struct Service {
    dir: PathBuf,
    model: PathBuf,
    port: u16,
    child: Option<Running>,
}

impl Service {
    fn start(dir: &Path) -> Self {
        let keys = dir.join("keys");
        std::fs::write(&keys, format!("tests:{KEY}\n")).unwrap();
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(&keys, mode).unwrap();
        let mut service = Self {
            dir: dir.to_owned(),
            model: model(dir),
            port: free_port(),
            child: None,
        };
        service.again();
        service
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Starts the process, and waits until it listens.
    fn again(&mut self) {
        self.kill();
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.dir.join("service.log"))
            .unwrap();
        let mut command = sinew();
        command
            .args(["serve", "--tinker"])
            .arg(format!("127.0.0.1:{}", self.port))
            .arg("--model")
            .arg(format!("{MODEL}={}", self.model.display()))
            .args(["--context", CONTEXT, "--state"])
            .arg(self.dir.join("state"))
            .arg("--keys")
            .arg(self.dir.join("keys"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let mut child = Running(command.spawn().unwrap());
        let end = Instant::now() + PATIENCE;
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "{}", self.log());
            assert!(Instant::now() < end, "{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        self.child = Some(child);
    }

    /// Ends the process as a power failure would.
    fn kill(&mut self) {
        drop(self.child.take());
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("service.log")).unwrap_or_default()
    }

    /// The recipe of `examples/first/tasks/` with both parts at the service. `head` and `tail` are more keys,
    /// the first of no table.
    fn recipe(&self, name: &str, steps: u32, head: &str, tail: &str) -> PathBuf {
        let text = std::fs::read_to_string(tiny(&self.dir, "tasks", steps)).unwrap();
        let scratch = text
            .lines()
            .find(|line| line.starts_with("model ="))
            .unwrap();
        let folder = format!("model = {:?}", self.model.display().to_string());
        let measured = "[eval]\ntasks = 1\nepisodes_per_task = 16\n";
        let mut text = text
            .replacen(scratch, &format!("{folder}\n{head}"), 1)
            .replacen("[eval]\ntasks = 1\n", measured, 1);
        text.push_str(&format!(
            "[trainer]\ntype = \"tinker\"\nurl = {:?}\ntimeout_s = 120.0\nrestarts = 20\n\
             [engine]\ntype = \"tinker\"\n{tail}",
            self.url()
        ));
        let path = self.dir.join(format!("{name}.toml"));
        std::fs::write(&path, text).unwrap();
        path
    }

    fn train(&self, recipe: &Path, run: &str, more: &[&str]) -> Command {
        let mut command = with_key();
        command.arg("train").arg(recipe).arg("--json").args(more);
        command.arg("--run-dir").arg(self.dir.join(run));
        command
    }
}

/// The program with the key of the tenant.
fn with_key() -> Command {
    let mut command = sinew();
    command.env("TINKER_API_KEY", KEY);
    command
}

/// A loss that bounds the ratio of trainer and sampler.
const BOUNDED: &str = "algorithm = { type = \"grpo\", dual_clip = 3.0 }";

/// Adapters on everything that a service can adapt.
const LORA: &str = "[train.lora]\nrank = 8\ntargets = [\"q_proj\", \"k_proj\", \"v_proj\", \"o_proj\", \"gate_proj\", \
                    \"up_proj\", \"down_proj\", \"lm_head\"]\n";

/// Steps that a run has recorded.
fn steps(run: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let steps = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    steps.map(|step| step["step"].as_u64().unwrap()).collect()
}

/// Waits for a number of steps of a run that must not end before.
fn wait_for(child: &mut Child, run: &Path, count: usize) {
    let end = Instant::now() + PATIENCE;
    while steps(run).len() < count {
        let ended = child.try_wait().unwrap();
        assert!(ended.is_none(), "it ended with {ended:?}");
        assert!(Instant::now() < end, "{:?}", steps(run));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_run_learns_at_a_service_and_both_sides_may_be_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut service = Service::start(dir.path());
    let recipe = service.recipe("r", 24, BOUNDED, LORA);
    let text = std::fs::read_to_string(&recipe).unwrap();
    let slower = text.replace(
        "learning_rate = 3e-3",
        "learning_rate = 1e-2\ncheckpoint_every = 2",
    );
    std::fs::write(&recipe, slower).unwrap();
    let run = dir.path().join("tasks");
    let mut child = service
        .train(&recipe, "tasks", &[])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for(&mut child, &run, 3);
    service.kill();
    std::thread::sleep(Duration::from_millis(700));
    service.again();
    let after = steps(&run).len() + 3;
    wait_for(&mut child, &run, after);
    child.kill().unwrap();
    child.wait().unwrap();
    let resumed = service.train(&recipe, "tasks", &["--resume"]).output();
    let last = last_line(&resumed.unwrap());
    assert_eq!(last["samples"]["lost"], 0, "{last}");
    assert_eq!(last["samples"]["trained_twice"], 0, "{last}");
    let all: Vec<u64> = (1..=24).collect();
    assert_eq!(steps(&run), all, "steps are there once, in order");
    rises(dir.path(), "tasks");
    // The checkpoint names the weights, and has none.
    let checkpoint = newest_checkpoint(&run);
    let state = std::fs::read_to_string(checkpoint.join("tinker.json")).unwrap();
    assert!(
        state.contains("tinker://") && state.contains(MODEL),
        "{state}"
    );
    assert!(!checkpoint.join("model.safetensors").exists());
    let mut export = sinew();
    export.arg("export").arg(&run).arg(dir.path().join("out"));
    let why = failure(&export.output().unwrap(), 2);
    assert!(why.contains("tinker://"), "{why}");
    // Another run starts from its weights, with those as the reference.
    let head = "algorithm = { type = \"grpo\", dual_clip = 3.0, kl = { coefficient = 0.01 } }";
    let text = std::fs::read_to_string(service.recipe("next", 2, head, LORA)).unwrap();
    let folder = format!("{:?}", service.model.display().to_string());
    let source = format!("{:?}", format!("run:{}", run.display()));
    let next = dir.path().join("next.toml");
    std::fs::write(&next, text.replacen(&folder, &source, 1)).unwrap();
    let last = last_line(&service.train(&next, "next", &[]).output().unwrap());
    assert_eq!(last["samples"]["lost"], 0, "{last}");
    let reward = last["eval"]["before"]["reward"].as_f64().unwrap();
    assert!(reward > 0.25, "it starts from what was learned: {last}");
}

#[test]
fn all_weights_train_and_models_of_the_service_score() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::start(dir.path());
    let head = format!(
        "algorithm = {{ type = \"grpo\", dual_clip = 3.0, kl = {{ coefficient = 0.01 }} }}\n\
         reference = {{ model = \"tinker:{MODEL}\" }}"
    );
    let recipe = service.recipe("r", 2, &head, "");
    let checked = with_key().arg("check").arg(&recipe).output().unwrap();
    let told = String::from_utf8(checked.stdout).unwrap();
    let served = format!("{MODEL} at {}", service.url());
    assert!(
        told.contains(&served) && told.contains("the Tinker service has it"),
        "{told}"
    );
    let last = last_line(&service.train(&recipe, "run", &[]).output().unwrap());
    assert_eq!(last["samples"]["lost"], 0, "{last}");
    for line in std::fs::read_to_string(dir.path().join("run/metrics.jsonl"))
        .unwrap()
        .lines()
    {
        let step: Value = serde_json::from_str(line).unwrap();
        // The service computes in f32 on both sides.
        let gap = step["logprob_gap_max"].as_f64().unwrap();
        assert!(gap < 0.1, "{line}");
    }
    let mut doctor = with_key();
    doctor.args(["doctor", "--json", "--tinker", &service.url()]);
    // Other parts of the host may lack something.
    let text = String::from_utf8(doctor.output().unwrap().stdout).unwrap();
    let rows = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let rows: Vec<Value> = rows.filter(|row| row["group"] == "tinker").collect();
    assert_eq!(rows.len(), 3, "{rows:?}");
    assert!(rows.iter().all(|row| row["ok"] == true), "{rows:?}");
}

#[test]
fn what_a_service_refuses_is_named_before_anything_runs() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::start(dir.path());
    let refused = |command: &mut Command, code: i32, named: &[&str]| {
        let said = failure(&command.output().unwrap(), code);
        for part in named {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(!said.contains(KEY), "{said}");
        let _ = std::fs::remove_dir_all(dir.path().join("run"));
    };
    let recipe = service.recipe("r", 2, BOUNDED, "");
    let mut without = service.train(&recipe, "run", &[]);
    without.env_remove("TINKER_API_KEY");
    refused(&mut without, 3, &["TINKER_API_KEY is not set"]);
    let mut wrong = service.train(&recipe, "run", &[]);
    wrong.env("TINKER_API_KEY", "tml-other-0123456789abcdef");
    refused(&mut wrong, 3, &["trainer.api_key_env", "401"]);
    let text = std::fs::read_to_string(&recipe).unwrap();
    let other = |from: &str, to: &str| {
        let path = dir.path().join("other.toml");
        assert!(text.contains(from), "{text}");
        std::fs::write(&path, text.replace(from, to)).unwrap();
        service.train(&path, "run", &[])
    };
    let unknown = "type = \"tinker\"\nbase_model = \"org/large\"\nurl";
    let mut unknown = other("type = \"tinker\"\nurl", unknown);
    refused(&mut unknown, 2, &["org/large", MODEL]);
    let short = text
        .replace(&service.url(), "http://127.0.0.1:1")
        .replace("timeout_s = 120.0", "timeout_s = 1.0");
    let path = dir.path().join("nowhere.toml");
    std::fs::write(&path, short).unwrap();
    refused(&mut service.train(&path, "run", &[]), 3, &["not reached"]);
    let part = "[train.lora]\nrank = 4\ntargets = [\"q_proj\"]\n[trainer]\n";
    let mut part = other("[trainer]\n", part);
    refused(&mut part, 2, &["train.lora.targets", "down_proj"]);
}
