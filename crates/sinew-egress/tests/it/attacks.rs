//! Attempts of hostile sandboxes and servers to bypass the proxy.

use crate::world::{World, body, config, get, header, ok, rule, status};
use sinew_egress::{EgressConfig, Mode, Quota, RuleConfig, RuleScheme};
use std::sync::atomic::Ordering;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test]
async fn addresses_are_checked_at_each_connection() {
    let world = World::new();
    let server = world.plain(|_, _| ok("inner service")).await;
    let client = world.client(&config(vec![rule(
        "rebind.test",
        RuleScheme::Http,
        server.port,
    )]));
    // First the allowed address, then others: metadata, another loopback address, a mixture.
    world.names.set(
        "rebind.test",
        &[
            &["127.0.0.1"],
            &["169.254.169.254"],
            &["127.0.0.2"],
            &["127.0.0.1", "10.0.0.1"],
            &["::1"],
            &["::ffff:127.0.0.1"],
            &["64:ff9b::7f00:1"],
            &["0.0.0.0"],
        ],
    );
    let url = format!("http://rebind.test:{}/", server.port);
    assert_eq!(status(&client.get(&url).await), 200);
    for _ in 0..7 {
        let response = client.get(&url).await;
        assert_eq!(status(&response), 403, "{response}");
        assert!(body(&response).contains("(address)"), "{response}");
    }
    // Each request resolved once: the connection uses the checked address.
    assert_eq!((server.requests(), world.names.queries()), (1, 8));
}

#[tokio::test]
async fn redirects_are_returned_and_checked_again() {
    let world = World::new();
    let server = world
        .plain(|_, _| {
            b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/latest/\r\n\
              content-length: 0\r\n\r\n"
                .to_vec()
        })
        .await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let named = RuleConfig {
        addresses: vec![],
        ports: vec![80],
        ..rule("169.254.169.254", RuleScheme::Http, 80)
    };
    let mut client = world.client(&config(vec![
        rule("a.test", RuleScheme::Http, server.port),
        named,
    ]));
    let response = client.get(&format!("http://a.test:{}/", server.port)).await;
    assert_eq!(status(&response), 302);
    assert!(response.contains("169.254.169.254"));
    // A rule for the host does not allow the address.
    let followed = client.get("http://169.254.169.254/latest/").await;
    assert_eq!(status(&followed), 403);
    assert!(body(&followed).contains("no rule opens"), "{followed}");
    let audit = client.audit().await;
    let detail = audit[1].detail.as_deref().unwrap_or_default();
    assert!(detail.contains("metadata"), "{audit:?}");
}

#[tokio::test]
async fn loopback_in_any_spelling_needs_a_rule() {
    let world = World::new();
    let server = world.plain(|_, _| ok("inner")).await;
    let any = RuleConfig {
        ports: vec![server.port],
        host: "*.example.test".into(),
        ..RuleConfig::default()
    };
    let client = world.client(&config(vec![any]));
    for host in [
        "127.0.0.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "0",
        "localhost",
        "0.0.0.0",
        "127.0.0.1.",
        "a@127.0.0.1",
        "127.0.0.1%00.example.test",
        "127.0.0.1#.example.test",
    ] {
        let response = client.get(&format!("http://{host}:{}/", server.port)).await;
        assert!(
            [400, 403].contains(&status(&response)),
            "{host}: {response}"
        );
        if let Ok(_open) = client.tunnel(&format!("{host}:{}", server.port)).await {
            panic!("a tunnel to {host}");
        }
    }
    assert_eq!((server.requests(), world.names.queries()), (0, 0));
}

