//! An engine as curves: continuous batching without single passes.
//!
//! All sequences that generate advance together, an id each in the time that the batch needs, so that one
//! number is the progress of all. Prompts are computed one after the other in the remaining room of a pass,
//! and slow the batch down meanwhile. Something changes only where an attempt comes, ends, has its prompt, or
//! finds no room in the cache: these times are computed, and nothing happens between them.

use super::cache::Cache;
use super::{AttemptNews, Job, Load, Speed, drawn};
use crate::agenda::{Micros, micros, seconds};
use sinew_engines::AttemptId;
use sinew_types::{SpreadMap, finalize64};
use std::collections::{BTreeSet, VecDeque};

/// Rounding of progress in ids.
const CLOSE: f64 = 1e-6;

/// A sequence that generates.
#[derive(Debug)]
struct Running {
    job: Job,
    /// Progress of the batch when it joined, less the ids that it had sampled by then.
    from: f64,
    /// Ids that were reported.
    told: usize,
    /// Order in which it came.
    arrival: u64,
    /// Ids of its prompt that the cache had.
    cached: usize,
}

/// An attempt before its first id. One that lost its room has sampled some already.
#[derive(Debug)]
struct Waiting {
    job: Job,
    /// Ids that were sampled.
    sampled: usize,
    /// Ids that were reported.
    told: usize,
    /// Order in which it came.
    arrival: u64,
    /// Ids of its prompt that the cache had when it first ran.
    cached: Option<usize>,
    /// Ids of prompt that are still to be computed.
    left: f64,
}

/// The engine.
#[derive(Debug)]
pub(super) struct Curves {
    /// Times and sizes of an engine, in ids.
    speed: Speed,
    /// Time up to which it has worked, in seconds.
    at: f64,
    /// Ids that a sequence which ran all the time would have.
    progress: f64,
    /// Sequences that generate, by the spread numbers of their attempts.
    running: SpreadMap<Running>,
    /// Attempts by the progress at which they end, as the bits of a number that is never negative.
    ends: BTreeSet<(u64, AttemptId)>,
    /// Attempts whose prompts are being computed, in order.
    prefill: VecDeque<Waiting>,
    /// Attempts without room, by arrival.
    waiting: VecDeque<Waiting>,
    /// Room in use is this and the progress of every sequence that generates.
    kv_fixed: f64,
    /// Contexts of earlier attempts.
    cache: Cache,
    /// Attempts so far.
    arrivals: u64,
    /// Ids that were sampled.
    sampled: u64,
    /// Ids of prompts that were computed.
    prefilled: f64,
    /// Ids of prompts that the cache had.
    found: u64,
    /// Times that a sequence lost its room.
    preemptions: u64,
    /// News that were not taken yet.
    news: Vec<AttemptNews>,
}

impl Curves {
    pub(super) fn new(speed: Speed) -> Self {
        Self {
            speed,
            at: 0.0,
            progress: 0.0,
            running: SpreadMap::default(),
            ends: BTreeSet::new(),
            prefill: VecDeque::new(),
            waiting: VecDeque::new(),
            kv_fixed: 0.0,
            cache: Cache::default(),
            arrivals: 0,
            sampled: 0,
            prefilled: 0.0,
            found: 0,
            preemptions: 0,
            news: Vec::new(),
        }
    }

    /// Ids in the cache that are in use.
    fn kv_used(&self) -> f64 {
        self.kv_fixed + self.running.len() as f64 * self.progress
    }

    /// Ids of prompt that a pass computes.
    fn chunk(&self) -> f64 {
        let rows = self.running.len().min(self.speed.max_batched - 1);
        (self.speed.max_batched - rows) as f64
    }

    /// Seconds in which every sequence gets an id.
    fn pass_s(&self) -> f64 {
        let prefill = if self.prefill.is_empty() {
            0.0
        } else {
            self.chunk() * self.speed.prefill_s
        };
        self.speed.decode_s(self.running.len(), self.kv_used()) + prefill
    }

    /// Ids of progress until something changes.
    fn until(&self) -> f64 {
        let end = self.ends.first().map_or(f64::INFINITY, |(bits, _)| {
            (f64::from_bits(*bits) - self.progress).max(0.0)
        });
        let prompt = self
            .prefill
            .front()
            .map_or(f64::INFINITY, |w| w.left / self.chunk());
        let room = match self.running.len() {
            0 => f64::INFINITY,
            n => ((self.speed.kv as f64 - self.kv_used()) / n as f64).max(0.0),
        };
        end.min(prompt).min(room)
    }

    /// The next one.
    pub(super) fn next(&self) -> Option<Micros> {
        if !self.news.is_empty() {
            return Some(micros(self.at));
        }
        let idle = self.running.is_empty() && self.prefill.is_empty();
        // Rounded up, so that what is due has happened by then.
        (!idle).then(|| micros(self.at + self.until() * self.pass_s()) + 1)
    }

