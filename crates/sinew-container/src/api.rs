//! Docker's API over its Unix socket; Podman answers the same. Images are never pulled.

use crate::engine::{
    AGENT_CAPABILITIES, Birth, Common, EngineKind, INODES, MASKED, READ_ONLY, open_files,
    unavailable,
};
use crate::root::{AGENT, HOST};
use crate::state::{alive, io};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use sinew_sandbox::SandboxError;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;

/// Version of the API: Docker 20.10 and Podman 4 speak it.
const VERSION: &str = "v1.41";
/// Largest answer.
const MAX_ANSWER: usize = 4 << 20;
/// How long one request may take; importing an image takes longest.
const PATIENCE: Duration = Duration::from_secs(120);
/// Label of every container, with the tag of its run.
const LABEL: &str = "sinew.run";

/// Processes of all of Podman's containers together, which have the same user.
const ALL_PROCESSES: u64 = 16_384;

/// A daemon that answers.
#[derive(Debug)]
pub(crate) struct Api {
    kind: EngineKind,
    socket: PathBuf,
    /// The image of all containers, once it is known.
    image: String,
}

type Made<T> = Result<T, SandboxError>;

impl Api {
    pub(crate) async fn new(kind: EngineKind, socket: &Path) -> Made<Self> {
        let api = Self {
            kind,
            socket: socket.into(),
            image: String::new(),
        };
        api.ask(Method::GET, "/version", Bytes::new()).await?;
        Ok(api)
    }

    pub(crate) fn kind(&self) -> EngineKind {
        self.kind
    }

    /// Status and body of the answer to one request.
    async fn call(&self, method: Method, path: &str, body: Bytes) -> Made<(u16, Bytes)> {
        let failed = |e: &dyn std::fmt::Display| io(self.socket.display().to_string(), e);
        let exchange = async {
            let stream = UnixStream::connect(&self.socket)
                .await
                .map_err(|e| failed(&e))?;
            let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
            let (mut sender, connection) = handshake.await.map_err(|e| failed(&e))?;
            let driver = tokio::spawn(connection);
            let json = body.first() == Some(&b'{');
            let kind = if json {
                "application/json"
            } else {
                "application/x-tar"
            };
            let request = Request::builder()
                .method(method)
                .uri(format!("/{VERSION}{path}"))
                .header("host", "localhost")
                .header("content-type", kind)
                .body(Full::new(body))
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

    async fn ask(&self, method: Method, path: &str, body: Bytes) -> Made<Value> {
        let asked = format!("{} {method} {path}", self.kind.name());
        let (status, body) = self.call(method, path, body).await?;
        let value: Value = serde_json::from_slice(&body).unwrap_or_default();
        if (200..300).contains(&status) {
            return Ok(value);
        }
        let why = value["message"].as_str().or(value["cause"].as_str());
        let text = String::from_utf8_lossy(&body);
        Err(io(asked, format!("{status}: {}", why.unwrap_or(&text))))
    }

    /// Uses an image that the daemon has under this name.
    pub(crate) async fn use_image(&mut self, name: &str) -> Made<()> {
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

    /// Makes an image from the archive of a root, unless the daemon has it already.
    pub(crate) async fn import(&mut self, archive: Vec<u8>) -> Made<()> {
        let digest = {
            use sha2::Digest;
            let sum = sha2::Sha256::digest(&archive);
            sum.iter()
                .take(8)
                .map(|b| format!("{b:02x}"))
                .collect::<String>()
        };
        // Podman takes no tag here.
        let name = format!("sinew/root-{digest}");
        if self.use_image(&name).await.is_ok() {
            return Ok(());
        }
        let path = format!("/images/create?fromSrc=-&repo={name}");
        self.ask(Method::POST, &path, archive.into()).await?;
        self.use_image(&name).await
    }

    /// Starts a container; its number.
    pub(crate) async fn start(&self, common: &Common, birth: &Birth<'_>) -> Made<String> {
        let body = creation(self.kind, &self.image, common, birth).to_string();
        let path = format!("/containers/create?name={}", birth.name);
        let made = self.ask(Method::POST, &path, body.into()).await?;
        let id = made["Id"].as_str().unwrap_or(&birth.name).to_owned();
        let path = format!("/containers/{id}/start");
        if let Err(e) = self.ask(Method::POST, &path, Bytes::new()).await {
            // The failure is what the caller must know.
            let _ = self.remove(&id).await;
            return Err(e);
        }
        Ok(id)
    }

    /// Removes a container, and waits until nothing knows it any more.
    pub(crate) async fn remove(&self, id: &str) -> Made<()> {
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

    /// Removes containers of runs whose processes are gone.
    pub(crate) async fn sweep(&self) -> Made<()> {
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
/// Bytes that mean something in a path, in hexadecimal.
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

fn creation(kind: EngineKind, image: &str, common: &Common, birth: &Birth<'_>) -> Value {
    let limits = &birth.spec.limits;
    let files = open_files(limits);
    let show = |source: &Path, inside: &Path| {
        let (source, inside) = (source.display(), inside.display());
        format!("{source}:{inside}:ro")
    };
    let mut binds: Vec<String> = common.root.binds.iter().map(|(s, i)| show(s, i)).collect();
    binds.push(show(&common.agent, Path::new(AGENT)));
    binds.push(show(&birth.host, Path::new(HOST)));
    let owner = match kind {
        // It takes neither an owner nor a number of files, which count as memory then.
        EngineKind::Podman => "mode=1777".into(),
        _ => format!("nr_inodes={INODES},mode=700,uid={0},gid={0}", birth.uid),
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

/// What Podman takes in other words, or makes of its own accord.
fn mend_podman(host: &mut Value) {
    // Its own default may be more than it has itself; the group bounds each container.
    let processes = json!({ "Name": "nproc", "Soft": ALL_PROCESSES, "Hard": ALL_PROCESSES });
    if let Some(limits) = host["Ulimits"].as_array_mut() {
        limits.push(processes);
    }
    // It reads no MaskedPaths; and it mounts two folders in memory that everybody may fill.
    let masked = format!("mask={}:/var:/run", MASKED.join(":"));
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
