//! Checks of sample requests, with the names of the SDK.

use super::rules::BaseRules;
use super::types::{Refusal, SampleInput, Stop};
use crate::TensorValues;
use sinew_types::TEMPERATURES;
use std::fmt::Display;

/// Most sequences of a request.
const MAX_SAMPLES: u32 = 1024;
/// Most tokens that a request draws at the places of its prompt.
const MAX_DRAWS: usize = 4096;
/// Most likely tokens that a request may ask for at a place.
const MAX_TOP: u32 = 255;
/// Most ids that a request may score at a place of its prompt.
const MAX_TARGETS: usize = 4096;

fn require(field: &str, value: impl Display, allowed: &str, holds: bool) -> Result<(), Refusal> {
    if holds {
        return Ok(());
    }
    Err(Refusal::invalid(field, value, allowed))
}

/// Refuses what cannot be sampled.
///
/// # Errors
/// The first field that is out of its range.
pub(super) fn check_sample(input: &SampleInput, rules: &BaseRules) -> Result<(), Refusal> {
    let len = input.prompt.len();
    require("prompt", "[]", "at least one token", len > 0)?;
    let outside = |id: &&u32| **id as usize >= rules.vocab;
    if let Some(id) = input.prompt.iter().find(outside) {
        let allowed = format!("token ids below {}", rules.vocab);
        require("prompt", id, &allowed, false)?;
    }
    let samples = input.samples;
    let in_range = (1..=MAX_SAMPLES).contains(&samples);
    let allowed = format!("1 to {MAX_SAMPLES}");
    require("num_samples", samples, &allowed, in_range)?;
    check_length(input, rules)?;
    check_params(input, rules)?;
    for (field, value) in [
        ("topk_prompt_logprobs", input.top_prompt),
        ("topk_sample_logprobs", input.top_sample),
    ] {
        let allowed = format!("0 to {MAX_TOP}");
        require(field, value, &allowed, value <= MAX_TOP)?;
    }
    if let Some(last) = input.prompt_last {
        let field = "prompt_logprobs_last_n";
        let most = len.saturating_sub(1);
        let in_range = (1..=most).contains(&(last as usize));
        let allowed = format!("1 to {most}, the tokens of the prompt after the first");
        require(field, last, &allowed, in_range)?;
        let asked = input.prompt_logprobs || input.top_prompt > 0;
        require(field, last, "left out without prompt_logprobs", asked)?;
    }
    let draws = len.saturating_sub(1) * input.alternatives as usize;
    let allowed = format!("so many that (len(prompt) - 1) * k is at most {MAX_DRAWS}");
    require(
        "prompt_alt_tokens_k",
        input.alternatives,
        &allowed,
        draws <= MAX_DRAWS,
    )?;
    check_targets(input, rules)
}

/// Checks that prompt and output fit into the context.
fn check_length(input: &SampleInput, rules: &BaseRules) -> Result<(), Refusal> {
    let (len, context) = (input.prompt.len(), rules.context);
    let allowed = format!("fewer tokens than the context of {context}");
    require("prompt", format!("{len} tokens"), &allowed, len < context)?;
    let room = context - len;
    match input.params.max_tokens {
        Some(most) => require(
            "max_tokens",
            most,
            &format!("0 to {room}, what the prompt leaves of the context of {context}"),
            most as usize <= room,
        ),
        None => Ok(()),
    }
}

fn check_params(input: &SampleInput, rules: &BaseRules) -> Result<(), Refusal> {
    let params = &input.params;
    let heat = params.temperature;
    let allowed = format!("0, or {} to {}", TEMPERATURES.start(), TEMPERATURES.end());
    let holds = heat == 0.0 || TEMPERATURES.contains(&heat);
    require("temperature", heat, &allowed, holds)?;
    let mass = params.top_p;
    let holds = mass > 0.0 && mass <= 1.0;
    require("top_p", mass, "above 0, at most 1", holds)?;
    let top = params.top_k;
    let holds = top == -1 || (1..=i64::from(u32::MAX)).contains(&top);
    require("top_k", top, "-1 (all), or at least 1", holds)?;
    match &params.stop {
        Stop::Tokens(ids) => {
            let outside = ids.iter().find(|id| **id as usize >= rules.vocab);
            let allowed = format!("token ids below {}", rules.vocab);
            match outside {
                Some(id) => require("stop", id, &allowed, false),
                None => Ok(()),
            }
        }
        Stop::Texts(texts) => {
            let empty = texts.iter().any(String::is_empty);
            require("stop", "\"\"", "texts that are not empty", !empty)
        }
        Stop::Model | Stop::Never => Ok(()),
    }
}