#[tokio::test]
async fn ambiguous_requests_reach_no_server() {
    let world = World::new();
    let server = world.plain(|_, _| ok("x")).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let allow = RuleConfig {
        paths: vec!["/public/*".into()],
        ..rule("a.test", RuleScheme::Http, server.port)
    };
    let client = world.client(&config(vec![allow]));
    let (host, base) = (
        format!("a.test:{}", server.port),
        format!("http://a.test:{}/public/a", server.port),
    );
    let secret = format!("GET /secret HTTP/1.1\r\nhost: {host}\r\n\r\n");
    let requests = [
        format!(
            "POST {base} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 4\r\ncontent-length: 40\r\n\r\n{secret}"
        ),
        format!(
            "POST {base} HTTP/1.1\r\nhost: {host}\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n{secret}"
        ),
        format!(
            "POST {base} HTTP/1.1\r\nhost: {host}\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n\
             {secret}"
        ),
        format!(
            "POST {base} HTTP/1.1\r\nhost: {host}\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n{secret}"
        ),
        format!(
            "POST {base} HTTP/1.0\r\nhost: {host}\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{secret}"
        ),
        format!("POST {base} HTTP/1.1\r\nhost: {host}\r\ncontent-length: +4\r\n\r\nabcd{secret}"),
        format!("GET {base} HTTP/1.1\r\nhost: {host}\r\nhost: other.test\r\n\r\n"),
        format!("GET {base} HTTP/1.1\r\nhost: other.test\r\n\r\n"),
        format!("GET {base} HTTP/1.1\r\n\r\n"),
        format!("GET {base} HTTP/1.1\r\nhost: {host}\r\n folded: x\r\n\r\n"),
        format!("GET {base} HTTP/1.1\r\nhost: {host}\r\nx\0y: 1\r\n\r\n"),
        format!("GET /public/a HTTP/1.1\r\nhost: {host}\r\n\r\n"),
        format!(
            "GET http://a.test:{}/public/..%2fsecret HTTP/1.1\r\nhost: {host}\r\n\r\n",
            server.port
        ),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_string(),
        "\x16\x03\x01\x02\x00\x01\x00".to_string(),
    ];
    for request in requests {
        let mut stream = tokio::net::TcpStream::connect(client.address)
            .await
            .unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut response = String::new();
        let _ = stream.read_to_string(&mut response).await;
        assert!(!response.contains(" 200 "), "{request:?}: {response}");
    }
    assert_eq!(server.requests(), 0, "{:?}", server.seen);
}

#[tokio::test]
async fn smuggled_requests_stay_in_the_body() {
    let world = World::new();
    let server = world.plain(|_, _| ok("x")).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let allow = RuleConfig {
        paths: vec!["/public/*".into()],
        ..rule("a.test", RuleScheme::Http, server.port)
    };
    let client = world.client(&config(vec![allow]));
    let host = format!("a.test:{}", server.port);
    // A length and chunks: a server that uses the length would see a second request.
    let hidden = format!("GET /secret HTTP/1.1\r\nhost: {host}\r\n\r\n");
    let request = format!(
        "POST http://{host}/public/a HTTP/1.1\r\nhost: {host}\r\ncontent-length: 5\r\n\
         transfer-encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"
    );
    let _ = client.raw(request).await;
    for seen in server.seen.lock().unwrap().iter() {
        assert!(
            seen.starts_with("POST /public/a ") && !seen.contains("/secret"),
            "{seen}"
        );
        assert!(!seen.to_lowercase().contains("transfer-encoding"), "{seen}");
    }
}

#[tokio::test]
async fn tunnels_carry_only_tls_for_their_host() {
    let world = World::new();
    let server = world.tls("a.test", |_, _| ok("x")).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let pass = RuleConfig {
        intercept: Some(false),
        ..rule("a.test", RuleScheme::Https, server.port)
    };
    let mut client = world.client(&config(vec![pass]));
    let authority = format!("a.test:{}", server.port);
    let pem = world.proxy.authority_pem().to_string();
    assert!(client.tls(&authority, "fronted.test", &pem).await.is_err());
    for text in [
        "SSH-2.0-x\r\n",
        "GET /secret HTTP/1.1\r\nhost: a.test\r\n\r\n",
    ] {
        let mut tunnel = client.tunnel(&authority).await.unwrap();
        tunnel.write_all(text.as_bytes()).await.unwrap();
        let mut response = Vec::new();
        let _ = tunnel.read_to_end(&mut response).await;
        assert!(response.is_empty());
    }
    // The check precedes the connection: the name was not resolved.
    assert_eq!((server.requests(), world.names.queries()), (0, 0));
    let audit = client.audit().await;
    assert_eq!(
        audit
            .iter()
            .filter(|l| l.reason.as_deref() == Some("tls"))
            .count(),
        3,
        "{audit:?}"
    );
}

