//! Adapters that requests name.
//!
//! A request runs on engines that have its adapter. A name that is loaded again stands for another adapter on
//! servers: attempts with the old one end as in a pause, and their requests continue with the new one.

use super::super::state::SampledBy;
use super::{EngineState, RoutedAdapter, Router};
use crate::error::AttemptError;
use crate::route::adapter_name;
use sinew_types::{AdapterName, EngineError, RequestId};
use std::collections::BTreeSet;

impl Router {
    /// The adapter that a request names; `None` if it names none.
    pub(super) fn adapter_of(
        &self,
        name: Option<&AdapterName>,
    ) -> Result<Option<&RoutedAdapter>, EngineError> {
        let Some(name) = name else {
            return Ok(None);
        };
        let adapter = self.adapters.get(name);
        let unknown = || EngineError::UnknownAdapter { name: name.clone() };
        adapter.map(Some).ok_or_else(unknown)
    }

    /// Whether an engine has the adapter of this name; `None`: no adapter is needed.
    pub(super) fn has_adapter(&self, engine: &EngineState, name: Option<&AdapterName>) -> bool {
        name.is_none_or(|name| {
            let adapter = self.adapters.get(name);
            adapter.is_some_and(|adapter| engine.adapters.contains(&adapter.server_name))
        })
    }

    /// The weights of an attempt of a request that names this adapter, or none.
    pub(super) fn sampled_by(&self, name: Option<&AdapterName>) -> SampledBy {
        let of = self.config.adapters.as_deref();
        match name.and_then(|name| self.adapters.get(name)) {
            Some(adapter) => SampledBy {
                weights: adapter.id,
                adapter: Some(adapter.server_name.clone()),
                // The server's own weights are those that it was started with where weights are adapters.
                base: of.is_none().then_some(self.weights),
            },
            None => SampledBy {
                weights: self.weights,
                adapter: of.map(|of| adapter_name(of, self.weights)),
                base: None,
            },
        }
    }

    /// Checks that an adapter of this name may be loaded.
    ///
    /// # Errors
    /// If it is a new name and too many are loaded.
    pub fn check_adapter(&self, name: &AdapterName) -> Result<(), EngineError> {
        let max = self.config.max_adapters;
        if self.adapters.contains_key(name) || self.adapters.len() < max {
            return Ok(());
        }
        Err(EngineError::Weights(format!(
            "adapter {name}: max_adapters = {max}: as many are loaded; unload one, or raise it"
        )))
    }

    /// Takes the results of a load of an adapter, engine by engine. If one engine has it, requests of this
    /// name are sampled with it from now on, on the engines that have it; otherwise nothing changes.
    /// Returns whether it has.
    pub fn adapter_loaded(
        &mut self,
        now: f64,
        name: &AdapterName,
        adapter: RoutedAdapter,
        results: &[(usize, Result<(), AttemptError>)],
    ) -> bool {
        let loaded = results.iter().filter(|(_, result)| result.is_ok());
        let loaded: BTreeSet<usize> = loaded.map(|(engine, _)| *engine).collect();
        if loaded.is_empty() {
            return false;
        }
        for engine in loaded {
            self.adapter_repaired(engine, &adapter.server_name);
        }
        if let Some(before) = self.adapters.insert(name.clone(), adapter) {
            for engine in &mut self.engines {
                engine.adapters.remove(&before.server_name);
            }
            self.interrupt(now, |_, request| request.adapter.as_ref() == Some(name));
        }
        self.schedule(now);
        true
    }

    /// An engine has an adapter that it missed.
    pub fn adapter_repaired(&mut self, engine: usize, server_name: &str) {
        if let Some(engine) = self.engines.get_mut(engine) {
            engine.adapters.insert(server_name.to_owned());
        }
    }

    /// Forgets an adapter; requests that name it fail, and their attempts end. Unknown names are ignored.
    pub fn adapter_dropped(&mut self, now: f64, name: &AdapterName) {
        if self.adapters.remove(name).is_none() {
            return;
        }
        let requests = self.requests.values();
        let users = requests.filter(|request| request.adapter.as_ref() == Some(name));
        // In order: equal histories must give equal commands.
        let users: BTreeSet<RequestId> = users.map(|request| request.id).collect();
        for request in users {
            self.cancel_attempt(request);
            self.fail(request, EngineError::UnknownAdapter { name: name.clone() });
        }
        self.schedule(now);
    }
}
