//! `[rollout]`: how episodes are run.

use crate::rule::Rules;
use crate::section::{choice, section};
use crate::{EngineType, RunPlan, TIME, TrainMode, is_time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_algo::GroupRepair;
use sinew_types::Format;

choice! {
    /// The order in which waiting episodes begin.
    Order {
        /// The one that was drawn first.
        Drawn = "drawn",
        /// The one that is expected to take longest, by those of its task and type that ended or run.
        LongestFirst = "longest_first",
    }
}

choice! {
    /// Episodes in flight at the end of a session that the next one continues.
    ResumeEpisodes {
        /// Those of environments that say they are deterministic.
        Deterministic = "deterministic",
        /// All of them, if a new environment answers their actions as the old one did.
        Always = "always",
        /// None: they start again.
        Never = "never",
    }
}

choice! {
    /// The processes in which episodes run.
    RolloutPlace {
        /// Workers of other processes if the run is given `--control`, else the process of the run.
        Auto = "auto",
        /// The process of the run.
        Here = "here",
        /// Workers: a run without `--control` is refused. Agents of `harness.type = "live"` open their
        /// rollouts there, at the `--serve` of each worker.
        Workers = "workers",
    }
}

choice! {
    /// Thinking of earlier turns in the contexts that the model samples from.
    ThinkingHistory {
        /// It stays, whatever an agent or the chat template leaves out: an episode is one path.
        Kept = "kept",
        /// It is left out as the chat template does, which is what a server shows. A turn behind thinking
        /// that was left out begins another path.
        Dropped = "dropped",
    }
}

choice! {
    /// Fate of stored episodes that wait for training when an environment, a tool or a reward has
    /// another version than when they ran.
    Changed {
        /// They are left out, with the reason, and run again.
        RunAgain = "run_again",
        /// If a reward alone has changed, it scores them anew; otherwise they are run again.
        Rescore = "rescore",
        /// They are trained as they are.
        Keep = "keep",
    }
}

section! {
    /// Limits and order of episodes.
    RolloutKeys => RolloutPlan, "rollout" {
        /// Tasks in one step.
        tasks_per_step: usize = 8, in 1 to 65_536;
        /// Tasks that a step begins in addition: once `tasks_per_step` groups are complete, the others are
        /// stopped. Their tasks are put off until they fill a step of their own, which waits for all.
        over_sample: usize = 0, in 0 to 65_536;
        /// Episodes of one task.
        group_size: usize = 8, in 1 to 4096;
        /// Episodes of a group that begin first, 2 to `group_size - 1`: if their rewards are equal, the
        /// others are not begun. Left out: all begin at once. Tasks that are nearly always or nearly never
        /// solved are trained less by it.
        stop_decided: usize;
        /// Maximum number of episodes in flight; fewer while the engine has no capacity for more.
        max_in_flight: usize = 128, in 1 to 65_536;
        /// Maximum number of them whose world is not up yet, at most `max_in_flight`; left out: 64.
        max_starting: usize;
        /// The order in which waiting episodes begin, and whose requests the engine prefers. It changes
        /// how long a step takes, never what is sampled.
        order: Order = Order::Drawn;
        /// Number of episodes that generate at the same time.
        admission: AdmissionSection = AdmissionSection::default();
        /// Maximum number of turns of an episode.
        max_turns: u32 = 3, in 1 to 1000;
        /// ScalingInter: maximum turns of training episodes in stages, such as `[10, 20, 30]`, none less
        /// than the one before and none above `max_turns`, which held-out episodes have. Empty: always
        /// `max_turns`.
        turn_stages: Vec<u32> = Vec::new();
        /// Steps of a stage of `turn_stages`; the last one goes on to the end.
        turn_stage_steps: u64 = 100, in 1 to 10_000_000;
        /// Maximum number of tokens that one turn samples; at most `max_context_tokens`.
        max_turn_tokens: u32 = 96;
        /// Tokens after which a turn gives its place in the engine back and asks for another one, below
        /// `max_turn_tokens`; left out: when it is over. Of turns that wait, those of episodes that are
        /// expected to go on for longer come first, so it needs `order = "longest_first"`.
        chunk_tokens: u32;
        /// Maximum number of tokens of an episode, prompts and observations included.
        max_context_tokens: u32 = 1024;
        /// Sampling temperature, above 0. Training takes log-probs at it.
        temperature: f32 = 1.0;
        /// Share of the probability from which tokens are sampled, above 0, at most 1. What it leaves
        /// out is not corrected for.
        top_p: f32 = 1.0;
        /// Format that every answer of the model is held to.
        format: Format;
        /// Thinking of earlier turns in later contexts: kept as it was sampled, or left out as the chat
        /// template does, which is what a server of other software shows. See docs/rendering.md.
        thinking: ThinkingHistory = ThinkingHistory::Kept;
        /// Seconds until an episode's world is up; one that is not has failed and is not trained on.
        /// Left out: 120.
        boot_timeout_s: f64;
        /// Seconds that the turns of an episode may take.
        episode_timeout_s: f64 = 120.0;
        /// Seconds that an episode's score may take.
        score_timeout_s: f64 = 30.0;
        /// Episodes in flight at the end of a session that the next one continues: a new environment gets
        /// their actions once more, and must answer as the old one did. Not those of programs and live
        /// agents.
        resume: ResumeEpisodes = ResumeEpisodes::Deterministic;
        /// Fate of stored episodes that wait for training when their environment, a tool or a reward
        /// has another version now.
        changed: Changed = Changed::RunAgain;
        /// Repairs of groups in which the system failed episodes, step by step, each at most
        /// once; the last must be `mask` or `drop_group`. Left out: failed episodes leave, two are
        /// enough to compare.
        repair: Vec<GroupRepair>;
        /// Turns of one episode are drawn by two policies.
        cross_policy: CrossPolicySection;
        /// The processes in which episodes run: workers of this or other hosts, started by
        /// `sinew worker --role rollout`, or the process of the run. See docs/workers.md.
        place: RolloutPlace = RolloutPlace::Auto;
        /// Seconds after which the episodes of a worker that died go to another one.
        ticket_lease_s: f64 = 30.0;
        /// Workers that may die with an episode before it counts as failed.
        ticket_attempts: u32 = 4, in 1 to 100;
    }
}

/// Number of episodes that generate at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdmissionSection {
    /// Contexts of episodes that generate or are in a tool must fit into the engine's KV capacity.
    pub kv_capacity: bool,
    /// Tokens that an episode is expected to need in addition to its context. Left out: 100, or
    /// `max_turn_tokens` if that is less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserve_tokens: Option<usize>,
    /// Fewer episodes after preemptions and while the engine is full or queueing, more again later.
    pub adaptive: bool,
}

