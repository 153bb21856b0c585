//! Many agents at the same time, each calling, thinking and calling again.
//!
//! Load is open: each agent calls, thinks, and calls again, and one that cannot get its turn in time does not
//! call. Latency is from the first byte sent to the last byte read.

use super::client::{Agent, Target};
use super::process::Process;
use super::{PASS, TOKENS};
use crate::BenchError;
use crate::{clock, request};
use sinew_infer::{FakeConfig, FakeEngine};
use sinew_types::{Engine, EngineEvent, RequestId};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::sleep;

/// Load of the agents.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// Agents at the same time.
    pub(super) rollouts: usize,
    /// Time between an answer and the next call.
    pub(super) think: Duration,
    /// Length of the measured time; a call counts if it starts within it.
    pub(super) measured: Duration,
    /// Tokens of an answer.
    pub(super) tokens: u32,
    /// Answers as events.
    pub(super) stream: bool,
    /// Most calls at the same time; an agent without a turn in time does not call.
    pub(super) in_flight: usize,
}

/// Measured times.
#[derive(Debug, Default)]
pub(super) struct Measured {
    /// Latencies of requests, in seconds, sorted.
    pub(super) latencies: Vec<f64>,
    /// CPU seconds of the server.
    pub(super) cpu_s: f64,
}

impl Measured {
    /// Sorts the latencies.
    fn of(mut latencies: Vec<f64>, cpu_s: f64) -> Self {
        latencies.sort_by(f64::total_cmp);
        Self { latencies, cpu_s }
    }

    /// Milliseconds within which a share of the requests was answered.
    pub(super) fn quantile_ms(&self, q: f64) -> f64 {
        let last = self.latencies.len().saturating_sub(1);
        let at = (last as f64 * q).round() as usize;
        self.latencies.get(at).map_or(f64::NAN, |s| s * 1e3)
    }
}

/// Calls a server with the load `load`.
pub(super) async fn drive(
    target: &Target,
    load: &Load,
    process: &Process,
) -> Result<Measured, BenchError> {
    let agents = target.open(load.rollouts).await?;
    let start = Instant::now();
    let cpu = process.cpu_s();
    let room = Arc::new(Semaphore::new(load.in_flight));
    let mut tasks = Vec::with_capacity(agents.len());
    for (index, agent) in agents.into_iter().enumerate() {
        tasks.push(tokio::spawn(agent_loop(
            agent,
            *load,
            offset(load, index),
            start,
            Arc::clone(&room),
        )));
    }
    let mut latencies = Vec::new();
    for task in tasks {
        latencies.extend(task.await.map_err(BenchError::system)??);
    }
    Ok(Measured::of(latencies, process.cpu_s() - cpu))
}

/// Agents start evenly over the time of one call.
fn offset(load: &Load, index: usize) -> Duration {
    let period = load.think + PASS * load.tokens;
    period.mul_f64(index as f64 / load.rollouts as f64)
}

/// One agent until the measurement is over. Gives its latencies in seconds.
async fn agent_loop(
    mut agent: Agent,
    load: Load,
    offset: Duration,
    start: Instant,
    room: Arc<Semaphore>,
) -> Result<Vec<f64>, BenchError> {
    let mut latencies = Vec::new();
    sleep(offset).await;
    while start.elapsed() < load.measured {
        let permit = room.acquire().await.map_err(BenchError::system)?;
        if start.elapsed() >= load.measured {
            break;
        }
        let asked = Instant::now();
        agent.turn(load.tokens, load.stream).await?;
        drop(permit);
        latencies.push(asked.elapsed().as_secs_f64());
        sleep(load.think).await;
    }
    Ok(latencies)
}

/// Runs the same load on the same engine without a gateway, which measures the time that a request takes at
/// least.
pub(super) async fn engine_only(load: &Load) -> Result<Measured, BenchError> {
    let config = FakeConfig {
        max_running: 8192,
        max_waiting: 8192,
        latency: PASS,
        ..FakeConfig::default()
    };
    let engine = FakeEngine::threaded(config, clock()).map_err(BenchError::system)?;
    let engine: Arc<dyn Engine> = Arc::new(engine);
    let start = Instant::now();
    let mut tasks = Vec::with_capacity(load.rollouts);
    for index in 0..load.rollouts {
        let (engine, load) = (Arc::clone(&engine), *load);
        tasks.push(tokio::spawn(async move {
            let mut latencies = Vec::new();
            sleep(offset(&load, index)).await;
            let mut id = (index as u64) << 32;
            while start.elapsed() < load.measured {
                let asked = Instant::now();
                generate(engine.as_ref(), RequestId(id)).await?;
                latencies.push(asked.elapsed().as_secs_f64());
                id += 1;
                sleep(load.think).await;
            }
            Ok::<_, BenchError>(latencies)
        }));
    }
    let mut latencies = Vec::new();
    for task in tasks {
        latencies.extend(task.await.map_err(BenchError::system)??);
    }
    Ok(Measured::of(latencies, 0.0))
}

/// One generation on the engine itself, to see what the gateway adds.
async fn generate(engine: &dyn Engine, id: RequestId) -> Result<(), BenchError> {
    let (sender, mut events) = mpsc::channel(TOKENS as usize + 2);
    let request = request(id.0, vec![1; 256], 0, TOKENS);
    let sink = Box::new(move |event| {
        // The queue has room for every event.
        let _ = sender.try_send(event);
    });
    engine.submit(request, sink).map_err(BenchError::system)?;
    while let Some(event) = events.recv().await {
        match event {
            EngineEvent::Prompt { .. } | EngineEvent::Tokens { .. } => {}
            EngineEvent::Finished { .. } => return Ok(()),
            EngineEvent::Failed { error, .. } => return Err(BenchError::system(error)),
        }
    }
    Err(BenchError::system("the engine dropped a request"))
}
