//! The provider: how sandboxes of other hosts are made.

use crate::client::api::{Api, too_long};
use crate::client::hosts::{Finder, Hosts, NoReport, Wanted, questions};
use crate::client::remote_sandbox::{RemoteHandle, RemoteSandbox, held, snapshot_of};
use sinew_http::{Method, Retry};
use sinew_sandbox::{
    Network, Places, Protection, Sandbox, SandboxError, SandboxFuture, SandboxProvider,
    SandboxSpec, Snapshot,
};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Time for which a server without room, or away, is asked again.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pauses between two attempts. Only the patience ends them.
const PAUSES: Retry = Retry::doubling(u32::MAX, Duration::from_millis(50), Duration::from_secs(2));
/// Hosts whose reasons are in one message.
const MAX_REASONS: usize = 4;
/// Maximum bytes of an archive that the server takes at once (docs/sandbox-http.md).
const MAX_UPLOAD: u64 = 64 << 20;

/// Servers and settings for remote sandboxes.
#[derive(Clone)]
pub struct RemoteConfig {
    /// Addresses of `sinew serve --sandbox-only`, such as `http://10.0.0.7:8081`.
    pub servers: Vec<String>,
    /// Token of an owner, the same one at all of them.
    pub token: String,
    /// Level of the sandboxes, by its name.
    pub level: &'static str,
    /// Name of one of the servers' images; `None`: the root that they have without one.
    pub image: Option<String>,
    /// Maximum number of sandboxes of this process at a time.
    pub max_live: usize,
    /// Gives the addresses of further servers, which come and go.
    pub finder: Option<Finder>,
}

impl std::fmt::Debug for RemoteConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteConfig")
            .field("servers", &self.servers)
            .field("level", &self.level)
            .field("image", &self.image)
            .field("max_live", &self.max_live)
            .finish_non_exhaustive()
    }
}

/// Sandboxes of other hosts.
#[derive(Debug)]
pub struct RemoteProvider {
    /// The servers.
    hosts: Arc<Hosts>,
    /// Name of the level.
    level: &'static str,
    /// Places of sandboxes that can be made.
    places: Places,
    /// Reason why the last sandbox could not be made.
    broken: Mutex<Option<String>>,
}

impl Drop for RemoteProvider {
    fn drop(&mut self) {
        self.hosts.end();
    }
}

impl RemoteProvider {
    /// Asks the servers what they enforce at the level, and again every few seconds from then on. This
    /// blocks for some seconds at most. Servers that do not answer are put aside and asked again.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] if an address is none, a server refuses the token or has no such level
    /// or image, or none answers.
    pub fn connect(config: RemoteConfig) -> Result<Self, SandboxError> {
        let RemoteConfig {
            servers,
            token,
            level,
            image,
            max_live,
            finder,
        } = config;
        let unavailable = |reason: String| SandboxError::Unavailable {
            level: level.into(),
            reason: format!("sandbox.server: {reason}"),
        };
        let wanted = Wanted {
            token,
            level,
            image,
        };
        let finds = finder.is_some();
        let hosts = Hosts::new(&servers, wanted, finder);
        let hosts = Arc::new(hosts.map_err(|e| unavailable(format!("{servers:?}: {e}")))?);
        let (told, asked) = sync_channel(1);
        let own = Arc::clone(&hosts);
        // A blocking client must not be used or dropped on a thread of a runtime.
        let watcher = std::thread::Builder::new().name("sandbox-hosts".into());
        let started = watcher.spawn(move || match questions() {
            Ok(client) => {
                // A provider that is gone has ended the hosts, too.
                let _ = told.send(Ok(own.ask(&client)));
                own.watch(&client);
            }
            Err(e) => drop(told.send(Err(e.to_string()))),
        });
        started.map_err(|e| unavailable(format!("no thread: {e}")))?;
        // From here on its drop ends the thread.
        let provider = Self {
            hosts,
            level,
            places: Places::new(max_live, PATIENCE),
            broken: Mutex::new(None),
        };
        let told = asked.recv();
        let told = told.unwrap_or_else(|_| Err("the thread that asks the servers ended".into()));
        let refused = told.map_err(unavailable)?;
        // Servers of the registry may come, go and be wrong: none of them refuses the run.
        let given = |url: &str| servers.iter().any(|s| s.trim_end_matches('/') == url);
        let lacking = !finds && provider.hosts.open() == 0;
        let mut named = refused.iter().filter(|(url, _)| given(url));
        let wrong = named
            .clone()
            .find(|(_, why)| matches!(why, NoReport::Wrong(_)));
        match wrong.or_else(|| named.next().filter(|_| lacking)) {
            Some((url, why)) => Err(unavailable(format!("{url:?}: {}", why.text()))),
            None => Ok(provider),
        }
    }

    /// Makes a sandbox, when there is a place.
    async fn make(
        &self,
        spec: &SandboxSpec,
        snapshot: Option<&RemoteHandle>,
    ) -> Result<Box<dyn Sandbox>, SandboxError> {
        spec.refuse_writable_root("of a sandbox server")?;
        if spec.network != Network::None {
            return Err(SandboxError::Unsupported {
                operation: "give a sandbox of another host a way to this one's network",
            });
        }
        let place = self.places.take().await?;
        let made = match snapshot {
            None => self.make_somewhere(spec).await,
            Some(snapshot) => self.make_from(spec, snapshot).await,
        };
        let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        *broken = made.as_ref().err().map(ToString::to_string);
        let (api, id) = made?;
        Ok(Box::new(RemoteSandbox::new(&api, self.level, &id, place)))
    }

