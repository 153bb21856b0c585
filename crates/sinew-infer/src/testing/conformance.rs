//! The tests that every [`Forward`] must pass.

use super::bench::{Bench, Foreign, all_params, prompt};
use crate::constraint::Constraint;
use crate::forward::{BlockCopy, BlockId, Forward};
use crate::prompt_row::PromptRow;
use crate::sampler::Sampler;
use sinew_grammar::{ListGrammars, Vocabulary};
use sinew_types::{Format, GenerateRequest, Grammar, RequestId, SamplingParams, TokenId};
use std::sync::{Arc, Mutex};

/// Tests the contract of [`Forward`]. `make` always gives the same one, with at least 64 blocks and
/// a context of four blocks and 16 tokens, for a vocabulary of at least 8 tokens.
///
/// # Panics
/// If a rule is broken, at the first one.
pub fn conformance<F: Forward>(make: impl Fn() -> F) {
    draws_do_not_depend_on_the_batch(Bench::new(make()));
    draws_are_of_the_logits(Bench::new(make()));
    copied_blocks_serve_as_their_source(Bench::new(make()));
    drafts_change_no_token(Bench::new(make()));
    masks_bound_the_draws(Bench::new(make()));
    rows_of_prompts_have_the_bits_of_draws(Bench::new(make()));
    refused_weights_change_nothing(Bench::new(make()));
}

fn draws_do_not_depend_on_the_batch<F: Forward>(mut bench: Bench<F>) {
    let limits = bench.forward.limits();
    let tokens = prompt(limits.vocab, 2 * limits.block_tokens + 3, 1);
    let (n, all) = (tokens.len(), all_params());
    let mut alone = bench.sequence(tokens.clone());
    let batch = Bench::<F>::batch(&mut [(&mut alone, n, 1)]);
    let sampler = |row, params| Sampler {
        row,
        draft: &[],
        params,
        position: n,
        constraint: None,
    };
    // All share one row of logits.
    let samplers: Vec<_> = all.iter().map(|params| sampler(0, params)).collect();
    let expected = bench.step(&batch, &samplers);
    // The same prompt in two pieces, in passes with another sequence before it.
    let (mut split, mut other) = (
        bench.sequence(tokens),
        bench.sequence(prompt(limits.vocab, limits.block_tokens + 5, 2)),
    );
    let first = limits.block_tokens + 1;
    let batch = Bench::<F>::batch(&mut [(&mut other, 4, 1), (&mut split, first, 0)]);
    bench.step(&batch, &[sampler(0, &all[0])]);
    let batch = Bench::<F>::batch(&mut [(&mut other, 3, 1), (&mut split, n - first, 1)]);
    let samplers: Vec<_> = all.iter().map(|params| sampler(1, params)).collect();
    assert_eq!(
        bench.step(&batch, &samplers),
        expected,
        "draws depend on the batch"
    );
}

fn draws_are_of_the_logits<F: Forward>(mut bench: Bench<F>) {
    let limits = bench.forward.limits();
    let tokens = prompt(limits.vocab, limits.block_tokens + 2, 3);
    let mut twin = bench.sequence(tokens.clone());
    let rows = tokens.len();
    let batch = Bench::<F>::batch(&mut [(&mut twin, rows, 1)]);
    let logits = bench.forward.logits(&batch).expect("logits").to_vec();
    assert_eq!(logits.len(), limits.vocab, "a row of logits");
    for params in all_params() {
        let mut sequence = bench.sequence(tokens.clone());
        let draw = bench.next(&mut sequence, &params);
        bench.next_block -= sequence.blocks.len() as BlockId;
        let temperature = f64::from(params.policy_temperature());
        let divided: Vec<f64> = logits.iter().map(|&z| f64::from(z) / temperature).collect();
        let max = divided.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum = divided.iter().map(|z| (z - max).exp()).sum::<f64>().ln() + max;
        let near = |id: TokenId, logprob: f32| {
            let exact = divided[id as usize] - sum;
            assert!(
                (f64::from(logprob) - exact).abs() < 1e-3,
                "{logprob} for {exact}"
            );
        };
        near(draw.id, draw.logprob);
        assert_eq!(draw.top.len(), 3, "as many as are asked for");
        assert!(
            draw.top.is_sorted_by(|a, b| a.logprob >= b.logprob),
            "best first"
        );
        draw.top.iter().for_each(|top| near(top.id, top.logprob));
        assert_ne!(
            params.logit_bias.last().map(|b| b.0),
            Some(draw.id),
            "a banned token"
        );
        if params.temperature == 0.0 {
            assert_eq!(draw.id, draw.top[0].id, "greedy takes the best");
        }
        assert!(draw.choice.is_none(), "no format, no choice");
    }
}

