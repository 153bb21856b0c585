//! TLS between processes of this program, and secrets that stay in their files.

use crate::queue::until;
use crate::{Running, failure, sinew};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

const TOKEN: &str = "a-token-of-this-test-that-no-file-but-its-own-has";

/// A server that ends with this value.
struct Serving {
    child: Running,
    first: Value,
    /// File of its standard error.
    log: PathBuf,
}

impl Serving {
    fn start(command: &mut Command, log: &Path) -> Self {
        let errors = std::fs::File::create(log).unwrap();
        let (child, first) = until(command.stderr(errors), |_| true);
        let log = log.to_owned();
        Self { child, first, log }
    }

    fn url(&self) -> &str {
        self.first["url"].as_str().unwrap()
    }

    /// Its standard error, after its end.
    fn errors(mut self) -> String {
        self.child.kill();
        std::fs::read_to_string(&self.log).unwrap()
    }
}

/// Files below a folder that hold a text.
fn holding(folder: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(holding(&path, text));
        } else if std::fs::read(&path)
            .unwrap_or_default()
            .windows(text.len())
            .any(|w| w == text.as_bytes())
        {
            found.push(path.display().to_string());
        }
    }
    found
}

#[test]
fn a_queue_over_tls_serves_its_clients_and_keeps_the_token_to_itself() {
    let (dir, keys) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (store, own) = (dir.path().join("store"), dir.path().join("tls"));
    let token = keys.path().join("token");
    std::fs::write(&token, TOKEN).unwrap();
    let mut command = sinew();
    command
        .env("SINEW_LOG", "debug")
        .args(["queue", "serve", "--json"]);
    command
        .args(["--listen", "127.0.0.1:0", "--store"])
        .arg(&store);
    command
        .arg("--tls-own")
        .arg(&own)
        .arg("--token-file")
        .arg(&token);
    let serving = Serving::start(&mut command, &keys.path().join("log"));
    let url = serving.url().to_owned();
    assert!(url.starts_with("https://"), "{url}");
    assert_eq!(serving.first["token"], Value::Null);
    let mut client = sinew();
    client
        .args(["queue", "stats", &url, "--json", "--token-file"])
        .arg(&token);
    client.arg("--tls-ca").arg(own.join("ca.pem"));
    let told = client.output().unwrap();
    let said = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(
        told.status.success(),
        "{}",
        String::from_utf8_lossy(&told.stderr)
    );
    // The variable does the same as the option.
    let mut client = sinew();
    client
        .args(["queue", "stats", &url, "--json", "--token-file"])
        .arg(&token);
    client.env("SINEW_TLS_CA", own.join("ca.pem"));
    assert_eq!(
        String::from_utf8_lossy(&client.output().unwrap().stdout),
        said
    );
    // Plain HTTP gets a reason.
    let mut plain = TcpStream::connect(url.strip_prefix("https://").unwrap()).unwrap();
    plain
        .write_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    plain.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("use https://"), "{answer}");
    let typed = std::fs::read(format!("/proc/{}/cmdline", serving.child.id())).unwrap();
    let typed = String::from_utf8_lossy(&typed).into_owned();
    assert!(
        typed.contains("--token-file") && !typed.contains(TOKEN),
        "{typed}"
    );
    let log = serving.errors();
    assert!(
        !log.contains(TOKEN) && !log.contains("PRIVATE KEY"),
        "{log}"
    );
    assert!(holding(dir.path(), TOKEN).is_empty());
    let keys = holding(dir.path(), "PRIVATE KEY");
    assert!(
        matches!(&keys[..], [key] if key.ends_with("ca.key")),
        "{keys:?}"
    );
}

#[test]
fn listeners_for_other_hosts_need_tls_and_authorities_must_be_some() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, TOKEN).unwrap();
    let (token, far) = (token.to_str().unwrap(), ["--listen", "0.0.0.0:0"]);
    let store = dir.path().join("store");
    let store = store.to_str().unwrap();
    let owners = dir.path().join("owners");
    std::fs::write(&owners, format!("ann:{TOKEN}")).unwrap();
    let owners = owners.to_str().unwrap();
    for command in [
        vec!["queue", "serve", "--store", store, "--token-file", token],
        vec!["serve", "--engine", "fake", "--control-token-file", token],
        vec!["serve", "--sandbox-only", "--token-file", owners],
    ] {
        let refused = sinew().args(&command).args(far).output().unwrap();
        let refused = failure(&refused, 2);
        assert!(refused.contains("--tls-own"), "{command:?}: {refused}");
    }
    let refused = |args: &[&str]| failure(&sinew().args(args).output().unwrap(), 2);
    let none = refused(&["--tls-ca", token, "doctor"]);
    assert!(
        none.contains("--tls-ca: ") && none.contains("PEM"),
        "{none}"
    );
    let view = ["view", store, "--tls-cert", token];
    assert!(refused(&view).contains("--tls-key"));
    std::fs::create_dir(store).unwrap();
    let wrong = refused(&["view", store, "--tls-cert", token, "--tls-key", token]);
    assert!(wrong.contains("--tls-cert"), "{wrong}");
}
