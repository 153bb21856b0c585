//! Test policy that is small enough to differentiate by hand: the logits of the next token are a table row,
//! selected by the last token.

use crate::checkpoint::{CheckpointError, Draft, LoadedCheckpoint, StoredTensors};
use crate::comm::{Comm, CommError};
use crate::host_state::{self, HostState, TensorFile};
use crate::optim::{AdamW, HostTensor, Outcome, Update};
use crate::pack::{LossItem, MaskTable, MicroBatch};
use crate::policy::{OutputChoice, Policy, ScoreGrads, Scores, TopTokens};
use crate::policy_error::PolicyError;
use sinew_tensor::{Cpu, KernelSet};
use sinew_types::{
    EpisodeId, PolicyVersion, RowMasks, TensorList, TensorSource, TensorView, TokenId,
    TokenLogprob, TrainRow,
};
use std::sync::Arc;

const TABLE: &str = "table.weight";

#[derive(Clone, Debug)]
pub(crate) struct Bigram {
    pub(crate) vocab: usize,
    shape: [usize; 2],
    pub(crate) logits: Vec<f32>,
    pub(crate) gradient: Vec<f32>,
    /// Trie rows computed in all forward passes.
    pub(crate) computed: usize,
    /// Whether the next backward pass produces a gradient that is not finite.
    pub(crate) poison: bool,
    optimizer: AdamW,
    /// Largest number of micro-batches in a wave.
    pub(crate) lanes: usize,
    pub(crate) has_entropies: bool,
}

impl Bigram {
    pub(crate) fn new(vocab: usize) -> Self {
        let logits: Vec<f32> = (0..vocab * vocab).map(|i| (i as f32 * 0.7).sin()).collect();
        Self {
            vocab,
            shape: [vocab, vocab],
            gradient: vec![0.0; logits.len()],
            logits,
            computed: 0,
            poison: false,
            optimizer: AdamW::new(device()),
            lanes: 1,
            has_entropies: true,
        }
    }

    fn parts(&mut self) -> (&mut AdamW, HostTensor<'_>) {
        let table = HostTensor {
            name: TABLE,
            shape: &self.shape,
            decay: true,
            lr_scale: 1.0,
            values: &mut self.logits,
            gradient: &self.gradient,
        };
        (&mut self.optimizer, table)
    }

    /// Log-probabilities after `token`.
    pub(crate) fn after(&self, token: TokenId) -> Vec<f64> {
        self.after_at(token, 1.0)
    }

    fn after_at(&self, token: TokenId, temperature: f32) -> Vec<f64> {
        self.after_among(token, temperature, None)
    }

    /// Minus infinity for tokens that a bit set bars.
    pub(crate) fn after_among(
        &self,
        token: TokenId,
        temperature: f32,
        mask: Option<&[u32]>,
    ) -> Vec<f64> {
        let at = token as usize * self.vocab;
        let row = self.logits[at..at + self.vocab].iter().enumerate();
        let allowed = |id: usize| mask.is_none_or(|mask| mask[id / 32] >> (id % 32) & 1 == 1);
        let divided = row.map(|(id, &z)| {
            if allowed(id) {
                f64::from(z) / f64::from(temperature)
            } else {
                f64::NEG_INFINITY
            }
        });
        let divided: Vec<f64> = divided.collect();
        let lse = divided.iter().map(|z| z.exp()).sum::<f64>().ln();
        divided.iter().map(|z| z - lse).collect()
    }

    /// Log-probabilities at an item's place.
    fn at_item(&self, batch: &MicroBatch, item: &LossItem) -> Vec<f64> {
        let MaskTable { words, table } = &batch.masks;
        let mask =
            (item.mask != RowMasks::ALL).then(|| &table[item.mask as usize * words..][..*words]);
        self.after_among(batch.tokens[item.row as usize], item.temperature, mask)
    }

    /// A row that trains the tokens from `prompt` on, with the policy's own log-probabilities.
    pub(crate) fn row(
        &self,
        tokens: &[TokenId],
        prompt: usize,
        weight: f32,
        advantage: f32,
    ) -> TrainRow {
        let trained = |t: usize| t >= prompt.max(1);
        let column = |f: &dyn Fn(usize) -> f32| {
            (0..tokens.len())
                .map(|t| if trained(t) { f(t) } else { 0.0 })
                .collect::<Vec<f32>>()
        };
        TrainRow {
            episode: EpisodeId::new("e"),
            tokens: tokens.to_vec(),
            weights: column(&|_| weight),
            advantages: column(&|_| advantage),
            behaviour_logprobs: column(&|t| self.after(tokens[t - 1])[tokens[t] as usize] as f32),
            ..TrainRow::default()
        }
    }
}

/// Entropy of log-probabilities, of which some are minus infinity.
fn entropy(p: &[f64]) -> f64 {
    let allowed = p.iter().filter(|l| l.is_finite());
    -allowed.map(|l| l.exp() * l).sum::<f64>()
}

