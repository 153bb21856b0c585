//! A second implementation of the device interface, in plain loops: one layer of attention, and a separate
//! sampler that returns draws and no logits. It must pass the tests of every forward pass.

use crate::{channel, collect, request};
use sinew_grammar::Mask;
use sinew_infer::testing::{HashForward, HashWeights, adapter_conformance, conformance};
use sinew_infer::{
    Batch, BlockCopy, DeviceError, Draw, Drawn, EmbeddedEngine, EngineConfig, Forward,
    ForwardLimits, ModelForward, PassResult, PromptRow, Sampler, SchedulerConfig, Scored, uniform,
};
use sinew_model::InferModel;
use sinew_types::{
    Engine, EngineError, FinishReason, PromptLogprob, SamplingParams, TensorSource, TokenId,
    TokenLogprob,
};
use std::sync::Arc;

const WIDTH: usize = 8;

const LIMITS: ForwardLimits = ForwardLimits {
    vocab: 11,
    context: 64,
    block_tokens: 4,
    blocks: 128,
};

/// Keys, which are values as well, of every slot.
struct Plain {
    keys: Vec<[f32; WIDTH]>,
    logits: Vec<f32>,
}

fn embedding(token: TokenId, position: usize) -> [f32; WIDTH] {
    std::array::from_fn(|i| {
        let at = (token as usize * WIDTH + i) as f32;
        (at * 0.7).sin() + 0.3 * ((position * (i + 1)) as f32 * 0.2).cos()
    })
}

