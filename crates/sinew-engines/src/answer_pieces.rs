//! The answer of a server that speaks token ids, put together piece by piece.
//!
//! vLLM and SGLang differ in the form of a piece (their `wire` modules read it). The checks are the same, and
//! are here.

use crate::attempt::{Attempt, AttemptEnd, ServerEnd};
use crate::backend::{AttemptSink, check_label};
use crate::error::AttemptError;
use crate::swap::{LabelSpan, SwapWatch};
use sinew_types::{FinishReason, RouteSpan, TokenId, TokenLogprob};

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
    /// Label of the weights when the piece was sent, if the server reports it.
    pub(crate) label: Option<String>,
    /// Labels of all tokens so far, if the server reports them.
    pub(crate) spans: Vec<LabelSpan>,
    /// Prompt tokens found in the server's prefix cache.
    pub(crate) cached: Option<u32>,
    /// Experts of prompt and output, with the last piece.
    pub(crate) routes: Option<RouteSpan>,
}

/// The pieces of an attempt so far.
#[derive(Debug)]
pub(crate) struct AnswerPieces<'a> {
    attempt: &'a Attempt,
    watch: SwapWatch<'a>,
    reason: Option<FinishReason>,
    cached_prompt_tokens: u32,
    routes: Option<RouteSpan>,
    echoed: bool,
    spanned: bool,
    aborted: bool,
    /// Tokens that were handed on before the first load since the attempt began.
    before_load: Option<usize>,
}

impl<'a> AnswerPieces<'a> {
    /// The answer to `attempt`; `watch` was made before its request was sent.
    pub(crate) fn new(attempt: &'a Attempt, watch: SwapWatch<'a>) -> Self {
        Self {
            attempt,
            watch,
            reason: None,
            cached_prompt_tokens: 0,
            routes: None,
            echoed: false,
            spanned: false,
            aborted: false,
            before_load: None,
        }
    }

    /// Checks a piece and hands its tokens on. After weights were loaded, tokens wait for a span that names
    /// theirs.
    ///
    /// # Errors
    /// If its weights are not the attempt's, or others that were loaded meanwhile: before any of its tokens
    /// is forwarded. If the tokens cannot be right.
    pub(crate) async fn take(
        &mut self,
        seen: AnswerPiece,
        sink: &mut AttemptSink,
    ) -> Result<(), AttemptError> {
        if let Some(prompt) = &seen.prompt {
            sink.echo(prompt)?;
            self.echoed = true;
        }
        self.spanned |= !seen.spans.is_empty();
        self.aborted |= matches!(seen.end, Some(ServerEnd::Aborted(_)));
        if self.watch.across() {
            sink.hold(&seen.ids, &seen.logprobs, seen.top)?;
            // Tokens that are handed on later have the version of their span.
            let before_load = *self.before_load.get_or_insert(sink.handed_on());
            let stamps = self.watch.stamps(&seen.spans, self.attempt, before_load)?;
            sink.stamp(&stamps).await?;
        } else {
            // Before any of its tokens is handed on.
            let spans = seen.spans.iter().map(|span| &span.label);
            for label in spans.chain(&seen.label) {
                check_label(self.attempt, label)?;
            }
            if !seen.ids.is_empty() {
                sink.tokens(&seen.ids, &seen.logprobs, seen.top).await?;
            }
        }
        self.cached_prompt_tokens = seen.cached.unwrap_or(self.cached_prompt_tokens);
        self.routes = seen.routes.or(self.routes.take());
        if let Some(said) = seen.end {
            if sink.handed_on() < sink.sampled() {
                let why =
                    "weights were loaded, and it does not report which of them sampled the rest";
                return Err(AttemptError::Cut(why.to_owned()));
            }
            self.reason = Some(sink.end(&said).await?);
        }
        Ok(())
    }

    /// Whether the server reported its prompt.
    pub(crate) fn echoed(&self) -> bool {
        self.echoed
    }

    /// Whether the server reported the weights of each token.
    pub(crate) fn spanned(&self) -> bool {
        self.spanned
    }

    /// The server has given up, and says nothing more.
    pub(crate) fn server_aborts(&mut self) {
        self.aborted = true;
    }

    /// Whether the server ended it because of a load, and so does not keep its requests.
    pub(crate) fn was_cut_by_a_load(&self) -> bool {
        self.aborted && self.watch.across()
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
            routes: self.routes.filter(|routes| {
                // The last token was never an input.
                let inputs = self.attempt.prompt.len() + sink.sampled();
                (routes.end() as usize) < inputs
            }),
        })
    }
}
