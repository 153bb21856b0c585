//! The tests that a [`Forward`] with adapters must pass.

use super::bench::{Bench, BlockSequence, Foreign, all_params, prompt};
use crate::draw::Draw;
use crate::forward::{AdapterSlot, Forward};
use crate::sampler::Sampler;
use sinew_types::{Adapter, SamplingParams};
use std::sync::Arc;

/// Tests the contract of [`Forward`] on adapters. `make` always gives the same one, as for
/// [`super::conformance`]; the adapters are of its model, and each makes other logits.
///
/// # Panics
/// If a rule is broken, at the first one.
pub fn adapter_conformance<F: Forward>(make: impl Fn() -> F, adapters: [Adapter; 2]) {
    mixed_rows_are_those_of_each_adapter_by_itself(Bench::new(make()), &adapters);
    a_slot_has_the_adapter_that_was_loaded_last(Bench::new(make()), &adapters);
    refused_adapters_change_nothing(Bench::new(make()), &adapters);
}

/// The first draw after a prompt, with an adapter.
fn first<F: Forward>(bench: &mut Bench<F>, adapter: Option<AdapterSlot>, seed: usize) -> Draw {
    let mut sequence = sequence(bench, adapter, seed);
    bench.next(&mut sequence, &logged())
}

fn logged() -> SamplingParams {
    SamplingParams {
        top_logprobs: 4,
        ..SamplingParams::default()
    }
}

fn sequence<F: Forward>(
    bench: &mut Bench<F>,
    adapter: Option<AdapterSlot>,
    seed: usize,
) -> BlockSequence {
    let limits = bench.forward.limits();
    let tokens = prompt(limits.vocab, limits.block_tokens + 3, seed);
    BlockSequence {
        adapter,
        ..bench.sequence(tokens)
    }
}

fn load<F: Forward>(bench: &mut Bench<F>, slot: AdapterSlot, adapter: &Adapter) {
    let loaded = bench.forward.load_adapter(slot, adapter);
    loaded.expect("an adapter of the model");
}

/// One batch of the same prompt with both adapters, without one, and with the first one again, in two passes:
/// each draws what it draws when it is computed by itself.
fn mixed_rows_are_those_of_each_adapter_by_itself<F: Forward>(
    mut bench: Bench<F>,
    adapters: &[Adapter; 2],
) {
    for (slot, adapter) in (0..).zip(adapters) {
        load(&mut bench, slot, adapter);
    }
    let all = all_params();
    let params = &all[0];
    let used = [None, Some(0), Some(0), Some(1)];
    let expected: Vec<Draw> = used
        .iter()
        .map(|&adapter| {
            let mut alone = sequence(&mut bench, adapter, 1);
            bench.next(&mut alone, params)
        })
        .collect();
    assert_eq!(expected[1], expected[2]);
    let different = [(0, 1), (0, 3), (1, 3)];
    for (a, b) in different {
        assert_ne!(expected[a].top, expected[b].top, "an adapter has no effect");
    }
    let mut mixed: Vec<BlockSequence> = used
        .iter()
        .map(|&adapter| sequence(&mut bench, adapter, 1))
        .collect();
    let len = mixed[0].tokens.len();
    let cut = [1, 4, len - 1, 2];
    let pieces = mixed.iter_mut().zip(cut).map(|(s, rows)| (s, rows, 0));
    let batch = Bench::<F>::batch(&mut pieces.collect::<Vec<_>>());
    bench.step(&batch, &[]);
    let pieces = mixed
        .iter_mut()
        .zip(cut)
        .map(|(s, rows)| (s, len - rows, 1));
    let batch = Bench::<F>::batch(&mut pieces.collect::<Vec<_>>());
    let samplers: Vec<_> = (0..used.len())
        .map(|row| Sampler {
            row,
            draft: &[],
            params,
            position: len,
            constraint: None,
        })
        .collect();
    let drawn: Vec<Draw> = bench.step(&batch, &samplers).concat();
    assert_eq!(drawn, expected, "rows of different adapters are mixed up");
}

fn a_slot_has_the_adapter_that_was_loaded_last<F: Forward>(
    mut bench: Bench<F>,
    adapters: &[Adapter; 2],
) {
    let plain = first(&mut bench, None, 2);
    load(&mut bench, 1, &adapters[0]);
    load(&mut bench, 0, &adapters[1]);
    let (a, b) = (first(&mut bench, Some(1), 2), first(&mut bench, Some(0), 2));
    assert_ne!(a.top, b.top, "slots are mixed up");
    load(&mut bench, 1, &adapters[1]);
    assert_eq!(
        first(&mut bench, Some(1), 2),
        b,
        "an adapter was not replaced"
    );
    bench.forward.unload_adapter(0);
    assert_eq!(
        first(&mut bench, Some(1), 2),
        b,
        "another slot was unloaded"
    );
    load(&mut bench, 0, &adapters[0]);
    assert_eq!(first(&mut bench, Some(0), 2), a, "a slot is used again");
    assert_eq!(first(&mut bench, None, 2), plain, "the own weights stay");
}

fn refused_adapters_change_nothing<F: Forward>(mut bench: Bench<F>, adapters: &[Adapter; 2]) {
    load(&mut bench, 0, &adapters[0]);
    let expected = first(&mut bench, Some(0), 3);
    let foreign = Adapter {
        alpha: 1.0,
        tensors: Arc::new(Foreign),
    };
    let refused = bench.forward.load_adapter(0, &foreign);
    assert!(refused.is_err(), "an adapter of another model was taken");
    let after = first(&mut bench, Some(0), 3);
    assert_eq!(after, expected, "the old adapter stays");
}
