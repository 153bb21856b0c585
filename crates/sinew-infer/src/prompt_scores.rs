//! The log-probabilities of one prompt, while they are computed.
//!
//! The row at a position predicts the token after it. Rows of a prompt whose keys and values are stored are
//! computed again if their logits are needed, so a sequence that is being scored starts at the latest with
//! the row before its next place.

use crate::prompt_row::PromptRow;
use sinew_types::{PromptLogprob, PromptLogprobs, TokenId};
use std::ops::Range;

/// Places that a request asks for, and the log-probabilities so far.
#[derive(Debug)]
pub(crate) struct PromptScores {
    asked: PromptLogprobs,
    /// Positions of the tokens that are scored.
    places: Range<usize>,
    /// Results of the first places.
    done: Vec<PromptLogprob>,
}

impl PromptScores {
    /// The places of a prompt of `len` tokens.
    pub(crate) fn new(asked: PromptLogprobs, len: usize) -> Self {
        let places = asked.places(len);
        Self {
            done: Vec::with_capacity(places.len()),
            asked,
            places,
        }
    }

    /// Number of the prompt's first tokens whose logits are not needed any more: their keys and values may
    /// come from a cache.
    pub(crate) fn cacheable(&self) -> usize {
        (self.places.start + self.done.len()).saturating_sub(1)
    }

    /// Those of `rows` whose logits are needed. Both are positions.
    pub(crate) fn among(&self, rows: &Range<usize>) -> Range<usize> {
        let start = self.cacheable().max(rows.start);
        let end = self.places.end.saturating_sub(1).min(rows.end);
        start..end.max(start)
    }

    /// Number of rows to compute of the next `rows`, from position `computed` on: at most `limit` of them
    /// need logits.
    pub(crate) fn rows_within(&self, computed: usize, rows: usize, limit: usize) -> usize {
        let needed = self.among(&(computed..computed + rows));
        if needed.len() <= limit {
            return rows;
        }
        needed.start + limit - computed
    }

    /// The question to the device about the token at `position`; `row`: index among the rows of logits.
    pub(crate) fn row(&self, row: usize, position: usize, token: TokenId) -> PromptRow<'_> {
        PromptRow {
            row,
            position,
            token,
            top: self.asked.top,
            targets: self.asked.targets_at(position),
        }
    }

    /// Adds the results of the next places.
    pub(crate) fn add(&mut self, scored: Vec<PromptLogprob>) {
        self.done.extend(scored);
        debug_assert!(self.done.len() <= self.places.len());
    }

    /// Starts over: other weights compute them.
    pub(crate) fn restart(&mut self) {
        self.done.clear();
    }

    /// All results, once the prompt is computed.
    pub(crate) fn finish(self) -> Vec<PromptLogprob> {
        debug_assert_eq!(self.done.len(), self.places.len(), "a place was left out");
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(position: u32) -> PromptLogprob {
        PromptLogprob {
            position,
            logprob: -1.0,
            top: Vec::new(),
            targets: Vec::new(),
        }
    }

    #[test]
    fn rows_before_the_next_place_need_no_logits() {
        let asked = PromptLogprobs {
            last: Some(4),
            ..PromptLogprobs::default()
        };
        // Tokens 6..10 are predicted by the rows 5..9.
        let mut scores = PromptScores::new(asked, 10);
        assert_eq!(scores.cacheable(), 5);
        assert_eq!(scores.among(&(0..10)), 5..9);
        assert_eq!(scores.among(&(0..7)), 5..7);
        assert!(scores.among(&(0..4)).is_empty());
        assert_eq!(scores.rows_within(0, 10, 4), 10);
        assert_eq!(scores.rows_within(0, 10, 3), 8);
        assert_eq!(scores.rows_within(2, 8, 1), 4);
        assert_eq!(scores.rows_within(5, 5, 0), 0);
        scores.add(vec![scored(6), scored(7)]);
        assert_eq!(scores.cacheable(), 7);
        assert_eq!(scores.among(&(7..10)), 7..9);
        scores.restart();
        assert_eq!(scores.cacheable(), 5);
        scores.add((6..10).map(scored).collect());
        assert!(scores.among(&(9..10)).is_empty());
        assert_eq!(scores.finish().len(), 4);
    }

    #[test]
    fn a_prompt_of_one_token_has_no_place() {
        let scores = PromptScores::new(PromptLogprobs::default(), 1);
        assert_eq!(scores.cacheable(), 0);
        assert!(scores.among(&(0..1)).is_empty());
        assert!(scores.finish().is_empty());
    }
}
