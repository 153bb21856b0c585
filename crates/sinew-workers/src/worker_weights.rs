//! The weights with which a worker's episodes are sampled.

use crate::follow::Loaded;
use crate::ticket::Ticket;
use sinew_engines::RemoteEngine;
use sinew_engines::route::EngineView;
use sinew_types::Engine;
use std::sync::Arc;

/// Weights of the engine that a worker samples with.
#[derive(Clone, Debug)]
pub enum WorkerWeights {
    /// An engine of this process, or at a service, that follows the owner.
    Followed(Loaded),
    /// Servers outside, which get their weights from the owner and report the versions.
    Servers,
    /// Engines of the run's registry: those of them that serve have weights that the owner announced.
    Found(Arc<RemoteEngine>),
}

/// Newest version of the engines that may be asked now.
fn served(engines: &[EngineView]) -> Option<u64> {
    let serving = engines.iter().filter(|e| e.idle_because.is_none());
    serving.filter_map(|e| e.version).map(|v| v.0).max()
}

impl WorkerWeights {
    /// Whether `engine`, whose weights these are, may run the episode of a ticket now.
    pub(crate) fn allow(&self, engine: &dyn Engine, ticket: &Ticket) -> bool {
        match self {
            Self::Followed(loaded) => loaded.get().is_some_and(|id| ticket.allows(&id)),
            Self::Servers => engine.status().version.0 >= ticket.version,
            Self::Found(found) => served(&found.engines()) >= Some(ticket.version),
        }
    }

    /// The weights that an engine of this process follows.
    pub(crate) fn followed(&self) -> Option<&Loaded> {
        match self {
            Self::Followed(loaded) => Some(loaded),
            Self::Servers | Self::Found(_) => None,
        }
    }

    /// Whether tickets may be leased: without an engine they are better left to other workers.
    pub(crate) fn are_there(&self) -> bool {
        match self {
            Self::Followed(_) | Self::Servers => true,
            Self::Found(found) => served(&found.engines()).is_some(),
        }
    }

    /// The version that samples now.
    pub(crate) fn version(&self, engine: &dyn Engine) -> Option<u64> {
        match self {
            Self::Followed(loaded) => loaded.get().map(|id| id.version.0),
            Self::Servers => Some(engine.status().version.0),
            Self::Found(found) => served(&found.engines()),
        }
    }

    /// The hash of the manifest of these weights, where they are this process's own.
    pub(crate) fn checksum(&self) -> Option<String> {
        match self {
            Self::Followed(loaded) => loaded.mark().map(|(_, manifest)| manifest),
            Self::Servers | Self::Found(_) => None,
        }
    }

    /// Reason why the newest weights are not in use, if that is so and this process's own affair.
    pub(crate) fn cause(&self) -> Option<String> {
        match self {
            Self::Followed(loaded) => loaded.cause(),
            Self::Servers | Self::Found(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::PolicyVersion;

    #[test]
    fn only_engines_that_may_be_asked_count() {
        let view = |version: Option<u64>, idle: Option<&str>| EngineView {
            name: "seat 0".into(),
            attempts: 0,
            version: version.map(PolicyVersion),
            kv_tokens_free: None,
            kv_tokens_total: None,
            idle_because: idle.map(str::to_owned),
        };
        assert_eq!(served(&[]), None);
        let loading = view(Some(9), Some("it has loading-v9"));
        assert_eq!(served(std::slice::from_ref(&loading)), None);
        assert_eq!(
            served(&[view(Some(3), None), loading, view(None, Some("empty"))]),
            Some(3)
        );
    }
}
