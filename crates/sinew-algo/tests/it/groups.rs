//! Group-relative algorithms.

use crate::support::*;
use sinew_algo::{
    AlgoError, AlgorithmKind::*, Columns, EarlierRewards, EpisodeColumns, GroupRepair, Repair,
    count_tokens,
};
use sinew_types::{EpisodeEnd, FailureKind, Limit, NO_PARENT, TokenKind};

#[test]
fn grpo_normalizes_within_the_group() {
    let (rows, report) = algorithm(Grpo)
        .rows(&[group("g", &[0.0, 1.0, 1.0, 0.0])])
        .unwrap();
    // mean 0.5, unbiased std sqrt(1/3).
    let a = 0.5 / ((1.0f64 / 3.0).sqrt() + 1e-6);
    assert!(close(f64::from(advantage(&rows, "g-1")), a));
    assert!(close(f64::from(advantage(&rows, "g-0")), -a));
    assert_eq!((report.rows, report.trained_episodes), (4, 4));
    for e in ["g-0", "g-1", "g-2", "g-3"] {
        assert!(close(weight(&rows, e), 0.25), "{e}");
    }
}

#[test]
fn only_sampled_tokens_train() {
    let (rows, _) = algorithm(Grpo).rows(&[group("g", &[0.0, 1.0])]).unwrap();
    let row = &rows[1];
    // prompt 2, sampled 2, observation 3, sampled 2
    let trains: Vec<bool> = row.weights.iter().map(|w| *w != 0.0).collect();
    let expected = [false, false, true, true, false, false, false, true, true];
    assert_eq!(trains, expected);
    assert_eq!(row.behaviour_logprobs[3], -0.2);
    assert_eq!(row.behaviour_logprobs[4], 0.0);
    assert_eq!(row.oldest_version.0, 7);
    assert_eq!(row.ref_logprobs, None);
}

#[test]
fn rloo_baseline_excludes_the_episode() {
    let (rows, _) = algorithm(Rloo)
        .rows(&[group("g", &[1.0, 0.0, 0.0, 1.0])])
        .unwrap();
    assert!(close(f64::from(advantage(&rows, "g-0")), 1.0 - 1.0 / 3.0));
    assert!(close(f64::from(advantage(&rows, "g-1")), -2.0 / 3.0));
}

#[test]
fn dr_grpo_divides_by_a_constant_length() {
    let (rows, _) = algorithm(DrGrpo).rows(&[group("g", &[1.0, 0.0])]).unwrap();
    assert!(close(f64::from(advantage(&rows, "g-0")), 0.5));
    // Three and four tokens.
    assert!(close(weight(&rows, "g-0"), 3.0 / 2.0 / 1024.0));
    assert!(close(weight(&rows, "g-1"), 4.0 / 2.0 / 1024.0));
}

#[test]
fn equal_groups_give_no_rows_but_count_in_the_mean() {
    let batch = [group("same", &[1.0, 1.0]), group("g", &[0.0, 1.0])];
    let (rows, report) = algorithm(Grpo).rows(&batch).unwrap();
    assert_eq!(rows.len(), 2);
    assert_eq!(report.groups_equal.len(), 1);
    assert_eq!(report.without_signal, 2);
    assert!(close(weight(&rows, "g-0"), 0.25));
    assert_eq!(report.denominator_episodes, 4);

    let (rows, report) = algorithm(Dapo).rows(&batch).unwrap();
    assert_eq!(report.denominator_episodes, 2);
    assert_eq!(report.denominator_tokens, 3 + 4);
    assert!(close(weight(&rows, "g-0"), 3.0 / 7.0));
    let spent = algorithm(Dapo).spent(&batch).unwrap();
    assert_eq!(spent, [sinew_types::GroupId::new("same")]);
    // Groups that stay in the mean are not replaced.
    assert!(algorithm(Grpo).spent(&batch).unwrap().is_empty());
}

#[test]
fn equal_groups_stay_where_a_kl_term_trains() {
    let mut facts = FACTS;
    facts.reference = true;
    let config = config("type = 'grpo'\nkl = { coefficient = 0.04 }");
    let algorithm = config.resolve(&facts).unwrap();
    let (rows, report) = algorithm.rows(&[group("same", &[1.0, 1.0])]).unwrap();
    assert_eq!(rows.len(), 2);
    assert_eq!(report.without_signal, 0);
    assert_eq!(advantage(&rows, "same-0"), 0.0);
    // The trainer adds them. They are not replaced by zeros.
    assert!(algorithm.needs().ref_in_loss && rows[0].ref_logprobs.is_none());
}

