//! Common parts of the tests.

use crate::mock::{END, Kind, MODEL, Mock, OneTensor};
use sinew_engines::{
    Backend, FolderDtype, LocalBackend, LogprobMode, RemoteConfig, RemoteEngine, ServerConfig,
    SglangBackend, SglangOptions, Timeouts, VllmApi, VllmBackend, VllmOptions, WeightsFolder,
};
use sinew_infer::{FakeConfig, FakeEngine};
use sinew_types::{
    Adapter, AdapterName, Engine, EngineError, EngineEvent, FinishReason, GenerateRequest, Lineage,
    PolicyVersion, PromptLogprob, PublishedFolder, RequestId, SampledToken, SamplingParams,
    TensorSource, TensorView,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Longer than anything takes that works.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn request(id: u64, prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    let sampling = SamplingParams {
        max_tokens,
        stop_ids: vec![END],
        seed: id,
        ..SamplingParams::default()
    };
    GenerateRequest::new(RequestId(id), prompt.to_vec(), sampling)
}

/// All events of a request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) prompt: Option<Vec<PromptLogprob>>,
    pub(crate) tokens: Vec<SampledToken>,
    pub(crate) end: Result<FinishReason, EngineError>,
}

impl Outcome {
    pub(crate) fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|t| t.id).collect()
    }

    pub(crate) fn reason(&self) -> &FinishReason {
        self.end.as_ref().expect("it finished")
    }

    pub(crate) fn error(&self) -> String {
        self.end.as_ref().expect_err("it failed").to_string()
    }
}

pub(crate) struct Pending(Receiver<EngineEvent>);

impl Pending {
    /// The next event.
    pub(crate) fn next(&self) -> EngineEvent {
        self.0.recv_timeout(PATIENCE).expect("an event comes")
    }

    pub(crate) fn nothing_for(&self, time: Duration) -> bool {
        self.0.recv_timeout(time).is_err()
    }

    /// All events to the last; checks that it is the last.
    pub(crate) fn outcome(self) -> Outcome {
        let (mut prompt, mut all) = (None, Vec::new());
        let end = loop {
            match self.next() {
                EngineEvent::Prompt { logprobs, .. } => {
                    assert!(all.is_empty(), "a prompt after the first token");
                    let before = prompt.replace(logprobs);
                    assert_eq!(before, None, "a prompt is reported twice");
                }
                EngineEvent::Tokens { tokens, .. } => all.extend(tokens),
                EngineEvent::Finished { reason, .. } => break Ok(reason),
                EngineEvent::Failed { error, .. } => break Err(error),
            }
        };
        let more = self.0.recv_timeout(Duration::from_millis(1));
        assert!(more.is_err(), "told after the end: {more:?}");
        Outcome {
            prompt,
            tokens: all,
            end,
        }
    }
}

pub(crate) fn submit(engine: &dyn Engine, request: GenerateRequest) -> Pending {
    try_submit(engine, request).expect("the request is taken")
}

pub(crate) fn try_submit(
    engine: &dyn Engine,
    request: GenerateRequest,
) -> Result<Pending, EngineError> {
    let (to, events) = channel();
    let sink = Box::new(move |event| {
        // The test may have continued.
        let _ = to.send(event);
    });
    engine.submit(request, sink)?;
    Ok(Pending(events))
}

pub(crate) fn server(mock: &Mock) -> ServerConfig {
    ServerConfig {
        vocab: Some(crate::mock::VOCAB),
        timeouts: Timeouts {
            connect_s: PATIENCE.as_secs_f64(),
            first_token_s: PATIENCE.as_secs_f64(),
            between_tokens_s: PATIENCE.as_secs_f64(),
            whole_s: PATIENCE.as_secs_f64(),
            control_s: PATIENCE.as_secs_f64(),
            load_s: PATIENCE.as_secs_f64(),
        },
        ..ServerConfig::new(mock.url())
    }
}