    /// Begins.
    pub(super) fn start(&mut self, job: Job, now: Micros, busy_s: &mut f64) {
        self.work(now, busy_s);
        self.arrivals += 1;
        let arrival = self.arrivals;
        let waiting = Waiting {
            job,
            sampled: 0,
            told: 0,
            arrival,
            cached: None,
            left: 0.0,
        };
        self.waiting.push_back(waiting);
        self.admit();
    }

    /// Works up to `now`, and gives the news.
    pub(super) fn advance(&mut self, now: Micros, busy_s: &mut f64, news: &mut Vec<AttemptNews>) {
        self.work(now, busy_s);
        news.append(&mut self.news);
    }

    /// Goes on until `now`.
    fn work(&mut self, now: Micros, busy_s: &mut f64) {
        let end = seconds(now);
        while !(self.running.is_empty() && self.prefill.is_empty()) {
            let (until, pass_s) = (self.until(), self.pass_s());
            let due = self.at + until * pass_s;
            if due > end {
                break;
            }
            self.go_on(until, (due - self.at).max(0.0), busy_s);
            self.settle();
        }
        let rest_s = (end - self.at).max(0.0);
        if self.running.is_empty() && self.prefill.is_empty() {
            self.at = self.at.max(end)
        } else {
            self.go_on(rest_s / self.pass_s(), rest_s, busy_s)
        }
    }

    /// Lets time pass in which nothing changes.
    fn go_on(&mut self, ids: f64, time_s: f64, busy_s: &mut f64) {
        let chunk = self.chunk();
        self.at += time_s;
        *busy_s += time_s;
        self.progress += ids;
        if let Some(first) = self.prefill.front_mut() {
            let computed = (ids * chunk).min(first.left);
            first.left -= computed;
            self.prefilled += computed;
        }
    }

    /// Carries out what is due.
    fn settle(&mut self) {
        while let Some(&(bits, attempt)) = self.ends.first()
            && f64::from_bits(bits) <= self.progress + CLOSE
        {
            self.finish(attempt);
        }
        if self.prefill.front().is_some_and(|w| w.left <= CLOSE)
            && let Some(ready) = self.prefill.pop_front()
        {
            self.generate(ready);
        }
        // The youngest loses its room; a single one always has enough.
        while self.kv_used() + CLOSE * self.running.len() as f64 >= self.speed.kv as f64
            && self.running.len() + self.prefill.len() > 1
            && let Some(attempt) = self.youngest()
        {
            self.preempt(attempt);
        }
        self.admit();
    }

    /// The sequence that came last: it gives way.
    fn youngest(&self) -> Option<AttemptId> {
        let last = self.running.values().max_by_key(|r| r.arrival)?;
        Some(last.job.attempt)
    }

    /// Ids that a sequence has sampled by now.
    fn sampled_of(&self, running: &Running) -> usize {
        let ids = (self.progress - running.from + CLOSE).max(0.0) as usize;
        ids.min(running.job.length)
    }

    /// Takes a sequence out of the batch: it, and what it has sampled.
    fn leave(&mut self, attempt: AttemptId) -> Option<(Running, usize)> {
        let running = self.running.remove(&finalize64(attempt.0))?;
        let end = running.from + running.job.length as f64;
        self.ends.remove(&(end.to_bits(), attempt));
        self.kv_fixed -= running.job.prompt.len() as f64 - running.from;
        let sampled = self.sampled_of(&running);
        Some((running, sampled))
    }

    /// A sequence has all its ids.
    fn finish(&mut self, attempt: AttemptId) {
        let Some((running, _)) = self.leave(attempt) else {
            return;
        };
        let length = running.job.length;
        self.tell(&running.job, (running.told, length), Some(running.cached));
        self.keep(&running.job, length);
    }

    /// A context stays in the cache as long as there is room.
    fn keep(&mut self, job: &Job, sampled: usize) {
        self.cache.put(job.episode, job.prompt.len() + sampled);
        self.make_room();
    }

    /// Lets old contexts go.
    fn make_room(&mut self) {
        let free = self.speed.kv as f64 - self.kv_used();
        self.cache.shrink(free.max(0.0) as usize);
    }

    /// Records news of an attempt.
    fn tell(&mut self, job: &Job, (from, to): (usize, usize), ended: Option<usize>) {
        self.sampled += to.saturating_sub(from) as u64;
        self.news.push(AttemptNews {
            attempt: job.attempt,
            tokens: (from..to).map(|n| drawn(job.seed, n)).collect(),
            ended: ended.is_some(),
            cached: ended.unwrap_or(0),
        });
    }

