//! Pulls from Debian's `docker-registry`, started on loopback, and from a server with faults that no real
//! registry has on demand.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use sinew_http::blocking::Client;
use sinew_http::{ClientOptions, Method};
use sinew_image::{Credentials, Image, ImageError, PullLimits, UnpackLimits, pull};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// `ann:secret`, hashed with bcrypt.
const HTPASSWD: &str = "ann:$2b$04$bPPCqMAc9BO0s4w7UrW90eTQAudYqPAAMbx3Oex5RtBWseaG/fv/y\n";

fn sha256(bytes: &[u8]) -> String {
    let digits: String = Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    format!("sha256:{digits}")
}

fn machine() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn http() -> Client {
    Client::new(ClientOptions::default()).unwrap()
}

/// An image with one file, for an architecture.
struct Made {
    layer: Vec<u8>,
    config: Vec<u8>,
    manifest: Vec<u8>,
}

fn descriptor(bytes: &[u8], kind: &str) -> Value {
    json!({ "mediaType": kind, "digest": sha256(bytes), "size": bytes.len() })
}

fn made(content: &str, architecture: &str) -> Made {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    builder
        .append_data(&mut header, "hello", content.as_bytes())
        .unwrap();
    let layer = builder.into_inner().unwrap();
    let config = json!({
        "os": "linux", "architecture": architecture, "config": { "Env": ["A=b"] },
        "rootfs": { "type": "layers", "diff_ids": [sha256(&layer)] },
    });
    let config = config.to_string().into_bytes();
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": descriptor(&config, "application/vnd.oci.image.config.v1+json"),
        "layers": [descriptor(&layer, "application/vnd.oci.image.layer.v1.tar")],
    });
    Made {
        layer,
        config,
        manifest: manifest.to_string().into_bytes(),
    }
}

