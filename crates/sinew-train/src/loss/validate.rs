//! Refuses loss specifications that are impossible or would have no effect.

use sinew_types::{Correction, LossSpec, Surrogate};

/// Reasons for which a loss specification is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LossSpecError {
    /// A number outside its range.
    #[error("loss {field} is {value}, allowed: {allowed}")]
    Value {
        field: &'static str,
        value: f32,
        allowed: &'static str,
    },
    /// A correction for demonstrations, which were not sampled by a policy.
    #[error(
        "cross-entropy has no sampling policy, so a correction has no meaning: \
         set correction to none"
    )]
    CorrectionWithoutSampling,
}

/// Refuses a number that is not finite or fails `test`.
fn require(
    field: &'static str,
    value: f32,
    allowed: &'static str,
    test: impl Fn(f32) -> bool,
) -> Result<(), LossSpecError> {
    if value.is_finite() && test(value) {
        Ok(())
    } else {
        Err(LossSpecError::Value {
            field,
            value,
            allowed,
        })
    }
}

/// Checks every number of a specification, and combinations that make no sense.
pub fn validate_spec(spec: &LossSpec) -> Result<(), LossSpecError> {
    surrogate(&spec.surrogate)?;
    correction(&spec.correction)?;
    if spec.surrogate == Surrogate::CrossEntropy && spec.correction != Correction::None {
        return Err(LossSpecError::CorrectionWithoutSampling);
    }
    if let Some(kl) = &spec.kl {
        require(
            "kl.coefficient",
            kl.coefficient,
            "a number > 0; drop the KL term for 0",
            |v| v > 0.0,
        )?;
    }
    require("entropy", spec.entropy, "a finite number", |_| true)?;
    if let Some(teacher) = &spec.teacher {
        let allowed = "a number > 0; drop the teacher term for 0";
        require("teacher.coefficient", teacher.coefficient, allowed, |v| {
            v > 0.0
        })?;
        let top_k = teacher.top_k as f32;
        require("teacher.top_k", top_k, "1 or more", |v| v >= 1.0)?;
    }
    if let Some((coefficient, clip)) = spec.value {
        require("value coefficient", coefficient, "a number > 0", |v| {
            v > 0.0
        })?;
        if let Some(clip) = clip {
            require("value clip", clip, "a number > 0", |v| v > 0.0)?;
        }
    }
    Ok(())
}

fn surrogate(surrogate: &Surrogate) -> Result<(), LossSpecError> {
    let range = |low: f32, high: f32| {
        require("surrogate.low", low, "a number >= 0", |v| v >= 0.0)?;
        require("surrogate.high", high, "a number >= 0", |v| v >= 0.0)
    };
    match *surrogate {
        Surrogate::Reinforce | Surrogate::Importance | Surrogate::CrossEntropy => Ok(()),
        Surrogate::Clip { low, high, dual } => {
            range(low, high)?;
            match dual {
                Some(dual) => require("surrogate.dual", dual, "a number > 1 + high", |v| {
                    v > 1.0 + high
                }),
                None => Ok(()),
            }
        }
        Surrogate::SequenceClip { low, high }
        | Surrogate::SequenceTokenClip { low, high }
        | Surrogate::Cispo { low, high } => range(low, high),
        Surrogate::Soft { tau_pos, tau_neg } => {
            require("surrogate.tau_pos", tau_pos, "a number > 0", |v| v > 0.0)?;
            require("surrogate.tau_neg", tau_neg, "a number > 0", |v| v > 0.0)
        }
        Surrogate::TrustRegion { limit, penalty } => {
            require("surrogate.limit", limit, "a number > 0", |v| v > 0.0)?;
            require("surrogate.penalty", penalty, "a number >= 0", |v| v >= 0.0)
        }
        Surrogate::Dro { beta } => require("surrogate.beta", beta, "a number >= 0", |v| v >= 0.0),
    }
}

fn correction(correction: &Correction) -> Result<(), LossSpecError> {
    match *correction {
        Correction::None => Ok(()),
        Correction::Truncate { low, high } | Correction::Mask { low, high } => {
            require("correction.low", low, "a number >= 0", |v| v >= 0.0)?;
            require("correction.high", high, "a number > 0 and >= low", |v| {
                v > 0.0 && v >= low
            })
        }
        Correction::SequenceMask { high } => {
            require("correction.high", high, "a number > 0", |v| v > 0.0)
        }
        Correction::Reject { upper, .. } => {
            require("correction.upper", upper, "a number > 0", |v| v > 0.0)
        }
    }
}
