//! The same updates, however rows are packed and over however many ranks they are shared.

use crate::algorithms::Batch;
use crate::bench::{Bench, Tensors, config, tensors, weights, wide_params};
use crate::trained::{
    Fresh, Gaps, Job, SEED, Trained, embedded, print_gaps, print_head, weight_gap,
};
use sinew_model::Family;
use sinew_torch::{LoraOptions, Sharing};
use sinew_train::Policy;
use sinew_train::checkpoint::CheckpointStore;
use sinew_train::pack::pack;
use std::path::Path;

/// Tokens of a micro-batch that holds all rows.
const WHOLE: usize = 1024;
/// Bound on losses and norms of gradients, relative.
const RELATIVE: f64 = 1e-6;
const LORA_RANK: usize = 4;
const LORA_ALPHA: f32 = 8.0;

/// A way to compute the updates.
struct Way<'a> {
    name: &'static str,
    bench: &'a Bench,
    sharing: Sharing,
    micro_batch_tokens: usize,
}

impl Way<'_> {
    fn train(&self, model: &Path, job: &Job<'_>) -> Trained {
        let mut torch = self.bench.open(model, |setup| {
            setup.open.sharing = self.sharing;
            setup.open.max_tokens = self.micro_batch_tokens as u32;
        });
        let is_flat = !torch.info().shared;
        assert_eq!(is_flat, self.sharing == Sharing::Flat, "{}", self.name);
        job.packed(self.micro_batch_tokens).train(&mut torch)
    }
}

/// The smallest size of micro-batches of which an odd number, five at least, holds all rows: the last wave of
/// two lanes lacks one.
fn small(batch: &Batch) -> usize {
    let longest = batch.rows.iter().map(|row| row.tokens.len()).max().unwrap();
    let is_odd = |tokens: &usize| {
        let count = pack(&batch.rows, *tokens).unwrap().micro_batches.len();
        count >= 5 && count % 2 == 1
    };
    (longest..WHOLE).find(is_odd).unwrap()
}

pub(crate) fn every_packing_gives_the_same_updates(bench: &Bench, single: &Bench) {
    let batch = Batch::new();
    let few = small(&batch);
    let spec = batch.algorithm.loss();
    let job = Job::comparable(&batch.rows, spec, WHOLE, &mut embedded());
    let way = |name, bench, sharing, micro_batch_tokens| Way {
        name,
        bench,
        sharing,
        micro_batch_tokens,
    };
    let ways = [
        way("few micro-batches", bench, Sharing::Auto, WHOLE),
        way("many micro-batches", bench, Sharing::Auto, few),
        way("flat rows", bench, Sharing::Flat, WHOLE),
        way("many flat micro-batches", bench, Sharing::Flat, few),
        way("one rank", single, Sharing::Auto, WHOLE),
        way("one rank, many micro-batches", single, Sharing::Auto, few),
        way("one rank, flat rows", single, Sharing::Flat, WHOLE),
    ];
    let model = bench.wide_model(SEED);
    let first = ways[0].train(&model, &job);
    let fewest = first.reports[0].micro_batches;
    print_head("packing");
    for way in &ways[1..] {
        let found = way.train(&model, &job);
        let is_split = found.reports[0].micro_batches > fewest;
        assert!(is_split || way.micro_batch_tokens > few, "{}", way.name);
        check(way.name, &found.gaps(&first, &job));
    }
}

fn check(name: &str, gaps: &Gaps) {
    print_gaps(name, gaps);
    gaps.check(name, RELATIVE);
}

/// Adapters on all linear layers. Their A is random and their B is 0, so the first updates move only B.
fn with_adapters(bench: &Bench, model: &Path) -> Fresh {
    let policy = bench.open(model, |setup| {
        setup.open.max_tokens = WHOLE as u32;
        setup.open.lora = Some(LoraOptions {
            rank: LORA_RANK as u32,
            alpha: LORA_ALPHA,
            targets: Vec::new(),
            seed: 3,
            base_name: Some("base".to_owned()),
        });
    });
    Fresh::of(bench, "first-adapters", policy)
}

/// Policy and adapter file after a job.
struct Adapted {
    trained: Trained,
    adapters: Tensors,
    first: Tensors,
}

fn adapted(bench: &Bench, mut fresh: Fresh, job: &Job<'_>) -> Adapted {
    let file = "adapter_model.safetensors";
    let first = tensors(&fresh.first.tensors(file).unwrap());
    let torch = fresh.policy();
    let trained = job.train(torch);
    let store = CheckpointStore::open(bench.dir.path().join("last-adapters"), 2).unwrap();
    let mut draft = store.begin(3).unwrap();
    assert_eq!(torch.save(&mut draft).unwrap(), [file]);
    draft.commit().unwrap();
    let saved = store.load().unwrap().unwrap();
    Adapted {
        trained,
        adapters: tensors(&saved.tensors(file).unwrap()),
        first,
    }
}

/// `base + alpha / rank · B A` of each linear layer.
fn merged(base: &Tensors, adapters: &Tensors) -> Tensors {
    let scale = f64::from(LORA_ALPHA) / LORA_RANK as f64;
    let mut merged = base.clone();
    for (name, (shape, values)) in &mut merged {
        let layer = name.strip_suffix(".weight").unwrap();
        let part =
            |part: &str| adapters.get(&format!("base_model.model.{layer}.lora_{part}.weight"));
        let (Some((a_shape, a)), Some((b_shape, b))) = (part("A"), part("B")) else {
            continue;
        };
        let (outputs, inputs) = (shape[0], shape[1]);
        assert_eq!(a_shape, &[LORA_RANK, inputs]);
        assert_eq!(b_shape, &[outputs, LORA_RANK]);
        for (at, value) in values.iter_mut().enumerate() {
            let (row, column) = (at / inputs, at % inputs);
            let product =
                |r: usize| f64::from(b[row * LORA_RANK + r]) * f64::from(a[r * inputs + column]);
            let change: f64 = (0..LORA_RANK).map(product).sum();
            *value = (f64::from(*value) + scale * change) as f32;
        }
    }
    merged
}

pub(crate) fn adapters_are_the_same_on_one_and_two_ranks(bench: &Bench, single: &Bench) {
    let batch = Batch::new();
    let model = bench.wide_model(SEED);
    let base = tensors(&wide_params(SEED));
    let mut two = with_adapters(bench, &model);
    let mut one = with_adapters(single, &model);
    assert_eq!(weights(one.policy()), base, "B is 0");
    let spec = batch.algorithm.loss();
    let job = Job::comparable(&batch.rows, spec, WHOLE, two.policy());
    let job = job.packed(small(&batch));
    let two = adapted(bench, two, &job);
    let one = adapted(single, one, &job);
    // Seven linear layers in each of the decoder's.
    assert_eq!(two.first.len(), 2 * 7 * config(Family::Llama).layers);
    assert_eq!(one.first, two.first, "equal bits of equal seeds");
    check("adapters, one rank", &one.trained.gaps(&two.trained, &job));
    let apart = weight_gap(&one.adapters, &two.adapters);
    assert!(apart <= 1e-6, "{apart}");
    for adapted in [&one, &two] {
        let found = &adapted.trained.weights;
        let apart = weight_gap(found, &merged(&base, &adapted.adapters));
        assert!(apart <= 1e-6, "{apart}");
        assert!(weight_gap(found, &base) > 1e-4, "the adapters have moved");
    }
    // The base stays what it is.
    let embeddings = "model.embed_tokens.weight";
    assert_eq!(two.trained.weights[embeddings], base[embeddings]);
}
