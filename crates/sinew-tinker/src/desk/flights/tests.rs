//! Requests of the engine, and results, without an engine.

use super::collect::Sequence;
use super::output::outcome;
use super::volley::{Drawn, draws, mains};
use crate::desk::flight_orders::{SampleTask, Source};
use crate::desk::residents::Embedded;
use crate::desk::rules::BaseRules;
use crate::desk::types::{
    Outcome, Reply, SampleInput, SampleOutput, SampleParams, Stop, StopReason,
};
use crate::{Tensor, TensorValues};
use sinew_types::{FinishReason, PolicyVersion, PromptLogprob, SampledToken};

fn rules() -> BaseRules {
    BaseRules {
        vocab: 50,
        context: 16,
        stop_ids: vec![2, 3],
        support: Embedded::support(),
        samples_adapters: true,
        samples_full: false,
    }
}

fn task(change: impl FnOnce(&mut SampleInput)) -> SampleTask {
    let mut input = SampleInput {
        prompt: vec![10, 11, 12],
        samples: 2,
        ..SampleInput::default()
    };
    change(&mut input);
    SampleTask {
        request: "r".into(),
        source: Source::Base,
        input,
        seed: 9,
    }
}

#[test]
fn sequences_have_seeds_of_their_own_and_the_first_scores_the_prompt() {
    let plain = mains(&task(|_| {}), None, &rules(), None);
    assert_eq!(plain.len(), 2);
    assert_ne!(plain[0].sampling.seed, plain[1].sampling.seed);
    assert_eq!(plain[0].sampling.stop_ids, [2, 3]);
    assert_eq!(
        (plain[0].sampling.max_tokens, plain[0].sampling.top_k),
        (13, 0)
    );
    assert!(
        plain
            .iter()
            .all(|request| request.prompt_logprobs.is_none())
    );
    let scored = task(|input| {
        input.prompt_logprobs = true;
        input.prompt_last = Some(1);
        input.params.stop = Stop::Tokens(vec![3, 7]);
        input.params.top_k = 5;
    });
    let scored = mains(&scored, None, &rules(), None);
    let asked = scored[0].prompt_logprobs.clone().unwrap();
    assert_eq!((asked.last, asked.targets.len()), (Some(1), 0));
    assert!(scored[1].prompt_logprobs.is_none());
    assert_eq!(scored[0].sampling.stop_ids, [2, 3, 7]);
    assert_eq!(scored[0].sampling.top_k, 5);
    let endless = task(|input| input.params.stop = Stop::Never);
    assert!(
        mains(&endless, None, &rules(), None)[0]
            .sampling
            .stop_ids
            .is_empty()
    );
    let single = task(|input| {
        input.prompt = vec![1];
        input.prompt_logprobs = true;
    });
    assert!(
        mains(&single, None, &rules(), None)[0]
            .prompt_logprobs
            .is_none()
    );
}

#[test]
fn targets_reach_back_to_the_first_place_that_has_some() {
    let ids = TensorValues::I64(vec![-1, -1, 7, -1]);
    let tensor = Tensor::new("t", vec![2, 2], ids).unwrap();
    let asked = task(|input| input.targets = Some(tensor));
    let asked = mains(&asked, None, &rules(), None)[0]
        .prompt_logprobs
        .clone();
    let asked = asked.unwrap();
    assert_eq!(asked.last, Some(1));
    assert_eq!(asked.targets, [vec![], vec![7]]);
    let drawing = task(|input| input.alternatives = 2);
    let requests = draws(&drawing, None);
    assert_eq!(requests.len(), 4);
    assert_eq!((requests[1].prompt.len(), requests[2].prompt.len()), (1, 2));
    let drawn = Drawn(vec![vec![4, 5], vec![6, 6]]);
    let asked = mains(&drawing, None, &rules(), Some(&drawn))[0]
        .prompt_logprobs
        .clone();
    let asked = asked.unwrap();
    assert_eq!((asked.last, asked.targets), (Some(2), drawn.0));
}

fn delivered(prompt: Vec<PromptLogprob>) -> Sequence {
    let token = |id: u32| SampledToken {
        id,
        logprob: -0.5,
        version: PolicyVersion(1),
        top: Vec::new(),
        choice: None,
    };
    Sequence {
        tokens: vec![token(8), token(2)],
        prompt,
        end: Some(Ok(FinishReason::StopId { id: 2 })),
        cached: 1,
    }
}

fn output(input: &SampleInput, sequence: Sequence, drawn: Option<&Drawn>) -> SampleOutput {
    match outcome(input, &[sequence], drawn) {
        Outcome::Value(Reply::Sample(output)) => *output,
        other => panic!("{other:?}"),
    }
}

#[test]
fn scores_go_to_their_places() {
    let ids = TensorValues::I64(vec![-1, 7, 9, -1]);
    let tensor = Tensor::new("t", vec![2, 2], ids).unwrap();
    let asked = task(|input| {
        input.prompt_logprobs = true;
        input.prompt_last = Some(1);
        input.targets = Some(tensor);
        input.alternatives = 1;
    });
    let place = |position: u32, targets: Vec<f32>| PromptLogprob {
        position,
        logprob: -(position as f32),
        top: Vec::new(),
        targets,
    };
    let scored = vec![place(1, vec![-7.0, -4.0]), place(2, vec![-9.0, -6.0])];
    let drawn = Drawn(vec![vec![4], vec![6]]);
    let found = output(&asked.input, delivered(scored), Some(&drawn));
    assert_eq!(found.prompt_logprobs, Some(vec![None, None, Some(-2.0)]));
    let targets = found.targets.unwrap();
    assert_eq!(
        targets.values,
        TensorValues::F32(vec![0.0, -7.0, -9.0, 0.0])
    );
    let drawn = found.alternatives.unwrap();
    assert_eq!(drawn.tokens.values, TensorValues::I64(vec![4, 6]));
    assert_eq!(drawn.logprobs.values, TensorValues::F32(vec![-4.0, -6.0]));
    assert_eq!(found.cached_prompt_tokens, 1);
}

#[test]
fn a_stop_token_is_part_of_a_sequence_and_no_tokens_are_none() {
    let plain = task(|_| {});
    let found = output(&plain.input, delivered(Vec::new()), None);
    let sequence = &found.sequences[0];
    assert_eq!(
        (&sequence.tokens, sequence.stop),
        (&vec![8, 2], StopReason::Stop)
    );
    assert_eq!(
        (&found.prompt_logprobs, &found.alternatives),
        (&None, &None)
    );
    let none = task(|input| {
        input.params = SampleParams {
            max_tokens: Some(0),
            ..SampleParams::default()
        };
    });
    let found = output(&none.input, delivered(Vec::new()), None);
    let sequence = &found.sequences[0];
    assert_eq!(
        (sequence.tokens.len(), sequence.stop),
        (0, StopReason::Length)
    );
}
