//! Event queue ordered by virtual time, then by insertion.
//!
//! Most events of a large plan are ends of long tool calls. They lie in buckets without an order, so that the
//! heap of events that are due soon stays small enough for the processor's caches.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap};

/// A bucket is two to this power of microseconds: about a quarter of a second.
const BUCKET_BITS: u32 = 18;

/// A virtual time in microseconds since the start of the simulation.
pub(crate) type Micros = u64;

/// Seconds as virtual time; negative ones and those that are not a number count as 0.
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
    at: Micros,
    /// Order of entry.
    number: u64,
    /// The event.
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
    /// Entries of the bucket `open` and of earlier buckets, the soonest first.
    near: BinaryHeap<Reverse<Entry<T>>>,
    /// Entries of later buckets.
    far: BTreeMap<Micros, Vec<Reverse<Entry<T>>>>,
    /// Number of the bucket that was opened last.
    open: Micros,
    /// Order of entry.
    number: u64,
}

impl<T> Default for Agenda<T> {
    fn default() -> Self {
        Self {
            near: BinaryHeap::new(),
            far: BTreeMap::new(),
            open: 0,
            number: 0,
        }
    }
}

impl<T> Agenda<T> {
    /// Puts a happening down.
    pub(crate) fn add(&mut self, at: Micros, what: T) {
        self.number += 1;
        let number = self.number;
        let (bucket, entry) = (at >> BUCKET_BITS, Reverse(Entry { at, number, what }));
        if bucket <= self.open {
            self.near.push(entry)
        } else {
            self.far.entry(bucket).or_default().push(entry)
        }
    }

    /// The next happening with its time.
    pub(crate) fn next(&mut self) -> Option<(Micros, T)> {
        if self.near.is_empty()
            && let Some((bucket, entries)) = self.far.pop_first()
        {
            self.open = bucket;
            self.near = BinaryHeap::from(entries);
        }
        self.near.pop().map(|Reverse(entry)| (entry.at, entry.what))
    }

    /// Keeps the entries for which `stays` holds.
    pub(crate) fn retain(&mut self, stays: impl Fn(&T) -> bool) {
        self.near.retain(|Reverse(entry)| stays(&entry.what));
        self.far.retain(|_, entries| {
            entries.retain(|Reverse(entry)| stays(&entry.what));
            !entries.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::SplitMix64;

    /// The order is that of one sorted list of times and numbers.
    #[test]
    fn happenings_come_by_time_and_then_by_entry() {
        let mut draws = SplitMix64::new(7);
        let (mut agenda, mut list) = (Agenda::default(), Vec::<(Micros, usize)>::new());
        let (mut now, mut given) = (0, 0);
        for number in 0..20_000 {
            match draws.next_u64() % 100 {
                // Now and then some go.
                0 => {
                    agenda.retain(|n: &usize| !n.is_multiple_of(7));
                    list.retain(|(_, n)| !n.is_multiple_of(7));
                }
                1..48 => {
                    let first = agenda.next();
                    assert_eq!(first, list.iter().min().copied());
                    list.retain(|one| Some(*one) != first);
                    now = first.map_or(now, |(at, _)| at);
                    given += usize::from(first.is_some());
                }
                // Many fall on one time, within a bucket and many buckets on.
                _ => {
                    let at = now + draws.next_u64() % 30 * 100_000;
                    agenda.add(at, number);
                    list.push((at, number));
                }
            }
        }
        list.sort_unstable();
        let rest: Vec<_> = std::iter::from_fn(|| agenda.next()).collect();
        assert_eq!(rest, list);
        assert!(given > 5_000 && !list.is_empty(), "{given} {}", list.len());
    }
}
