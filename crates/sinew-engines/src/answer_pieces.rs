//! The answer of a server that speaks token ids, put together piece by piece.
//!
//! vLLM and SGLang differ in the form of a piece (their `wire` modules read it). The checks are the same, and
//! are here.

use crate::attempt::{Attempt, AttemptEnd, ServerEnd};
use crate::backend::{AttemptSink, ServedWeights};
use crate::error::AttemptError;
use sinew_types::{FinishReason, TokenId, TokenLogprob};

/// The content of one piece that earlier pieces did not have.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct AnswerPiece {
    /// The prompt that the server reports.
    pub(crate) prompt: Option<Vec<TokenId>>,
    /// New ids, with one log-probability each and the alternatives of each.
    pub(crate) ids: Vec<TokenId>,
    pub(crate) logprobs: Vec<Option<f64>>,
    pub(crate) top: Vec<Vec<TokenLogprob>>,
    /// The reason of the end, with the last piece.
    pub(crate) end: Option<ServerEnd>,
    /// Labels of the weights that sampled, if the server reports them.
    pub(crate) versions: Vec<String>,
    /// Prompt tokens found in the server's prefix cache.
    pub(crate) cached: Option<u32>,
}

/// The pieces of an attempt so far.
#[derive(Debug, Default)]
pub(crate) struct AnswerPieces {
    reason: Option<FinishReason>,
    cached_prompt_tokens: u32,
    echoed: bool,
}

impl AnswerPieces {
    /// Checks a piece and hands its tokens on.
    ///
    /// # Errors
    /// If its weights are not the attempt's: before any of its tokens is forwarded. If the tokens cannot be
    /// right.
    pub(crate) async fn take(
        &mut self,
        seen: AnswerPiece,
        attempt: &Attempt,
        sink: &mut AttemptSink,
    ) -> Result<(), AttemptError> {
        if let Some(prompt) = &seen.prompt {
            sink.echo(prompt)?;
            self.echoed = true;
        }
        // Labels are checked before any token is handed on.
        for label in &seen.versions {
            if ServedWeights::from_label(label) != ServedWeights::Version(attempt.weights) {
                return Err(AttemptError::Version {
                    expected: attempt.weights,
                    found: label.clone(),
                });
            }
        }
        if !seen.ids.is_empty() {
            sink.tokens(&seen.ids, &seen.logprobs, seen.top).await?;
        }
        self.cached_prompt_tokens = seen.cached.unwrap_or(self.cached_prompt_tokens);
        if let Some(said) = seen.end {
            self.reason = Some(sink.end(&said).await?);
        }
        Ok(())
    }

    /// Whether the server reported its prompt.
    pub(crate) fn echoed(&self) -> bool {
        self.echoed
    }

    /// The end of the attempt.
    ///
    /// # Errors
    /// If the server never gave a reason: then the stream was cut.
    pub(crate) fn end(self, sink: &AttemptSink) -> Result<AttemptEnd, AttemptError> {
        let Some(reason) = self.reason else {
            let why = format!("after {} tokens, without a reason", sink.sampled());
            return Err(AttemptError::Cut(why));
        };
        Ok(AttemptEnd {
            reason,
            cached_prompt_tokens: self.cached_prompt_tokens,
        })
    }
}
