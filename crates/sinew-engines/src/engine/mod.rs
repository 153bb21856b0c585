//! The thread around a [`Router`]: an inbox, attempts as tasks, probes of servers, weights.
//!
//! Callers wait for a server only in `load_weights`, `pause`, `sleep` and [`RemoteEngine::wait_ready`];
//! `submit` and `abort` only append to a bounded queue. The parts: `inbox` is shared with callers, `worker`
//! is the thread.

mod inbox;
mod worker;

use crate::adapter_folders::AdapterFolders;
use crate::backend::{Backend, NamedAdapter, Weights};
use crate::config::{ConfigError, RemoteConfig};
use crate::error::AttemptError;
use crate::folder::WeightsFolder;
use crate::guided::FormatMode;
use crate::route::{Counters, EngineView, adapter_name};
use inbox::{Control, Reply, Shared};
use sinew_types::{
    Adapter, AdapterName, Engine, EngineError, EngineStatus, EventSink, Fidelity, GenerateRequest,
    Lineage, PolicyVersion, RequestId, TEMPERATURES, TensorSource, TokenId, WeightsId,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::{self, JoinHandle, ThreadId};
use std::time::Duration;

/// One or several outside engines as one: requests go where they can be served, and continue elsewhere when a
/// server fails.
///
/// Thread-safe. Event sinks are called on its thread: they may submit and abort, but not load weights or
/// adapters, pause or sleep (these answer with an error instead of waiting forever). Dropping it
/// ends the thread; requests that have not ended then fail with [`EngineError::Stopped`].
#[derive(Debug)]
pub struct RemoteEngine {
    shared: Arc<Shared>,
    backends: Vec<Arc<dyn Backend>>,
    formats: FormatMode,
    /// Lineage of all weights that are loaded.
    lineage: Lineage,
    /// Name of its adapters, if weights are adapters.
    adapters: Option<String>,
    folder: Option<WeightsFolder>,
    /// Folders of adapters that requests name.
    adapter_folders: AdapterFolders,
    /// Number of the next load of such an adapter.
    adapter_loads: AtomicU64,
    thread: Option<JoinHandle<()>>,
    thread_id: ThreadId,
}

impl RemoteEngine {
    /// Starts the thread. Servers need not be up: requests wait for them, up to a deadline. New
    /// weights are published in `folder` for servers to load; without one, servers keep the weights
    /// that they have.
    ///
    /// # Errors
    /// If there is no engine or the thread does not start.
    pub fn new(
        backends: Vec<Arc<dyn Backend>>,
        folder: Option<WeightsFolder>,
        config: RemoteConfig,
    ) -> Result<Self, ConfigError> {
        if backends.is_empty() {
            return Err(ConfigError::Value {
                name: "backends",
                value: "none".to_owned(),
                allowed: "at least one".to_owned(),
            });
        }
        let (formats, lineage) = (config.router.formats, config.lineage);
        let adapters = config.router.adapters.clone();
        let shared = Arc::new(Shared::new(&config));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| ConfigError::Thread(e.to_string()))?;
        let (worker_shared, worker_backends) = (Arc::clone(&shared), backends.clone());
        let thread = thread::Builder::new()
            .name("sinew-engines".to_owned())
            .spawn(move || worker::run(&runtime, worker_shared, worker_backends, config))
            .map_err(|e| ConfigError::Thread(e.to_string()))?;
        Ok(Self {
            shared,
            backends,
            formats,
            lineage,
            adapters,
            folder,
            adapter_folders: AdapterFolders::default(),
            adapter_loads: AtomicU64::new(0),
            thread_id: thread.thread().id(),
            thread: Some(thread),
        })
    }

    /// Counters since the start.
    pub fn counters(&self) -> Counters {
        self.shared.lock().counters.clone()
    }

    /// The state of each engine, for users; at most one turn of the thread old.
    pub fn engines(&self) -> Vec<EngineView> {
        self.shared.lock().engines.clone()
    }

    /// Blocks until at least one engine may serve.
    ///
    /// # Errors
    /// If none may serve after `limit`, with the reason for each engine; or at once if the thread has ended.
    pub fn wait_ready(&self, limit: Duration) -> Result<(), EngineError> {
        let ready = self.shared.wait_until(limit, |inbox| {
            inbox.stopped.is_some() || inbox.engines.iter().any(|e| e.idle_because.is_none())
        });
        let inbox = self.shared.lock();
        if let Some(why) = &inbox.stopped {
            return Err(EngineError::Stopped(why.clone()));
        }
        if ready {
            return Ok(());
        }
        let why =
            |e: &EngineView| format!("{}: {}", e.name, e.idle_because.as_deref().unwrap_or("?"));
        let why: Vec<_> = inbox.engines.iter().map(why).collect();
        let limit = limit.as_secs_f64();
        let why = format!("no engine was ready within {limit} s ({})", why.join("; "));
        Err(EngineError::Stopped(why))
    }

    /// Weights that servers may still read from the folder: an adapter that left their memory is read again.
    fn in_use(&self) -> BTreeSet<WeightsId> {
        self.shared.lock().in_use.clone()
    }

    /// Refuses what an event sink asks for: it runs on the thread that would carry it out.
    fn refuse_sinks(&self, what: &str) -> Result<(), EngineError> {
        if thread::current().id() == self.thread_id {
            let why =
                format!("an event sink may not ask for {what}: it runs on the thread that would");
            return Err(EngineError::Failed(why));
        }
        Ok(())
    }

    /// Runs a control on the thread and blocks until it is done.
    ///
    /// # Errors
    /// If an event sink asks.
    fn ask(&self, what: &str, control: impl FnOnce(Reply) -> Control) -> Result<(), EngineError> {
        self.refuse_sinks(what)?;
        let (reply, answer) = sync_channel(1);
        self.shared.control(control(reply))?;
        let ended = || EngineError::Stopped(format!("it ended during {what}"));
        answer.recv().unwrap_or_else(|_| Err(ended()))
    }
}

