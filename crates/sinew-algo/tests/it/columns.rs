//! Columns in addition to traces: requirements, checks and use.

use crate::support::{FACTS, Whole, advantage, algorithm, close, config, group, node, two_turns};
use sinew_algo::{AlgoError, Algorithm, AlgorithmKind, Columns, EpisodeColumns, RunFacts};
use sinew_types::{EpisodeEnd, Limit, TokenKind, Trace};

fn with_models(toml: &str) -> Algorithm {
    let typed = config(toml);
    let facts = RunFacts {
        reference: true,
        teacher: typed
            .composition(FACTS.group_size)
            .unwrap()
            .needs()
            .teacher(),
        critic: typed.kind.preset().advantage.needs_values(),
        ..FACTS
    };
    typed.resolve(&facts).unwrap()
}

/// A column with the same value at every token of every node.
fn constant(groups: &[Vec<Trace>], value: f32) -> Columns {
    let of = |t: &Trace| {
        let nodes = t.nodes.iter().map(|n| vec![value; n.tokens.len()]);
        Some(nodes.collect::<Vec<_>>())
    };
    let entry = |t: &Trace| {
        let columns = EpisodeColumns {
            values: of(t),
            ref_logprobs: of(t),
            prox_logprobs: None,
            ..EpisodeColumns::default()
        };
        (t.episode.clone(), columns)
    };
    groups.iter().flatten().map(entry).collect()
}

#[test]
fn missing_columns_are_errors() {
    let batch = [group("g", &[0.0, 1.0])];
    for (toml, expected) in [
        ("type = 'ppo'", "values"),
        ("type = 'turn_ppo'", "values"),
        ("type = 'opd'", "teacher_logprobs"),
        ("type = 'opd_top_k'", "teacher_top"),
        ("type = 'dpo'", "ref_logprobs"),
        (
            "type = 'rloo'\nkl = { place = 'reward', coefficient = 0.1 }",
            "ref_logprobs",
        ),
    ] {
        match with_models(toml).rows(&batch) {
            Err(AlgoError::MissingColumn { column, .. }) => assert_eq!(column, expected),
            other => panic!("{toml}: {other:?}"),
        }
    }
}

#[test]
fn columns_are_checked_at_sampled_nodes() {
    let batch = [group("g", &[0.0, 1.0])];
    let ppo = with_models("type = 'ppo'");
    let mut columns = constant(&batch, 0.5);
    let first = &batch[0][0].episode;
    let edit = |columns: &mut Columns, node: usize, f: fn(&mut Vec<f32>)| {
        let values = columns.get_mut(first).unwrap().values.as_mut().unwrap();
        f(&mut values[node]);
    };
    // Nodes 0 and 2 are not sampled, so that their entries are not read.
    edit(&mut columns, 0, |v| v.fill(f32::NAN));
    edit(&mut columns, 2, Vec::clear);
    let (rows, _) = ppo.rows_with(&batch, &columns).unwrap();
    let finite = |column: &[f32]| column.iter().all(|v| v.is_finite());
    assert!(rows.iter().all(|r| {
        let columns = [
            &r.advantages,
            r.values.as_ref().unwrap(),
            r.returns.as_ref().unwrap(),
        ];
        columns.into_iter().all(|c| finite(c))
    }));
    edit(&mut columns, 3, |v| v[1] = f32::NAN);
    let refused = ppo.rows_with(&batch, &columns);
    assert!(matches!(
        refused,
        Err(AlgoError::ColumnValue {
            column: "values",
            node: 3,
            index: 1,
            ..
        })
    ));
    edit(&mut columns, 3, |v| v.truncate(1));
    let refused = ppo.rows_with(&batch, &columns);
    assert!(matches!(
        refused,
        Err(AlgoError::ColumnLength {
            node: 3,
            actual: 1,
            expected: 2,
            ..
        })
    ));
}

#[test]
fn recursions_skip_tool_output() {
    let mut batch = [vec![two_turns("g", "e", 3.0, 4)]];
    batch[0][0].nodes[3].process_reward = 0.5;
    for toml in [
        "type = 'ppo'\nnormalize = 'none'",
        "type = 'turn_ppo'\nnormalize = 'none'\ngamma_turn = 1.0",
        "type = 'reinforce_pp'\nnormalize = 'none'",
    ] {
        let algorithm = with_models(toml);
        let (rows, _) = algorithm.rows_with(&batch, &constant(&batch, 0.0)).unwrap();
        let row = &rows[0];
        for t in (0..row.tokens.len()).filter(|&t| row.weights[t] != 0.0) {
            assert!(close(f64::from(row.advantages[t]), 3.5), "{toml} {t}");
        }
    }
}

