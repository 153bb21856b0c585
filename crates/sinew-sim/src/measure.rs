//! Measures a simulation: counters while it runs, a report at the end.
//!
//! Figures are of the updates after the warm-up; shares over time are sums of the values between two looks, a
//! quarter of a second apart.

use crate::agenda::{Micros, seconds};
use crate::plan::{Plan, RoleKind};
use serde::Serialize;
use sinew_rollout::AdmissionReading;
use sinew_types::Trace;
use std::collections::BTreeMap;

/// Points of the curves of a report, at most.
const MAX_GAUGES: usize = 400;
/// Times of episodes that are kept for percentiles.
const MAX_TIMES: usize = 1 << 20;

/// Ids of all nodes of a trace.
pub(crate) fn tokens_of(trace: &Trace) -> usize {
    trace.nodes.iter().map(|n| n.tokens.len()).sum()
}

/// Counters at the end of an update.
#[derive(Clone, Copy, Debug, Default)]
struct Point {
    /// Virtual time of the point.
    at: Micros,
    /// Seconds that engines computed.
    busy_s: f64,
    /// Seconds that the trainer computed.
    train_s: f64,
    /// Ids that were sampled.
    sampled: u64,
    /// Episodes that are trained.
    trained: u64,
    /// Tokens that the trainer computed, and those of them that it trained: the sampled ones.
    computed_tokens: f64,
    trained_tokens: f64,
    /// Episodes that are over.
    ended: u64,
    /// Integral over time of episodes in tools.
    acting: f64,
    /// Integral over time of episodes that have begun.
    begun: f64,
    /// Sequences that generate.
    running: f64,
    /// Seconds that the integrals are over.
    looks: f64,
}

/// Occupancy at a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gauge {
    /// Virtual seconds since the start.
    pub at_s: f64,
    /// Requests on engines.
    pub generating: usize,
    /// Episodes in tools.
    pub acting: usize,
    /// Episodes that wait to begin.
    pub waiting: usize,
    /// The trainer computed.
    pub trains: bool,
}

/// The counters.
#[derive(Debug, Default)]
pub(crate) struct Measure {
    /// Happenings so far.
    pub(crate) events: u64,
    /// Calls into the real cores.
    pub(crate) inputs: u64,
    /// Ids that engines sampled.
    pub(crate) sampled: u64,
    /// Episodes that are trained.
    pub(crate) trained: u64,
    /// Episodes that are left out.
    pub(crate) dropped: u64,
    /// Sessions of the run so far.
    pub(crate) sessions: u32,
    /// Updates that are left out.
    warm_up: u64,
    /// The virtual time.
    now: Point,
    /// Counters at the end of each update.
    steps: Vec<(u64, Point)>,
    /// Trained episodes by their age.
    staleness: BTreeMap<u64, u64>,
    /// Seconds of episodes.
    times: Vec<f32>,
    /// Points of the curves.
    gauges: Vec<Gauge>,
    /// Looks for each point.
    stride: u32,
    /// Looks since the last point.
    skipped: u32,
    /// Time of the last look.
    last_look: Micros,
}