impl Default for AdmissionSection {
    fn default() -> Self {
        Self {
            kv_capacity: true,
            reserve_tokens: None,
            adaptive: true,
        }
    }
}

/// Turns of one episode drawn by two policies, the current one and one that is some updates old.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CrossPolicySection {
    /// Share of turns that the old policy draws, above 0, below 1.
    #[serde(default = "default_share")]
    pub share: f64,
    /// Updates after which the old policy gets the current weights, 1 or more.
    #[serde(default = "default_every")]
    pub every: u64,
}

fn default_share() -> f64 {
    0.5
}

fn default_every() -> u64 {
    4
}

/// Refuses `retry` among the repairs of groups, since episodes of `what` cannot run again.
pub(crate) fn no_retry(plan: &RunPlan, what: &str, rules: &mut Rules) {
    let retries = |step: &GroupRepair| matches!(step, GroupRepair::Retry { .. });
    let reason = format!("{what} cannot be run again: leave `retry` out");
    let retried = plan.rollout.repair.iter().flatten().any(retries);
    rules.custom("rollout.repair", "retry", reason, !retried);
}

/// Refuses `turn_stages` unless the built-in loop runs the training episodes.
fn turn_stages(plan: &RunPlan, rules: &mut Rules) {
    let r = &plan.rollout;
    let given = !r.turn_stages.is_empty();
    let grows = r.turn_stages.windows(2).all(|w| w[0] <= w[1]);
    let fits = r.turn_stages.iter().all(|n| (1..=r.max_turns).contains(n));
    rules.allowed(
        "rollout.turn_stages",
        format!("{:?}", r.turn_stages),
        "numbers from 1 to rollout.max_turns, none less than the one before, at most 100 of them",
        grows && fits && r.turn_stages.len() <= 100,
    );
    rules.unused(
        "rollout.turn_stage_steps",
        "has no effect without rollout.turn_stages; remove it",
        given,
    );
    rules.inert(
        "rollout.turn_stages",
        format!("{:?}", r.turn_stages),
        "has no effect: it needs episodes of the built-in loop to train on, without [data] and [harness]; \
         remove it",
        !given || (plan.data.is_none() && plan.harness.is_built_in()),
    );
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let r = &plan.rollout;
    r.ranges(rules);
    if let Some(tokens) = r.admission.reserve_tokens {
        rules.allowed(
            "rollout.admission.reserve_tokens",
            tokens,
            "only with kv_capacity = true: without, it has no effect",
            r.admission.kv_capacity,
        );
    }
    turn_stages(plan, rules);
    let starting = r.max_starting.unwrap_or(1);
    rules.custom(
        "rollout.max_starting",
        starting,
        "allowed: 1 to rollout.max_in_flight, above which it has no effect",
        (1..=r.max_in_flight).contains(&starting),
    );
    rules.allowed(
        "rollout.max_turn_tokens",
        r.max_turn_tokens,
        "1 to max_context_tokens",
        r.max_turn_tokens >= 1 && r.max_turn_tokens <= r.max_context_tokens,
    );
    rules.allowed(
        "rollout.temperature",
        r.temperature,
        "a number above 0: training needs samples, not the greedy answer",
        r.temperature.is_finite() && r.temperature > 0.0,
    );
    rules.custom(
        "rollout.repair",
        "[]",
        "has no steps: give some, the last `mask` or `drop_group`, or leave it out for the usual ones",
        r.repair.as_ref().is_none_or(|steps| !steps.is_empty()),
    );
    let top_p = r.top_p > 0.0 && r.top_p <= 1.0;
    rules.allowed("rollout.top_p", r.top_p, "above 0, at most 1", top_p);
    rules.seconds("rollout.episode_timeout_s", r.episode_timeout_s);
    rules.seconds("rollout.score_timeout_s", r.score_timeout_s);
    if let Some(cross) = r.cross_policy {
        let share = cross.share;
        let inside = share > 0.0 && share < 1.0;
        rules.allowed(
            "rollout.cross_policy.share",
            share,
            "above 0, below 1",
            inside,
        );
        rules.one_or_more("rollout.cross_policy.every", cross.every);
    }
    turns(plan, rules);
    chunks(plan, rules);
    over_sample(plan, rules);
    stop_decided(plan, rules);
    place(plan, rules);
}

