//! Checks the choice of ready rows for a holder.

use super::{keys, on_each, row, trainer};
use sinew_store::queue::{NewRow, Order, QueueLimits, RowSelection, Sample};

fn with(key: &str, group: &str, tokens: u64, version: u64) -> NewRow {
    NewRow {
        group: group.into(),
        group_size: if group.is_empty() { 1 } else { 2 },
        tokens,
        version,
        ..row(key, 10)
    }
}

#[test]
fn higher_priorities_come_first_then_age_or_freshness() {
    on_each(QueueLimits::default(), |s| {
        s.queue.join(&trainer()).unwrap();
        let urgent = NewRow {
            priority: 1,
            ..with("d", "", 1, 0)
        };
        let rows = [
            with("a", "", 1, 5),
            with("b", "", 1, 7),
            with("c", "", 1, 2),
            urgent,
        ];
        s.queue.put(&rows).unwrap();
        let look = |sample: Sample| {
            let loan = s.lease("trainer", RowSelection::Sample(sample), 10, 0);
            let lease = loan.lease.unwrap();
            s.queue.release("trainer", lease, &keys(&loan)).unwrap();
            keys(&loan)
        };
        let all = Sample::rows(9);
        assert_eq!(look(all.clone()), ["d", "a", "b", "c"]);
        let order = Order::Freshest;
        assert_eq!(
            look(Sample {
                order,
                ..all.clone()
            }),
            ["d", "b", "a", "c"]
        );
        let from_version = 5;
        assert_eq!(
            look(Sample {
                order,
                from_version,
                ..all.clone()
            }),
            ["b", "a"]
        );
        assert_eq!(look(Sample { bytes: 25, ..all }), ["d", "a"]);
    });
}

#[test]
fn groups_are_given_whole_or_not_at_all() {
    on_each(QueueLimits::default(), |s| {
        s.queue.join(&trainer()).unwrap();
        s.queue
            .put(&[
                with("a1", "a", 1, 9),
                with("b1", "b", 1, 9),
                with("c", "", 1, 9),
            ])
            .unwrap();
        let whole = |rows| Sample {
            whole_groups: true,
            ..Sample::rows(rows)
        };
        let take = |sample| s.lease("trainer", RowSelection::Sample(sample), 10, 0);
        let loan = take(whole(9));
        assert_eq!(keys(&loan), ["c"]);
        s.queue
            .put(&[with("b2", "b", 1, 3), with("a2", "a", 1, 9)])
            .unwrap();
        assert!(take(whole(1)).rows.is_empty(), "a group has two");
        let fresh = Sample {
            from_version: 4,
            ..whole(9)
        };
        let loan = take(fresh);
        assert_eq!(keys(&loan), ["a1", "a2"], "half of b is too old");
        // The rest of a group that was given out earlier still counts as whole.
        let lease = loan.lease.unwrap();
        s.queue
            .ack("trainer", lease, &[sinew_store::queue::AckedRow::of("a1")])
            .unwrap();
        s.queue.release("trainer", lease, &["a2".into()]).unwrap();
        assert_eq!(keys(&take(whole(9))), ["b1", "b2", "a2"]);
        // The name begins another group, which waits for its second row.
        s.queue.put(&[with("a3", "a", 1, 9)]).unwrap();
        assert!(take(whole(9)).rows.is_empty());
    });
}

#[test]
fn budgets_bound_what_is_given_and_parts_have_equal_lengths() {
    on_each(QueueLimits::default(), |s| {
        s.queue.join(&trainer()).unwrap();
        let lengths = [900, 100, 500, 400, 300, 200, 700, 100];
        let named = lengths.iter().enumerate();
        let rows: Vec<_> = named
            .map(|(n, &t)| with(&format!("r{n}"), "", t, 0))
            .collect();
        s.queue.put(&rows).unwrap();
        let take = |sample| s.lease("trainer", RowSelection::Sample(sample), 10, 0);
        let first = take(Sample {
            tokens: 50,
            ..Sample::rows(9)
        });
        assert_eq!(keys(&first), ["r0"], "one row, though it is longer");
        let loan = take(Sample {
            tokens: 2_300,
            parts: 3,
            ..Sample::rows(9)
        });
        assert_eq!(loan.rows.len(), 7);
        let of = |part| {
            loan.rows
                .iter()
                .filter(move |r| r.part == part)
                .map(|r| r.tokens)
        };
        let sums: Vec<u64> = (0..3).map(|part| of(part).sum()).collect();
        assert_eq!(sums.iter().sum::<u64>(), 2_300);
        assert!(sums.iter().all(|s| (700..=800).contains(s)), "{sums:?}");
        let parts: Vec<_> = loan.rows.iter().map(|r| r.part).collect();
        assert!(parts.is_sorted());
    });
}