#[test]
fn failed_episodes_are_in_no_baseline() {
    let mut g = group("g", &[0.0, 1.0, 100.0]);
    g[2].end = EpisodeEnd::Failed {
        kind: FailureKind::Sandbox,
        message: "gone".into(),
    };
    let (rows, report) = algorithm(Rloo).rows(&[g.clone()]).unwrap();
    assert_eq!(report.failed["sandbox"], 1);
    assert!(close(f64::from(advantage(&rows, "g-1")), 1.0));
    g[1].end = g[2].end.clone();
    let (rows, report) = algorithm(Rloo).rows(&[g]).unwrap();
    assert!(rows.is_empty());
    assert_eq!(report.groups_too_small.len(), 1);
}

#[test]
fn truncated_episodes_follow_the_policy() {
    let mut g = group("g", &[0.0, 1.0, 1.0]);
    g[0].end = EpisodeEnd::Truncated {
        limit: Limit::Context,
    };
    let rows_of = |policy: &str| {
        let config = config(&format!("type = 'grpo'\ntruncated = '{policy}'"));
        from(&config).rows(&[g.clone()]).unwrap()
    };
    let (rows, report) = rows_of("keep");
    assert_eq!((rows.len(), report.truncated_untrained), (3, 0));
    let (rows, report) = rows_of("mask");
    assert_eq!((rows.len(), report.truncated_untrained), (2, 1));
    assert!(advantage(&rows, "g-1") > 0.5, "the baseline keeps the 0");
    assert_eq!(report.denominator_episodes, 2);
    let (rows, report) = rows_of("exclude");
    assert_eq!(rows.len(), 0, "what is left is equal");
    assert_eq!(report.groups_equal.len(), 1);
}

#[test]
fn non_finite_rewards_are_quarantined_with_the_reason() {
    let mut g = group("g", &[0.0, 1.0, f64::NAN, 0.5, 1e31]);
    g[3].nodes[1].process_reward = f64::INFINITY;
    let (rows, report) = algorithm(Grpo).rows(&[g]).unwrap();
    assert_eq!(rows.len(), 2);
    let reasons: Vec<_> = report.quarantined.iter().map(|q| &q.reason).collect();
    assert!(reasons[0].contains("outcome.reward is NaN"), "{reasons:?}");
    assert!(reasons[1].contains("process_reward is inf"), "{reasons:?}");
    assert!(reasons[2].contains("1e30"), "{reasons:?}");
    assert!(rows.iter().all(|r| r.validate().is_ok()));
}

#[test]
fn missing_rewards_are_not_zero() {
    let scored = group("g", &[0.5, 1.0]);
    let mut g = group("g", &[0.5, 1.0, 0.0]);
    g[2].outcome.unscored = true;
    let (expected, _) = algorithm(Grpo).rows(&[scored]).unwrap();
    let (rows, report) = algorithm(Grpo).rows(&[g.clone()]).unwrap();
    assert_eq!(report.unscored, 1);
    assert_eq!(rows, expected, "neither in the loss nor in the baseline");
    assert_eq!(report.reward.count, 2);
    // Algorithms without rewards ignore a missing one.
    let sft = from(&config("type = 'sft'\nonly_success = false"));
    let (rows, report) = sft.rows(&[g]).unwrap();
    assert_eq!((rows.len(), report.unscored), (3, 0));
}

#[test]
fn wrong_batches_are_refused() {
    let grpo = algorithm(Grpo);
    let refused = |groups: &[Vec<_>]| grpo.rows(groups).unwrap_err();
    assert!(matches!(
        refused(&[group("g", &[1.0])]),
        AlgoError::GroupOfOne { expected: 4, .. }
    ));
    assert!(matches!(
        refused(&[Vec::new()]),
        AlgoError::EmptyGroup { index: 0 }
    ));
    let mut mixed = group("g", &[0.0, 1.0]);
    mixed[1].group = sinew_types::GroupId::new("h");
    assert!(matches!(refused(&[mixed]), AlgoError::MixedGroup { .. }));
    let g = group("g", &[0.0, 1.0]);
    assert!(matches!(
        refused(&[g.clone(), g.clone()]),
        AlgoError::SplitGroup { .. }
    ));
    let twice = vec![g[0].clone(), g[0].clone()];
    assert!(matches!(
        refused(&[twice]),
        AlgoError::DuplicateEpisode { .. }
    ));
    assert!(algorithm(Reinforce).rows(&[group("g", &[1.0])]).is_ok());
}

