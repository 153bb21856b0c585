//! Docker's API over its Unix socket; Podman answers the same. Images are never pulled.

use crate::root::{self, AGENT, HOST};
use crate::spec::{
    AGENT_CAPABILITIES, Common, EngineKind, FILE_CAPABILITIES, INODES, MASKED, READ_ONLY, RootWay,
    StartSpec, open_files, unavailable,
};
use crate::state::{alive, io};
use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full, Limited};
use hyper::body::{Body, Frame};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use sinew_jail::layer::USERS;
use sinew_sandbox::SandboxError;
use std::fs::File;
use std::io::{BufWriter, Read, Seek};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::OnceCell;

/// Version of the API. Docker 20.10 and Podman 4 support it.
const VERSION: &str = "v1.41";
/// Maximum bytes of a response, which is held in memory.
const MAX_ANSWER: usize = 4 << 20;
/// Maximum time of one request. The import of an image takes longest.
const PATIENCE: Duration = Duration::from_secs(120);
/// Maximum bytes of a piece of a request that is sent from a file.
const MAX_CHUNK: usize = 256 << 10;
/// Label of every container, with the tag of its run.
const LABEL: &str = "sinew.run";

/// Maximum processes of all Podman containers together, as they run as one user. The group limits each
/// container.
const ALL_PROCESSES: u64 = 16_384;

/// A daemon that has answered, reached by one connection for each request.
#[derive(Debug)]
pub(crate) struct Api {
    /// Docker or Podman. They differ in mounts, users and masked paths.
    kind: EngineKind,
    /// Path of the Unix socket.
    socket: PathBuf,
    /// Image of all containers. Empty until [`Self::use_image`] or [`Self::import`].
    image: String,
    /// Unpacked image whose folders are mounts in containers. A writable root needs it whole.
    folder: Option<PathBuf>,
    /// Name of the image of writable roots, imported for the first.
    whole: OnceCell<String>,
}

/// Content of a request.
type RequestBody = Either<Full<Bytes>, FileBody>;

/// Content of a file as the body of a request, in pieces.
#[derive(Debug)]
struct FileBody(File);

impl Body for FileBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        // The file was written just now: it is in memory.
        let mut chunk = vec![0; MAX_CHUNK];
        Poll::Ready(match self.0.read(&mut chunk) {
            Ok(0) => None,
            Ok(n) => {
                chunk.truncate(n);
                Some(Ok(Frame::data(chunk.into())))
            }
            Err(e) => Some(Err(e)),
        })
    }
}

type SandboxResult<T> = Result<T, SandboxError>;

impl Api {
    /// Asks for the version.
    pub(crate) async fn new(kind: EngineKind, socket: &Path) -> SandboxResult<Self> {
        let api = Self {
            kind,
            socket: socket.into(),
            image: String::new(),
            folder: None,
            whole: OnceCell::new(),
        };
        api.ask(Method::GET, "/version", Bytes::new()).await?;
        Ok(api)
    }

    pub(crate) fn kind(&self) -> EngineKind {
        self.kind
    }

    /// Sends one request and returns status and body of the response. A body that starts with `{` is sent as
    /// JSON, any other as a tar file.
    async fn call(&self, method: Method, path: &str, body: Bytes) -> SandboxResult<(u16, Bytes)> {
        let kind = match body.first() {
            Some(b'{') => "application/json",
            _ => "application/x-tar",
        };
        self.send(method, path, kind, Either::Left(Full::new(body)))
            .await
    }

