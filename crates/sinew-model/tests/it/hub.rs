//! Downloads against a small server on the loopback interface.

use crate::support::golden_dir;
use sha2::{Digest, Sha256};
use sinew_model::{ModelFiles, ResolveEnv, load_model, resolve_dataset, resolve_model};
use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the server does to the next requests for content, one entry each; then it behaves.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// Closes the connection after so many bytes.
    Cut(usize),
    /// Answers 503.
    Busy,
    /// Sends other bytes.
    Garble,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, Vec<u8>>,
    faults: VecDeque<Fault>,
    /// Method, path and range of each request.
    log: Vec<String>,
    token: Option<String>,
}

struct Server {
    address: String,
    state: Arc<Mutex<State>>,
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

impl Server {
    fn start(state: State) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(state));
        let shared = Arc::clone(&state);
        // Ends with the test process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || serve(stream, &shared));
            }
        });
        Self { address, state }
    }

    fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().log)
    }
}

fn serve(mut stream: TcpStream, state: &Mutex<State>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
            break;
        }
        lines.push(line.trim().to_owned());
    }
    let Some(first) = lines.first() else { return };
    let mut words = first.split(' ');
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    let header = |name: &str| {
        lines
            .iter()
            .find_map(|line| line.to_lowercase().strip_prefix(name).map(str::to_owned))
    };
    let from: usize =
        header("range: bytes=").map_or(0, |r| r.trim_end_matches('-').parse().unwrap());
    let mut state = state.lock().unwrap();
    state.log.push(format!("{method} {path} {from}"));
    let authorized = header("authorization: bearer ") == state.token;
    let answer = |head: &str, body: &[u8]| {
        let text = format!("HTTP/1.1 {head}\r\nConnection: close\r\n\r\n");
        let _ = stream
            .write_all(text.as_bytes())
            .and_then(|()| stream.write_all(body));
    };
    route(&mut state, method, path, from, authorized, answer);
}

