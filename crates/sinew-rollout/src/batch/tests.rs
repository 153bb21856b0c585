//! The order in which episodes begin, and episodes that are stopped, in virtual time.

use super::*;
use crate::admission::AdmissionConfig;
use crate::episode::EpisodeLimits;
use crate::parts::Harness;
use futures::future::BoxFuture;
use sinew_env::{Action, Env, EnvError, EnvFactory};
use sinew_render::TinyRenderer;
use sinew_store::MemoryStore;
use sinew_types::{
    Engine, EngineError, EngineStatus, EpisodeEnd, EventSink, GenerateRequest, GroupId,
    PolicyVersion, RequestId, SamplingParams, Task, TaskId, TensorSource,
};
use std::sync::Mutex;
use std::time::Duration;

/// Nothing is asked of it.
struct Idle;

impl Engine for Idle {
    fn submit(&self, _: GenerateRequest, _: EventSink) -> Result<(), EngineError> {
        Ok(())
    }

    fn abort(&self, _: RequestId) {}

    fn pause(&self, _: bool) {}

    fn load_weights(&self, _: PolicyVersion, _: Arc<dyn TensorSource>) -> Result<(), EngineError> {
        Ok(())
    }

    fn status(&self) -> EngineStatus {
        EngineStatus::default()
    }
}

impl EnvFactory for Idle {
    fn name(&self) -> &str {
        "idle"
    }

    fn create(&self, _: &Task) -> Result<Box<dyn Env>, EnvError> {
        Err(EnvError::Sandbox("none is made".into()))
    }

    fn gold(&self, _: &Task, _: usize) -> Result<Option<Action>, EnvError> {
        Ok(None)
    }
}

/// Episodes sleep for the seconds in the data of their task.
struct Sleeps(Arc<Mutex<Vec<String>>>);

impl Harness for Sleeps {
    fn name(&self) -> &str {
        "sleeps"
    }

    fn run<'a>(
        &'a self,
        parts: &'a EpisodeParts,
        options: &'a EpisodeOptions,
        spec: &'a EpisodeSpec,
    ) -> BoxFuture<'a, Trace> {
        Box::pin(async move {
            self.0.lock().unwrap().push(spec.episode.to_string());
            let seconds = spec.task.data.as_f64().unwrap();
            tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
            let mut trace = spec.empty_trace(&parts.run, &options.turn_sampling());
            trace.end = EpisodeEnd::Terminated;
            trace.timing.total_s = seconds;
            trace
        })
    }
}

/// Episodes that ask the batch to end, and again a little later, as judges without a budget do.
struct Stops(watch::Sender<bool>);

impl Harness for Stops {
    fn name(&self) -> &str {
        "stops"
    }

    fn run<'a>(
        &'a self,
        _: &'a EpisodeParts,
        _: &'a EpisodeOptions,
        _: &'a EpisodeSpec,
    ) -> BoxFuture<'a, Trace> {
        Box::pin(async move {
            self.0.send_replace(true);
            std::thread::sleep(Duration::from_millis(100));
            self.0.send_replace(true);
            std::future::pending().await
        })
    }
}

fn runner(places: usize, longest_first: bool) -> (Runner, Arc<Mutex<Vec<String>>>) {
    let begun: Arc<Mutex<Vec<String>>> = Arc::default();
    let harness = Arc::new(Sleeps(Arc::clone(&begun)));
    (runner_of(harness, places, longest_first), begun)
}

fn runner_of(harness: Arc<dyn Harness>, places: usize, longest_first: bool) -> Runner {
    let (engine, renderer) = (Arc::new(Idle), Arc::new(TinyRenderer::new("l")));
    let bounds = AdmissionConfig::new(places, 8);
    let parts = EpisodeParts {
        outlook: longest_first.then(Arc::default),
        harness,
        ..EpisodeParts::new(engine, renderer, Arc::new(Idle), bounds)
    };
    let store = Arc::new(MemoryStore::new(1 << 20));
    Runner::new(parts, store, places)
}