#[test]
fn equal_prompts_of_different_groups_do_not_merge() {
    let batch = [group("a", &[0.0, 1.0]), group("b", &[10.0, 11.0])];
    let (rows, _) = algorithm(DrGrpo).rows(&batch).unwrap();
    assert!(close(f64::from(advantage(&rows, "a-1")), 0.5));
    assert!(close(f64::from(advantage(&rows, "b-0")), -0.5));
}

#[test]
fn branches_train_shared_tokens_once_and_do_not_multiply_weight() {
    let mut g = group("g", &[0.0, 1.0]);
    // A retry of the second turn of the first episode, from the same observation.
    g[0].nodes.push(node(2, 2, TokenKind::Sampled, 4));
    for kind in [Grpo, DrGrpo, Dapo, Rloo, Reinforce] {
        let (rows, report) = algorithm(kind).rows(&[g.clone()]).unwrap();
        let of_first = rows.iter().filter(|r| r.episode.as_str() == "g-0");
        let trained: Vec<usize> = of_first
            .map(|r| r.weights.iter().filter(|w| **w != 0.0).count())
            .collect();
        if kind == Reinforce {
            assert_eq!(report.without_signal, 1);
        } else {
            assert_eq!(trained, [1 + 2, 4], "{kind}");
        }
    }
    let (rows, _) = algorithm(Grpo).rows(&[g]).unwrap();
    assert!(close(weight(&rows, "g-0"), 0.5));
    assert!(close(weight(&rows, "g-1"), 0.5));
}

#[test]
fn a_sampled_first_token_cannot_train() {
    let lone = |id: &str, r| {
        let nodes = vec![node(NO_PARENT, 0, TokenKind::Sampled, 3)];
        trace("g", id, r, nodes)
    };
    let (rows, report) = algorithm(Grpo)
        .rows(&[vec![lone("a", 0.0), lone("b", 1.0)]])
        .unwrap();
    assert_eq!(rows[0].weights[0], 0.0);
    assert_eq!(report.denominator_tokens, 4);
}

#[test]
fn process_rewards_are_normalized_separately() {
    let mut g = group("g", &[0.0, 1.0]);
    g[0].nodes[1].process_reward = 2.0;
    let summed = from(&config("type = 'dr_grpo'"))
        .rows(&[g.clone()])
        .unwrap();
    assert!(close(f64::from(advantage(&summed.0, "g-0")), 0.5));
    let ignored = config("type = 'dr_grpo'\nprocess = { type = 'ignore' }");
    let ignored = from(&ignored).rows(&[g.clone()]).unwrap();
    assert!(close(f64::from(advantage(&ignored.0, "g-0")), -0.5));
    let apart = config("type = 'dr_grpo'\nprocess = { type = 'separate', weight = 0.5 }");
    let (rows, _) = from(&apart).rows(&[g]).unwrap();
    // Turns earned 2, 0 | 0, 0: mean 0.5, unbiased std 1.
    let row = &rows[0];
    assert!(close(
        f64::from(row.advantages[2]),
        -0.5 + 0.5 * (1.5 - 0.5)
    ));
    let last = row.advantages.len() - 1;
    assert!(close(f64::from(row.advantages[last]), -0.5 + 0.5 * -0.5));
}

#[test]
fn overlong_episodes_have_a_soft_penalty() {
    let toml = "type = 'dr_grpo'\noverlong = { max_tokens = 5, buffer_tokens = 4 }";
    let (_, report) = from(&config(toml))
        .rows(&[group("g", &[0.0, 0.0])])
        .unwrap();
    // Three and four sampled tokens against 1 + 4.
    assert!(close(report.reward.max, -0.5));
    assert!(close(report.reward.min, -0.75));
    // Equation 13 of the paper: above the limit the penalty is the factor.
    let toml = "type = 'dr_grpo'\noverlong = { max_tokens = 2, buffer_tokens = 1, factor = 0.5 }";
    let (_, report) = from(&config(toml))
        .rows(&[group("g", &[0.0, 0.0])])
        .unwrap();
    assert!(close(report.reward.max, -0.5) && close(report.reward.min, -0.5));
}

fn failed(mut trace: sinew_types::Trace) -> sinew_types::Trace {
    trace.end = EpisodeEnd::Failed {
        kind: FailureKind::Sandbox,
        message: "gone".into(),
    };
    trace
}

/// Episodes with rewards 1, 0, 1 and a failed one with 0.
fn broken_group() -> Vec<sinew_types::Trace> {
    let mut traces = group("g", &[1.0, 0.0, 1.0, 0.0]);
    let last = traces.remove(3);
    traces.push(failed(last));
    traces
}