/// Refuses workers for episodes that only the process of the run can run.
fn place(plan: &RunPlan, rules: &mut Rules) {
    let r = &plan.rollout;
    let name = format!("{:?}", r.place.name());
    let mut needs = |why: &str, holds: bool| {
        let holds = r.place != RolloutPlace::Workers || holds;
        rules.custom("rollout.place", &name, why, holds);
    };
    let live = plan.harness.live().is_some();
    let late = plan.reward.as_ref().and_then(|reward| reward.late());
    needs(
        "cannot be combined with harness.type = \"live\" and [reward.late]: rewards from outside name rollouts at \
         the gateway of the run; remove one of them",
        !live || late.is_none(),
    );
    let launched = plan.launch.as_ref().is_some_and(|l| l.rollout.is_some());
    needs(
        "cannot be combined with harness.type = \"live\" and [launch.rollout]: agents must know the address of each \
         worker, so start workers with --serve ADDR; remove one of them",
        !live || !launched,
    );
    needs(
        "cannot be combined with rollout.cross_policy: a worker that joins late has the newest weights only, and \
         not those of the older policy; remove one of them",
        r.cross_policy.is_none(),
    );
    needs(
        "needs engine.type = \"embedded\", \"vllm\", \"sglang\" or \"tinker\", whose weights workers can follow: a \
         server of \"openai\" says neither which weights it has nor takes new ones",
        plan.engine.kind != EngineType::Openai,
    );
    needs(
        "cannot be combined with engine.adapters: a server removes an adapter that the run replaced, and does not \
         know that a worker still samples with it; remove one of them",
        !plan.engine.adapters,
    );
    rules.seconds("rollout.ticket_lease_s", r.ticket_lease_s);
    let elsewhere = r.place != RolloutPlace::Here;
    for key in ["rollout.ticket_lease_s", "rollout.ticket_attempts"] {
        let reason = "has no effect with rollout.place = \"here\"; remove it";
        rules.unused(key, reason, elsewhere);
    }
}

/// Reasons for which roles cannot be the engines of a run's workers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoEngineRoles {
    /// The run has other engines, of this type.
    #[error("engine.type = {0:?} has engines of its own: roles are engines of type \"embedded\"")]
    Kind(&'static str),
    /// Its tokens are drawn from masks.
    #[error(
        "rollout.format: training needs the masks of its tokens, which stay in the process of an engine"
    )]
    Format,
}

impl RunPlan {
    /// Whether engines of other processes can follow the weights of the run.
    fn follows_elsewhere(&self) -> bool {
        self.engine.kind != EngineType::Openai && !self.engine.adapters
    }

    /// Whether roles can be the engines of the run's workers.
    ///
    /// # Errors
    /// The reason why not.
    pub fn engine_roles(&self) -> Result<(), NoEngineRoles> {
        let kind = self.engine.kind;
        if kind != EngineType::Embedded {
            return Err(NoEngineRoles::Kind(kind.name()));
        }
        if self.rollout.format.is_some() {
            return Err(NoEngineRoles::Format);
        }
        Ok(())
    }