/// Debian's registry on a free port of loopback.
struct Registry {
    folder: tempfile::TempDir,
    child: Child,
    host: String,
    /// Its log, also of requests.
    log: Arc<Mutex<String>>,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Registry {
    fn start(auth: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        fs::write(path("htpasswd"), HTPASSWD).unwrap();
        let mut config = json!({
            "version": 0.1, "storage": { "filesystem": { "rootdirectory": path("data") } },
            "http": { "addr": "127.0.0.1:0" },
        });
        if auth {
            config["auth"] = json!({ "htpasswd": { "realm": "test", "path": path("htpasswd") } });
        }
        // JSON is YAML.
        fs::write(path("config.yml"), config.to_string()).unwrap();
        let child = Command::new("docker-registry")
            .args(["serve", &path("config.yml")])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = child.expect("no docker-registry: run scripts/setup.sh");
        let log = Arc::new(Mutex::new(String::new()));
        let (kept, lines) = (
            Arc::clone(&log),
            BufReader::new(child.stderr.take().unwrap()),
        );
        let (sender, address) = std::sync::mpsc::sync_channel(1);
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                if let Some((_, rest)) = line.split_once("listening on ") {
                    let _ = sender.send(rest.split('"').next().unwrap().to_owned());
                }
                let mut log = kept.lock().unwrap();
                log.push_str(&line);
                log.push('\n');
            }
        });
        let host = address
            .recv_timeout(Duration::from_secs(120))
            .expect("it listens");
        Self {
            folder,
            child,
            host,
            log,
        }
    }

    fn push(&self, name: &str, tag: &str, image: &Made) {
        for blob in [&image.layer, &image.config] {
            let http = http();
            let url = format!("http://{}/v2/{name}/blobs/uploads/", self.host);
            let begun = http.request(Method::POST, &url).send().unwrap();
            let location = begun.headers()["location"].to_str().unwrap();
            let url = format!("{location}&digest={}", sha256(blob));
            let put = http.request(Method::PUT, &url);
            assert_eq!(put.body(blob.clone()).send().unwrap().status(), 201);
        }
        self.put(name, tag, MANIFEST, &image.manifest);
    }

    fn put(&self, name: &str, tag: &str, kind: &str, manifest: &[u8]) {
        let url = format!("http://{}/v2/{name}/manifests/{tag}", self.host);
        let put = http()
            .request(Method::PUT, &url)
            .header("content-type", kind);
        let answer = put.body(manifest.to_vec()).send().unwrap();
        assert_eq!(answer.status(), 201, "{}", answer.text().unwrap());
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    fn pull(&self, image: &str) -> Result<Image, ImageError> {
        self.pull_as(image, &Credentials::default())
    }

    fn pull_as(&self, image: &str, credentials: &Credentials) -> Result<Image, ImageError> {
        let name = format!("registry:{}/{image}", self.host);
        pull(&name, &self.cache(), credentials, &quick())
    }

    /// Number of requests for a path so far. The registry logs one after it was answered, so this waits for
    /// `expected`.
    fn asked(&self, path: &str, expected: usize) -> usize {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            // The log has each request once, as `http.request.uri=...` of a response.
            let log = self.log.lock().unwrap().clone();
            let lines = log
                .lines()
                .filter(|l| l.contains("response completed") && l.contains("method=GET"));
            let seen = lines.filter(|l| l.contains(path)).count();
            if seen >= expected || Instant::now() > until {
                return seen;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn quick() -> PullLimits {
    PullLimits {
        pause: Duration::from_millis(5),
        stall: Duration::from_secs(60),
        time: Duration::from_secs(300),
        retries: 2,
        ..PullLimits::default()
    }
}

fn content(image: &Image) -> String {
    fs::read_to_string(image.root.join("hello")).unwrap()
}

/// Nothing half-done is left in a cache.
fn is_clean(cache: &Path) -> bool {
    let entries = fs::read_dir(cache).unwrap();
    entries
        .flatten()
        .all(|e| !e.file_name().to_string_lossy().contains("partial"))
}

#[test]
fn an_image_is_pulled_once_and_found_afterwards() {
    let registry = Registry::start(false);
    let image = made("one", machine());
    registry.push("team/tool", "1", &image);
    let first = registry.pull("team/tool:1").unwrap();
    assert_eq!((content(&first).as_str(), first.fresh), ("one", true));
    assert_eq!(first.config.env, [("A".into(), "b".into())]);
    assert!(is_clean(&registry.cache()));
    let (blobs, manifests) = ("/v2/team/tool/blobs/", "/v2/team/tool/manifests/");
    let asked = |layers, tags| {
        (
            registry.asked(blobs, layers),
            registry.asked(manifests, tags),
        )
    };
    assert_eq!(asked(2, 1), (2, 1));
    let again = registry.pull("team/tool:1").unwrap();
    assert_eq!(
        (again.root.clone(), again.fresh),
        (first.root.clone(), false)
    );
    // A tag is asked for again, layers are not.
    assert_eq!(asked(2, 2), (2, 2));
    // A digest is asked for once.
    let digest = sha256(&image.manifest);
    for _ in 0..2 {
        let pinned = registry.pull(&format!("team/tool@{digest}")).unwrap();
        assert_eq!(pinned.root, first.root);
        assert_eq!(asked(2, 3), (2, 3));
    }
    // A tag that moved is another image.
    registry.push("team/tool", "1", &made("two", machine()));
    assert_eq!(content(&registry.pull("team/tool:1").unwrap()), "two");
    assert_eq!(content(&first), "one");
}

#[test]
fn one_of_many_processes_pulls() {
    let registry = Registry::start(false);
    registry.push("tool", "1", &made("one", machine()));
    // Locks of a file are those of whoever opened it: threads stand for processes.
    let roots: Vec<Image> = std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..6)
            .map(|_| scope.spawn(|| registry.pull("tool:1").unwrap()))
            .collect();
        pulls.into_iter().map(|p| p.join().unwrap()).collect()
    });
    assert_eq!(roots.iter().filter(|i| i.fresh).count(), 1);
    assert_eq!(registry.asked("/v2/tool/blobs/", 2), 2);
}

#[test]
fn of_an_index_the_image_of_this_machine_is_taken() {
    let registry = Registry::start(false);
    let (own, other) = (made("own", machine()), made("other", "s390x"));
    let entry = |image: &Made, architecture: &str| {
        let mut entry = descriptor(&image.manifest, MANIFEST);
        entry["platform"] = json!({ "os": "linux", "architecture": architecture });
        entry
    };
    registry.push("tool", "own", &own);
    registry.push("tool", "other", &other);
    let index = |entries: &[Value]| {
        json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": entries })
            .to_string()
            .into_bytes()
    };
    let both = index(&[entry(&other, "s390x"), entry(&own, machine())]);
    registry.put("tool", "both", INDEX, &both);
    registry.put("tool", "foreign", INDEX, &index(&[entry(&other, "s390x")]));
    assert_eq!(content(&registry.pull("tool:both").unwrap()), "own");
    let pinned = registry.pull(&format!("tool@{}", sha256(&both))).unwrap();
    assert_eq!(content(&pinned), "own");
    for name in ["tool:foreign", "tool:other"] {
        let error = registry.pull(name).unwrap_err();
        assert!(
            matches!(&error, ImageError::Platform { found, .. } if found == "linux/s390x"),
            "{error}"
        );
    }
}