fn repaired(kind: sinew_algo::AlgorithmKind, steps: &str) -> sinew_algo::Algorithm {
    #[derive(serde::Deserialize)]
    struct Steps {
        repair: Vec<GroupRepair>,
    }
    let steps: Steps = toml::from_str(steps).unwrap();
    let repair = Repair::new(&steps.repair).unwrap();
    algorithm(kind).with_repair(repair).unwrap()
}

#[test]
fn viable_groups_continue_and_smaller_ones_are_dropped() {
    for (share, rows, dropped) in [(0.75, 3, 0), (0.8, 0, 1)] {
        let steps = format!(
            "repair = [{{ type = \"min_viable\", share = {share} }}, {{ type = \"drop_group\" }}]"
        );
        let (made, report) = repaired(DrGrpo, &steps).rows(&[broken_group()]).unwrap();
        assert_eq!(made.len(), rows, "{share}");
        assert_eq!(report.repair.broken_groups, 1);
        assert_eq!(report.repair.viable_groups, 1 - dropped);
        assert_eq!(report.repair.dropped_groups.len(), dropped);
        assert_eq!(report.groups_too_small.len(), 0);
        let spent = repaired(DrGrpo, &steps).spent(&[broken_group()]).unwrap();
        assert_eq!(spent.len(), dropped);
    }
}

#[test]
fn masked_episodes_count_in_the_baseline_or_not() {
    for (in_baseline, mean) in [(true, 0.5), (false, 2.0 / 3.0)] {
        let steps = format!("repair = [{{ type = \"mask\", in_baseline = {in_baseline} }}]");
        let (rows, report) = repaired(DrGrpo, &steps).rows(&[broken_group()]).unwrap();
        assert_eq!(rows.len(), 3);
        assert!(close(f64::from(advantage(&rows, "g-0")), 1.0 - mean));
        assert!(close(f64::from(advantage(&rows, "g-1")), -mean));
        assert_eq!(report.repair.masked_groups, 1);
        assert_eq!(report.repair.masked_episodes, 1);
        assert_eq!(report.reward.count, 3);
    }
    // One usable episode can be compared with failed ones. None cannot.
    let steps = "repair = [{ type = \"mask\", in_baseline = true }]";
    let mut one: Vec<_> = group("g", &[1.0, 0.0]);
    one[1] = failed(one[1].clone());
    let (rows, _) = repaired(DrGrpo, steps).rows(&[one.clone()]).unwrap();
    assert!(close(f64::from(advantage(&rows, "g-0")), 0.5));
    one[0] = failed(one[0].clone());
    let (rows, report) = repaired(DrGrpo, steps).rows(&[one]).unwrap();
    assert_eq!((rows.len(), report.groups_too_small.len()), (0, 1));
}

#[test]
fn repeated_episodes_count_twice_and_their_tokens_have_one_weight() {
    let steps = "repair = [{ type = \"pad_repeat\", share = 0.5 }, { type = \"drop_group\" }]";
    let traces = broken_group();
    let (rows, report) = repaired(Grpo, steps)
        .rows(std::slice::from_ref(&traces))
        .unwrap();
    assert_eq!(rows.len(), 3);
    // Rewards 1, 0, 1, 1.
    let std = (0.75f64 / 3.0).sqrt() + 1e-6;
    assert!(close(f64::from(advantage(&rows, "g-0")), 0.25 / std));
    assert!(close(f64::from(advantage(&rows, "g-1")), -0.75 / std));
    assert!(close(weight(&rows, "g-0"), 0.5));
    assert!(close(weight(&rows, "g-1"), 0.25));
    assert_eq!(report.repair.padded_groups, 1);
    assert_eq!(report.repair.repeated_episodes, 1);
    assert_eq!(report.denominator_episodes, 4);
    let counts = count_tokens(&traces, &rows);
    assert!(counts.holds());
    // Two, three and four tokens of turns, two more each; the failed one has six.
    assert_eq!((counts.sampled, counts.trained_once), (18, 12));
    assert_eq!(counts.untrained, 6);
}

#[test]
fn repair_without_effect_is_refused() {
    for (kind, step, part) in [
        (
            "reinforce",
            GroupRepair::Mask { in_baseline: true },
            "no baseline",
        ),
        (
            "reinforce",
            GroupRepair::PadRepeat { share: 0.5 },
            "baseline",
        ),
        ("gigpo", GroupRepair::PadRepeat { share: 0.5 }, "states"),
        (
            "grpo_roc'\nresample = { keep = 2, minimum = 1 }\n#",
            GroupRepair::PadRepeat { share: 0.5 },
            "oversampled",
        ),
    ] {
        let steps = match step {
            GroupRepair::Mask { .. } => vec![step],
            _ => vec![step, GroupRepair::DropGroup {}],
        };
        let repair = Repair::new(&steps).unwrap();
        let refused = from(&config(&format!("type = '{kind}'")))
            .with_repair(repair)
            .unwrap_err()
            .to_string();
        assert!(refused.contains(part), "{refused}");
    }
}

