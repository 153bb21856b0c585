//! A forward pass with its blocks, for the tests of every forward pass.

use crate::draw::Draw;
use crate::forward::{AdapterSlot, Batch, BatchSequence, BlockId, Forward, PassResult};
use crate::prompt_row::PromptRow;
use crate::sampler::Sampler;
use sinew_types::{SamplingParams, TensorSource, TensorView, TokenId};

/// A set with one tensor that no model or adapter has.
pub(super) struct Foreign;

impl TensorSource for Foreign {
    fn names(&self) -> Vec<String> {
        vec!["foreign.weight".to_owned()]
    }

    fn tensor(&self, _: &str) -> Option<TensorView<'_>> {
        TensorView::f32(&[2], &[1.0, 2.0]).ok()
    }
}

/// A sequence with separate blocks.
#[derive(Clone, Debug)]
pub(super) struct BlockSequence {
    pub(super) tokens: Vec<TokenId>,
    /// Tokens whose keys and values are stored.
    pub(super) past: usize,
    pub(super) blocks: Vec<BlockId>,
    pub(super) adapter: Option<AdapterSlot>,
}

/// A forward pass with blocks handed out one after the other.
pub(super) struct Bench<F> {
    pub(super) forward: F,
    pub(super) next_block: BlockId,
}

impl<F: Forward> Bench<F> {
    pub(super) fn new(forward: F) -> Self {
        Self {
            forward,
            next_block: 0,
        }
    }

    pub(super) fn blocks(&mut self, count: usize) -> Vec<BlockId> {
        let first = self.next_block;
        self.next_block += count as BlockId;
        let free = self.forward.limits().blocks;
        assert!(
            self.next_block as usize <= free,
            "more than {free} blocks are needed"
        );
        (first..self.next_block).collect()
    }

    pub(super) fn sequence(&mut self, tokens: Vec<TokenId>) -> BlockSequence {
        let size = self.forward.limits().block_tokens;
        let blocks = self.blocks((tokens.len() + 16).div_ceil(size));
        BlockSequence {
            tokens,
            past: 0,
            blocks,
            adapter: None,
        }
    }

    /// Computes the next `rows` tokens of each sequence; the logits of the last `.2` of them are requested.
    pub(super) fn batch(sequences: &mut [(&mut BlockSequence, usize, usize)]) -> Batch {
        let mut batch = Batch::default();
        for (sequence, rows, wanted) in sequences {
            let (first, table) = (batch.tokens.len(), batch.block_table.len());
            let new = sequence.past..sequence.past + *rows;
            batch.tokens.extend(&sequence.tokens[new]);
            batch.block_table.extend(&sequence.blocks);
            batch.sequences.push(BatchSequence {
                rows: first..first + *rows,
                past: sequence.past,
                blocks: table..batch.block_table.len(),
                adapter: sequence.adapter,
            });
            let end = first + *rows;
            batch.logit_rows.extend(end - *wanted..end);
            sequence.past += *rows;
        }
        batch
    }

    /// Computes a pass that does not fail.
    pub(super) fn pass(
        &mut self,
        batch: &Batch,
        samplers: &[Sampler<'_>],
        prompts: &[PromptRow<'_>],
    ) -> PassResult {
        let result = self.forward.step(batch, samplers, prompts);
        let result = result.expect("a pass");
        let counts = (result.drawn.len(), result.scored.len());
        let expected = (samplers.len(), prompts.len());
        assert_eq!(counts, expected, "one result for each sampler and row");
        result
    }

    pub(super) fn step(&mut self, batch: &Batch, samplers: &[Sampler<'_>]) -> Vec<Vec<Draw>> {
        let drawn = self.pass(batch, samplers, &[]).drawn;
        let draws = drawn.into_iter().map(|draws| draws.expect("draws"));
        let draws: Vec<Vec<Draw>> = draws.collect();
        for (draws, sampler) in draws.iter().zip(samplers) {
            let most = sampler.draft.len() + 1;
            assert!((1..=most).contains(&draws.len()), "{} draws", draws.len());
        }
        draws
    }

    /// Computes the remaining tokens of the sequence, and draws its next one.
    pub(super) fn next(&mut self, sequence: &mut BlockSequence, params: &SamplingParams) -> Draw {
        let rows = sequence.tokens.len() - sequence.past;
        let position = sequence.tokens.len();
        let batch = Self::batch(&mut [(sequence, rows, 1)]);
        let sampler = Sampler {
            row: 0,
            draft: &[],
            params,
            position,
            constraint: None,
        };
        self.step(&batch, &[sampler]).remove(0).remove(0)
    }
}

/// Parameters of every kind.
pub(super) fn all_params() -> Vec<SamplingParams> {
    let plain = |seed: u64| SamplingParams {
        seed,
        top_logprobs: 3,
        ..SamplingParams::default()
    };
    let mut all: Vec<SamplingParams> = (0..6).map(plain).collect();
    all[1].temperature = 0.0;
    all[2].temperature = 0.3;
    (all[3].temperature, all[3].top_k) = (2.0, 3);
    (all[4].top_p, all[4].min_p) = (0.8, 0.01);
    all[5].logit_bias = vec![(1, 3.0), (2, -100.0)];
    all
}

pub(super) fn prompt(vocab: usize, len: usize, seed: usize) -> Vec<TokenId> {
    let token = |i: usize| (i * 7 + seed * 5 + i / 3) % vocab;
    (0..len).map(|i| token(i) as TokenId).collect()
}
