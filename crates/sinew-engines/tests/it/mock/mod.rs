//! Mocks of vLLM 0.32, SGLang 0.5 and plain OpenAI servers, made from their published schemas, around an
//! engine without a model. Tests make them fail on demand.

mod generate;
mod openai;
mod serve;
mod sglang;
mod vllm;

use sinew_infer::{FakeConfig, FakeEngine, FakeModel, TokenBytes};
use sinew_types::{Adapter, AdapterName, Engine, PolicyVersion, TensorSource, TensorView};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub(crate) const VOCAB: usize = 256;
pub(crate) const CONTEXT: usize = 96;
pub(crate) const END: u32 = 7;

/// Model that all servers sample from, unless a test sets another one.
pub(crate) const MODEL: FakeModel = FakeModel {
    vocab: VOCAB,
    seed: 11,
    end: Some((END, 9)),
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Log-probabilities of raw logits.
    Vllm,
    /// vLLM with `--logprobs-mode processed_logprobs`.
    VllmProcessed,
    /// Sends all tokens again in each piece.
    Sglang,
    /// Sends each token once.
    SglangIncremental,
    /// Text only.
    Openai,
    /// Text, and ids inside the log-probabilities, as llama.cpp.
    OpenaiWithIds,
}

/// Fault of the next generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Status(u16),
    /// Takes the request and sends nothing.
    Hang,
    HangAfter(usize),
    /// Sends so many, then nothing until [`Mock::release`] or the end of all requests.
    StandsAfter(usize),
    /// Closes the connection in the middle of the event after so many.
    CutAfter(usize),
    /// Ends the stream properly, but without a reason.
    SilentAfter(usize),
    /// Reports an error inside the stream.
    ErrorAfter(usize, u16),
    /// The ids of the log-probabilities are others.
    WrongIds,
    /// An id outside the vocabulary.
    UnknownId,
    NanLogprob,
    NoLogprobs,
    /// Says that it used another prompt.
    WrongEcho,
    /// Stops at a token that nobody asked it to stop at.
    OwnStop,
    /// Somebody loads other weights during the generation.
    OtherWeights,
    /// So many milliseconds before each token.
    Slow(u64),
}

/// Behaviour of a server that is asked to keep its requests during a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keeping {
    /// They stand still.
    Keeps,
    /// It does not know the word, and refuses.
    Refuses,
    /// It does not know the word, and ends them.
    Ends,
}

/// One server's state.
pub(crate) struct State {
    pub(crate) kind: Kind,
    pub(crate) engine: FakeEngine,
    pub(crate) label: Mutex<String>,
    pub(crate) faults: Mutex<VecDeque<Fault>>,
    /// Bodies of generations, in order.
    pub(crate) seen: Mutex<Vec<serde_json::Value>>,
    /// Bodies of questions for log-probabilities of a prompt, in order.
    pub(crate) scored: Mutex<Vec<serde_json::Value>>,
    /// Requests whose reader went away before the end.
    pub(crate) abandoned: AtomicU64,
    pub(crate) aborted_by_name: AtomicU64,
    pub(crate) sleeping: AtomicBool,
    pub(crate) paused: AtomicBool,
    /// Requests stand still, and continue later.
    pub(crate) frozen: AtomicBool,
    /// Requests that stand by a fault may continue.
    pub(crate) released: AtomicBool,
    /// Times that all requests were ended.
    pub(crate) aborts: AtomicU64,
    /// Behaviour of a pause that is to keep requests.
    pub(crate) keeping: Mutex<Keeping>,
    /// SGLang: answers name the weights of all tokens so far. vLLM's always do.
    pub(crate) spans: AtomicBool,
    /// The server has no sums of its weights.
    pub(crate) no_sums: AtomicBool,
    /// The weights in memory are not what the folder has.
    pub(crate) wrong_sums: AtomicBool,
    /// Digest of the weights in memory.
    pub(crate) digest: Mutex<String>,
    /// Parts of its memory that it has given up: `weights`, `kv_cache`.
    pub(crate) given_up: Mutex<BTreeSet<String>>,
    /// Adapters by name, with their folders.
    pub(crate) adapters: Mutex<BTreeMap<String, String>>,
    /// The server takes adapters.
    pub(crate) lora: AtomicBool,
    /// SGLang: the server lists its adapters.
    pub(crate) hides_adapters: AtomicBool,
    /// Requests that ask for an adapter, by its name.
    pub(crate) asked_for: Mutex<BTreeMap<String, usize>>,
    /// Adapters that were removed while a request asked for them.
    pub(crate) removed_in_use: AtomicU64,
    /// Milliseconds that vLLM takes to load.
    pub(crate) load_ms: Mutex<u64>,
    /// Commands in order: path and query, or path and the label.
    pub(crate) calls: Mutex<Vec<String>>,
    /// Command that is carried out, but whose answer is lost; once.
    pub(crate) loses: Mutex<Option<String>>,
    /// Command after which another process takes the port; once.
    pub(crate) restarts_after: Mutex<Option<String>>,
    /// Loading weights fails.
    pub(crate) broken_loader: AtomicBool,
    /// Answers everything with 503.
    pub(crate) starting: AtomicBool,
    /// Key-value room in use besides its own, of 1.
    pub(crate) kv_used: Mutex<f64>,
    /// The server has no development endpoints.
    pub(crate) bare: AtomicBool,
    pub(crate) started_s: Mutex<f64>,
    pub(crate) next_request: AtomicU64,
}