#[tokio::test]
async fn intercepted_requests_cannot_name_another_host() {
    let world = World::new();
    let server = world.tls("a.test", |_, _| ok("x")).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let port = server.port;
    let client = world.client(&config(vec![rule("a.test", RuleScheme::Https, port)]));
    let pem = world.proxy.authority_pem().to_string();
    let fronted = client.tls(&format!("a.test:{port}"), "b.test", &pem).await;
    assert!(fronted.is_err());
    for request in [
        "GET / HTTP/1.1\r\nhost: b.test\r\nconnection: close\r\n\r\n".to_string(),
        format!("GET http://b.test/ HTTP/1.1\r\nhost: a.test:{port}\r\nconnection: close\r\n\r\n"),
        "CONNECT b.test:443 HTTP/1.1\r\nhost: b.test:443\r\nconnection: close\r\n\r\n".to_string(),
        format!(
            "GET / HTTP/1.1\r\nhost: a.test:{}\r\nconnection: close\r\n\r\n",
            port ^ 1
        ),
    ] {
        let response = client.inside("a.test", port, &request).await.unwrap();
        assert!(
            [400, 403].contains(&status(&response)),
            "{request}: {response}"
        );
    }
    assert_eq!(server.requests(), 0);
}

#[tokio::test]
async fn ports_without_a_rule_are_denied() {
    let world = World::new();
    let client = world.client(&config(vec![RuleConfig {
        host: "a.test".into(),
        ..RuleConfig::default()
    }]));
    for port in [0, 1, 22, 25, 53, 80, 444, 3128, 8443, 65535] {
        let refused = client.tunnel(&format!("a.test:{port}")).await.unwrap_err();
        assert!([400, 403].contains(&status(&refused)), "{port}: {refused}");
    }
    for authority in ["a.test", "a.test:", "a.test:0443", "a.test:443:80", ":443"] {
        assert!(
            client.tunnel(authority).await.is_err() || authority == "a.test:0443",
            "{authority}"
        );
    }
    assert_eq!(world.names.queries(), 0);
}

#[tokio::test]
async fn servers_with_wrong_certificates_get_no_request() {
    let world = World::new();
    let server = world.tls("other.test", |_, _| ok("x")).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let client = world.client(&config(vec![rule(
        "a.test",
        RuleScheme::Https,
        server.port,
    )]));
    let request = format!(
        "GET / HTTP/1.1\r\nhost: a.test:{}\r\nconnection: close\r\n\r\n",
        server.port
    );
    let response = client.inside("a.test", server.port, request).await.unwrap();
    assert_eq!(status(&response), 502, "{response}");
    assert_eq!(server.requests(), 0);
}

#[tokio::test]
async fn hostile_responses_are_errors_and_the_proxy_continues() {
    let world = World::new();
    let server = world
        .plain(|n, _| match n {
            0 => b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n".to_vec(),
            1 => [b"HTTP/1.1 200 OK\r\n".to_vec(), vec![b'a'; 200_000]].concat(),
            2 => b"garbage\r\n\r\n".to_vec(),
            3 => [
                b"HTTP/1.1 200 OK\r\n".to_vec(),
                b"x: y\r\n".repeat(500),
                b"\r\n".to_vec(),
            ]
            .concat(),
            4 => b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello".to_vec(),
            5 => Vec::new(),
            _ => ok("fine"),
        })
        .await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let client = world.client(&config(vec![rule("a.test", RuleScheme::Http, server.port)]));
    let url = format!("http://a.test:{}/", server.port);
    for n in 0..6 {
        assert_eq!(status(&client.get(&url).await), 502, "{n}");
    }
    assert_eq!(body(&client.get(&url).await), "fine");
}

