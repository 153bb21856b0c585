//! Recording, replay and the shared cache.

use crate::world::{World, body, config, ok, rule, status};
use sinew_egress::{EgressConfig, Mode, RuleScheme};

fn in_mode(base: &EgressConfig, mode: Mode, world: &World) -> EgressConfig {
    EgressConfig {
        mode,
        folder: Some(world.dir.path().join("recordings")),
        ..base.clone()
    }
}

#[tokio::test]
async fn replays_have_the_recorded_bytes_and_use_no_network() {
    let world = World::new();
    // Responses differ by request and have unusual headers and framing.
    let script = |n: usize, _: &str| {
        match n {
        0 => b"HTTP/1.1 200 OK\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\nX-N: 0\r\nSet-Cookie: a=1\r\n\
         Set-Cookie: b=2\r\ntransfer-encoding: chunked\r\n\r\n3\r\nab\n\r\n2\r\n\xff\x00\r\n0\r\n\
         \r\n".to_vec(),
        1 => b"HTTP/1.1 404 Not Found\r\nX-Latin: caf\xe9\r\ncontent-length: 4\r\n\r\ngone".to_vec(),
        2 => b"HTTP/1.0 200 OK\r\n\r\nuntil the end".to_vec(),
        3 => b"HTTP/1.1 204 No Content\r\n\r\n".to_vec(),
        4 => b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhe".to_vec(),
        n => ok(&format!("response {n}")),
    }
    };
    let server = world.tls("a.test", script).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let base = config(vec![rule("a.test", RuleScheme::Https, server.port)]);
    let port = server.port;
    let get = ["GET /same", "GET /same", "GET /same"];
    let other = ["DELETE /x", "GET /cut", "HEAD /h", "GET /denied/%00"];
    let requests: Vec<String> = [&get[..], &other[..]]
        .concat()
        .iter()
        .map(|line| format!("{line} HTTP/1.1\r\nhost: a.test:{port}\r\nconnection: close\r\n\r\n"))
        .chain([format!(
            "POST /p HTTP/1.1\r\nhost: a.test:{port}\r\ncontent-length: 3\r\n\
         connection: close\r\n\r\nabc"
        )])
        .collect();
    let run = async |mode: Mode| {
        let mut client = world.client(&in_mode(&base, mode, &world));
        let mut responses = Vec::new();
        for request in &requests {
            responses.push(client.inside("a.test", port, request).await.unwrap());
        }
        let unknown =
            format!("GET /same HTTP/1.1\r\nhost: a.test:{port}\r\nconnection: close\r\n\r\n");
        let beyond = client.inside("a.test", port, unknown).await.unwrap();
        (responses, beyond, client.audit().await)
    };
    let (recorded, _, _) = run(Mode::Record).await;
    assert_eq!(
        recorded.iter().map(|a| status(a)).collect::<Vec<_>>(),
        [200, 404, 200, 204, 502, 200, 200, 200]
    );
    assert_eq!(body(&recorded[2]), "until the end");
    drop(server);
    let asked = world.names.queries();
    for _ in 0..2 {
        // The recording has one more request for /same than the first replay.
        let (replayed, _, audit) = run(Mode::Replay).await;
        assert_eq!(replayed, recorded);
        assert!(
            audit
                .iter()
                .filter(|l| l.method != "CONNECT")
                .all(|l| l.decision == "replayed"),
            "{audit:?}"
        );
    }
    assert_eq!(world.names.queries(), asked);
}

#[tokio::test]
async fn full_folders_end_recordings_and_not_the_cache() {
    let world = World::new();
    let server = world.plain(|n, _| ok(&format!("response {n}"))).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let base = config(vec![rule("a.test", RuleScheme::Http, server.port)]);
    let url = format!("http://a.test:{}/x", server.port);
    let small = EgressConfig {
        folder_bytes: 10,
        ..in_mode(&base, Mode::Cache, &world)
    };
    let mut client = world.client(&small);
    for n in 0..2 {
        assert_eq!(body(&client.get(&url).await), format!("response {n}"));
    }
    let audit = client.audit().await;
    let detail = audit[1].detail.as_deref().unwrap_or_default();
    assert!(
        detail.contains("not kept") && audit[1].decision == "allowed",
        "{audit:?}"
    );
    let recording = EgressConfig {
        mode: Mode::Record,
        ..small
    };
    let client = world.client(&recording);
    let response = client.get(&url).await;
    assert_eq!(status(&response), 502);
    assert!(body(&response).contains("cannot be recorded"), "{response}");
}

#[tokio::test]
async fn unrecorded_requests_are_denied_in_a_replay() {
    let world = World::new();
    let server = world.plain(|n, _| ok(&n.to_string())).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let base = config(vec![rule("a.test", RuleScheme::Http, server.port)]);
    let url = format!("http://a.test:{}/", server.port);
    let client = world.client(&in_mode(&base, Mode::Record, &world));
    assert_eq!(body(&client.get(&url).await), "0");
    let client = world.client(&in_mode(&base, Mode::Replay, &world));
    assert_eq!(body(&client.get(&url).await), "0");
    for other in [url.clone(), format!("{url}other")] {
        let response = client.get(&other).await;
        assert_eq!(status(&response), 504);
        assert!(body(&response).contains("not_recorded"), "{response}");
    }
    assert_eq!(server.requests(), 1);
    let policy = base.policy(&|_| Some("0123456789".into())).unwrap();
    let never = world.proxy.session(
        "never-recorded",
        policy,
        &in_mode(&base, Mode::Replay, &world),
        None,
    );
    assert!(never.unwrap_err().to_string().contains("never-recorded"));
}

#[tokio::test]
async fn shared_cache_serves_other_episodes_and_cannot_be_poisoned() {
    let world = World::new();
    let server = world
        .plain(|n, request| {
            let evil = request.to_lowercase().contains("x-forwarded-host: evil");
            let private = if request.contains("/private") {
                "cache-control: private\r\n"
            } else {
                ""
            };
            let body = if evil {
                "evil".to_string()
            } else {
                format!("fetched {n}")
            };
            format!(
                "HTTP/1.1 200 OK\r\n{private}content-length: {}\r\n\r\n{body}",
                body.len()
            )
            .into_bytes()
        })
        .await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let cache = in_mode(
        &config(vec![rule("a.test", RuleScheme::Http, server.port)]),
        Mode::Cache,
        &world,
    );
    let host = format!("a.test:{}", server.port);
    let ask = async |episode: &str, path: &str, more: &str| {
        let client = world.client_for(episode, &cache);
        let request = format!(
            "GET http://{host}{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{more}\r\n"
        );
        body(&client.raw(request).await).to_string()
    };
    assert_eq!(
        ask("attacker", "/pkg", "x-forwarded-host: evil\r\n").await,
        "evil"
    );
    assert_eq!(ask("victim", "/pkg", "").await, "fetched 1");
    assert_eq!(ask("third", "/pkg", "").await, "fetched 1");
    assert_eq!(
        ask("third", "/pkg", "authorization: mine\r\n").await,
        "fetched 2"
    );
    assert_eq!(
        ask("fourth", "/pkg", "authorization: mine\r\n").await,
        "fetched 3"
    );
    assert_eq!(ask("a", "/private", "").await, "fetched 4");
    assert_eq!(ask("b", "/private", "").await, "fetched 5");
}