#[test]
fn a_changed_layer_is_refused_and_nothing_of_it_kept() {
    let registry = Registry::start(false);
    let image = made("one", machine());
    registry.push("tool", "1", &image);
    let digest = sha256(&image.layer);
    let digits = &digest["sha256:".len()..];
    let kept = format!(
        "data/docker/registry/v2/blobs/sha256/{}/{digits}/data",
        &digits[..2]
    );
    let kept = registry.folder.path().join(kept);
    let mut forged = image.layer.clone();
    forged[512] ^= 1;
    fs::write(&kept, forged).unwrap();
    let error = registry.pull("tool:1").unwrap_err();
    assert!(
        matches!(&error, ImageError::Digest { expected, .. } if expected.contains(&digest)),
        "{error}"
    );
    assert!(is_clean(&registry.cache()));
    fs::write(&kept, &image.layer).unwrap();
    assert_eq!(content(&registry.pull("tool:1").unwrap()), "one");
}

#[test]
fn what_a_registry_does_not_have_or_show_is_said() {
    let registry = Registry::start(true);
    let error = registry.pull("tool:1").unwrap_err();
    assert!(matches!(error, ImageError::Unauthorized { .. }), "{error}");
    let as_user = |words: &str| Credentials {
        words: Some(format!("{}={words}", registry.host)),
        docker: None,
    };
    let error = registry
        .pull_as("tool:1", &as_user("ann:wrong"))
        .unwrap_err();
    assert!(matches!(error, ImageError::Unauthorized { .. }), "{error}");
    assert!(!error.to_string().contains("wrong"), "{error}");
    // Let in, and there is no such image.
    let error = registry
        .pull_as("tool:1", &as_user("ann:secret"))
        .unwrap_err();
    assert!(matches!(error, ImageError::Missing { .. }), "{error}");
    let gone = registry.host.clone();
    drop(registry);
    let folder = tempfile::tempdir().unwrap();
    let name = format!("registry:{gone}/tool:1");
    let error = pull(&name, folder.path(), &Credentials::default(), &quick()).unwrap_err();
    assert!(
        matches!(error, ImageError::Unreachable { attempts: 3, .. }),
        "{error}"
    );
}

/// Answer of the server with faults: status, header fields, and the body. It may cut a body.
type Answer = (u16, Vec<(&'static str, String)>, Vec<u8>);

/// Answers requests, by their path and all their text, until the process ends.
fn faulty(answer: impl Fn(&str, &str) -> Answer + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = one(stream, &answer);
        }
    });
    host
}

fn one(mut stream: TcpStream, answer: &impl Fn(&str, &str) -> Answer) -> std::io::Result<()> {
    let mut head = String::new();
    let mut reader = BufReader::new(stream.try_clone()?);
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
    let (status, headers, body) = answer(&path, &head.to_ascii_lowercase());
    let mut text = format!("HTTP/1.1 {status} X\r\nconnection: close\r\n");
    if !headers.iter().any(|(name, _)| *name == "content-length") {
        text += &format!("content-length: {}\r\n", body.len());
    }
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{text}\r\n").as_bytes())?;
    stream.write_all(&body)?;
    stream.flush()?;
    stream.shutdown(std::net::Shutdown::Write)?;
    // A socket that is closed with bytes unread would cut the answer.
    std::io::copy(&mut reader.take(1 << 20), &mut std::io::sink()).map(drop)
}

fn plain(body: &[u8]) -> Answer {
    (200, Vec::new(), body.to_vec())
}

fn pull_from(
    host: &str,
    credentials: &Credentials,
    limits: &PullLimits,
) -> Result<String, ImageError> {
    let folder = tempfile::tempdir().unwrap();
    let name = format!("registry:{host}/tool:1");
    pull(&name, folder.path(), credentials, limits).map(|image| content(&image))
}

/// Bodies by path.
type Answers = BTreeMap<String, Vec<u8>>;

/// A registry that answers each path with these.
fn answers(image: &Made) -> Answers {
    BTreeMap::from([
        ("/v2/tool/manifests/1".into(), image.manifest.clone()),
        (
            format!("/v2/tool/blobs/{}", sha256(&image.config)),
            image.config.clone(),
        ),
        (
            format!("/v2/tool/blobs/{}", sha256(&image.layer)),
            image.layer.clone(),
        ),
    ])
}

