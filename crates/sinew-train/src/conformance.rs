//! Conformance tests for implementations of [`Policy`] and [`Comm`]. The tests of this crate, and of every
//! crate with such an implementation, call them. The functions panic with the violated rule.

use crate::checkpoint::{CheckpointStore, LoadedCheckpoint};
use crate::comm::{Comm, CommError};
use crate::optim::{AdamWConfig, Outcome, Update};
use crate::pack::{MicroBatch, pack};
use crate::policy::{OutputChoice, Policy, ScoreGrads, waves};
use sinew_types::{PolicyVersion, TrainRow};
use std::collections::BTreeMap;
use std::path::Path;

const BACKWARD: OutputChoice = OutputChoice {
    entropies: true,
    values: false,
    backward: true,
};

/// Returns the bits of every value of the weights for engines, by name.
fn weights<P: Policy>(policy: &mut P) -> BTreeMap<String, Vec<u32>> {
    let source = policy.weights(PolicyVersion(0)).expect("weights");
    let names = source.names();
    assert!(!names.is_empty(), "a policy to train has weights");
    let bits = |name: String| {
        let view = source.tensor(&name).expect("a named tensor is there");
        assert_eq!(Some(view.info()), source.info(&name), "info of {name}");
        let values = view.into_f32();
        (name, values.iter().map(|v| v.to_bits()).collect())
    };
    names.into_iter().map(bits).collect()
}

/// A policy with the number of updates that it applied.
struct Tested<P> {
    policy: P,
    updates: u64,
}

impl<P: Policy> Tested<P> {
    fn new(policy: P) -> Self {
        Self { policy, updates: 0 }
    }

    fn apply(&mut self, lr: f32, max_grad_norm: Option<f32>) -> Outcome {
        let update = Update {
            number: self.updates + 1,
            lr,
            adamw: AdamWConfig::default(),
            max_grad_norm,
        };
        let outcome = self.policy.apply(&update).expect("an update");
        self.updates += u64::from(matches!(outcome, Outcome::Applied { .. }));
        outcome
    }

    /// Returns the norm of the gradients, read from an update whose effect on the weights is negligible.
    fn norm(&mut self) -> f64 {
        match self.apply(1e-30, None) {
            Outcome::Applied { grad_norm } => grad_norm,
            skipped @ Outcome::SkippedNonFinite { .. } => panic!("{skipped:?}"),
        }
    }

    fn zero(&mut self) {
        self.policy.zero_gradients().expect("gradients of 0");
    }

    /// Runs a forward pass, and a backward pass in which the loss has the derivative `slope` with respect to
    /// every log-probability. Returns the log-probabilities of all micro-batches.
    fn backward(&mut self, wave: &[&MicroBatch], slope: f32) -> Vec<f32> {
        let all = self.policy.forward(wave, BACKWARD).expect("a forward pass");
        assert_eq!(all.len(), wave.len(), "scores of each micro-batch");
        let mut grads = Vec::new();
        for (batch, scores) in wave.iter().zip(&all) {
            let n = batch.items.len();
            assert_eq!((scores.logprobs.len(), scores.entropies.len()), (n, n));
            grads.push(ScoreGrads {
                logprobs: vec![slope; n],
                entropies: Vec::new(),
                values: Vec::new(),
            });
        }
        self.policy.backward(wave, &grads).expect("a backward pass");
        all.into_iter().flat_map(|scores| scores.logprobs).collect()
    }

    /// Runs one update. Returns the log-probabilities before it.
    fn train(&mut self, batch: &MicroBatch) -> Vec<f32> {
        self.zero();
        let scores = self.backward(&[batch], -1.0);
        let outcome = self.apply(1e-3, Some(1.0));
        assert!(
            matches!(outcome, Outcome::Applied { grad_norm } if grad_norm > 0.0),
            "{outcome:?}"
        );
        scores
    }

    fn save(&mut self, store: &CheckpointStore) -> (LoadedCheckpoint, Vec<String>) {
        let mut draft = store.begin(self.updates).expect("a draft");
        let files = self.policy.save(&mut draft).expect("a saved policy");
        draft.commit().expect("a checkpoint");
        let loaded = store.load().expect("a good checkpoint");
        (loaded.expect("the checkpoint"), files)
    }
}

