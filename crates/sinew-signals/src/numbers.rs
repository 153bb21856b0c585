//! The numbers of a run by name, for every exporter alike. Pure.
//!
//! Names have parts with `/` between them: `rollout/reward`, `policy/entropy`. What was not measured is left
//! out: it is not 0.

use sinew_pipeline::{EpisodeStats, EvalRecord, StepRecord};

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
