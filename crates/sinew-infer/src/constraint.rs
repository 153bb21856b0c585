//! The output format of a request: the tokens that are allowed next, and the record of each choice.
//!
//! One constraint belongs to one request and advances with each of its tokens; its matcher and
//! masks come from the port [`Grammars`].

use crate::draw::Draw;
use sinew_grammar::{GrammarError, Grammars, Mask, Matcher};
use sinew_types::{
    Choice, EngineError, FormatLaw, GenerateRequest, SamplingParams, TokenId, TokenLogprob,
};
use std::sync::Arc;

/// The matcher of one request, and the record that goes with its tokens.
#[derive(Debug)]
pub struct Constraint {
    law: Arc<FormatLaw>,
    matcher: Box<dyn Matcher>,
}

/// The error of a format that cannot be followed, or no longer.
pub(crate) fn failed(error: &GrammarError) -> EngineError {
    EngineError::Format(error.to_string())
}

impl Constraint {
    /// The constraint of a request; `None` if it has no format. `columns` are those of the engine's
    /// logits. Compiles the format, which can take milliseconds to seconds; compiled formats are
    /// cached.
    ///
    /// # Errors
    /// If the engine has no maker of masks, the masks are of another vocabulary, or the format
    /// cannot be compiled.
    pub(crate) fn start(
        grammars: Option<&dyn Grammars>,
        request: &GenerateRequest,
        columns: usize,
    ) -> Result<Option<Self>, EngineError> {
        let Some(format) = &request.sampling.format else {
            return Ok(None);
        };
        let refused = |why: String| EngineError::Format(why);
        let grammars = grammars.ok_or_else(|| {
            refused("this engine was built without a maker of masks: leave the format out".into())
        })?;
        if grammars.columns() != columns {
            let made = grammars.columns();
            return Err(refused(format!(
                "masks are of {made} tokens, the model has {columns}"
            )));
        }
        Ok(Some(Self {
            matcher: grammars.start(format).map_err(|e| failed(&e))?,
            law: Arc::new(grammars.law(format)),
        }))
    }

    /// Whether the output is over.
    pub fn ended(&self) -> bool {
        self.matcher.ended()
    }

    /// The tokens that can come next.
    ///
    /// # Errors
    /// If no mask can be made: the request fails, and never continues without one.
    pub fn mask(&mut self) -> Result<Arc<Mask>, EngineError> {
        self.matcher.mask().map_err(|e| failed(&e))
    }

    /// Advances by a token of the mask and returns the record of the choice. `log_mass` is the
    /// logarithm of the probability that all allowed tokens have together.
    ///
    /// # Errors
    /// If the format does not allow the token.
    pub fn accept(
        &mut self,
        token: TokenId,
        mask: &Mask,
        log_mass: f32,
    ) -> Result<Choice, EngineError> {
        self.matcher.advance(token).map_err(|e| failed(&e))?;
        Ok(Choice {
            law: Arc::clone(&self.law),
            allowed: mask.allowed(),
            mask: mask.hash(),
            log_mass,
        })
    }

    /// The next token if the mask allows only one: it needs no logits, and its log-probability is 0.
    pub fn without_choice(&mut self, params: &SamplingParams) -> Result<Option<Draw>, EngineError> {
        let mask = self.mask()?;
        match mask.only() {
            Some(token) => self.forced(token, &mask, params).map(Some),
            None => Ok(None),
        }
    }

    /// The draw of a token without an alternative.
    fn forced(
        &mut self,
        token: TokenId,
        mask: &Mask,
        params: &SamplingParams,
    ) -> Result<Draw, EngineError> {
        let alone = TokenLogprob {
            id: token,
            logprob: 0.0,
        };
        Ok(Draw {
            id: token,
            logprob: 0.0,
            top: vec![alone; usize::from(params.top_logprobs > 0)],
            choice: Some(self.accept(token, mask, 0.0)?),
        })
    }
}
