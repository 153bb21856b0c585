//! Each algorithm compared with its formula in PyTorch, see `tests/golden/make_algorithms.py`.

use crate::support::{FACTS, Whole, node, trace};
use serde::Deserialize;
use sinew_algo::{
    AlgorithmConfig, AlgorithmKind, Column, Columns, Draft, EpisodeColumns, RunFacts,
};
use sinew_types::{
    Component, EpisodeEnd, Limit, NO_PARENT, TokenKind, TokenLogprob, Trace, TrainRow,
};
use std::collections::BTreeSet;

#[derive(Deserialize)]
struct Golden {
    episodes: Vec<Episode>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Episode {
    group: String,
    kind: String,
    environment: String,
    reward: f64,
    success: bool,
    truncated: bool,
    tool_calls: f64,
    tool_errors: f64,
    format_penalty: f64,
    turns: Vec<Turn>,
}

#[derive(Deserialize)]
struct Turn {
    before: usize,
    state: u64,
    sampled: usize,
    process: f64,
    logprobs: Vec<f32>,
    values: Vec<f32>,
    #[serde(rename = "ref")]
    reference: Vec<f32>,
    prox: Vec<f32>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    config: AlgorithmConfig,
    facts: Facts,
    loss: Option<f64>,
    expected: Vec<Option<Expected>>,
}

#[derive(Deserialize)]
struct Facts {
    group_size: usize,
    reference: bool,
    #[serde(default)]
    teacher: bool,
    critic: bool,
}

#[derive(Deserialize)]
struct Expected {
    advantages: Option<Vec<f64>>,
    weights: Option<Vec<f64>>,
    returns: Option<Vec<f64>>,
    /// Gradient of the loss with respect to the current log-probabilities: `−weight · advantage`.
    gradient: Option<Vec<f64>>,
}

fn golden() -> Golden {
    let text = include_str!("../golden/algorithms.json");
    serde_json::from_str(text).unwrap()
}

fn trace_of(index: usize, episode: &Episode) -> Trace {
    let mut nodes = Vec::new();
    for (k, turn) in episode.turns.iter().enumerate() {
        let parent = |n: usize| n.checked_sub(1).map_or(NO_PARENT, |p| p as u32);
        let kind = if k == 0 {
            TokenKind::Prompt
        } else {
            TokenKind::Observation
        };
        let mut before = node(parent(nodes.len()), k as u32, kind, turn.before);
        before.state_hash = Some(turn.state);
        nodes.push(before);
        let mut sampled = node(
            parent(nodes.len()),
            k as u32 + 1,
            TokenKind::Sampled,
            turn.sampled,
        );
        sampled.logprobs = turn.logprobs.clone();
        sampled.process_reward = turn.process;
        nodes.push(sampled);
    }
    let id = format!("e{index:02}");
    let mut trace = trace(&episode.group, &id, episode.reward, nodes);
    trace.task_kind = episode.kind.clone();
    trace.provenance.environment = Some(Component {
        name: episode.environment.clone(),
        version: "1".into(),
    });
    trace.outcome.success = episode.success;
    let metrics = &mut trace.outcome.metrics;
    metrics.insert("tool_calls".into(), episode.tool_calls);
    metrics.insert("tool_errors".into(), episode.tool_errors);
    metrics.insert("format_penalty".into(), episode.format_penalty);
    if episode.truncated {
        trace.end = EpisodeEnd::Truncated {
            limit: Limit::Turns,
        };
    }
    trace
}

fn groups(golden: &Golden) -> Vec<Vec<Trace>> {
    let mut groups: Vec<Vec<Trace>> = Vec::new();
    for (i, episode) in golden.episodes.iter().enumerate() {
        let trace = trace_of(i, episode);
        match groups.last_mut() {
            Some(g) if g[0].group == trace.group => g.push(trace),
            _ => groups.push(vec![trace]),
        }
    }
    groups
}

fn columns(golden: &Golden, facts: &RunFacts, prox: bool) -> Columns {
    let of = |episode: &Episode, pick: fn(&Turn) -> &Vec<f32>| {
        let nodes = episode
            .turns
            .iter()
            .flat_map(|t| [Vec::new(), pick(t).clone()]);
        Some(nodes.collect::<Vec<_>>())
    };
    let entry = |(i, e): (usize, &Episode)| {
        let columns = EpisodeColumns {
            values: of(e, |t| &t.values).filter(|_| facts.critic),
            ref_logprobs: of(e, |t| &t.reference).filter(|_| facts.reference),
            prox_logprobs: of(e, |t| &t.prox).filter(|_| prox),
            teacher_logprobs: of(e, |t| &t.reference).filter(|_| facts.teacher),
            teacher_top: facts.teacher.then(|| tops(e)),
            ..EpisodeColumns::default()
        };
        (sinew_types::EpisodeId::new(format!("e{i:02}")), columns)
    };
    golden.episodes.iter().enumerate().map(entry).collect()
}

/// One token with the same probability as the sampled one.
fn tops(episode: &Episode) -> Vec<Vec<Vec<TokenLogprob>>> {
    let top = |&logprob: &f32| vec![TokenLogprob { id: 1, logprob }];
    let turns = episode.turns.iter();
    turns
        .flat_map(|t| [Vec::new(), t.reference.iter().map(top).collect()])
        .collect()
}

fn trained(row: &TrainRow) -> impl Iterator<Item = usize> + '_ {
    (0..row.tokens.len()).filter(|&t| row.weights[t] != 0.0)
}