fn copied_blocks_serve_as_their_source<F: Forward>(mut bench: Bench<F>) {
    let limits = bench.forward.limits();
    let params = SamplingParams::default();
    let mut source = bench.sequence(prompt(limits.vocab, limits.block_tokens + 3, 4));
    bench.next(&mut source, &params);
    let mut branch = source.clone();
    branch.blocks.truncate(1);
    let rest = bench.blocks(2);
    branch.blocks.extend(rest);
    bench.forward.copy_block(BlockCopy {
        from: source.blocks[1],
        to: branch.blocks[1],
        tokens: 3,
    });
    // The branch goes another way first: its source must not notice.
    branch.tokens.push(5);
    let other = bench.next(&mut branch, &params);
    source.tokens.push(5);
    assert_eq!(
        bench.next(&mut source, &params),
        other,
        "a copy is its source"
    );
}

fn drafts_change_no_token<F: Forward>(mut bench: Bench<F>) {
    let limits = bench.forward.limits();
    let tokens = prompt(limits.vocab, limits.block_tokens, 5);
    for params in all_params() {
        let first_block = bench.next_block;
        let mut sequence = bench.sequence(tokens.clone());
        let mut expected = Vec::new();
        for _ in 0..4 {
            let draw = bench.next(&mut sequence, &params);
            sequence.tokens.push(draw.id);
            expected.push(draw);
        }
        let ids: Vec<TokenId> = expected.iter().map(|draw| draw.id).collect();
        for accepted in 0..=3 {
            let mut draft = ids[..3].to_vec();
            if let Some(wrong) = draft.get_mut(accepted) {
                *wrong = (*wrong + 1) % limits.vocab as TokenId;
            }
            let mut verified = bench.sequence([&tokens[..], &draft].concat());
            let rows = verified.tokens.len();
            let batch = Bench::<F>::batch(&mut [(&mut verified, rows, 4)]);
            let sampler = Sampler {
                row: 0,
                draft: &draft,
                params: &params,
                position: tokens.len(),
                constraint: None,
            };
            let draws = bench.step(&batch, &[sampler]).remove(0);
            assert!(
                draws.len() <= accepted + 1,
                "a wrong draft token was accepted"
            );
            assert_eq!(draws, expected[..draws.len()], "drafts change tokens");
            bench.next_block -= verified.blocks.len() as BlockId;
        }
        bench.next_block = first_block;
    }
}

/// The constraint of an output that is `abc`, `acb` or `adb`, in tokens of one letter.
fn constraint(vocab: usize) -> Mutex<Constraint> {
    let letter = |i: usize| (i < 4).then(|| [b'a' + i as u8].into());
    let vocabulary = Vocabulary {
        tokens: (0..vocab).map(letter).collect(),
        special: Vec::new(),
        end: vocab as TokenId - 1,
        columns: vocab,
        encode: Arc::new(|text| text.bytes().map(|b| TokenId::from(b - b'a')).collect()),
        source: Vec::new(),
    };
    let grammars = ListGrammars::new(vocabulary).expect("a vocabulary");
    let texts = ["abc", "acb", "adb"].map(str::to_owned).to_vec();
    let sampling = SamplingParams {
        format: Some(Arc::new(Format::new(Grammar::Choice { texts }))),
        ..SamplingParams::default()
    };
    let request = GenerateRequest::new(RequestId(0), vec![0], sampling);
    let constraint = Constraint::start(Some(&grammars), &request, vocab);
    Mutex::new(constraint.expect("a format").expect("a constraint"))
}

