//! Decides which episodes start and which ones generate next, as a pure state machine without clock and
//! engine.
//!
//! An episode first waits, then starts its environment, and then alternates between generating and acting
//! (running a tool). Meanwhile its context is counted in the bucket. An acting episode can be paused: its
//! tool continues to run, but its capacity is given to others, and its next turn waits for KV capacity. No
//! episode is ever cancelled.
//!
//! No episode starves. Turns come before new episodes, so that running episodes drain, and new ones come in
//! order. A turn that has waited for `force_after_s` continues in any case. If no episode holds capacity, the
//! next one continues regardless of its size.

use super::bucket::{Bucket, HeldContext};
use super::pressure::{Pressure, PressureConfig};
use sinew_types::{EngineStatus, TokenId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Settings of [`AdmissionCore`].
#[derive(Clone, Debug, PartialEq)]
pub struct AdmissionConfig {
    /// Maximum number of episodes that have started and not ended.
    pub max_running: usize,
    /// Maximum number of them whose world is not up yet.
    pub max_starting: usize,
    /// Whether contexts must fit into the engine's KV cache.
    pub kv_capacity: bool,
    /// Number of tokens, beyond its context, that an episode is expected to need next.
    pub reserve_tokens: usize,
    /// Seconds in a tool after which an episode may be paused in favour of waiting ones.
    pub acting_hold_s: f64,
    /// Maximum seconds that a turn waits for capacity.
    pub force_after_s: f64,
    /// Control of the number of episodes by the engine's status; `None`: the number is not controlled.
    pub pressure: Option<PressureConfig>,
}

impl AdmissionConfig {
    /// Reserve in tokens for an episode, as in ThunderAgent.
    pub const RESERVE_TOKENS: usize = 100;
    /// Maximum number of sandboxes that start at the same time, as in uni-agent.
    pub const MAX_STARTING: usize = 64;

    /// Default settings for at most `max_running` episodes with turns of up to `max_turn_tokens`.
    pub fn new(max_running: usize, max_turn_tokens: usize) -> Self {
        Self {
            max_running,
            max_starting: Self::MAX_STARTING,
            kv_capacity: true,
            reserve_tokens: Self::RESERVE_TOKENS.min(max_turn_tokens),
            acting_hold_s: 2.0,
            force_after_s: 1800.0,
            pressure: Some(PressureConfig::default()),
        }
    }
}

/// Key of an episode; keys ascend in the order of requests to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EpisodeKey(u64);

/// Ticket of a waiter: an episode to start, or a turn to generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

#[derive(Clone, Debug, PartialEq)]
enum Phase {
    /// Waits to start.
    New(Ticket),
    Starting,
    /// Generates one or more turns, each with its context. Calls of one episode may overlap.
    Generating(Vec<(Ticket, HeldContext)>),
    /// Runs a tool; the capacity for its last context is kept.
    Acting {
        held: HeldContext,
        since_s: f64,
    },
    /// Holds no capacity: it runs a tool, or its turn waits.
    Paused,
}

#[derive(Debug)]
struct WaitingTicket {
    key: EpisodeKey,
    held: HeldContext,
    since_s: f64,
}

/// State of admission, and counters since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AdmissionReading {
    /// Episodes that have not started.
    pub new: usize,
    /// Episodes whose environment is starting.
    pub starting: usize,
    /// Episodes with a turn that is being generated.
    pub generating: usize,
    /// Episodes in a tool whose context is kept for them.
    pub acting: usize,
    /// Episodes that hold no capacity: they run a tool, or their turn waits.
    pub paused: usize,
    /// Turns that wait for capacity.
    pub waiting_turns: usize,
    /// Maximum number of episodes that may hold capacity.
    pub limit: usize,
    /// Tokens of KV capacity in use, reserves included.
    pub held_tokens: usize,
    /// KV capacity of the engine, in tokens; 0 if it is unknown.
    pub kv_tokens: usize,
    /// Number of episodes started so far.
    pub started: u64,
    /// Number of times that an episode in a tool gave its capacity to others.
    pub pauses: u64,
    /// Number of turns that had to wait.
    pub waited_turns: u64,
    /// Number of these that continued without capacity, after `force_after_s`.
    pub forced_turns: u64,
    /// Sum of their waiting times, in seconds.
    pub waited_s: f64,
    /// Number of times that `limit` was lowered.
    pub cuts: u64,
    /// Number of times that `limit` was raised.
    pub growths: u64,
}

