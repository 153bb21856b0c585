//! Speculative decoding by n-gram lookup (prompt lookup decoding): the draft of a sequence's next
//! tokens is the text that followed the same few tokens before, in its own text or in that of
//! another request. Samples of one task, and outputs of one format, repeat each other.
//!
//! A draft token costs a row of a pass and decides nothing: only tokens that the sampler draws
//! itself are accepted. It pays off where few requests run, as in evaluation, in `sinew serve` and
//! at the end of a batch: 2 to 3 times as many tokens a second on texts that repeat
//! (docs/performance.md).

use sinew_types::TokenId;
use std::collections::{BTreeMap, HashMap};

/// Number of equal tokens before a draft.
const CONTEXT: usize = 3;
/// Maximum number of tokens remembered; the requests that came first are forgotten first.
const REMEMBERED: usize = 1 << 18;

/// The tokens before a draft.
type Gram = [TokenId; CONTEXT];

/// Draft tokens after which their acceptance rate counts.
const COUNTED: f32 = 32.0;
/// Minimum acceptance rate: a draft token costs part of a row, and saves a whole pass.
const MIN_RATE: f32 = 0.15;
/// Factor on older counts, once per sequence and pass.
const FADING: f32 = 0.97;
/// Passes without drafts after the rate was below the minimum.
const REST: u32 = 100;

/// The acceptance rate of recent draft tokens. Depends on nothing but past ones.
#[derive(Debug, Default)]
pub(crate) struct AcceptanceRate {
    /// Draft tokens of recent passes, older ones faded.
    drafted: f32,
    /// Those of them that were accepted.
    accepted: f32,
    /// Passes that are still without drafts.
    rest: u32,
}

impl AcceptanceRate {
    /// Counts the draft tokens of one sequence in a pass.
    pub(crate) fn note(&mut self, drafted: usize, accepted: usize) {
        self.drafted = self.drafted * FADING + drafted as f32;
        self.accepted = self.accepted * FADING + accepted as f32;
        if self.drafted >= COUNTED && self.accepted < MIN_RATE * self.drafted {
            *self = Self {
                rest: REST,
                ..Self::default()
            };
        }
    }

    /// Whether this pass has drafts. Called once per pass.
    pub(crate) fn drafts_now(&mut self) -> bool {
        let resting = self.rest > 0;
        self.rest = self.rest.saturating_sub(1);
        !resting
    }
}

/// Where each short run of tokens occurred last.
#[derive(Debug, Default)]
pub(crate) struct NgramIndex {
    /// Tokens of recent requests, by arrival.
    texts: BTreeMap<u64, Vec<TokenId>>,
    /// The request, and the position after the run in its text. May name forgotten requests.
    index: HashMap<Gram, (u64, usize)>,
    /// Sum of the lengths of `texts`.
    remembered: usize,
}

impl NgramIndex {
    /// Records the tokens of request `arrival`; later calls for the same request only ever add
    /// tokens. Nothing before `start` is new to the index.
    pub(crate) fn note(&mut self, arrival: u64, tokens: &[TokenId], start: usize) {
        let text = self.texts.entry(arrival).or_default();
        let known = text.len();
        if tokens.len() <= known {
            return;
        }
        text.extend_from_slice(&tokens[known..]);
        self.remembered += tokens.len() - known;
        // The last run has no continuation yet, and must not hide an earlier one.
        let first = known.max(start).max(CONTEXT);
        for next in first..tokens.len() {
            if let Some(gram) = gram_before(tokens, next) {
                self.index.insert(gram, (arrival, next));
            }
        }
        self.forget();
    }

    /// Up to `count` tokens that followed the end of `tokens` the last time; empty if it never
    /// occurred.
    pub(crate) fn draft(&self, tokens: &[TokenId], count: usize) -> &[TokenId] {
        let found = gram_before(tokens, tokens.len()).and_then(|gram| self.index.get(&gram));
        let Some(&(arrival, next)) = found else {
            return &[];
        };
        let text = self.texts.get(&arrival).map_or(&[][..], Vec::as_slice);
        let end = text.len().min(next + count);
        text.get(next..end).unwrap_or(&[])
    }

    /// Drops the oldest texts beyond [`REMEMBERED`] tokens, and the index of dropped texts.
    fn forget(&mut self) {
        while self.remembered > REMEMBERED
            && self.texts.len() > 1
            && let Some((_, text)) = self.texts.pop_first()
        {
            self.remembered -= text.len();
        }
        if self.index.len() > 2 * REMEMBERED {
            let texts = &self.texts;
            self.index
                .retain(|_, (arrival, _)| texts.contains_key(arrival));
        }
    }
}

/// The run of tokens that ends before position `next`.
fn gram_before(tokens: &[TokenId], next: usize) -> Option<Gram> {
    let start = next.checked_sub(CONTEXT)?;
    tokens.get(start..next)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guesses_continue_the_last_occurrence_in_any_text() {
        let mut drafts = NgramIndex::default();
        let own = [1, 2, 3, 4, 5, 6, 1, 2, 3];
        drafts.note(0, &own, 0);
        assert_eq!(drafts.draft(&own, 2), [4, 5]);
        assert_eq!(drafts.draft(&own, 10), [4, 5, 6, 1, 2, 3]);
        drafts.note(1, &[1, 2, 3, 9], 0);
        assert_eq!(drafts.draft(&own, 2), [9]);
        assert_eq!(drafts.draft(&[7, 7, 7], 2), [0; 0]);
        assert_eq!(drafts.draft(&[1, 2], 2), [0; 0]);
    }

    #[test]
    fn guessing_rests_while_it_is_not_worth_it() {
        let mut acceptance = AcceptanceRate::default();
        for _ in 0..50 {
            assert!(acceptance.drafts_now());
            acceptance.note(4, 2);
        }
        let mut wrong = 0;
        while acceptance.drafts_now() {
            acceptance.note(4, 0);
            wrong += 1;
            assert!(wrong < 200, "it never rests");
        }
        assert!(wrong > 5, "one bad draft is no reason to rest");
        let resting = (1..REST).take_while(|_| !acceptance.drafts_now()).count();
        assert_eq!(resting, REST as usize - 1);
        assert!(acceptance.drafts_now());
    }

    #[test]
    fn texts_grow_and_old_ones_are_forgotten() {
        let mut drafts = NgramIndex::default();
        drafts.note(0, &[1, 2, 3], 0);
        assert_eq!(drafts.draft(&[1, 2, 3], 1), [0; 0]);
        drafts.note(0, &[1, 2, 3, 4], 0);
        assert_eq!(drafts.draft(&[1, 2, 3], 1), [4]);
        for arrival in 1..10 {
            let text: Vec<TokenId> = (0..REMEMBERED as u32 / 4)
                .map(|i| i + 100 * arrival)
                .collect();
            drafts.note(u64::from(arrival), &text, 0);
        }
        assert!(drafts.remembered <= REMEMBERED);
        assert!(drafts.index.len() <= 3 * REMEMBERED);
        assert_eq!(drafts.draft(&[1, 2, 3], 1), [0; 0]);
    }
}
