//! Checks the behaviour that all stores share.

use crate::support::{id, on_each, trace};
use sinew_store::{
    CommitOutcome, EndKind, Filter, GcPolicy, MAX_PAGE, StoreError, TrainedBatch, summaries,
};
use sinew_types::{
    AdapterName, Component, Media, MediaSource, Part, Provenance, RouteSpan, SamplingParams,
};

#[test]
fn a_committed_trace_comes_back_equal() {
    on_each(|store| {
        for n in 0..5 {
            assert_eq!(store.commit(&trace(n, 50)).unwrap(), CommitOutcome::New);
        }
        for n in 0..5 {
            assert_eq!(store.get(&id(n)).unwrap(), Some(trace(n, 50)));
        }
        assert_eq!(store.get(&id(9)).unwrap(), None);
    });
}

#[test]
fn experts_survive() {
    on_each(|store| {
        let mut routed = trace(1, 50);
        routed.nodes[1].routes = vec![RouteSpan {
            start: 0,
            layers: 2,
            top_k: 3,
            wide: false,
            experts: (0..52 * 6).map(|n| (n % 251) as u8).collect(),
        }];
        store.commit(&routed).unwrap();
        assert_eq!(store.get(&id(1)).unwrap(), Some(routed));
    });
}

#[test]
fn measurements_that_are_no_numbers_survive() {
    on_each(|store| {
        let mut t = trace(0, 1);
        t.outcome.metrics.insert("ratio".into(), f64::NAN);
        t.timing.total_s = f64::NAN;
        store.commit(&t).unwrap();
        let back = store.get(&id(0)).unwrap().unwrap();
        assert!(back.outcome.metrics["ratio"].is_nan());
        let page = store.list(&Filter::default()).unwrap();
        assert!(page.episodes[0].total_s.is_nan());
    });
}

#[test]
fn committing_again_keeps_the_first() {
    on_each(|store| {
        store.commit(&trace(0, 5)).unwrap();
        assert_eq!(
            store.commit(&trace(0, 9)).unwrap(),
            CommitOutcome::Duplicate
        );
        assert_eq!(store.get(&id(0)).unwrap(), Some(trace(0, 5)));
        let batch = [trace(1, 5), trace(0, 5), trace(1, 6)];
        assert_eq!(
            store.commit_batch(&batch).unwrap(),
            [
                CommitOutcome::New,
                CommitOutcome::Duplicate,
                CommitOutcome::Duplicate
            ]
        );
        assert_eq!(store.get(&id(1)).unwrap(), Some(trace(1, 5)));
        assert_eq!(store.stats().unwrap().episodes, 2);
        assert_eq!(store.commit_batch(&[]).unwrap(), []);
    });
}

#[test]
fn a_batch_with_an_invalid_trace_leaves_nothing() {
    on_each(|store| {
        let mut bad = trace(1, 5);
        bad.nodes[1].logprobs[2] = f32::NAN;
        let refused = store.commit_batch(&[trace(0, 5), bad]);
        assert!(matches!(refused, Err(StoreError::Invalid(_))));
        let mut late = trace(2, 5);
        late.origin.draw = u64::MAX;
        let refused = store.commit_batch(&[trace(0, 5), late]);
        assert!(matches!(refused, Err(StoreError::Argument { .. })));
        assert_eq!(store.stats().unwrap().episodes, 0);
        assert_eq!(store.get(&id(0)).unwrap(), None);
    });
}

