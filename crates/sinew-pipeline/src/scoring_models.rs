//! Frozen models that score rows: the reference of a KL term, and a teacher.

use sinew_model::Params;
use sinew_orchestrator::PipelineError;
use sinew_tensor::Cpu;
use sinew_train::{ModelPolicy, TrainError, score_rows, score_top};
use sinew_types::{TokenLogprob, TrainRow};

/// Source of reference log-probabilities.
#[derive(Debug)]
pub enum ReferenceWeights {
    /// The algorithm reads no scores.
    None,
    /// The weights under the adapters, which training does not change.
    Base,
    Model(Box<Params>),
}

#[derive(Debug)]
enum Reference {
    None,
    Base,
    Model(Box<ModelPolicy>),
}

/// Frozen models that score what the policy sampled.
#[derive(Debug)]
pub struct ScoringModels {
    reference: Reference,
    teacher: Option<Box<ModelPolicy>>,
    micro_batch_tokens: usize,
}

fn failed(e: impl std::fmt::Display) -> PipelineError {
    PipelineError::system(format!("trainer: {e}"))
}

impl ScoringModels {
    /// Creates the models that an algorithm needs, for contexts of a given number of tokens.
    ///
    /// # Errors
    /// If a model does not fit the device or the context.
    pub fn new(
        reference: ReferenceWeights,
        teacher: Option<Params>,
        device: &Cpu,
        max_context_tokens: usize,
        micro_batch_tokens: usize,
    ) -> Result<Self, PipelineError> {
        let frozen = |params: Params| {
            let model = ModelPolicy::frozen(params, max_context_tokens, device.clone());
            model.map(Box::new).map_err(failed)
        };
        let reference = match reference {
            ReferenceWeights::None => Reference::None,
            ReferenceWeights::Base => Reference::Base,
            ReferenceWeights::Model(params) => Reference::Model(frozen(*params)?),
        };
        Ok(Self {
            reference,
            teacher: teacher.map(frozen).transpose()?,
            micro_batch_tokens,
        })
    }

    /// Reference log-probabilities of rows.
    pub fn reference(
        &mut self,
        policy: &mut ModelPolicy,
        rows: &[TrainRow],
    ) -> Result<Vec<Vec<f32>>, PipelineError> {
        match &mut self.reference {
            Reference::Model(model) => {
                score_rows(model.as_mut(), rows, self.micro_batch_tokens).map_err(failed)
            }
            Reference::Base => {
                let mut scored = rows.to_vec();
                policy
                    .fill_reference_from_base(&mut scored, self.micro_batch_tokens)
                    .map_err(failed)?;
                Ok(scored.into_iter().filter_map(|r| r.ref_logprobs).collect())
            }
            Reference::None => Err(PipelineError::system("no reference model was loaded")),
        }
    }

    /// The teacher's log-probabilities of rows.
    pub fn teacher(&mut self, rows: &[TrainRow]) -> Result<Vec<Vec<f32>>, PipelineError> {
        let micro_batch_tokens = self.micro_batch_tokens;
        self.ask_teacher(|teacher| score_rows(teacher, rows, micro_batch_tokens))
    }

    /// The teacher's `k` most likely tokens in the place of each trained one.
    pub fn teacher_top(
        &mut self,
        rows: &[TrainRow],
        k: usize,
    ) -> Result<Vec<Vec<Vec<TokenLogprob>>>, PipelineError> {
        let micro_batch_tokens = self.micro_batch_tokens;
        self.ask_teacher(|teacher| score_top(teacher, rows, micro_batch_tokens, k))
    }

    fn ask_teacher<T>(
        &mut self,
        ask: impl FnOnce(&mut ModelPolicy) -> Result<T, TrainError>,
    ) -> Result<T, PipelineError> {
        let teacher = self.teacher.as_mut();
        let teacher = teacher.ok_or_else(|| PipelineError::system("no teacher was loaded"))?;
        ask(teacher).map_err(failed)
    }
}
