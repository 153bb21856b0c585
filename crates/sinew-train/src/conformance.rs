//! Conformance tests for implementations of [`Policy`] and [`Comm`]. The tests of this crate, and of every
//! crate with such an implementation, call them. The functions panic with the violated rule.

use crate::comm::{Comm, CommError};
use crate::optim::{AdamWConfig, Outcome, Update};
use crate::pack::{MicroBatch, pack};
use crate::policy::{OutputChoice, Policy, ScoreGrads};
use sinew_types::{TensorSource, TrainRow};
use std::collections::BTreeMap;

const BACKWARD: OutputChoice = OutputChoice {
    entropies: true,
    values: false,
    backward: true,
};

/// Returns the bits of every value of a source, by name.
fn bits(source: &dyn TensorSource) -> BTreeMap<String, Vec<u32>> {
    let names = source.names().into_iter();
    names
        .map(|name| {
            let view = source.tensor(&name).expect("a named tensor is there");
            assert_eq!(Some(view.info()), source.info(&name), "info of {name}");
            let values = view.into_f32();
            (name, values.iter().map(|v| v.to_bits()).collect())
        })
        .collect()
}

/// Returns the bits of every trained value, by name.
fn weights<P: Policy>(policy: &P) -> BTreeMap<String, Vec<u32>> {
    let files = policy.weights();
    assert!(!files.is_empty(), "a policy to train has weights");
    let files = files.iter().flat_map(|file| bits(&*file.tensors));
    files.collect()
}

/// Returns gradients. They are read from the first moments after an update with `beta1` 0, whose effect on
/// the weights is negligible.
fn gradients<P: Policy>(policy: &mut P) -> BTreeMap<String, Vec<f32>> {
    let update = Update {
        number: 1,
        lr: 1e-30,
        adamw: AdamWConfig {
            beta1: 0.0,
            ..AdamWConfig::default()
        },
        max_grad_norm: None,
    };
    let outcome = policy.apply(&update).expect("an update");
    assert!(matches!(outcome, Outcome::Applied { .. }), "{outcome:?}");
    let optimizer = policy.optimizer();
    let firsts = optimizer
        .names()
        .into_iter()
        .filter(|n| n.starts_with("m."));
    let values = |name: &String| optimizer.tensor(name).map(|v| v.into_f32().into_owned());
    firsts
        .map(|name| (name.clone(), values(&name).unwrap_or_default()))
        .collect()
}

/// Returns the global norm.
fn norm(gradients: &BTreeMap<String, Vec<f32>>) -> f64 {
    let squares = gradients.values().flatten();
    squares.map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt()
}

/// Returns the norm of `a - factor * b`.
fn distance(a: &BTreeMap<String, Vec<f32>>, b: &BTreeMap<String, Vec<f32>>, factor: f32) -> f64 {
    let pairs = a.iter().map(|(name, a)| (a, &b[name]));
    let squares = pairs.flat_map(|(a, b)| a.iter().zip(b));
    let square = |(a, b): (&f32, &f32)| f64::from(a - factor * b).powi(2);
    squares.map(square).sum::<f64>().sqrt()
}

/// Runs a forward pass, and a backward pass in which the loss has the derivative `slope` with respect to
/// every log-probability. Returns the log-probabilities.
fn backward<P: Policy>(policy: &mut P, batch: &MicroBatch, slope: f32) -> Vec<f32> {
    let scores = policy.forward(batch, BACKWARD).expect("a forward pass");
    let n = batch.items.len();
    assert_eq!((scores.logprobs.len(), scores.entropies.len()), (n, n));
    let grads = ScoreGrads {
        logprobs: vec![slope; n],
        entropies: Vec::new(),
        values: Vec::new(),
    };
    policy.backward(batch, &grads).expect("a backward pass");
    scores.logprobs
}

fn update(number: u64) -> Update {
    Update {
        number,
        lr: 1e-3,
        adamw: AdamWConfig::default(),
        max_grad_norm: Some(1.0),
    }
}

/// Runs one update. Returns the log-probabilities before it.
fn train<P: Policy>(policy: &mut P, batch: &MicroBatch, number: u64) -> Vec<f32> {
    policy.zero_gradients();
    let scores = backward(policy, batch, -1.0);
    let outcome = policy.apply(&update(number)).expect("an update");
    assert!(
        matches!(outcome, Outcome::Applied { grad_norm } if grad_norm > 0.0),
        "{outcome:?}"
    );
    scores
}

