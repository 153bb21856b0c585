//! Engines of a registry over real sockets: which of them serve, and what becomes of requests when one dies.

use sinew_engines::{EngineAddress, EngineSeats, KnownWeights, RemoteConfig, RemoteEngine};
use sinew_http::server::{self, ConnectionLimits, Guard, Key};
use sinew_infer::{FakeConfig, FakeEngine, FakeModel, Fault};
use sinew_types::{
    Engine, EngineEvent, FinishReason, GenerateRequest, Lineage, PolicyVersion, RequestId,
    SampledToken, SamplingParams, TensorSource, TensorView, WeightsId,
};
use sinew_workers::{EngineRoutes, Loaded};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

/// Longer than anything takes that works.
const PATIENCE: Duration = Duration::from_secs(300);
const CONTEXT: usize = 512;
const MODEL: FakeModel = FakeModel {
    vocab: 64,
    seed: 3,
    end: None,
};

fn id(version: u64) -> WeightsId {
    WeightsId::new(PolicyVersion(version), Lineage(7))
}

/// Weights of one tensor.
struct One;

impl TensorSource for One {
    fn names(&self) -> Vec<String> {
        vec!["a".to_owned()]
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let view = TensorView::f32(&[1], &[1.0]).ok();
        view.filter(|_| name == "a")
    }
}

/// An engine of another process, until it is dropped.
struct Served {
    engine: Arc<FakeEngine>,
    loaded: Loaded,
    routes: Arc<EngineRoutes>,
    address: SocketAddr,
    _stop: oneshot::Sender<()>,
    _runtime: Runtime,
}

fn config(version: u64) -> FakeConfig {
    FakeConfig {
        model: MODEL,
        context: CONTEXT,
        version: PolicyVersion(version),
        latency: Duration::from_millis(5),
        ..FakeConfig::default()
    }
}

impl Served {
    fn new(version: u64, manifest: &str) -> Self {
        Self::of(config(version), manifest)
    }

    fn of(config: FakeConfig, manifest: &str) -> Self {
        let version = config.version.0;
        let start = Instant::now();
        let clock = Box::new(move || start.elapsed().as_secs_f64());
        let engine = Arc::new(FakeEngine::threaded(config, clock).unwrap());
        let loaded = Loaded::default();
        loaded.set(id(version), manifest);
        let shared: Arc<dyn Engine> = Arc::<FakeEngine>::clone(&engine);
        let routes = EngineRoutes::new(shared, loaded.clone(), CONTEXT, MODEL.vocab);
        let routes = Arc::new(routes);
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let guard = Guard::new(ConnectionLimits::default(), |_| Some(Key::Operator));
        let router = routes.router();
        runtime.spawn(async move {
            let stop = async { drop(stopped.await) };
            server::serve(listener, router, guard, stop).await;
        });
        Self {
            engine,
            loaded,
            routes,
            address,
            _stop: stop,
            _runtime: runtime,
        }
    }

    fn seat(&self, index: usize) -> EngineAddress {
        EngineAddress {
            id: format!("r-engine-{index}-0"),
            url: format!("http://{}", self.address),
        }
    }

    /// The engine loads other weights between two tokens.
    fn load(&self, version: u64, manifest: &str) {
        let weights = Arc::new(One);
        let loaded = self.engine.load_weights(PolicyVersion(version), weights);
        loaded.unwrap();
        self.loaded.set(id(version), manifest);
    }
}

fn router(seats: &EngineSeats) -> RemoteEngine {
    let mut config = RemoteConfig::new(Box::new(|| 0.5));
    (config.version, config.lineage) = (PolicyVersion(3), Lineage(7));
    config.probe_interval_s = 0.02;
    config.router.follow = true;
    config.router.backoff_s = 0.02;
    RemoteEngine::new(seats.backends(), None, config).unwrap()
}

fn submit(engine: &RemoteEngine, number: u64, max_tokens: u32) -> Receiver<EngineEvent> {
    let sampling = SamplingParams {
        max_tokens,
        seed: number,
        ..SamplingParams::default()
    };
    let request = GenerateRequest::new(RequestId(number), vec![1, 2, 3], sampling);
    let (to, events) = sync_channel(4096);
    let sink = Box::new(move |event| drop(to.send(event)));
    engine.submit(request, sink).unwrap();
    events
}

/// All tokens of a request that must end well.
fn tokens(events: &Receiver<EngineEvent>) -> Vec<SampledToken> {
    let mut all = Vec::new();
    loop {
        match events.recv_timeout(PATIENCE).unwrap() {
            EngineEvent::Tokens { tokens, .. } => all.extend(tokens),
            EngineEvent::Finished { reason, .. } => {
                assert_eq!(reason, FinishReason::Length);
                return all;
            }
            other => panic!("{other:?}"),
        }
    }
}

