//! Passes over rows with any targets, with derivatives that the caller computes.

use crate::loss::LossError;
use crate::pack::{MicroBatch, PackError, PackedRow, TargetRow, pack_targets};
use crate::policy::{OutputChoice, Policy, ScoreGrads, Scores, waves};
use crate::policy_error::PolicyError;
use crate::trainer::check_scores;

/// Reasons for which rows with targets cannot be scored or trained.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TargetError {
    /// Rows that cannot be packed.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// The model failed.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A log-probability that is not finite.
    #[error("row {row}: the log-probability of target {index} is {value}; are the weights finite?")]
    NotFinite {
        /// Index of the row.
        row: usize,
        /// Index in its targets.
        index: usize,
        /// The log-probability.
        value: f32,
    },
    /// The loss of a row could not be computed.
    #[error("row {row}: {error}")]
    Loss {
        /// Index of the row.
        row: usize,
        /// Reason.
        error: LossError,
    },
}

/// Computes the log-probabilities of all targets, and with `backward` adds gradients. Returns the number of
/// computed tokens.
///
/// `loss` gets the index of each row with targets and the log-probabilities of them, in their order; it
/// returns the derivatives of the loss by them, which are only used with `backward`. It is called once for
/// each such row, in an order that follows from the packing. Shared prefixes are computed once if the policy
/// shares them, at most `micro_batch_tokens` packed tokens at a time.
///
/// # Errors
/// If rows cannot be packed, before any computation; or if the model or `loss` fails. Gradients may then be
/// those of some of the rows.
pub fn run_targets<P: Policy + ?Sized>(
    policy: &mut P,
    rows: &[TargetRow<'_>],
    micro_batch_tokens: usize,
    backward: bool,
    mut loss: impl FnMut(usize, &[f32]) -> Result<Vec<f32>, LossError>,
) -> Result<usize, TargetError> {
    let packing = pack_targets(rows, micro_batch_tokens, policy.shares_prefixes())?;
    let batches: Vec<&MicroBatch> = packing.micro_batches.iter().collect();
    let want = OutputChoice {
        backward,
        ..OutputChoice::default()
    };
    for wave in waves(&batches, policy.lanes()) {
        let all = policy.forward(&wave, want)?;
        check_scores(&wave, &all, want)?;
        let mut grads = Vec::with_capacity(wave.len());
        for (batch, scores) in wave.iter().zip(&all) {
            grads.push(derive(batch, scores, &mut loss)?);
        }
        if backward {
            policy.backward(&wave, &grads)?;
        }
    }
    Ok(packing.computed_tokens)
}

/// Derivatives of the loss by the items' log-probabilities: rows with a common item add up there.
fn derive(
    batch: &MicroBatch,
    scores: &Scores,
    loss: &mut impl FnMut(usize, &[f32]) -> Result<Vec<f32>, LossError>,
) -> Result<ScoreGrads, TargetError> {
    let mut grads = ScoreGrads {
        logprobs: vec![0.0; batch.items.len()],
        ..ScoreGrads::default()
    };
    for packed in &batch.rows {
        let logprobs = gather(packed, scores)?;
        let failed = |error| TargetError::Loss {
            row: packed.row,
            error,
        };
        let slopes = loss(packed.row, &logprobs).map_err(failed)?;
        if slopes.len() != logprobs.len() {
            return Err(failed(LossError::Length {
                field: "derivatives",
                actual: slopes.len(),
                expected: logprobs.len(),
            }));
        }
        for (term, slope) in packed.terms.iter().zip(slopes) {
            grads.logprobs[term.item as usize] += slope;
        }
    }
    Ok(grads)
}

/// The log-probabilities of a row's targets.
fn gather(packed: &PackedRow, scores: &Scores) -> Result<Vec<f32>, TargetError> {
    let values = packed.terms.iter().map(|term| {
        let value = scores.logprobs[term.item as usize];
        if value.is_finite() {
            return Ok(value);
        }
        Err(TargetError::NotFinite {
            row: packed.row,
            index: term.t as usize,
            value,
        })
    });
    values.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack::Target;
    use crate::testing::Bigram;
    use sinew_types::TokenId;

    /// Two rows with a common start, of which one asks for two tokens in a place.
    fn rows() -> [(Vec<TokenId>, Vec<Target>); 2] {
        let target = |after: u32, token: TokenId| Target { after, token };
        let first = vec![target(0, 2), target(1, 0), target(1, 3), target(2, 1)];
        let second = vec![target(1, 0), target(2, 4)];
        [(vec![0, 1, 2], first), (vec![0, 1, 3], second)]
    }

    fn borrowed(rows: &[(Vec<TokenId>, Vec<Target>)]) -> Vec<TargetRow<'_>> {
        rows.iter()
            .map(|(tokens, targets)| TargetRow { tokens, targets })
            .collect()
    }

    /// The gradient of `Σ slope·ℓ` by the logits, from the log-probabilities of the bigram table.
    fn expected(policy: &Bigram, slopes: &[Vec<f32>]) -> Vec<f64> {
        let mut gradient = vec![0.0; policy.vocab * policy.vocab];
        for ((tokens, targets), slopes) in rows().iter().zip(slopes) {
            for (target, &slope) in targets.iter().zip(slopes) {
                let token = tokens[target.after as usize];
                for (j, l) in policy.after(token).iter().enumerate() {
                    let hit = f64::from(u8::from(j == target.token as usize));
                    gradient[token as usize * policy.vocab + j] +=
                        f64::from(slope) * (hit - l.exp());
                }
            }
        }
        gradient
    }

    #[test]
    fn any_targets_are_scored_and_trained() {
        let rows = rows();
        let slopes = [vec![0.5, -1.0, 2.0, 0.25], vec![1.5, -0.75]];
        // Together, and in a micro-batch and a lane each.
        for (max_tokens, lanes, computed) in [(64, 1, 4), (3, 2, 6)] {
            let mut policy = Bigram::new(5);
            policy.lanes = lanes;
            let mut found = vec![Vec::new(); 2];
            let tokens = run_targets(
                &mut policy as &mut dyn Policy,
                &borrowed(&rows),
                max_tokens,
                true,
                |row, logprobs| {
                    found[row] = logprobs.to_vec();
                    Ok(slopes[row].clone())
                },
            );
            assert_eq!(tokens, Ok(computed));
            for ((tokens, targets), found) in rows.iter().zip(&found) {
                for (target, l) in targets.iter().zip(found) {
                    let all = policy.after(tokens[target.after as usize]);
                    assert!((f64::from(*l) - all[target.token as usize]).abs() < 1e-6);
                }
            }
            for (g, e) in policy.gradient.iter().zip(expected(&policy, &slopes)) {
                assert!((f64::from(*g) - e).abs() < 2e-6, "{g} {e}");
            }
        }
    }

    #[test]
    fn without_a_backward_pass_the_gradient_stays_as_it_is() {
        let mut policy = Bigram::new(5);
        let rows = rows();
        let count = |_: usize, logprobs: &[f32]| Ok(vec![1.0; logprobs.len()]);
        run_targets(&mut policy, &borrowed(&rows), 64, false, count).unwrap();
        assert!(policy.gradient.iter().all(|&g| g == 0.0));
    }

    #[test]
    fn failures_name_the_row() {
        let rows = rows();
        let mut policy = Bigram::new(5);
        let short = |_: usize, _: &[f32]| Ok(Vec::new());
        let error = run_targets(&mut policy, &borrowed(&rows), 64, true, short).unwrap_err();
        assert!(matches!(error, TargetError::Loss { .. }), "{error}");
        policy.logits[1] = f32::NAN;
        let any = |_: usize, logprobs: &[f32]| Ok(vec![0.0; logprobs.len()]);
        let error = run_targets(&mut policy, &borrowed(&rows), 64, true, any).unwrap_err();
        assert!(
            matches!(
                error,
                TargetError::NotFinite {
                    row: 0,
                    index: 0,
                    ..
                }
            ),
            "{error}"
        );
    }
}
