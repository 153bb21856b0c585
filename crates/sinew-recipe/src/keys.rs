//! The first stage: a recipe as it was typed, every key optional that has a default.

use crate::engine::EngineKeys;
use crate::eval::EvalKeys;
use crate::model::{CriticKeys, ModelOrSource, ScoringModel, model_or_source};
use crate::rollout::RolloutKeys;
use crate::sandbox::SandboxKeys;
use crate::store::StoreKeys;
use crate::train::TrainKeys;
use crate::{DataSection, EnvSection, HarnessSection, ModelSection, RunPlan, TasksSection, env};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_algo::AlgorithmConfig;

/// A recipe of Sinew: what a run is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RecipeKeys {
    /// Title of the run; its default folder is `runs/NAME`.
    name: String,
    /// Seed of tasks, sampling and initialization; `--seed` overrides it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// Which model is trained.
    #[serde(deserialize_with = "model_or_source")]
    #[schemars(with = "ModelOrSource")]
    model: ModelSection,
    /// Which world the episodes run in.
    #[schemars(schema_with = "env::schema")]
    env: EnvSection,
    /// What drives the turns of an episode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    harness: Option<HarnessSection>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sandbox: Option<SandboxKeys>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tasks: Option<TasksSection>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rollout: Option<RolloutKeys>,
    /// How episodes become training signal: an algorithm by name, and what differs from it.
    algorithm: AlgorithmConfig,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    critic: Option<CriticKeys>,
    /// What a KL term or DPO compares with; left out: the first weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reference: Option<ScoringModel>,
    /// Teacher of `opd`, `opd_top_k`, `distill` and `teacher_kl`; its tokenizer must be the policy's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    teacher: Option<ScoringModel>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data: Option<DataSection>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    train: Option<TrainKeys>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    eval: Option<EvalKeys>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    engine: Option<EngineKeys>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    store: Option<StoreKeys>,
}

impl RecipeKeys {
    /// The second stage: every key with its value.
    pub(crate) fn resolve(self) -> RunPlan {
        RunPlan {
            name: self.name,
            seed: self.seed.unwrap_or_default(),
            model: self.model,
            env: self.env,
            harness: self.harness.unwrap_or_default(),
            sandbox: self.sandbox.unwrap_or_default().resolve(),
            tasks: self.tasks.unwrap_or_default(),
            rollout: self.rollout.unwrap_or_default().resolve(),
            algorithm: self.algorithm,
            critic: self.critic.map(CriticKeys::resolve),
            reference: self.reference,
            teacher: self.teacher,
            data: self.data,
            train: self.train.unwrap_or_default().resolve(),
            eval: self.eval.unwrap_or_default().resolve(),
            engine: self.engine.unwrap_or_default().resolve(),
            store: self.store.unwrap_or_default().resolve(),
        }
    }

    /// The effective recipe of a plan: all keys but `unused`, which have no effect in it.
    pub(crate) fn effective(plan: &RunPlan, unused: &[String]) -> Self {
        let has = |table: &str| !unused.iter().any(|k| k == table);
        let mut keys = Self {
            name: plan.name.clone(),
            seed: Some(plan.seed),
            model: plan.model.clone(),
            env: plan.env.clone(),
            harness: Some(plan.harness.clone()),
            sandbox: has("sandbox").then(|| plan.sandbox.keys()),
            tasks: Some(plan.tasks),
            rollout: Some(plan.rollout.keys()),
            algorithm: plan.algorithm.clone(),
            critic: plan.critic.as_ref().map(crate::CriticPlan::keys),
            reference: plan.reference.clone(),
            teacher: plan.teacher.clone(),
            data: plan.data.clone(),
            train: Some(plan.train.keys()),
            eval: Some(plan.eval.keys()),
            engine: Some(plan.engine.keys()),
            store: Some(plan.store.keys()),
        };
        keys.leave_out(unused);
        keys
    }

    /// Leaves out keys by name, such as `sandbox.image`.
    fn leave_out(&mut self, unused: &[String]) {
        self.sandbox.iter_mut().for_each(|t| t.leave_out(unused));
        self.rollout.iter_mut().for_each(|t| t.leave_out(unused));
        self.critic.iter_mut().for_each(|t| t.leave_out(unused));
        self.train.iter_mut().for_each(|t| t.leave_out(unused));
        self.eval.iter_mut().for_each(|t| t.leave_out(unused));
        self.engine.iter_mut().for_each(|t| t.leave_out(unused));
        self.store.iter_mut().for_each(|t| t.leave_out(unused));
    }
}
