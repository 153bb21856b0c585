//! Errors of the trainer as errors of the loop.

use sinew_orchestrator::PipelineError;
use sinew_train::{PolicyError, TrainError};

/// An error of the trainer, as a lost one if its processes are gone.
pub(crate) fn of_trainer(e: TrainError) -> PipelineError {
    match e {
        TrainError::Policy(e) => of_policy(e),
        e => system(e),
    }
}

/// An error of the policy, as [`of_trainer`].
pub(crate) fn of_policy(e: PolicyError) -> PipelineError {
    match e {
        PolicyError::Lost(_) => PipelineError::TrainerLost(e.to_string()),
        PolicyError::Failed(_) => system(e),
    }
}

/// Any error about the trainer; of one that names numbers which are not finite, with a hint.
pub(crate) fn system(e: impl std::fmt::Display) -> PipelineError {
    let text = e.to_string();
    let diverged = ["is NaN", "is inf", "is -inf"]
        .iter()
        .any(|n| text.contains(n));
    let (what, hint) = if diverged {
        (
            "the model has diverged: ",
            "\n  hint: start again with a lower train.learning_rate or train.lora.alpha",
        )
    } else {
        ("", "")
    };
    PipelineError::system(format!("trainer: {what}{text}{hint}"))
}