/// Groups of `size` episodes that take so many seconds each.
fn start(runner: &mut Runner, seconds: &[f64], size: usize) {
    let hour = Duration::from_secs(3600);
    let options = Arc::new(EpisodeOptions {
        limits: EpisodeLimits {
            max_turns: 1,
            max_turn_tokens: 8,
            max_context_tokens: 64,
        },
        sampling: SamplingParams::default(),
        chunk_tokens: None,
        replay_always: false,
        thinking: sinew_types::Thinking::Kept,
        boot_timeout: hour,
        timeout: hour,
        score_timeout: hour,
    });
    let specs = seconds.iter().enumerate().flat_map(|(task, seconds)| {
        (0..size).map(move |k| EpisodeSpec {
            episode: EpisodeId::new(format!("{task}-{k}")),
            group: GroupId::new(task.to_string()),
            task: Task {
                id: TaskId::new(format!("t{task}")),
                kind: "k".into(),
                data: serde_json::json!(seconds),
                ..Task::default()
            },
            draw: 0,
            purpose: "train".into(),
            seed: 0,
        })
    });
    runner.start(specs.collect(), &options).unwrap();
}

/// Runs all to their ends; gives those that were reported, sorted.
async fn ends(runner: &mut Runner) -> Vec<String> {
    let (_stop, mut cancel) = watch::channel(false);
    let mut all = Vec::new();
    while runner.is_running() {
        let ended = runner.ended(&mut cancel).await.unwrap();
        all.extend(ended.iter().map(|f| f.trace.episode.to_string()));
    }
    all.sort();
    all
}

/// One of each group first, then the rest of the group that takes longest; the plain order is that of the
/// draws. Either way every episode is run once.
#[tokio::test(start_paused = true)]
async fn the_longest_begin_first_once_they_are_known() {
    let seconds = [1.0, 8.0, 3.0];
    let mut orders = Vec::new();
    for longest_first in [false, true] {
        let (mut runner, begun) = runner(3, longest_first);
        start(&mut runner, &seconds, 3);
        assert_eq!(ends(&mut runner).await.len(), 9);
        orders.push(begun.lock().unwrap().join(" "));
    }
    assert_eq!(orders[0], "0-0 0-1 0-2 1-0 1-1 1-2 2-0 2-1 2-2");
    // The first second shows that group 0 is short. Groups 1 and 2 still run then, and 1 was drawn before 2.
    // After three seconds group 1 still runs.
    assert_eq!(orders[1], "0-0 1-0 2-0 1-1 1-2 2-1 2-2 0-1 0-2");
}

/// A stopped episode neither begins nor is reported or stored, and its place is free at once.
#[tokio::test(start_paused = true)]
async fn what_is_stopped_is_not_heard_of_again() {
    let (mut runner, begun) = runner(2, true);
    start(&mut runner, &[1.0, 900.0, 3.0], 2);
    let (_stop, mut cancel) = watch::channel(false);
    let first = runner.ended(&mut cancel).await.unwrap();
    assert_eq!(first[0].trace.episode.as_str(), "0-0");
    let stopped = ["1-0", "1-1", "2-1"].map(EpisodeId::new);
    runner.stop(&stopped);
    let started = tokio::time::Instant::now();
    assert_eq!(ends(&mut runner).await, ["0-1", "2-0"]);
    assert!(started.elapsed() < Duration::from_secs(10));
    let begun = begun.lock().unwrap();
    assert!(!begun.iter().any(|e| e == "2-1"), "{begun:?}");
    for episode in &stopped {
        assert!(runner.store.get(episode).unwrap().is_none(), "{episode}");
    }
}

/// A batch that ends does not wait for an episode that waits to report that the batch is to end.
#[test]
fn episodes_that_ask_for_the_end_together_do_not_block_it() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let (stop, mut cancel) = watch::channel(false);
    let handle = runtime.handle().clone();
    let ended = handle.block_on(async {
        let mut runner = runner_of(Arc::new(Stops(stop)), 4, false);
        start(&mut runner, &[0.0, 0.0], 2);
        let ended = runner.ended(&mut cancel);
        tokio::time::timeout(Duration::from_secs(300), ended).await
    });
    // A thread that is blocked would be waited for.
    runtime.shutdown_background();
    assert!(
        matches!(ended, Ok(Err(BatchError::Cancelled))),
        "{}",
        ended.is_err()
    );
}