#[test]
fn listings_filter_in_commit_order() {
    on_each(|store| {
        let traces: Vec<_> = (0..40).map(|n| trace(n, 3)).collect();
        store.commit_batch(&traces).unwrap();
        store
            .commit_update(&TrainedBatch::new("b", 1, &[id(11), id(12)]), false)
            .unwrap();
        let ids = |filter: Filter| {
            let page = store.list(&filter).unwrap();
            let ids = page.episodes.into_iter().map(|e| e.episode);
            (ids.collect::<Vec<_>>(), page.next)
        };
        let expect = |keep: fn(u64) -> bool| (0..40).filter(|n| keep(*n)).map(id).collect();
        let all: Vec<_> = expect(|_| true);
        assert_eq!(ids(Filter::default()), (all, None));
        let filter = Filter {
            draws: Some(1..=2),
            success: Some(true),
            ..Filter::default()
        };
        assert_eq!(ids(filter).0, expect(|n| n / 10 % 3 != 0 && n % 2 == 1));
        let filter = Filter {
            updates: Some(1..=1),
            ..Filter::default()
        };
        assert_eq!(ids(filter).0, expect(|n| n == 11 || n == 12));
        let filter = Filter {
            updates: Some(2..=9),
            ..Filter::default()
        };
        assert!(ids(filter).0.is_empty());
        let filter = Filter {
            among: Some([id(3), id(12), trace(99, 0).episode].into()),
            ..Filter::default()
        };
        assert_eq!(ids(filter).0, [id(3), id(12)]);
        let filter = Filter {
            among: Some([].into()),
            ..Filter::default()
        };
        assert!(ids(filter).0.is_empty());
        let filter = Filter {
            purpose: Some("eval".into()),
            ..Filter::default()
        };
        assert_eq!(ids(filter).0, expect(|n| n % 7 == 6));
        let filter = Filter {
            trained: Some(true),
            ..Filter::default()
        };
        assert_eq!(ids(filter).0, [id(11), id(12)]);
        let filter = Filter {
            end: Some(EndKind::Failed),
            ..Filter::default()
        };
        assert_eq!(ids(filter).0, expect(|n| n % 5 == 4));
        let filter = Filter {
            reward: Some(1.0..=2.0),
            ..Filter::default()
        };
        assert_eq!(ids(filter).0, expect(|n| (3..=6).contains(&n)));
        let filter = Filter {
            group: Some(trace(8, 0).group),
            ..Filter::default()
        };
        assert_eq!(ids(filter).0, [id(8), id(9)]);
    });
}

#[test]
fn listings_filter_by_type_environment_outcome_versions_and_turns() {
    on_each(|store| {
        let mut traces: Vec<_> = (0..20).map(|n| trace(n, 3)).collect();
        for (n, trace) in traces.iter_mut().enumerate() {
            trace.task_kind = ["code", "math"][n % 2].into();
            trace.nodes[1].turn = n as u32 % 4;
        }
        traces[8].outcome.unscored = true;
        store.commit_batch(&traces).unwrap();
        let ids = |filter: Filter| {
            let page = store.list(&filter).unwrap();
            page.episodes
                .into_iter()
                .map(|e| e.episode)
                .collect::<Vec<_>>()
        };
        let expect =
            |keep: fn(u64) -> bool| (0..20).filter(|n| keep(*n)).map(id).collect::<Vec<_>>();
        let code = Filter {
            task_kind: Some("code".into()),
            ..Filter::default()
        };
        assert_eq!(ids(code.clone()), expect(|n| n % 2 == 0));
        let failed = Filter {
            failed: true,
            ..Filter::default()
        };
        assert_eq!(
            ids(failed),
            expect(|n| (n % 2 == 0 && n != 8) || n % 5 == 4)
        );
        let env = Filter {
            env: Some("math".into()),
            at_turn: Some(3),
            ..Filter::default()
        };
        assert_eq!(ids(env), expect(|n| n % 4 == 3));
        let versions = Filter {
            versions: Some(3..=6),
            turns: Some(1..=1),
            ..code
        };
        assert_eq!(ids(versions), [id(4), id(6)]);
        let none = Filter {
            turns: Some(2..=9),
            ..Filter::default()
        };
        assert!(ids(none).is_empty());
    });
}