/// Checks the ids to score: `[prompt - 1, K]`, -1 for none.
fn check_targets(input: &SampleInput, rules: &BaseRules) -> Result<(), Refusal> {
    let Some(targets) = &input.targets else {
        return Ok(());
    };
    let field = "target_prompt_logprobs";
    let places = input.prompt.len() - 1;
    let shape = format!("{:?}", targets.shape);
    let allowed = format!("[{places}, K]: one row for each token of the prompt after the first");
    let fits = matches!(targets.shape.as_slice(), [rows, _] if *rows == places);
    require(field, shape, &allowed, fits)?;
    let TensorValues::I64(ids) = &targets.values else {
        return require(field, targets.values.dtype(), "int64", false);
    };
    let allowed = format!("token ids below {}, or -1", rules.vocab);
    let known = |id: &i64| *id == -1 || usize::try_from(*id).is_ok_and(|id| id < rules.vocab);
    if let Some(id) = ids.iter().find(|id| !known(id)) {
        require(field, id, &allowed, false)?;
    }
    let columns = targets.shape.last().copied().unwrap_or(0);
    let rows = ids.chunks(columns.max(1));
    let most = rows
        .map(|row| row.iter().filter(|id| **id >= 0).count())
        .max();
    let most = most.unwrap_or(0);
    let allowed = format!("at most {MAX_TARGETS} ids at a place");
    require(field, most, &allowed, most <= MAX_TARGETS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tensor;
    use crate::desk::residents::{LoraSupport, TrainerSupport};
    use crate::desk::types::SampleParams;

    fn rules() -> BaseRules {
        BaseRules {
            vocab: 10,
            context: 8,
            stop_ids: vec![0],
            support: TrainerSupport {
                lora: LoraSupport::Any,
                full: true,
                switches: false,
            },
            samples_adapters: true,
            samples_full: true,
        }
    }

    fn input() -> SampleInput {
        SampleInput {
            prompt: vec![1, 2, 3],
            samples: 1,
            ..SampleInput::default()
        }
    }

    fn refused(change: impl FnOnce(&mut SampleInput)) -> String {
        let mut wrong = input();
        change(&mut wrong);
        match check_sample(&wrong, &rules()) {
            Err(Refusal::Invalid { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn fields_are_refused_by_their_names() {
        check_sample(&input(), &rules()).unwrap();
        assert_eq!(refused(|i| i.prompt.clear()), "prompt");
        assert_eq!(refused(|i| i.prompt[1] = 10), "prompt");
        assert_eq!(refused(|i| i.prompt = vec![1; 8]), "prompt");
        assert_eq!(refused(|i| i.samples = 0), "num_samples");
        assert_eq!(refused(|i| i.params.max_tokens = Some(6)), "max_tokens");
        assert_eq!(refused(|i| i.params.temperature = -1.0), "temperature");
        assert_eq!(refused(|i| i.params.temperature = f32::NAN), "temperature");
        assert_eq!(refused(|i| i.params.top_p = 0.0), "top_p");
        assert_eq!(refused(|i| i.params.top_k = 0), "top_k");
        assert_eq!(refused(|i| i.params.stop = Stop::Tokens(vec![10])), "stop");
        assert_eq!(refused(|i| i.top_prompt = 256), "topk_prompt_logprobs");
        assert_eq!(
            refused(|i| i.prompt_last = Some(1)),
            "prompt_logprobs_last_n"
        );
        assert_eq!(refused(|i| i.alternatives = 3000), "prompt_alt_tokens_k");
    }

    #[test]
    fn targets_have_a_row_for_each_token_after_the_first() {
        let field = "target_prompt_logprobs";
        let tensor = |rows: usize, ids: Vec<i64>| {
            let columns = ids.len() / rows;
            Tensor::new("t", vec![rows, columns], TensorValues::I64(ids)).unwrap()
        };
        let mut right = input();
        right.targets = Some(tensor(2, vec![4, -1, 5, 6]));
        right.params = SampleParams {
            temperature: 0.0,
            max_tokens: Some(5),
            ..SampleParams::default()
        };
        check_sample(&right, &rules()).unwrap();
        assert_eq!(refused(|i| i.targets = Some(tensor(1, vec![4]))), field);
        assert_eq!(refused(|i| i.targets = Some(tensor(2, vec![4, 11]))), field);
        assert_eq!(refused(|i| i.targets = Some(tensor(2, vec![4, -2]))), field);
        let floats = Tensor::new("t", vec![2, 1], TensorValues::F32(vec![1.0, 2.0])).unwrap();
        assert_eq!(refused(|i| i.targets = Some(floats)), field);
    }
}