/// A server on a separate port; gone when it is dropped.
pub(crate) struct Mock {
    pub(crate) state: Arc<State>,
    pub(crate) address: SocketAddr,
    thread: Option<serve::Thread>,
}

impl Mock {
    pub(crate) fn start(kind: Kind) -> Self {
        Self::at(kind, "127.0.0.1:0".parse().unwrap(), 1.0)
    }

    fn at(kind: Kind, address: SocketAddr, started_s: f64) -> Self {
        let bytes = (0..VOCAB).map(|id| text_of(id as u32));
        let config = FakeConfig {
            model: MODEL,
            context: CONTEXT,
            token_bytes: Some(TokenBytes::new(bytes)),
            latency: Duration::from_millis(1),
            ..FakeConfig::default()
        };
        let start = Instant::now();
        let clock = Box::new(move || start.elapsed().as_secs_f64());
        let state = Arc::new(State {
            kind,
            engine: FakeEngine::threaded(config, clock).unwrap(),
            label: Mutex::new("default".to_owned()),
            faults: Mutex::default(),
            seen: Mutex::default(),
            scored: Mutex::default(),
            abandoned: AtomicU64::new(0),
            aborted_by_name: AtomicU64::new(0),
            sleeping: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
            released: AtomicBool::new(false),
            aborts: AtomicU64::new(0),
            keeping: Mutex::new(Keeping::Keeps),
            spans: AtomicBool::new(false),
            no_sums: AtomicBool::new(false),
            wrong_sums: AtomicBool::new(false),
            digest: Mutex::default(),
            given_up: Mutex::default(),
            adapters: Mutex::default(),
            lora: AtomicBool::new(true),
            hides_adapters: AtomicBool::new(false),
            asked_for: Mutex::default(),
            removed_in_use: AtomicU64::new(0),
            load_ms: Mutex::default(),
            calls: Mutex::default(),
            loses: Mutex::default(),
            restarts_after: Mutex::default(),
            broken_loader: AtomicBool::new(false),
            starting: AtomicBool::new(false),
            kv_used: Mutex::new(0.0),
            bare: AtomicBool::new(false),
            started_s: Mutex::new(started_s),
            next_request: AtomicU64::new(1),
        });
        let (thread, address) = serve::start(Arc::clone(&state), address);
        Self {
            state,
            address,
            thread: Some(thread),
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn fail_next(&self, fault: Fault) {
        self.state.faults.lock().unwrap().push_back(fault);
    }

    /// The next generation stands in the middle of its output.
    pub(crate) fn hold_next(&self) {
        self.state.released.store(false, Ordering::SeqCst);
        self.fail_next(Fault::StandsAfter(3));
    }

    /// Generations that stand continue.
    pub(crate) fn release(&self) {
        self.state.released.store(true, Ordering::SeqCst);
    }

    pub(crate) fn set_label(&self, label: &str) {
        *self.state.label.lock().unwrap() = label.to_owned();
    }

    pub(crate) fn label(&self) -> String {
        self.state.label.lock().unwrap().clone()
    }

    /// The commands since the last look.
    pub(crate) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.state.calls.lock().unwrap())
    }

    /// Names of the adapters that it has.
    pub(crate) fn adapters(&self) -> Vec<String> {
        self.state
            .adapters
            .lock()
            .unwrap()
            .keys()
            .cloned()
            .collect()
    }

    pub(crate) fn generations(&self) -> usize {
        self.state.seen.lock().unwrap().len()
    }

    pub(crate) fn count(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::SeqCst)
    }

    /// The process dies: connections break, the port is closed.
    pub(crate) fn kill(&mut self) {
        self.thread.take();
    }

    /// A new process on the same port, with the weights that it starts with.
    pub(crate) fn restart(&mut self) {
        self.kill();
        let started_s = *self.state.started_s.lock().unwrap() + 1.0;
        *self = Self::at(self.state.kind, self.address, started_s);
    }
}

/// The text of a token: three characters, no two the same.
pub(crate) fn text_of(id: u32) -> String {
    format!("{id:02x} ")
}

/// Weights for the engines of the tests.
pub(crate) struct OneTensor(pub(crate) [f32; 1]);

impl TensorSource for OneTensor {
    fn names(&self) -> Vec<String> {
        vec!["number".to_owned()]
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let view = TensorView::f32(&[1], &self.0).ok();
        view.filter(|_| name == "number")
    }
}