/// Tests the contract of [`Policy`] on rows that train some of their tokens. `make` always returns the same
/// policy, which must be trainable, and is not called while the last one lives; the rows must fit into one
/// micro-batch. Checkpoints are written below
/// `dir`.
///
/// # Panics
/// If a rule is broken, at the first one.
pub fn policy<P: Policy>(make: impl Fn() -> P, rows: &[TrainRow], dir: &Path) {
    let packing = pack(rows, usize::MAX).expect("rows that pack");
    let [batch] = &packing.micro_batches[..] else {
        panic!("rows of one micro-batch are needed");
    };
    let before = weights(&mut make());
    assert_eq!(before, weights(&mut make()), "the same policy each time");
    let mut one = Tested::new(make());
    let first = one.train(batch);
    let after = weights(&mut one.policy);
    assert_ne!(after, before, "an update changes the weights");
    let second = one.train(batch);
    let sum = |scores: &[f32]| scores.iter().map(|&l| f64::from(l)).sum::<f64>();
    assert!(sum(&second) > sum(&first), "an update goes downhill");
    let store = CheckpointStore::open(dir, 2).expect("a folder");
    let (loaded, files) = one.save(&store);
    let third = one.train(batch);
    let last = weights(&mut one.policy);
    drop(one);

    let mut other = Tested::new(make());
    assert_eq!(other.train(batch), first, "equal bits of scores");
    assert_eq!(weights(&mut other.policy), after, "equal bits of weights");
    other
        .policy
        .load(&loaded, &files, 2)
        .expect("a saved state");
    other.updates = 2;
    assert_eq!(other.train(batch), third, "restored to the bit");
    assert_eq!(weights(&mut other.policy), last, "restored to the bit");
    let path = loaded.path.join(&files[0]);
    let bytes = std::fs::read(&path).expect("a file with weights");
    std::fs::remove_file(&path).expect("a file less");
    let refused = other.policy.load(&loaded, &files, 2);
    assert!(refused.is_err(), "a file is missing");
    std::fs::write(&path, bytes).expect("the file again");
    assert_eq!(
        weights(&mut other.policy),
        last,
        "a refused state changes nothing"
    );
    drop(other);
    gradients_add_up(&make, rows, batch);
    non_finite_updates_are_skipped(&make, batch);
}

/// Gradients of several passes are summed, single rows give the scores of rows together, in one wave or in
/// several, and zero is zero.
fn gradients_add_up<P: Policy>(make: impl Fn() -> P, rows: &[TrainRow], batch: &MicroBatch) {
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-4 * a.abs().max(b.abs());
    let mut tested = Tested::new(make());
    tested.zero();
    let together = tested.backward(&[batch], 1.0);
    let once = tested.norm();
    assert!(once > 0.0, "there is a gradient");
    tested.backward(&[batch], 1.0);
    let twice = tested.norm();
    assert!(near(twice, 2.0 * once), "gradients add up: {once} {twice}");
    let single = |row: &TrainRow| {
        let packing = pack(std::slice::from_ref(row), usize::MAX).expect("a row that packs");
        packing.micro_batches
    };
    let singles: Vec<MicroBatch> = rows.iter().flat_map(single).collect();
    let singles: Vec<&MicroBatch> = singles.iter().collect();
    let mut norms = Vec::new();
    for lanes in [1, tested.policy.lanes()] {
        tested.zero();
        let waves = waves(&singles, lanes);
        let alone: Vec<f32> = waves
            .iter()
            .flat_map(|wave| tested.backward(wave, 1.0))
            .collect();
        norms.push(tested.norm());
        // Rows may share items, so that the sets are compared only by their ends.
        let range = |scores: &[f32]| {
            let of = |f: fn(f32, f32) -> f32, start| scores.iter().copied().fold(start, f);
            (of(f32::min, f32::INFINITY), of(f32::max, f32::NEG_INFINITY))
        };
        let (a, b) = (range(&together), range(&alone));
        let near = |a: f32, b: f32| (a - b).abs() < 1e-4;
        assert!(
            near(a.0, b.0) && near(a.1, b.1),
            "scores depend on the batch: {a:?} {b:?}"
        );
    }
    assert!(
        near(norms[0], norms[1]),
        "gradients depend on the waves: {norms:?}"
    );
    tested.zero();
    assert_eq!(tested.norm(), 0.0, "gradients are set to 0");
}