fn compare(what: &str, actual: impl Iterator<Item = f64>, expected: &[f64]) {
    let actual: Vec<f64> = actual.collect();
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (a, e) in actual.iter().zip(expected) {
        assert!(
            (a - e).abs() <= 2e-6 * (1.0 + e.abs()),
            "{what}: {a} is not {e}"
        );
    }
}

impl Facts {
    fn run(&self) -> RunFacts {
        RunFacts {
            group_size: self.group_size,
            reference: self.reference,
            teacher: self.teacher,
            critic: self.critic,
            ..FACTS
        }
    }
}

#[test]
fn every_algorithm_matches_its_formula() {
    let golden = golden();
    let groups = groups(&golden);
    for case in &golden.cases {
        let facts = case.facts.run();
        let algorithm = case.config.resolve(&facts).unwrap();
        let columns = columns(&golden, &facts, algorithm.needs().prox_logprobs);
        let (rows, report) = algorithm.rows_with(&groups, &columns).unwrap();
        let present: BTreeSet<_> = rows.iter().map(|r| r.episode.as_str()).collect();
        for (i, expected) in case.expected.iter().enumerate() {
            let id = format!("e{i:02}");
            let what = format!("{} {id}", case.name);
            assert_eq!(present.contains(id.as_str()), expected.is_some(), "{what}");
            let Some(expected) = expected else { continue };
            let row = rows.iter().find(|r| r.episode.as_str() == id).unwrap();
            let column = |column: &[f32]| {
                let column = column.to_vec();
                trained(row).map(move |t| f64::from(column[t]))
            };
            if let Some(e) = &expected.advantages {
                compare(&format!("{what} advantages"), column(&row.advantages), e);
            }
            if let Some(e) = &expected.weights {
                compare(&format!("{what} weights"), column(&row.weights), e);
            }
            if let Some(e) = &expected.returns {
                let returns = row.returns.as_ref().unwrap();
                compare(&format!("{what} returns"), column(returns), e);
                assert!(row.values.is_some(), "{what}");
            }
            if let Some(e) = &expected.gradient {
                let product = |t: usize| -f64::from(row.weights[t]) * f64::from(row.advantages[t]);
                compare(&format!("{what} gradient"), trained(row).map(product), e);
            }
        }
        if let Some(loss) = case.loss {
            assert!((report.preference.unwrap().loss - loss).abs() < 1e-6);
        }
    }
}