    /// Sends one request with a body of this media type.
    async fn send(
        &self,
        method: Method,
        path: &str,
        kind: &str,
        body: RequestBody,
    ) -> SandboxResult<(u16, Bytes)> {
        let failed = |e: &dyn std::fmt::Display| io(self.socket.display().to_string(), e);
        let exchange = async {
            let stream = UnixStream::connect(&self.socket)
                .await
                .map_err(|e| failed(&e))?;
            let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
            let (mut sender, connection) = handshake.await.map_err(|e| failed(&e))?;
            let driver = tokio::spawn(connection);
            let request = Request::builder()
                .method(method)
                .uri(format!("/{VERSION}{path}"))
                .header("host", "localhost")
                .header("content-type", kind)
                .body(body)
                .map_err(|e| failed(&e))?;
            let answer = sender.send_request(request).await;
            let answer = answer.map_err(|e| failed(&e))?;
            let status = answer.status().as_u16();
            let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
            driver.abort();
            Ok((status, body.map_err(|e| failed(&e))?.to_bytes()))
        };
        match tokio::time::timeout(PATIENCE, exchange).await {
            Ok(done) => done,
            Err(_) => Err(failed(&format!("no answer in {PATIENCE:?}"))),
        }
    }

    /// Sends a request that must succeed, and returns the response as JSON (null if it is none).
    ///
    /// # Errors
    /// [`SandboxError::Io`] with the status and the message of the daemon.
    async fn ask(&self, method: Method, path: &str, body: Bytes) -> SandboxResult<Value> {
        let asked = format!("{} {method} {path}", self.kind.name());
        let (status, body) = self.call(method, path, body).await?;
        accepted(asked, status, &body)
    }

    /// Shows the folder of an unpacked image, whose folders are mounts of the image that is imported.
    pub(crate) fn set_whole(&mut self, folder: Option<PathBuf>) {
        self.folder = folder;
    }

    /// Name of the image of writable roots. An unpacked image is imported once, under a hash of its content.
    async fn whole(&self) -> SandboxResult<&str> {
        let Some(folder) = &self.folder else {
            return Ok(self.image.as_str());
        };
        let import = async {
            let folder = folder.clone();
            let packed = tokio::task::spawn_blocking(move || pack(&folder)).await;
            let (file, digest) = packed.map_err(|e| io("pack an image", e))??;
            let name = format!("sinew/image-{digest}");
            let path = format!("/images/{name}/json");
            let (status, _) = self.call(Method::GET, &path, Bytes::new()).await?;
            if status != 200 {
                let path = format!("/images/create?fromSrc=-&repo={name}");
                let body = Either::Right(FileBody(file));
                let kind = "application/x-tar";
                let (status, body) = self.send(Method::POST, &path, kind, body).await?;
                accepted(format!("import {name}"), status, &body)?;
            }
            Ok::<_, SandboxError>(name)
        };
        let name = self.whole.get_or_try_init(|| import).await?;
        Ok(name.as_str())
    }

    /// Uses an image that the daemon has under this name.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] if it has none. It is not pulled.
    pub(crate) async fn use_image(&mut self, name: &str) -> SandboxResult<()> {
        let path = format!("/images/{}/json", encode(name));
        let (status, _) = self.call(Method::GET, &path, Bytes::new()).await?;
        if status != 200 {
            return Err(unavailable(format!(
                "{} has no image {name}, and none is ever pulled: import one (docker import ROOT.tar {name}) or name a folder or an archive",
                self.kind.name()
            )));
        }
        self.image = name.into();
        Ok(())
    }

    /// Makes an image from the archive of a root. Its name has a hash of the archive, so that equal roots are
    /// imported once.
    pub(crate) async fn import(&mut self, archive: Vec<u8>) -> SandboxResult<()> {
        let digest = digits(&Sha256::digest(&archive));
        // Podman takes no tag here.
        let name = format!("sinew/root-{digest}");
        if self.use_image(&name).await.is_ok() {
            return Ok(());
        }
        let path = format!("/images/create?fromSrc=-&repo={name}");
        self.ask(Method::POST, &path, archive.into()).await?;
        self.use_image(&name).await
    }

    /// Creates and starts a container and returns its id. Nothing is left after a failure.
    pub(crate) async fn start(
        &self,
        common: &Common,
        start: &StartSpec<'_>,
    ) -> SandboxResult<String> {
        let image = match start.way {
            None => self.image.as_str(),
            Some(_) => self.whole().await?,
        };
        let body = creation(self.kind, image, common, start).to_string();
        let path = format!("/containers/create?name={}", start.name);
        let made = self.ask(Method::POST, &path, body.into()).await?;
        let id = made["Id"].as_str().unwrap_or(&start.name).to_owned();
        let path = format!("/containers/{id}/start");
        if let Err(e) = self.ask(Method::POST, &path, Bytes::new()).await {
            // The caller needs the failure.
            let _ = self.remove(&id).await;
            return Err(e);
        }
        Ok(id)
    }