#[test]
fn listings_page_in_commit_order() {
    on_each(|store| {
        let traces: Vec<_> = (0..40).map(|n| trace(n, 3)).collect();
        store.commit_batch(&traces).unwrap();
        let ids = |filter: Filter| {
            let page = store.list(&filter).unwrap();
            let ids = page.episodes.into_iter().map(|e| e.episode);
            (ids.collect::<Vec<_>>(), page.next)
        };
        let mut seen = Vec::new();
        let mut filter = Filter {
            limit: 7,
            ..Filter::default()
        };
        loop {
            let (page, next) = ids(filter.clone());
            assert!(page.len() <= 7);
            seen.extend(page);
            let Some(next) = next else { break };
            filter.after = Some(next);
        }
        assert_eq!(seen, (0..40).map(id).collect::<Vec<_>>());
        filter.after = None;
        let all = summaries(store, filter).map(|e| e.unwrap().episode);
        assert_eq!(all.collect::<Vec<_>>(), seen);
        let greedy = Filter {
            limit: MAX_PAGE + 1,
            ..Filter::default()
        };
        assert!(matches!(
            store.list(&greedy),
            Err(StoreError::Argument { .. })
        ));
        let refused: Vec<_> = summaries(store, greedy).collect();
        assert!(matches!(refused[..], [Err(StoreError::Argument { .. })]));
    });
}

#[test]
fn summaries_say_what_the_trace_says() {
    on_each(|store| {
        store.commit(&trace(3, 8)).unwrap();
        let page = store.list(&Filter::default()).unwrap();
        let s = &page.episodes[0];
        assert_eq!((s.draw, s.turns, s.sampled_tokens), (0, 1, 8));
        assert_eq!((s.reward, s.success), (1.0, true));
        assert_eq!(s.started_unix_s, 1.7e9 + 3.0);
        assert_eq!(s.trained_in, None);
    });
}

#[test]
fn an_episode_is_trained_in_one_batch() {
    on_each(|store| {
        store
            .commit_batch(&[trace(0, 3), trace(1, 3), trace(2, 3)])
            .unwrap();
        let mark = |batch: &str, step, ids: &[_]| {
            store.commit_update(&TrainedBatch::new(batch, step, ids), false)
        };
        assert_eq!(mark("b1", 1, &[id(0), id(1)]).unwrap(), CommitOutcome::New);
        assert_eq!(
            mark("b1", 1, &[id(0), id(1)]).unwrap(),
            CommitOutcome::Duplicate
        );
        for (step, ids) in [(2, vec![id(0), id(1)]), (1, vec![id(0)])] {
            let refused = mark("b1", step, &ids);
            assert!(matches!(refused, Err(StoreError::BatchConflict { .. })));
        }
        let refused = mark("b2", 2, &[id(2), id(1)]).unwrap_err();
        assert!(
            matches!(refused, StoreError::TrainedTwice { ref trained_in, .. }
            if trained_in == "b1")
        );
        let refused = mark("b3", 2, &[id(2), id(2)]);
        assert!(matches!(refused, Err(StoreError::TrainedTwice { .. })));
        let refused = mark("b4", 2, &[id(2), id(7)]);
        assert!(matches!(refused, Err(StoreError::UnknownEpisode { .. })));
        assert_eq!(mark("b2", 2, &[id(2)]).unwrap(), CommitOutcome::New);
        let batches = store.trained_batches().unwrap();
        assert_eq!(batches.len(), 2);
        assert_eq!((batches[1].batch.as_str(), batches[1].step), ("b2", 2));
        assert_eq!(batches[0].episodes, [id(0), id(1)]);
        let stats = store.stats().unwrap();
        assert_eq!((stats.trained, stats.batches), (3, 2));
    });
}