    /// Makes a sandbox on the host that is chosen. One without room, or that does not answer, is left for
    /// another one; where there is none, all are asked again.
    async fn make_somewhere(&self, spec: &SandboxSpec) -> Result<(Api, String), SandboxError> {
        let (end, mut tries) = (Instant::now() + PATIENCE, 0);
        let mut last = None;
        loop {
            let mut pause_is_due = true;
            if let Some((at, api)) = self.hosts.choose() {
                match api.create(spec, None).await {
                    Ok(id) => return Ok((api, id)),
                    Err(e @ SandboxError::NoRoom { .. }) => {
                        self.hosts.not_made(at, true);
                        last = Some(e);
                    }
                    Err(e @ SandboxError::Died(_)) => {
                        self.hosts.not_made(at, false);
                        last = Some(e);
                    }
                    Err(e @ SandboxError::HostLost { .. }) => {
                        self.hosts.not_made(at, false);
                        // This one was put aside by that: another one is tried at once.
                        pause_is_due = self.hosts.open() == 0;
                        last = Some(e);
                    }
                    Err(e) => {
                        self.hosts.not_made(at, false);
                        return Err(e);
                    }
                }
            }
            tries += 1;
            let pause = PAUSES.pause(tries, None).unwrap_or_default();
            if Instant::now() + pause > end {
                return Err(last.unwrap_or_else(|| self.nobody()));
            }
            if pause_is_due {
                tokio::time::sleep(pause).await;
            }
        }
    }

    /// Makes a sandbox on the host of its snapshot, which is asked again for room only: the snapshot may have
    /// gone with it.
    async fn make_from(
        &self,
        spec: &SandboxSpec,
        snapshot: &RemoteHandle,
    ) -> Result<(Api, String), SandboxError> {
        let (end, mut tries) = (Instant::now() + PATIENCE, 0);
        // The image is the one of this provider: a snapshot of another root is refused there.
        let url = snapshot.api().url();
        let api = self.hosts.at(url).ok_or_else(|| SandboxError::Request {
            field: "snapshot",
            value: format!("of {url}"),
            allowed: "a snapshot of one of the servers of `sandbox.server`".into(),
        })?;
        loop {
            let made = api.create(spec, Some(snapshot.id())).await;
            let Err(SandboxError::NoRoom { .. }) = made else {
                return made.map(|id| (api.clone(), id));
            };
            tries += 1;
            let pause = PAUSES.pause(tries, None).unwrap_or_default();
            if Instant::now() + pause > end {
                return made.map(|id| (api.clone(), id));
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// The error while no host answers and fits.
    fn nobody(&self) -> SandboxError {
        let mut reason = "no sandbox server answers and has room".to_owned();
        for refusal in self.hosts.refusals().iter().take(MAX_REASONS) {
            reason.push_str("; ");
            reason.push_str(refusal);
        }
        SandboxError::NoRoom {
            level: self.level.to_owned(),
            reason,
        }
    }
}

impl SandboxProvider for RemoteProvider {
    fn level(&self) -> &'static str {
        self.level
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(self.make(spec, None))
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        Arc::new(self.hosts.protections())
    }

    fn health(&self) -> Result<(), SandboxError> {
        let broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        let unavailable = |reason| SandboxError::Unavailable {
            level: self.level().to_owned(),
            reason,
        };
        broken.clone().map(unavailable).map_or(Ok(()), Err)
    }

    fn degradations(&self) -> Vec<String> {
        let refusals = self.hosts.refusals().into_iter();
        let named = refusals.map(|why| format!("a sandbox server is left out: {why}"));
        named.collect()
    }

    fn fork<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        snapshot: &'a Snapshot,
    ) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move { self.make(spec, Some(held(snapshot)?)).await })
    }

    fn export_file<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        max_bytes: u64,
    ) -> SandboxFuture<'a, File> {
        Box::pin(async move {
            let snapshot = held(snapshot)?;
            let (api, path) = (snapshot.api(), format!("snapshots/{}", snapshot.id()));
            let mut answer = api.send(api.request(Method::GET, &path)).await?;
            let failed = |e| SandboxError::io("export", e);
            let mut file = tempfile::tempfile().map_err(failed)?;
            let mut bytes = 0;
            loop {
                let chunk = api.unless_lost(answer.chunk()).await?;
                let Some(chunk) = chunk.map_err(|e| api.broken(e.into()))? else {
                    break;
                };
                bytes += chunk.len() as u64;
                if bytes > max_bytes {
                    return Err(too_long(max_bytes));
                }
                file.write_all(&chunk).map_err(failed)?;
            }
            file.rewind().map_err(failed)?;
            Ok(file)
        })
    }

    fn import_file(&self, archive: File, max_bytes: u64) -> SandboxFuture<'_, Snapshot> {
        Box::pin(async move {
            let max_bytes = max_bytes.min(MAX_UPLOAD);
            let mut bytes = Vec::new();
            archive
                .take(max_bytes.saturating_add(1))
                .read_to_end(&mut bytes)
                .map_err(|e| SandboxError::io("import", e))?;
            if bytes.len() as u64 > max_bytes {
                return Err(too_long(max_bytes));
            }
            let (at, api) = self.hosts.choose().ok_or_else(|| self.nobody())?;
            // A snapshot takes no place of a sandbox.
            self.hosts.not_made(at, false);
            let request = api.request(Method::POST, &api.import_path()).body(bytes);
            let id = api.text(&api.value(request).await?, "snapshot")?;
            Ok(snapshot_of(&api, self.level, &id))
        })
    }
}
