//! Checks the behaviour that all queues share.

use super::{LIMITS, NO_LEASE, consumer, keys, on_each, refusal, row, trainer};
use sinew_store::queue::{
    AckedRow, Field, MAX_CONSUMERS, NewRow, PutOutcome, QueueError, QueueLimits, RowSelection,
    RowState, Sample, field, fields, put_within,
};
use std::time::Duration;

fn names(keys: &[&str]) -> Vec<String> {
    keys.iter().map(|k| (*k).to_owned()).collect()
}

#[test]
fn rows_go_to_one_holder_and_leave_when_acked() {
    on_each(LIMITS, |s| {
        s.queue.join(&trainer()).unwrap();
        let put = s
            .queue
            .put(&[row("a", 3), row("b", 3), row("a", 9)])
            .unwrap();
        assert_eq!(
            put,
            [PutOutcome::New, PutOutcome::New, PutOutcome::Duplicate]
        );
        let first = s.rows("trainer", 1, 0);
        assert_eq!(keys(&first), ["a"]);
        assert_eq!(field(&first.rows[0].fields, fields::TRACE).unwrap(), "aaa");
        let second = s.rows("trainer", 9, 0);
        assert_eq!(keys(&second), ["b"]);
        assert_eq!(s.rows("trainer", 9, 0).lease, None);
        assert_eq!((s.ack("trainer", &first), s.ack("trainer", &first)), (1, 0));
        s.restart();
        assert_eq!(
            s.queue.put(&[row("a", 3)]).unwrap(),
            [PutOutcome::Duplicate]
        );
        assert_eq!(s.queue.read("a", fields::TRACE).unwrap(), None);
        assert_eq!(
            s.queue.state("trainer", "a").unwrap(),
            Some(RowState::Acked)
        );
        let stats = s.queue.stats().unwrap();
        assert_eq!((stats.rows, stats.done, stats.bytes), (1, 1, 3));
        assert_eq!(stats.of("trainer").leased, 1);
        // A restarted queue still knows the lease.
        assert_eq!(s.ack("trainer", &second), 1);
        assert_eq!(s.queue.stats().unwrap().rows, 0);
    });
}

#[test]
fn a_lease_runs_out_and_a_late_ack_counts_until_redelivery() {
    on_each(LIMITS, |s| {
        s.queue.join(&trainer()).unwrap();
        s.queue.put(&[row("a", 1), row("b", 1)]).unwrap();
        let first = s.rows("trainer", 2, 0);
        assert!(s.rows("trainer", 2, 9).rows.is_empty());
        let again = s.rows("trainer", 1, 10);
        assert_eq!((keys(&again)[0].as_str(), again.rows[0].attempt), ("a", 2));
        let done = [AckedRow::of("a"), AckedRow::of("b")];
        let late = s.queue.ack("trainer", first.lease.unwrap(), &done).unwrap();
        assert_eq!((late.changed, late.lost), (1, names(&["a"])));
        s.restart();
        assert_eq!(s.ack("trainer", &again), 1);
    });
}

#[test]
fn what_no_holder_survives_is_dead_with_the_reason_until_it_is_revived() {
    on_each(LIMITS, |s| {
        s.queue.join(&trainer()).unwrap();
        s.queue.put(&[row("a", 1), row("b", 1)]).unwrap();
        for now in 0..LIMITS.max_attempts as u64 {
            let loan = s.lease("trainer", RowSelection::Keys(names(&["a"])), 1, now);
            assert_eq!(loan.rows[0].attempt, now as u32 + 1);
        }
        let why = "a bad row: \u{e4}".repeat(100);
        for _ in 0..LIMITS.max_attempts {
            let loan = s.lease("trainer", RowSelection::Keys(names(&["b"])), 10, 100);
            let failed = s
                .queue
                .fail("trainer", loan.lease.unwrap(), &keys(&loan), &why);
            assert_eq!(failed.unwrap().changed, 1);
        }
        s.restart();
        let dead = |key: &str| match s.queue.state("trainer", key).unwrap() {
            Some(RowState::Dead { reason }) => reason,
            other => panic!("{other:?}"),
        };
        assert!(
            dead("a").contains("3 times") && dead("a").contains("tests"),
            "{}",
            dead("a")
        );
        assert!(why.starts_with(&dead("b")) && dead("b").len() > 500);
        assert!(s.rows("trainer", 9, 200).rows.is_empty());
        assert_eq!(s.queue.stats().unwrap().of("trainer").dead, 2);
        assert_eq!(s.queue.revive("trainer", &names(&["a", "b"])).unwrap(), 2);
        assert_eq!(s.queue.revive("trainer", &names(&["a"])).unwrap(), 0);
        assert_eq!(s.rows("trainer", 9, 200).rows.len(), 2);
    });
}