impl Bigram {
    fn scores(&mut self, batch: &MicroBatch, want: OutputChoice) -> Scores {
        self.computed += batch.tokens.len();
        let mut scores = Scores::default();
        for item in &batch.items {
            let p = self.at_item(batch, item);
            scores.logprobs.push(p[item.target as usize] as f32);
            if want.entropies {
                scores.entropies.push(entropy(&p) as f32);
            }
        }
        scores
    }

    fn accumulate(&mut self, batch: &MicroBatch, grads: &ScoreGrads) {
        for (i, item) in batch.items.iter().enumerate() {
            let token = batch.tokens[item.row as usize];
            let p = self.at_item(batch, item);
            let entropy = entropy(&p);
            for (j, l) in p.iter().enumerate().filter(|l| l.1.is_finite()) {
                let hit = if j == item.target as usize { 1.0 } else { 0.0 };
                let mut d = f64::from(grads.logprobs[i]) * (hit - l.exp());
                if let Some(&d_entropy) = grads.entropies.get(i) {
                    d -= f64::from(d_entropy) * l.exp() * (l + entropy);
                }
                let d = d / f64::from(item.temperature);
                self.gradient[token as usize * self.vocab + j] += d as f32;
            }
        }
    }
}

impl Policy for Bigram {
    fn lanes(&self) -> usize {
        self.lanes
    }

    fn has_entropies(&self) -> bool {
        self.has_entropies
    }

    fn forward(
        &mut self,
        wave: &[&MicroBatch],
        want: OutputChoice,
    ) -> Result<Vec<Scores>, PolicyError> {
        assert!((1..=self.lanes).contains(&wave.len()), "{}", wave.len());
        assert!(self.has_entropies || !want.entropies);
        Ok(wave.iter().map(|batch| self.scores(batch, want)).collect())
    }

    fn backward(&mut self, wave: &[&MicroBatch], grads: &[ScoreGrads]) -> Result<(), PolicyError> {
        assert_eq!(wave.len(), grads.len());
        for (batch, grads) in wave.iter().zip(grads) {
            self.accumulate(batch, grads);
        }
        if std::mem::take(&mut self.poison) {
            self.gradient[1] = f32::NAN;
        }
        Ok(())
    }

    fn top(&mut self, wave: &[&MicroBatch], k: usize) -> Result<Vec<TopTokens>, PolicyError> {
        let ranked = |token: TokenId, temperature: f32| {
            let after = self.after_at(token, temperature).into_iter().zip(0..);
            let entry = |(l, id): (f64, TokenId)| TokenLogprob {
                id,
                logprob: l as f32,
            };
            let mut all: Vec<TokenLogprob> = after.map(entry).collect();
            all.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
            all.truncate(k);
            all
        };
        let of_batch = |batch: &&MicroBatch| {
            let items = batch.items.iter();
            items
                .map(|item| ranked(batch.tokens[item.row as usize], item.temperature))
                .collect()
        };
        Ok(wave.iter().map(of_batch).collect())
    }

    fn zero_gradients(&mut self) -> Result<(), PolicyError> {
        self.gradient.fill(0.0);
        Ok(())
    }

    fn reduce_gradients(&mut self, comm: &mut dyn Comm) -> Result<(), CommError> {
        comm.all_reduce(&mut [&mut self.gradient])
    }

    fn broadcast_weights(&mut self, comm: &mut dyn Comm) -> Result<(), CommError> {
        comm.broadcast(&mut [&mut self.logits])
    }

    fn apply(&mut self, update: &Update) -> Result<Outcome, PolicyError> {
        let (optimizer, table) = self.parts();
        optimizer.apply(update, &mut [table])
    }

    fn save(&mut self, draft: &mut Draft<'_>) -> Result<Vec<String>, CheckpointError> {
        host_state::save(self, draft)
    }

    fn load(
        &mut self,
        loaded: &LoadedCheckpoint,
        weights: &[String],
        updates: u64,
    ) -> Result<(), CheckpointError> {
        host_state::load(self, loaded, weights, updates)
    }

    fn weights(&mut self, _version: PolicyVersion) -> Result<Arc<dyn TensorSource>, PolicyError> {
        let mut copy = StoredTensors::default();
        for file in self.trained() {
            copy.copy_from(&*file.tensors);
        }
        Ok(Arc::new(copy))
    }
}

impl HostState for Bigram {
    fn trained(&self) -> Vec<TensorFile<'_>> {
        let view = TensorView::f32(&self.shape, &self.logits).unwrap();
        let tensors = TensorList(vec![(TABLE.to_owned(), view)]);
        vec![TensorFile {
            name: "model.safetensors",
            tensors: Box::new(tensors),
        }]
    }

    fn optimizer(&self) -> Box<dyn TensorSource + '_> {
        Box::new(&self.optimizer)
    }

    fn restore(
        &mut self,
        weights: &dyn TensorSource,
        optimizer: Option<&dyn TensorSource>,
    ) -> Result<(), PolicyError> {
        let (own, table) = self.parts();
        own.restore(&mut [table], weights, optimizer)
    }

    fn side_files(&self) -> Result<Vec<(String, Vec<u8>)>, PolicyError> {
        Ok(vec![("config.json".into(), b"{}".to_vec())])
    }
}

pub(crate) fn device() -> Cpu {
    Cpu::new(KernelSet::detect_f32(), 1)
}