fn masks_bound_the_draws<F: Forward>(mut bench: Bench<F>) {
    let limits = bench.forward.limits();
    for params in all_params() {
        let first_block = bench.next_block;
        let constraint = constraint(limits.vocab);
        let mut sequence = bench.sequence(prompt(limits.vocab, 3, 6));
        let mut said = Vec::new();
        while !constraint.lock().expect("a lock").ended() {
            // The first draft token is right, the second one is barred.
            let draft: &[TokenId] = if said.is_empty() { &[0, 0] } else { &[] };
            sequence.tokens.extend(draft);
            let known = sequence.tokens.len() - draft.len();
            let rows = sequence.tokens.len() - sequence.past;
            let batch = Bench::<F>::batch(&mut [(&mut sequence, rows, draft.len() + 1)]);
            let sampler = Sampler {
                row: 0,
                draft,
                params: &params,
                position: known,
                constraint: Some(&constraint),
            };
            let draws = bench.step(&batch, &[sampler]).remove(0);
            assert!(draws.len() <= 2, "a barred draft token was accepted");
            sequence.tokens.truncate(known);
            sequence.past = known + draws.len() - 1;
            for draw in draws {
                let choice = draw.choice.expect("a choice under a format");
                let forced = choice.allowed == 1;
                assert!(
                    !forced || draw.logprob == 0.0,
                    "a forced token has log-probability 0"
                );
                assert!(forced || draw.logprob < 0.0);
                said.push(draw.id);
                sequence.tokens.push(draw.id);
            }
        }
        let end = limits.vocab as TokenId - 1;
        let texts = [[0, 1, 2, end], [0, 2, 1, end], [0, 3, 1, end]];
        assert!(
            texts.iter().any(|text| *text == said[..]),
            "{said:?} is of no text"
        );
        bench.next_block = first_block;
    }
}

/// The log-probability of a token of a prompt is the one that a draw of it reports, bit for bit, whether its
/// row is computed with the whole prompt or with a piece, and together with draws.
fn rows_of_prompts_have_the_bits_of_draws<F: Forward>(mut bench: Bench<F>) {
    let limits = bench.forward.limits();
    let tokens = prompt(limits.vocab, limits.block_tokens + 3, 8);
    let all: Vec<TokenId> = (0..limits.vocab as TokenId).collect();
    let row = |row: usize, position: usize| PromptRow {
        row,
        position,
        token: tokens[position],
        top: 3,
        targets: &all,
    };
    let mut whole = bench.sequence(tokens.clone());
    let batch = Bench::<F>::batch(&mut [(&mut whole, tokens.len(), tokens.len())]);
    let rows: Vec<_> = (1..tokens.len()).map(|p| row(p - 1, p)).collect();
    let scored = bench.pass(&batch, &[], &rows).scored;
    // The same in two pieces, behind another sequence that draws.
    let (mut split, mut other) = (
        bench.sequence(tokens.clone()),
        bench.sequence(prompt(limits.vocab, 5, 9)),
    );
    let (params, first) = (SamplingParams::default(), limits.block_tokens - 1);
    let batch = Bench::<F>::batch(&mut [(&mut split, first, first)]);
    let mut pieces = bench.pass(&batch, &[], &rows[..first]).scored;
    let left = tokens.len() - first;
    let batch = Bench::<F>::batch(&mut [(&mut other, 5, 1), (&mut split, left, left)]);
    let sampler = Sampler {
        row: 0,
        draft: &[],
        params: &params,
        position: 5,
        constraint: None,
    };
    let later: Vec<_> = (first + 1..tokens.len())
        .map(|p| row(p - first, p))
        .collect();
    pieces.extend(bench.pass(&batch, &[sampler], &later).scored);
    assert_eq!(pieces, scored, "a prompt depends on its pieces");
    for (position, scored) in (1..).zip(scored) {
        let scored = scored.expect("log-probabilities");
        assert_eq!(scored.position as usize, position);
        let mut sequence = bench.sequence(tokens[..position].to_vec());
        let drawing = SamplingParams {
            top_logprobs: 3,
            ..SamplingParams::default()
        };
        let draw = bench.next(&mut sequence, &drawing);
        bench.next_block -= sequence.blocks.len() as BlockId;
        assert_eq!(scored.top, draw.top, "the most likely tokens");
        assert_eq!(scored.targets.len(), all.len(), "all targets");
        assert_eq!(scored.targets[draw.id as usize], draw.logprob);
        let own = scored.targets[tokens[position] as usize];
        assert_eq!(scored.logprob, own, "the prompt's token");
    }
}

fn refused_weights_change_nothing<F: Forward>(mut bench: Bench<F>) {
    let vocab = bench.forward.limits().vocab;
    let params = SamplingParams::default();
    let mut before = bench.sequence(prompt(vocab, 9, 7));
    let expected = bench.next(&mut before, &params);
    let refused = bench.forward.load_weights(&Foreign);
    assert!(refused.is_err(), "weights of another model were taken");
    let mut after = bench.sequence(prompt(vocab, 9, 7));
    assert_eq!(
        bench.next(&mut after, &params),
        expected,
        "the old weights stay"
    );
}
