//! The server, and inputs that both policies get.

use sinew_model::{Family, ModelConfig, Params, RopeScaling, SaveDtype, save_pretrained};
use sinew_tensor::{Cpu, KernelSet};
use sinew_torch::{
    Deadlines, OpenOptions, PublishOptions, RankGroup, RankOptions, TorchPolicy, TorchSetup,
};
use sinew_train::optim::{AdamWConfig, Outcome, Update};
use sinew_train::pack::{MicroBatch, pack};
use sinew_train::{OutputChoice, Policy, ScoreGrads, Scores, conformance};
use sinew_types::{EpisodeId, PolicyVersion, TensorSource, TokenId, TrainRow};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// Tokens of a micro-batch at most.
pub(crate) const MAX_TOKENS: u32 = 64;
/// Ranks of the server.
const RANKS: usize = 2;

/// A Python with PyTorch.
fn python() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let python = match std::env::var_os("SINEW_TORCH_PYTHON") {
        Some(named) => PathBuf::from(named),
        None => root.join(".cache/venv-torch/bin/python"),
    };
    let hint = "`make setup` installs it, or set SINEW_TORCH_PYTHON";
    assert!(python.is_file(), "{} is missing: {hint}", python.display());
    python
}

/// A server with a folder for everything that it writes.
pub(crate) struct Bench {
    pub(crate) group: RankGroup,
    pub(crate) dir: TempDir,
    pub(crate) python: PathBuf,
    fence: Cell<u64>,
}

impl Bench {
    pub(crate) fn start() -> Self {
        Self::with_ranks(RANKS)
    }

    pub(crate) fn with_ranks(ranks: usize) -> Self {
        let python = python();
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let options = RankOptions {
            threads: Some(1),
            scratch: Some(dir.path().to_owned()),
            collective: Duration::from_secs(60),
            ..RankOptions::new(&python, ranks, dir.path().join("logs"))
        };
        Self {
            group: RankGroup::start(&options).unwrap(),
            dir,
            python,
            fence: Cell::new(100),
        }
    }

    /// A folder with a random model.
    pub(crate) fn model(&self, family: Family, seed: u64) -> PathBuf {
        self.saved(&format!("{family:?}-{seed}"), &params(family, seed))
    }

    /// A folder with the model of [`wide_params`].
    pub(crate) fn wide_model(&self, seed: u64) -> PathBuf {
        self.saved(&format!("wide-{seed}"), &wide_params(seed))
    }

    fn saved(&self, name: &str, params: &Params) -> PathBuf {
        let path = self.dir.path().join(name);
        if !path.exists() {
            save_pretrained(&path, params, SaveDtype::F32, &[]).unwrap();
        }
        path
    }

    /// The setup of the next owner.
    pub(crate) fn setup(&self, model: &Path) -> TorchSetup {
        self.fence.set(self.fence.get() + 1);
        TorchSetup {
            open: OpenOptions {
                deterministic: true,
                ..OpenOptions::new(model, MAX_TOKENS)
            },
            publish: PublishOptions::new(self.dir.path().join("weights")),
            fence: self.fence.get(),
            deadlines: Deadlines::default(),
        }
    }

    /// Opens a model. The policy that was open before is gone.
    pub(crate) fn open(&self, model: &Path, edit: impl FnOnce(&mut TorchSetup)) -> TorchPolicy {
        let mut setup = self.setup(model);
        edit(&mut setup);
        TorchPolicy::attach(self.group.server(), &setup).unwrap()
    }

    /// The tests that every policy has to pass.
    pub(crate) fn conformance(&self, model: &Path, rows: &[TrainRow]) {
        // The rows of the tests are in one micro-batch.
        let make = || self.open(model, |setup| setup.open.max_tokens = 256);
        let dir = self.dir.path().join("conformance");
        conformance::policy(make, rows, &dir);
    }
}

pub(crate) fn config(family: Family) -> ModelConfig {
    ModelConfig {
        family,
        vocab: 61,
        d_model: 32,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        d_ff: 64,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        rms_eps: 1e-5,
        // One family with a separate output matrix.
        tied_embeddings: family != Family::Qwen2,
        qkv_bias: family == Family::Qwen2,
        qk_norm: family == Family::Qwen3,
        max_context: 256,
        bos_id: None,
        eos_ids: vec![1],
    }
}

pub(crate) fn params(family: Family, seed: u64) -> Params {
    Params::random(&config(family), seed)
}

/// A tiny Llama whose weights are three times those of a new one, so that scores depend on the context by
/// much more than rounding.
pub(crate) fn wide_params(seed: u64) -> Params {
    let mut params = params(Family::Llama, seed);
    for (entry, values) in params.tensors_mut() {
        if !entry.name.ends_with("norm.weight") {
            values.iter_mut().for_each(|value| *value *= 3.0);
        }
    }
    params
}

pub(crate) fn device() -> Cpu {
    Cpu::new(KernelSet::detect_f32(), 1)
}

