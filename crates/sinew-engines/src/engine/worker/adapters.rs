//! Adapters that requests name: loaded on all engines, given again to one that was started anew, removed
//! where no attempt asks for them any more.

use super::{Job, Reply, Report, Worker, answer};
use crate::backend::{NamedAdapter, Probe, ServedWeights};
use crate::error::AttemptError;
use crate::route::RoutedAdapter;
use futures::future::join_all;
use sinew_types::{AdapterName, EngineError};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A load of an adapter on all engines.
pub(super) struct AdapterJob {
    name: AdapterName,
    adapter: NamedAdapter,
    pub(super) reply: Reply,
}

/// The adapters that requests name, and the state of each engine.
pub(super) struct NamedAdapters {
    /// Those that requests can name, for engines that are started anew.
    loaded: BTreeMap<AdapterName, NamedAdapter>,
    /// Names on each engine that are to be removed.
    unwanted: Vec<BTreeSet<String>>,
    /// Engines that are being given what they miss.
    mending: Vec<bool>,
    /// Number of the last change; what a probe that began before it shows of adapters is outdated.
    changes: Arc<AtomicU64>,
}

impl NamedAdapters {
    pub(super) fn new(engines: usize) -> Self {
        Self {
            loaded: BTreeMap::new(),
            unwanted: vec![BTreeSet::new(); engines],
            mending: vec![false; engines],
            changes: Arc::default(),
        }
    }

    /// The number of the last change, for a probe that begins later.
    pub(super) fn changes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.changes)
    }

    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// A probe of an engine without what it shows of adapters, if that is outdated.
    pub(super) fn current(
        &self,
        engine: usize,
        since: u64,
        result: Result<Probe, AttemptError>,
    ) -> Result<Probe, AttemptError> {
        let outdated = since != self.changes.load(Ordering::Relaxed) || self.mending[engine];
        result.map(|probe| Probe {
            adapters: probe.adapters.filter(|_| !outdated),
            ..probe
        })
    }

    /// Whether requests can name the adapter of this name on servers.
    fn is_wanted(&self, server_name: &str) -> bool {
        let mut loaded = self.loaded.values();
        loaded.any(|adapter| adapter.server_name == server_name)
    }
}

impl Worker {
    /// Loads an adapter on all engines at once; attempts run meanwhile.
    pub(super) fn load_adapter(&mut self, name: AdapterName, adapter: NamedAdapter, reply: Reply) {
        if let Err(error) = self.router.check_adapter(&name) {
            return answer(&reply, Err(error));
        }
        self.named.changed();
        let (backends, loaded) = (self.backends.clone(), adapter.clone());
        self.job = Some(Job::Adapter(AdapterJob {
            name,
            adapter,
            reply,
        }));
        self.tasks.spawn(async move {
            let each = backends.iter().map(|b| b.load_adapter(&loaded));
            let results = join_all(each).await.into_iter().enumerate().collect();
            Report::AdapterLoaded { results }
        });
    }

    /// Ends a load: it has succeeded if at least one engine has the adapter. The others are given it after a
    /// later probe.
    pub(super) fn adapter_loaded(
        &mut self,
        now: f64,
        results: &[(usize, Result<(), AttemptError>)],
    ) {
        let Some(Job::Adapter(job)) = self.job.take_if(|job| matches!(job, Job::Adapter(_))) else {
            return;
        };
        self.named.changed();
        let failed = self.failures(results);
        let (name, adapter) = (job.name, job.adapter);
        let routed = RoutedAdapter {
            id: adapter.id,
            server_name: adapter.server_name.clone(),
        };
        let loaded = self.router.adapter_loaded(now, &name, routed, results);
        let result = if loaded {
            if !failed.is_empty() {
                tracing::warn!(%name, failed, "not every engine has loaded the adapter");
            }
            let again = NamedAdapter {
                source: None,
                ..adapter
            };
            let before = self.named.loaded.insert(name, again);
            self.discard(before);
            Ok(())
        } else {
            Err(EngineError::Weights(format!("adapter {name}: {failed}")))
        };
        self.show_adapters();
        answer(&job.reply, result);
        self.next_control();
    }