    /// Reports sampled ids that were not reported yet.
    pub(super) fn flush(&mut self, news: &mut Vec<AttemptNews>) {
        let mut due: Vec<(AttemptId, usize)> = self
            .running
            .values()
            .map(|r| (r.job.attempt, self.sampled_of(r)))
            .collect();
        due.sort_unstable();
        for (attempt, sampled) in due {
            let Some(running) = self.running.get_mut(&finalize64(attempt.0)) else {
                continue;
            };
            let told = std::mem::replace(&mut running.told, sampled);
            let job = running.job.clone();
            if sampled > told {
                self.tell(&job, (told, sampled), None);
            }
        }
        news.append(&mut self.news);
    }

    /// Takes the room of a sequence away.
    fn preempt(&mut self, attempt: AttemptId) {
        let Some((running, sampled)) = self.leave(attempt) else {
            return;
        };
        self.preemptions += 1;
        let arrival = running.arrival;
        let waiting = Waiting {
            job: running.job,
            sampled,
            told: running.told,
            arrival,
            cached: Some(running.cached),
            left: 0.0,
        };
        let at = self.waiting.partition_point(|w| w.arrival < arrival);
        self.waiting.insert(at, waiting);
    }

    /// Lets attempts begin in the order of their arrival, as far as there is room.
    fn admit(&mut self) {
        while let Some(first) = self.waiting.front() {
            let running = self.running.len() + self.prefill.len();
            let context = first.job.prompt.len() + first.sampled;
            let free = self.speed.kv as f64 - self.kv_used();
            // Those that run keep some room to grow.
            let growth = self.running.len().min(self.speed.kv / 16);
            let fits = free >= (context + 1 + growth) as f64;
            if running >= self.speed.max_running.min(self.speed.max_batched)
                || !(fits || running == 0)
            {
                return;
            }
            let Some(mut next) = self.waiting.pop_front() else {
                return;
            };
            let own = self.cache.len_of(next.job.episode).min(context);
            let shared = self.cache.len_of(next.job.group).min(next.job.shared);
            // The last one is computed in any case.
            let found = own.max(shared).min(context.saturating_sub(1));
            self.cache.remove(next.job.episode);
            if next.cached.is_none() {
                self.found += found as u64;
                next.cached = Some(found);
            }
            next.left = (context - found) as f64;
            self.kv_fixed += context as f64;
            self.make_room();
            self.prefill.push_back(next);
        }
    }

    /// A prompt is computed: its sequence joins the batch.
    fn generate(&mut self, ready: Waiting) {
        self.kv_fixed -= (ready.job.prompt.len() + ready.sampled) as f64;
        if ready.job.shared > 0 {
            self.cache.put(ready.job.group, ready.job.shared);
        }
        let from = self.progress - ready.sampled as f64;
        let attempt = ready.job.attempt;
        // Progress counts what was sampled before.
        self.kv_fixed += ready.job.prompt.len() as f64 - from;
        let end = from + ready.job.length as f64;
        self.ends.insert((end.to_bits(), attempt));
        let running = Running {
            from,
            told: ready.told,
            arrival: ready.arrival,
            cached: ready.cached.unwrap_or(0),
            job: ready.job,
        };
        self.running.insert(finalize64(attempt.0), running);
        self.make_room();
    }

    /// Ends an attempt early.
    pub(super) fn cancel(&mut self, attempt: AttemptId, now: Micros, busy_s: &mut f64) {
        self.work(now, busy_s);
        if let Some((running, sampled)) = self.leave(attempt) {
            self.keep(&running.job, sampled);
        } else if let Some(at) = self.prefill.iter().position(|w| w.job.attempt == attempt) {
            if let Some(gone) = self.prefill.remove(at) {
                self.kv_fixed -= (gone.job.prompt.len() + gone.sampled) as f64;
            }
        } else {
            self.waiting.retain(|w| w.job.attempt != attempt);
        }
        self.admit();
    }

    /// Has other weights.
    pub(super) fn load(&mut self) {
        if !self.speed.keep_kv {
            self.cache.clear();
        }
    }

    /// Loses everything.
    pub(super) fn crash(&mut self) {
        let fresh = Self {
            at: self.at,
            arrivals: self.arrivals,
            sampled: self.sampled,
            prefilled: self.prefilled,
            found: self.found,
            preemptions: self.preemptions,
            ..Self::new(self.speed)
        };
        *self = fresh;
    }

    /// Returns the present load.
    pub(super) fn reading(&self) -> Load {
        // The last id of a sequence may exceed the bound; its room is returned before the next one.
        let slack = CLOSE * (self.running.len() + 1) as f64;
        Load {
            running: self.running.len() + self.prefill.len(),
            waiting: self.waiting.len(),
            kv_used: (self.kv_used() - slack).max(0.0) as usize,
            kv_total: self.speed.kv,
            sampled: self.sampled,
            prefilled: self.prefilled as u64,
            cached: self.found,
            preemptions: self.preemptions,
            passes: 0,
        }
    }
}
