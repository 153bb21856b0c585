//! The output format of a request: which tokens may come next, and what is recorded of them.

use crate::forward::Draw;
use sinew_grammar::{GrammarError, Grammars, Mask, Matcher};
use sinew_types::{
    Choice, EngineError, FormatLaw, GenerateRequest, SamplingParams, TokenId, TokenLogprob,
};
use std::sync::Arc;

/// The matcher of one request, and what its tokens are recorded with.
#[derive(Debug)]
pub struct Constraint {
    law: Arc<FormatLaw>,
    matcher: Box<dyn Matcher>,
}

/// A format that cannot be followed, or no longer.
pub(crate) fn failed(error: &GrammarError) -> EngineError {
    EngineError::Format(error.to_string())
}

impl Constraint {
    /// For a request; `None` if it has no format. `columns` are those of the engine's logits.
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

    /// What may come next.
    pub fn mask(&mut self) -> Result<Arc<Mask>, EngineError> {
        self.matcher.mask().map_err(|e| failed(&e))
    }

    /// Goes on with a token of the mask; what is recorded of it.
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

    /// The next token if there is no choice: it needs no logits.
    pub fn without_choice(&mut self, params: &SamplingParams) -> Result<Option<Draw>, EngineError> {
        let mask = self.mask()?;
        match mask.only() {
            Some(token) => self.forced(token, &mask, params).map(Some),
            None => Ok(None),
        }
    }

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
