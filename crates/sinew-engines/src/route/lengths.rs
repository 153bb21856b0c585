//! Expected number of sampled tokens of a request, learned from requests with the same beginning.
//!
//! Members of a group have one prompt, and later turns of one episode begin with it. A mean is kept for the
//! first and for the last whole block of each prompt; a new prompt uses the mean of its longest known part,
//! then the mean of all. The estimate influences where a request runs, never what is sampled.

use sinew_types::SpreadMap;
use std::collections::VecDeque;

/// Share of the newest request in a mean: the lengths of a changing policy change, too.
const NEWEST: f64 = 0.2;
/// Prompts that are remembered; the oldest is forgotten first.
const REMEMBERED: usize = 1 << 16;
/// Expected rest of a request that has sampled more than was expected, as a share of a mean request.
pub(super) const LEAST: f64 = 0.25;
/// Upper limit of the same estimate, so that one estimate does not close an engine.
const MOST: f64 = 16.0;

#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    value: f64,
    seen: u32,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.seen = self.seen.saturating_add(1);
        let share = NEWEST.max(1.0 / f64::from(self.seen));
        self.value += share * (value - self.value);
    }
}

/// Means of requests that ended.
#[derive(Debug, Default)]
pub(super) struct Lengths {
    all: Mean,
    by_block: SpreadMap<Mean>,
    order: VecDeque<u64>,
}

impl Lengths {
    /// A request with these blocks of its prompt ended after `tokens`.
    pub(super) fn ended(&mut self, prompt: &[u64], tokens: usize) {
        let tokens = tokens as f64;
        self.all.add(tokens);
        let ends = [prompt.first(), prompt.last()];
        let blocks = ends.into_iter().flatten().take(prompt.len().min(2));
        for &block in blocks {
            if !self.by_block.contains_key(&block) {
                self.order.push_back(block);
            }
            self.by_block.entry(block).or_default().add(tokens);
        }
        while self.order.len() > REMEMBERED {
            if let Some(old) = self.order.pop_front() {
                self.by_block.remove(&old);
            }
        }
    }

    /// Expected remaining work of a request that has sampled `tokens`, in mean requests: 1 as long as nothing
    /// is known.
    pub(super) fn rest(&self, prompt: &[u64], tokens: usize) -> f64 {
        let Some(mean) = self.mean() else {
            return 1.0;
        };
        let known = prompt.iter().rev().find_map(|b| self.by_block.get(b));
        let expected = known.map_or(mean, |m| m.value);
        ((expected - tokens as f64) / mean).clamp(LEAST, MOST)
    }

    /// Tokens of a mean request, once one has ended.
    pub(super) fn mean(&self) -> Option<f64> {
        (self.all.seen > 0).then(|| self.all.value.max(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_begin_alike_are_expected_to_be_as_long() {
        let mut lengths = Lengths::default();
        assert_eq!(lengths.rest(&[1, 2], 0), 1.0);
        for _ in 0..20 {
            lengths.ended(&[1, 2, 3], 100);
            lengths.ended(&[4], 900);
            lengths.ended(&[], 500);
        }
        let mean = lengths.mean().unwrap();
        assert!((300.0..700.0).contains(&mean), "{mean}");
        assert_eq!(lengths.rest(&[1, 2, 3], 0), (100.0 / mean).max(LEAST));
        assert_eq!(lengths.rest(&[1, 7], 0), lengths.rest(&[1, 2, 3], 0));
        assert!(lengths.rest(&[4, 9], 0) > 1.0 && lengths.rest(&[8], 0) == 1.0);
        assert!(lengths.rest(&[4], 500) < lengths.rest(&[4], 0));
        assert_eq!(lengths.rest(&[4], 5_000), LEAST);
    }

    #[test]
    fn memory_is_bounded() {
        let mut lengths = Lengths::default();
        for block in 0..REMEMBERED as u64 + 50 {
            lengths.ended(&[block], 1);
        }
        assert_eq!(
            (lengths.order.len(), lengths.by_block.len()),
            (REMEMBERED, REMEMBERED)
        );
        assert!(!lengths.by_block.contains_key(&0));
    }
}