#[test]
fn released_rows_come_first_again_and_do_not_wear_out() {
    on_each(LIMITS, |s| {
        s.queue.join(&trainer()).unwrap();
        s.queue.put(&[row("a", 1), row("b", 1)]).unwrap();
        for _ in 0..5 {
            let loan = s.rows("trainer", 1, 0);
            assert_eq!((keys(&loan), loan.rows[0].attempt), (names(&["a"]), 1));
            let lease = loan.lease.unwrap();
            let back = s.queue.release("trainer", lease, &keys(&loan)).unwrap();
            assert_eq!((back.changed, back.lost.len()), (1, 0));
            let twice = s.queue.release("trainer", lease, &keys(&loan)).unwrap();
            assert_eq!((twice.changed, twice.lost), (0, names(&["a"])));
        }
    });
}

#[test]
fn renewed_leases_last_longer() {
    on_each(LIMITS, |s| {
        s.queue.join(&trainer()).unwrap();
        s.queue.put(&[row("a", 1)]).unwrap();
        let loan = s.rows("trainer", 1, 0);
        let renew = |now| {
            let lease = loan.lease.unwrap();
            s.queue
                .renew("trainer", lease, &keys(&loan), 10, now)
                .unwrap()
        };
        assert_eq!(renew(5).changed, 1);
        assert!(s.rows("trainer", 1, 14).rows.is_empty());
        assert_eq!(s.queue.sweep(99, 15).unwrap(), 0);
        assert_eq!(renew(15).lost, names(&["a"]));
    });
}

#[test]
fn a_row_is_ready_for_whom_it_has_what_is_needed() {
    on_each(LIMITS, |s| {
        s.queue
            .join(&consumer("scorer", &["trace"], &["reward"], false))
            .unwrap();
        s.queue
            .join(&consumer("trainer", &["trace", "reward"], &[], true))
            .unwrap();
        let mut scored = row("b", 1);
        scored.fields.push(Field::new("reward", "1"));
        s.queue.put(&[row("a", 1), scored]).unwrap();
        assert_eq!(keys(&s.rows("trainer", 9, 0)), ["b"]);
        let loan = s.rows("scorer", 9, 0);
        assert_eq!(keys(&loan), ["a"], "b needs no score");
        let lease = loan.lease.unwrap();
        for wrong in [vec![], vec![Field::new("value", "1")]] {
            let done = AckedRow {
                key: "a".into(),
                fields: wrong,
            };
            let refused = refusal(s.queue.ack("scorer", lease, &[done]));
            assert!(
                matches!(refused, QueueError::WrongFields { .. }),
                "{refused}"
            );
        }
        let done = AckedRow {
            key: "a".into(),
            fields: vec![Field::new("reward", "0.5")],
        };
        s.queue
            .ack("scorer", lease, std::slice::from_ref(&done))
            .unwrap();
        s.restart();
        assert_eq!(s.queue.ack("scorer", lease, &[done]).unwrap().changed, 0);
        let loan = s.rows("trainer", 9, 0);
        assert_eq!(keys(&loan), ["a"]);
        assert_eq!(field(&loan.rows[0].fields, "reward").unwrap(), "0.5");
        s.ack("trainer", &loan);
        let views = s.queue.rows(None, 9).unwrap();
        assert!(views[0].done && !views[1].done);
        assert_eq!(views[1].fields, ["trace", "reward"]);
        assert_eq!(s.queue.rows(Some(views[0].seq), 9).unwrap(), views[1..]);
    });
}

