//! Log-probabilities of prompts: whole, in pieces, from a cache that has the keys and not the logits.

use super::*;
use crate::prompt_row;

/// The log-probabilities that a request asks for, from a pass over the whole prompt without any cache.
pub(super) fn expected(request: &GenerateRequest, weights: u64) -> Option<Vec<PromptLogprob>> {
    let asked = request.prompt_logprobs.as_ref()?;
    let prompt = &request.prompt;
    let score = |position: usize| {
        let logits = HashForward::logits_after(VOCAB, weights, &prompt[..position]);
        let row = PromptRow {
            row: 0,
            position,
            token: prompt[position],
            top: asked.top,
            targets: asked.targets_at(position),
        };
        prompt_row::score(&logits, VOCAB, &[row], None).remove(0)
    };
    let scored = asked.places(prompt.len()).map(score);
    Some(scored.collect::<Result<_, _>>().unwrap())
}

fn scored(id: u64, prompt: &[TokenId], asked: PromptLogprobs) -> GenerateRequest {
    GenerateRequest {
        prompt_logprobs: Some(asked),
        ..request(id, prompt, 3)
    }
}

fn last(n: u32) -> PromptLogprobs {
    PromptLogprobs {
        last: Some(n),
        ..PromptLogprobs::default()
    }
}

const PROMPT: [TokenId; 10] = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4];

#[test]
fn all_forms_are_those_of_a_plain_pass() {
    let targets: Vec<Vec<TokenId>> = (1..10).map(|i| (0..i % 3).collect()).collect();
    let forms = [
        PromptLogprobs::default(),
        last(1),
        last(4),
        last(100),
        PromptLogprobs {
            top: 3,
            ..PromptLogprobs::default()
        },
        PromptLogprobs {
            last: Some(5),
            top: 200,
            targets,
        },
    ];
    // The budget and the bound on logits cut the prompt in pieces.
    for (budget, rows) in [(64, 100), (3, 100), (64, 1), (64, 3), (4, 2)] {
        for asked in &forms {
            let mut core = core(32, config(4, budget));
            core.scheduler.prompt_rows = rows;
            let r = scored(1, &PROMPT, asked.clone());
            let answers = run(&mut core, std::slice::from_ref(&r));
            check_answer(&r, &answers[&1]);
            let found = answers[&1].prompt.as_ref().unwrap();
            let positions = found.iter().map(|p| p.position as usize);
            assert!(positions.eq(asked.places(PROMPT.len())));
            assert_eq!(core.status().prefill_tokens, 10, "no row twice");
        }
    }
    let single = scored(1, &[3], PromptLogprobs::default());
    let answers = run(&mut core(32, config(4, 16)), std::slice::from_ref(&single));
    assert_eq!(answers[&1].prompt.as_deref(), Some(&[][..]));
    check_answer(&single, &answers[&1]);
}

/// Keys that are cached are used up to the row before the first place; the rest is computed again.
#[test]
fn cached_rows_are_computed_again_where_their_logits_are_needed() {
    let mut core = core(64, config(4, 64));
    run(&mut core, &[request(1, &PROMPT, 1)]);
    assert_eq!(core.status().prefill_tokens, 10);
    let all = scored(2, &PROMPT, PromptLogprobs::default());
    let tail = scored(3, &PROMPT, last(3));
    for (r, computed, cached) in [(&all, 10, 0), (&tail, 4, 6)] {
        let before = core.status().prefill_tokens;
        let answers = run(&mut core, std::slice::from_ref(r));
        check_answer(r, &answers[&r.id.0]);
        assert_eq!(core.status().prefill_tokens - before, computed);
        let end = Ok((FinishReason::Length, cached));
        assert_eq!(answers[&r.id.0].ends[0], end);
    }
    // Nothing of it disturbs those that need no logits of the prompt.
    let plain = request(4, &PROMPT, 2);
    let answers = run(&mut core, std::slice::from_ref(&plain));
    check_answer(&plain, &answers[&4]);
    assert_eq!(answers[&4].ends[0], Ok((FinishReason::Length, 9)));
}

/// One that is scored computes its own rows; others of the same prompt draw from them.
#[test]
fn a_group_of_which_one_is_scored_computes_its_prompt_once() {
    let mut core = core(64, config(8, 64));
    let mut group = vec![scored(0, &PROMPT, PromptLogprobs::default())];
    group.extend((1..5).map(|id| request(id, &PROMPT, 3)));
    let answers = run(&mut core, &group);
    for (r, answer) in group.iter().zip(answers.values()) {
        check_answer(r, answer);
    }
    assert_eq!(core.status().prefill_tokens, 10);
}

#[test]
fn a_swap_before_the_first_token_starts_the_places_over() {
    for swap in [SwapPolicy::Recompute, SwapPolicy::Keep] {
        let config = SchedulerConfig {
            swap,
            ..config(4, 3)
        };
        let mut core = core(32, config);
        let r = scored(1, &PROMPT, PromptLogprobs::default());
        core.submit(r.clone(), None).unwrap();
        // Six of ten rows.
        (0..2).for_each(|_| core.step(&mut Vec::new()));
        core.load_weights(PolicyVersion(5), &HashWeights([5.0]))
            .unwrap();
        core.scheduler.check();
        let answers = drain(&mut core);
        assert_eq!(answers[&1].versions, [5, 5, 5]);
        check_answer(&r, &answers[&1]);
    }
}

#[test]
fn a_preempted_prompt_keeps_the_places_that_it_has() {
    // 6 blocks of 4: the better one grows into the blocks of the one that is scored row by row.
    let mut core = core(6, config(4, 16));
    core.scheduler.prompt_rows = 1;
    let mut better = request(2, &[6; 5], 14);
    better.priority = 1;
    let r = scored(1, &PROMPT, PromptLogprobs::default());
    let answers = run(&mut core, &[better.clone(), r.clone()]);
    check_answer(&better, &answers[&2]);
    check_answer(&r, &answers[&1]);
    assert!(core.status().preemptions > 0);
}
