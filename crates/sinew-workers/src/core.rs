//! The tickets of an owner as pure state: which wait, which are out, and which were taken back.
//!
//! Invariants:
//! - A started episode ends in exactly one way: it is accepted once, given up with a reason, or cancelled.
//! - A trace of a cancelled ticket, of another owner, or of a ticket that was accepted before is unwanted.
//! - At most `limit` tickets are out that are not cancelled.

use crate::ticket::{Ticket, fence_of};
use sinew_types::EpisodeId;
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};

/// Traces of one episode that may be refused; after them it has failed.
pub const MAX_REFUSALS: u32 = 3;

/// State of all tickets of a session.
#[derive(Debug)]
pub struct TicketCore {
    fence: u64,
    /// Maximum number of tickets that are out.
    limit: usize,
    /// Number of the next ticket.
    next: u64,
    /// Tickets without a row.
    waiting: VecDeque<Ticket>,
    /// Tickets with a row, by its key.
    out: BTreeMap<String, Ticket>,
    /// Keys of rows whose traces are not wanted any more.
    cancelled: BTreeSet<String>,
}

impl TicketCore {
    /// Begins without tickets. `limit` is at least 1.
    pub fn new(fence: u64, limit: usize) -> Self {
        Self {
            fence,
            limit: limit.max(1),
            next: 0,
            waiting: VecDeque::new(),
            out: BTreeMap::new(),
            cancelled: BTreeSet::new(),
        }
    }

    /// Adds an episode. The ticket gets the fence of this owner and a number.
    pub fn start(&mut self, ticket: Ticket) {
        let ticket = self.numbered(ticket);
        self.waiting.push_back(ticket);
    }

    fn numbered(&mut self, ticket: Ticket) -> Ticket {
        let number = self.next;
        self.next += 1;
        Ticket {
            fence: self.fence,
            number,
            ..ticket
        }
    }

    /// Tickets that may get a row now, in the order of their starts. They are out from now on.
    pub fn due(&mut self) -> Vec<Ticket> {
        let room = self.limit.saturating_sub(self.out.len());
        let count = room.min(self.waiting.len());
        let due: Vec<Ticket> = self.waiting.drain(..count).collect();
        for ticket in &due {
            self.out.insert(ticket.key(), ticket.clone());
        }
        due
    }

    /// Tickets whose rows the queue has no room for wait again, before others.
    pub fn put_back(&mut self, tickets: Vec<Ticket>) {
        for ticket in tickets.into_iter().rev() {
            self.out.remove(&ticket.key());
            self.waiting.push_front(ticket);
        }
    }

    /// Takes episodes back. Returns the keys of their rows, which are to be removed from the queue.
    pub fn cancel(&mut self, episodes: &[EpisodeId]) -> Vec<String> {
        let gone: HashSet<&EpisodeId> = episodes.iter().collect();
        self.waiting
            .retain(|ticket| !gone.contains(&ticket.episode));
        let found = self.out.iter().filter(|(_, t)| gone.contains(&t.episode));
        let keys: Vec<String> = found.map(|(key, _)| key.clone()).collect();
        for key in &keys {
            self.out.remove(key);
        }
        self.cancelled.extend(keys.iter().cloned());
        keys
    }

    /// The row of a cancelled ticket left the queue.
    pub fn removed(&mut self, key: &str) {
        self.cancelled.remove(key);
    }

    /// Keys of rows that are still in the queue and whose traces are not wanted.
    pub fn cancelled(&self) -> &BTreeSet<String> {
        &self.cancelled
    }

    /// A row has a trace: returns its ticket if the trace is wanted. The row leaves the queue in both cases.
    pub fn arrived(&mut self, key: &str) -> Option<Ticket> {
        self.cancelled.remove(key);
        self.out.remove(key)
    }

    /// The trace of a ticket that arrived cannot be used. The episode is issued again; returns the ticket
    /// if that was done too often, so that it has failed.
    pub fn refused(&mut self, ticket: Ticket) -> Option<Ticket> {
        if ticket.refusals + 1 >= MAX_REFUSALS {
            return Some(ticket);
        }
        let refusals = ticket.refusals + 1;
        let again = self.numbered(Ticket { refusals, ..ticket });
        self.waiting.push_front(again);
        None
    }

    /// No worker brings a row to its end: returns its ticket, whose episode has failed. The row is cancelled.
    pub fn given_up(&mut self, key: &str) -> Option<Ticket> {
        let ticket = self.out.remove(key)?;
        self.cancelled.insert(key.to_owned());
        Some(ticket)
    }

    /// A row of another owner is in the queue: its trace is not wanted.
    pub fn disown(&mut self, key: String) {
        self.cancelled.insert(key);
    }

    /// Whether a key of the queue is of another owner.
    pub fn is_foreign(&self, key: &str) -> bool {
        fence_of(key) != Some(self.fence)
    }

    /// Keys of the rows whose traces are awaited.
    pub fn out(&self) -> impl Iterator<Item = &String> {
        self.out.keys()
    }

    /// Whether a started episode has not ended.
    pub fn is_running(&self) -> bool {
        !(self.waiting.is_empty() && self.out.is_empty())
    }

    /// Episodes without a row, and rows whose traces are awaited.
    pub fn counts(&self) -> (usize, usize) {
        (self.waiting.len(), self.out.len())
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
