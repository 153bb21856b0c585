//! A request that is held to a format: what may come next, and what is recorded of it.

use crate::sampler::{self, Draw};
use sinew_grammar::{GrammarError, Grammars, Mask, Matcher};
use sinew_tensor::Device;
use sinew_types::{
    Choice, EngineError, FormatLaw, GenerateRequest, SamplingParams, TokenId, TokenLogprob,
};
use std::sync::Arc;

/// The matcher of one request, and what its tokens are recorded with.
#[derive(Debug)]
pub(crate) struct Held {
    law: Arc<FormatLaw>,
    matcher: Box<dyn Matcher>,
}

/// A format that cannot be held to, or no longer.
pub(crate) fn failed(error: &GrammarError) -> EngineError {
    EngineError::Format(error.to_string())
}

impl Held {
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
    pub(crate) fn ended(&self) -> bool {
        self.matcher.ended()
    }

    /// What may come next.
    pub(crate) fn mask(&mut self) -> Result<Arc<Mask>, EngineError> {
        self.matcher.mask().map_err(|e| failed(&e))
    }

    /// Goes on with a token of the mask; what is recorded of it.
    pub(crate) fn take(
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

    /// Draws the token that follows `position` tokens; with a `device`, with the log-probabilities of training.
    pub(crate) fn draw(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        position: usize,
        device: Option<&Device>,
    ) -> Result<Draw, EngineError> {
        let mask = self.mask()?;
        if let Some(token) = mask.only() {
            return self.forced(token, &mask, params);
        }
        let drawn = sampler::draw_masked(logits, params, position, &mask);
        let (mut draw, log_mass) = drawn.map_err(|e| EngineError::Failed(e.to_string()))?;
        if let Some(device) = device {
            sampler::as_trained(&mut draw, device, logits, params, Some(&mask));
        }
        draw.choice = Some(self.take(draw.id, &mask, log_mass)?);
        Ok(draw)
    }

    /// The next token if there is no choice: it needs no logits.
    pub(crate) fn without_choice(
        &mut self,
        params: &SamplingParams,
    ) -> Result<Option<Draw>, EngineError> {
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
            choice: Some(self.take(token, mask, 0.0)?),
        })
    }
}