pub(crate) fn vllm(mock: &Mock, api: VllmApi) -> Arc<dyn Backend> {
    let options = VllmOptions {
        api,
        logprobs: match mock.state.kind {
            Kind::VllmProcessed => LogprobMode::Processed,
            _ => LogprobMode::Raw,
        },
        ..VllmOptions::default()
    };
    Arc::new(VllmBackend::new(server(mock), options).unwrap())
}

pub(crate) fn sglang(mock: &Mock) -> Arc<dyn Backend> {
    Arc::new(SglangBackend::new(server(mock), SglangOptions::default(), 77).unwrap())
}

/// A client of a server that discards its weights when it sleeps.
pub(crate) fn deep(mock: &Mock) -> Arc<dyn Backend> {
    let options = VllmOptions {
        sleep_level: 2,
        ..VllmOptions::default()
    };
    match mock.state.kind {
        Kind::Vllm => Arc::new(VllmBackend::new(server(mock), options).unwrap()),
        _ => backend(mock),
    }
}

/// One that soon finds a server that sends nothing, but not before a busy machine has sampled a token.
pub(crate) fn hasty(mock: &Mock, api: VllmApi) -> Arc<dyn Backend> {
    let mut config = server(mock);
    config.timeouts.first_token_s = 3.0;
    config.timeouts.between_tokens_s = 2.0;
    let options = VllmOptions {
        api,
        ..VllmOptions::default()
    };
    match mock.state.kind {
        Kind::Vllm => Arc::new(VllmBackend::new(config, options).unwrap()),
        _ => Arc::new(SglangBackend::new(config, SglangOptions::default(), 77).unwrap()),
    }
}

/// Waits until a look at its first engine has shown that `why`.
pub(crate) fn until_idle_because(engine: &RemoteEngine, why: &str) {
    until(why, || {
        let engines = engine.engines();
        let because = engines.first().and_then(|e| e.idle_because.as_deref());
        because.is_some_and(|b| b.contains(why))
    });
}

pub(crate) fn backend(mock: &Mock) -> Arc<dyn Backend> {
    match mock.state.kind {
        Kind::Vllm | Kind::VllmProcessed => vllm(mock, VllmApi::Completions),
        Kind::Sglang | Kind::SglangIncremental => sglang(mock),
        other => panic!("{other:?} has tests of its own"),
    }
}

/// The lineage of all engines of the tests: their labels are `v1-000000aa` and so on.
pub(crate) const LINEAGE: Lineage = Lineage(0xaa);

/// A fake engine of this process, with the model of the servers.
pub(crate) fn in_process() -> Arc<dyn Backend> {
    let start = Instant::now();
    let fake = FakeConfig {
        model: MODEL,
        ..FakeConfig::default()
    };
    let clock = Box::new(move || start.elapsed().as_secs_f64());
    let fake = Arc::new(FakeEngine::threaded(fake, clock).unwrap());
    Arc::new(LocalBackend::new("fake", fake))
}

pub(crate) fn config() -> RemoteConfig {
    let mut config = RemoteConfig::new(Box::new(|| 0.5));
    config.lineage = LINEAGE;
    config.probe_interval_s = 0.05;
    config.router.backoff_s = 0.02;
    config.router.block_tokens = 4;
    config.router.max_wait_s = PATIENCE.as_secs_f64();
    config.router.breaker.open_s = 0.1;
    config
}

pub(crate) fn remote(backends: Vec<Arc<dyn Backend>>, config: RemoteConfig) -> RemoteEngine {
    with_folder(backends, None, config)
}

pub(crate) fn with_folder(
    backends: Vec<Arc<dyn Backend>>,
    folder: Option<WeightsFolder>,
    config: RemoteConfig,
) -> RemoteEngine {
    let engine = RemoteEngine::new(backends, folder, config).unwrap();
    engine.wait_ready(PATIENCE).unwrap();
    engine
}