fn dot(a: &[f32; WIDTH], b: &[f32; WIDTH]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl Plain {
    fn new() -> Self {
        Self {
            keys: vec![[0.0; WIDTH]; LIMITS.blocks * LIMITS.block_tokens],
            logits: Vec::new(),
        }
    }

    /// Logits after the token at `position`.
    fn row(&self, slot: impl Fn(usize) -> usize, position: usize) -> Vec<f32> {
        let query = self.keys[slot(position)];
        let seen = (0..=position).map(|p| self.keys[slot(p)]);
        let seen: Vec<[f32; WIDTH]> = seen.collect();
        let powers: Vec<f32> = seen.iter().map(|k| (dot(&query, k) / 3.0).exp()).collect();
        let total: f32 = powers.iter().sum();
        let mut mean = [0.0; WIDTH];
        for (key, power) in seen.iter().zip(&powers) {
            let pairs = mean.iter_mut().zip(key);
            pairs.for_each(|(m, k)| *m += power / total * k);
        }
        let out = |token: usize| dot(&mean, &embedding(token as TokenId, 0));
        (0..LIMITS.vocab).map(out).collect()
    }
}

/// Draws by the definition, in f64, from what the mask allows; the log-mass of what it allows.
fn draw(row: &[f32], params: &SamplingParams, position: usize, mask: Option<&Mask>) -> (Draw, f32) {
    let temperature = f64::from(params.policy_temperature());
    let divided = |id: usize| f64::from(row[id]) / temperature;
    let allowed = |id: &usize| mask.is_none_or(|mask| mask.allows(*id as TokenId));
    let log_sum = |ids: &[usize]| ids.iter().map(|&id| divided(id).exp()).sum::<f64>().ln();
    let all: Vec<usize> = (0..row.len()).collect();
    let ids: Vec<usize> = all.iter().copied().filter(allowed).collect();
    let own = log_sum(&ids);
    let logprob = |id: usize| (divided(id) - own) as f32;
    let mut top = ids.clone();
    top.sort_by(|&a, &b| divided(b).total_cmp(&divided(a)));
    let bias = |id: usize| {
        let own = params.logit_bias.iter().filter(|b| b.0 as usize == id);
        own.map(|b| f64::from(b.1)).sum::<f64>() / temperature
    };
    let mut weights: Vec<(usize, f64)> = ids
        .iter()
        .map(|&id| (id, (divided(id) + bias(id)).exp()))
        .collect();
    weights.sort_by(|a, b| b.1.total_cmp(&a.1));
    let best = weights[0].1;
    weights.retain(|w| w.1 >= f64::from(params.min_p) * best);
    if params.top_k > 0 {
        weights.truncate(params.top_k as usize);
    }
    if params.temperature == 0.0 {
        weights.truncate(1);
    }
    let total: f64 = weights.iter().map(|w| w.1).sum();
    let (mut kept, mut mass) = (0, 0.0);
    while kept < weights.len() && (kept == 0 || mass < f64::from(params.top_p) * total) {
        mass += weights[kept].1;
        kept += 1;
    }
    let mut target = uniform(params.seed, position as u64) * mass;
    let chosen = weights[..kept].iter().find(|w| {
        target -= w.1;
        target < 0.0
    });
    let id = chosen.unwrap_or(&weights[kept - 1]).0;
    let named = |&id: &usize| TokenLogprob {
        id: id as TokenId,
        logprob: logprob(id),
    };
    let draw = Draw {
        id: id as TokenId,
        logprob: logprob(id),
        top: top
            .iter()
            .take(params.top_logprobs.into())
            .map(named)
            .collect(),
        choice: None,
    };
    (draw, (own - log_sum(&all)) as f32)
}

/// The draws of a sampler from its rows.
fn draw_along(rows: &[Vec<f32>], sampler: &Sampler<'_>) -> Drawn {
    let (params, position) = (sampler.params, sampler.position);
    if let Some(constraint) = sampler.constraint {
        let mut constraint = constraint.lock().unwrap();
        if let Some(forced) = constraint.without_choice(params)? {
            return Ok(vec![forced]);
        }
        let mask = constraint.mask()?;
        let (mut draw, log_mass) = draw(&rows[sampler.row], params, position, Some(&mask));
        draw.choice = Some(constraint.accept(draw.id, &mask, log_mass)?);
        return Ok(vec![draw]);
    }
    let mut draws: Vec<Draw> = Vec::new();
    for (i, row) in rows[sampler.row..=sampler.row + sampler.draft.len()]
        .iter()
        .enumerate()
    {
        draws.push(draw(row, params, position + i, None).0);
        if sampler.draft.get(i) != draws.last().map(|draw| &draw.id) {
            break;
        }
    }
    Ok(draws)
}

/// The log-probabilities of a prompt's token: those of a draw that reports all tokens.
fn score(rows: &[Vec<f32>], row: &PromptRow<'_>) -> Scored {
    let params = SamplingParams {
        top_logprobs: LIMITS.vocab as u8,
        ..SamplingParams::default()
    };
    let (draw, _) = draw(&rows[row.row], &params, row.position, None);
    let of = |id: TokenId| draw.top.iter().find(|t| t.id == id).unwrap().logprob;
    Ok(PromptLogprob {
        position: row.position as u32,
        logprob: of(row.token),
        top: draw.top.iter().take(row.top.into()).copied().collect(),
        targets: row.targets.iter().map(|&id| of(id)).collect(),
    })
}

impl Forward for Plain {
    fn limits(&self) -> ForwardLimits {
        LIMITS
    }

    fn copy_block(&mut self, copy: BlockCopy) {
        let size = LIMITS.block_tokens;
        let (from, to) = (copy.from as usize * size, copy.to as usize * size);
        self.keys.copy_within(from..from + copy.tokens, to);
    }

    /// Draws on the spot; under a constraint only the first row, which the contract allows.
    fn step(
        &mut self,
        batch: &Batch,
        samplers: &[Sampler<'_>],
        prompts: &[PromptRow<'_>],
    ) -> Result<PassResult, DeviceError> {
        let rows: Vec<Vec<f32>> = self
            .logits(batch)?
            .chunks(LIMITS.vocab)
            .map(<[f32]>::to_vec)
            .collect();
        let drawn = samplers.iter().map(|sampler| draw_along(&rows, sampler));
        Ok(PassResult {
            drawn: drawn.collect(),
            scored: prompts.iter().map(|row| score(&rows, row)).collect(),
        })
    }

    fn logits(&mut self, batch: &Batch) -> Result<&[f32], DeviceError> {
        self.logits.clear();
        for s in &batch.sequences {
            let table = &batch.block_table[s.blocks.clone()];
            let size = LIMITS.block_tokens;
            let slot = |position: usize| table[position / size] as usize * size + position % size;
            for (i, row) in s.rows.clone().enumerate() {
                let position = s.past + i;
                self.keys[slot(position)] = embedding(batch.tokens[row], position);
                if batch.logit_rows.binary_search(&row).is_ok() {
                    let logits = self.row(slot, position);
                    self.logits.extend(logits);
                }
            }
        }
        Ok(&self.logits)
    }

    fn load_weights(&mut self, weights: &dyn TensorSource) -> Result<(), DeviceError> {
        let count = weights.names().len();
        Err(DeviceError::Device(format!(
            "this model has no weights, {count} were given"
        )))
    }
}

#[test]
fn every_forward_pass_passes_the_conformance_tests() {
    conformance(Plain::new);
    conformance(|| HashForward::new(LIMITS));
    let params = crate::model::tiny_params(1);
    conformance(|| {
        let device = crate::model::device();
        let model = InferModel::new(&device, params.config(), &params, 256).unwrap();
        ModelForward::new(device, model, 64 * 16).unwrap()
    });
}

#[test]
fn every_forward_pass_with_adapters_passes_their_tests() {
    let numbers = [3.0, 4.0].map(HashWeights::adapter);
    adapter_conformance(|| HashForward::new(LIMITS), numbers);
    let params = crate::model::tiny_params(1);
    let adapters = [1, 2].map(|seed| crate::adapters::adapter(&params, seed));
    let make = || {
        let device = crate::model::device();
        let model = InferModel::new(&device, params.config(), &params, 256).unwrap();
        ModelForward::new(device, model, 64 * 16).unwrap()
    };
    adapter_conformance(make, adapters);
}

/// The engine gives its tokens, with drafts and without.
#[test]
fn an_engine_runs_on_a_forward_pass_that_draws_by_itself() {
    let run = |speculative_tokens| {
        let config = EngineConfig {
            scheduler: SchedulerConfig {
                speculative_tokens,
                ..SchedulerConfig::default()
            },
            ..EngineConfig::default()
        };
        let engine = EmbeddedEngine::new(Plain::new(), config, None, Box::new(|| 0.0)).unwrap();
        let answers = (0..4).map(|id| {
            let (sink, events) = channel();
            let mut request = request(id, &[1, 2, 3], 40);
            request.sampling.temperature = 0.2;
            engine.submit(request, sink).unwrap();
            events
        });
        let answers: Vec<_> = answers.collect();
        let all = answers.iter().map(|events| {
            let (tokens, end) = collect(events);
            assert_eq!(end, Ok::<_, EngineError>(FinishReason::Length));
            tokens
        });
        all.collect::<Vec<_>>()
    };
    let expected = run(0);
    assert!(expected.iter().all(|tokens| tokens.len() == 40));
    assert_eq!(run(16), expected);
    let refused = EmbeddedEngine::new(
        Plain::new(),
        EngineConfig::default(),
        None,
        Box::new(|| 0.0),
    )
    .unwrap()
    .load_weights(
        sinew_types::PolicyVersion(1),
        Arc::new(sinew_types::TensorList::default()),
    );
    assert!(
        matches!(refused, Err(EngineError::Weights(_))),
        "{refused:?}"
    );
}
