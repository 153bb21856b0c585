//! A run over several hosts: network namespaces with TLS between them, a partition, and a worker that dies.

use crate::resume::{done, recipe};
use crate::workers::{Owner, finished, same_end};
use crate::{root, wait_until};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Steps of the run.
const STEPS: u32 = 30;

/// Hosts of `scripts/netns_hosts.py`, which are removed when the test is over.
struct Hosts {
    name: String,
    /// Namespace and address of each host.
    hosts: Vec<(String, String)>,
}

fn script(args: &[&str]) -> std::process::Output {
    let mut command = Command::new("python3");
    command.arg(root().join("scripts/netns_hosts.py"));
    command.args(args).output().unwrap()
}

impl Hosts {
    /// `None`, and the reason in the test's output, where this machine allows no network namespaces.
    fn up(count: usize) -> Option<Self> {
        let probed = script(&["probe"]);
        if !probed.status.success() {
            let why = String::from_utf8_lossy(&probed.stderr);
            eprintln!("not run: no hosts can be made here: {why}");
            return None;
        }
        let name = format!("sinew-it-{}", std::process::id());
        let made = script(&["up", &name, "--hosts", &count.to_string()]);
        assert!(made.status.success(), "{made:?}");
        let made: Value = serde_json::from_slice(&made.stdout).unwrap();
        let text = |host: &Value, key: &str| host[key].as_str().unwrap().to_owned();
        let hosts = made["hosts"].as_array().unwrap().iter();
        let hosts = hosts.map(|host| (text(host, "namespace"), text(host, "address")));
        Some(Self {
            name,
            hosts: hosts.collect(),
        })
    }

    /// The program on a host.
    fn sinew(&self, host: usize) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.hosts[host].0]);
        command.arg(env!("CARGO_BIN_EXE_sinew")).current_dir(root());
        command
    }

    /// Parts two hosts, or heals them.
    fn between(&self, action: &str, a: &str, b: &str) {
        let acted = script(&[action, &self.name, a, b]);
        assert!(acted.status.success(), "{acted:?}");
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        script(&["down", &self.name]);
    }
}

/// Steps that a run has recorded.
fn steps(run: &Path) -> usize {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    text.lines().count()
}

/// Waits until the run has recorded some more steps, or all: commands between hosts can take longer than it.
fn wait_for_steps(run: &Path, more: usize) {
    let wanted = (steps(run) + more).min(STEPS as usize);
    wait_until("further steps", || steps(run) >= wanted);
}

#[test]
fn hosts_that_are_parted_and_a_worker_that_dies_change_nothing() {
    let Some(hosts) = Hosts::up(3) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), STEPS, &[("rollout.ticket_lease_s", "1.0")]);
    let whole = dir.path().join("whole");
    let single = done(&recipe, &whole, &[]);
    let run = dir.path().join("run");
    let at = format!("{}:9000", hosts.hosts[0].1);
    let owner = Owner::start_as(hosts.sinew(0), &recipe, &run, &at, &[]);
    // A listener beyond the loopback address has TLS by itself.
    assert_eq!(owner.url, format!("https://{at}"));
    let authority = run.join("tls/ca.pem").display().to_string();
    let worker = |host: usize| {
        let weights = dir.path().join(format!("weights-{host}"));
        let more = ["--tls-ca", authority.as_str()];
        owner.worker_as(hosts.sinew(host), &weights, &more, finished)
    };
    let (_parted, mut dies) = std::thread::scope(|threads| {
        let first = threads.spawn(|| worker(1));
        let second = worker(2);
        (first.join().unwrap(), second)
    });
    hosts.between("partition", "0", "1");
    // The other worker continues, with the tickets of the one that is away.
    wait_for_steps(&run, 3);
    hosts.between("heal", "0", "1");
    // From here on the one that was away is the only one.
    dies.kill();
    wait_for_steps(&run, 2);
    let last = owner.end();
    same_end("hosts", (&run, &last), (&whole, &single));
    assert_eq!(last["samples"]["lost"], 0, "{last}");
    assert_eq!(last["samples"]["trained_twice"], 0, "{last}");
}

#[test]
fn hosts_that_are_not_there_are_named() {
    let none = script(&["heal", "no-such-hosts", "0", "1"]);
    let said = String::from_utf8_lossy(&none.stderr).into_owned();
    assert_eq!(none.status.code(), Some(3), "{said}");
    assert!(said.contains("no-such-hosts"), "{said}");
    assert_eq!(script(&["cut", "x"]).status.code(), Some(2));
}
