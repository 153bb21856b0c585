//! The threaded engine over a forward pass without a model.

use crate::{PATIENCE, channel, collect, ids, request};
use sinew_infer::testing::{HashForward, HashWeights};
use sinew_infer::{
    AdapterSlot, Batch, BlockCopy, DeviceError, EmbeddedEngine, EngineConfig, Forward,
    ForwardLimits, SchedulerConfig, TokenBytes,
};
use sinew_types::{
    Adapter, AdapterName, Engine, EngineError, EngineEvent, FinishReason, PolicyVersion, RequestId,
    TensorList, TensorSource, TensorView,
};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

const LIMITS: ForwardLimits = ForwardLimits {
    vocab: 16,
    context: 4000,
    block_tokens: 4,
    blocks: 2000,
};

fn engine_of(forward: impl Forward + 'static, config: EngineConfig) -> EmbeddedEngine {
    let bytes = TokenBytes::new((0..16u8).map(|i| [b'a' + i]));
    EmbeddedEngine::new(forward, config, Some(bytes), Box::new(|| 0.0)).unwrap()
}

fn engine() -> EmbeddedEngine {
    engine_of(HashForward::new(LIMITS), EngineConfig::default())
}

/// Runs one pass for each ticket it gets, so that tests decide how far the engine is.
struct Gated {
    inner: HashForward,
    tickets: Receiver<()>,
}

impl Gated {
    fn new() -> (Self, SyncSender<()>) {
        let (send, tickets) = sync_channel(1000);
        let inner = HashForward::new(LIMITS);
        (Self { inner, tickets }, send)
    }
}

impl Forward for Gated {
    fn limits(&self) -> ForwardLimits {
        self.inner.limits()
    }
    fn copy_block(&mut self, copy: BlockCopy) {
        self.inner.copy_block(copy);
    }
    fn logits(&mut self, batch: &Batch) -> Result<&[f32], DeviceError> {
        // The engine runs freely when no tickets are left and the test that gives them has ended.
        let _ = self.tickets.recv();
        self.inner.logits(batch)
    }
    fn load_weights(&mut self, weights: &dyn TensorSource) -> Result<(), DeviceError> {
        self.inner.load_weights(weights)
    }
    fn load_adapter(&mut self, slot: AdapterSlot, adapter: &Adapter) -> Result<(), DeviceError> {
        self.inner.load_adapter(slot, adapter)
    }
}

#[test]
fn the_same_seed_gives_the_same_tokens_whatever_else_runs() {
    let alone = engine();
    let (sink, events) = channel();
    alone.submit(request(1, &[1, 2, 3], 50), sink).unwrap();
    let (expected, _) = collect(&events);

    let busy = engine();
    let receivers: Vec<_> = (0..40)
        .map(|id| {
            let (sink, events) = channel();
            let prompt = if id % 3 == 1 {
                vec![1, 2, 3]
            } else {
                vec![id as u32 % 16; 9]
            };
            busy.submit(request(id, &prompt, 50), sink).unwrap();
            events
        })
        .collect();
    let answers: Vec<_> = receivers.iter().map(collect).collect();
    assert_eq!(ids(&answers[1].0), ids(&expected));
    assert_ne!(ids(&answers[4].0), ids(&expected), "another seed");
    assert!(
        answers
            .iter()
            .all(|(_, end)| *end == Ok(FinishReason::Length))
    );
}

#[test]
fn stop_strings_are_found_across_tokens() {
    let engine = engine();
    let (sink, events) = channel();
    engine.submit(request(1, &[1, 2], 60), sink).unwrap();
    let (free, _) = collect(&events);
    let text: String = free.iter().map(|t| (b'a' + t.id as u8) as char).collect();
    let stop = text[20..23].to_owned();
    let mut r = request(1, &[1, 2], 60);
    r.sampling.stop_strings = vec![stop.clone()];
    let (sink, events) = channel();
    engine.submit(r, sink).unwrap();
    let (stopped, end) = collect(&events);
    assert_eq!(end, Ok(FinishReason::StopString { text: stop.clone() }));
    let at = text.find(&stop).unwrap() + 3;
    assert_eq!(ids(&stopped), ids(&free[..at]));
}