#[tokio::test]
async fn slow_request_headers_time_out() {
    let world = World::new();
    let mut short = config(vec![]);
    short.quota.request_s = 0.3;
    let client = world.client(&short);
    let mut stream = tokio::net::TcpStream::connect(client.address)
        .await
        .unwrap();
    let full = get("http://a.test/");
    let mut sent = 0;
    for byte in full.as_bytes() {
        if stream.write_all(&[*byte]).await.is_err() {
            break;
        }
        sent += 1;
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let mut response = String::new();
    let _ = stream.read_to_string(&mut response).await;
    assert!(
        !response.contains(" 403 "),
        "{sent} bytes of {}: {response}",
        full.len()
    );
}

#[tokio::test]
async fn bodies_bring_no_further_request() {
    let world = World::new();
    let server = world.plain(|_, _| ok("x")).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    world.names.set("b.test", &[&["127.0.0.1"]]);
    let narrow = RuleConfig {
        methods: vec!["GET".into()],
        paths: vec!["/health".into()],
        ..rule("a.test", RuleScheme::Http, server.port)
    };
    let wide = rule("b.test", RuleScheme::Http, server.port);
    let client = world.client(&config(vec![narrow, wide]));
    let second = "DELETE /all HTTP/1.1\r\nhost: x\r\n\r\n";
    let chunked = format!("{:x}\r\n{second}\r\n0\r\n\r\n", second.len());
    let ask = async |host: &str, query: &str, framing: &str, body: &str| {
        let port = server.port;
        let head =
            format!("GET http://{host}:{port}/health{query} HTTP/1.1\r\nhost: {host}:{port}\r\n");
        status(
            &client
                .raw(format!("{head}{framing}connection: close\r\n\r\n{body}"))
                .await,
        )
    };
    let length = format!("content-length: {}\r\n", second.len());
    assert_eq!(ask("a.test", "", &length, second).await, 400);
    assert_eq!(
        ask("a.test", "", "transfer-encoding: chunked\r\n", &chunked).await,
        400
    );
    assert_eq!(ask("a.test", "?a=1&_method=DELETE", "", "").await, 400);
    assert_eq!(server.requests(), 0);
    assert_eq!(ask("a.test", "", "content-length: 0\r\n", "").await, 200);
    assert_eq!(ask("b.test", "", &length, second).await, 200);
    let seen = server.seen.lock().unwrap();
    for request in seen.iter() {
        assert_eq!(header(request, "connection"), Some("close"), "{request}");
    }
}

#[tokio::test]
async fn names_that_nobody_answers_cost_their_sandbox_alone() {
    let world = World::new();
    let server = world.plain(|_, _| ok("answer")).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let any = RuleConfig {
        host: "*.hangs.test".into(),
        ..rule("a.test", RuleScheme::Http, 80)
    };
    let mut rules = config(vec![any, rule("a.test", RuleScheme::Http, server.port)]);
    rules.quota.connections = 64;
    let (hostile, neighbour) = (
        world.client_for("one", &rules),
        world.client_for("two", &rules),
    );
    for n in 0..40 {
        let mut stream = tokio::net::TcpStream::connect(hostile.address)
            .await
            .unwrap();
        let ask = get(&format!("http://n{n}.hangs.test/"));
        stream.write_all(ask.as_bytes()).await.unwrap();
        while hostile.session.used().requests <= n {
            tokio::task::yield_now().await;
        }
        // The client goes, and the look-up of the system continues.
        drop(stream);
    }
    let answer = neighbour
        .get(&format!("http://a.test:{}/", server.port))
        .await;
    assert_eq!(body(&answer), "answer");
    let most = Quota::default().lookups as usize;
    assert_eq!(world.names.hanging.load(Ordering::Relaxed), most);
}

#[tokio::test]
async fn answers_that_nobody_reads_hold_no_more_than_their_quota() {
    let world = World::new();
    let large = "x".repeat(12 << 20);
    let answer = ok(&large);
    let server = world.plain(move |_, _| answer.clone()).await;
    world.names.set("a.test", &[&["127.0.0.1"]]);
    let in_mode = |mode, held_bytes, request_s| EgressConfig {
        mode,
        folder: Some(world.dir.path().join("recordings")),
        quota: Quota {
            held_bytes,
            request_s,
            ..Quota::default()
        },
        ..config(vec![rule("a.test", RuleScheme::Http, server.port)])
    };
    let url = format!("http://a.test:{}/", server.port);
    let hostile = world.client_for("one", &in_mode(Mode::Record, 16 << 20, 5.0));
    let mut idle = tokio::net::TcpStream::connect(hostile.address)
        .await
        .unwrap();
    idle.write_all(get(&url).as_bytes()).await.unwrap();
    let mut start = [0; 12];
    idle.read_exact(&mut start).await.unwrap();
    assert_eq!(&start, b"HTTP/1.1 200");
    // Its session holds 12 of 16 MiB until the client reads.
    let second = hostile.get(&url).await;
    assert!(
        second.contains("held_bytes"),
        "{}",
        &second[..second.len().min(400)]
    );
    let neighbour = world.client_for("two", &in_mode(Mode::Record, 16 << 20, 60.0));
    assert_eq!(body(&neighbour.get(&url).await).len(), large.len());
    // An answer above the quota is refused where it must be recorded, and passes by a cache.
    let small = world.client_for("three", &in_mode(Mode::Record, 8 << 20, 60.0));
    assert_eq!(status(&small.get(&url).await), 429);
    let cache = world.client_for("four", &in_mode(Mode::Cache, 8 << 20, 60.0));
    assert_eq!(body(&cache.get(&url).await).len(), large.len());
    drop(idle);
}