fn versions(tokens: &[SampledToken]) -> Vec<u64> {
    tokens.iter().map(|t| t.version.0).collect()
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn tokens_of_an_engine_of_the_registry_are_its_own() {
    let served = Served::new(3, "aa");
    let known = KnownWeights::default();
    known.announce(id(3), "aa".into());
    let seats = EngineSeats::new(4, known, "token");
    let engine = router(&seats);
    // It comes after the worker has begun.
    let events = submit(&engine, 1, 20);
    assert!(seats.seat(&[served.seat(0)]).is_empty());
    let tokens = tokens(&events);
    assert_eq!(versions(&tokens), [3; 20]);
    let mut prefix = vec![1, 2, 3];
    for token in &tokens {
        let truth = MODEL.logprob(&prefix, token.id);
        assert!((truth - token.logprob).abs() < 1e-6);
        prefix.push(token.id);
    }
    until("its places are given back", || served.routes.running() == 0);
    assert_eq!(engine.counters().failed_attempts, 0);
}

#[test]
fn only_engines_with_announced_weights_serve() {
    let (wrong, behind) = (Served::new(3, "bb"), Served::new(2, "aa"));
    let known = KnownWeights::default();
    known.announce(id(3), "aa".into());
    let seats = EngineSeats::new(4, known, "token");
    let engine = router(&seats);
    assert!(seats.seat(&[wrong.seat(0), behind.seat(1)]).is_empty());
    until("both were looked at", || {
        let engines = engine.engines();
        let why = |index: usize| {
            engines
                .get(index)
                .and_then(|e| e.idle_because.clone())
                .unwrap_or_default()
        };
        why(0).contains("checksum") && why(1).contains("loading-v2")
    });
    let events = submit(&engine, 1, 4);
    assert!(events.recv_timeout(Duration::from_millis(50)).is_err());
    // It is right from now on, and serves what waited.
    wrong.loaded.set(id(3), "aa");
    assert_eq!(versions(&tokens(&events)), [3; 4]);
    assert_eq!(behind.engine.status().sampled_tokens, 0);
}

#[test]
fn a_request_goes_on_with_new_weights_where_its_engine_loads_them() {
    let served = Served::new(3, "aa");
    let known = KnownWeights::default();
    known.announce(id(3), "aa".into());
    let seats = EngineSeats::new(2, known.clone(), "token");
    let engine = router(&seats);
    assert!(seats.seat(&[served.seat(0)]).is_empty());
    // They take two seconds: the weights come before the last of them, also on a busy machine.
    let events = submit(&engine, 1, 400);
    until("it samples", || engine.counters().sampled_tokens > 2);
    served.load(4, "cc");
    // The worker hears of them a little later.
    until("the attempt ended", || {
        engine.counters().interrupted_attempts > 0
    });
    known.announce(id(4), "cc".into());
    let found = versions(&tokens(&events));
    assert!(found.is_sorted() && found.len() == 400, "{found:?}");
    assert_eq!((found[0], found[399]), (3, 4));
    assert_eq!(engine.status().version, PolicyVersion(4));
}

#[test]
fn an_engine_that_dies_is_left_and_its_calls_are_repeated_elsewhere() {
    // It dies before its requests are over: none of them gets more than these tokens there.
    let hangs = |n| (n, Fault::HangAfter { tokens: 100 });
    let faults = (0..4).map(hangs).collect();
    let dies = Served::of(
        FakeConfig {
            faults,
            ..config(3)
        },
        "aa",
    );
    let stays = Served::new(3, "aa");
    let known = KnownWeights::default();
    known.announce(id(3), "aa".into());
    let seats = EngineSeats::new(2, known, "token");
    let engine = router(&seats);
    assert!(seats.seat(&[dies.seat(0)]).is_empty());
    let running: Vec<_> = (0..4).map(|n| submit(&engine, n, 400)).collect();
    until("all sample", || dies.routes.running() == 4);
    until("tokens came", || engine.counters().sampled_tokens > 20);
    assert!(seats.seat(&[dies.seat(0), stays.seat(1)]).is_empty());
    until("both serve", || {
        let engines = engine.engines();
        engines.iter().all(|e| e.idle_because.is_none())
    });
    drop(dies);
    for events in &running {
        assert_eq!(versions(&tokens(events)), [3; 400]);
    }
    assert!(engine.counters().failovers > 0);
    // Tokens that came before are not sampled again.
    assert!(stays.engine.status().sampled_tokens < 1600);
}

#[test]
fn an_engine_that_leaves_its_seat_ends_what_runs() {
    let served = Served::new(3, "aa");
    let known = KnownWeights::default();
    known.announce(id(3), "aa".into());
    let seats = EngineSeats::new(1, known, "token");
    let engine = router(&seats);
    assert!(seats.seat(&[served.seat(0)]).is_empty());
    // Nothing is sampled before its engine has left.
    served.engine.pause(true);
    let events = submit(&engine, 1, 60);
    until("it runs", || served.routes.running() == 1);
    assert!(seats.seat(&[]).is_empty());
    served.engine.pause(false);
    assert_eq!(tokens(&events).len(), 60);
    assert_eq!(engine.counters().failed_attempts, 0);
    assert_eq!(seats.taken(), 0);
}
