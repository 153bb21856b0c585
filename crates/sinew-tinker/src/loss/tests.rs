use super::*;
use crate::error::Category;
use crate::types::{Datum, Tensor, TensorValues};

const SPACE: Space = Space {
    vocab: 10,
    targets: 8,
};

fn request(name: &str, config: &[(&str, f64)]) -> LossRequest {
    let value = |&(key, number): &(&str, f64)| (key.to_owned(), LossValue::Number(number));
    LossRequest {
        name: name.to_owned(),
        config: config.iter().map(value).collect(),
    }
}

fn loss(name: &str, config: &[(&str, f64)]) -> Loss {
    Loss::parse(&request(name, config)).unwrap()
}

fn refusal(name: &str, config: &[(&str, f64)]) -> String {
    let error = Loss::parse(&request(name, config)).unwrap_err();
    assert_eq!(error.category(), Category::User);
    error.to_string()
}

/// Three positions with what every policy loss reads, and more.
fn datum(more: &[(&str, Tensor)]) -> Datum {
    let mut inputs = vec![
        ("target_tokens", Tensor::integers(vec![1, 2, 3])),
        ("logprobs", Tensor::floats(vec![0.0, -1.0, -2.0])),
        ("advantages", Tensor::floats(vec![0.0, 1.0, -1.0])),
    ];
    inputs.extend_from_slice(more);
    let owned = inputs.into_iter().map(|(name, t)| (name.to_owned(), t));
    Datum {
        tokens: vec![0, 1, 2],
        inputs: owned.collect(),
    }
}

fn columns(loss: &Loss, datum: &Datum) -> Result<Columns, TinkerError> {
    loss.columns(7, datum, SPACE)
}

fn bad(loss: &Loss, datum: &Datum) -> String {
    columns(loss, datum).unwrap_err().to_string()
}

#[test]
fn every_name_of_the_sdk_is_served_or_refused_with_its_reason() {
    for name in Loss::NAMES {
        let config: &[(&str, f64)] = if name == "dro" {
            &[("beta", 0.05)]
        } else {
            &[]
        };
        assert_eq!(loss(name, config).name(), name);
    }
    assert_eq!(Kind::ALL.map(Kind::name), Loss::NAMES);
    let text = refusal("stable_reinforce", &[("kl_coeff", 0.1)]);
    assert!(text.contains("not published"), "{text}");
    let text = refusal("custom", &[]);
    assert!(text.contains("custom_loss_server_side"), "{text}");
    let text = refusal("grpo", &[]);
    assert_eq!(
        text,
        "loss_fn is \"grpo\", allowed: one of cross_entropy, importance_sampling, ppo, cispo, dro, gspo"
    );
}

#[test]
fn configurations_are_checked() {
    let text = refusal("importance_sampling", &[("beta", 0.1)]);
    assert!(
        text.ends_with("is beta, allowed: no keys for importance_sampling"),
        "{text}"
    );
    let text = refusal("ppo", &[("eps", 0.1)]);
    assert!(
        text.contains("clip_low_threshold, clip_high_threshold"),
        "{text}"
    );
    assert!(refusal("dro", &[]).starts_with("loss_fn_config.beta is missing"));
    assert!(refusal("dro", &[("beta", -0.1)]).contains("0 or above"));
    assert!(refusal("dro", &[("beta", f64::NAN)]).contains("finite"));
    // A bound that crosses the default of the other one.
    assert!(refusal("ppo", &[("clip_low_threshold", 1.3)]).contains("which is 1.2"));
    let mut text = request("ppo", &[]);
    let value = LossValue::Text("wide".to_owned());
    text.config.insert("clip_high_threshold".to_owned(), value);
    let error = Loss::parse(&text).unwrap_err().to_string();
    assert!(
        error.starts_with("loss_fn_config.clip_high_threshold is \"wide\""),
        "{error}"
    );
}

#[test]
fn thresholds_are_ratios_by_default_by_configuration_or_by_position() {
    let bounds = |loss: &Loss, datum: &Datum| {
        let columns = columns(loss, datum).unwrap();
        let clip = columns.inputs(&[0.0; 3]).clip.unwrap();
        (clip.low.to_vec(), clip.high.to_vec())
    };
    let plain = datum(&[]);
    assert_eq!(
        bounds(&loss("ppo", &[]), &plain),
        (vec![0.8; 3], vec![1.2; 3])
    );
    assert_eq!(
        bounds(&loss("cispo", &[]), &plain),
        (vec![0.0; 3], vec![4.0; 3])
    );
    let wide = loss(
        "cispo",
        &[("clip_low_threshold", 0.5), ("clip_high_threshold", 8.0)],
    );
    assert_eq!(bounds(&wide, &plain), (vec![0.5; 3], vec![8.0; 3]));
    let highs = vec![1.1, 1.3, 1.5];
    let by_position = datum(&[(HIGH, Tensor::floats(highs.clone()))]);
    assert_eq!(
        bounds(&loss("ppo", &[]), &by_position),
        (vec![0.8; 3], highs)
    );
    let twice = loss("ppo", &[("clip_high_threshold", 1.4)]);
    assert!(bad(&twice, &by_position).contains("either it or loss_fn_config"));
    let crossed = datum(&[(HIGH, Tensor::floats(vec![1.1, 0.7, 1.5]))]);
    let text = bad(&loss("ppo", &[]), &crossed);
    assert!(
        text.contains("data[7].loss_fn_inputs.clip_low_threshold[1]"),
        "{text}"
    );
    // The mean ratio of a sequence has no documented bounds.
    let gspo = datum(&[("sequence_ratio_mask", Tensor::floats(vec![0.0, 1.0, 1.0]))]);
    let text = bad(&loss("gspo", &[("clip_low_threshold", 0.99)]), &gspo);
    assert!(
        text.starts_with("loss_fn_config.clip_high_threshold is missing"),
        "{text}"
    );
    let both = loss(
        "gspo",
        &[("clip_low_threshold", 0.99), ("clip_high_threshold", 1.01)],
    );
    let columns = columns(&both, &gspo).unwrap();
    let marks = columns.inputs(&[0.0; 3]).in_ratio.unwrap().to_vec();
    assert_eq!(marks, [false, true, true]);
}

