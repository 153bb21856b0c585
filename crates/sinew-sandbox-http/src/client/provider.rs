//! The provider: how sandboxes of another host are made.

use crate::client::api::{Api, too_long};
use crate::client::remote_sandbox::{RemoteSandbox, snapshot_id, snapshot_of};
use serde::Deserialize;
use sinew_http::{ClientOptions, Method, Retry, blocking, cause};
use sinew_sandbox::{
    Network, Protection, Sandbox, SandboxError, SandboxFuture, SandboxProvider, SandboxSpec,
    Snapshot,
};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Time for which a server without room, or away, is asked again.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pauses between two attempts. Only the patience ends them.
const PAUSES: Retry = Retry::doubling(u32::MAX, Duration::from_millis(50), Duration::from_secs(2));
/// Maximum bytes of an archive that the server takes at once (docs/sandbox-http.md).
const MAX_UPLOAD: u64 = 64 << 20;

/// Server and settings for remote sandboxes.
#[derive(Clone, Debug)]
pub struct RemoteConfig {
    /// Address of `sinew serve --sandbox-only`, such as `http://10.0.0.7:8081`.
    pub url: String,
    /// Token of an owner there.
    pub token: String,
    /// Level of the sandboxes, by its name.
    pub level: &'static str,
    /// Name of one of the server's images; `None`: the root that it has without one.
    pub image: Option<String>,
    /// Maximum number of sandboxes of this process at a time.
    pub max_live: usize,
}

/// Sandboxes of another host.
#[derive(Debug)]
pub struct RemoteProvider {
    /// The server.
    api: Api,
    /// Name of the level.
    level: &'static str,
    /// Protections that the server reported when it was connected.
    protections: Arc<Vec<Protection>>,
    /// Places of sandboxes that can be made.
    places: Arc<Semaphore>,
    /// All places.
    max_live: usize,
    /// Reason why the last sandbox could not be made.
    broken: Mutex<Option<String>>,
}

/// Answer to `GET /v1/levels`.
#[derive(Deserialize)]
struct Levels {
    levels: Vec<LevelOffer>,
    /// Names of images.
    #[serde(default)]
    images: Vec<String>,
}

impl Levels {
    /// Returns the server's offer for a level.
    ///
    /// # Errors
    /// Fails with the server's levels or images, if it lacks this one.
    fn offer(self, level: &str, image: Option<&str>) -> Result<LevelOffer, String> {
        if let Some(name) = image
            && !self.images.iter().any(|own| own == name)
        {
            let allowed = if self.images.is_empty() {
                "nothing, it offers none (--named-image)".into()
            } else {
                self.images.join(", ")
            };
            return Err(format!(
                "it has no image {name:?}; allowed for sandbox.image: {allowed}"
            ));
        }
        let names: Vec<&str> = self.levels.iter().map(|o| o.level.as_str()).collect();
        let names = names.join(", ");
        let offer = self.levels.into_iter().find(|o| o.level == level);
        offer
            .ok_or_else(|| format!("it has no level {level:?}; allowed for sandbox.level: {names}"))
    }
}

/// A level of the server.
#[derive(Deserialize)]
struct LevelOffer {
    /// Name of the level.
    level: String,
    /// Protections in force at this level.
    protections: Vec<Protection>,
}

impl RemoteProvider {
    /// Asks the server what it enforces at the level. This blocks for some seconds at most.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] if the address is none, the server does not answer or refuses the token,
    /// or it has no such level or image.
    pub fn connect(config: RemoteConfig) -> Result<Self, SandboxError> {
        let level = config.level;
        let unavailable = |reason: String| SandboxError::Unavailable {
            level: level.into(),
            reason: format!("sandbox.server = {:?}: {reason}", config.url),
        };
        let image = config.image.clone();
        let api = Api::new(&config.url, &config.token, level, image);
        let api = api.map_err(|e| unavailable(e.to_string()))?;
        let asked = (
            config.url.trim_end_matches('/').to_owned(),
            config.token.clone(),
        );
        // A blocking client must not be used on a thread of a runtime.
        let answer = std::thread::spawn(move || levels(&asked.0, &asked.1)).join();
        let answer = answer.unwrap_or_else(|_| Err("the request failed".into()));
        let answer = answer.map_err(unavailable)?;
        let offer = answer.offer(level, config.image.as_deref());
        let offer = offer.map_err(unavailable)?;
        Ok(Self {
            api,
            level,
            protections: Arc::new(offer.protections),
            places: Arc::new(Semaphore::new(config.max_live)),
            max_live: config.max_live,
            broken: Mutex::new(None),
        })
    }

