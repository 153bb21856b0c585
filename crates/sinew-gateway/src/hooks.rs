//! Connects a training run, or a data pool, to the rollouts of a gateway.

use crate::secret::Secret;
use crate::session::RolloutSpec;
use sinew_dialect::ApiError;
use sinew_types::{EpisodeId, GroupId, Trace, mix_seed};

/// Prefix of the purposes of rollouts that are stored but not trained.
const MEASURED: &str = "eval";

/// Group name of a rollout that is only compared with earlier ones of its task.
const ALONE: &str = "alone";

/// Receives rollouts when clients open them, and when they are finished.
pub trait RolloutHooks: Send + Sync {
    /// Sets the values that a client may not choose: sampling, limits, seed, purpose. Receivers that train
    /// refuse rollouts with an adapter ([`refuse_adapter`]).
    ///
    /// # Errors
    /// If no rollout may be opened now, or not this one.
    fn opening(&self, spec: &mut RolloutSpec) -> Result<(), ApiError>;

    /// Receives a finished trace after it was stored: once, and again after a crash if it is unknown whether
    /// it was received. The finish request is answered afterwards.
    fn finished(&self, trace: &Trace);
}

/// Refuses a rollout with an adapter: its tokens are not samples of the policy, and their versions are not
/// the policy's.
///
/// # Errors
/// If `spec` has an adapter.
pub fn refuse_adapter(spec: &RolloutSpec) -> Result<(), ApiError> {
    let Some(name) = &spec.adapter else {
        return Ok(());
    };
    let why = format!(
        "adapter {name}: this rollout would be trained as a sample of the model without adapters; leave the adapter \
         out, or, with a training run, set a purpose that begins with {MEASURED}"
    );
    Err(ApiError::invalid("adapter", why))
}

/// Hooks of a training run: all rollouts use the run's sampling parameters, and those with the run's purpose
/// are passed to the run when they are finished.
///
/// Rollouts of one `group` are compared; without a group those of one `task` are. A rollout without both, or
/// with the group `alone`, shares its group with no other: its group id is its own id. A rollout whose
/// purpose begins with `eval` keeps this purpose and is not trained; only such a rollout may use an adapter.
pub struct TrainingHooks {
    /// Sampling, limits, run, purpose, provenance and seed of every rollout.
    pub run: RolloutSpec,
    /// Callback for each opened rollout.
    pub on_open: Box<dyn Fn() + Send + Sync>,
    /// Callback for each finished rollout that is to be trained.
    pub on_finish: Box<dyn Fn(&Trace) + Send + Sync>,
}

sinew_types::debug_fields!(TrainingHooks, run);

/// Returns the smaller of two optional limits.
fn tighter(run: Option<u32>, asked: Option<u32>) -> Option<u32> {
    match (run, asked) {
        (Some(run), Some(asked)) => Some(run.min(asked)),
        (run, asked) => run.or(asked),
    }
}

/// Returns the seed of a rollout that sets none. It is derived from the id, so that no two rollouts sample
/// the same.
pub(crate) fn seed_of(id: &EpisodeId, run: u64) -> u64 {
    let mut name = [0; 8];
    name.copy_from_slice(&blake3::hash(id.as_str().as_bytes()).as_bytes()[..8]);
    mix_seed(run, u64::from_le_bytes(name))
}

impl RolloutHooks for TrainingHooks {
    fn opening(&self, spec: &mut RolloutSpec) -> Result<(), ApiError> {
        if !spec.purpose.starts_with(MEASURED) {
            refuse_adapter(spec)?;
        }
        let id = match &spec.id {
            Some(id) => id.clone(),
            None => EpisodeId::new(format!("r-{}", Secret::random_hex(8)?)),
        };
        let none = |name: &str| name.is_empty() || name == "none";
        if spec.group.as_str() == ALONE {
            spec.group = GroupId::new(id.as_str());
        } else if none(spec.group.as_str()) {
            spec.group = GroupId::new(if none(spec.task.as_str()) {
                id.as_str()
            } else {
                spec.task.as_str()
            });
        }
        if spec.seed == 0 {
            spec.seed = seed_of(&id, self.run.seed);
        }
        if !spec.purpose.starts_with(MEASURED) {
            spec.purpose.clone_from(&self.run.purpose);
        }
        spec.id = Some(id);
        spec.run.clone_from(&self.run.run);
        spec.provenance = self.run.provenance.clone();
        spec.sampling = self.run.sampling.clone();
        spec.thinking = self.run.thinking;
        spec.max_turns = tighter(self.run.max_turns, spec.max_turns);
        spec.max_context_tokens = tighter(self.run.max_context_tokens, spec.max_context_tokens);
        (self.on_open)();
        Ok(())
    }

    fn finished(&self, trace: &Trace) {
        if trace.origin.purpose == self.run.purpose {
            (self.on_finish)(trace);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::{AdapterName, TaskId};

    fn hooks() -> TrainingHooks {
        TrainingHooks {
            run: RolloutSpec {
                run: "my-run".into(),
                purpose: "live".into(),
                seed: 7,
                max_turns: Some(4),
                ..RolloutSpec::default()
            },
            on_open: Box::new(|| {}),
            on_finish: Box::new(|_| {}),
        }
    }

    fn opened(spec: RolloutSpec) -> RolloutSpec {
        let mut spec = spec;
        hooks().opening(&mut spec).unwrap();
        spec
    }

    #[test]
    fn only_measured_rollouts_may_use_an_adapter() {
        let with = |purpose: &str| RolloutSpec {
            purpose: purpose.into(),
            adapter: Some(AdapterName::new("a").unwrap()),
            ..RolloutSpec::default()
        };
        let error = hooks().opening(&mut with("serve")).unwrap_err();
        assert_eq!(
            (error.status, error.param.as_deref()),
            (400, Some("adapter"))
        );
        assert!(opened(with("eval-nightly")).adapter.is_some());
    }

    #[test]
    fn a_rollout_is_compared_with_its_group_or_its_task_or_stands_alone() {
        let spec = |group: &str, task: &str| RolloutSpec {
            group: GroupId::new(group),
            task: TaskId::new(task),
            ..RolloutSpec::default()
        };
        assert_eq!(opened(spec("g", "t")).group.as_str(), "g");
        assert_eq!(opened(spec("none", "t")).group.as_str(), "t");
        for alone in [spec("none", "none"), spec("alone", "t")] {
            let alone = opened(alone);
            let id = alone.id.as_ref().map(EpisodeId::as_str);
            assert_eq!(Some(alone.group.as_str()), id);
        }
    }

    #[test]
    fn the_run_decides_on_sampling_and_the_client_may_only_tighten() {
        let asked = RolloutSpec {
            max_turns: Some(9),
            purpose: "serve".into(),
            run: "other".into(),
            agent_scores: true,
            ..RolloutSpec::default()
        };
        let spec = opened(asked);
        assert_eq!((spec.max_turns, spec.run.as_str()), (Some(4), "my-run"));
        assert_eq!(spec.purpose, "live");
        let fewer = RolloutSpec {
            max_turns: Some(2),
            purpose: "eval-nightly".into(),
            ..RolloutSpec::default()
        };
        let spec = opened(fewer);
        assert_eq!(
            (spec.max_turns, spec.purpose.as_str()),
            (Some(2), "eval-nightly")
        );
        let seeds = [
            opened(RolloutSpec::default()),
            opened(RolloutSpec::default()),
        ];
        assert_ne!(seeds[0].seed, seeds[1].seed);
    }
}
