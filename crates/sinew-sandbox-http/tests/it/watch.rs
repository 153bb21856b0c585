//! The server recovers when the sandbox spawner dies.

use crate::{ANN, request, server};
use serde_json::json;
use std::time::Duration;

fn children(parent: u32) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let numbers = all.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let below = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let after = stat.rsplit(')').next().unwrap_or_default();
        after.split_whitespace().nth(1) == Some(&parent.to_string())
    };
    numbers.filter(below).collect()
}

#[tokio::test]
async fn servers_recover_from_a_dead_spawner() {
    let server = server(|_| ()).await;
    let made = server.ask(ANN, "POST", "/v1/sandboxes", json!({})).await;
    let old = made.json()["id"].as_str().unwrap().to_owned();
    let spawner = children(std::process::id())[0];
    let inner = children(spawner)[0].to_string();
    let kill = std::process::Command::new("kill")
        .args(["-9", &inner])
        .status();
    assert!(kill.unwrap().success());
    // A request that was running when the spawner died fails.
    let mut answer = server.ask(ANN, "POST", "/v1/sandboxes", json!({})).await;
    if answer.status != 201 {
        assert_eq!(answer.code(), "died");
        answer = server.ask(ANN, "POST", "/v1/sandboxes", json!({})).await;
    }
    assert_eq!(answer.status, 201, "{}", answer.json());
    let id = answer.json()["id"].as_str().unwrap().to_owned();
    let run = json!({ "python": "print(6 * 7)" });
    let exec = |id: &str| format!("/v1/sandboxes/{id}/exec");
    let ran = server.ask(ANN, "POST", &exec(&id), run.clone()).await;
    assert_eq!(ran.json()["stdout"], "42\n");
    let health = server.send(request("GET", "/v1/health", None, "text/plain", b""));
    assert_eq!(health.await.json(), json!({ "status": "ok" }));
    assert_eq!(
        server.ask(ANN, "POST", &exec(&old), run).await.code(),
        "died"
    );
}

#[tokio::test]
async fn health_reports_that_no_sandboxes_can_be_created() {
    use sinew_sandbox::{ProcessConfig, ProcessProvider};
    use sinew_sandbox_http::{Bounds, Service, Tokens};
    use std::os::unix::fs::PermissionsExt;
    let folder = std::env::temp_dir().join(format!("sinew-health-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (script, broken) = (folder.join("spawner"), folder.join("broken"));
    let real = folder.join("jail");
    std::fs::write(&real, sinew_sandbox::JAIL).unwrap();
    std::fs::set_permissions(&real, std::fs::Permissions::from_mode(0o755)).unwrap();
    let lines = format!(
        "#!/bin/sh\n[ -e {} ] && exit 3\nexec {} \"$@\"\n",
        broken.display(),
        real.display()
    );
    std::fs::write(&script, lines).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut config = ProcessConfig::new("");
    config.spawner = Some(script);
    let provider = ProcessProvider::start(config).unwrap();
    let tokens = Tokens::parse(&format!("ann:{ANN}")).unwrap();
    let service = Service::new(
        vec![std::sync::Arc::new(provider)],
        tokens,
        Bounds::default(),
        None,
    );
    let server = crate::Server::of(service).await;
    std::fs::write(&broken, "").unwrap();
    let spawner = children(std::process::id())[0];
    let inner = children(spawner)[0].to_string();
    let kill = std::process::Command::new("kill")
        .args(["-9", &inner])
        .status();
    assert!(kill.unwrap().success());
    let ask = || server.send(request("GET", "/v1/health", None, "text/plain", b""));
    let mut response = ask().await;
    while response.status == 200 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        response = ask().await;
    }
    let expected = json!({ "status": "unavailable", "levels": ["process"] });
    assert_eq!((response.status, response.json()), (503, expected));
    std::fs::remove_file(&broken).unwrap();
    while ask().await.status != 200 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let made = server.ask(ANN, "POST", "/v1/sandboxes", json!({})).await;
    assert_eq!(made.status, 201, "{}", made.json());
    std::fs::remove_dir_all(&folder).unwrap();
}