#[test]
fn fields_can_come_later_and_the_first_value_stays() {
    on_each(LIMITS, |s| {
        s.queue
            .join(&consumer("trainer", &["trace", "reward"], &[], true))
            .unwrap();
        s.queue.put(&[row("a", 1)]).unwrap();
        let fill = |key: &str, value: &'static str| {
            s.queue.fill(&[AckedRow {
                key: key.into(),
                fields: vec![Field::new("reward", value)],
            }])
        };
        assert_eq!((fill("a", "1").unwrap(), fill("a", "2").unwrap()), (1, 0));
        assert!(matches!(
            refusal(fill("b", "1")),
            QueueError::UnknownRow { .. }
        ));
        let loan = s.rows("trainer", 9, 0);
        assert_eq!(field(&loan.rows[0].fields, "reward").unwrap(), "1");
    });
}

#[test]
fn a_row_is_done_when_each_last_consumer_acked_it() {
    on_each(LIMITS, |s| {
        let last = ["actor", "critic"].map(|name| consumer(name, &["trace"], &[], true));
        last.iter().for_each(|c| s.queue.join(c).unwrap());
        s.queue
            .join(&consumer("viewer", &["trace"], &[], false))
            .unwrap();
        s.queue.put(&[row("a", 1)]).unwrap();
        s.ack("actor", &s.rows("actor", 1, 0));
        let seen = s.rows("viewer", 1, 0);
        assert_eq!(s.queue.stats().unwrap().rows, 1);
        s.ack("critic", &s.rows("critic", 1, 0));
        assert_eq!(s.queue.stats().unwrap().rows, 0);
        assert_eq!(s.ack("viewer", &seen), 1, "its holder is not at fault");
        assert!(s.rows("viewer", 1, 99).rows.is_empty());
    });
}

#[test]
fn quotas_push_back_and_nothing_is_half_put() {
    on_each(LIMITS, |s| {
        s.queue.join(&trainer()).unwrap();
        let large = s.queue.put(&[row("a", 1), row("b", 1_000)]);
        assert!(matches!(refusal(large), QueueError::TooLarge { .. }));
        assert_eq!(s.queue.stats().unwrap().rows, 0);
        s.queue.put(&[row("a", 600)]).unwrap();
        let many: Vec<NewRow> = (0..16).map(|n| row(&format!("k{n:02}"), 1)).collect();
        for rows in [&[row("b", 500)], &many[..]] {
            let full = put_within(s.queue.as_ref(), rows, Duration::from_millis(1));
            assert!(matches!(refusal(full), QueueError::Full { rows: 1, .. }));
        }
        assert_eq!(
            s.queue.put(&[row("a", 600)]).unwrap(),
            [PutOutcome::Duplicate]
        );
        // A producer that waits continues as soon as a consumer made room.
        let queue = std::sync::Arc::clone(&s.queue);
        let waits = std::thread::spawn(move || {
            put_within(queue.as_ref(), &[row("b", 500)], Duration::from_secs(300)).unwrap()
        });
        let one = Sample {
            bytes: 1,
            ..Sample::rows(1)
        };
        let loan = s.lease("trainer", RowSelection::Sample(one), 10, 0);
        assert_eq!(
            keys(&loan),
            ["a"],
            "one row, even if it is larger than asked"
        );
        s.ack("trainer", &loan);
        assert_eq!(waits.join().unwrap(), [PutOutcome::New]);
        let seen = s.queue.wait(0, Duration::ZERO).unwrap();
        assert_eq!(s.queue.wait(seen, Duration::from_millis(1)).unwrap(), seen);
    });
}

#[test]
fn rows_are_chosen_and_removed_by_key() {
    on_each(LIMITS, |s| {
        s.queue.join(&trainer()).unwrap();
        s.queue
            .put(&[row("a", 1), row("b", 1), row("c", 1)])
            .unwrap();
        let taken = s.lease(
            "trainer",
            RowSelection::Keys(names(&["c", "a", "c"])),
            10,
            0,
        );
        assert_eq!(keys(&taken), ["a", "c"]);
        // All or none, and not what another holds.
        for wrong in [names(&["b", "c"]), names(&["c"])] {
            let refused = s.try_lease("trainer", RowSelection::Keys(wrong.clone()), 10, 5);
            assert!(matches!(refusal(refused), QueueError::NotReady { .. }));
            let refused = s.queue.remove(&wrong);
            assert!(matches!(refusal(refused), QueueError::NotReady { .. }));
        }
        assert_eq!(
            s.queue.state("trainer", "b").unwrap(),
            Some(RowState::Ready)
        );
        assert_eq!(s.queue.remove(&names(&["b"])).unwrap(), 1);
        s.restart();
        assert_eq!(s.queue.read("b", fields::TRACE).unwrap(), None);
        assert_eq!(s.queue.put(&[row("b", 1)]).unwrap(), [PutOutcome::New]);
    });
}