/// Tests the contract of [`Policy`] on rows that train some of their tokens. `make` always returns the same
/// policy, which must be trainable; the rows must fit into one micro-batch.
///
/// # Panics
/// If a rule is broken, at the first one.
pub fn policy<P: Policy>(make: impl Fn() -> P, rows: &[TrainRow]) {
    let packing = pack(rows, usize::MAX).expect("rows that pack");
    let [batch] = &packing.micro_batches[..] else {
        panic!("rows of one micro-batch are needed");
    };
    let (mut one, mut other) = (make(), make());
    let before = weights(&one);
    assert_eq!(before, weights(&other), "the same policy each time");
    assert!(one.optimizer().names().is_empty(), "no moments yet");
    let first = train(&mut one, batch, 1);
    assert_eq!(first, train(&mut other, batch, 1), "equal bits of scores");
    assert_eq!(weights(&one), weights(&other), "equal bits of weights");
    assert_ne!(weights(&one), before, "an update changes the weights");
    let second = train(&mut one, batch, 2);
    let sum = |scores: &[f32]| scores.iter().map(|&l| f64::from(l)).sum::<f64>();
    assert!(sum(&second) > sum(&first), "an update goes downhill");

    // `other` takes the state of `one`, and both continue in the same way.
    let state = one.weights();
    let mut all = crate::checkpoint::StoredTensors::default();
    state.iter().for_each(|file| all.copy_from(&*file.tensors));
    let mut moments = crate::checkpoint::StoredTensors::default();
    moments.copy_from(&*one.optimizer());
    drop(state);
    other.restore(&all, Some(&moments)).expect("its own state");
    assert_eq!(train(&mut one, batch, 3), train(&mut other, batch, 3));
    assert_eq!(weights(&one), weights(&other), "restored to the bit");
    let kept = weights(&other);
    moments.remove_first();
    assert!(
        other.restore(&all, Some(&moments)).is_err(),
        "a moment is missing"
    );
    all.remove_first();
    assert!(other.restore(&all, None).is_err(), "a tensor is missing");
    assert_eq!(weights(&other), kept, "a refused state changes nothing");
    gradients_add_up(&make, rows, batch);
    non_finite_updates_are_skipped(&make, batch);
}

/// Gradients of several passes are summed, single rows give the scores of rows together, and zero is zero.
fn gradients_add_up<P: Policy>(make: impl Fn() -> P, rows: &[TrainRow], batch: &MicroBatch) {
    let mut policy = make();
    policy.zero_gradients();
    let together = backward(&mut policy, batch, 1.0);
    let once = gradients(&mut policy);
    assert!(norm(&once) > 0.0, "there is a gradient");
    backward(&mut policy, batch, 1.0);
    let twice = gradients(&mut policy);
    assert!(
        distance(&twice, &once, 2.0) <= 1e-4 * norm(&once),
        "gradients add up"
    );
    policy.zero_gradients();
    let mut alone = Vec::new();
    for row in rows {
        let packing = pack(std::slice::from_ref(row), usize::MAX).expect("a row that packs");
        for batch in &packing.micro_batches {
            alone.extend(backward(&mut policy, batch, 1.0));
        }
    }
    // Rows may share items, so that the sets are compared by only their ends.
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
    policy.zero_gradients();
    let none = gradients(&mut policy);
    assert_eq!(norm(&none), 0.0, "gradients are set to 0");
}

/// An update with a gradient that is not finite changes neither weights nor moments.
fn non_finite_updates_are_skipped<P: Policy>(make: impl Fn() -> P, batch: &MicroBatch) {
    let mut policy = make();
    train(&mut policy, batch, 1);
    let (before, moments) = (weights(&policy), bits(&*policy.optimizer()));
    policy.zero_gradients();
    backward(&mut policy, batch, f32::NAN);
    let outcome = policy.apply(&update(2)).expect("a skipped update");
    let Outcome::SkippedNonFinite { tensor } = outcome else {
        panic!("a gradient that is not finite was applied: {outcome:?}");
    };
    assert!(before.contains_key(&tensor), "{tensor} names a tensor");
    assert_eq!(
        weights(&policy),
        before,
        "a skipped update changes no weight"
    );
    assert_eq!(bits(&*policy.optimizer()), moments, "nor a moment");
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
