//! From recipes to processes, without an engine.

use super::*;
use crate::environments::ENVIRONMENTS;

fn plan(more: &str) -> RunPlan {
    let text = format!(
        "name = \"demo\"\nmodel = {{ type = \"scratch\", d_model = 64, layers = 2, heads = 4, kv_heads = 2, d_ff = 128 }}\n\
         env = {{ type = \"tiny\" }}\nalgorithm = {{ type = \"grpo\" }}\n{more}"
    );
    RunPlan::parse(Path::new("demo.toml"), &text, ENVIRONMENTS).unwrap()
}

#[test]
fn one_recipe_starts_on_every_engine() {
    let mut plan = plan("[launch]\n[launch.rollout]\ncount = 4\n");
    for (on, expected) in [
        ("local", LaunchOn::Local),
        ("slurm", LaunchOn::Slurm),
        ("ray://head:8265", LaunchOn::Ray),
        ("kubernetes", LaunchOn::Kubernetes),
        ("hosts.toml", LaunchOn::Hosts),
    ] {
        launch_on(&mut plan, on).unwrap();
        let launch = plan.launch.as_ref().unwrap();
        assert_eq!(launch.on, expected);
        assert_eq!(launch.rollout.as_ref().unwrap().count, 4);
    }
    let launch = plan.launch.as_ref().unwrap();
    assert_eq!(
        launch.ray.as_ref().unwrap().url.as_deref(),
        Some("ray://head:8265")
    );
    let refused = launch_on(&mut plan, "nomad").unwrap_err();
    assert!(refused.text().contains("nomad") && refused.text().contains("kubernetes"));
}

#[test]
fn a_recipe_without_roles_gets_one_that_runs_episodes() {
    let mut plan = plan("");
    launch_on(&mut plan, "local").unwrap();
    let launch = plan.launch.as_ref().unwrap();
    let shown: Vec<_> = roles(launch)
        .into_iter()
        .map(|(kind, role)| (kind, role.count))
        .collect();
    assert_eq!(shown, [(RoleKind::Rollout, 1)]);
}

#[test]
fn a_role_knows_its_owner_and_its_name() {
    let plan = plan("[launch]\n[launch.rollout]\ncpus = 3\npreemptible = true\n");
    let launch = plan.launch.as_ref().unwrap();
    let place = ControlPlace {
        url: "https://owner:8092".into(),
        token_file: "/run/token".into(),
        ca_file: Some("/run/ca.pem".into()),
        fence: 1,
    };
    let id = RoleId::new("demo-1", RoleKind::Rollout, 0, 2);
    let spec = worker(launch, &id, RoleKind::Rollout, &place);
    let expected = "worker --role rollout --owner https://owner:8092 --token-file /run/token --name \
                    demo-1-rollout-0-2 --preemptible --stop-on-eof";
    assert_eq!(spec.command[1..].join(" "), expected);
    assert_eq!((spec.cpus, spec.name.as_str()), (3, "demo-1-rollout-0-2"));
    assert!(
        spec.env
            .contains(&(CA_VARIABLE.into(), "/run/ca.pem".into()))
    );
}

#[test]
fn an_engine_listens_where_the_workers_of_the_run_reach_it() {
    let mut plan = plan("[launch]\n[launch.rollout]\n[launch.engine]\ngpus = 1\n");
    let command = |plan: &RunPlan, url: &str, ca_file: Option<&str>| {
        let place = ControlPlace {
            url: url.into(),
            token_file: "/run/token".into(),
            ca_file: ca_file.map(PathBuf::from),
            fence: 1,
        };
        let id = RoleId::new("demo-1", RoleKind::Engine, 0, 0);
        let launch = plan.launch.as_ref().unwrap();
        worker(launch, &id, RoleKind::Engine, &place)
            .command
            .join(" ")
    };
    let local = command(&plan, "http://127.0.0.1:1", None);
    assert!(
        local.contains(" --listen 127.0.0.1:0") && !local.contains("--tls"),
        "{local}"
    );
    launch_on(&mut plan, "slurm").unwrap();
    let own = command(&plan, "https://owner:8092", Some("/run/tls/ca.pem"));
    assert!(
        own.contains(" --listen 0.0.0.0:0 --tls-own /run/tls"),
        "{own}"
    );
    let plain = command(&plan, "http://owner:8092", None);
    assert!(
        plain.contains(" --listen 0.0.0.0:0 --insecure-plain-http"),
        "{plain}"
    );
    // The run has no authority to pass for a certificate that it did not make.
    let other = command(&plan, "https://owner:8092", None);
    assert!(
        !other.contains("--tls") && !other.contains("--insecure"),
        "{other}"
    );
}

#[test]
fn an_owner_is_reached_where_its_engine_puts_it() {
    let plan = plan("[launch]\nlisten = \"10.0.0.7:9000\"\n");
    let launch = plan.launch.as_ref().unwrap();
    let address = control_address(launch).unwrap();
    assert_eq!(
        owner_url(launch, "r", address, "https"),
        "https://10.0.0.7:9000"
    );
    let mut other = launch.clone();
    other.on = LaunchOn::Kubernetes;
    assert_eq!(
        owner_url(&other, "r", address, "http"),
        "http://r-owner:9000"
    );
    other.owner_url = Some("https://front".into());
    assert_eq!(owner_url(&other, "r", address, "http"), "https://front");
    other.listen = Some("here".into());
    assert!(
        control_address(&other)
            .unwrap_err()
            .text()
            .contains("launch.listen")
    );
}

#[test]
fn an_owner_that_ended_gets_a_new_name_and_one_that_runs_none() {
    let role = |name: &str, state| LaunchedRole {
        name: name.into(),
        state,
    };
    let ended = || Launched::Ended("done".into());
    assert_eq!(next_owner("r", &[]), ("r-owner-0-0".into(), false));
    let after = [role("r-owner-0-1", ended()), role("r-owner-0-0", ended())];
    assert_eq!(next_owner("r", &after), ("r-owner-0-2".into(), false));
    let runs = [
        role("r-owner-0-1", Launched::Running),
        role("r-rollout-0-7", ended()),
    ];
    assert_eq!(next_owner("r", &runs), ("r-owner-0-1".into(), true));
}

#[test]
fn a_dry_run_shows_the_objects_of_a_cluster_without_a_secret() {
    let plan = plan("[launch]\non = \"kubernetes\"\n[launch.kubernetes]\nimage = \"sinew:1\"\n");
    let dir = tempfile::tempdir().unwrap();
    let recipe = dir.path().join("demo.toml");
    std::fs::write(&recipe, "name = \"demo\"\n").unwrap();
    let made = launch_owner(
        &plan,
        &recipe,
        dir.path(),
        &["--seed".into(), "3".into()],
        true,
    )
    .unwrap();
    assert_eq!(made.manifests.len(), 8);
    assert_eq!(made.manifests[0]["stringData"]["token"], "");
    let command = made.spec.command.join(" ");
    assert!(
        command.starts_with("sinew train /etc/sinew/recipe.toml --run-dir /runs/demo --resume")
    );
    assert!(
        command.ends_with("--on kubernetes --insecure-plain-http --seed 3"),
        "{command}"
    );
}