#[test]
fn audit_finds_tokens_trained_twice() {
    let mut forked = two_turns("g", "g-0", 1.0, 2);
    forked.nodes.push(node(2, 2, TokenKind::Sampled, 4));
    let traces = [forked, two_turns("g", "g-1", 0.0, 3)];
    let (mut rows, _) = algorithm(Grpo).rows(&[traces.to_vec()]).unwrap();
    let counts = count_tokens(&traces, &rows);
    assert_eq!((counts.sampled, counts.trained_once), (13, 13));
    assert!(counts.holds());
    // Gives the second branch a weight on a turn that the first branch trains.
    let at = rows.iter().position(|r| r.tokens.len() == 11).unwrap();
    rows[at].weights[2] = 0.1;
    let counts = count_tokens(&traces, &rows);
    assert_eq!((counts.trained_once, counts.trained_twice), (12, 1));
    rows[at].weights[0] = 0.1;
    assert_eq!(count_tokens(&traces, &rows).forced_trained, 1);
    rows.push(rows[at].clone());
    let counts = count_tokens(&traces, &rows);
    assert_eq!(
        counts.stray,
        rows[at].weights.iter().filter(|w| **w != 0.0).count()
    );
    assert!(!counts.holds());
}

#[test]
fn resampling_without_counted_calls_is_refused() {
    let roc = from(&config(
        "type = 'grpo_roc'\nresample = { keep = 2, minimum = 1 }",
    ));
    let uncounted = [group("g", &[1.0, 0.0, 1.0, 0.0])];
    let refused = roc.rows(&uncounted).unwrap_err();
    let expected = AlgoError::NoMetric {
        algorithm: "grpo_roc",
        metric: "tool_calls",
    };
    assert_eq!(refused, expected);
    assert_eq!(roc.spent(&uncounted).unwrap_err(), expected);
    let mut counted = uncounted.clone();
    let metrics = &mut counted[0][2].outcome.metrics;
    metrics.insert("tool_calls".into(), 2.0);
    let kept = |groups: &[Vec<sinew_types::Trace>]| -> Vec<String> {
        let (rows, _) = roc.rows(groups).unwrap();
        rows.iter().map(|r| r.episode.to_string()).collect()
    };
    // A successful call is better than none, which counts as half failed. A missing penalty is 0.
    assert_eq!(kept(&counted), ["g-1", "g-2"]);
    let metrics = &mut counted[0][2].outcome.metrics;
    metrics.insert("format_penalty".into(), 1.0);
    assert_eq!(kept(&counted), ["g-0", "g-1"]);
}

/// The only episode of a group is compared with earlier ones of its task: mean, and deviation with its own.
#[test]
fn an_episode_alone_is_compared_with_earlier_rewards() {
    let mut earlier = EarlierRewards::default();
    earlier.add(0.0);
    earlier.add(1.0);
    let alone = |id: &str, reward: f64| vec![two_turns(id, id, reward, 1)];
    let groups = [alone("a", 1.0), alone("b", 0.5), alone("c", 1.0)];
    let known = |e: &str| {
        let columns = EpisodeColumns {
            earlier: Some(earlier),
            ..EpisodeColumns::default()
        };
        (sinew_types::EpisodeId::new(e), columns)
    };
    // Nothing is known of `c`: there is nothing to compare it with.
    let columns: Columns = ["a", "b"].map(known).into_iter().collect();
    for (kind, expected) in [
        (Grpo, 0.5 / ((1.0f64 / 3.0).sqrt() + 1e-6)),
        (DrGrpo, 0.5),
        (Rloo, 0.5),
        (MaxRl, 1.0),
    ] {
        let algorithm = algorithm(kind);
        let (rows, report) = algorithm.prepare(&groups).unwrap().rows(&columns).unwrap();
        assert!(close(f64::from(advantage(&rows, "a")), expected), "{kind}");
        let ids: Vec<_> = report.groups_too_small.iter().map(|g| g.as_str()).collect();
        assert_eq!(ids, ["c"], "{kind}");
        // A reward as good as the earlier ones gives no signal.
        assert!(
            report.groups_equal.iter().any(|g| g.as_str() == "b"),
            "{kind}"
        );
    }
}
