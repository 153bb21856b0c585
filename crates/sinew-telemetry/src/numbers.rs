//! The numbers of a run by name, equal for every exporter. Pure.
//!
//! Names have parts with `/` between them: `rollout/reward`, `policy/entropy`. Unmeasured values are left
//! out: they are not 0.

use sinew_orchestrator::{EpisodeStats, EvalRecord, StepRecord};

/// Numbers of the loss that are exported, with their names here.
const LOSS: [(&str, &str); 9] = [
    ("entropy", "policy/entropy"),
    ("kl_behaviour_k3", "policy/kl_sampling"),
    ("kl_reference", "policy/kl_reference"),
    ("clip_fraction", "policy/clip_fraction"),
    ("masked_fraction", "policy/masked_fraction"),
    ("truncated_fraction", "policy/correction_truncated"),
    ("ratio_mean", "policy/ratio_mean"),
    ("ratio_max", "policy/ratio_max"),
    ("gap_mean_abs", "policy/logprob_gap_mean"),
];

/// Names and values, finite ones only.
pub(crate) type Numbers = Vec<(String, f64)>;

/// Names and their meaning, for users who see a number without this program's pages. Numbers of a set of
/// episodes are listed without the name of the set. All are short, since every answer to Prometheus contains
/// them.
///
/// A number that is not here is one that an environment or a reward names, or that only some algorithms
/// measure: [`help`] returns its name then, and invents nothing.
const WORDS: [(&str, &str); 54] = [
    ("success", "share of the scored episodes that succeeded"),
    ("greedy_success", "success at temperature 0"),
    ("reward", "mean reward of the scored episodes"),
    ("turns", "mean number of turns of an episode"),
    (
        "sampled_tokens",
        "mean number of sampled tokens of an episode",
    ),
    ("truncated_share", "share of the episodes that a limit cut"),
    (
        "failed_share",
        "share of the episodes that the system failed",
    ),
    ("step", "The last recorded step"),
    ("policy/loss", "Loss of the last update"),
    ("policy/grad_norm", "Norm of the gradient before clipping"),
    ("policy/learning_rate", "Learning rate of the last update"),
    (
        "policy/logprob_gap_max",
        "Largest gap of log-probabilities of sampler and trainer, in nats",
    ),
    (
        "policy/routing_replayed_share",
        "Share of the trainer's tokens computed by the experts that the engine chose",
    ),
    (
        "policy/router_aux_loss",
        "Mean load-balancing loss of the model's routers",
    ),
    (
        "policy/logprob_gap_mean",
        "Mean gap of log-probabilities of sampler and trainer, in nats",
    ),
    (
        "policy/entropy",
        "Mean entropy of the policy at trained tokens, in nats",
    ),
    (
        "policy/kl_sampling",
        "KL divergence to the policy that sampled, in nats",
    ),
    (
        "policy/kl_reference",
        "KL divergence to the reference, in nats",
    ),
    (
        "policy/clip_fraction",
        "Share of trained tokens whose ratio was clipped",
    ),
    (
        "policy/masked_fraction",
        "Share of trained tokens that were masked",
    ),
    (
        "policy/correction_truncated",
        "Share of trained tokens whose correction was truncated",
    ),
    ("policy/ratio_mean", "Mean ratio to the old policy"),
    ("policy/ratio_max", "Largest ratio to the old policy"),
    (
        "samples/equal_share",
        "Share of the episodes in groups of equal reward",
    ),
    (
        "samples/left_out_share",
        "Share of the episodes that gave no row",
    ),
    ("samples/too_old", "Samples that were too old to be trained"),
    (
        "samples/waiting_groups",
        "Groups that wait for rewards from outside",
    ),
    (
        "staleness/oldest",
        "Updates that the oldest trained row was behind",
    ),
    (
        "staleness/mean",
        "Mean updates that trained rows were behind",
    ),
    ("time/rollout_s", "Seconds of rollouts in the last step"),
    ("time/train_s", "Seconds of training in the last step"),
    (
        "time/publish_s",
        "Seconds in which the last step published weights",
    ),
    (
        "time/checkpoint_s",
        "Seconds in which the last step wrote checkpoints",
    ),
    (
        "time/engine_busy_s",
        "Seconds of the last step in which the engine computed",
    ),
    (
        "time/engine_waits_tools_s",
        "Seconds of the last step in which the engine waited for tools",
    ),
    (
        "time/engine_waits_trainer_s",
        "Seconds of the last step in which the engine waited for the trainer",
    ),
    (
        "time/engine_empty_s",
        "Seconds of the last step in which the engine had no episode",
    ),
    (
        "time/trainer_busy_s",
        "Seconds of the last step in which the trainer computed",
    ),
    (
        "time/trainer_waits_groups_s",
        "Seconds of the last step in which the trainer waited for groups",
    ),
    (
        "time/trainer_other_s",
        "Seconds of other waits of the trainer in the last step",
    ),
    (
        "time/loop_disk_s",
        "Seconds of the last step in which the loop waited for the disk",
    ),
    (
        "time/episodes_disk_s",
        "Waits of episodes for the disk in the last step, added up, in seconds",
    ),
    (
        "time/episodes_sandbox_s",
        "Waits of episodes for sandboxes in the last step, added up, in seconds",
    ),
    (
        "speed/sampled_tokens_per_s",
        "Sampled tokens a second in the last step",
    ),
    (
        "speed/trained_tokens",
        "Tokens with weight in the loss of the last step",
    ),
    (
        "engine/preemptions",
        "Turns that gave their KV capacity up in the last step",
    ),
    (
        "engine/waited_turns",
        "Turns that waited for KV capacity in the last step",
    ),
    ("live/in_flight", "Episodes that have begun and not ended"),
    ("live/generating", "Episodes in the model"),
    ("live/in_tool", "Episodes in tools and scores"),
    (
        "live/tokens_per_s",
        "Tokens a second that the engine samples now",
    ),
    ("live/waiting_turns", "Turns that wait for KV capacity"),
    ("live/held_tokens", "KV capacity that is held, in tokens"),
    (
        "live/longest_phase_s",
        "Seconds of the live episode that is longest in its phase",
    ),
];