#[test]
fn targets_are_positions_of_one_or_more_tokens() {
    let cross_entropy = loss("cross_entropy", &[]);
    let wide = Tensor {
        shape: vec![3, 2],
        values: TensorValues::I64(vec![1, 2, 3, 4, 5, 0]),
    };
    let mut two = Datum {
        tokens: vec![0, 1, 2],
        ..Datum::default()
    };
    two.inputs.insert("target_tokens".to_owned(), wide.clone());
    let read = columns(&cross_entropy, &two).unwrap();
    assert_eq!(read.shape, [3, 2]);
    let places: Vec<(u32, u32)> = read.targets.iter().map(|t| (t.after, t.token)).collect();
    assert_eq!(places, [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 0)]);
    // Without weights each target counts once.
    assert_eq!(read.inputs(&[0.0; 6]).weights, [1.0; 6]);
    let mut policy = datum(&[]);
    policy.inputs.insert("target_tokens".to_owned(), wide);
    let text = bad(&loss("ppo", &[]), &policy);
    assert!(
        text.contains("is [3, 2], allowed: [3] for 3 input tokens and ppo"),
        "{text}"
    );
    // Weights of another type are numbers all the same; of another shape they are refused.
    let weights = Tensor {
        shape: vec![3, 2],
        values: TensorValues::I64(vec![0, 1, 0, 1, 0, 2]),
    };
    two.inputs.insert("weights".to_owned(), weights);
    let read = columns(&cross_entropy, &two).unwrap();
    assert_eq!(
        read.inputs(&[0.0; 6]).weights,
        [0.0, 1.0, 0.0, 1.0, 0.0, 2.0]
    );
    two.inputs
        .insert("weights".to_owned(), Tensor::floats(vec![1.0; 3]));
    let text = bad(&cross_entropy, &two);
    assert!(
        text.contains("weights.shape is [3], allowed: [3, 2]"),
        "{text}"
    );
}

#[test]
fn inputs_that_a_loss_does_not_take_are_refused_by_path() {
    let importance = loss("importance_sampling", &[]);
    let masked = datum(&[("mask", Tensor::floats(vec![1.0; 3]))]);
    let text = bad(&importance, &masked);
    assert_eq!(
        text,
        "data[7].loss_fn_inputs is a tensor mask, allowed: target_tokens, logprobs, advantages for \
         importance_sampling"
    );
    let mut missing = datum(&[]);
    missing.inputs.remove("advantages");
    let text = bad(&importance, &missing);
    assert!(
        text.starts_with("data[7].loss_fn_inputs.advantages is missing"),
        "{text}"
    );
    let infinite = datum(&[(
        "logprobs",
        Tensor::floats(vec![0.0, f32::NEG_INFINITY, 0.0]),
    )]);
    assert!(bad(&importance, &infinite).contains("logprobs[1] is -inf"));
    for (tokens, part) in [
        (
            vec![1, 10, 2],
            "target_tokens[1] is 10, allowed: a token of the vocabulary, 0 to 9",
        ),
        (vec![1, 2, -100], "target_tokens[2] is -100"),
        (vec![1, 2], "target_tokens.shape is [2]"),
    ] {
        let other = datum(&[("target_tokens", Tensor::integers(tokens))]);
        let text = bad(&importance, &other);
        assert!(text.contains(part), "{text}");
    }
    let floats = datum(&[("target_tokens", Tensor::floats(vec![1.0; 3]))]);
    assert!(bad(&importance, &floats).contains("dtype is float32, allowed: int64"));
    let marks = datum(&[("sequence_ratio_mask", Tensor::floats(vec![0.0; 3]))]);
    let both = [("clip_low_threshold", 0.9), ("clip_high_threshold", 1.1)];
    let text = bad(&loss("gspo", &both), &marks);
    assert!(
        text.contains("sequence_ratio_mask is 0 at all positions"),
        "{text}"
    );
    let mut many = Datum {
        tokens: vec![0; 9],
        ..Datum::default()
    };
    many.inputs
        .insert("target_tokens".to_owned(), Tensor::integers(vec![0; 9]));
    let text = bad(&loss("cross_entropy", &[]), &many);
    assert!(text.contains("is 9, at most 8 is allowed"), "{text}");
}