/// An update with a gradient that is not finite changes neither weights nor moments.
fn non_finite_updates_are_skipped<P: Policy>(make: impl Fn() -> P, batch: &MicroBatch) {
    let expected = {
        let mut tested = Tested::new(make());
        tested.train(batch);
        tested.train(batch);
        weights(&mut tested.policy)
    };
    let mut tested = Tested::new(make());
    tested.train(batch);
    let before = weights(&mut tested.policy);
    tested.zero();
    tested.backward(&[batch], f32::NAN);
    let outcome = tested.apply(1e-3, Some(1.0));
    assert!(
        matches!(outcome, Outcome::SkippedNonFinite { .. }),
        "a gradient that is not finite was applied: {outcome:?}"
    );
    assert_eq!(
        weights(&mut tested.policy),
        before,
        "a skipped update changes no weight"
    );
    tested.train(batch);
    assert_eq!(weights(&mut tested.policy), expected, "nor a moment");
}

/// Tests the contract of [`Comm`] with 1 to 4 ranks. `make` returns all ranks of a new group; the test runs
/// them on threads.
///
/// # Panics
/// If a rule is broken, at the first one.
pub fn comm(make: impl Fn(usize) -> Vec<Box<dyn Comm>>) {
    for ranks in 1..=4 {
        let group = make(ranks);
        assert_eq!(group.len(), ranks, "one end for each rank");
        let reduce: Vec<Vec<u32>> = std::thread::scope(|scope| {
            let threads: Vec<_> = group
                .into_iter()
                .map(|comm| scope.spawn(move || talk(comm, ranks)))
                .collect();
            let join = |t: std::thread::ScopedJoinHandle<'_, Vec<u32>>| t.join().expect("a rank");
            threads.into_iter().map(join).collect()
        });
        assert!(
            reduce.iter().all(|sums| *sums == reduce[0]),
            "{ranks} ranks: sums differ between ranks"
        );
    }
}

/// Numbers whose sum depends on the order, of one rank.
fn numbers(rank: usize, len: usize) -> Vec<f32> {
    let number = |i: usize| match (rank + i) % 3 {
        0 => 1e8,
        1 => -1e8 + i as f32,
        _ => 0.1 * (rank + 1) as f32,
    };
    (0..len).map(number).collect()
}

/// One rank's part of the test; returns the bits of its sums.
fn talk(mut comm: Box<dyn Comm>, ranks: usize) -> Vec<u32> {
    let rank = comm.rank();
    assert_eq!(comm.ranks(), ranks);
    let mut sums = Vec::new();
    for round in 0..3usize {
        // Several buffers, one of them empty, one longer than a piece of any buffer.
        let lengths = [5, 0, 70_000 + round];
        let own = |rank: usize| lengths.map(|len| numbers(rank + round, len));
        let mut buffers = own(rank);
        let [a, b, c] = &mut buffers;
        comm.broadcast(&mut [a, b, c]).expect("a broadcast");
        assert_eq!(buffers, own(0), "a broadcast gives the numbers of rank 0");
        let message = format!("{rank} in {round}").into_bytes();
        let all = comm.all_gather(&message).expect("messages of all");
        let expected = (0..ranks).map(|rank| format!("{rank} in {round}").into_bytes());
        assert!(all.into_iter().eq(expected), "messages come by rank");
        let mut buffers = own(rank);
        let [a, b, c] = &mut buffers;
        comm.all_reduce(&mut [a, b, c]).expect("a sum");
        let exact = |i: usize| (0..ranks).map(|r| f64::from(own(r)[0][i])).sum::<f64>();
        for (i, &sum) in buffers[0].iter().enumerate() {
            let off = (f64::from(sum) - exact(i)).abs();
            assert!(off <= 8.0 * ranks as f64, "sum {sum} is off by {off}");
        }
        sums.extend(buffers.iter().flatten().map(|v| v.to_bits()));
        let mut again = own(rank);
        let [a, b, c] = &mut again;
        comm.all_reduce(&mut [a, b, c]).expect("the sum again");
        assert_eq!(again, buffers, "the same sum has the same bits");
        for other in 1..ranks {
            let text = |from: usize| vec![from as u8; 1000 * round + from];
            match rank {
                0 => {
                    comm.send(other, &text(0)).expect("a message sent");
                    assert_eq!(comm.receive(other), Ok(text(other)));
                }
                rank if rank == other => {
                    assert_eq!(comm.receive(0), Ok(text(0)));
                    comm.send(0, &text(rank)).expect("a message sent");
                }
                _ => {}
            }
        }
    }
    if rank > 0 {
        let end = comm.receive(0);
        assert_eq!(end, Err(CommError::Closed { rank: 0 }), "rank 0 has ended");
    }
    sums
}
