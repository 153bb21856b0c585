//! What is allowed works, is counted and is logged.

use crate::world::{SECRET, World, body, config, get, header, ok, rule, status};
use sinew_egress::{Quota, RuleConfig, RuleScheme};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test]
async fn without_a_rule_nothing_leaves_and_no_name_is_resolved() {
    let world = World::new();
    let mut door = world.door(&config(vec![]));
    let answer = door.get("http://exfiltrated-secret.example.com/x").await;
    assert_eq!(
        (status(&answer), header(&answer, "x-sinew-egress")),
        (403, Some("denied"))
    );
    assert!(body(&answer).contains("no_rule"), "{answer}");
    assert!(
        door.tunnel("example.com:443")
            .await
            .unwrap_err()
            .starts_with("HTTP/1.1 403")
    );
    assert_eq!(world.names.asked(), 0);
    let audit = door.audit().await;
    assert_eq!(audit.len(), 2);
    assert!(
        audit
            .iter()
            .all(|l| l.decision == "denied" && l.reason.as_deref() == Some("no_rule"))
    );
    assert_eq!(
        (door.session.used().requests, door.session.used().denied),
        (2, 2)
    );
}

#[tokio::test]
async fn a_plain_request_arrives_with_framing_of_the_proxys_own() {
    let world = World::new();
    let server = world.plain(|_, _| ok("hello")).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let mut door = world.door(&config(vec![rule("a.test", RuleScheme::Http, server.port)]));
    let host = format!("a.test:{}", server.port);
    let request = format!(
        "POST http://{host}/p?q=1 HTTP/1.1\r\nHost: {host}\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nX-Kept: 2\r\n\
         Proxy-Authorization: p\r\nUpgrade: websocket\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    );
    let answer = door.raw(request).await;
    assert_eq!((status(&answer), body(&answer)), (200, "hello"));
    let seen = server.seen.lock().unwrap()[0].clone();
    assert!(
        seen.starts_with("POST /p?q=1 HTTP/1.1\r\n") && seen.ends_with("\r\n\r\nabc"),
        "{seen}"
    );
    let lower = seen.to_lowercase();
    assert!(
        lower.contains(&format!("host: {host}\r\n")) && lower.contains("content-length: 3\r\n"),
        "{seen}"
    );
    assert!(lower.contains("x-kept: 2"), "{seen}");
    for gone in [
        "x-hop",
        "proxy-",
        "upgrade",
        "transfer-encoding",
        "connection",
    ] {
        assert!(!lower.contains(gone), "{gone} in {seen}");
    }
    let audit = door.audit().await;
    assert_eq!(audit.len(), 1);
    let line = &audit[0];
    assert_eq!(
        (
            line.decision.as_str(),
            line.status,
            line.bytes_up,
            line.bytes_down
        ),
        ("allowed", Some(200), 3, 5)
    );
    assert_eq!(
        line.address.as_deref(),
        Some(format!("127.0.0.1:{}", server.port).as_str())
    );
}

#[tokio::test]
async fn inside_of_tls_each_request_is_judged_by_method_and_path() {
    let world = World::new();
    let server = world.tls("api.test", |_, _| ok("model list")).await;
    world.names.set("api.test", &[&["127.0.0.1"]]);
    let allow = RuleConfig {
        methods: vec!["GET".into()],
        paths: vec!["/v1/*".into()],
        ..rule("api.test", RuleScheme::Https, server.port)
    };
    let door = world.door(&config(vec![allow]));
    let ask = |line: &str| {
        let request = format!(
            "{line} HTTP/1.1\r\nhost: api.test:{}\r\nconnection: close\r\n\r\n",
            server.port
        );
        let door = &door;
        async move { door.inside("api.test", server.port, request).await.unwrap() }
    };
    let answer = ask("GET /v1/models").await;
    assert_eq!((status(&answer), body(&answer)), (200, "model list"));
    assert_eq!(server.requests(), 1);
    for line in [
        "POST /v1/models",
        "GET /v2",
        "GET /v1/../admin",
        "TRACE /v1/models",
        "GET /v1/%2e%2e/admin",
    ] {
        assert!([400, 403].contains(&status(&ask(line).await)), "{line}");
    }
    assert_eq!(server.requests(), 1);
}

#[tokio::test]
async fn a_credential_is_added_outside_and_never_comes_back() {
    let world = World::new();
    // The server tells all it was sent, in a header, in the body, and in pieces.
    let server = world
        .tls("api.test", |_, request| {
            let auth = request
                .lines()
                .find(|l| l.to_lowercase().starts_with("authorization"))
                .unwrap_or("none");
            let body = format!("you sent {auth}.");
            format!(
                "HTTP/1.1 200 OK\r\nx-echo: {auth}\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            )
            .into_bytes()
        })
        .await;
    world.names.set("api.test", &[&["127.0.0.1"]]);
    let allow = RuleConfig {
        credential: Some("key".into()),
        ..rule("api.test", RuleScheme::Https, server.port)
    };
    let mut door = world.door(&config(vec![allow]));
    let request = format!(
        "GET / HTTP/1.1\r\nhost: api.test:{}\r\nauthorization: forged\r\naccept-encoding: gzip\r\nconnection: close\r\n\r\n",
        server.port
    );
    let answer = door.inside("api.test", server.port, request).await.unwrap();
    assert_eq!(status(&answer), 200);
    let seen = server.seen.lock().unwrap()[0].clone();
    assert!(
        seen.contains(&format!("Bearer {SECRET}"))
            && !seen.contains("forged")
            && !seen.contains("gzip"),
        "{seen}"
    );
    assert!(!answer.contains(SECRET), "{answer}");
    assert_eq!(
        answer.matches(&"*".repeat(SECRET.len())).count(),
        2,
        "{answer}"
    );
    let audit = door.audit().await;
    assert_eq!(audit.last().unwrap().credential.as_deref(), Some("key"));
    let log = format!("{audit:?}{door:?}", door = door.session);
    assert!(!log.contains(SECRET), "{log}");
}

#[tokio::test]
async fn a_tunnel_that_passes_leads_to_the_servers_own_certificate() {
    let world = World::new();
    let server = world
        .tls("api.test", |_, _| ok("from the server itself"))
        .await;
    world.names.set("api.test", &[&["127.0.0.1"]]);
    let allow = RuleConfig {
        intercept: Some(false),
        ..rule("api.test", RuleScheme::Https, server.port)
    };
    let mut door = world.door(&config(vec![allow]));
    let port = server.port;
    // The proxy's authority did not sign it.
    assert!(
        door.inside("api.test", port, get("http://api.test/"))
            .await
            .is_err()
    );
    let audit = door.audit().await;
    assert_eq!(audit[0].decision, "allowed");
    assert!(
        audit[0].bytes_up > 100 && audit[0].bytes_down > 100,
        "{audit:?}"
    );
}

#[tokio::test]
async fn quotas_end_requests_bytes_and_time() {
    let world = World::new();
    let server = world
        .plain(|_, request| match request {
            r if r.contains("/flood") => b"HTTP/1.1 200 OK\r\n\r\nFLOOD".to_vec(),
            r if r.contains("/hang") => {
                b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nHANG".to_vec()
            }
            _ => ok("x"),
        })
        .await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let mut limited = config(vec![rule("a.test", RuleScheme::Http, server.port)]);
    limited.quota = Quota {
        requests: 5,
        bytes_down: 1 << 20,
        request_bytes: 10,
        request_s: 1.0,
        ..Quota::default()
    };
    let mut door = world.door(&limited);
    let url = |path: &str| format!("http://a.test:{}{path}", server.port);
    let hang = door.get(&url("/hang")).await;
    assert!(!hang.ends_with("HANG!") && body(&hang).len() < 9, "{hang}");
    let flood = door.get(&url("/flood")).await;
    assert!(flood.len() < (1 << 20) + 4096, "{}", flood.len());
    assert_eq!(door.session.used().bytes_down >> 20, 1);
    let long = door.raw(format!(
        "POST {} HTTP/1.1\r\nhost: a.test:{}\r\ncontent-length: 11\r\nconnection: close\r\n\r\n01234567890",
        url("/"), server.port
    ));
    assert_eq!(status(&long.await), 429);
    // Chunks do not tell their sum beforehand.
    let chunked = door.raw(format!(
        "POST {} HTTP/1.1\r\nhost: a.test:{}\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\nb\r\n01234567890\r\n0\r\n\r\n",
        url("/"), server.port
    ));
    assert_eq!(status(&chunked.await), 429);
    door.get(&url("/")).await;
    for _ in 0..3 {
        assert!(body(&door.get(&url("/")).await).contains("5 requests"));
    }
    let audit = door.audit().await;
    let reasons: Vec<_> = audit
        .iter()
        .map(|l| l.reason.as_deref().unwrap_or("-"))
        .collect();
    assert_eq!(
        reasons,
        [
            "failed", "quota", "quota", "quota", "quota", "quota", "quota", "quota"
        ],
        "{audit:?}"
    );
}

#[tokio::test]
async fn a_flood_of_refused_requests_does_not_fill_the_log() {
    let world = World::new();
    let mut few = config(vec![]);
    few.quota.requests = 3;
    let mut door = world.door(&few);
    let mut stream = tokio::net::TcpStream::connect(door.address).await.unwrap();
    for _ in 0..200 {
        stream
            .write_all(b"GET http://a.test/ HTTP/1.1\r\nhost: a.test\r\n\r\n")
            .await
            .unwrap();
        let mut chunk = [0; 4096];
        assert!(stream.read(&mut chunk).await.unwrap() > 0);
    }
    assert_eq!(door.audit().await.len(), 3 + 64);
    assert_eq!(door.session.used().requests, 200);
}

#[tokio::test]
async fn when_the_session_ends_its_connections_end() {
    let world = World::new();
    let server = world
        .plain(|_, _| b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nHANG".to_vec())
        .await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let mut door = world.door(&config(vec![rule("a.test", RuleScheme::Http, server.port)]));
    let mut stream = tokio::net::TcpStream::connect(door.address).await.unwrap();
    stream
        .write_all(get(&format!("http://a.test:{}/", server.port)).as_bytes())
        .await
        .unwrap();
    let mut first = [0; 15];
    stream.read_exact(&mut first).await.unwrap();
    let audit = door.audit().await;
    assert_eq!(audit.len(), 1);
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    assert!(tokio::net::TcpStream::connect(door.address).await.is_err());
}

#[tokio::test]
async fn connections_beyond_the_bound_wait() {
    let world = World::new();
    let mut one = config(vec![]);
    one.quota.connections = 1;
    let door = world.door(&one);
    let first = tokio::net::TcpStream::connect(door.address).await.unwrap();
    let second = door.get("http://a.test/");
    tokio::pin!(second);
    let early = tokio::time::timeout(std::time::Duration::from_millis(150), &mut second).await;
    assert!(early.is_err());
    drop(first);
    assert_eq!(status(&second.await), 403);
}