fn route(
    state: &mut State,
    method: &str,
    path: &str,
    from: usize,
    authorized: bool,
    mut answer: impl FnMut(&str, &[u8]),
) {
    if let Some(name) = path.strip_prefix("/cdn/") {
        let mut body = state.files[name].clone();
        let total = body.len();
        match state.faults.pop_front() {
            Some(Fault::Busy) => return answer("503 Busy\r\nContent-Length: 0", b""),
            Some(Fault::Garble) => body[total - 1] ^= 1,
            Some(Fault::Cut(bytes)) => {
                let head = format!("200 OK\r\nContent-Length: {total}");
                return answer(&head, &body[..bytes]);
            }
            None => {}
        }
        let head = match from {
            0 => format!("200 OK\r\nContent-Length: {total}"),
            _ => format!(
                "206 Partial\r\nContent-Length: {}\r\nContent-Range: bytes {from}-{}/{total}",
                total - from,
                total - 1
            ),
        };
        return answer(&head, &body[from..]);
    }
    if !authorized {
        return answer("401 Unauthorized\r\nContent-Length: 0", b"");
    }
    let listings = ["models", "datasets"].map(|kind| format!("/api/{kind}/org/tiny/revision/main"));
    if listings.iter().any(|listing| listing == path) {
        let name = |name| format!(r#"{{"rfilename": "{name}"}}"#);
        let names: Vec<_> = state.files.keys().map(name).collect();
        let body = format!(
            r#"{{"sha": "{COMMIT}", "siblings": [{}]}}"#,
            names.join(",")
        );
        return answer(
            &format!("200 OK\r\nContent-Length: {}", body.len()),
            body.as_bytes(),
        );
    }
    let name = path
        .strip_prefix("/datasets")
        .unwrap_or(path)
        .strip_prefix(&format!("/org/tiny/resolve/{COMMIT}/"))
        .unwrap_or("");
    let Some(file) = state.files.get(name) else {
        return answer("404 Not Found\r\nContent-Length: 0", b"");
    };
    let (length, hash) = (file.len(), hex(file));
    if name.ends_with(".safetensors") {
        let head = format!(
            "302 Found\r\nLocation: /cdn/{name}\r\nX-Linked-Etag: \"{hash}\"\r\n\
             X-Linked-Size: {length}\r\nContent-Length: 0"
        );
        return answer(&head, b"");
    }
    let head = format!(
        "200 OK\r\nETag: W/\"{}\"\r\nContent-Length: {length}",
        &hash[..40]
    );
    let file = file.clone();
    answer(&head, if method == "HEAD" { b"" } else { &file });
}

/// A repository with one of the tiny models.
fn repository(family: &str) -> State {
    let mut state = State::default();
    for entry in fs::read_dir(golden_dir().join(family)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        state.files.insert(name, fs::read(entry.path()).unwrap());
    }
    state
        .files
        .insert("README.md".to_owned(), b"hello".to_vec());
    state
}

fn env(server: &Server, dir: &Path) -> ResolveEnv {
    ResolveEnv {
        hub_endpoint: server.address.clone(),
        offline: false,
        ..ResolveEnv::offline(dir.to_owned())
    }
}

#[test]
fn downloads_fill_the_cache_in_the_known_layout() {
    let server = Server::start(repository("qwen2"));
    let dir = tempfile::tempdir().unwrap();
    let mut env = env(&server, dir.path());
    let files = resolve_model("hf:org/tiny", &env).unwrap();
    let root = dir.path().join("hub/models--org--tiny");
    let snapshot = root.join("snapshots").join(COMMIT);
    assert_eq!(files, ModelFiles::Dir(snapshot.clone()));
    assert!(load_model(&files).is_ok());
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    let link = fs::read_link(snapshot.join("config.json")).unwrap();
    assert!(link.starts_with("../../blobs"), "{}", link.display());
    assert!(!snapshot.join("README.md").exists() && !snapshot.join("golden.safetensors").exists());
    let requests = server.log();
    // Again: the listing alone; offline or by commit: nothing at all.
    assert_eq!(resolve_model("hf:org/tiny", &env).unwrap(), files);
    assert_eq!(server.log(), ["GET /api/models/org/tiny/revision/main 0"]);
    env.offline = true;
    assert_eq!(resolve_model("hf:org/tiny", &env).unwrap(), files);
    env.offline = false;
    assert_eq!(
        resolve_model(&format!("hf:org/tiny@{COMMIT}"), &env).unwrap(),
        files
    );
    assert!(server.log().is_empty());
    assert!(requests.len() > 5);
}

#[test]
fn broken_transfers_are_resumed() {
    let mut state = repository("llama");
    state.faults = [Fault::Cut(1000), Fault::Busy, Fault::Busy].into();
    let server = Server::start(state);
    let dir = tempfile::tempdir().unwrap();
    let seen = Arc::new(Mutex::new(0));
    let sink = Arc::clone(&seen);
    let mut env = env(&server, dir.path());
    env.progress = Some(Arc::new(move |progress| {
        *sink.lock().unwrap() = progress.bytes
    }));
    let files = resolve_model("hf:org/tiny", &env).unwrap();
    assert!(load_model(&files).is_ok());
    let from: Vec<_> = server
        .log()
        .into_iter()
        .filter(|l| l.contains("/cdn/"))
        .collect();
    let last = "GET /cdn/model.safetensors 1000";
    assert_eq!(from, ["GET /cdn/model.safetensors 0", last, last, last]);
    let size = fs::metadata(golden_dir().join("llama/model.safetensors"))
        .unwrap()
        .len();
    assert_eq!(*seen.lock().unwrap(), size);
}

#[test]
fn wrong_content_and_missing_access_are_explained() {
    let mut state = repository("llama");
    state.faults = [Fault::Garble].into();
    state.token = Some("secret".to_owned());
    let server = Server::start(state);
    let dir = tempfile::tempdir().unwrap();
    let mut env = env(&server, dir.path());
    let message = |env: &ResolveEnv, spec| resolve_model(spec, env).unwrap_err().to_string();
    let text = message(&env, "hf:org/tiny");
    assert!(
        text.contains("401") && text.contains("needs HF_TOKEN"),
        "{text}"
    );
    env.hub_token = Some("secret".to_owned());
    let text = message(&env, "hf:org/tiny");
    assert!(text.contains("SHA-256"), "{text}");
    let text = message(&env, "hf:org/absent");
    assert!(
        text.contains("404") && text.contains("no such repository"),
        "{text}"
    );
    // The garbled content is gone, so that the next attempt starts anew.
    assert!(load_model(&resolve_model("hf:org/tiny", &env).unwrap()).is_ok());
    env.hub_endpoint = "http://127.0.0.1:1".to_owned();
    let text = message(&env, "hf:org/tiny");
    assert!(
        text.contains("HF_HUB_OFFLINE=1 uses the copy in the cache"),
        "{text}"
    );
}

#[test]
fn data_sets_bring_their_files_of_rows_and_nothing_else() {
    let rows: &[u8] = br#"{"question": "1 + 1?"}"#;
    let mut state = State::default();
    for name in [
        "data/train.jsonl",
        "test.csv",
        "README.md",
        ".hidden/x.csv",
        "model.safetensors",
    ] {
        state.files.insert(name.into(), rows.to_vec());
    }
    let server = Server::start(state);
    let dir = tempfile::tempdir().unwrap();
    let mut env = env(&server, dir.path());
    let found = resolve_dataset("hf:org/tiny", &env).unwrap();
    let root = dir.path().join("hub/datasets--org--tiny");
    assert_eq!(found, root.join("snapshots").join(COMMIT));
    assert_eq!(fs::read(found.join("data/train.jsonl")).unwrap(), rows);
    assert_eq!(fs::read(found.join("test.csv")).unwrap(), rows);
    for name in ["README.md", ".hidden", "model.safetensors"] {
        assert!(!found.join(name).exists(), "{name}");
    }
    let log = server.log();
    assert!(
        log.iter()
            .any(|l| l.contains("/datasets/org/tiny/resolve/")),
        "{log:?}"
    );

    // The copy in the cache is used without the network, but only once it is whole.
    env.offline = true;
    assert_eq!(resolve_dataset("hf:org/tiny", &env).unwrap(), found);
    assert!(server.log().is_empty());
    fs::remove_file(root.join("refs/main")).unwrap();
    let error = resolve_dataset("hf:org/tiny", &env)
        .unwrap_err()
        .to_string();
    assert!(error.contains("org/tiny"), "{error}");

    // Paths are left as they are; names are checked, since they become paths.
    assert_eq!(
        resolve_dataset("rows.jsonl", &env).unwrap(),
        Path::new("rows.jsonl")
    );
    let error = resolve_dataset("hf:org/../x", &env)
        .unwrap_err()
        .to_string();
    assert!(error.contains("org/../x"), "{error}");
    let empty = Server::start(State::default());
    env.offline = false;
    env.hub_endpoint = empty.address;
    let error = resolve_dataset("hf:org/tiny", &env)
        .unwrap_err()
        .to_string();
    assert!(error.contains("no files that end in .parquet"), "{error}");
}
