//! Speculative decoding by n-gram lookup (prompt lookup decoding): the draft of a sequence's next
//! tokens is the text that followed the same few tokens before, in its own text or in that of
//! another request. Samples of one task, and outputs of one format, repeat each other.
//!
//! If several places match, the one whose preceding tokens agree furthest is taken. Equal places are decided
//! by siblings: the one whose text shares the longest beginning with the sequence's own (grouped
//! speculation).
//!
//! A draft token costs a row of a pass and decides nothing: only tokens that the sampler draws
//! itself are accepted. It pays off where few requests run, as in evaluation, in `sinew serve` and
//! at the end of a batch: 2 to 3 times as many tokens a second on texts that repeat
//! (docs/performance.md).

use sinew_types::TokenId;
use std::collections::{BTreeMap, HashMap};

/// Number of equal tokens before a draft.
const CONTEXT: usize = 3;
/// Places that are remembered of a run of tokens, the last ones.
const PLACES: usize = 4;
/// Tokens before a place that are compared: a longer agreement adds little.
const COMPARED: usize = 16;
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
    /// Accepted ones among them, faded in the same way.
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

/// No place: a position that no run ends before.
const NOWHERE: (u64, u32) = (0, 0);

/// Index of the last places of each short run of tokens.
#[derive(Debug, Default)]
pub(crate) struct NgramIndex {
    /// Tokens of recent requests, by arrival.
    texts: BTreeMap<u64, Vec<TokenId>>,
    /// Requests, each with the position after the run in its text, the last one first. May name
    /// forgotten requests.
    index: HashMap<Gram, [(u64, u32); PLACES]>,
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
                let places = self.index.entry(gram).or_insert([NOWHERE; PLACES]);
                // The last place in a text is enough, so that siblings are not crowded out.
                let own = places.iter().position(|(text, _)| *text == arrival);
                places[..=own.unwrap_or(PLACES - 1)].rotate_right(1);
                places[0] = (arrival, next as u32);
            }
        }
        self.forget();
    }

    /// Draft of up to `count` tokens that followed the end of `tokens` before; empty if it never occurred.
    pub(crate) fn draft(&self, tokens: &[TokenId], count: usize) -> &[TokenId] {
        let Some(places) = gram_before(tokens, tokens.len()).and_then(|gram| self.index.get(&gram))
        else {
            return &[];
        };
        let known = places.iter().filter(|place| **place != NOWHERE);
        let found = known.filter_map(|(arrival, next)| {
            let (text, next) = (self.texts.get(arrival)?, *next as usize);
            let before = agreement(tokens.iter().rev(), text.get(..next)?.iter().rev());
            let begin = agreement(tokens.iter(), text.iter());
            Some(((before.min(COMPARED), begin), text, next))
        });
        // The first of equal ones, which is the last that occurred.
        let best = found.reduce(|best, one| if one.0 > best.0 { one } else { best });
        let Some((_, text, next)) = best else {
            return &[];
        };
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
            self.index.retain(|_, places| {
                places
                    .iter()
                    .any(|(arrival, _)| texts.contains_key(arrival))
            });
        }
    }
}

/// Number of equal tokens before the first different ones.
fn agreement<'a>(
    a: impl Iterator<Item = &'a TokenId>,
    b: impl Iterator<Item = &'a TokenId>,
) -> usize {
    a.zip(b).take_while(|(a, b)| a == b).count()
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
    fn guesses_continue_what_occurred_in_any_text() {
        let mut drafts = NgramIndex::default();
        let own = [1, 2, 3, 4, 5, 6, 1, 2, 3];
        drafts.note(0, &own, 0);
        assert_eq!(drafts.draft(&own, 2), [4, 5]);
        assert_eq!(drafts.draft(&own, 10), [4, 5, 6, 1, 2, 3]);
        drafts.note(1, &[1, 2, 3, 9], 0);
        // Its own text is the nearest one.
        assert_eq!(drafts.draft(&own, 2), [4, 5]);
        assert_eq!(drafts.draft(&[8, 1, 2, 3], 2), [9]);
        assert_eq!(drafts.draft(&[7, 7, 7], 2), [0; 0]);
        assert_eq!(drafts.draft(&[1, 2], 2), [0; 0]);
    }

    /// A sibling's place comes first among places that agree as far, whatever others sampled later.
    #[test]
    fn a_sibling_is_believed_before_others() {
        let mut drafts = NgramIndex::default();
        drafts.note(0, &[7, 8, 9, 50, 1, 2, 3, 60], 0);
        drafts.note(1, &[5, 5, 5, 51, 1, 2, 3, 61], 0);
        assert_eq!(drafts.draft(&[7, 8, 9, 40, 1, 2, 3], 1), [60]);
        assert_eq!(drafts.draft(&[5, 5, 5, 40, 1, 2, 3], 1), [61]);
        assert_eq!(drafts.draft(&[6, 1, 2, 3], 1), [61]);
        // A longer agreement counts more.
        assert_eq!(drafts.draft(&[5, 5, 5, 50, 1, 2, 3], 1), [60]);
    }

    /// A text that repeats itself leaves the places of others.
    #[test]
    fn a_text_has_one_place_of_a_run() {
        let mut drafts = NgramIndex::default();
        drafts.note(0, &[7, 8, 1, 2, 3, 60], 0);
        let repeats: Vec<TokenId> = [1, 2, 3, 9].repeat(2 * PLACES);
        drafts.note(1, &repeats, 0);
        assert_eq!(drafts.draft(&[7, 8, 1, 2, 3], 1), [60]);
        assert_eq!(drafts.draft(&[4, 4, 1, 2, 3], 1), [9]);
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