impl Engine for RemoteEngine {
    fn submit(&self, request: GenerateRequest, sink: EventSink) -> Result<(), EngineError> {
        let mut sampling = request.sampling.clone();
        self.formats.apply(&mut sampling, "")?;
        for backend in &self.backends {
            backend.accepts(&sampling).map_err(refusal)?;
            if let Some(asked) = &request.prompt_logprobs {
                backend.accepts_prompt(asked).map_err(refusal)?;
            }
        }
        check_request(&request, &self.shared)?;
        if let Some(asked) = &request.prompt_logprobs {
            asked.check(request.prompt.len(), self.shared.lock().limits.vocab)?;
        }
        self.shared.submit(request, sink)
    }

    fn abort(&self, request: RequestId) {
        self.shared.abort(request);
    }

    fn pause(&self, paused: bool) {
        // Fails only if the thread has ended, and then nothing runs.
        let _ = self.ask("a pause", |reply| Control::Pause { paused, reply });
    }

    fn load_weights(
        &self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), EngineError> {
        if self.fidelity() != Fidelity::TokenExact {
            let why = "the engine is for evaluation only".to_owned();
            return Err(EngineError::Weights(why));
        }
        let is_adapter = weights.folder().is_some_and(|folder| folder.is_adapter);
        if is_adapter != self.adapters.is_some() {
            return Err(EngineError::Weights(wrong_form(is_adapter).to_owned()));
        }
        let id = WeightsId::new(version, self.lineage);
        // Written while generation continues; servers stop only to load it.
        let folder = match &self.folder {
            Some(folder) => {
                let path = folder.publish(id, &*weights, &self.in_use());
                Some(path.map_err(|e| EngineError::Weights(e.to_string()))?)
            }
            None => None,
        };
        let weights = Weights {
            id,
            folder,
            adapter: self.adapters.as_deref().map(|of| adapter_name(of, id)),
            sums: None,
            source: Some(weights),
        };
        self.ask("new weights", |reply| Control::Load { weights, reply })
    }