impl Measure {
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            warm_up: plan.run.warm_up,
            stride: 1,
            sessions: 1,
            ..Self::default()
        }
    }

    fn warm(&self) -> bool {
        self.steps.len() as u64 >= self.warm_up
    }

    /// An episode is over.
    pub(crate) fn episode(&mut self, began: Micros, now: Micros, trace: &Trace) {
        self.now.ended += 1;
        if self.warm() && self.times.len() < MAX_TIMES && !trace.nodes.is_empty() {
            self.times.push(seconds(now - began) as f32);
        }
    }

    /// Records the start of an update, with rows that are a given number of updates behind.
    pub(crate) fn update(&mut self, (computed, trained): (f64, f64), train_s: f64, behind: &[u64]) {
        self.now.train_s += train_s;
        self.now.computed_tokens += computed;
        self.now.trained_tokens += trained;
        if self.warm() {
            for age in behind {
                *self.staleness.entry(*age).or_default() += 1;
            }
        }
    }

    /// Samples the current state.
    pub(crate) fn gauge(
        &mut self,
        now: Micros,
        reading: &AdmissionReading,
        running: usize,
        trains: bool,
    ) {
        let past_s = seconds(now - self.last_look);
        self.last_look = now;
        let begun = reading.starting + reading.generating + reading.acting + reading.paused;
        self.now.acting += reading.acting as f64 * past_s;
        self.now.begun += begun as f64 * past_s;
        self.now.running += running as f64 * past_s;
        self.now.looks += past_s;
        self.skipped += 1;
        if self.skipped < self.stride {
            return;
        }
        self.skipped = 0;
        if self.gauges.len() >= MAX_GAUGES {
            let mut keeps = false;
            self.gauges.retain(|_| {
                keeps = !keeps;
                keeps
            });
            self.stride *= 2;
        }
        self.gauges.push(Gauge {
            at_s: seconds(now),
            generating: running,
            acting: reading.acting,
            waiting: reading.new,
            trains,
        });
    }

    /// An update is over.
    pub(crate) fn step(&mut self, step: u64, now: Micros, busy_s: f64) {
        self.point(now, busy_s);
        self.steps.push((step, self.now));
    }

    /// Records the counters.
    fn point(&mut self, now: Micros, busy_s: f64) {
        self.now.at = now;
        self.now.busy_s = busy_s;
        self.now.sampled = self.sampled;
        self.now.trained = self.trained;
    }

    /// The simulation is over.
    pub(crate) fn end(&mut self, now: Micros) {
        self.now.at = self.now.at.max(now);
    }

    /// The figures of a plan. They cover the whole time if there are too few updates.
    pub(crate) fn report(&self, plan: &Plan, busy_s: f64) -> Report {
        let last = Point {
            busy_s,
            sampled: self.sampled,
            trained: self.trained,
            ..self.now
        };
        let skipped = self.warm_up as usize;
        let (from, to, updates) = if self.steps.len() > skipped {
            let from = skipped
                .checked_sub(1)
                .map_or(Point::default(), |n| self.steps[n].1);
            let to = self.steps[self.steps.len() - 1].1;
            (from, to, self.steps.len() - skipped)
        } else {
            (Point::default(), last, self.steps.len())
        };
        let window_s = seconds(to.at - from.at).max(1e-9);
        let throughput = self.throughput(plan, (from, to), updates, window_s);
        Report {
            name: plan.name.clone(),
            seed: plan.seed,
            virtual_s: seconds(last.at),
            window_s,
            updates: self.steps.len() as u64,
            sessions: self.sessions,
            events: self.events,
            inputs: self.inputs,
            grain: plan.grain(),
            utilization: utilization(plan, (from, to), window_s),
            cost: cost(plan, &throughput, window_s),
            throughput,
            staleness: self
                .staleness
                .iter()
                .map(|(age, n)| (age.to_string(), *n))
                .collect(),
            tail: Tail {
                episode_s: Percentiles::of(self.times.iter().map(|t| f64::from(*t)).collect()),
                step_s: Percentiles::of(self.step_times(skipped)),
            },
            trained: self.trained,
            dropped: self.dropped,
            lost_s: 0.0,
            roles: Vec::new(),
            next: Vec::new(),
            gauges: self.gauges.clone(),
            steps_s: self.step_times(0),
            work: Work::default(),
        }
    }

    /// Seconds of each update.
    fn step_times(&self, skipped: usize) -> Vec<f64> {
        let ends = self.steps.iter().map(|(_, p)| seconds(p.at));
        let begins = std::iter::once(0.0).chain(ends.clone());
        ends.zip(begins)
            .skip(skipped)
            .map(|(end, begin)| end - begin)
            .collect()
    }

    /// Rates of a window.
    fn throughput(
        &self,
        plan: &Plan,
        (from, to): (Point, Point),
        updates: usize,
        window_s: f64,
    ) -> Throughput {
        let grain = plan.grain() as f64;
        Throughput {
            sampled_tokens_per_s: (to.sampled - from.sampled) as f64 * grain / window_s,
            trained_tokens_per_s: (to.trained_tokens - from.trained_tokens) / window_s,
            computed_tokens_per_s: (to.computed_tokens - from.computed_tokens) / window_s,
            episodes_per_s: (to.ended - from.ended) as f64 / window_s,
            trained_per_s: (to.trained - from.trained) as f64 / window_s,
            updates_per_h: updates as f64 * 3600.0 / window_s,
        }
    }
}

