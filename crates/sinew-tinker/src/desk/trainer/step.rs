//! Losses and updates: the commands that change a model, the first time and again.

use super::{Present, Trainer, encoded, journal_failed};
use crate::batch::forward_backward;
use crate::desk::clerk::Ran;
use crate::desk::codec::decode;
use crate::desk::types::{AdamParams, Command, ModelId, Reply};
use crate::loss::Loss;
use crate::{Datum, LossRequest, TinkerError};
use sinew_train::optim::{AdamWConfig, Outcome, Update};
use std::collections::BTreeMap;

impl Trainer {
    /// Carries out a `ForwardBackward` or `OptimStep` of the current model. Equal calls on equal weights have
    /// equal effects, so a call that is repeated after a kill has the effect of the first.
    pub(super) fn compute(
        &mut self,
        model: &ModelId,
        payload: &[u8],
        cost: u64,
    ) -> Result<Ran, TinkerError> {
        match decode::<Command>(payload).map_err(journal_failed)? {
            Command::ForwardBackward {
                data,
                loss,
                forward_only,
                ..
            } => self.differentiate(model, &data, &loss, !forward_only, cost),
            Command::OptimStep { seq, adam, .. } => self.step(model, seq, &adam),
            _ => Err(TinkerError::Internal(
                "the journal has another command in the place of one that computes".to_owned(),
            )),
        }
    }

    fn present_mut(&mut self, model: &ModelId) -> Result<&mut Present, TinkerError> {
        let present = self.present.get_mut(model);
        present.ok_or_else(|| TinkerError::Internal(format!("{model} is not in memory")))
    }

    fn differentiate(
        &mut self,
        model: &ModelId,
        data: &[Datum],
        loss: &LossRequest,
        backward: bool,
        cost: u64,
    ) -> Result<Ran, TinkerError> {
        let loss = Loss::parse(loss)?;
        let limits = self.limits.batch;
        let policy = self.residents.policy()?;
        let output = forward_backward(policy, data, &loss, backward, &limits)?;
        let present = self.present_mut(model)?;
        present.gradient |= backward;
        present.tokens += cost;
        Ok(Ran::Output(encoded(Reply::ForwardBackward(output))?))
    }

    /// Applies the gradients. One that is not finite changes nothing but the gradients, which are 0 after any
    /// step.
    fn step(&mut self, model: &ModelId, seq: u64, adam: &AdamParams) -> Result<Ran, TinkerError> {
        let mut update = update(adam)?;
        let present = self.present_mut(model)?;
        update.number = present.updates + 1;
        let without_gradient = !present.gradient;
        let policy = self.residents.policy()?;
        if without_gradient {
            // Their memory may be given back.
            policy.zero_gradients()?;
        }
        let outcome = policy.apply(&update)?;
        policy.zero_gradients()?;
        self.residents.rest();
        let present = self.present_mut(model)?;
        present.gradient = false;
        present.steps += 1;
        present.boundary = seq + 1;
        let mut metrics = BTreeMap::new();
        match outcome {
            Outcome::Applied { grad_norm } => {
                present.updates += 1;
                metrics.insert("grad_norm".to_owned(), grad_norm);
                metrics.insert("skipped_nonfinite".to_owned(), 0.0);
            }
            Outcome::SkippedNonFinite { tensor } => {
                tracing::warn!(%model, %tensor, "a gradient is not finite: the update was skipped");
                metrics.insert("skipped_nonfinite".to_owned(), 1.0);
            }
        }
        Ok(Ran::Stepped(encoded(Reply::OptimStep { metrics })?))
    }
}

/// An update as the optimizer takes it.
fn update(adam: &AdamParams) -> Result<Update, TinkerError> {
    let number = |field: &str, value: f64, allowed: &str, holds: bool| {
        let narrow = value as f32;
        if holds && narrow.is_finite() {
            return Ok(narrow);
        }
        Err(TinkerError::value(
            format!("adam_params.{field}"),
            value,
            allowed,
        ))
    };
    let rate = adam.learning_rate;
    let lr = number("learning_rate", rate, "at least 0", rate >= 0.0)?;
    let beta = |field: &str, value: f64| {
        let holds = (0.0..1.0).contains(&value) && (value as f32) < 1.0;
        number(field, value, "at least 0 and below 1", holds)
    };
    let eps = adam.eps;
    let decay = adam.weight_decay;
    let clip = adam.grad_clip_norm;
    let adamw = AdamWConfig {
        beta1: beta("beta1", adam.beta1)?,
        beta2: beta("beta2", adam.beta2)?,
        epsilon: number("eps", eps, "above 1e-45", eps as f32 > 0.0)?,
        weight_decay: number("weight_decay", decay, "at least 0", decay >= 0.0)?,
    };
    let clip = number(
        "grad_clip_norm",
        clip,
        "at least 0; 0: not clipped",
        clip >= 0.0,
    )?;
    Ok(Update {
        number: 1,
        lr,
        adamw,
        max_grad_norm: (clip > 0.0).then_some(clip),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_step_are_checked_by_name() {
        let good = update(&AdamParams::default()).unwrap();
        assert_eq!(good.adamw.epsilon, 1e-12);
        assert_eq!(good.max_grad_norm, None);
        let still = update(&AdamParams {
            learning_rate: 0.0,
            grad_clip_norm: 1.0,
            ..AdamParams::default()
        });
        assert_eq!(still.unwrap().max_grad_norm, Some(1.0));
        for (field, adam) in [
            (
                "learning_rate",
                AdamParams {
                    learning_rate: f64::NAN,
                    ..AdamParams::default()
                },
            ),
            (
                "beta2",
                AdamParams {
                    beta2: 1.0,
                    ..AdamParams::default()
                },
            ),
            (
                "eps",
                AdamParams {
                    eps: 0.0,
                    ..AdamParams::default()
                },
            ),
            (
                "weight_decay",
                AdamParams {
                    weight_decay: -0.1,
                    ..AdamParams::default()
                },
            ),
        ] {
            let error = update(&adam).unwrap_err().to_string();
            assert!(
                error.contains(&format!("adam_params.{field} is")),
                "{error}"
            );
        }
    }
}