    /// Loads an adapter on all servers, under a name that contains this one, the version and a number. It has
    /// succeeded if at least one server has it; the others, and those that are started anew, are given it as
    /// soon as a probe shows that they miss it.
    fn load_adapter(
        &self,
        name: &AdapterName,
        version: PolicyVersion,
        adapter: Adapter,
    ) -> Result<(), EngineError> {
        let refused =
            |why: &dyn std::fmt::Display| EngineError::Weights(format!("adapter {name}: {why}"));
        self.refuse_sinks("an adapter")?;
        if self.fidelity() != Fidelity::TokenExact {
            return Err(refused(&"the engine is for evaluation only"));
        }
        let id = WeightsId::new(version, self.lineage);
        let number = self.adapter_loads.fetch_add(1, Ordering::Relaxed);
        let server_name = named_on_servers(name, id, number);
        let folder = match &self.folder {
            Some(folder) => {
                let written = self.adapter_folders.write(folder, &server_name, &adapter);
                Some(written.map_err(|e| refused(&e))?)
            }
            None => None,
        };
        let named = NamedAdapter {
            server_name,
            id,
            folder: folder.clone(),
            source: Some(adapter),
        };
        let loaded = self.ask("an adapter", |reply| Control::LoadAdapter {
            name: name.clone(),
            adapter: named,
            reply,
        });
        if let Some(folder) = folder {
            self.adapter_folders.settle(name, folder, loaded.is_ok());
        }
        loaded
    }

    fn unload_adapter(&self, name: &AdapterName) -> Result<(), EngineError> {
        self.ask("an adapter's end", |reply| Control::DropAdapter {
            name: name.clone(),
            reply,
        })?;
        self.adapter_folders.remove(name);
        Ok(())
    }

    /// Lets the servers give up their memory. Requests lose no token, and their deadlines start again
    /// afterwards. If one of the servers cannot, the others have changed nevertheless; the probes that
    /// follow show each one's state.
    fn sleep(&self) -> Result<(), EngineError> {
        let asleep = true;
        self.ask("sleep", |reply| Control::Sleep { asleep, reply })
    }

    fn wake(&self) -> Result<(), EngineError> {
        let asleep = false;
        self.ask("a wake-up", |reply| Control::Sleep { asleep, reply })
    }

    fn status(&self) -> EngineStatus {
        let inbox = self.shared.lock();
        let mut status = inbox.status.clone();
        status.waiting += inbox.submitted.len();
        status
    }

    fn fidelity(&self) -> Fidelity {
        let each = self.backends.iter().map(|b| b.fidelity());
        let mut weak = each.filter(|f| *f != Fidelity::TokenExact);
        weak.next().unwrap_or(Fidelity::TokenExact)
    }
}

impl Drop for RemoteEngine {
    fn drop(&mut self) {
        self.shared.drop_engine();
        // A sink may hold the last handle: the thread cannot join itself, and ends by itself.
        if let Some(thread) = self.thread.take()
            && thread::current().id() != self.thread_id
        {
            // Its panics were reported to every request.
            let _ = thread.join();
        }
    }
}

/// Name on servers of the `number`-th adapter that is loaded: of this name, version and lineage. A name
/// that is too long is cut, and told apart by a hash.
fn named_on_servers(name: &AdapterName, id: WeightsId, number: u64) -> String {
    /// Characters that stay of a name that is too long.
    const KEPT: usize = 56;
    let name = name.as_str();
    let whole = format!("{name}-{id}-{number}");
    if whole.len() <= AdapterName::MAX_LEN {
        return whole;
    }
    let hash = blake3::hash(name.as_bytes()).to_hex();
    let kept = &name[..KEPT.min(name.len())];
    format!("{kept}-{}-{id}-{number}", &hash[..16])
}