    /// Removes a container by force, and waits up to 200 requests until the daemon has forgotten it.
    pub(crate) async fn remove(&self, id: &str) -> SandboxResult<()> {
        let path = format!("/containers/{id}?force=1&v=1");
        let mut last = String::new();
        for _ in 0..200 {
            let (status, body) = self.call(Method::DELETE, &path, Bytes::new()).await?;
            match status {
                404 => return Ok(()),
                // It is being removed already, or (Podman) is ending just now.
                200..300 | 409 | 500 => {
                    last = format!("{status}: {}", String::from_utf8_lossy(&body));
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                _ => {
                    let why = String::from_utf8_lossy(&body);
                    return Err(io(
                        format!("remove container {id}"),
                        format!("{status}: {why}"),
                    ));
                }
            }
        }
        let what = format!("remove container {id}");
        Err(io(what, format!("it is still there: {last}")))
    }

    /// Removes containers with the label of a process that is gone.
    pub(crate) async fn sweep(&self) -> SandboxResult<()> {
        let filter = encode(&json!({ "label": [LABEL] }).to_string());
        let path = format!("/containers/json?all=1&filters={filter}");
        let list = self.ask(Method::GET, &path, Bytes::new()).await?;
        for container in list.as_array().into_iter().flatten() {
            let tag = container["Labels"][LABEL].as_str().unwrap_or_default();
            if let Some(id) = container["Id"].as_str().filter(|_| !alive(tag)) {
                self.remove(id).await?;
            }
        }
        Ok(())
    }
}

/// The response of a request that must succeed, as JSON (null if it is none).
fn accepted(asked: String, status: u16, body: &[u8]) -> SandboxResult<Value> {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    if (200..300).contains(&status) {
        return Ok(value);
    }
    let why = value["message"].as_str().or(value["cause"].as_str());
    let text = String::from_utf8_lossy(body);
    Err(io(asked, format!("{status}: {}", why.unwrap_or(&text))))
}

/// Packs an unpacked image into a file without a name, and returns it with a hash of its content.
fn pack(folder: &Path) -> SandboxResult<(File, String)> {
    let failed = |e: std::io::Error| io("pack an image", e);
    let file = sinew_sandbox::archive::spool(&[]).map_err(failed)?;
    let mut file = root::archive_image(folder, BufWriter::new(file))?
        .into_inner()
        .map_err(|e| io("pack an image", e))?;
    file.rewind().map_err(failed)?;
    let mut hash = Sha256::new();
    let mut chunk = vec![0; MAX_CHUNK];
    loop {
        match file.read(&mut chunk).map_err(failed)? {
            0 => break,
            n => hash.update(&chunk[..n]),
        }
    }
    file.rewind().map_err(failed)?;
    Ok((file, digits(&hash.finalize())))
}

/// The first digits of a hash, which name an image.
fn digits(hash: &[u8]) -> String {
    hash.iter().take(8).map(|b| format!("{b:02x}")).collect()
}

/// Percent-encodes the bytes that are special in a path or query.
fn encode(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~/:".contains(&b);
    text.bytes()
        .map(|b| {
            if plain(b) {
                char::from(b).to_string()
            } else {
                format!("%{b:02X}")
            }
        })
        .collect()
}

/// Body of a request that creates a container.
///
/// The first process is the agent as root with [`AGENT_CAPABILITIES`], without a network, on a read-only
/// root (see [`above_layer`] for a writable one). Memory includes swap. Files in the work folder count as
/// memory.
fn creation(kind: EngineKind, image: &str, common: &Common, start: &StartSpec<'_>) -> Value {
    let limits = &start.spec.limits;
    let files = open_files(limits);
    let show = |source: &Path, inside: &Path| {
        let (source, inside) = (source.display(), inside.display());
        format!("{source}:{inside}:ro")
    };
    let above = start.way.map_or(0, |_| common.root.above);
    let binds = common.root.binds.iter().skip(above);
    let mut binds: Vec<String> = binds.map(|(s, i)| show(s, i)).collect();
    binds.push(show(&common.agent, Path::new(AGENT)));
    binds.push(show(&start.host, Path::new(HOST)));
    let owner = match kind {
        // It takes neither an owner nor a number of files, which count as memory then.
        EngineKind::Podman => "mode=1777".into(),
        _ => format!("nr_inodes={INODES},mode=700,uid={0},gid={0}", start.uid),
    };
    let tmpfs = format!("rw,exec,nosuid,nodev,size={},{owner}", limits.work_bytes);
    let mut host = json!({
        "NetworkMode": "none",
        "IpcMode": "none",
        "CgroupnsMode": "private",
        "ReadonlyRootfs": true,
        "CapDrop": ["ALL"],
        "CapAdd": AGENT_CAPABILITIES,
        "SecurityOpt": ["no-new-privileges"],
        "PidsLimit": limits.processes + 1,
        "Memory": limits.memory_bytes,
        "MemorySwap": limits.memory_bytes,
        "Ulimits": [
            { "Name": "nofile", "Soft": files, "Hard": files },
            { "Name": "core", "Soft": 0, "Hard": 0 },
        ],
        "Tmpfs": { "/work": tmpfs, "/tmp": tmpfs },
        "Binds": binds,
        "MaskedPaths": MASKED,
        "ReadonlyPaths": READ_ONLY,
        "LogConfig": { "Type": "none" },
        "AutoRemove": true,
    });
    if let (Some(way), Some(root)) = (start.way, &start.spec.writable_root) {
        above_layer(&mut host, way, root.bytes);
    }
    if kind == EngineKind::Podman {
        mend_podman(&mut host);
    }
    if let Some(cpus) = common.cpus {
        host["NanoCpus"] = json!((cpus * 1e9) as u64);
    }
    json!({
        "Image": image,
        "Entrypoint": [AGENT],
        "Cmd": ["connect", format!("{HOST}/s")],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "NetworkDisabled": true,
        "Env": [],
        "Labels": { LABEL: common.tag },
        "HostConfig": host,
    })
}

/// Makes the root of a container writable: its own folders are part of the engine's layer then.
fn above_layer(host: &mut Value, way: RootWay, bytes: u64) {
    host["ReadonlyRootfs"] = json!(false);
    host["Tmpfs"] = json!({});
    let capabilities = AGENT_CAPABILITIES.iter().chain(&FILE_CAPABILITIES);
    host["CapAdd"] = json!(capabilities.collect::<Vec<_>>());
    if way.mapped {
        host["UsernsMode"] = json!(format!("auto:size={USERS}"));
    }
    if way.sized {
        host["StorageOpt"] = json!({ "size": bytes.to_string() });
    }
}

/// Differences of Podman from Docker.
fn mend_podman(host: &mut Value) {
    // Its own default may be more than it has itself; the group bounds each container.
    let processes = json!({ "Name": "nproc", "Soft": ALL_PROCESSES, "Hard": ALL_PROCESSES });
    if let Some(limits) = host["Ulimits"].as_array_mut() {
        limits.push(processes);
    }
    // It reads no MaskedPaths; and it mounts two folders in memory on a read-only root, that everybody may
    // fill.
    let more = if host["ReadonlyRootfs"] == true {
        ":/var:/run"
    } else {
        ""
    };
    let masked = format!("mask={}{more}", MASKED.join(":"));
    if let Some(options) = host["SecurityOpt"].as_array_mut() {
        options.push(masked.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_change_the_path() {
        assert_eq!(encode("a/b:c"), "a/b:c");
        assert_eq!(encode("a?b #\n"), "a%3Fb%20%23%0A");
    }
}
