//! `[data]`: data for training in place of the run's own episodes.

use crate::RunPlan;
use crate::rollout::no_retry;
use crate::rule::Rules;
use crate::store::{needs_durable, shown};
use crate::urls::is_http;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_algo::Advantage;
use sinew_types::{holds_password, is_database};

/// Training data in place of episodes that the run samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum DataSection {
    /// Imitates the assistant's messages of given conversations (SFT).
    Demonstrations {
        /// File of rows with `messages`, or `prompt` and `completion`, and `tools`.
        path: String,
    },
    /// Preferred and rejected answers (DPO).
    Pairs {
        /// File of rows with `prompt`, `chosen` and `rejected`, texts or messages, and `tools`.
        path: String,
    },
    /// The environment's gold policy plays the training tasks, and what it says is imitated (SFT).
    Gold {},
    /// The stored episodes of a run: SFT imitates the successes, DPO compares the best of a group with the
    /// worst.
    Episodes {
        /// Folder of the run; in a chain also `stage:NAME`, a stage before this one.
        path: String,
        /// Purpose of the episodes: `train`, `eval-before`, `eval-after`, ...
        #[serde(default = "default_purpose")]
        purpose: String,
        /// Source of scores that take the place of the rewards, such as `rescore`, that of
        /// `sinew rescore RUN`. An episode without one is left out. Left out: the rewards that
        /// `sinew episodes` lists.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scores: Option<String>,
    },
    /// Trajectories that outside systems pushed to `sinew serve --pool`; each is trained once.
    Pool {
        /// Address of the pool.
        url: String,
        /// File with the control token.
        token_file: String,
        /// Seconds that a step waits for its groups; it goes on with fewer, and without any the run
        /// ends.
        #[serde(default = "default_wait_s")]
        #[schemars(range(min = 0.0, max = 86_400.0))]
        wait_s: f64,
        /// Seconds that the pool holds trajectories for this run, until they are in its own store.
        #[serde(default = "default_lease_s")]
        #[schemars(range(min = 10.0, max = 86_400.0))]
        lease_s: f64,
    },
    /// Rows of a queue of episodes: what `sinew collect --queue` and `sinew serve --queue` put there, and
    /// `sinew queue score` scored; each is trained once.
    Queue {
        /// Address of `sinew queue serve`; or of a database, `postgres://USER@HOST/DATABASE` or
        /// `redis://HOST`; or the folder of the queue's store, which no other process may use.
        queue: String,
        /// File with the token of the server, or with the password of the database.
        #[serde(default)]
        token_file: Option<String>,
        /// Name of the queue in a folder or a database.
        #[serde(default = "default_queue")]
        name: String,
        /// Name under which each row is trained once. Runs that share it share the rows; runs with names of
        /// their own train all of them.
        #[serde(default = "default_consumer")]
        consumer: String,
        /// Seconds that a step waits for its groups; it goes on with fewer, and without any the run
        /// ends.
        #[serde(default = "default_wait_s")]
        #[schemars(range(min = 0.0, max = 86_400.0))]
        wait_s: f64,
        /// Seconds after which rows go to another run if this one is gone. Leases are renewed until the
        /// update is committed.
        #[serde(default = "default_lease_s")]
        #[schemars(range(min = 10.0, max = 86_400.0))]
        lease_s: f64,
    },
}

fn default_queue() -> String {
    "episodes".into()
}

fn default_consumer() -> String {
    "trainer".into()
}

fn default_purpose() -> String {
    "train".into()
}

fn default_wait_s() -> f64 {
    60.0
}

fn default_lease_s() -> f64 {
    600.0
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let Some(section) = &plan.data else { return };
    no_retry(plan, "what is given as data", rules);
    rules.inert(
        "algorithm.refill",
        plan.algorithm.refill.unwrap_or_default(),
        "has no effect: with [data] no tasks are run to train on; remove it",
        plan.algorithm.refill.is_none(),
    );
    let kind = plan.algorithm.kind;
    let composition = plan.algorithm.composition(plan.rollout.group_size);
    let advantage = composition.map(|c| c.advantage);
    let imitates = matches!(advantage, Ok(Advantage::One));
    let prefers = matches!(advantage, Ok(Advantage::Preference { .. }));
    let (name, fits, for_what) = match section {
        DataSection::Demonstrations { .. } => ("demonstrations", imitates, "`sft`"),
        DataSection::Pairs { .. } => ("pairs", prefers, "`dpo`"),
        DataSection::Gold {} => ("gold", imitates, "`sft`"),
        DataSection::Episodes { .. } => ("episodes", imitates || prefers, "`sft` or `dpo`"),
        DataSection::Pool { .. } => ("pool", true, "every algorithm"),
        DataSection::Queue { .. } => ("queue", true, "algorithms that learn from rewards"),
    };
    if let DataSection::Episodes {
        scores: Some(source),
        ..
    } = section
    {
        rules.allowed(
            "data.scores",
            format!("{source:?}"),
            "a source of 1 to 128 bytes, as `sinew rescore --source` writes it",
            (1..=128).contains(&source.len()),
        );
    }
    pool(plan, section, rules);
    queue(plan, section, imitates || prefers, rules);
    rules.custom(
        "data.type",
        format!("{name:?}"),
        format!(
            "serves {for_what}; `{kind}` learns from what its own policy samples: remove [data], or change \
             algorithm.type"
        ),
        fits,
    );
    rules.inert(
        "rollout.cross_policy",
        "{ ... }",
        "has no effect: with [data] nothing is sampled to train on; remove it",
        plan.rollout.cross_policy.is_none(),
    );
}

fn pool(plan: &RunPlan, section: &DataSection, rules: &mut Rules) {
    let DataSection::Pool {
        url,
        wait_s,
        lease_s,
        ..
    } = section
    else {
        return;
    };
    rules.allowed(
        "data.url",
        format!("{url:?}"),
        "the address of `sinew serve --pool`",
        is_http(url),
    );
    rules.range("data.wait_s", *wait_s, 0.0..=86_400.0);
    rules.range("data.lease_s", *lease_s, 10.0..=86_400.0);
    needs_durable(plan, "a run keeps what a pool gave it", rules);
}

fn queue(plan: &RunPlan, section: &DataSection, without_rewards: bool, rules: &mut Rules) {
    let DataSection::Queue {
        queue,
        token_file,
        consumer,
        wait_s,
        lease_s,
        ..
    } = section
    else {
        return;
    };
    rules.custom(
        "data.queue",
        "an address with a password",
        "copies of a recipe are shown: give the password as data.token_file, PGPASSWORD or REDISCLI_AUTH",
        !holds_password(queue),
    );
    rules.allowed(
        "data.queue",
        shown(queue),
        "the address of `sinew queue serve`, with data.token_file, that of a database, or the folder of a store \
         without it",
        is_database(queue) || is_http(queue) == token_file.is_some() && !queue.is_empty(),
    );
    rules.custom(
        "data.type",
        "\"queue\"",
        "serves algorithms that learn from rewards: to imitate or compare stored episodes, use \"episodes\" with the \
         folder that they were collected in",
        !without_rewards,
    );
    rules.allowed(
        "data.consumer",
        format!("{consumer:?}"),
        "1 to 256 bytes, and not \"scorer\"",
        (1..=256).contains(&consumer.len()) && consumer != "scorer",
    );
    rules.range("data.wait_s", *wait_s, 0.0..=86_400.0);
    rules.range("data.lease_s", *lease_s, 10.0..=86_400.0);
    needs_durable(plan, "a run keeps what a queue gave it", rules);
}