    /// Drops an adapter: its requests fail at once, servers remove it when they can.
    pub(super) fn drop_adapter(&mut self, name: &AdapterName, reply: &Reply) {
        self.named.changed();
        self.router.adapter_dropped(self.now(), name);
        let before = self.named.loaded.remove(name);
        self.discard(before);
        self.show_adapters();
        answer(reply, Ok(()));
    }

    /// Has every engine remove an adapter that requests cannot name any more.
    fn discard(&mut self, adapter: Option<NamedAdapter>) {
        let Some(adapter) = adapter else { return };
        // Its attempts end first.
        self.carry_out();
        for engine in 0..self.backends.len() {
            let unwanted = &mut self.named.unwanted[engine];
            unwanted.insert(adapter.server_name.clone());
            self.remove_adapters(engine);
        }
    }

    /// Shows callers which adapters requests can name.
    fn show_adapters(&self) {
        let names = self.named.loaded.keys().cloned().collect();
        self.shared.publish(|inbox| inbox.adapters = names);
    }

    /// Asks an engine to remove the adapters that no request can name any more.
    pub(super) fn remove_adapters(&mut self, engine: usize) {
        for server_name in std::mem::take(&mut self.named.unwanted[engine]) {
            let backend = Arc::clone(&self.backends[engine]);
            self.tasks.spawn(async move {
                let result = backend.unload(&server_name).await;
                Report::AdapterRemoved {
                    engine,
                    server_name,
                    result,
                }
            });
        }
    }

    /// An adapter that could not be removed is tried again after the next probe.
    pub(super) fn adapter_removed(
        &mut self,
        engine: usize,
        server_name: String,
        result: Result<(), AttemptError>,
    ) {
        if let Err(error) = result {
            let name = self.backends[engine].name();
            tracing::debug!(engine = name, server_name, %error, "adapter not removed");
            self.named.unwanted[engine].insert(server_name);
        }
    }

    /// Gives an engine that has the right weights the adapters that it misses, such as one that was started
    /// anew.
    pub(super) fn mend(&mut self, engine: usize, probe: &Probe) {
        let Some(found) = &probe.adapters else { return };
        // A server may miss the adapter of the run, too, where weights are adapters.
        let ready = match self.adapters {
            Some(_) => !matches!(probe.weights, ServedWeights::Foreign(_)),
            None => probe.weights == ServedWeights::Version(self.router.weights()),
        };
        let busy = self.mending_or_loading(engine);
        if !ready || probe.sleeping || busy {
            return;
        }
        let loaded = self.named.loaded.values();
        let missing = loaded.filter(|adapter| !found.contains(&adapter.server_name));
        let missing: Vec<NamedAdapter> = missing.cloned().collect();
        if missing.is_empty() {
            return;
        }
        self.named.mending[engine] = true;
        let backend = Arc::clone(&self.backends[engine]);
        self.tasks.spawn(async move {
            let mut results = Vec::with_capacity(missing.len());
            for adapter in missing {
                let result = backend.load_adapter(&adapter).await;
                results.push((adapter.server_name, result));
            }
            Report::AdaptersMended { engine, results }
        });
    }

    fn mending_or_loading(&self, engine: usize) -> bool {
        let loading = matches!(self.job, Some(Job::Adapter(_)));
        loading || self.repairing[engine] || self.named.mending[engine]
    }

    /// An engine was given what it missed. One that did not take it is tried again after the next probe.
    pub(super) fn mended(
        &mut self,
        engine: usize,
        results: Vec<(String, Result<(), AttemptError>)>,
    ) {
        self.named.mending[engine] = false;
        self.named.changed();
        for (server_name, result) in results {
            let name = self.backends[engine].name();
            match result {
                Err(error) => {
                    tracing::warn!(engine = name, server_name, %error, "adapter not given again");
                }
                // It was replaced or dropped meanwhile.
                Ok(()) if !self.named.is_wanted(&server_name) => {
                    self.named.unwanted[engine].insert(server_name);
                }
                Ok(()) => self.router.adapter_repaired(engine, &server_name),
            }
        }
    }
}
