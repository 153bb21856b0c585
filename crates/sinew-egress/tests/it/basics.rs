//! Allowed requests work, are counted and are logged.

use crate::world::{SECRET, World, body, config, get, header, ok, rule, status};
use sinew_egress::{Quota, RuleConfig, RuleScheme};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test]
async fn requests_without_a_rule_are_denied_before_resolution() {
    let world = World::new();
    let mut client = world.client(&config(vec![]));
    let response = client.get("http://exfiltrated-secret.example.com/x").await;
    assert_eq!(
        (status(&response), header(&response, "x-sinew-egress")),
        (403, Some("denied"))
    );
    assert!(body(&response).contains("no_rule"), "{response}");
    assert!(
        client
            .tunnel("example.com:443")
            .await
            .unwrap_err()
            .starts_with("HTTP/1.1 403")
    );
    assert_eq!(world.names.queries(), 0);
    let audit = client.audit().await;
    assert_eq!(audit.len(), 2);
    assert!(
        audit
            .iter()
            .all(|l| l.decision == "denied" && l.reason.as_deref() == Some("no_rule"))
    );
    assert_eq!(
        (client.session.used().requests, client.session.used().denied),
        (2, 2)
    );
}

#[tokio::test]
async fn plain_requests_get_new_framing() {
    let world = World::new();
    let server = world.plain(|_, _| ok("hello")).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let mut client = world.client(&config(vec![rule("a.test", RuleScheme::Http, server.port)]));
    let host = format!("a.test:{}", server.port);
    let request = format!(
        "POST http://{host}/p?q=1 HTTP/1.1\r\nHost: {host}\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\n\
         X-Kept: 2\r\n\
         Proxy-Authorization: p\r\nUpgrade: websocket\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n\
          0\r\n\r\n"
    );
    let response = client.raw(request).await;
    assert_eq!((status(&response), body(&response)), (200, "hello"));
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
    // This proxy sends one request over each connection.
    assert!(lower.contains("connection: close\r\n"), "{seen}");
    assert_eq!(lower.matches("connection").count(), 1, "{seen}");
    for gone in [
        "x-hop",
        "proxy-",
        "upgrade",
        "transfer-encoding",
        "keep-alive",
    ] {
        assert!(!lower.contains(gone), "{gone} in {seen}");
    }
    let audit = client.audit().await;
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
async fn intercepted_requests_are_checked_by_method_and_path() {
    let world = World::new();
    let server = world.tls("api.test", |_, _| ok("model list")).await;
    world.names.set("api.test", &[&["127.0.0.1"]]);
    let allow = RuleConfig {
        methods: vec!["GET".into()],
        paths: vec!["/v1/*".into()],
        ..rule("api.test", RuleScheme::Https, server.port)
    };
    let client = world.client(&config(vec![allow]));
    let ask = |line: &str| {
        let request = format!(
            "{line} HTTP/1.1\r\nhost: api.test:{}\r\nconnection: close\r\n\r\n",
            server.port
        );
        let client = &client;
        async move {
            client
                .inside("api.test", server.port, request)
                .await
                .unwrap()
        }
    };
    let response = ask("GET /v1/models").await;
    assert_eq!((status(&response), body(&response)), (200, "model list"));
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
async fn credentials_are_added_and_removed_from_responses() {
    let world = World::new();
    // The server echoes the secret in a header and in several chunks of the body.
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
    let mut client = world.client(&config(vec![allow]));
    let request = format!(
        "GET / HTTP/1.1\r\nhost: api.test:{}\r\nauthorization: forged\r\naccept-encoding: gzip\r\n\
         connection: close\r\n\r\n",
        server.port
    );
    let response = client
        .inside("api.test", server.port, request)
        .await
        .unwrap();
    assert_eq!(status(&response), 200);
    let seen = server.seen.lock().unwrap()[0].clone();
    assert!(
        seen.contains(&format!("Bearer {SECRET}"))
            && !seen.contains("forged")
            && !seen.contains("gzip"),
        "{seen}"
    );
    assert!(!response.contains(SECRET), "{response}");
    assert_eq!(
        response.matches(&"*".repeat(SECRET.len())).count(),
        2,
        "{response}"
    );
    let audit = client.audit().await;
    assert_eq!(audit.last().unwrap().credential.as_deref(), Some("key"));
    let log = format!("{audit:?}{client:?}", client = client.session);
    assert!(!log.contains(SECRET), "{log}");
}

#[tokio::test]
async fn passed_tunnels_show_the_servers_certificate() {
    let world = World::new();
    let server = world
        .tls("api.test", |_, _| ok("from the server itself"))
        .await;
    world.names.set("api.test", &[&["127.0.0.1"]]);
    let allow = RuleConfig {
        intercept: Some(false),
        ..rule("api.test", RuleScheme::Https, server.port)
    };
    let mut client = world.client(&config(vec![allow]));
    let port = server.port;
    // The proxy's authority did not sign the certificate.
    assert!(
        client
            .inside("api.test", port, get("http://api.test/"))
            .await
            .is_err()
    );
    let audit = client.audit().await;
    assert_eq!(audit[0].decision, "allowed");
    assert!(
        audit[0].bytes_up > 100 && audit[0].bytes_down > 100,
        "{audit:?}"
    );
}

#[tokio::test]
async fn quotas_limit_requests_bytes_and_time() {
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
        request_s: 3.0,
        ..Quota::default()
    };
    let mut client = world.client(&limited);
    let url = |path: &str| format!("http://a.test:{}{path}", server.port);
    let hang = client.get(&url("/hang")).await;
    assert!(!hang.ends_with("HANG!") && body(&hang).len() < 9, "{hang}");
    let flood = client.get(&url("/flood")).await;
    assert!(flood.len() < (1 << 20) + 4096, "{}", flood.len());
    assert_eq!(client.session.used().bytes_down >> 20, 1);
    let long = client.raw(format!(
        "POST {} HTTP/1.1\r\nhost: a.test:{}\r\ncontent-length: 11\r\nconnection: close\r\n\r\n01234567890",
        url("/"), server.port
    ));
    assert_eq!(status(&long.await), 429);
    // A chunked body has no length in advance.
    let chunked = client.raw(format!(
        "POST {} HTTP/1.1\r\nhost: a.test:{}\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n\
         b\r\n01234567890\r\n0\r\n\r\n",
        url("/"), server.port
    ));
    assert_eq!(status(&chunked.await), 429);
    client.get(&url("/")).await;
    for _ in 0..3 {
        assert!(body(&client.get(&url("/")).await).contains("5 requests"));
    }
    let audit = client.audit().await;
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
async fn refused_requests_do_not_fill_the_log() {
    let world = World::new();
    let mut few = config(vec![]);
    few.quota.requests = 3;
    let mut client = world.client(&few);
    let mut stream = tokio::net::TcpStream::connect(client.address)
        .await
        .unwrap();
    for _ in 0..200 {
        stream
            .write_all(b"GET http://a.test/ HTTP/1.1\r\nhost: a.test\r\n\r\n")
            .await
            .unwrap();
        let mut chunk = [0; 4096];
        assert!(stream.read(&mut chunk).await.unwrap() > 0);
    }
    assert_eq!(client.audit().await.len(), 3 + 64);
    assert_eq!(client.session.used().requests, 200);
}

#[tokio::test]
async fn connections_end_with_the_session() {
    let world = World::new();
    let server = world
        .plain(|_, _| b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nHANG".to_vec())
        .await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let mut client = world.client(&config(vec![rule("a.test", RuleScheme::Http, server.port)]));
    let mut stream = tokio::net::TcpStream::connect(client.address)
        .await
        .unwrap();
    stream
        .write_all(get(&format!("http://a.test:{}/", server.port)).as_bytes())
        .await
        .unwrap();
    let mut first = [0; 15];
    stream.read_exact(&mut first).await.unwrap();
    let audit = client.audit().await;
    assert_eq!(audit.len(), 1);
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    assert!(
        tokio::net::TcpStream::connect(client.address)
            .await
            .is_err()
    );
}

#[tokio::test]
async fn connections_beyond_the_quota_wait() {
    let world = World::new();
    let mut one = config(vec![]);
    one.quota.connections = 1;
    let client = world.client(&one);
    let first = tokio::net::TcpStream::connect(client.address)
        .await
        .unwrap();
    let second = client.get("http://a.test/");
    tokio::pin!(second);
    let early = tokio::time::timeout(std::time::Duration::from_millis(150), &mut second).await;
    assert!(early.is_err());
    drop(first);
    assert_eq!(status(&second.await), 403);
}
