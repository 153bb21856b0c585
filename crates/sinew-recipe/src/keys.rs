//! The first stage of parsing: a recipe as written, in which every key with a default is optional.

use crate::engine::EngineKeys;
use crate::eval::EvalKeys;
use crate::judge::{self, JudgesKeys};
use crate::launch::LaunchKeys;
use crate::model::{CriticKeys, ModelOrSource, ScoringModel, model_or_source, scoring_or_source};
use crate::reward::RewardSection;
use crate::rollout::RolloutKeys;
use crate::sandbox::SandboxKeys;
use crate::store::StoreKeys;
use crate::tasks::{TasksKeys, tasks_or_source};
use crate::train::TrainKeys;
use crate::trainer::TrainerKeys;
use crate::trust::TrustKeys;
use crate::user::UserKeys;
use crate::{DataSection, EnvSection, HarnessSection, ModelSection, RunPlan, env};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_algo::{AlgorithmConfig, AlgorithmKind};

/// A recipe of Sinew: what a run is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RecipeKeys {
    /// Title of the run; its default folder is `runs/NAME`. Left out: the name of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// Seed of tasks, sampling and initialization; `--seed` overrides it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// The model that is trained.
    #[serde(deserialize_with = "model_or_source")]
    #[schemars(with = "ModelOrSource")]
    model: ModelSection,
    /// The world that the episodes run in. Left out: `chat`.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "env::passed_over"
    )]
    #[schemars(with = "serde_json::Value")]
    env: Option<EnvSection>,
    /// The program that drives the turns of an episode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    harness: Option<HarnessSection>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sandbox: Option<SandboxKeys>,
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "tasks_or_source"
    )]
    tasks: Option<TasksKeys>,
    /// Score of an episode, in place of the environment's own: one reward, or a table of rewards and weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reward: Option<RewardSection>,
    /// Models that grade answers, by a name that `reward` uses as `"judge.NAME"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    judge: Option<JudgesKeys>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    user: Option<UserKeys>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rollout: Option<RolloutKeys>,
    /// The algorithm that turns episodes into training signal: its name, and what differs from it. Left
    /// out: `grpo`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    algorithm: Option<AlgorithmConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    critic: Option<CriticKeys>,
    /// The model that a KL term or DPO compares with; left out: the first weights.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "scoring_or_source"
    )]
    reference: Option<ScoringModel>,
    /// Teacher of `opd`, `opd_top_k`, `distill` and `teacher_kl`; its tokenizer must be the policy's.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "scoring_or_source"
    )]
    teacher: Option<ScoringModel>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data: Option<DataSection>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    train: Option<TrainKeys>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    trainer: Option<TrainerKeys>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    trust: Option<TrustKeys>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    eval: Option<EvalKeys>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    engine: Option<EngineKeys>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    store: Option<StoreKeys>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    launch: Option<LaunchKeys>,
}

impl RecipeKeys {
    /// Returns the second stage: every key with its value, and the environments. `name` is used if the recipe
    /// has no name.
    pub(crate) fn resolve(self, name: &str, env: EnvSection) -> RunPlan {
        RunPlan {
            name: self.name.unwrap_or_else(|| name.to_owned()),
            seed: self.seed.unwrap_or_default(),
            model: self.model,
            env,
            harness: self.harness.unwrap_or_default(),
            sandbox: self.sandbox.unwrap_or_default().resolve(),
            tasks: self.tasks.unwrap_or_default().resolve(),
            reward: self.reward,
            judges: judge::resolve(self.judge.unwrap_or_default()),
            user: self.user.map(UserKeys::resolve),
            rollout: self.rollout.unwrap_or_default().resolve(),
            algorithm: self
                .algorithm
                .unwrap_or(AlgorithmConfig::new(AlgorithmKind::Grpo)),
            critic: self.critic.map(CriticKeys::resolve),
            reference: self.reference,
            teacher: self.teacher,
            data: self.data,
            train: self.train.unwrap_or_default().resolve(),
            trainer: self.trainer.map(TrainerKeys::resolve),
            trust: self.trust.unwrap_or_default().resolve(),
            eval: self.eval.unwrap_or_default().resolve(),
            engine: self.engine.unwrap_or_default().resolve(),
            store: self.store.unwrap_or_default().resolve(),
            launch: self.launch.map(LaunchKeys::resolve),
        }
    }

    /// Returns the effective recipe of a plan: all keys except the `unused` ones, which have no effect.
    pub(crate) fn effective(plan: &RunPlan, unused: &[String]) -> Self {
        let has = |table: &str| !unused.iter().any(|k| k == table);
        let mut keys = Self {
            name: Some(plan.name.clone()),
            seed: Some(plan.seed),
            model: plan.model.clone(),
            env: Some(plan.env.clone()),
            harness: Some(plan.harness.clone()),
            sandbox: has("sandbox").then(|| plan.sandbox.keys()),
            tasks: Some(plan.tasks.keys()),
            reward: plan.reward.clone(),
            judge: judge::keys(&plan.judges, unused),
            user: plan.user.as_ref().map(crate::UserPlan::keys),
            rollout: Some(plan.rollout.keys()),
            algorithm: Some(plan.algorithm.clone()),
            critic: plan.critic.as_ref().map(crate::CriticPlan::keys),
            reference: plan.reference.clone(),
            teacher: plan.teacher.clone(),
            data: plan.data.clone(),
            train: Some(plan.train.keys()),
            trainer: plan.trainer.as_ref().map(crate::TrainerPlan::keys),
            trust: Some(plan.trust.keys()),
            eval: Some(plan.eval.keys()),
            engine: Some(plan.engine.keys()),
            store: Some(plan.store.keys()),
            launch: plan.launch.as_ref().map(crate::LaunchPlan::keys),
        };
        keys.leave_out(unused);
        keys
    }

    /// Removes keys by path, such as `sandbox.image`.
    fn leave_out(&mut self, unused: &[String]) {
        self.sandbox.iter_mut().for_each(|t| t.leave_out(unused));
        self.tasks.iter_mut().for_each(|t| t.leave_out(unused));
        self.rollout.iter_mut().for_each(|t| t.leave_out(unused));
        self.user.iter_mut().for_each(|t| t.leave_out(unused));
        self.critic.iter_mut().for_each(|t| t.leave_out(unused));
        self.train.iter_mut().for_each(|t| t.leave_out(unused));
        self.trainer.iter_mut().for_each(|t| t.leave_out(unused));
        self.trust.iter_mut().for_each(|t| t.leave_out(unused));
        self.eval.iter_mut().for_each(|t| t.leave_out(unused));
        self.engine.iter_mut().for_each(|t| t.leave_out(unused));
        self.store.iter_mut().for_each(|t| t.leave_out(unused));
        self.launch.iter_mut().for_each(|t| t.leave_out(unused));
    }
}