#[test]
fn recursions_follow_each_branch() {
    let mut batch = [vec![two_turns("g", "e", 1.0, 2)]];
    batch[0][0].nodes.push(node(2, 3, TokenKind::Sampled, 1));
    batch[0][0].nodes[4].process_reward = 5.0;
    let algorithm = with_models("type = 'reinforce_pp'\nnormalize = 'none'");
    let (rows, _) = algorithm.rows(&batch).unwrap();
    assert_eq!(rows.len(), 2);
    assert!(
        close(f64::from(rows[0].advantages[2]), 1.0),
        "shared with the first leaf"
    );
    assert!(close(f64::from(*rows[1].advantages.last().unwrap()), 6.0));
}

#[test]
fn turns_without_state_are_not_compared() {
    let gigpo = algorithm(AlgorithmKind::Gigpo);
    let mut batch = [group("g", &[0.0, 1.0])];
    let refused = gigpo.rows(&batch);
    assert!(matches!(refused, Err(AlgoError::NoStates { .. })));
    for t in &mut batch[0] {
        t.nodes[0].state_hash = Some(1);
    }
    let (rows, report) = gigpo.rows(&batch).unwrap();
    assert_eq!(report.steps_without_state, 2);
    // The turns in the first state have discounted returns of 0 and 0.95.
    let unit = 0.5 / 0.5f64.sqrt();
    assert!(close(f64::from(advantage(&rows, "g-1")), 2.0 * unit));
    assert!(close(f64::from(*rows[1].advantages.last().unwrap()), unit));
}

#[test]
fn truncated_episodes_are_bootstrapped() {
    let mut batch = [vec![
        two_turns("g", "cut", 1.0, 4),
        two_turns("g", "ended", 1.0, 4),
    ]];
    batch[0][0].end = EpisodeEnd::Truncated {
        limit: Limit::Turns,
    };
    let toml = "type = 'ppo'\nnormalize = 'none'\ngamma = 0.9\ntruncated = 'bootstrap'";
    let ppo = with_models(toml);
    let draft = ppo.draft(&batch).unwrap();
    let longer: Vec<usize> = draft.value_rows().iter().map(|r| r.tokens.len()).collect();
    let plain: Vec<usize> = draft.rows().iter().map(|r| r.tokens.len()).collect();
    assert_eq!(longer, [plain[0] + 1, plain[1]]);
    let mut columns = Columns::new();
    let mut scores: Vec<Vec<f32>> = longer.iter().map(|&n| vec![0.25; n]).collect();
    *scores[0].last_mut().unwrap() = 2.0;
    draft.fill_values(&mut columns, scores).unwrap();
    let (rows, _) = ppo.rows_with(&batch, &columns).unwrap();
    for (row, after) in rows.iter().zip([2.0, 0.0]) {
        let sampled: Vec<usize> = (0..row.tokens.len())
            .filter(|&t| row.weights[t] != 0.0)
            .collect();
        for (left, &t) in sampled.iter().rev().enumerate() {
            // The advantage at lambda = 1 is discounted later rewards minus the value.
            let outcome = 0.9f64.powi(left as i32);
            let expected = outcome + outcome * 0.9 * after - 0.25;
            assert!(close(f64::from(row.advantages[t]), expected), "{row:?}");
        }
    }
    for values in columns.values_mut() {
        values.values_after.clear();
    }
    let refused = ppo.rows_with(&batch, &columns).unwrap_err();
    assert!(refused.to_string().contains("values_after"), "{refused}");
    let turns = with_models(
        "type = 'turn_ppo'\nnormalize = 'none'\ngamma_turn = 0.5\ntruncated = 'bootstrap'",
    );
    let leaf = batch[0][0].leaves()[0];
    let cut = columns.get_mut(&batch[0][0].episode).unwrap();
    cut.values_after.insert(leaf, 2.0);
    let (rows, _) = turns.rows_with(&batch, &columns).unwrap();
    // The last turn returns 1 + 0.5 * 2 and the one before half of it; the other episode 1 and 0.5.
    for (row, last) in rows.iter().zip([2.0, 1.0]) {
        let returns = row.returns.as_ref().unwrap();
        let trained: Vec<usize> = (0..row.tokens.len())
            .filter(|&t| row.weights[t] != 0.0)
            .collect();
        assert!(close(f64::from(returns[trained[0]]), last / 2.0), "{row:?}");
        let end = trained[trained.len() - 1];
        assert!(close(f64::from(returns[end]), last), "{row:?}");
    }
}