impl State {
    /// Notes a command.
    fn note(&self, call: String) {
        self.calls.lock().unwrap().push(call);
    }

    /// Sum of the only tensor.
    fn sum(&self) -> String {
        let digest = self.digest.lock().unwrap().clone();
        if self.wrong_sums.load(Ordering::SeqCst) {
            return format!("not {digest}");
        }
        digest
    }

    /// Another process takes the port in the middle of a load.
    fn become_another(&self) {
        *self.label.lock().unwrap() = "default".to_owned();
        *self.started_s.lock().unwrap() += 1.0;
        self.paused.store(false, Ordering::SeqCst);
        self.frozen.store(false, Ordering::SeqCst);
        self.aborts.fetch_add(1, Ordering::SeqCst);
        self.adapters.lock().unwrap().clear();
    }

    /// Gives up these parts of its memory.
    fn give_up(&self, parts: &[&str]) {
        let mut given_up = self.given_up.lock().unwrap();
        given_up.extend(parts.iter().map(|p| (*p).to_owned()));
        self.sleeping.store(true, Ordering::SeqCst);
        self.aborts.fetch_add(1, Ordering::SeqCst);
    }

    /// Takes back a part of its memory.
    fn take_back(&self, part: &str) {
        let mut given_up = self.given_up.lock().unwrap();
        given_up.remove(part);
        self.sleeping.store(!given_up.is_empty(), Ordering::SeqCst);
    }

    /// Whether the memory of its weights is given up.
    fn has_no_weights(&self) -> bool {
        self.given_up.lock().unwrap().contains("weights")
    }

    /// Reads an adapter under a name.
    fn load_adapter(&self, body: &serde_json::Value) -> Result<(), String> {
        let text = |key: &str| body[key].as_str().unwrap_or_default().to_owned();
        let (name, path) = (text("lora_name"), text("lora_path"));
        self.note(format!("load {name}"));
        if self.broken_loader.load(Ordering::SeqCst) {
            return Err("the adapter has rank 64, at most 16 is allowed".to_owned());
        }
        if self.has_no_weights() {
            return Err("the memory of the weights is not there".to_owned());
        }
        if self.adapters.lock().unwrap().contains_key(&name) {
            return Err(format!(
                "The lora adapter '{name}' has already been loaded."
            ));
        }
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            let file = std::path::Path::new(&path).join(file);
            std::fs::metadata(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        }
        let own = AdapterName::new(&name).map_err(|e| e.to_string())?;
        let tensors = Arc::new(OneTensor([1.0]));
        let adapter = Adapter {
            alpha: 1.0,
            tensors,
        };
        let loaded = self.engine.load_adapter(&own, PolicyVersion(0), adapter);
        loaded.map_err(|e| e.to_string())?;
        self.adapters.lock().unwrap().insert(name, path);
        Ok(())
    }

    /// Removes an adapter, if it is there.
    fn unload_adapter(&self, body: &serde_json::Value) -> bool {
        let name = body["lora_name"].as_str().unwrap_or_default();
        self.note(format!("unload {name}"));
        let used = self.asked_for.lock().unwrap().get(name).copied();
        if used.unwrap_or(0) > 0 {
            self.removed_in_use.fetch_add(1, Ordering::SeqCst);
        }
        self.adapters.lock().unwrap().remove(name).is_some()
    }
}

/// Counts a request that asks for an adapter, until it ends.
pub(crate) struct AsksFor(Arc<State>, String);

impl AsksFor {
    fn new(state: &Arc<State>, name: &str) -> Self {
        let mut asked = state.asked_for.lock().unwrap();
        *asked.entry(name.to_owned()).or_default() += 1;
        drop(asked);
        Self(Arc::clone(state), name.to_owned())
    }
}

impl Drop for AsksFor {
    fn drop(&mut self) {
        let mut asked = self.0.asked_for.lock().unwrap();
        *asked.entry(self.1.clone()).or_default() -= 1;
    }
}

/// Loads what a client has published, as a real server would: by reading the files.
fn load_folder(state: &State, path: &str) -> Result<(), String> {
    if state.broken_loader.load(Ordering::SeqCst) {
        return Err("the loader is broken".to_owned());
    }
    if state.has_no_weights() {
        return Err("the memory of the weights is not there".to_owned());
    }
    let file = std::path::Path::new(path).join("model.safetensors");
    let bytes = std::fs::read(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    let tensors = safetensors::SafeTensors::deserialize(&bytes).map_err(|e| e.to_string())?;
    tensors.tensor("number").map_err(|e| e.to_string())?;
    *state.digest.lock().unwrap() = format!("{:?}", tensors.tensor("number").unwrap().data());
    let weights = Arc::new(OneTensor([0.0]));
    let loaded = state.engine.load_weights(PolicyVersion(0), weights);
    loaded.map_err(|e| e.to_string())
}