/// The error for a request that a kind of server refuses.
fn refusal(error: AttemptError) -> EngineError {
    match error {
        AttemptError::Refused(error) => error,
        other => EngineError::Failed(other.to_string()),
    }
}

/// The reason for which weights are refused that are not of the form that the servers load.
fn wrong_form(is_adapter: bool) -> &'static str {
    if is_adapter {
        "the trainer published an adapter, and the servers load whole weights: set `engine.adapters`"
    } else {
        "the trainer published whole weights, and the servers load adapters by name: leave `engine.adapters` out"
    }
}

/// Refuses a request that no server would take, before any server is asked: empty prompt, no
/// output, parameters outside their ranges, ids outside the vocabulary, a prompt that fills the
/// context.
fn check_request(request: &GenerateRequest, shared: &Shared) -> Result<(), EngineError> {
    let invalid = |name: &str, value: String, allowed: &str| {
        Err(EngineError::InvalidSampling {
            name: name.to_owned(),
            value,
            allowed: allowed.to_owned(),
        })
    };
    let s = &request.sampling;
    if request.prompt.is_empty() {
        return invalid("prompt", "empty".to_owned(), "at least one token");
    }
    if s.max_tokens == 0 {
        return invalid("max_tokens", "0".to_owned(), "at least 1");
    }
    if !(s.temperature == 0.0 || TEMPERATURES.contains(&s.temperature)) {
        let (least, most) = (TEMPERATURES.start(), TEMPERATURES.end());
        let allowed = format!("0 (greedy) or {least}..={most}");
        return invalid("temperature", s.temperature.to_string(), &allowed);
    }
    if !(s.top_p > 0.0 && s.top_p <= 1.0) {
        return invalid(
            "top_p",
            s.top_p.to_string(),
            "above 0, at most 1 (1 keeps all)",
        );
    }
    if !(0.0..=1.0).contains(&s.min_p) {
        return invalid("min_p", s.min_p.to_string(), "0..=1 (0 keeps all)");
    }
    if let Some((id, bias)) = s.logit_bias.iter().find(|(_, b)| !b.is_finite()) {
        return invalid(
            "logit_bias",
            format!("{bias} for token {id}"),
            "a finite number",
        );
    }
    if s.stop_strings.iter().any(String::is_empty) {
        return invalid(
            "stop_strings",
            "an empty one".to_owned(),
            "at least one byte each",
        );
    }
    let limits = shared.lock().limits;
    if let Some(context) = limits.context
        && request.prompt.len() >= context
    {
        let prompt = request.prompt.len();
        return Err(EngineError::PromptTooLong { prompt, context });
    }
    if let Some(vocab) = limits.vocab {
        let outside = |id: &TokenId| *id as usize >= vocab;
        if let Some(position) = request.prompt.iter().position(outside) {
            let id = request.prompt[position];
            return Err(EngineError::UnknownToken {
                id,
                position,
                vocab,
            });
        }
        let biased = s.logit_bias.iter().map(|(id, _)| id);
        if let Some(id) = s.stop_ids.iter().chain(biased).find(|id| outside(id)) {
            let allowed = format!("ids below the vocabulary of {vocab}");
            return invalid("stop_ids or logit_bias", id.to_string(), &allowed);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_on_servers_are_names_that_differ() {
        let id = WeightsId::new(PolicyVersion(u64::MAX), Lineage(u32::MAX));
        let short = AdapterName::new("a").unwrap();
        assert_eq!(
            named_on_servers(&short, WeightsId::default(), 4),
            "a-v0-00000000-4"
        );
        let long = |last: &str| AdapterName::new(&("x".repeat(127) + last)).unwrap();
        let names = [long("y"), long("z")].map(|name| named_on_servers(&name, id, u64::MAX));
        assert_ne!(names[0], names[1]);
        for name in names {
            AdapterName::new(&name).unwrap();
        }
    }
}
