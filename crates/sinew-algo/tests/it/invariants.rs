//! Properties of all traces and algorithms.

use crate::support::{Whole, algorithm, config, from, node, trace, two_turns};
use proptest::prelude::*;
use sinew_algo::AlgorithmKind::*;
use sinew_types::{NO_PARENT, Node, TokenKind, Trace, TrainRow};
use std::collections::BTreeMap;

fn kind() -> impl Strategy<Value = TokenKind> {
    prop_oneof![
        2 => Just(TokenKind::Sampled),
        1 => Just(TokenKind::Observation),
        1 => Just(TokenKind::Forced),
    ]
}

/// A tree in which each node has a random earlier node as parent.
fn nodes() -> impl Strategy<Value = Vec<Node>> {
    let later = (any::<prop::sample::Index>(), kind(), 0usize..5);
    prop::collection::vec(later, 1..8).prop_map(|later| {
        let mut nodes = vec![node(NO_PARENT, 0, TokenKind::Prompt, 2)];
        for (parent, kind, tokens) in later {
            let parent = parent.index(nodes.len());
            let turn = nodes[parent].turn + 1;
            nodes.push(node(parent as u32, turn, kind, tokens));
        }
        nodes
    })
}

fn group() -> impl Strategy<Value = Vec<Trace>> {
    prop::collection::vec((nodes(), -2.0..2.0f64), 2..5).prop_map(|episodes| {
        let make = |(i, (nodes, reward))| trace("g", &format!("e{i}"), reward, nodes);
        episodes.into_iter().enumerate().map(make).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_sampled_token_trains_once(g in group()) {
        for kind in [Dapo, Rloo, DrGrpo] {
            let (rows, report) = algorithm(kind).rows(std::slice::from_ref(&g)).unwrap();
            let mut trained: BTreeMap<&str, usize> = BTreeMap::new();
            for row in &rows {
                row.validate().unwrap();
                let n = row.weights.iter().filter(|w| **w != 0.0).count();
                *trained.entry(row.episode.as_str()).or_default() += n;
            }
            for trace in &g {
                if let Some(n) = trained.get(trace.episode.as_str()) {
                    prop_assert_eq!(*n, trace.sampled_tokens());
                }
            }
            let sampled: usize = g.iter().map(Trace::sampled_tokens).sum();
            prop_assert_eq!(report.denominator_tokens, sampled);
        }
    }

    #[test]
    fn weights_add_up_to_the_aggregation(g in group()) {
        let total = |toml: &str| {
            let (rows, report) = from(&config(toml)).rows(std::slice::from_ref(&g)).unwrap();
            let weights = rows.iter().flat_map(|r| &r.weights);
            (weights.map(|w| f64::from(*w)).sum::<f64>(), report)
        };
        let (mean, report) = total("type = 'grpo'");
        if report.without_signal == 0 && report.rows > 0 {
            prop_assert!((mean - 1.0).abs() < 1e-4);
            let (tokens, _) = total("type = 'grpo'\naggregation = { type = 'token_mean' }");
            prop_assert!((tokens - 1.0).abs() < 1e-4);
            let (sum, _) = total("type = 'grpo'\naggregation = { type = 'token_sum' }");
            prop_assert!((sum - report.trained_tokens as f64).abs() < 1e-3);
        }
    }

    /// The weights of a part of the batch are those of the part as a separate batch times one factor: an
    /// episode counts the same, whatever its company.
    #[test]
    fn weights_of_a_part_are_those_of_a_separate_mean_times_one_factor(
        first in prop::collection::vec((1usize..30, 0.1..1.0f64), 2..4),
        second in prop::collection::vec((1usize..30, 0.1..1.0f64), 2..4),
    ) {
        let group = |name: &str, episodes: &[(usize, f64)]| -> Vec<Trace> {
            let make = |(i, &(tokens, reward)): (usize, &(usize, f64))| {
                let mut trace = two_turns(name, &format!("{name}-{i}"), reward + i as f64, tokens);
                trace.nodes.push(node(2, 2, TokenKind::Sampled, 3));
                trace
            };
            episodes.iter().enumerate().map(make).collect()
        };
        let (first, second) = (group("a", &first), group("b", &second));
        for aggregation in [
            "'token_mean'",
            "'sequence_mean_token_mean'",
            "'sequence_mean_token_sum'",
            "'sequence_mean_token_sum_norm', length = 64.0",
        ] {
            let toml = format!("type = 'grpo'\naggregation = {{ type = {aggregation} }}");
            let algorithm = from(&config(&toml));
            let (whole, _) = algorithm.rows(&[first.clone(), second.clone()]).unwrap();
            for part in [&first, &second] {
                let (alone, _) = algorithm.rows(std::slice::from_ref(part)).unwrap();
                let is_own = |r: &&TrainRow| alone.iter().any(|a| a.episode == r.episode);
                let own: Vec<_> = whole.iter().filter(is_own).collect();
                prop_assert_eq!(own.len(), alone.len());
                // One factor for the whole part: what its tokens, or its episodes, are of the batch.
                let sum = |rows: &mut dyn Iterator<Item = &TrainRow>| -> f64 {
                    rows.flat_map(|r| &r.weights).map(|w| f64::from(*w)).sum()
                };
                let share = sum(&mut own.iter().copied()) / sum(&mut alone.iter());
                for (row, alone) in own.iter().zip(&alone) {
                    for (w, expected) in row.weights.iter().zip(&alone.weights) {
                        let scaled = f64::from(*w) / share;
                        prop_assert!((scaled - f64::from(*expected)).abs() < 1e-5, "{} {}", toml, scaled);
                    }
                }
            }
        }
    }

    #[test]
    fn grpo_ignores_shift_and_order(g in group(), shift in -5.0..5.0f64) {
        let grpo = algorithm(Grpo);
        let (rows, _) = grpo.rows(std::slice::from_ref(&g)).unwrap();
        let mut moved = g.clone();
        moved.reverse();
        for trace in &mut moved {
            trace.outcome.reward += shift;
        }
        let (mut other, _) = grpo.rows(&[moved]).unwrap();
        other.sort_by(|a, b| a.episode.cmp(&b.episode));
        prop_assert_eq!(rows.len(), other.len());
        for (a, b) in rows.iter().zip(&other) {
            prop_assert_eq!(&a.tokens, &b.tokens);
            for (x, y) in a.advantages.iter().zip(&b.advantages) {
                prop_assert!((x - y).abs() < 1e-3, "{} {}", x, y);
            }
        }
    }
}