/// A number by its name, as a sentence.
///
/// | name | sentence |
/// |---|---|
/// | `policy/entropy` | its text |
/// | `rollout/success`, `held_out/success` | the set of episodes, and its text |
/// | `rollout/env/NAME/success` | the same, by environment |
/// | `rollout/reward/NAME` | a part of the reward |
/// | others | named |
pub(crate) fn help(name: &str) -> String {
    let words = |name: &str| {
        WORDS
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, words)| *words)
    };
    let (set, own) = match name.split_once('/') {
        Some(("rollout", own)) => ("Training episodes of the last step", own),
        Some(("held_out", own)) => ("Episodes of the last held-out measurement", own),
        _ => {
            let known = words(name).map(str::to_owned);
            return known.unwrap_or_else(|| format!("{name} of the run")) + ".";
        }
    };
    if own.starts_with("reward/") {
        return format!("{set}: mean of a part of the reward.");
    }
    let (of, last) = match own
        .strip_prefix("env/")
        .and_then(|own| own.rsplit_once('/'))
    {
        Some((_, last)) => (", by environment", last),
        None => ("", own),
    };
    match words(last) {
        Some(words) => format!("{set}{of}: {words}."),
        None => format!("{set}{of}: {last}."),
    }
}

/// The numbers of a step.
pub(crate) fn of_step(r: &StepRecord) -> Numbers {
    let mut out = Vec::new();
    of_stats("rollout", &r.rollout, &mut out);
    let mut add = |name: &str, value: f64| out.push((name.to_owned(), value));
    if r.rows > 0 && r.updates_applied > 0 {
        add("policy/loss", r.loss);
        add("policy/grad_norm", r.grad_norm);
        add("policy/learning_rate", r.learning_rate);
        add("policy/logprob_gap_max", r.logprob_gap_max);
        let routing = [
            ("policy/routing_replayed_share", r.routing_replayed_share),
            ("policy/router_aux_loss", r.router_aux_loss),
        ];
        for (name, value) in routing {
            if let Some(value) = value {
                add(name, value);
            }
        }
        for (key, name) in LOSS {
            if let Some(value) = r.metrics[key].as_f64() {
                add(name, value);
            }
        }
    }
    let all = (r.rollout.episodes + r.retried).max(1) as f64;
    add("samples/equal_share", r.samples.equal.count as f64 / all);
    add(
        "samples/left_out_share",
        r.dropped.values().sum::<usize>() as f64 / all,
    );
    add("samples/too_old", r.samples.too_old.count as f64);
    add("samples/waiting_groups", r.samples.waiting as f64);
    if let Some(oldest) = r.staleness.keys().last() {
        add("staleness/oldest", *oldest as f64);
        let rows: usize = r.staleness.values().sum();
        let sum: f64 = r
            .staleness
            .iter()
            .map(|(age, n)| *age as f64 * *n as f64)
            .sum();
        add("staleness/mean", sum / rows.max(1) as f64);
    }
    for (name, value) in [
        ("time/rollout_s", r.rollout_s),
        ("time/train_s", r.train_s),
        ("time/publish_s", r.publish_s),
        ("time/checkpoint_s", r.checkpoint_s),
        ("time/engine_busy_s", r.waits.engine_busy_s),
        ("time/engine_waits_tools_s", r.waits.engine_tools_s),
        ("time/engine_waits_trainer_s", r.waits.engine_trainer_s),
        ("time/engine_empty_s", r.waits.engine_empty_s),
        ("time/trainer_busy_s", r.waits.trainer_busy_s),
        ("time/trainer_waits_groups_s", r.waits.trainer_groups_s),
        ("time/trainer_other_s", r.waits.trainer_other_s),
        ("time/loop_disk_s", r.waits.loop_disk_s),
        ("time/episodes_disk_s", r.waits.episodes_disk_s),
        ("time/episodes_sandbox_s", r.waits.episodes_sandbox_s),
        ("speed/sampled_tokens_per_s", r.sampled_tokens_per_s),
        ("speed/trained_tokens", r.trained_tokens as f64),
        ("engine/preemptions", r.admission.preemptions as f64),
        ("engine/waited_turns", r.admission.waited_turns as f64),
    ] {
        add(name, value);
    }
    out.retain(|(_, value)| value.is_finite());
    out
}