/// Shares of a window.
fn utilization(plan: &Plan, (from, to): (Point, Point), window_s: f64) -> Utilization {
    let engines = plan.engines.count as f64;
    let looks = (to.looks - from.looks).max(1e-9);
    let places = plan.places() as f64;
    let batch = (to.running - from.running) / looks / engines / plan.engines.max_running as f64;
    Utilization {
        engines: ((to.busy_s - from.busy_s) / (window_s * engines)).clamp(0.0, 1.0),
        batch,
        tools: (to.acting - from.acting) / looks / places,
        sandboxes: (to.begun - from.begun) / looks / places,
        trainer: ((to.train_s - from.train_s) / window_s).clamp(0.0, 1.0),
    }
}

/// Costs of a window.
fn cost(plan: &Plan, throughput: &Throughput, window_s: f64) -> Cost {
    let p = &plan.prices;
    // Successors are rented at once, so that a role costs the same whether its units are up or start.
    let roles = plan.roles.iter();
    let roles: f64 = roles.map(|r| r.count as f64 * r.price_per_hour).sum();
    let engines = plan.engines.count as f64 * plan.engines.devices * p.engine_device_hour;
    let trainer = if plan.trainer.colocated {
        // The same devices.
        0.0
    } else {
        plan.trainer.devices * p.trainer_device_hour
    };
    // Prices of kinds that roles have are 0: such a plan is refused otherwise.
    let per_hour = roles + engines + trainer + plan.tools.sandboxes as f64 * p.sandbox_hour;
    throughput.cost(per_hour, window_s)
}

/// Shares of the time, 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Utilization {
    /// Share of the time of all engines in which they compute.
    pub engines: f64,
    /// Sequences of a pass, of those that it may have.
    pub batch: f64,
    /// Places for episodes whose tool is at work.
    pub tools: f64,
    /// Places that hold an episode.
    pub sandboxes: f64,
    /// Time in which the trainer computes.
    pub trainer: f64,
}

/// Rates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Throughput {
    /// Tokens that engines sample, a second.
    pub sampled_tokens_per_s: f64,
    /// Tokens with weight in the loss, a second: those of trained rows that were sampled.
    pub trained_tokens_per_s: f64,
    /// Tokens that the trainer computes, a second: prompts and observations of trained rows included.
    pub computed_tokens_per_s: f64,
    /// Episodes that end, a second.
    pub episodes_per_s: f64,
    /// Trained episodes a second.
    pub trained_per_s: f64,
    /// Optimizer updates an hour.
    pub updates_per_h: f64,
}

impl Throughput {
    /// Costs at a rent of all machines for an hour.
    pub(crate) fn cost(&self, per_hour: f64, window_s: f64) -> Cost {
        let over = |rate: f64| if rate > 0.0 { per_hour / rate } else { 0.0 };
        Cost {
            per_hour,
            total: per_hour * window_s / 3600.0,
            trained_tokens_per_unit: if per_hour > 0.0 {
                self.trained_tokens_per_s * 3600.0 / per_hour
            } else {
                0.0
            },
            per_update: over(self.updates_per_h),
            per_million_trained_tokens: over(self.trained_tokens_per_s * 3600.0) * 1e6,
        }
    }
}