/// State machine of admission.
#[derive(Debug)]
pub struct AdmissionCore {
    config: AdmissionConfig,
    bucket: Bucket,
    pressure: Option<Pressure>,
    kv_tokens: usize,
    episodes: HashMap<EpisodeKey, Phase>,
    /// Waiting episodes in order of arrival.
    new: BTreeMap<Ticket, EpisodeKey>,
    /// Waiting turns in order of arrival.
    turns: BTreeMap<Ticket, WaitingTicket>,
    turns_by_size: BTreeSet<(usize, Ticket)>,
    acting_by_size: BTreeSet<(usize, EpisodeKey)>,
    starting: usize,
    generating: usize,
    /// Moving average of the tokens in an episode's first context: the estimate for an episode that starts.
    first_tokens: f64,
    granted: Vec<Ticket>,
    next: u64,
    counts: AdmissionReading,
}

impl AdmissionCore {
    /// Creates the state without episodes.
    pub fn new(config: AdmissionConfig) -> Self {
        let pressure = config.pressure;
        Self {
            bucket: Bucket::new(config.reserve_tokens),
            pressure: pressure.map(|p| Pressure::new(p, config.max_running)),
            config,
            kv_tokens: 0,
            episodes: HashMap::new(),
            new: BTreeMap::new(),
            turns: BTreeMap::new(),
            turns_by_size: BTreeSet::new(),
            acting_by_size: BTreeSet::new(),
            starting: 0,
            generating: 0,
            first_tokens: 0.0,
            granted: Vec::new(),
            next: 0,
            counts: AdmissionReading::default(),
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Registers an episode that wants to start. It may start once [`AdmissionCore::decide`] returns its
    /// ticket.
    pub fn ask(&mut self) -> (EpisodeKey, Ticket) {
        let (key, ticket) = (EpisodeKey(self.number()), Ticket(self.number()));
        self.episodes.insert(key, Phase::New(ticket));
        self.new.insert(ticket, key);
        (key, ticket)
    }

    /// Registers a turn of an episode that wants to generate after `context`. This also means that its
    /// environment has started. The turn may continue once [`AdmissionCore::decide`] returns the ticket; a
    /// turn of an unknown episode may continue at once.
    pub fn ask_turn(&mut self, key: EpisodeKey, context: &[TokenId], now_s: f64) -> Ticket {
        let ticket = Ticket(self.number());
        let mut held = HeldContext::of(context);
        match self.episodes.get(&key) {
            None => {
                self.granted.push(ticket);
                return ticket;
            }
            // It holds KV capacity already, and what it adds shares its beginning.
            Some(Phase::Generating(_)) => {
                self.grant_turn(ticket, key, held);
                return ticket;
            }
            Some(Phase::Acting { held: before, .. }) => {
                self.bucket.follow(before, &mut held);
                self.acting_by_size.remove(&(before.tokens(), key));
                self.set(key, Phase::Paused);
                // The smallest of those that act give way to the growth of one that generates.
                if self.make_way(&held, |_| true) {
                    self.grant_turn(ticket, key, held);
                    return ticket;
                }
                self.bucket.give_up(&mut held);
                self.counts.pauses += 1;
            }
            Some(Phase::Starting) => {
                self.set(key, Phase::Paused);
                self.starting -= 1;
                self.first_tokens += 0.1 * (held.tokens() as f64 - self.first_tokens);
            }
            Some(Phase::New(_) | Phase::Paused) => {}
        }
        self.turns_by_size.insert((held.tokens(), ticket));
        let since_s = now_s;
        self.turns
            .insert(ticket, WaitingTicket { key, held, since_s });
        ticket
    }

    /// Ends a turn, which was generating or still waited.
    pub fn turn_ended(&mut self, key: EpisodeKey, ticket: Ticket, now_s: f64) {
        if let Some(waiting) = self.turns.remove(&ticket) {
            let size = waiting.held.tokens();
            self.turns_by_size.remove(&(size, ticket));
            return;
        }
        let Some(Phase::Generating(turns)) = self.episodes.get_mut(&key) else {
            return;
        };
        let Some(at) = turns.iter().position(|(t, _)| *t == ticket) else {
            return;
        };
        let (_, held) = turns.swap_remove(at);
        if !turns.is_empty() {
            self.bucket.remove(&held);
            return;
        }
        self.generating -= 1;
        self.acting_by_size.insert((held.tokens(), key));
        let since_s = now_s;
        self.set(key, Phase::Acting { held, since_s });
    }

    /// Removes an episode that has ended, from any state.
    pub fn ended(&mut self, key: EpisodeKey) {
        match self.episodes.get(&key) {
            None => return,
            Some(Phase::New(ticket)) => {
                self.new.remove(ticket);
                self.episodes.remove(&key);
                return;
            }
            Some(Phase::Starting) => self.starting -= 1,
            Some(Phase::Generating(_) | Phase::Acting { .. }) => self.let_go(key),
            Some(Phase::Paused) => {}
        }
        self.episodes.remove(&key);
        if let Some(pressure) = &mut self.pressure {
            pressure.episode_ended();
        }
    }

    /// Handles a reading of the engine's status.
    pub fn read(&mut self, status: &EngineStatus, now_s: f64) {
        self.kv_tokens = status.kv_tokens_total;
        let active = self.active();
        if let Some(pressure) = &mut self.pressure {
            pressure.read(status, active, now_s);
        }
    }

    /// Decides which waiters may continue. Callers ask after every change, and from time to time while
    /// anything waits.
    pub fn decide(&mut self, now_s: f64) -> Vec<Ticket> {
        while self.is_over_full() && self.pause_smallest(|_| true) {}
        while self.next_turn(now_s) || self.next_new() {}
        std::mem::take(&mut self.granted)
    }

    /// Returns the state and the counters.
    pub fn reading(&self) -> AdmissionReading {
        let begun = self.episodes.len() - self.new.len();
        AdmissionReading {
            new: self.new.len(),
            starting: self.starting,
            generating: self.generating,
            acting: self.acting_by_size.len(),
            paused: begun - self.active(),
            waiting_turns: self.turns.len(),
            limit: self.limit(),
            held_tokens: self.bucket.used(),
            kv_tokens: self.kv_tokens,
            cuts: self.pressure.as_ref().map_or(0, |p| p.cuts),
            growths: self.pressure.as_ref().map_or(0, |p| p.growths),
            ..self.counts
        }
    }

    fn set(&mut self, key: EpisodeKey, phase: Phase) {
        self.episodes.insert(key, phase);
    }

    /// Number of episodes that hold KV capacity or are about to.
    fn active(&self) -> usize {
        self.starting + self.generating + self.acting_by_size.len()
    }

    fn limit(&self) -> usize {
        let most = self.config.max_running;
        self.pressure.as_ref().map_or(most, |p| p.limit().min(most))
    }

    /// Tokens in use, plus the expected tokens of the episodes that start and of `more` further ones.
    fn expected(&self, more: usize) -> usize {
        let first = self.first_tokens as usize + self.config.reserve_tokens;
        self.bucket.used() + (self.starting + more) * first
    }

    fn fits_kv(&self, tokens: usize) -> bool {
        !self.config.kv_capacity || self.kv_tokens == 0 || tokens <= self.kv_tokens
    }

    /// Whether more capacity is in use than allowed, because the limit or the capacity shrank or contexts
    /// grew.
    fn is_over_full(&self) -> bool {
        self.active() > self.limit() || !self.fits_kv(self.bucket.used())
    }

    /// Whether a turn may continue. If no episode holds capacity, any turn may.
    fn fits(&self, held: &HeldContext) -> bool {
        let alone = self.generating == 0 && self.acting_by_size.is_empty();
        let fits = self.fits_kv(self.expected(0) + self.bucket.cost(held));
        alone || (self.active() < self.limit() && fits)
    }

    /// Pauses acting episodes, the smallest first, until a turn with the context `held` may continue. `who`
    /// decides, by the time since which an episode acts, whether it may be paused. If the KV cache had too
    /// little room even without all of these episodes, none is paused. Returns whether the turn may continue.
    fn make_way(&mut self, held: &HeldContext, who: impl Fn(f64) -> bool) -> bool {
        if self.fits(held) {
            return true;
        }
        let reserve = self.config.reserve_tokens;
        let candidates = self.acting_by_size.iter();
        let theirs = candidates.filter(|(_, key)| self.acts_since(*key).is_some_and(&who));
        let theirs: usize = theirs.map(|(tokens, _)| tokens + reserve).sum();
        let needed = self.expected(0) + self.bucket.cost(held);
        if !self.fits_kv(needed.saturating_sub(theirs)) {
            return false;
        }
        while !self.fits(held) {
            if !self.pause_smallest(&who) {
                return false;
            }
        }
        true
    }

    fn acts_since(&self, key: EpisodeKey) -> Option<f64> {
        match self.episodes.get(&key) {
            Some(Phase::Acting { since_s, .. }) => Some(*since_s),
            _ => None,
        }
    }

    /// Pauses the smallest acting episode that `who` accepts by the start time of its tool.
    fn pause_smallest(&mut self, who: impl Fn(f64) -> bool) -> bool {
        let mut candidates = self.acting_by_size.iter();
        let found = candidates.find(|(_, key)| self.acts_since(*key).is_some_and(&who));
        let Some(&(_, key)) = found else {
            return false;
        };
        self.let_go(key);
        self.counts.pauses += 1;
        true
    }

    /// Releases the capacity of a generating or acting episode.
    fn let_go(&mut self, key: EpisodeKey) {
        match self.episodes.insert(key, Phase::Paused) {
            Some(Phase::Generating(turns)) => {
                self.generating -= 1;
                for (_, held) in &turns {
                    self.bucket.remove(held);
                }
            }
            Some(Phase::Acting { held, .. }) => {
                self.acting_by_size.remove(&(held.tokens(), key));
                self.bucket.remove(&held);
            }
            _ => {}
        }
    }

    fn grant_turn(&mut self, ticket: Ticket, key: EpisodeKey, held: HeldContext) {
        self.granted.push(ticket);
        match self.episodes.get_mut(&key) {
            // The episode ended while its turn waited.
            None => return,
            Some(Phase::Generating(turns)) => {
                self.bucket.add(&held);
                turns.push((ticket, held));
                return;
            }
            Some(_) => {}
        }
        self.bucket.add(&held);
        self.generating += 1;
        self.set(key, Phase::Generating(vec![(ticket, held)]));
    }

    /// Lets a turn continue: the oldest one if it has waited too long, or else the smallest one if it fits.
    /// Returns whether a turn continues.
    fn next_turn(&mut self, now_s: f64) -> bool {
        let Some((&oldest, waiting)) = self.turns.first_key_value() else {
            return false;
        };
        let forced = now_s - waiting.since_s >= self.config.force_after_s;
        let smallest = self.turns_by_size.first().map_or(oldest, |&(_, t)| t);
        let ticket = if forced { oldest } else { smallest };
        let Some(waiting) = self.turns.remove(&ticket) else {
            return false;
        };
        // While the engine has nothing to do, whoever is in a tool gives way, else who is in one
        // for long.
        let (idle, hold) = (self.generating == 0, self.config.acting_hold_s);
        let gives_way = |since: f64| idle || now_s - since >= hold;
        if !forced && !self.make_way(&waiting.held, gives_way) {
            self.turns.insert(ticket, waiting);
            return false;
        }
        let WaitingTicket { key, held, since_s } = waiting;
        self.turns_by_size.remove(&(held.tokens(), ticket));
        if now_s > since_s {
            self.counts.waited_turns += 1;
            self.counts.forced_turns += u64::from(forced);
            self.counts.waited_s += now_s - since_s;
        }
        self.grant_turn(ticket, key, held);
        true
    }

    /// Lets the next episode start, if no turn waits and the limits allow it. Returns whether one starts.
    fn next_new(&mut self) -> bool {
        let Some((&ticket, &key)) = self.new.first_key_value() else {
            return false;
        };
        let begun = self.episodes.len() - self.new.len();
        let fits = self.active() < self.limit() && self.fits_kv(self.expected(1));
        if !self.turns.is_empty()
            || begun >= self.config.max_running
            || self.starting >= self.config.max_starting
            || !(fits || self.active() == 0)
        {
            return false;
        }
        self.new.remove(&ticket);
        self.starting += 1;
        self.counts.started += 1;
        self.set(key, Phase::Starting);
        self.granted.push(ticket);
        true
    }
}

#[cfg(test)]
mod tests;