/// The numbers of a held-out measurement.
pub(crate) fn of_eval(r: &EvalRecord) -> Numbers {
    let mut out = Vec::new();
    of_stats("held_out", &r.stats, &mut out);
    if let Some(greedy) = r.stats.greedy_success {
        out.push(("held_out/greedy_success".into(), greedy));
    }
    out.retain(|(_, value)| value.is_finite());
    out
}

/// Means of a set of episodes, of each environment of a mixture, and of the parts of the reward.
fn of_stats(prefix: &str, s: &EpisodeStats, out: &mut Numbers) {
    let scored = |s: &EpisodeStats| s.episodes > s.failed + s.unscored;
    let all = s.episodes.max(1) as f64;
    if scored(s) {
        for (name, value) in [
            ("success", s.success),
            ("reward", s.reward),
            ("turns", s.turns),
            ("sampled_tokens", s.sampled_tokens),
        ] {
            out.push((format!("{prefix}/{name}"), value));
        }
        let spread = s.reward_spread;
        let spread = spread.map(|r| [("std", r.std), ("min", r.min), ("max", r.max)]);
        for (name, value) in spread.into_iter().flatten() {
            out.push((format!("{prefix}/reward_{name}"), value));
        }
        if let Some(i) = s.success_interval {
            out.push((format!("{prefix}/success_low"), i.low));
            out.push((format!("{prefix}/success_high"), i.high));
        }
        for (k, value) in &s.pass_at {
            out.push((format!("{prefix}/pass_at_{k}"), *value));
        }
        if let Some(p) = s.sampled_tokens_at {
            for (name, value) in [
                ("p50", p.p50),
                ("p90", p.p90),
                ("p99", p.p99),
                ("max", p.max),
            ] {
                out.push((format!("{prefix}/sampled_tokens_{name}"), value as f64));
            }
        }
        for (name, value) in &s.metrics {
            out.push((format!("{prefix}/{name}"), *value));
        }
    }
    out.push((
        format!("{prefix}/truncated_share"),
        s.truncated as f64 / all,
    ));
    out.push((format!("{prefix}/failed_share"), s.failed as f64 / all));
    for (env, own) in s.by_env.iter().filter(|(_, own)| scored(own)) {
        out.push((format!("{prefix}/env/{env}/success"), own.success));
        out.push((format!("{prefix}/env/{env}/reward"), own.reward));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_that_is_always_there_is_explained() {
        let mut r = StepRecord {
            staleness: [(0, 1)].into(),
            ..StepRecord::default()
        };
        (r.rows, r.updates_applied, r.rollout.episodes) = (1, 1, 4);
        r.metrics = LOSS
            .iter()
            .map(|(key, _)| ((*key).to_owned(), serde_json::json!(0.5)))
            .collect();
        for (name, _) in of_step(&r) {
            let said = help(&name);
            assert!(
                said.contains(' ') && !said.starts_with(&name),
                "{name}: {said}"
            );
        }
        let eval = "Episodes of the last held-out measurement: success at temperature 0.";
        assert_eq!(help("held_out/greedy_success"), eval);
        assert!(help("rollout/env/shop/success").contains("by environment: share of the scored"));
        assert_eq!(
            help("rollout/calls"),
            "Training episodes of the last step: calls."
        );
    }

    #[test]
    fn what_was_not_measured_is_left_out() {
        let mut r = StepRecord {
            metrics: serde_json::json!({ "entropy": 0.7 }),
            sampled_tokens_per_s: f64::NAN,
            ..StepRecord::default()
        };
        let has = |r: &StepRecord, name: &str| of_step(r).iter().any(|(n, _)| n == name);
        assert!(!has(&r, "rollout/reward") && !has(&r, "policy/entropy"));
        assert!(!has(&r, "speed/sampled_tokens_per_s"));
        (r.rows, r.updates_applied, r.rollout.episodes) = (1, 1, 4);
        r.rollout.metrics = [("reward/format".into(), 0.5)].into();
        assert!(has(&r, "rollout/reward") && has(&r, "policy/entropy"));
        assert!(has(&r, "rollout/reward/format"));
    }
}
