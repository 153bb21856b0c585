//! Measured times as a file, which take the place of those of a plan.

use crate::calibrate::{ObservedRun, Prediction};
use crate::dist::Dist;
use crate::plan::{HopTimes, Plan, PlanError};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Times and lengths that were measured. What is left out stays as the plan has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Calibration {
    pub engines: EngineTimes,
    pub trainer: TrainerTimes,
    pub weights: WeightsTimes,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hops: Option<HopTimes>,
    pub episode: Lengths,
    pub tools: ToolTimes,
}

/// `[engines]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineTimes {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pass_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub row_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_tokens_per_s: Option<f64>,
}

/// `[trainer]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainerTimes {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fixed_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_s: Option<f64>,
}

/// `[weights]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WeightsTimes {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_s: Option<f64>,
}

/// `[episode]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Lengths {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turns: Option<Dist>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<Dist>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turn_tokens: Option<Dist>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observation_tokens: Option<Dist>,
}

/// `[tools]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ToolTimes {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_s: Option<Dist>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_s: Option<Dist>,
}

fn put<T: Clone>(to: &mut T, value: Option<&T>) {
    if let Some(value) = value {
        to.clone_from(value);
    }
}

impl Calibration {
    /// Reads a file.
    ///
    /// # Errors
    /// If there is none, or it has other keys than those of a calibration.
    pub fn load(path: &Path) -> Result<Self, PlanError> {
        let text = std::fs::read_to_string(path).map_err(|e| PlanError::Read {
            path: path.into(),
            why: e.to_string(),
        })?;
        toml::from_str(&text).map_err(|e| PlanError::Form {
            path: path.into(),
            why: e.to_string(),
        })
    }

    /// The times of a recorded run, with the costs that fit it.
    pub fn of_run(run: &ObservedRun, fitted: &Prediction) -> Self {
        let (plan, costs, updates) = (run.plan(), fitted.costs, fitted.updates);
        let e = &plan.episode;
        Self {
            engines: EngineTimes {
                pass_s: Some(costs.pass_s),
                row_s: Some(costs.row_s),
                kv_s: Some(0.0),
                prefill_tokens_per_s: Some(1.0 / costs.prompt_s),
            },
            trainer: TrainerTimes {
                fixed_s: Some(updates.fixed_s),
                tokens_per_s: Some(1.0 / updates.token_s.max(1e-12)),
            },
            weights: WeightsTimes {
                transfer_s: Some(updates.other_s),
                load_s: Some(updates.publish_s),
            },
            hops: run.has_hops().then_some(plan.hops),
            episode: Lengths {
                turns: Some(e.turns.clone()),
                prompt_tokens: Some(e.prompt_tokens.clone()),
                turn_tokens: Some(e.turn_tokens.clone()),
                observation_tokens: Some(e.observation_tokens.clone()),
            },
            tools: ToolTimes {
                boot_s: Some(plan.tools.boot_s.clone()),
                call_s: Some(plan.tools.call_s.clone()),
            },
        }
    }

    /// As a file.
    ///
    /// # Errors
    /// If a number has no form in TOML.
    pub fn text(&self) -> Result<String, PlanError> {
        toml::to_string(self).map_err(|e| PlanError::Form {
            path: "calibration".into(),
            why: e.to_string(),
        })
    }

    /// Puts the times into a plan.
    ///
    /// # Errors
    /// If a time is not allowed in a plan.
    pub fn lay_over(&self, plan: &mut Plan) -> Result<(), PlanError> {
        let e = &mut plan.engines;
        put(&mut e.pass_s, self.engines.pass_s.as_ref());
        put(&mut e.row_s, self.engines.row_s.as_ref());
        put(&mut e.kv_s, self.engines.kv_s.as_ref());
        put(
            &mut e.prefill_tokens_per_s,
            self.engines.prefill_tokens_per_s.as_ref(),
        );
        put(&mut plan.trainer.fixed_s, self.trainer.fixed_s.as_ref());
        put(
            &mut plan.trainer.tokens_per_s,
            self.trainer.tokens_per_s.as_ref(),
        );
        put(
            &mut plan.weights.transfer_s,
            self.weights.transfer_s.as_ref(),
        );
        put(&mut plan.weights.load_s, self.weights.load_s.as_ref());
        put(&mut plan.hops, self.hops.as_ref());
        let (to, own) = (&mut plan.episode, &self.episode);
        put(&mut to.turns, own.turns.as_ref());
        put(&mut to.prompt_tokens, own.prompt_tokens.as_ref());
        put(&mut to.turn_tokens, own.turn_tokens.as_ref());
        put(&mut to.observation_tokens, own.observation_tokens.as_ref());
        put(&mut plan.tools.boot_s, self.tools.boot_s.as_ref());
        put(&mut plan.tools.call_s, self.tools.call_s.as_ref());
        plan.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_times_take_the_place_of_a_plans_and_the_rest_stays() {
        let text = "[engines]\npass_s = 0.5\n[hops]\nack_s = 0.25\n[episode]\nturns = 7\n";
        let read: Calibration = toml::from_str(text).unwrap();
        let mut plan = Plan::default();
        let row_s = plan.engines.row_s;
        read.lay_over(&mut plan).unwrap();
        assert_eq!((plan.engines.pass_s, plan.engines.row_s), (0.5, row_s));
        assert_eq!((plan.hops.ack_s, plan.hops.lease_s), (0.25, 0.0));
        assert_eq!(plan.episode.turns, Dist::Fixed(7.0));
        let again: Calibration = toml::from_str(&read.text().unwrap()).unwrap();
        assert_eq!(again, read);
    }

    #[test]
    fn what_is_no_measured_time_is_refused() {
        assert!(toml::from_str::<Calibration>("[engines]\ncount = 4\n").is_err());
        assert!(Calibration::load(Path::new("/nonexistent.toml")).is_err());
        let read: Calibration = toml::from_str("[hops]\nack_s = -1\n").unwrap();
        let error = read.lay_over(&mut Plan::default()).unwrap_err();
        assert!(error.to_string().contains("hops.ack_s"), "{error}");
    }
}
