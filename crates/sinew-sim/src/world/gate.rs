//! Admission: episodes that wait to begin, and turns that wait to continue.

use super::slab::{Episode, Slab};
use crate::plan::Plan;
use sinew_rollout::{
    AdmissionConfig, AdmissionCore, EpisodeKey, LengthEvidence, OutlookCore, Rank, Ticket,
};
use sinew_types::TokenId;
use std::collections::{HashMap, VecDeque};

/// Admission, and those that wait for it.
#[derive(Debug)]
pub(super) struct Gate {
    /// The real core of admission.
    pub(super) admission: AdmissionCore,
    /// Estimates which episodes take long, if the longest begin first.
    outlook: Option<OutlookCore>,
    /// Those that have not asked to begin, in their order.
    waiting: VecDeque<u32>,
    /// Place of each admission ticket.
    tickets: HashMap<Ticket, u32>,
}

impl Gate {
    /// One at which nothing waits.
    pub(super) fn new(plan: &Plan, grain: usize) -> Self {
        let turn = (plan.episode.turn_tokens.mean() as usize / grain).max(1);
        let mut config = AdmissionConfig::new(plan.places(), turn);
        config.max_starting = plan.tools.starting;
        config.reserve_tokens = config.reserve_tokens.div_ceil(grain);
        Self {
            admission: AdmissionCore::new(config),
            outlook: plan.rollout.longest_first.then(OutlookCore::default),
            waiting: VecDeque::new(),
            tickets: HashMap::new(),
        }
    }

    /// An episode waits until it may ask to begin.
    pub(super) fn wait(&mut self, slot: u32) {
        self.waiting.push_back(slot);
    }

    /// Whether another one may ask to begin: one that would not begin yet is the last.
    pub(super) fn may_ask(&self) -> bool {
        !self.waiting.is_empty() && self.admission.reading().new == 0
    }

    /// Takes the one that begins next.
    pub(super) fn first_waiting(&mut self, episodes: &Slab, now_s: f64) -> Option<u32> {
        let Some(outlook) = &self.outlook else {
            return self.waiting.pop_front();
        };
        // The rank depends only on the task and the time; members of a group follow each other.
        let mut last: Option<(usize, Rank)> = None;
        let mut rank = |slot: u32| {
            let episode = &episodes[slot];
            match last {
                Some((task, rank)) if task == episode.draw.task => rank,
                _ => {
                    let rank = outlook.rank(&episode.spec(), now_s);
                    last = Some((episode.draw.task, rank));
                    rank
                }
            }
        };
        let at = (0..self.waiting.len()).min_by_key(|at| rank(self.waiting[*at]))?;
        self.waiting.remove(at)
    }

    /// An episode asks to begin.
    pub(super) fn ask(&mut self, slot: u32) -> EpisodeKey {
        let (key, ticket) = self.admission.ask();
        self.tickets.insert(ticket, slot);
        key
    }

    /// An episode asks to continue with a turn after `context`.
    pub(super) fn ask_turn(
        &mut self,
        slot: u32,
        key: EpisodeKey,
        context: &[TokenId],
        now_s: f64,
    ) -> Ticket {
        let ticket = self.admission.ask_turn(key, context, now_s);
        self.tickets.insert(ticket, slot);
        ticket
    }

    /// Takes a ticket, and returns the place of its episode.
    pub(super) fn take(&mut self, ticket: Ticket) -> Option<u32> {
        self.tickets.remove(&ticket)
    }

    /// An episode does not wait any more.
    pub(super) fn forget(&mut self, slot: u32) {
        self.waiting.retain(|s| *s != slot);
        self.tickets.retain(|_, s| *s != slot);
    }

    /// An episode has begun.
    pub(super) fn began(&mut self, episode: &Episode, now_s: f64) {
        if let Some(outlook) = &mut self.outlook {
            outlook.began(&episode.spec(), now_s);
        }
    }

    /// An episode that had begun is over.
    pub(super) fn ended(&mut self, episode: &Episode, took: LengthEvidence, now_s: f64) {
        if let Some(outlook) = &mut self.outlook {
            outlook.ended(&episode.spec(), took, now_s);
        }
    }
}
