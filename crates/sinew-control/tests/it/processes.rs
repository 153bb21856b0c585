//! Child processes, and the supervisor that keeps them.

use sinew_control::{
    ControlDesk, ControlLimits, Launched, Launcher, LocalLauncher, RoleKind, RoleSpec, Supervisor,
    SupervisorLimits, SupervisorParts,
};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

fn sh(name: &str, script: &str) -> RoleSpec {
    RoleSpec {
        name: name.into(),
        command: ["sh", "-c", script].map(str::to_owned).into(),
        env: vec![("GREETING".into(), "hello".into())],
        folder: None,
        cpus: 1,
        gpus: 0,
        memory_mb: None,
        requeue: false,
    }
}

fn wait_for(mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "it does not happen");
        std::thread::yield_now();
    }
}

fn state(launcher: &LocalLauncher, name: &str) -> Option<Launched> {
    let listed = launcher.list().unwrap().into_iter();
    listed
        .filter(|role| role.name == name)
        .map(|role| role.state)
        .next()
}

#[test]
fn a_child_runs_once_ends_and_leaves_its_log() {
    let dir = tempfile::tempdir().unwrap();
    let launcher = LocalLauncher::new(dir.path());
    let spec = sh("r-rollout-0-0", "echo $GREETING; exit 3");
    launcher.ensure(&spec).unwrap();
    launcher.ensure(&spec).unwrap();
    let name = spec.name.as_str();
    wait_for(|| matches!(state(&launcher, name), Some(Launched::Ended(_))));
    let Some(Launched::Ended(why)) = state(&launcher, name) else {
        panic!("it ended");
    };
    assert!(why.contains('3'), "{why}");
    assert_eq!(launcher.logs(name, 5).unwrap(), "hello");
    assert_eq!(launcher.logs("r-rollout-1-0", 5).unwrap(), "");
    let missing = RoleSpec {
        command: vec!["/no/such/program".into()],
        ..sh("r-rollout-2-0", "")
    };
    let why = launcher.ensure(&missing).unwrap_err().to_string();
    assert!(why.contains("/no/such/program"), "{why}");
}

#[test]
fn a_stop_ends_a_child_with_everything_that_it_started() {
    let dir = tempfile::tempdir().unwrap();
    let launcher = LocalLauncher::new(dir.path());
    let spec = sh("r-rollout-0-0", "sleep 1000 & echo $!; wait");
    launcher.ensure(&spec).unwrap();
    let log = || launcher.logs(&spec.name, 1).unwrap();
    wait_for(|| !log().is_empty());
    let grandchild = format!("/proc/{}", log());
    assert!(Path::new(&grandchild).exists());
    launcher.stop(&spec.name).unwrap();
    launcher.stop(&spec.name).unwrap();
    wait_for(|| matches!(state(&launcher, &spec.name), Some(Launched::Ended(_))));
    let gone = || {
        let state = std::fs::read_to_string(format!("{grandchild}/stat"));
        // Nobody may be there to fetch the end of an orphan.
        state.map_or(true, |text| text.contains(") Z "))
    };
    wait_for(gone);
    launcher.stop("r-rollout-9-0").unwrap();
}

#[test]
fn the_end_of_the_owner_closes_the_input_of_its_children() {
    let dir = tempfile::tempdir().unwrap();
    let launcher = LocalLauncher::new(dir.path());
    // It waits for its input without another program, whose start would be part of the time that it gets.
    let spec = sh(
        "r-rollout-0-0",
        "trap '' TERM; echo ready; read line; echo closed",
    );
    launcher.ensure(&spec).unwrap();
    wait_for(|| !launcher.logs(&spec.name, 1).unwrap().is_empty());
    drop(launcher);
    let text = std::fs::read_to_string(dir.path().join("r-rollout-0-0.log")).unwrap();
    assert_eq!(text, "ready\nclosed\n");
}

#[test]
fn the_supervisor_replaces_what_fails_and_ends_what_runs() {
    let dir = tempfile::tempdir().unwrap();
    let desk = Arc::new(ControlDesk::new("r", 1, ControlLimits::default()));
    desk.scale(RoleKind::Rollout, 1, false).unwrap();
    let marker = dir.path().join("failed");
    let script = format!(
        "test -e {0} && exec sleep 1000; touch {0}; echo no memory; exit 3",
        marker.display()
    );
    let parts = SupervisorParts {
        desk: Arc::clone(&desk),
        launcher: Box::new(LocalLauncher::new(dir.path())),
        spec: Box::new(move |id, _| sh(id.as_str(), &script)),
        limits: SupervisorLimits {
            backoff_ms: 1,
            ..SupervisorLimits::default()
        },
        autoscale: Vec::new(),
        on_stop: Box::new(|| {}),
    };
    let supervisor = Supervisor::start(parts).unwrap();
    let causes = || -> Vec<String> {
        desk.events_after(0)
            .into_iter()
            .filter_map(|event| event.cause)
            .collect()
    };
    wait_for(|| {
        causes()
            .iter()
            .any(|why| why.contains("no memory") && why.contains('3'))
    });
    wait_for(|| {
        desk.views()
            .iter()
            .any(|view| view.id.as_str() == "r-rollout-0-1")
    });
    let view = desk.views().remove(0);
    assert!(view.cause.unwrap().contains("no memory"));
    // It never registered, so it does not end by itself.
    supervisor.shutdown(Duration::ZERO);
    let log = |index: u32| dir.path().join(format!("r-rollout-0-{index}.log"));
    assert!(log(0).exists());
    assert!(desk.views().iter().all(|view| view.state.name() != "READY"));
}
