//! Scores that come after an episode: their effect in every store.

use crate::support::{id, on_each, score, trace};
use proptest::prelude::*;
use sinew_store::{
    CommitOutcome, Cursor, GcPolicy, MAX_SCORE_BATCH, MAX_SCORES, Score, ScoreRecord, ScoreRefused,
    ScoreRule, ScoreTerm, StoreError, in_force,
};

#[test]
fn a_score_is_taken_once_and_comes_back() {
    on_each(|store| {
        store.commit_batch(&[trace(0, 5), trace(1, 5)]).unwrap();
        let none = ScoreRecord {
            score: Score::Unscored("judge down".into()),
            ..score(1, "judge", 7, 0.0)
        };
        let put = [
            score(0, "thumbs", 5, 1.0),
            none.clone(),
            score(0, "thumbs", 5, 1.0),
        ];
        let taken = store.put_scores(&put).unwrap();
        assert_eq!(
            taken,
            [
                Ok(CommitOutcome::New),
                Ok(CommitOutcome::New),
                Ok(CommitOutcome::Duplicate)
            ]
        );
        assert_eq!(
            store.put_scores(&put[..1]).unwrap(),
            [Ok(CommitOutcome::Duplicate)]
        );
        assert_eq!(store.scores(&id(0)).unwrap(), [score(0, "thumbs", 5, 1.0)]);
        assert_eq!(store.scores(&id(1)).unwrap(), [none]);
        assert_eq!(store.scores(&id(9)).unwrap(), []);
        assert_eq!(store.put_scores(&[]).unwrap(), []);
    });
}

#[test]
fn scores_are_read_in_the_order_in_which_they_came() {
    on_each(|store| {
        store.commit_batch(&[trace(0, 5), trace(1, 5)]).unwrap();
        let all: Vec<_> = (0..7)
            .map(|n| score(n % 2, "a", 100 - n, n as f64))
            .collect();
        for pair in all.chunks(2) {
            store.put_scores(pair).unwrap();
        }
        let (mut seen, mut at) = (Vec::new(), Cursor::default());
        loop {
            let page = store.scores_after(at, 3).unwrap();
            if page.scores.is_empty() {
                assert_eq!(page.end, at);
                break;
            }
            assert!(page.scores.len() <= 3);
            seen.extend(page.scores);
            at = page.end;
        }
        assert_eq!(seen, all);
    });
}

#[test]
fn one_bad_score_does_not_hold_the_others_back() {
    on_each(|store| {
        store.commit_batch(&[trace(0, 5), trace(1, 5)]).unwrap();
        let all = GcPolicy {
            before_update: 0,
            keep_untrained: false,
        };
        store.gc(all).unwrap();
        store.commit(&trace(2, 5)).unwrap();
        let named = |name: &str, source: &str| ScoreRecord {
            source: source.into(),
            ..score(2, name, 1, 1.0)
        };
        let reason = ScoreRecord {
            score: Score::Unscored("x".repeat(2_000)),
            ..score(2, "a", 1, 0.0)
        };
        let taken = store
            .put_scores(&[
                score(7, "a", 1, 1.0),
                score(0, "a", 1, 1.0),
                score(2, "a", 1, f64::NAN),
                named("", "s"),
                named("a\n", "s"),
                named("a", &"s".repeat(200)),
                score(2, "a", u64::MAX, 1.0),
                reason,
                score(2, "a", 1, -0.0),
            ])
            .unwrap();
        let fields: Vec<String> = taken
            .iter()
            .map(|t| match t {
                Ok(c) => format!("{c:?}"),
                Err(ScoreRefused::Field { field, .. }) => (*field).to_owned(),
                Err(ScoreRefused::UnknownEpisode { .. }) => "unknown".into(),
                Err(ScoreRefused::Collected { .. }) => "collected".into(),
                Err(ScoreRefused::TooMany { .. }) => "too many".into(),
            })
            .collect();
        assert_eq!(
            fields,
            [
                "unknown",
                "collected",
                "value",
                "name",
                "name",
                "source",
                "at",
                "reason",
                "New"
            ]
        );
        let kept = store.scores(&id(2)).unwrap();
        let [
            ScoreRecord {
                score: Score::Value(value),
                ..
            },
        ] = kept.as_slice()
        else {
            panic!("{kept:?}");
        };
        assert!(value.is_sign_positive());
    });
}

#[test]
fn an_episode_and_a_call_have_limits() {
    on_each(|store| {
        store.commit_batch(&[trace(0, 5), trace(1, 5)]).unwrap();
        let many: Vec<_> = (0..=MAX_SCORES as u64)
            .map(|n| score(0, "a", n, 1.0))
            .collect();
        let taken = store.put_scores(&many).unwrap();
        assert!(
            taken[..MAX_SCORES]
                .iter()
                .all(|t| *t == Ok(CommitOutcome::New))
        );
        let refused = ScoreRefused::TooMany { episode: id(0) };
        assert_eq!(taken[MAX_SCORES], Err(refused));
        assert_eq!(
            store.put_scores(&many[..1]).unwrap(),
            [Ok(CommitOutcome::Duplicate)]
        );
        assert_eq!(
            store.put_scores(&[score(1, "a", 1, 1.0)]).unwrap(),
            [Ok(CommitOutcome::New)]
        );
        let flood = vec![score(1, "a", 1, 1.0); MAX_SCORE_BATCH + 1];
        let refused = store.put_scores(&flood);
        assert!(matches!(refused, Err(StoreError::Argument { .. })));
    });
}