#[test]
fn refusals_are_immediate_and_specific() {
    let engine = engine();
    let refuse = |r| engine.submit(r, channel().0).unwrap_err();
    assert!(matches!(
        refuse(request(1, &[16], 1)),
        EngineError::UnknownToken { id: 16, .. }
    ));
    let long = refuse(request(1, &[1; 4000], 1));
    assert!(matches!(long, EngineError::PromptTooLong { .. }));
    let mut r = request(1, &[1], 1);
    r.sampling.top_p = 2.0;
    assert!(matches!(refuse(r), EngineError::InvalidSampling { name, .. } if name == "top_p"));
}

#[test]
fn a_full_queue_and_a_used_id_are_refused() {
    let (forward, tickets) = Gated::new();
    let config = EngineConfig {
        max_waiting: 2,
        ..EngineConfig::default()
    };
    let engine = engine_of(forward, config);
    engine.pause(true);
    let mut kept = Vec::new();
    for id in 0..2 {
        let (sink, events) = channel();
        engine.submit(request(id, &[1], 1), sink).unwrap();
        kept.push(events);
    }
    assert_eq!(engine.status().waiting, 2);
    let refused = engine.submit(request(2, &[1], 1), channel().0);
    let (waiting, limit) = (2, 2);
    assert_eq!(refused, Err(EngineError::QueueFull { waiting, limit }));
    engine.abort(RequestId(0));
    assert_eq!(collect(&kept[0]).1, Ok(FinishReason::Aborted));
    let used = engine.submit(request(1, &[1], 1), channel().0).unwrap_err();
    assert!(used.to_string().contains("request id 1"), "{used}");
    drop(tickets);
    engine.pause(false);
    assert_eq!(collect(&kept[1]).1, Ok(FinishReason::Length));
}

#[test]
fn weights_swap_between_two_tokens_also_while_paused() {
    let (forward, tickets) = Gated::new();
    let engine = engine_of(forward, EngineConfig::default());
    let (sink, events) = channel();
    for _ in 0..3 {
        tickets.send(()).unwrap();
    }
    engine.submit(request(1, &[1, 2, 3], 8), sink).unwrap();
    for _ in 0..3 {
        events.recv_timeout(PATIENCE).unwrap();
    }
    // The engine may already be inside its fourth pass; it finishes that one first.
    engine.pause(true);
    tickets.send(()).unwrap();
    engine
        .load_weights(PolicyVersion(9), Arc::new(HashWeights([9.0])))
        .unwrap();
    assert_eq!(engine.status().version, PolicyVersion(9));
    drop(tickets);
    engine.pause(false);
    let (rest, end) = collect(&events);
    assert_eq!(end, Ok(FinishReason::Length));
    assert_eq!(rest.len(), 5);
    assert!(
        rest[1..].iter().all(|t| t.version == PolicyVersion(9)),
        "{rest:?}"
    );
}

/// A replaced adapter samples from the next token on, and one that is dropped ends its requests: also while
/// the engine is paused.
#[test]
fn adapters_change_between_two_tokens() {
    let (forward, tickets) = Gated::new();
    let engine = engine_of(forward, EngineConfig::default());
    let name = AdapterName::new("a").unwrap();
    let unknown = Err(EngineError::UnknownAdapter { name: name.clone() });
    let asks = |id| {
        let mut request = request(id, &[1, 2, 3], 8);
        request.adapter = Some(name.clone());
        request
    };
    assert_eq!(engine.submit(asks(1), channel().0), unknown);
    let load = |version: u64| {
        let adapter = HashWeights::adapter(version as f32);
        engine.load_adapter(&name, PolicyVersion(version), adapter)
    };
    load(4).unwrap();
    let (sink, events) = channel();
    (0..3).for_each(|_| tickets.send(()).unwrap());
    engine.submit(asks(1), sink).unwrap();
    for _ in 0..3 {
        events.recv_timeout(PATIENCE).unwrap();
    }
    // The engine may already be inside its fourth pass; it finishes that one first.
    engine.pause(true);
    tickets.send(()).unwrap();
    load(9).unwrap();
    assert_eq!(engine.status().version, PolicyVersion(0), "its own weights");
    let (sink, dropped) = channel();
    engine.submit(asks(2), sink).unwrap();
    drop(tickets);
    engine.pause(false);
    let (rest, end) = collect(&events);
    assert_eq!((rest.len(), end), (5, Ok(FinishReason::Length)));
    assert!(rest[1..].iter().all(|t| t.version == PolicyVersion(9)));
    assert_eq!(collect(&dropped).1, Ok(FinishReason::Length));
    engine.pause(true);
    let (sink, dropped) = channel();
    engine.submit(asks(3), sink).unwrap();
    engine.unload_adapter(&name).unwrap();
    engine.unload_adapter(&name).unwrap();
    assert_eq!(collect(&dropped).1.map(|_| ()), unknown);
    assert_eq!(engine.submit(asks(4), channel().0), unknown);
}

