//! Leaks to the sandbox, and server features that could bypass rules.

use crate::world::{SECRET, World, body, config, ok, rule, status};
use sinew_egress::{EgressConfig, Mode, Quota, RuleConfig, RuleScheme};

#[tokio::test]
async fn secrets_are_not_returned_in_parts() {
    let world = World::new();
    // The server echoes the header, or the requested range of it.
    let server = world
        .tls("api.test", |_, request| {
            let line = |name: &str| {
                let found = request.lines().find(|l| l.to_lowercase().starts_with(name));
                found
                    .and_then(|l| l.split_once(": "))
                    .map_or("", |(_, v)| v)
            };
            let all = line("authorization");
            let range = line("range")
                .strip_prefix("bytes=")
                .and_then(|r| r.split_once('-'));
            match range {
                None => ok(all),
                Some((from, to)) => {
                    let (from, to) = (from.parse().unwrap(), to.parse::<usize>().unwrap());
                    let part = all.get(from..=to.min(all.len() - 1)).unwrap_or_default();
                    let head = "HTTP/1.1 206 Partial Content\r\ncontent-length: ";
                    format!("{head}{}\r\n\r\n{part}", part.len()).into_bytes()
                }
            }
        })
        .await;
    world.names.set("api.test", &[&["127.0.0.1"]]);
    let allow = RuleConfig {
        credential: Some("key".into()),
        ..rule("api.test", RuleScheme::Https, server.port)
    };
    let client = world.client(&config(vec![allow]));
    let mut found = String::new();
    for from in (0..30).step_by(5) {
        let request = format!(
            "GET / HTTP/1.1\r\nhost: api.test:{}\r\nrange: bytes={from}-{}\r\nif-range: x\r\n\
             connection: close\r\n\r\n",
            server.port,
            from + 4
        );
        let response = client
            .inside("api.test", server.port, request)
            .await
            .unwrap();
        found.push_str(body(&response));
    }
    assert!(!found.contains(SECRET), "{found}");
    assert!(found.contains("Bearer *"), "{found}");
}

#[tokio::test]
async fn refusals_hide_the_hosts_network() {
    let world = World::new();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = closed.local_addr().unwrap().port();
    drop(closed);
    world.names.set("down.test", &[&["127.0.0.1"]]);
    world.names.set("inner.test", &[&["10.11.12.13"]]);
    let mut client = world.client(&config(vec![
        rule("down.test", RuleScheme::Http, port),
        rule("inner.test", RuleScheme::Http, port),
    ]));
    let down = client.get(&format!("http://down.test:{port}/")).await;
    assert!(
        status(&down) == 502 && body(&down).contains("refused"),
        "{down}"
    );
    let inner = client.get(&format!("http://inner.test:{port}/")).await;
    assert_eq!(status(&inner), 403);
    let message = format!("{down}{inner}");
    assert!(
        !message.contains("127.0.0.1") && !message.contains("10.11"),
        "{message}"
    );
    // The log has the addresses.
    let audit = client.audit().await;
    let detail = |at: usize| audit[at].detail.clone().unwrap();
    assert!(
        detail(0).contains("127.0.0.1") && detail(1).contains("10.11.12.13"),
        "{audit:?}"
    );
}

#[tokio::test]
async fn override_headers_are_refused_where_rules_limit_methods_or_paths() {
    let world = World::new();
    let server = world.plain(|_, _| ok("x")).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    world.names.set("b.test", &[&["127.0.0.1"]]);
    let narrow = RuleConfig {
        methods: vec!["GET".into(), "POST".into()],
        paths: vec!["/v1/*".into()],
        ..rule("a.test", RuleScheme::Http, server.port)
    };
    let wide = rule("b.test", RuleScheme::Http, server.port);
    let client = world.client(&config(vec![narrow, wide]));
    let ask = async |host: &str, header: &str| {
        let port = server.port;
        let head = format!("POST http://{host}:{port}/v1/x HTTP/1.1\r\nhost: {host}:{port}");
        let rest = "content-length: 0\r\nconnection: close";
        status(
            &client
                .raw(format!("{head}\r\n{header}: DELETE\r\n{rest}\r\n\r\n"))
                .await,
        )
    };
    let headers = [
        "X-HTTP-Method-Override",
        "X_HTTP_Method_Override",
        "X-Method-Override",
        "X-Original-Method",
        "X-Original-URL",
        "X-Rewrite-URL",
        "X-Forwarded-Prefix",
        "X-Envoy-Original-Path",
        "Destination",
    ];
    for header in headers {
        assert_eq!(ask("a.test", header).await, 400, "{header}");
        // They bypass nothing if every method and path is allowed.
        assert_eq!(ask("b.test", header).await, 200, "{header}");
    }
    assert_eq!(ask("a.test", "X-Other").await, 200);
}

#[tokio::test]
async fn header_bytes_count_against_the_quota() {
    let world = World::new();
    let server = world.plain(|_, _| ok("x")).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let mut limited = config(vec![rule("a.test", RuleScheme::Http, server.port)]);
    limited.quota = Quota {
        bytes_up: 100_000,
        ..Quota::default()
    };
    let mut client = world.client(&limited);
    let url = format!("http://a.test:{}/{}", server.port, "x".repeat(30_000));
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(status(&client.get(&url).await));
    }
    assert_eq!(statuses, [200, 200, 200, 429]);
    assert_eq!(server.requests(), 3);
    // A long method is cut in the log.
    let long = format!(
        "{} http://a.test/ HTTP/1.1\r\nhost: a.test\r\nconnection: close\r\n\r\n",
        "M".repeat(20_000)
    );
    client.raw(long).await;
    let audit = client.audit().await;
    let line = serde_json::to_string(audit.last().unwrap()).unwrap();
    assert!(line.len() < 10_000, "{}", line.len());
}

#[tokio::test]
async fn episodes_are_recorded_by_one_session_at_a_time() {
    let world = World::new();
    let recording = EgressConfig {
        mode: Mode::Record,
        folder: Some(world.dir.path().join("recordings")),
        ..config(vec![])
    };
    let policy = || recording.policy(&|_| Some("0123456789".into())).unwrap();
    let open = || world.proxy.session("e", policy(), &recording, None);
    let first = open().unwrap();
    let message = open().unwrap_err().to_string();
    assert!(message.contains("is being recorded"), "{message}");
    drop(first);
    open().unwrap();
}