#[test]
fn scores_go_with_their_episode() {
    on_each(|store| {
        store.commit_batch(&[trace(0, 40), trace(1, 40)]).unwrap();
        store
            .put_scores(&[score(0, "a", 1, 1.0), score(1, "a", 1, 2.0)])
            .unwrap();
        let update = sinew_store::TrainedBatch::new("b", 1, &[id(0)]);
        store.commit_update(&update, false).unwrap();
        let policy = GcPolicy {
            before_update: 2,
            keep_untrained: true,
        };
        store.gc(policy).unwrap();
        assert_eq!(store.scores(&id(0)).unwrap(), []);
        assert_eq!(store.scores(&id(1)).unwrap(), [score(1, "a", 1, 2.0)]);
    });
}

#[test]
fn an_episode_is_found_by_its_name_outside() {
    on_each(|store| {
        let named = |n: u64, name: &str| {
            let mut t = trace(n, 5);
            t.origin.external = Some(name.into());
            t
        };
        let traces = [
            named(0, "ticket 7"),
            named(1, "ticket 8"),
            named(2, "ticket 7"),
        ];
        store.commit_batch(&traces).unwrap();
        assert_eq!(store.named("ticket 7", 10).unwrap(), [id(0), id(2)]);
        assert_eq!(store.named("ticket 7", 1).unwrap(), [id(0)]);
        assert_eq!(store.named("ticket 8", 10).unwrap(), [id(1)]);
        assert_eq!(store.named("ticket 9", 10).unwrap(), []);
        assert_eq!(store.get(&id(0)).unwrap(), Some(named(0, "ticket 7")));
    });
}

fn rule(own: Option<f64>, terms: &[(&str, f64, Option<&str>)]) -> ScoreRule {
    let term = |&(name, weight, source): &(&str, f64, Option<&str>)| ScoreTerm {
        name: name.into(),
        weight,
        source: source.map(str::to_owned),
    };
    ScoreRule {
        own,
        terms: terms.iter().map(term).collect(),
    }
}

#[test]
fn a_missing_score_is_never_zero() {
    let t = trace(3, 5);
    let late = rule(Some(0.5), &[("thumbs", 2.0, None), ("length", 0.0, None)]);
    let outcome = late.outcome(&t, &[]);
    assert!(outcome.unscored);
    assert_eq!(
        outcome.unscored_reason.as_deref(),
        Some("reward thumbs: not given")
    );
    assert_eq!(late.awaited(&[]), ["thumbs"]);
    let none = ScoreRecord {
        score: Score::Unscored("left the page".into()),
        ..score(3, "thumbs", 1, 0.0)
    };
    let outcome = late.outcome(&t, std::slice::from_ref(&none));
    assert_eq!(
        outcome.unscored_reason.as_deref(),
        Some("reward thumbs: left the page")
    );
    assert!(late.awaited(std::slice::from_ref(&none)).is_empty());
    // A later score takes its place, and an older one does not.
    let records = [
        score(3, "thumbs", 0, -9.0),
        score(3, "thumbs", 2, 0.25),
        none,
    ];
    let outcome = late.outcome(&t, &records);
    assert_eq!((outcome.unscored, outcome.reward), (false, 1.0));
    assert_eq!(outcome.metrics["reward/thumbs"], 0.25);
    assert_eq!(late.outcome(&t, &records), outcome, "a pure function");
}

#[test]
fn an_own_reward_that_is_missing_is_not_made_up_for() {
    let mut t = trace(3, 5);
    t.outcome.unscored = true;
    t.outcome.unscored_reason = Some("timeout".into());
    let records = [score(3, "thumbs", 1, 1.0)];
    let outcome = rule(Some(1.0), &[("thumbs", 1.0, None)]).outcome(&t, &records);
    assert_eq!(outcome.unscored_reason.as_deref(), Some("timeout"));
    let outcome = rule(None, &[("thumbs", 1.0, None)]).outcome(&t, &records);
    assert_eq!(
        (outcome.unscored, outcome.reward, outcome.success),
        (false, 1.0, true)
    );
    let other = rule(None, &[("thumbs", 1.0, Some("person"))]);
    assert!(other.outcome(&t, &records).unscored, "of another source");
}

fn any_score() -> impl Strategy<Value = ScoreRecord> {
    let value = prop_oneof![
        3 => (-2i32..3).prop_map(|v| Score::Value(f64::from(v))),
        1 => Just(Score::Unscored("none".to_owned())),
    ];
    (0usize..2, 0usize..2, 0u64..4, value).prop_map(|(name, source, at_us, score)| ScoreRecord {
        episode: id(1),
        name: ["a", "b"][name].into(),
        source: ["api", "import"][source].into(),
        at_us,
        score,
    })
}

proptest! {
    /// The state follows from the set of records: their order and repetitions do not matter.
    #[test]
    fn the_order_in_which_scores_come_says_nothing(
        (records, mixed) in prop::collection::vec(any_score(), 0..12).prop_flat_map(|records| {
            let twice: Vec<_> = records.iter().chain(&records).cloned().collect();
            (Just(records), Just(twice).prop_shuffle())
        })
    ) {
        prop_assert_eq!(in_force(&records), in_force(&mixed));
        let rule = rule(Some(1.0), &[("a", 1.0, None), ("b", 0.5, Some("api"))]);
        let outcome = |records: &[ScoreRecord]| rule.outcome(&trace(1, 3), records);
        prop_assert_eq!(outcome(&records), outcome(&mixed));
        let newest = |name: &str, source: &str| {
            let of = records.iter().filter(|r| r.name == name && r.source == source);
            of.map(|r| r.at_us).max()
        };
        for ((name, source), record) in in_force(&records) {
            prop_assert_eq!(Some(record.at_us), newest(name, source));
        }
    }
}
