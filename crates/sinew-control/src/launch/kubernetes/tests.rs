//! Manifests: everything that a cluster needs, and nothing that it would refuse.

use super::*;

fn options() -> KubernetesOptions {
    KubernetesOptions {
        run: "demo-123456".into(),
        namespace: None,
        image: "sinew:1".into(),
        folder: "/runs".into(),
        claim: Some("runs".into()),
        port: 8092,
    }
}

fn spec(name: &str) -> RoleSpec {
    RoleSpec {
        name: name.into(),
        command: ["sinew", "worker", "a \"b\": c"].map(str::to_owned).into(),
        env: vec![("SINEW_LOG".into(), "info".into())],
        folder: None,
        cpus: 2,
        gpus: 1,
        memory_mb: Some(2048),
        requeue: false,
    }
}

#[test]
fn a_role_is_a_job_that_nobody_else_restarts() {
    let job = options().role(&spec("demo-123456-engine-3-7")).unwrap();
    assert_eq!(
        (&job["apiVersion"], &job["kind"]),
        (&json!("batch/v1"), &json!("Job"))
    );
    assert_eq!(job["metadata"]["name"], "demo-123456-engine-3-7");
    assert_eq!(job["metadata"]["labels"]["sinew/role"], "engine");
    assert_eq!(job["spec"]["backoffLimit"], 0);
    let pod = &job["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(container["command"][2], "a \"b\": c");
    assert_eq!(container["resources"]["limits"]["nvidia.com/gpu"], "1");
    assert_eq!(container["resources"]["requests"]["memory"], "2048Mi");
    assert_eq!(
        container["env"][0],
        json!({"name": "SINEW_LOG", "value": "info"})
    );
    assert_eq!(
        pod["volumes"][0]["persistentVolumeClaim"]["claimName"],
        "runs"
    );
    assert_eq!(pod["automountServiceAccountToken"], false);
    assert_eq!(
        pod["securityContext"]["seccompProfile"]["type"],
        "RuntimeDefault"
    );
}

#[test]
fn every_container_is_bounded_in_its_rights() {
    let mut made = options()
        .run(&spec("demo-123456-owner-0-2"), "name = \"x\"\n", "secret")
        .unwrap();
    made.push(options().role(&spec("demo-123456-sandbox-0-0")).unwrap());
    let recipe = made.iter().find(|m| m["kind"] == "ConfigMap").unwrap();
    assert_eq!(recipe["data"]["name"], "demo-123456");
    let jobs: Vec<&Value> = made.iter().filter(|m| m["kind"] == "Job").collect();
    assert_eq!(jobs.len(), 2);
    for job in jobs {
        let pod = &job["spec"]["template"]["spec"];
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        let rights = &pod["containers"][0]["securityContext"];
        assert_eq!(rights["allowPrivilegeEscalation"], false);
        assert_eq!(rights["readOnlyRootFilesystem"], true);
        assert_eq!(rights["capabilities"]["drop"], json!(["ALL"]));
        let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
        let volumes = pod["volumes"].as_array().unwrap();
        for mount in mounts {
            assert!(
                volumes.iter().any(|v| v["name"] == mount["name"]),
                "{mount}"
            );
        }
    }
}

#[test]
fn a_run_has_its_secret_recipe_rights_and_owner() {
    let made = options()
        .run(&spec("demo-123456-owner-0-2"), "name = \"x\"\n", "secret")
        .unwrap();
    let kinds: Vec<&str> = made.iter().filter_map(|m| m["kind"].as_str()).collect();
    let expected = [
        "Secret",
        "ConfigMap",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "Service",
        "NetworkPolicy",
        "Job",
    ];
    assert_eq!(kinds, expected);
    assert_eq!(made[0]["stringData"]["token"], "secret");
    assert_eq!(made[1]["data"]["recipe.toml"], "name = \"x\"\n");
    assert_eq!(made[5]["spec"]["ports"][0]["port"], 8092);
    assert_eq!(made[7]["metadata"]["name"], "demo-123456-owner-0-2");
    for manifest in &made {
        assert_eq!(manifest["metadata"]["labels"]["sinew/run"], "demo-123456");
        let name = manifest["metadata"]["name"].as_str().unwrap();
        assert!(
            name.len() <= 63 && name.starts_with("demo-123456"),
            "{name}"
        );
    }
}

#[test]
fn a_job_is_what_its_conditions_say() {
    assert!(matches!(
        job_state(&json!({"status": {}})),
        Launched::Waiting(_)
    ));
    assert_eq!(
        job_state(&json!({"status": {"active": 1}})),
        Launched::Running
    );
    let failed = json!({"status": {"active": 0, "conditions": [
        {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "m"}]}});
    let Launched::Ended(why) = job_state(&failed) else {
        panic!("it ended");
    };
    assert!(why.contains("BackoffLimitExceeded"), "{why}");
}