#[test]
fn every_algorithm_has_a_golden_vector() {
    let covered: BTreeSet<_> = golden().cases.iter().map(|c| c.config.kind).collect();
    let all: BTreeSet<_> = AlgorithmKind::ALL.iter().copied().collect();
    assert_eq!(covered, all);
}

/// A policy gradient is of the policy that acted, at each token's temperature; what is imitated or preferred
/// is learned by the model itself. A draft is scored at what its rows are trained at.
#[test]
fn rows_have_the_temperatures_of_their_tokens() {
    let golden = golden();
    for &kind in AlgorithmKind::ALL {
        let case = golden.cases.iter().find(|c| c.config.kind == kind).unwrap();
        let algorithm = case.config.resolve(&case.facts.run()).unwrap();
        let mut groups = groups(&golden);
        for trace in groups.iter_mut().flatten() {
            for node in trace
                .nodes
                .iter_mut()
                .filter(|n| n.kind == TokenKind::Sampled)
            {
                node.temperature = if node.turn == 1 { 0.7 } else { 1.2 };
            }
        }
        let plain = matches!(kind, AlgorithmKind::Sft | AlgorithmKind::Dpo);
        assert_eq!(algorithm.composition().tempered(), !plain, "{kind}");
        let draft = algorithm.draft(&groups).unwrap();
        assert!(!draft.rows().is_empty());
        for row in draft.rows() {
            let found: BTreeSet<u32> = trained(row).map(|t| row.temperature(t).to_bits()).collect();
            let expected: &[f32] = if plain { &[1.0] } else { &[0.7, 1.2] };
            let within = found.iter().all(|t| expected.contains(&f32::from_bits(*t)));
            assert!(within && found.len() <= expected.len(), "{kind}: {row:?}");
            assert_eq!(row.temperatures.is_empty(), plain, "{kind}");
            let rest = (0..row.tokens.len()).filter(|t| row.weights[*t] == 0.0);
            assert!(
                rest.into_iter().all(|t| row.temperature(t) == 1.0),
                "{kind}"
            );
        }
    }
}

#[test]
fn drafts_convert_scores_to_columns() {
    let golden = golden();
    let mut groups = groups(&golden);
    // A branch: its tokens are in a second row.
    let branch = node(0, 1, TokenKind::Sampled, 3);
    groups[0][0].nodes.push(branch);
    let facts = RunFacts {
        teacher: true,
        ..FACTS
    };
    let algorithm = AlgorithmConfig::new(AlgorithmKind::Opd)
        .resolve(&facts)
        .unwrap();
    let draft: Draft = algorithm.draft(&groups).unwrap();
    let sampled: usize = groups.iter().flatten().map(Trace::sampled_tokens).sum();
    assert_eq!(
        draft
            .rows()
            .iter()
            .map(|r| trained(r).count())
            .sum::<usize>(),
        sampled
    );
    // A teacher that is sure of everything, except of the place that names a token.
    let score = |(r, row): (usize, &TrainRow)| {
        let at = |t: usize| -(r as f32) - t as f32 / 100.0;
        (0..row.tokens.len()).map(at).collect::<Vec<_>>()
    };
    let scores: Vec<_> = draft.rows().iter().enumerate().map(score).collect();
    let mut columns = Columns::new();
    draft
        .fill(&mut columns, Column::TeacherLogprobs, &scores)
        .unwrap();
    let (rows, _) = algorithm.rows_with(&groups, &columns).unwrap();
    assert_eq!(rows.len(), draft.rows().len());
    for ((row, drafted), scores) in rows.iter().zip(draft.rows()).zip(&scores) {
        assert_eq!(row.tokens, drafted.tokens);
        for t in trained(row) {
            let expected = scores[t] - row.behaviour_logprobs[t];
            assert!((row.advantages[t] - expected).abs() < 1e-5);
        }
    }
    assert!(
        draft
            .fill(&mut columns, Column::Values, &scores[1..])
            .is_err()
    );
}