#[test]
fn adapters_that_do_not_fit_are_refused_by_name() {
    let name = |text: &str| AdapterName::new(text).unwrap();
    let config = EngineConfig {
        scheduler: SchedulerConfig {
            max_adapters: 1,
            ..SchedulerConfig::default()
        },
        ..EngineConfig::default()
    };
    let engine = engine_of(HashForward::new(LIMITS), config);
    let load = |text: &str| {
        let adapter = HashWeights::adapter(1.0);
        engine.load_adapter(&name(text), PolicyVersion(1), adapter)
    };
    load("a").unwrap();
    let refused = load("b").unwrap_err().to_string();
    assert!(refused.contains("adapter b") && refused.contains("max_adapters = 1"));
    // A device without adapters.
    let engine = engine_of(
        Panicking(HashForward::new(LIMITS), 0),
        EngineConfig::default(),
    );
    let refused = engine.load_adapter(&name("a"), PolicyVersion(1), HashWeights::adapter(1.0));
    assert!(
        matches!(&refused, Err(EngineError::Weights(why)) if why.contains("without adapters")),
        "{refused:?}"
    );
}

#[test]
fn refused_weights_are_reported_and_the_old_ones_stay() {
    let view = TensorView::f32(&[2], &[1.0, 2.0]).unwrap();
    let wrong = TensorList(vec![("number".into(), view)]);
    let engine = engine();
    let refused = engine.load_weights(PolicyVersion(1), Arc::new(wrong));
    assert!(
        matches!(&refused, Err(EngineError::Weights(why)) if why.contains("[2]")),
        "{refused:?}"
    );
    assert_eq!(engine.status().version, PolicyVersion(0));
}

/// Panics in its third pass.
struct Panicking(HashForward, u32);

impl Forward for Panicking {
    fn limits(&self) -> ForwardLimits {
        self.0.limits()
    }
    fn copy_block(&mut self, copy: BlockCopy) {
        self.0.copy_block(copy);
    }
    fn logits(&mut self, batch: &Batch) -> Result<&[f32], DeviceError> {
        self.1 += 1;
        assert!(self.1 < 3, "pass {} went wrong", self.1);
        self.0.logits(batch)
    }
    fn load_weights(&mut self, _: &dyn TensorSource) -> Result<(), DeviceError> {
        panic!("weights went wrong")
    }
}

#[test]
fn a_panic_stops_the_engine_for_everyone_and_hangs_nobody() {
    let engine = engine_of(
        Panicking(HashForward::new(LIMITS), 0),
        EngineConfig::default(),
    );
    let (a, events_a) = channel();
    let (b, events_b) = channel();
    engine.submit(request(1, &[1], 100), a).unwrap();
    // The engine may have stopped by now; then the refusal reports that.
    let second = engine.submit(request(2, &[2], 100), b);
    let (_, end) = collect(&events_a);
    let stopped = |e: &EngineError| matches!(e, EngineError::Stopped(why) if why.contains("pass 3 went wrong"));
    assert!(end.is_err_and(|e| stopped(&e)));
    match second {
        Ok(()) => assert!(collect(&events_b).1.is_err_and(|e| stopped(&e))),
        Err(e) => assert!(stopped(&e), "{e}"),
    }
    let late = engine.submit(request(3, &[1], 1), channel().0);
    assert!(late.is_err_and(|e| stopped(&e)));
    let load = engine.load_weights(PolicyVersion(1), Arc::new(HashWeights([1.0])));
    assert!(load.is_err_and(|e| stopped(&e)));
}