    /// A place for one more sandbox, when there is one.
    async fn place(&self) -> Result<OwnedSemaphorePermit, SandboxError> {
        let place = Arc::clone(&self.places).acquire_owned();
        let place = tokio::time::timeout(PATIENCE, place).await;
        place.ok().and_then(Result::ok).ok_or(SandboxError::Busy {
            waited_s: PATIENCE.as_secs(),
            live: self.max_live,
            limit: self.max_live,
        })
    }

    /// Makes a sandbox; a server without room or away is asked again. A snapshot may have gone with the
    /// server, so its forks are tried again only for room.
    async fn make(
        &self,
        spec: &SandboxSpec,
        snapshot: Option<&str>,
    ) -> Result<Box<dyn Sandbox>, SandboxError> {
        spec.refuse_writable_root("of a sandbox server")?;
        if spec.network != Network::None {
            return Err(SandboxError::Unsupported {
                operation: "give a sandbox of another host a way to this one's network",
            });
        }
        let place = self.place().await?;
        let (end, mut tries) = (Instant::now() + PATIENCE, 0);
        let made = loop {
            let made = self.api.create(spec, snapshot).await;
            let again = match &made {
                Err(SandboxError::Died(_)) => snapshot.is_none(),
                Err(SandboxError::NoRoom { .. }) => true,
                _ => false,
            };
            tries += 1;
            let pause = PAUSES.pause(tries, None).filter(|_| again);
            match pause.filter(|pause| Instant::now() + *pause <= end) {
                Some(pause) => tokio::time::sleep(pause).await,
                None => break made,
            }
        };
        let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        *broken = made.as_ref().err().map(ToString::to_string);
        let id = made?;
        Ok(Box::new(RemoteSandbox::new(
            &self.api, self.level, &id, place,
        )))
    }
}

/// Reads the levels that the server offers. Blocks.
///
/// # Errors
/// Fails if it does not answer, refuses the token or is not a sandbox server.
fn levels(url: &str, token: &str) -> Result<Levels, String> {
    let client = blocking::Client::new(ClientOptions {
        stall: Some(Duration::from_secs(10)),
        redirects: 10,
        proxy: true,
        ..ClientOptions::default()
    });
    let client = client.map_err(|e| e.to_string())?;
    let hint = "\n  hint: is `sinew serve --sandbox-only` running there?";
    let request = client.request(Method::GET, &format!("{url}/v1/levels"));
    let answer = client.ask(request.bearer_auth(token));
    let answer = answer.map_err(|e| format!("{e}{hint}"))?;
    let status = answer.status;
    if status.as_u16() == 401 {
        return Err(
            "it refuses the token; set the variable that sandbox.server_key_env names".into(),
        );
    }
    serde_json::from_slice(&answer.body)
        .map_err(|_| format!("it answered {status}, but not as a sandbox server{hint}"))
}

/// An error of a file of this host.
fn io(operation: &str, e: &std::io::Error) -> SandboxError {
    SandboxError::Io {
        operation: operation.into(),
        message: e.to_string(),
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
        Arc::clone(&self.protections)
    }

    fn health(&self) -> Result<(), SandboxError> {
        let broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        let unavailable = |reason| SandboxError::Unavailable {
            level: self.level().to_owned(),
            reason,
        };
        broken.clone().map(unavailable).map_or(Ok(()), Err)
    }

    fn fork<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        snapshot: &'a Snapshot,
    ) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move { self.make(spec, Some(snapshot_id(snapshot)?)).await })
    }

    fn export_file<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        max_bytes: u64,
    ) -> SandboxFuture<'a, File> {
        Box::pin(async move {
            let path = format!("snapshots/{}", snapshot_id(snapshot)?);
            let mut answer = self.api.send(self.api.request(Method::GET, &path)).await?;
            let failed = |e| io("export", &e);
            let mut file = tempfile::tempfile().map_err(failed)?;
            let mut bytes = 0;
            while let Some(chunk) = answer
                .chunk()
                .await
                .map_err(|e| self.api.lost(&cause(&e)))?
            {
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
                .map_err(|e| io("import", &e))?;
            if bytes.len() as u64 > max_bytes {
                return Err(too_long(max_bytes));
            }
            let path = self.api.import_path();
            let request = self.api.request(Method::POST, &path).body(bytes);
            let id = self.api.text(&self.api.value(request).await?, "snapshot")?;
            Ok(snapshot_of(&self.api, self.level, &id))
        })
    }
}
