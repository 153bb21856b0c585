//! Finding and removing equal episodes, old ones, and those of other environments.

use crate::support::{id, on_each, score, trace};
use sinew_store::{CommitOutcome, Filter, TraceStore};
use sinew_types::{Component, PolicyVersion, Trace, VersionSpan};
use std::collections::BTreeMap;

/// Episode `n` with the content of episode `content`.
fn saying(n: u64, content: u64) -> Trace {
    let mut says = trace(content, 20);
    let own = trace(n, 20);
    says.episode = own.episode;
    says.group = own.group;
    says.origin = own.origin;
    says.outcome = own.outcome;
    says
}

fn listed(store: &dyn TraceStore, filter: &Filter) -> Vec<String> {
    let mut filter = filter.clone();
    let mut all = Vec::new();
    loop {
        let page = store.list(&filter).unwrap();
        assert!(page.episodes.len() <= filter.limit.max(1) || filter.limit == 0);
        all.extend(page.episodes.into_iter().map(|e| e.episode.0));
        match page.next {
            Some(next) => filter.after = Some(next),
            None => return all,
        }
    }
}

#[test]
fn of_equal_contents_the_first_that_fits_is_listed() {
    on_each(|store| {
        for (n, content) in [
            (0, 2),
            (1, 4),
            (2, 2),
            (3, 2),
            (4, 6),
            (5, 4),
            (6, 8),
            (7, 2),
        ] {
            store.commit(&saying(n, content)).unwrap();
        }
        for limit in [0, 1, 2, 3] {
            let unique = Filter {
                unique: true,
                limit,
                ..Filter::default()
            };
            assert_eq!(listed(store, &unique), ["e0", "e1", "e4", "e6"], "{limit}");
            // `unique` applies among the matching ones: odd ones succeed.
            let successes = Filter {
                success: Some(true),
                ..unique
            };
            assert_eq!(listed(store, &successes), ["e1", "e3"], "{limit}");
        }
    });
}

#[test]
fn log_probs_rewards_and_versions_are_no_content_but_tokens_and_messages_are() {
    on_each(|store| {
        let unique = || {
            listed(
                store,
                &Filter {
                    unique: true,
                    ..Filter::default()
                },
            )
            .len()
        };
        let mut n = 0;
        let mut commit = |change: &dyn Fn(&mut Trace)| {
            let mut changed = saying(n, 1);
            change(&mut changed);
            n += 1;
            store.commit(&changed).unwrap();
        };
        commit(&|_| {});
        commit(&|t| t.nodes[1].logprobs[3] = -9.0);
        commit(&|t| t.nodes[1].versions[0].version = PolicyVersion(99));
        commit(&|t| t.timing.total_s = 77.0);
        assert_eq!(unique(), 1);
        commit(&|t| t.nodes[1].tokens[3] += 1);
        assert_eq!(unique(), 2);
        commit(&|t| t.task.0 += "'");
        assert_eq!(unique(), 3);
        commit(&|t| t.nodes[0].kind = sinew_types::TokenKind::Observation);
        assert_eq!(unique(), 4);
        // Messages are compared where there are no tokens.
        commit(&|t| t.nodes[0].tokens.clear());
        commit(&|t| {
            t.nodes[0].tokens.clear();
            t.nodes[0].messages[0].content = "other".to_owned().into();
        });
        assert_eq!(unique(), 6);
    });
}

/// Episode `n`, sampled by two versions, in version `env` of the environment `shop`.
fn made(n: u64, versions: (u64, u64), env: Option<&str>) -> Trace {
    let mut made = trace(n, 4);
    let span = |start, version| VersionSpan {
        start,
        len: 2,
        version: PolicyVersion(version),
    };
    made.nodes[1].versions = vec![span(0, versions.0), span(2, versions.1)];
    made.provenance.environment = env.map(|version| Component {
        name: "shop".into(),
        version: version.into(),
    });
    made
}

#[test]
fn age_versions_and_changed_environments_are_found() {
    on_each(|store| {
        store.commit(&made(0, (1, 2), Some("1"))).unwrap();
        store.commit(&made(1, (2, 5), Some("2"))).unwrap();
        store.commit(&made(2, (3, 3), None)).unwrap();
        store.commit(&trace(3, 0)).unwrap();
        let found = |filter: Filter| listed(store, &filter);
        let before = |time: f64| Filter {
            ended_before: Some(time),
            ..Filter::default()
        };
        assert_eq!(found(before(1.7e9)), [""; 0]);
        assert_eq!(found(before(1.7e9 + 1.5)), ["e0", "e1"]);
        let below = |version: u64| Filter {
            below_version: Some(version),
            ..Filter::default()
        };
        assert_eq!(found(below(2)), [""; 0]);
        assert_eq!(found(below(3)), ["e0"]);
        assert_eq!(found(below(9)), ["e0", "e1", "e2"]);
        let changed = |now: &[(&str, &str)]| {
            let pairs = now.iter().map(|(env, v)| ((*env).into(), (*v).into()));
            Filter {
                env_changed: Some(pairs.collect::<BTreeMap<String, String>>()),
                ..Filter::default()
            }
        };
        assert_eq!(found(changed(&[("shop", "2")])), ["e0"]);
        assert_eq!(
            found(changed(&[("shop", "3"), ("kind", "1")])),
            ["e0", "e1"]
        );
        assert_eq!(found(changed(&[("other", "2")])), [""; 0]);
        assert_eq!(found(changed(&[])), [""; 0]);
    });
}

#[test]
fn what_is_removed_stays_known_and_is_listed_where_it_is_asked_for() {
    on_each(|store| {
        for n in 0..6 {
            store.commit(&trace(n, 30)).unwrap();
        }
        let scores = store.put_scores(&[score(2, "thumbs", 1, 1.0)]).unwrap();
        assert_eq!(scores, [Ok(CommitOutcome::New)]);
        let before = store.stats().unwrap();
        let report = store.remove(&[id(2), id(4), id(77), id(2)]).unwrap();
        assert_eq!(report.episodes, 2);
        assert!(report.bytes > 0);
        let after = store.stats().unwrap();
        assert_eq!((after.episodes, after.collected), (4, 2));
        assert!(after.bytes < before.bytes);
        assert_eq!(store.get(&id(2)).unwrap(), None);
        assert_eq!(store.scores(&id(2)).unwrap(), []);
        assert_eq!(
            store.commit(&trace(2, 30)).unwrap(),
            CommitOutcome::Duplicate
        );
        assert_eq!(listed(store, &Filter::default()), ["e0", "e1", "e3", "e5"]);
        let all = Filter {
            removed: true,
            limit: 2,
            ..Filter::default()
        };
        assert_eq!(listed(store, &all), ["e0", "e1", "e2", "e3", "e4", "e5"]);
        let page = store.list(&Filter { limit: 0, ..all }).unwrap().episodes;
        assert_eq!((page[2].reward, page[2].success), (2.0 / 3.0, false));
        assert_eq!(store.remove(&[id(2)]).unwrap().episodes, 0);
    });
}