/// Three groups of three rows with long prompts, which train their answers.
pub(crate) fn rows(seed: u32) -> Vec<TrainRow> {
    let mut rows = Vec::new();
    for group in 0..3u32 {
        for answer in 0..3u32 {
            let mut tokens: Vec<TokenId> = (0..20).map(|i| (i * 7 + 3 + seed) % 61).collect();
            tokens.extend((0..8).map(|i| (i * 5 + group * 13) % 61));
            let prompt = tokens.len();
            tokens.extend((0..5 + answer).map(|i| (i * 11 + answer * 17) % 61));
            rows.push(row(&tokens, prompt));
        }
    }
    rows
}

/// A row that trains all tokens from `prompt` on.
pub(crate) fn row(tokens: &[TokenId], prompt: usize) -> TrainRow {
    let n = tokens.len();
    let mut weights = vec![0.03; n];
    weights[..prompt].fill(0.0);
    TrainRow {
        episode: EpisodeId::new("e"),
        tokens: tokens.to_vec(),
        weights,
        advantages: vec![1.0; n],
        behaviour_logprobs: vec![0.0; n],
        ..TrainRow::default()
    }
}

/// Micro-batches of the rows.
pub(crate) fn batches(rows: &[TrainRow]) -> Vec<MicroBatch> {
    pack(rows, MAX_TOKENS as usize - 10).unwrap().micro_batches
}

/// Scores of all micro-batches, in waves of as many as the policy computes at once.
pub(crate) fn scored(
    policy: &mut dyn Policy,
    batches: &[MicroBatch],
    want: OutputChoice,
) -> Vec<Scores> {
    let mut scores = Vec::new();
    for wave in batches.chunks(policy.lanes()) {
        let wave: Vec<&MicroBatch> = wave.iter().collect();
        scores.extend(policy.forward(&wave, want).unwrap());
    }
    scores
}

/// Derivatives that differ from item to item.
fn slopes(scores: &Scores) -> ScoreGrads {
    let column = |values: &[f32], scale: f32| {
        let slope = |(i, _): (usize, &f32)| scale * (i as f32 * 1.3).sin();
        values.iter().enumerate().map(slope).collect()
    };
    ScoreGrads {
        logprobs: column(&scores.logprobs, 0.1),
        entropies: column(&scores.entropies, 0.02),
        values: column(&scores.values, 0.05),
    }
}

/// One update. Returns the scores before it, and the norm of the gradients.
pub(crate) fn update(
    policy: &mut dyn Policy,
    batches: &[MicroBatch],
    number: u64,
) -> (Vec<Scores>, f64) {
    let want = OutputChoice {
        entropies: true,
        values: policy.has_critic(),
        backward: true,
    };
    policy.zero_gradients().unwrap();
    let mut all = Vec::new();
    for wave in batches.chunks(policy.lanes()) {
        let wave: Vec<&MicroBatch> = wave.iter().collect();
        let scores = policy.forward(&wave, want).unwrap();
        let grads: Vec<ScoreGrads> = scores.iter().map(slopes).collect();
        policy.backward(&wave, &grads).unwrap();
        all.extend(scores);
    }
    let adamw = AdamWConfig {
        // Large: else an update is the sign of a gradient, also of one that is only rounding.
        epsilon: 1e-3,
        weight_decay: 0.1,
        ..AdamWConfig::default()
    };
    let update = Update {
        number,
        lr: 1e-2,
        adamw,
        max_grad_norm: Some(0.5),
    };
    match policy.apply(&update).unwrap() {
        Outcome::Applied { grad_norm } => (all, grad_norm),
        skipped @ Outcome::SkippedNonFinite { .. } => panic!("{skipped:?}"),
    }
}

/// Shapes and values of all weights by name.
pub(crate) type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

pub(crate) fn tensors(source: &dyn TensorSource) -> Tensors {
    let of = |name: String| {
        let view = source.tensor(&name).unwrap();
        let shape = view.shape().to_vec();
        (name, (shape, view.into_f32().into_owned()))
    };
    source.names().into_iter().map(of).collect()
}

pub(crate) fn weights(policy: &mut dyn Policy) -> Tensors {
    tensors(&*policy.weights(PolicyVersion(0)).unwrap())
}

/// Compares columns of scores: at most 1e-5 apart.
pub(crate) fn assert_scores(what: &str, found: &[Scores], expected: &[Scores]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        let columns = [
            (&found.logprobs, &expected.logprobs),
            (&found.entropies, &expected.entropies),
            (&found.values, &expected.values),
        ];
        for (found, expected) in columns {
            assert_eq!(found.len(), expected.len(), "{what}");
            for (a, b) in found.iter().zip(expected) {
                assert!((a - b).abs() <= 1e-5, "{what}: {a} and {b}");
            }
        }
    }
}

/// Compares weights: at most 1e-6 of the largest apart.
pub(crate) fn assert_weights(what: &str, found: &Tensors, expected: &Tensors) {
    let names = |tensors: &Tensors| tensors.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(expected), "{what}");
    let all = expected.values().flat_map(|(_, values)| values);
    let largest = all.fold(0.0f32, |largest, value| largest.max(value.abs()));
    for (name, (shape, values)) in expected {
        let (found_shape, found) = &found[name];
        assert_eq!(found_shape, shape, "{what}: {name}");
        for (a, b) in found.iter().zip(values) {
            assert!(
                (a - b).abs() <= 1e-6 * largest,
                "{what}: {name}: {a} and {b}"
            );
        }
    }
}