/// Each kind of server, and the form of its requests.
pub(crate) const SERVERS: [(Kind, fn(&Mock) -> Arc<dyn Backend>); 4] = [
    (Kind::Vllm, backend),
    (Kind::Vllm, generate),
    (Kind::Sglang, backend),
    (Kind::SglangIncremental, backend),
];

/// Servers behind one engine.
pub(crate) struct Bench {
    pub(crate) mocks: Vec<Mock>,
    pub(crate) engine: RemoteEngine,
    /// Contains the folder of weights.
    pub(crate) dir: tempfile::TempDir,
}

/// The folder of weights below `dir`.
pub(crate) fn weights_folder(dir: &Path) -> WeightsFolder {
    WeightsFolder::new(dir.join("weights"), None, FolderDtype::F32)
}

/// Servers that are all ready.
pub(crate) fn bench(
    kinds: &[Kind],
    backend: fn(&Mock) -> Arc<dyn Backend>,
    config: RemoteConfig,
) -> Bench {
    let mocks: Vec<_> = kinds.iter().map(|k| Mock::start(*k)).collect();
    let dir = tempfile::tempdir().unwrap();
    let folder = weights_folder(dir.path());
    let engine = with_folder(mocks.iter().map(backend).collect(), Some(folder), config);
    let bench = Bench { mocks, engine, dir };
    bench.all_serve();
    bench
}

impl Bench {
    pub(crate) fn all_serve(&self) {
        until("all serve", || {
            let engines = self.engine.engines();
            engines.iter().all(|e| e.idle_because.is_none())
        });
    }
}

/// Waits until `done` holds; panics after a while.
pub(crate) fn until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A request of 20 tokens.
pub(crate) fn long(id: u64) -> GenerateRequest {
    let mut request = request(id, &[id as u32, 2, 3], 20);
    request.sampling.stop_ids.clear();
    request
}

/// Versions of all tokens of a [`long`] request that ends well.
pub(crate) fn versions(pending: Pending) -> Vec<u64> {
    let outcome = pending.outcome();
    assert_eq!(outcome.reason(), &FinishReason::Length, "{outcome:?}");
    assert_eq!(outcome.tokens.len(), 20);
    outcome.tokens.iter().map(|t| t.version.0).collect()
}

/// Loads whole weights as `version`.
pub(crate) fn load(engine: &RemoteEngine, version: u64) -> Result<(), EngineError> {
    engine.load_weights(PolicyVersion(version), Arc::new(OneTensor([1.0])))
}

/// A client of vLLM's `/inference/v1/generate`.
pub(crate) fn generate(mock: &Mock) -> Arc<dyn Backend> {
    vllm(mock, VllmApi::Generate)
}

pub(crate) fn name(text: &str) -> AdapterName {
    AdapterName::new(text).unwrap()
}

/// A request of an adapter.
pub(crate) fn with(adapter: Option<&str>, request: GenerateRequest) -> GenerateRequest {
    GenerateRequest {
        adapter: adapter.map(name),
        ..request
    }
}

/// An adapter that a trainer wrote: one number, in a folder that a server can read.
struct Written {
    number: OneTensor,
    folder: PublishedFolder,
}

impl TensorSource for Written {
    fn names(&self) -> Vec<String> {
        self.number.names()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.number.tensor(name)
    }

    fn folder(&self) -> Option<&PublishedFolder> {
        Some(&self.folder)
    }
}

/// An adapter that is a number, written below `dir`.
pub(crate) fn adapter(dir: &Path, number: u64) -> Adapter {
    let path = dir.join(format!("trainer-{number}"));
    std::fs::create_dir_all(&path).unwrap();
    std::fs::write(path.join("adapter_config.json"), "{}").unwrap();
    std::fs::write(path.join("adapter_model.safetensors"), "tensors").unwrap();
    Adapter {
        alpha: 1.0,
        tensors: Arc::new(Written {
            number: OneTensor([number as f32]),
            folder: PublishedFolder {
                path,
                is_adapter: true,
                tensors: Vec::new(),
            },
        }),
    }
}
