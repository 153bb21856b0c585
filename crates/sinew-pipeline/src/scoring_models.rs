//! Frozen models that score rows: the reference of a KL term, and a teacher.

use crate::trainer_error::{of_policy, of_trainer};
use sinew_orchestrator::PipelineError;
use sinew_train::{Policy, TrainError, score_rows, score_top};
use sinew_types::{TokenLogprob, TrainRow};
use std::fmt;

/// A frozen model.
pub type FrozenModel = Box<dyn Policy + Send>;

/// Source of reference log-probabilities.
pub enum Reference {
    /// The algorithm reads no scores.
    None,
    /// The weights under the adapters, which training does not change.
    Base,
    /// A separate model.
    Model(FrozenModel),
}

impl fmt::Debug for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Base => "Base",
            Self::Model(_) => "Model",
        })
    }
}

/// Frozen models that score rows that the policy sampled.
pub struct ScoringModels {
    reference: Reference,
    teacher: Option<FrozenModel>,
    micro_batch_tokens: usize,
}

sinew_types::debug_fields!(
    ScoringModels as this,
    reference = this.reference,
    teacher = this.teacher.is_some()
);

impl ScoringModels {
    /// The models that an algorithm needs. They compute at most `micro_batch_tokens` packed tokens at a time.
    pub fn new(
        reference: Reference,
        teacher: Option<FrozenModel>,
        micro_batch_tokens: usize,
    ) -> Self {
        Self {
            reference,
            teacher,
            micro_batch_tokens,
        }
    }

    /// Reference log-probabilities of rows.
    ///
    /// # Errors
    /// If the model fails, or none was loaded.
    pub fn reference(
        &mut self,
        policy: &mut dyn Policy,
        rows: &[TrainRow],
    ) -> Result<Vec<Vec<f32>>, PipelineError> {
        match &mut self.reference {
            Reference::Model(model) => {
                score_rows(model.as_mut(), rows, self.micro_batch_tokens).map_err(of_trainer)
            }
            Reference::Base => {
                policy.use_base(true).map_err(of_policy)?;
                let scored = score_rows(policy, rows, self.micro_batch_tokens);
                policy.use_base(false).map_err(of_policy)?;
                scored.map_err(of_trainer)
            }
            Reference::None => Err(PipelineError::system("no reference model was loaded")),
        }
    }

    /// The teacher's log-probabilities of rows.
    ///
    /// # Errors
    /// If the model fails, or none was loaded.
    pub fn teacher(&mut self, rows: &[TrainRow]) -> Result<Vec<Vec<f32>>, PipelineError> {
        let micro_batch_tokens = self.micro_batch_tokens;
        self.ask_teacher(|teacher| score_rows(teacher, rows, micro_batch_tokens))
    }

    /// The teacher's `k` most likely tokens at the position of each trained one.
    ///
    /// # Errors
    /// If the model fails, or none was loaded.
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
        ask: impl FnOnce(&mut dyn Policy) -> Result<T, TrainError>,
    ) -> Result<T, PipelineError> {
        let teacher = self.teacher.as_deref_mut();
        let teacher = teacher.ok_or_else(|| PipelineError::system("no teacher was loaded"))?;
        ask(teacher).map_err(of_trainer)
    }
}