#[test]
fn a_registry_in_trouble_is_asked_again_from_where_it_stopped() {
    let image = made("one", machine());
    let (all, layer) = (answers(&image), image.layer.clone());
    let of_layer = format!("/v2/tool/blobs/{}", sha256(&layer));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let host = faulty(move |path, head| {
        let mut seen = log.lock().unwrap();
        let range = head
            .lines()
            .find_map(|l| l.strip_prefix("range: "))
            .map(str::to_owned);
        seen.push((path.to_owned(), range.clone()));
        let times = seen.iter().filter(|(p, _)| p == path).count();
        match (path == of_layer, times) {
            (false, 1) => (503, vec![("retry-after", "0".into())], Vec::new()),
            // The connection ends before the layer does.
            (true, 1) => (
                200,
                vec![("content-length", layer.len().to_string())],
                layer[..700].to_vec(),
            ),
            (true, _) => {
                let from: usize = range.unwrap()["bytes=".len()..]
                    .trim_end_matches('-')
                    .parse()
                    .unwrap();
                let place = format!("bytes {from}-{}/{}", layer.len() - 1, layer.len());
                (206, vec![("content-range", place)], layer[from..].to_vec())
            }
            _ => plain(&all[path]),
        }
    });
    assert_eq!(
        pull_from(&host, &Credentials::default(), &quick()).unwrap(),
        "one"
    );
    let seen = seen.lock().unwrap();
    assert_eq!(
        seen.last().unwrap().1.as_deref(),
        Some("bytes=700-"),
        "{seen:?}"
    );
    // One that stays in trouble is given up.
    let host = faulty(|_, _| (500, Vec::new(), Vec::new()));
    let error = pull_from(&host, &Credentials::default(), &quick()).unwrap_err();
    assert!(
        matches!(error, ImageError::Unreachable { attempts: 3, .. }),
        "{error}"
    );
}

#[test]
fn a_registry_cannot_send_more_than_the_image_says() {
    let image = made("one", machine());
    let refused = |change: &dyn Fn(&mut Answers), limits: &PullLimits| {
        let mut all = answers(&image);
        change(&mut all);
        let host = faulty(move |path, _| plain(&all[path]));
        pull_from(&host, &Credentials::default(), limits).unwrap_err()
    };
    let of_layer = format!("/v2/tool/blobs/{}", sha256(&image.layer));
    let longer = |all: &mut Answers| all.get_mut(&of_layer).unwrap().push(0);
    let error = refused(&longer, &quick());
    assert!(matches!(error, ImageError::Digest { .. }), "{error}");
    let huge = |all: &mut Answers| {
        all.insert("/v2/tool/manifests/1".into(), vec![b' '; (4 << 20) + 1]);
    };
    let error = refused(&huge, &quick());
    assert!(matches!(error, ImageError::Limit { .. }), "{error}");
    let unchanged = |_: &mut Answers| {};
    for unpack in [
        UnpackLimits {
            bytes: 1000,
            ..UnpackLimits::default()
        },
        UnpackLimits {
            layers: 0,
            ..UnpackLimits::default()
        },
    ] {
        let error = refused(&unchanged, &PullLimits { unpack, ..quick() });
        assert!(matches!(error, ImageError::Limit { .. }), "{error}");
    }
    // A pull has an end, also where a server answers slowly for ever.
    let error = refused(
        &unchanged,
        &PullLimits {
            time: Duration::ZERO,
            ..quick()
        },
    );
    assert!(matches!(error, ImageError::Limit { .. }), "{error}");
}

#[test]
fn a_token_is_fetched_with_the_password_and_no_other_host_sees_it() {
    let image = made("one", machine());
    let all = answers(&image);
    let address = Arc::new(Mutex::new(String::new()));
    let own = Arc::clone(&address);
    let host = faulty(move |path, head| {
        if let Some(query) = path.strip_prefix("/token?") {
            assert!(
                query.contains("scope=repository%3Atool%3Apull") && query.contains("service=r"),
                "{query}"
            );
            // ann:secret
            return if head.contains("basic yw5uonnly3jlda==") {
                plain(br#"{"token": "t0k3n"}"#)
            } else {
                (401, Vec::new(), Vec::new())
            };
        }
        if !head.contains("authorization: bearer t0k3n") {
            let realm = format!(
                "Bearer realm=\"http://{}/token\",service=\"r\"",
                own.lock().unwrap()
            );
            return (401, vec![("www-authenticate", realm)], Vec::new());
        }
        plain(&all[path])
    });
    *address.lock().unwrap() = host.clone();
    let login = Credentials {
        words: Some(format!("{host}=ann:secret")),
        docker: None,
    };
    assert_eq!(pull_from(&host, &login, &quick()).unwrap(), "one");
    let error = pull_from(&host, &Credentials::default(), &quick()).unwrap_err();
    assert!(matches!(error, ImageError::Unauthorized { .. }), "{error}");
    // A registry that wants the password sent to an address without HTTPS.
    *address.lock().unwrap() = "192.0.2.1".into();
    let error = pull_from(&host, &login, &quick()).unwrap_err();
    assert!(error.to_string().contains("not https"), "{error}");
}
