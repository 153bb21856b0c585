//! `sinew launch --on slurm` with the daemons of Slurm on this host, which run as root.

use crate::resume::recipe;
use crate::{failure, root, sinew};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Time for a change of jobs.
const PATIENCE: Duration = Duration::from_secs(240);
const LOOK: Duration = Duration::from_millis(200);

/// Slurm with three nodes on this host. It ends with the test.
struct Slurm(PathBuf);

impl Drop for Slurm {
    fn drop(&mut self) {
        self.script("stop");
    }
}

impl Slurm {
    fn start(folder: PathBuf) -> Self {
        let slurm = Self(folder);
        let started = slurm.script("start");
        let said = String::from_utf8_lossy(&started.stderr);
        assert!(started.status.success(), "{said}");
        slurm
    }

    fn script(&self, word: &str) -> Output {
        let script = root().join("scripts/slurm_host.sh");
        let mut command = Command::new("sh");
        command.arg(script).arg(word).arg(&self.0).output().unwrap()
    }

    fn output(&self, command: &mut Command) -> Output {
        let conf = self.0.join("slurm.conf");
        command.env("SLURM_CONF", conf).output().unwrap()
    }

    /// The output of a program of Slurm.
    fn call(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.output(Command::new(program).args(arguments));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn launch(&self, recipe: &Path, run: &Path) -> Output {
        let mut command = sinew();
        command.arg("launch").arg(recipe).args(["--on", "slurm"]);
        self.output(command.arg("--run-dir").arg(run))
    }

    /// The lines `NUMBER NAME STATE` of all jobs.
    fn jobs(&self) -> String {
        let all = ["--noheader", "--states=all", "--format=%i %j %T"];
        self.call("squeue", &all)
    }
}

/// Waits until a look shows what is wanted. The text of the last look goes into the failure.
fn wait_for(what: &str, mut look: impl FnMut() -> (bool, String)) {
    let end = Instant::now() + PATIENCE;
    loop {
        let (fits, shown) = look();
        if fits {
            return;
        }
        assert!(Instant::now() < end, "{what}: {shown}");
        std::thread::sleep(LOOK);
    }
}

/// Waits until roles with these ends of their names are ready, and no others.
fn ready(run: &Path, wanted: &[&str]) {
    wait_for("roles that are ready", || {
        let shown = sinew().arg("status").arg(run).arg("--json").output();
        let shown = shown.unwrap();
        let page: Value = serde_json::from_slice(&shown.stdout).unwrap_or_default();
        let roles = page["roles"].as_array().cloned().unwrap_or_default();
        let ready = roles.iter().filter(|role| role["state"] == "READY");
        let names: Vec<&str> = ready.filter_map(|role| role["id"].as_str()).collect();
        let fits = names.len() == wanted.len()
            && names.iter().zip(wanted).all(|(id, end)| id.ends_with(end));
        let said = String::from_utf8_lossy(&shown.stderr).into_owned();
        (fits, format!("{wanted:?}: {page} {said}"))
    });
}

/// A command about a run that succeeds.
fn told(words: &[&str], run: &Path, more: &[&str]) {
    let mut command = sinew();
    let output = command.args(words).arg(run).args(more).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {said}");
}

#[test]
fn a_run_on_slurm_loses_a_worker_is_scaled_and_ends_by_order() {
    let dir = tempfile::tempdir().unwrap();
    let slurm = Slurm::start(dir.path().join("slurm"));
    let more = [
        ("launch.listen", "\"127.0.0.1:0\""),
        ("launch.rollout", "{ count = 1, memory_mb = 500 }"),
        ("launch.slurm", "{ options = [\"--partition=all\"] }"),
        ("rollout.ticket_lease_s", "1.0"),
    ];
    let recipe = recipe(dir.path(), 20_000, &more);
    let run = dir.path().join("run");

    let text = std::fs::read_to_string(&recipe).unwrap();
    let wrong = dir.path().join("wrong.toml");
    std::fs::write(&wrong, text.replace("partition=all", "partition=none")).unwrap();
    let why = failure(&slurm.launch(&wrong, &run), 3);
    assert!(why.contains("partition specified: none"), "{why}");

    let launched = slurm.launch(&recipe, &run);
    let said = String::from_utf8_lossy(&launched.stderr);
    assert!(launched.status.success(), "{said}");
    ready(&run, &["rollout-0-0"]);
    let again = slurm.launch(&recipe, &run);
    assert!(String::from_utf8_lossy(&again.stdout).contains("runs already"));

    let jobs = slurm.jobs();
    let job = jobs.lines().find(|line| line.contains("-rollout-0-0 "));
    let number = job.and_then(|line| line.split(' ').next()).unwrap();
    slurm.call("scancel", &["--signal=KILL", "--batch", number]);
    ready(&run, &["rollout-0-1"]);
    told(&["scale"], &run, &["rollout=2"]);
    ready(&run, &["rollout-0-1", "rollout-1-0"]);

    told(&["stop"], &run, &[]);
    // The owner ends well; Slurm may have cancelled a role that was about to end.
    wait_for("jobs that ended", || {
        let jobs = slurm.jobs();
        let runs = |line: &str| {
            let state = line.rsplit(' ').next();
            state.is_some_and(|state| ["PENDING", "RUNNING", "COMPLETING"].contains(&state))
        };
        let owner = jobs.lines().find(|line| line.contains("-owner-0-0 "));
        let well = owner.is_some_and(|line| line.ends_with(" COMPLETED"));
        (well && !jobs.lines().any(runs), jobs)
    });
}
