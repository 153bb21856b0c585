//! Guesses of what a sequence says next: what followed the same few tokens before, in its own
//! text or in that of another request. Samples of one task, and all that follow one format,
//! repeat each other.
//!
//! A guess costs a row of a pass and decides nothing: only tokens that the sampler draws
//! itself are accepted.

use sinew_types::TokenId;
use std::collections::{BTreeMap, HashMap};

/// Tokens that must agree before a guess is made.
const CONTEXT: usize = 3;
/// Most tokens remembered; the requests that came first are forgotten first.
const REMEMBERED: usize = 1 << 18;

type Gram = [TokenId; CONTEXT];

/// Guessed tokens after which their worth is judged.
const JUDGED: f32 = 32.0;
/// Share of guessed tokens that must come true: a guess costs part of a row, and saves a whole pass.
const WORTH: f32 = 0.15;
/// What the counts of earlier passes keep.
const FADING: f32 = 0.97;
/// Passes without guesses after they were not worth it.
const REST: u32 = 100;

/// Whether guesses have lately been right often enough. Depends on nothing but past guesses.
#[derive(Debug, Default)]
pub(crate) struct Worth {
    guessed: f32,
    right: f32,
    rest: u32,
}

impl Worth {
    /// Takes note of the tokens that one sequence guessed in a pass.
    pub(crate) fn note(&mut self, guessed: usize, right: usize) {
        self.guessed = self.guessed * FADING + guessed as f32;
        self.right = self.right * FADING + right as f32;
        if self.guessed >= JUDGED && self.right < WORTH * self.guessed {
            *self = Self {
                rest: REST,
                ..Self::default()
            };
        }
    }

    /// Asked once a pass: whether to guess in it.
    pub(crate) fn guess_now(&mut self) -> bool {
        let resting = self.rest > 0;
        self.rest = self.rest.saturating_sub(1);
        !resting
    }
}

/// Where each short run of tokens occurred last.
#[derive(Debug, Default)]
pub(crate) struct Drafts {
    /// Tokens of recent requests, by arrival.
    texts: BTreeMap<u64, Vec<TokenId>>,
    /// The request, and the position after the run in its text. May name forgotten requests.
    index: HashMap<Gram, (u64, usize)>,
    /// Sum of the lengths of `texts`.
    remembered: usize,
}

impl Drafts {
    /// Takes note of what request `arrival` consists of now; calls for one request only ever
    /// add tokens. Nothing before `start` is new to the index.
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

    /// Up to `count` tokens that may follow `tokens`.
    pub(crate) fn guess(&self, tokens: &[TokenId], count: usize) -> &[TokenId] {
        let found = gram_before(tokens, tokens.len()).and_then(|gram| self.index.get(&gram));
        let Some(&(arrival, next)) = found else {
            return &[];
        };
        let text = self.texts.get(&arrival).map_or(&[][..], Vec::as_slice);
        let end = text.len().min(next + count);
        text.get(next..end).unwrap_or(&[])
    }

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
        let mut drafts = Drafts::default();
        let own = [1, 2, 3, 4, 5, 6, 1, 2, 3];
        drafts.note(0, &own, 0);
        assert_eq!(drafts.guess(&own, 2), [4, 5]);
        assert_eq!(drafts.guess(&own, 10), [4, 5, 6, 1, 2, 3]);
        drafts.note(1, &[1, 2, 3, 9], 0);
        assert_eq!(drafts.guess(&own, 2), [9]);
        assert_eq!(drafts.guess(&[7, 7, 7], 2), [0; 0]);
        assert_eq!(drafts.guess(&[1, 2], 2), [0; 0]);
    }

    #[test]
    fn guessing_rests_while_it_is_not_worth_it() {
        let mut worth = Worth::default();
        for _ in 0..50 {
            assert!(worth.guess_now());
            worth.note(4, 2);
        }
        let mut wrong = 0;
        while worth.guess_now() {
            worth.note(4, 0);
            wrong += 1;
            assert!(wrong < 200, "it never rests");
        }
        assert!(wrong > 5, "one bad guess is no reason to rest");
        let resting = (1..REST).take_while(|_| !worth.guess_now()).count();
        assert_eq!(resting, REST as usize - 1);
        assert!(worth.guess_now());
    }

    #[test]
    fn texts_grow_and_old_ones_are_forgotten() {
        let mut drafts = Drafts::default();
        drafts.note(0, &[1, 2, 3], 0);
        assert_eq!(drafts.guess(&[1, 2, 3], 1), [0; 0]);
        drafts.note(0, &[1, 2, 3, 4], 0);
        assert_eq!(drafts.guess(&[1, 2, 3], 1), [4]);
        for arrival in 1..10 {
            let text: Vec<TokenId> = (0..REMEMBERED as u32 / 4)
                .map(|i| i + 100 * arrival)
                .collect();
            drafts.note(u64::from(arrival), &text, 0);
        }
        assert!(drafts.remembered <= REMEMBERED);
        assert!(drafts.index.len() <= 3 * REMEMBERED);
        assert_eq!(drafts.guess(&[1, 2, 3], 1), [0; 0]);
    }
}