    /// Whether workers run the episodes of a run, or serve its agents; `controlled`: it has an address for
    /// them. Agents that run already know where the run is, so that only `"workers"` moves them.
    pub fn on_workers(&self, controlled: bool) -> bool {
        let possible = self.harness.live().is_none()
            && self.rollout.cross_policy.is_none()
            && self.follows_elsewhere();
        match self.rollout.place {
            RolloutPlace::Here => false,
            RolloutPlace::Workers => true,
            RolloutPlace::Auto => controlled && possible,
        }
    }
}

/// Adds the rules for `chunk_tokens`.
fn chunks(plan: &RunPlan, rules: &mut Rules) {
    let r = &plan.rollout;
    let Some(chunk) = r.chunk_tokens else { return };
    let mut needs = |why: String, holds: bool| {
        rules.custom("rollout.chunk_tokens", chunk, why, holds);
    };
    needs(
        format!(
            "allowed: 1 to {}: below rollout.max_turn_tokens",
            r.max_turn_tokens.saturating_sub(1)
        ),
        (1..r.max_turn_tokens).contains(&chunk),
    );
    needs(
        "has no effect without order = \"longest_first\": a turn would wait behind itself".into(),
        r.order == Order::LongestFirst,
    );
    needs(
        "cannot be combined with rollout.format: a piece would begin the format anew; remove one of them".into(),
        r.format.is_none(),
    );
    needs(
        "needs the built-in loop: the turns of programs are whole requests; remove it".into(),
        plan.harness.is_built_in(),
    );
}

/// Refuses `over_sample` if the run cannot start surplus groups and stop them.
fn over_sample(plan: &RunPlan, rules: &mut Rules) {
    let more = plan.rollout.over_sample;
    let mut needs = |why: &str, holds: bool| {
        rules.custom("rollout.over_sample", more, why, more == 0 || holds);
    };
    needs(
        "needs train.mode = \"sync\": in the other modes episodes that take long run on while others are \
         trained; remove it",
        plan.train.mode == TrainMode::Sync,
    );
    needs(
        "has no effect with [data]: nothing is run to train on; remove it",
        plan.data.is_none(),
    );
    needs(
        "needs the built-in loop: rollouts of programs, services and live agents are not stopped from here; \
         remove it",
        plan.harness.is_built_in(),
    );
    needs(
        "cannot be combined with [reward.late], whose groups wait by rules of their own: remove one of them",
        plan.reward.as_ref().and_then(|r| r.late()).is_none(),
    );
}

/// Refuses `stop_decided` if the first episodes of a group decide nothing.
fn stop_decided(plan: &RunPlan, rules: &mut Rules) {
    let r = &plan.rollout;
    let Some(first) = r.stop_decided else { return };
    let mut needs = |why: String, holds: bool| {
        rules.custom("rollout.stop_decided", first, why, holds);
    };
    needs(
        format!(
            "allowed: 2 to {}: at least two to compare, below rollout.group_size",
            r.group_size.saturating_sub(1)
        ),
        (2..r.group_size).contains(&first),
    );
    needs(
        "has no effect with [data]: nothing is run to train on; remove it".into(),
        plan.data.is_none(),
    );
    needs(
        "has no effect with harness.type = \"live\", whose agents begin their episodes themselves; remove it".into(),
        plan.harness.live().is_none(),
    );
    needs(
        "cannot be combined with rollout.over_sample, which stops whole groups: remove one of them"
            .into(),
        r.over_sample == 0,
    );
    needs(
        "cannot be combined with [reward.late]: the rewards are not there when episodes end; remove it".into(),
        plan.reward.as_ref().and_then(|r| r.late()).is_none(),
    );
}

/// Adds the rules for keys of the built-in loop.
fn turns(plan: &RunPlan, rules: &mut Rules) {
    let r = &plan.rollout;
    let own = plan.harness.is_built_in();
    if let Some(format) = &r.format {
        let kind = format!("{:?}", format.grammar.name());
        if let Err(error) = format.validate() {
            rules.custom("rollout.format", &kind, error.to_string(), false);
        }
        let reason =
            "needs engine.type = \"embedded\": training makes the masks of the engine again";
        let embedded = plan.engine.kind == EngineType::Embedded;
        rules.custom("rollout.format", &kind, reason, embedded);
    }
    let reason = "has no effect: a program asks for formats itself; remove it";
    rules.unused("rollout.format", reason, own);
    let seconds = r.boot_timeout_s.unwrap_or(1.0);
    rules.allowed("rollout.boot_timeout_s", seconds, TIME, is_time(seconds));
    let reason =
        "has no effect: the turns of programs and live agents cannot be replayed; remove it";
    rules.unused("rollout.resume", reason, own);
    let reason = "has no effect: a program's sandbox starts within harness.timeout_s; remove it";
    let mut members = plan.env.members().iter();
    let hosted = members.any(|m| m.config().machines());
    rules.unused("rollout.boot_timeout_s", reason, own || hosted);
}