#[test]
fn a_panic_while_weights_load_answers_the_caller() {
    let engine = engine_of(
        Panicking(HashForward::new(LIMITS), 0),
        EngineConfig::default(),
    );
    let load = engine.load_weights(PolicyVersion(1), Arc::new(HashWeights([1.0])));
    assert!(matches!(load, Err(EngineError::Stopped(_))), "{load:?}");
}

#[test]
fn dropping_the_engine_ends_its_requests() {
    let (forward, tickets) = Gated::new();
    let engine = engine_of(forward, EngineConfig::default());
    let (sink, events) = channel();
    engine.submit(request(1, &[1], 1000), sink).unwrap();
    tickets.send(()).unwrap();
    events.recv_timeout(PATIENCE).unwrap();
    drop(tickets);
    drop(engine);
    let (_, end) = collect(&events);
    // It ran freely once the tickets were gone, and may have come to its end.
    assert!(
        matches!(end, Err(EngineError::Stopped(_)) | Ok(FinishReason::Length)),
        "{end:?}"
    );
    assert!(events.recv().is_err(), "nothing follows the last event");
}

#[test]
fn a_sink_may_submit_abort_and_drop_the_engine() {
    let engine = Arc::new(Mutex::new(Some(engine())));
    let (last, done) = sync_channel(10);
    let (next_sink, next_events) = channel();
    let handle = Arc::clone(&engine);
    let mut next_sink = Some(next_sink);
    let sink = Box::new(move |event| {
        let EngineEvent::Finished { .. } = event else {
            return;
        };
        let engine = handle.lock().unwrap().take().unwrap();
        let weights = Arc::new(HashWeights([1.0]));
        let refused = engine.load_weights(PolicyVersion(1), weights);
        if let Some(sink) = next_sink.take() {
            engine.submit(request(2, &[1, 2], 3), sink).unwrap();
            engine.abort(RequestId(2));
        }
        drop(engine);
        last.send(refused).unwrap();
    });
    let first = request(1, &[1], 3);
    engine
        .lock()
        .unwrap()
        .as_ref()
        .unwrap()
        .submit(first, sink)
        .unwrap();
    let refused = done.recv_timeout(PATIENCE).unwrap();
    assert!(
        matches!(refused, Err(EngineError::Weights(_))),
        "{refused:?}"
    );
    let (_, end) = collect(&next_events);
    assert!(matches!(end, Err(EngineError::Stopped(_))), "{end:?}");
}

#[test]
fn a_panicking_sink_harms_only_its_own_request() {
    let engine = engine();
    let broken = Box::new(|_| panic!("this sink is broken"));
    engine.submit(request(1, &[1], 500), broken).unwrap();
    let (sink, events) = channel();
    engine.submit(request(2, &[2], 50), sink).unwrap();
    let (tokens, end) = collect(&events);
    assert_eq!((tokens.len(), end), (50, Ok(FinishReason::Length)));
    // Its id is free again.
    let (sink, events) = channel();
    engine.submit(request(1, &[1], 5), sink).unwrap();
    assert_eq!(collect(&events).1, Ok(FinishReason::Length));
}

#[test]
fn busy_time_is_measured_with_the_clock_given() {
    let ticks = Mutex::new(0.0);
    let clock = Box::new(move || {
        let mut now = ticks.lock().unwrap();
        *now += 1.0;
        *now
    });
    let forward = HashForward::new(LIMITS);
    let engine = EmbeddedEngine::new(forward, EngineConfig::default(), None, clock).unwrap();
    let (sink, events) = channel();
    engine.submit(request(1, &[1, 2], 10), sink).unwrap();
    assert_eq!(collect(&events).1, Ok(FinishReason::Length));
    let status = engine.status();
    assert_eq!(status.busy_s, 10.0);
    assert_eq!((status.sampled_tokens, status.prefill_tokens), (10, 2));
    assert_eq!((status.running, status.waiting), (0, 0));
}