#[test]
fn gc_removes_traces_and_remembers_ids() {
    on_each(|store| {
        for n in 0..30 {
            store.commit(&trace(n, 40)).unwrap();
        }
        for (batch, update, range) in [("b", 1, 5..20), ("b2", 2, 20..25)] {
            let trained: Vec<_> = range.map(id).collect();
            let update = TrainedBatch::new(batch, update, &trained);
            store.commit_update(&update, false).unwrap();
        }
        let before = store.stats().unwrap();
        let policy = GcPolicy {
            before_update: 2,
            keep_untrained: true,
        };
        let report = store.gc(policy).unwrap();
        assert_eq!(report.episodes, 15);
        let after = store.stats().unwrap();
        assert_eq!(
            (after.episodes, after.collected, after.trained),
            (15, 15, 20)
        );
        assert!(report.bytes > 0 && after.bytes < before.bytes);
        for n in 0..30 {
            let kept = !(5..20).contains(&n);
            let expected = kept.then(|| trace(n, 40));
            assert_eq!(store.get(&id(n)).unwrap(), expected, "{n}");
        }
        assert_eq!(
            store.commit(&trace(10, 40)).unwrap(),
            CommitOutcome::Duplicate
        );
        let again = store.commit_update(&TrainedBatch::new("c", 2, &[id(10)]), false);
        assert!(matches!(again, Err(StoreError::TrainedTwice { .. })));
        assert_eq!(store.gc(policy).unwrap().episodes, 0);
        let all = GcPolicy {
            before_update: u64::MAX,
            keep_untrained: false,
        };
        assert_eq!(store.gc(all).unwrap().episodes, 15);
        assert_eq!(store.commit(&trace(50, 4)).unwrap(), CommitOutcome::New);
        assert_eq!(store.get(&id(50)).unwrap(), Some(trace(50, 4)));
        assert_eq!(store.trained_batches().unwrap().len(), 2);
    });
}

#[test]
fn many_threads_commit_each_episode_once() {
    on_each(|store| {
        let new: usize = std::thread::scope(|scope| {
            let commit = |t: u64| {
                let range = (0..12).map(move |i| trace((i + t * 3) % 12, 10));
                let committed = range.map(|t| store.commit(&t).unwrap());
                committed.filter(|c| *c == CommitOutcome::New).count()
            };
            let threads: Vec<_> = (0..4).map(|t| scope.spawn(move || commit(t))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!(new, 12);
        assert_eq!(store.stats().unwrap().episodes, 12);
    });
}

#[test]
fn parts_and_provenance_survive() {
    on_each(|store| {
        let mut rich = trace(1, 5);
        rich.origin.run = "quickstart".into();
        rich.provenance = Provenance {
            template: [("enable_thinking".to_owned(), false.into())].into(),
            task_seed: Some(u64::MAX),
            seed: Some(7),
            environment: Some(Component {
                name: "tool_math".into(),
                version: "1".into(),
            }),
            sampling: Some((&SamplingParams::default()).into()),
            chat_template: Some("ab".repeat(32)),
            tools: [("python".to_owned(), "1".to_owned())].into(),
            kernels: Some("avx512".into()),
            logprobs_unknown: true,
            adapter: Some(AdapterName::new("math:1").unwrap()),
            sandbox: Some("process".into()),
        };
        let content = &mut rich.nodes[0].messages[0].content;
        content.push(Part::Image(Media {
            source: MediaSource::Blake3("cd".repeat(32)),
            media_type: Some("image/png".into()),
        }));
        content.push_text("what is this?");
        store.commit(&rich).unwrap();
        assert_eq!(store.get(&id(1)).unwrap(), Some(rich));
    });
}

#[test]
fn an_episode_without_a_score_is_neither_a_failure_nor_a_reward_of_0() {
    on_each(|store| {
        let mut unscored = trace(0, 3);
        unscored.outcome.unscored = true;
        (unscored.outcome.reward, unscored.outcome.success) = (0.0, true);
        store.commit_batch(&[unscored, trace(2, 3)]).unwrap();
        let listed = |filter: Filter| store.list(&filter).unwrap().episodes;
        let all = listed(Filter::default());
        let marks: Vec<_> = all.iter().map(|e| (e.unscored, e.success)).collect();
        assert_eq!(marks, [(true, false), (false, false)]);
        for filter in [
            Filter {
                success: Some(false),
                ..Filter::default()
            },
            Filter {
                reward: Some(f64::NEG_INFINITY..=f64::INFINITY),
                ..Filter::default()
            },
        ] {
            let found = listed(filter);
            assert_eq!(found.len(), 1);
            assert!(!found[0].unscored);
        }
        assert_eq!(store.stats().unwrap().successes, 0);
    });
}
