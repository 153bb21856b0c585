//! The container level: crun without a daemon, and daemons of Docker and Podman of our own.

#[path = "../../../sinew-container/tests/it/daemon.rs"]
mod daemon;

use crate::assert_held;
use daemon::Daemon;
use sinew_container::{Choice, ContainerConfig, ContainerProvider, EngineKind};
use sinew_lab::attack;
use sinew_lab::sandbox::leaks;
use sinew_sandbox::{SandboxProvider, SandboxSpec};
use std::path::{Path, PathBuf};

fn provider(kind: EngineKind, state: &Path, socket: Option<PathBuf>) -> ContainerProvider {
    let config = ContainerConfig {
        engine: Choice::Only(kind),
        state: state.into(),
        socket,
        ..ContainerConfig::default()
    };
    ContainerProvider::start(config)
        .unwrap_or_else(|e| panic!("{e}; scripts/setup.sh installs what this needs"))
}

async fn attacked(provider: &dyn SandboxProvider, filter: &str, least: usize) {
    let mut rows = Vec::new();
    attack::run(provider, filter, &mut |row| rows.push(row))
        .await
        .unwrap();
    assert_held(&rows, least);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_attack_escapes() {
    let dir = tempfile::tempdir().unwrap();
    let provider = provider(EngineKind::Crun, dir.path(), None);
    attacked(&provider, "", 61).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_attack_of_root_escapes_a_writable_root() {
    let dir = tempfile::tempdir().unwrap();
    let provider = provider(EngineKind::Crun, dir.path(), None);
    let mut rows = Vec::new();
    attack::run_writable(&provider, "", &mut |row| rows.push(row))
        .await
        .unwrap();
    assert_held(&rows, 58);
    let own = rows.iter().filter(|row| row.case.as_str() >= "85");
    assert_eq!(own.count(), 9, "{rows:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn attacks_of_root_hold_under_runc() {
    let dir = tempfile::tempdir().unwrap();
    let provider = provider(EngineKind::Runc, dir.path(), None);
    let mut rows = Vec::new();
    attack::run_writable(&provider, "85-91", &mut |row| rows.push(row))
        .await
        .unwrap();
    assert_held(&rows, 9);
}

#[tokio::test(flavor = "multi_thread")]
async fn attacks_hold_under_docker() {
    let daemon = Daemon::start();
    let dir = tempfile::tempdir().unwrap();
    let provider = provider(EngineKind::Docker, dir.path(), Some(daemon.socket()));
    for filter in [
        "21 ", "28 ", "30 ", "32 ", "38 ", "39 ", "41 ", "42 ", "48 keeps", "49 ", "55 ", "56 ",
    ] {
        attacked(&provider, filter, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn attacks_hold_under_podman() {
    let daemon = Daemon::podman();
    let dir = tempfile::tempdir().unwrap();
    let provider = provider(EngineKind::Podman, dir.path(), Some(daemon.socket()));
    for filter in ["07 ", "08 ", "21 ", "28 ", "32 ", "48 ", "56 "] {
        attacked(&provider, filter, 1).await;
    }
}

#[tokio::test]
async fn nothing_is_left_of_many() {
    let dir = tempfile::tempdir().unwrap();
    let provider = provider(EngineKind::Crun, dir.path(), None);
    let report = leaks::run(&provider, 40).await.unwrap();
    assert!(report.left.is_empty(), "{report:?}");
    // The counts are not zero while a sandbox lives.
    let held = provider.acquire(&SandboxSpec::default()).await.unwrap();
    let now = leaks::Footprint::now();
    assert!(now.processes > report.after.processes && now.groups > report.after.groups);
    assert!(now.namespaces > report.after.namespaces);
    held.destroy().await.unwrap();
}
