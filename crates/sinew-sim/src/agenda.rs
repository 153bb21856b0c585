//! What happens when: a heap of happenings by time, and by the order in which they were put down.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// A virtual time in microseconds since the start of the simulation.
pub(crate) type Micros = u64;

/// Seconds as virtual time; negative ones and those that are no number count as 0.
pub(crate) fn micros(seconds: f64) -> Micros {
    (seconds.max(0.0) * 1e6) as Micros
}

/// A virtual time in seconds.
pub(crate) fn seconds(at: Micros) -> f64 {
    at as f64 / 1e6
}

/// One entry. Equal times keep the order of their entry, so that a run is a function of its seed.
#[derive(Debug)]
struct Entry<T> {
    /// Up to where it has worked, in seconds.
    at: Micros,
    /// Order of entry.
    number: u64,
    /// What happens.
    what: T,
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl<T> Eq for Entry<T> {}

impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Entry<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// Happenings to come.
#[derive(Debug)]
pub(crate) struct Agenda<T> {
    /// The soonest first.
    heap: BinaryHeap<Reverse<Entry<T>>>,
    /// Order of entry.
    number: u64,
}

impl<T> Default for Agenda<T> {
    fn default() -> Self {
        Self {
            heap: BinaryHeap::new(),
            number: 0,
        }
    }
}

impl<T> Agenda<T> {
    /// Puts a happening down.
    pub(crate) fn add(&mut self, at: Micros, what: T) {
        self.number += 1;
        let number = self.number;
        self.heap.push(Reverse(Entry { at, number, what }));
    }

    /// The next happening with its time.
    pub(crate) fn next(&mut self) -> Option<(Micros, T)> {
        self.heap.pop().map(|Reverse(entry)| (entry.at, entry.what))
    }

    /// Keeps those that `stays` says.
    pub(crate) fn retain(&mut self, stays: impl Fn(&T) -> bool) {
        self.heap.retain(|Reverse(entry)| stays(&entry.what));
    }
}
