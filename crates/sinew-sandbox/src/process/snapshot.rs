//! Snapshots of the process level: numbers under which the spawner keeps them.

use super::client::Client;
use crate::port::{SandboxError, Snapshot};
use sinew_jail::protocol::Request;
use std::os::fd::RawFd;
use std::sync::Arc;

/// A snapshot, or an export, that the spawner keeps under a number until this is dropped.
#[derive(Debug)]
pub(super) struct SpawnerSnapshot {
    client: Arc<Client>,
    id: u64,
}

impl SpawnerSnapshot {
    /// A number for what is about to be made.
    pub(super) fn new(client: &Arc<Client>) -> Self {
        Self {
            client: Arc::clone(client),
            id: client.number(),
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }
}

impl Drop for SpawnerSnapshot {
    fn drop(&mut self) {
        self.client
            .tell(Request::DropSnapshot { snapshot: self.id });
    }
}

/// A snapshot that is about to be made under a separate number. A caller that stops waiting drops it.
pub(super) async fn kept(
    client: &Arc<Client>,
    request: impl FnOnce(u64) -> Request,
    files: &[RawFd],
) -> Result<Snapshot, SandboxError> {
    let kept = SpawnerSnapshot::new(client);
    let id = kept.id;
    let answer = client.ask(request(id), files).await?;
    Ok(Snapshot {
        level: "process",
        id,
        handle: Arc::new(kept),
        stores: answer
            .held
            .into_iter()
            .map(|(store, bytes)| (client.unique(store), bytes))
            .collect(),
    })
}

/// The number of a snapshot, if this spawner keeps it.
///
/// # Errors
/// [`SandboxError::Died`] if the spawner that kept it is gone, [`SandboxError::Request`] if it is of
/// another provider.
pub(super) fn own(snapshot: &Snapshot, client: &Arc<Client>) -> Result<u64, SandboxError> {
    match snapshot.handle.downcast_ref::<SpawnerSnapshot>() {
        Some(kept) if Arc::ptr_eq(&kept.client, client) => Ok(kept.id),
        Some(kept) if kept.client.is_dead() => Err(SandboxError::Died(
            "the process that kept the snapshot is gone".into(),
        )),
        _ => Err(SandboxError::Request {
            field: "snapshot",
            value: format!("{} of level {}", snapshot.id, snapshot.level),
            allowed: "one that this provider made; others are exported and imported".into(),
        }),
    }
}
