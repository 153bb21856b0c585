//! Downloads against a small server on the loopback interface.

use crate::support::golden_dir;
use sha2::{Digest, Sha256};
use sinew_model::{
    Dataset, HubRows, ModelFiles, ResolveEnv, load_config, load_model, resolve_dataset,
    resolve_model,
};
use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Faults of the server in the next requests for content, one entry each; then it behaves.
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
    /// Sizes that the listing reports instead of the true ones.
    sizes: BTreeMap<String, u64>,
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
    listed_or_resolved(state, method, path, answer);
}

/// Answers of the hub itself: the list of a repository's files, and the files or their addresses.
fn listed_or_resolved(
    state: &State,
    method: &str,
    path: &str,
    mut answer: impl FnMut(&str, &[u8]),
) {
    let listings = ["models", "datasets"].map(|kind| format!("/api/{kind}/org/tiny/revision/main"));
    let revision = path.strip_suffix("?blobs=true").unwrap_or(path);
    let commit = format!("/api/datasets/org/tiny/revision/{COMMIT}");
    if revision == commit || listings.iter().any(|listing| listing == revision) {
        let name = |(name, body): (&String, &Vec<u8>)| {
            let size = state.sizes.get(name).copied().unwrap_or(body.len() as u64);
            format!(r#"{{"rfilename": "{name}", "size": {size}}}"#)
        };
        let names: Vec<_> = state.files.iter().map(name).collect();
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
    let name = &unescaped(name);
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

/// A path of an address with `%XX` as bytes.
fn unescaped(path: &str) -> String {
    let mut parts = path.split('%');
    let mut bytes = parts.next().unwrap().as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(&part[..2], 16).unwrap());
        bytes.extend(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).unwrap()
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
    // Again: only the listing; offline or by commit: nothing at all.
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
fn a_model_of_a_service_comes_without_weights() {
    let mut state = repository("llama");
    state.files.insert("tokenizer.json".into(), b"{}".to_vec());
    let server = Server::start(state);
    let dir = tempfile::tempdir().unwrap();
    let mut env = env(&server, dir.path());
    let files = resolve_model("tinker:org/tiny", &env).unwrap();
    let ModelFiles::Dir(snapshot) = files.clone() else {
        panic!("{files:?}");
    };
    assert!(load_config(&files).is_ok() && snapshot.join("tokenizer.json").is_file());
    assert!(!snapshot.join("model.safetensors").exists());
    server.log();
    env.offline = true;
    assert_eq!(resolve_model("tinker:org/tiny", &env).unwrap(), files);
    let text = resolve_model("hf:org/tiny", &env).unwrap_err().to_string();
    assert!(text.contains("HF_HUB_OFFLINE"), "{text}");
    env.offline = false;
    let commit = format!("tinker:org/tiny@{COMMIT}");
    assert_eq!(resolve_model(&commit, &env).unwrap(), files);
    assert!(server.log().is_empty());
    // The same folder gets the weights once they are needed.
    assert_eq!(resolve_model("hf:org/tiny", &env).unwrap(), files);
    assert!(load_model(&files).is_ok());
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

/// A data set with one row in each of these files.
fn data_set(names: &[&str]) -> State {
    let mut state = State::default();
    for name in names {
        let row = format!("{{\"question\": \"{name}\"}}\n");
        state.files.insert((*name).into(), row.into_bytes());
    }
    state
}

fn rows(spec: &str, env: &ResolveEnv) -> Result<HubRows, String> {
    match resolve_dataset(spec, env) {
        Ok(Dataset::Hub(rows)) => Ok(rows),
        Ok(Dataset::Path(path)) => panic!("{}", path.display()),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn data_sets_bring_their_files_of_rows_and_nothing_else() {
    let mut state = data_set(&[
        "data/train.jsonl",
        "test.csv",
        ".hidden/x.csv",
        "model.safetensors",
    ]);
    state.files.insert("README.md".into(), b"hello".to_vec());
    let server = Server::start(state);
    let dir = tempfile::tempdir().unwrap();
    let mut env = env(&server, dir.path());
    let found = rows("hf:org/tiny", &env).unwrap();
    let root = dir.path().join("hub/datasets--org--tiny");
    let snapshot = root.join("snapshots").join(COMMIT);
    assert_eq!(found.train, [snapshot.join("data/train.jsonl")]);
    assert_eq!(found.held_out, [snapshot.join("test.csv")]);
    let row = fs::read_to_string(&found.train[0]).unwrap();
    assert!(row.contains("data/train.jsonl"), "{row}");
    for name in [".hidden", "model.safetensors"] {
        assert!(!snapshot.join(name).exists(), "{name}");
    }
    let log = server.log();
    assert!(
        log.iter()
            .any(|l| l.contains("/datasets/org/tiny/resolve/")),
        "{log:?}"
    );

    // The copy in the cache is used without the network, but only once it is whole.
    env.offline = true;
    assert_eq!(rows("hf:org/tiny", &env).unwrap(), found);
    assert!(server.log().is_empty());
    fs::remove_file(root.join("refs/main")).unwrap();
    let error = rows("hf:org/tiny", &env).unwrap_err();
    assert!(error.contains("org/tiny"), "{error}");

    // Paths are left as they are; names are checked, since they become paths.
    let path = Dataset::Path("rows.jsonl".into());
    assert_eq!(resolve_dataset("rows.jsonl", &env).unwrap(), path);
    for bad in [
        "hf:org/../x",
        "hf:org/tiny/../x",
        "hf:org/tiny/a/b",
        "hf:org/tiny/",
    ] {
        let error = rows(bad, &env).unwrap_err();
        assert!(error.contains("[/CONFIGURATION]"), "{error}");
    }
    let empty = Server::start(State::default());
    env.offline = false;
    env.hub_endpoint = empty.address;
    let error = rows("hf:org/tiny", &env).unwrap_err();
    assert!(error.contains("no files that end in .parquet"), "{error}");
}

#[test]
fn a_configuration_is_chosen_and_brings_its_files_alone() {
    let names = [
        "main/train-0.jsonl",
        "main/test-0.jsonl",
        "socratic/train-0.jsonl",
    ];
    let server = Server::start(data_set(&names));
    let dir = tempfile::tempdir().unwrap();
    let mut env = env(&server, dir.path());
    let error = rows("hf:org/tiny", &env).unwrap_err();
    assert!(error.contains("main, socratic"), "{error}");
    assert!(error.contains("hf:ORG/NAME/CONFIGURATION"), "{error}");
    let main = rows("hf:org/tiny/main", &env).unwrap();
    assert!(main.train[0].ends_with("main/train-0.jsonl"), "{main:?}");
    assert_eq!((main.train.len(), main.held_out.len()), (1, 1));
    assert!(!server.log().iter().any(|l| l.contains("socratic")));
    // Files of one configuration reveal nothing about another.
    env.offline = true;
    assert_eq!(rows("hf:org/tiny/main@main", &env).unwrap(), main);
    // A split is a part of them.
    let test = rows("hf:org/tiny/main:test@main", &env).unwrap();
    assert_eq!(
        (test.train, test.held_out),
        (main.held_out.clone(), Vec::new())
    );
    let error = rows("hf:org/tiny/main:dev", &env).unwrap_err();
    assert!(
        error.contains("no file of the split `dev` among"),
        "{error}"
    );
    let error = rows("hf:org/tiny/main:", &env).unwrap_err();
    assert!(error.contains("is not the name of a split"), "{error}");
    assert!(
        rows("hf:org/tiny/socratic", &env)
            .unwrap_err()
            .contains("offline")
    );
    env.offline = false;

    // The description decides: patterns, the default, names of splits.
    let readme = "---\nconfigs:\n\
                  - config_name: easy\n  data_files:\n  - split: train\n    path: main/train-*\n\
                  - config_name: all\n  default: true\n  data_files:\n  - split: train\n\
                  \x20   path: '*/train-*'\n\
                  - config_name: none\n  data_files: x.csv\n---\n";
    server
        .state
        .lock()
        .unwrap()
        .files
        .insert("README.md".into(), readme.into());
    let other = tempfile::tempdir().unwrap();
    env.hub_cache = other.path().join("hub");
    assert_eq!(rows("hf:org/tiny", &env).unwrap().train.len(), 2);
    assert_eq!(rows("hf:org/tiny/easy", &env).unwrap().train.len(), 1);
    let error = rows("hf:org/tiny/none", &env).unwrap_err();
    assert!(error.contains("`none` has no files"), "{error}");
    let error = rows("hf:org/tiny/main", &env).unwrap_err();
    assert!(error.contains("allowed: easy, all, none"), "{error}");
}

#[test]
fn a_killed_download_of_a_commit_is_not_whole() {
    let names = ["data/test.jsonl", "data/train.jsonl"];
    let server = Server::start(data_set(&names));
    let dir = tempfile::tempdir().unwrap();
    let mut env = env(&server, dir.path());
    let spec = format!("hf:org/tiny@{COMMIT}");
    let all = rows(&spec, &env).unwrap();
    assert_eq!((all.train.len(), all.held_out.len()), (1, 1));
    // Whole: neither the network nor the listing is asked for.
    server.log();
    assert_eq!(rows(&spec, &env).unwrap(), all);
    assert!(server.log().is_empty());
    // The state after a kill between two files: the folder is there, a file and the note are not.
    let root = dir.path().join("hub/datasets--org--tiny");
    let note = root.join(".sinew").join(COMMIT).join("default.json");
    fs::remove_file(&note).unwrap();
    fs::remove_file(&all.train[0]).unwrap();
    env.offline = true;
    let error = rows(&spec, &env).unwrap_err();
    assert!(error.contains("is not in the hub cache"), "{error}");
    env.offline = false;
    assert_eq!(rows(&spec, &env).unwrap(), all);
    assert!(note.is_file());
    // A file that is gone is noticed as well.
    fs::remove_file(&all.held_out[0]).unwrap();
    env.offline = true;
    assert!(rows(&spec, &env).is_err());
    // A snapshot of `hf download` has no note, and is taken as it is.
    fs::remove_dir_all(root.join(".sinew")).unwrap();
    let found = rows(&spec, &env).unwrap();
    assert_eq!((found.train, found.held_out.len()), (all.train, 0));
}

#[test]
fn a_snapshot_that_another_program_began_is_completed_online() {
    let server = Server::start(data_set(&["data/test.jsonl", "data/train.jsonl"]));
    for present in ["data/test.jsonl", "LICENSE"] {
        for spec in ["hf:org/tiny".to_owned(), format!("hf:org/tiny@{COMMIT}")] {
            let dir = tempfile::tempdir().unwrap();
            let mut env = env(&server, dir.path());
            // The reference first, then one file after the other.
            let root = dir.path().join("hub/datasets--org--tiny");
            let snapshot = root.join("snapshots").join(COMMIT);
            fs::create_dir_all(root.join("refs")).unwrap();
            fs::write(root.join("refs/main"), COMMIT).unwrap();
            fs::create_dir_all(snapshot.join("data")).unwrap();
            fs::write(snapshot.join(present), "{\"question\": \"own\"}\n").unwrap();
            let all = rows(&spec, &env).unwrap();
            assert_eq!(all.train, [snapshot.join("data/train.jsonl")]);
            assert_eq!(all.held_out, [snapshot.join("data/test.jsonl")]);
            let kept = fs::read_to_string(snapshot.join(present)).unwrap();
            assert!(kept.contains("own"), "a file that is there is taken");
            env.offline = true;
            assert_eq!(rows(&spec, &env).unwrap(), all);
        }
    }
}

#[test]
fn names_of_files_are_escaped_and_sizes_limited() {
    let odd = "a b/50%#1?+ü.jsonl";
    let mut state = data_set(&[odd]);
    let server = Server::start(state);
    let dir = tempfile::tempdir().unwrap();
    let found = rows("hf:org/tiny", &env(&server, dir.path())).unwrap();
    assert!(found.train[0].ends_with(odd), "{found:?}");
    let escaped = "/a%20b/50%25%231%3F%2B%C3%BC.jsonl";
    assert!(server.log().iter().any(|l| l.contains(escaped)));

    state = data_set(&["train.jsonl", "README.md"]);
    state.sizes.insert("train.jsonl".into(), 1 << 40);
    let server = Server::start(state);
    let dir = tempfile::tempdir().unwrap();
    let error = rows("hf:org/tiny", &env(&server, dir.path())).unwrap_err();
    assert!(
        error.contains("its files have 1099511627776 bytes; allowed: up to"),
        "{error}"
    );
    assert!(
        !server.log().iter().any(|l| l.contains("train.jsonl")),
        "nothing was downloaded"
    );
    let long = vec![b'x'; 5 << 20];
    server
        .state
        .lock()
        .unwrap()
        .files
        .insert("README.md".into(), long);
    let dir = tempfile::tempdir().unwrap();
    let error = rows("hf:org/tiny", &env(&server, dir.path())).unwrap_err();
    assert!(
        error.contains("README.md: 5242880 bytes; allowed: up to"),
        "{error}"
    );
}