/// Costs in the currency of the prices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    /// Rent of all machines for an hour.
    pub per_hour: f64,
    /// Rent of all machines for the time of the figures.
    pub total: f64,
    /// Tokens with weight in the loss for one unit of the currency.
    pub trained_tokens_per_unit: f64,
    /// Cost of one optimizer update.
    pub per_update: f64,
    /// Cost of a million tokens with weight in the loss.
    pub per_million_trained_tokens: f64,
}

/// Percentiles of a set of times, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Half of them are below.
    pub p50: f64,
    /// 95 of 100 are below.
    pub p95: f64,
    /// 99 of 100 are below.
    pub p99: f64,
    /// Sum over count.
    pub mean: f64,
}

impl Percentiles {
    /// Percentiles of these values.
    fn of(mut values: Vec<f64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_by(f64::total_cmp);
        let at = |q: f64| values[((values.len() - 1) as f64 * q).round() as usize];
        Self {
            p50: at(0.5),
            p95: at(0.95),
            p99: at(0.99),
            mean: values.iter().sum::<f64>() / values.len() as f64,
        }
    }
}

/// The slow ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Tail {
    /// Time of an episode from its start to its end.
    pub episode_s: Percentiles,
    /// Time from one update to the next.
    pub step_s: Percentiles,
}

/// Use of a role over a simulation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoleUse {
    pub kind: RoleKind,
    /// Host of its units.
    pub host: String,
    pub units: usize,
    /// Share of its units' time in which they compute, or of their places that are taken; none of scorers.
    pub utilization: Option<f64>,
    /// Share of the time in which its units are up.
    pub up: f64,
    /// Losses of its units.
    pub losses: u64,
    /// Rent of all its units for an hour; the mean where prices or counts change.
    pub per_hour: f64,
    /// Its counts, where they follow its work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<RoleScaling>,
}

/// Counts of a role that follow its work, over a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RoleScaling {
    /// Mean number of units that cost something.
    pub mean: f64,
    /// Least and most units that were wanted, and those at the end.
    pub least: usize,
    pub most: usize,
    pub last: usize,
    /// Changes of the wanted number, and those of them in the other direction than the one before.
    pub changes: u64,
    pub reversals: u64,
}

/// The plan with one more unit of a resource, compared with the original plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Variant {
    /// The addition.
    pub what: String,
    /// Optimizer updates an hour.
    pub updates_per_h: f64,
    /// Times as many updates an hour.
    pub gain: f64,
    /// Cost of one optimizer update.
    pub cost_per_update: f64,
}

/// Result of simulating a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub name: String,
    /// Seed of all random numbers.
    pub seed: u64,
    pub virtual_s: f64,
    /// Seconds that the figures are of, without the warm-up.
    pub window_s: f64,
    /// Committed updates.
    pub updates: u64,
    /// Sessions of the run: more than one after a kill.
    pub sessions: u32,
    /// Happenings of the simulation, and calls into the real cores.
    pub events: u64,
    pub inputs: u64,
    /// Tokens that an id of the simulation stood for.
    pub grain: usize,
    pub utilization: Utilization,
    pub throughput: Throughput,
    /// Trained episodes by the updates that they are behind.
    pub staleness: BTreeMap<String, u64>,
    pub tail: Tail,
    pub cost: Cost,
    /// Episodes that are trained.
    pub trained: u64,
    /// Episodes that are left out.
    pub dropped: u64,
    /// Seconds of episodes and of training that losses of units destroyed.
    pub lost_s: f64,
    /// Use of each role of the plan, over the whole simulation.
    pub roles: Vec<RoleUse>,
    /// Proposed additions, the largest gain first.
    pub next: Vec<Variant>,
    #[serde(skip)]
    pub gauges: Vec<Gauge>,
    /// Seconds of each update.
    #[serde(skip)]
    pub steps_s: Vec<f64>,
    /// Work of all engines.
    #[serde(skip)]
    pub work: Work,
}

/// Work of all engines since the beginning, in ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Passes; none with `engines.model = "curves"`, which has no single passes.
    pub passes: u64,
    /// Sampled ids.
    pub sampled: u64,
    /// Computed ids of prompts.
    pub prefilled: u64,
}