#[test]
fn done_rows_are_forgotten_by_group_oldest_first() {
    on_each(LIMITS, |s| {
        s.queue.join(&trainer()).unwrap();
        let grouped = ["a1", "a2", "b1", "b2", "c1"].map(|key| NewRow {
            group: key[..1].into(),
            group_size: 2,
            ..row(key, 1)
        });
        s.queue.put(&grouped).unwrap();
        s.ack("trainer", &s.rows("trainer", 4, 0));
        assert_eq!(
            s.queue.sweep(3, 0).unwrap(),
            0,
            "half a group would be another group"
        );
        assert_eq!(s.queue.sweep(2, 0).unwrap(), 2);
        s.restart();
        let put = s.queue.put(&grouped).unwrap();
        use PutOutcome::{Duplicate, New};
        assert_eq!(put, [New, New, Duplicate, Duplicate, Duplicate]);
    });
}

#[test]
fn consumers_are_who_they_said_they_are() {
    on_each(LIMITS, |s| {
        s.queue
            .join(&consumer("scorer", &["trace"], &["reward"], false))
            .unwrap();
        s.queue
            .join(&consumer("scorer", &["trace"], &["reward"], false))
            .unwrap();
        for wrong in [
            consumer("scorer", &["trace"], &["value"], false),
            consumer("judge", &["trace"], &["reward"], false),
            consumer("judge", &["trace"], &["trace"], false),
        ] {
            let refused = refusal(s.queue.join(&wrong));
            assert!(matches!(refused, QueueError::Refused { .. }), "{refused}");
        }
        let unknown = s.try_lease("judge", RowSelection::Sample(Sample::rows(1)), 10, 0);
        assert!(matches!(
            refusal(unknown),
            QueueError::UnknownConsumer { .. }
        ));
        for n in 1..MAX_CONSUMERS {
            s.queue
                .join(&consumer(&format!("c{n}"), &[], &[], false))
                .unwrap();
        }
        assert!(s.queue.join(&consumer("more", &[], &[], false)).is_err());
    });
}

#[test]
fn values_out_of_range_are_refused_with_the_field() {
    let limits = QueueLimits {
        max_bytes: 1 << 20,
        ..LIMITS
    };
    on_each(limits, |s| {
        s.queue.join(&trainer()).unwrap();
        let twice = vec![Field::new("x", "1"), Field::new("x", "2")];
        let with = |fields: Vec<Field>| NewRow {
            fields,
            ..row("a", 1)
        };
        for (bad, named) in [
            (row("a", 1).key, ""),
            (String::new(), "key"),
            ("k".repeat(2_000), "key"),
        ] {
            let put = s.queue.put(&[NewRow {
                key: bad,
                ..row("a", 1)
            }]);
            assert_eq!(put.is_ok(), named.is_empty());
        }
        let none = NewRow {
            group_size: 0,
            ..row("b", 1)
        };
        let too_many = (0..70).map(|n| Field::new(format!("f{n}"), "")).collect();
        for bad in [
            none,
            with(twice),
            with(too_many),
            with(vec![Field::new("", "")]),
        ] {
            let bad = NewRow {
                key: "new".into(),
                ..bad
            };
            let refused = refusal(s.queue.put(&[bad]));
            assert!(matches!(refused, QueueError::Argument { .. }), "{refused}");
        }
        for (rows, ttl) in [(0, 1), (1, 0), (usize::MAX, 1)] {
            let take = RowSelection::Sample(Sample::rows(rows));
            let refused = refusal(s.try_lease("trainer", take, ttl, 0));
            assert!(matches!(refused, QueueError::Argument { .. }), "{refused}");
        }
        let lost = s.queue.ack(
            "trainer",
            NO_LEASE,
            &[AckedRow::of("a"), AckedRow::of("zz")],
        );
        assert_eq!(lost.unwrap().lost, names(&["a", "zz"]));
    });
}
