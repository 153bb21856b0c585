//! Slurm's launcher against stand-ins of its programs, which keep jobs in files.

use sinew_control::{Launched, Launcher, RoleSpec, SlurmLauncher, SlurmOptions};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

const SBATCH: &str = r#"#!/bin/sh
cd "$(dirname "$0")" || exit 1
test "$1" = --parsable || { echo "no --parsable" >&2; exit 2; }
test -e full && { echo "sbatch: error: Batch job submission failed: queue is full" >&2; exit 1; }
script=$(cat)
name=$(printf '%s\n' "$script" | sed -n 's/^#SBATCH --job-name=//p')
number=$(ls jobs | wc -l)
printf '%s|%s|PENDING|Resources\n' "$number" "$name" > "jobs/$number"
printf '%s\n' "$script" > "script-$number"
echo "$number"
"#;

const SQUEUE: &str = r#"#!/bin/sh
cd "$(dirname "$0")" || exit 1
case " $* " in *" --format=%i|%j|%T|%r "*) ;; *) echo "wrong format: $*" >&2; exit 2 ;; esac
cat jobs/* 2>/dev/null
exit 0
"#;

const SCANCEL: &str = r#"#!/bin/sh
cd "$(dirname "$0")" || exit 1
sed -i 's/|[A-Z]*|.*/|CANCELLED|None/' "jobs/$1"
"#;

fn programs(dir: &Path) {
    std::fs::create_dir_all(dir.join("jobs")).unwrap();
    for (name, text) in [("sbatch", SBATCH), ("squeue", SQUEUE), ("scancel", SCANCEL)] {
        // Another process writes it: a test that starts a process meanwhile would keep the file open, and
        // the system starts no program that is open for writing.
        let mut writer = Command::new("sh")
            .args(["-c", "cat > \"$0\" && chmod 755 \"$0\""])
            .arg(dir.join(name))
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        writer
            .stdin
            .take()
            .unwrap()
            .write_all(text.as_bytes())
            .unwrap();
        assert!(writer.wait().unwrap().success());
    }
}

fn launcher(dir: &Path) -> SlurmLauncher {
    SlurmLauncher::new(SlurmOptions {
        run: "demo-1".into(),
        logs: dir.join("logs"),
        template: None,
        options: Vec::new(),
        programs: Some(dir.to_owned()),
    })
    .unwrap()
}

fn spec(name: &str) -> RoleSpec {
    RoleSpec {
        name: name.into(),
        command: vec!["sinew".into(), "worker".into()],
        env: Vec::new(),
        folder: None,
        cpus: 1,
        gpus: 0,
        memory_mb: None,
        requeue: false,
    }
}

#[test]
fn a_job_is_submitted_once_listed_and_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    programs(dir.path());
    let slurm = launcher(dir.path());
    let role = spec("demo-1-rollout-0-0");
    slurm.ensure(&role).unwrap();
    slurm.ensure(&role).unwrap();
    let listed = slurm.list().unwrap();
    let waiting = Launched::Waiting("slurm: PENDING (Resources)".into());
    assert_eq!((listed.len(), &listed[0].state), (1, &waiting));
    let script = std::fs::read_to_string(dir.path().join("script-0")).unwrap();
    assert!(script.ends_with("exec sinew worker\n"), "{script}");
    slurm.stop(&role.name).unwrap();
    let listed = slurm.list().unwrap();
    assert_eq!(
        listed[0].state,
        Launched::Ended("slurm: CANCELLED (None)".into())
    );
    slurm.stop(&role.name).unwrap();
    std::fs::write(dir.path().join("logs/demo-1-rollout-0-0.log"), "one\ntwo\n").unwrap();
    assert_eq!(slurm.logs(&role.name, 1).unwrap(), "two");
}

#[test]
fn refusals_have_the_words_of_slurm() {
    let dir = tempfile::tempdir().unwrap();
    programs(dir.path());
    std::fs::write(dir.path().join("full"), "").unwrap();
    let why = launcher(dir.path())
        .ensure(&spec("demo-1-rollout-0-0"))
        .unwrap_err();
    assert!(why.to_string().contains("queue is full"), "{why}");
    let empty = tempfile::tempdir().unwrap();
    let why = launcher(empty.path()).list().unwrap_err().to_string();
    assert!(
        why.contains("needs the program") && why.contains("squeue"),
        "{why}"
    );
}
