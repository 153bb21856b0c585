//! Surrogates by PyTorch's gradients: importance ratio, DRO, GSPO-token, and bounds of the clip by token.

use super::{clip, close};
use crate::loss::{ClipBounds, LossError, LossSpecError, RowInputs, row_loss, validate_spec};
use serde::Deserialize;
use sinew_types::{LossSpec, Surrogate};

#[derive(Deserialize)]
struct Row {
    weights: Vec<f32>,
    advantages: Vec<f32>,
    behaviour: Vec<f32>,
    logprobs: Vec<f32>,
    clip_low: Vec<f32>,
    clip_high: Vec<f32>,
    in_ratio: Vec<bool>,
}

#[derive(Deserialize)]
struct Expected {
    loss: f64,
    d_logprob: Vec<f64>,
}

#[derive(Deserialize)]
struct Case {
    surrogate: Surrogate,
    by_token: bool,
    marked: bool,
    rows: Vec<Expected>,
}

#[derive(Deserialize)]
struct Golden {
    rows: Vec<Row>,
    cases: Vec<Case>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../../../tests/golden/surrogates.json")).unwrap()
}

impl Row {
    fn inputs<'a>(&'a self, entropies: &'a [f32], by_token: bool, marked: bool) -> RowInputs<'a> {
        RowInputs {
            weights: &self.weights,
            advantages: &self.advantages,
            behaviour: &self.behaviour,
            prox: None,
            reference: None,
            logprobs: &self.logprobs,
            entropies,
            clip: by_token.then_some(ClipBounds {
                low: &self.clip_low,
                high: &self.clip_high,
            }),
            in_ratio: marked.then_some(&self.in_ratio[..]),
        }
    }
}

#[test]
fn surrogates_match_autograd() {
    let golden = golden();
    assert_eq!((golden.rows.len(), golden.cases.len()), (3, 11));
    for case in &golden.cases {
        let spec = LossSpec::new(case.surrogate.clone());
        validate_spec(&spec).unwrap();
        let name = format!(
            "{:?}, by token {}, marked {}",
            case.surrogate, case.by_token, case.marked
        );
        for (row, expected) in golden.rows.iter().zip(&case.rows) {
            let entropies = vec![0.0; row.weights.len()];
            let inputs = row.inputs(&entropies, case.by_token, case.marked);
            let got = row_loss(&spec, &inputs).unwrap();
            assert!(
                close(got.loss, expected.loss, 1e-7),
                "{name}: {} {}",
                got.loss,
                expected.loss
            );
            for (t, (&g, &e)) in got.d_logprob.iter().zip(&expected.d_logprob).enumerate() {
                assert!(close(f64::from(g), e, 1e-6), "{name}: [{t}] {g} {e}");
            }
        }
    }
}

/// GSPO-token by hand: two tokens with ratios e^0.3 and e^−0.1, so that `s = e^0.1`, and advantages 1 and −2.
/// With the bounds 0.9 and 1.05 the first token is clipped, and the second one is not.
#[test]
fn a_sequence_s_ratio_gives_each_token_its_own_gradient() {
    let surrogate = Surrogate::SequenceTokenClip {
        low: 0.1,
        high: 0.05,
    };
    let row = RowInputs {
        weights: &[1.0, 1.0],
        advantages: &[1.0, -2.0],
        behaviour: &[-1.3, -0.9],
        prox: None,
        reference: None,
        logprobs: &[-1.0, -1.0],
        entropies: &[0.0, 0.0],
        clip: None,
        in_ratio: None,
    };
    let got = row_loss(&LossSpec::new(surrogate), &row).unwrap();
    let s = 0.1f64.exp();
    assert!(close(got.loss, -1.05 + 2.0 * s, 1e-6), "{}", got.loss);
    assert_eq!(got.d_logprob[0], 0.0);
    assert!(close(f64::from(got.d_logprob[1]), 2.0 * s, 1e-6));
    let metrics = got.sums.finish();
    assert!(close(metrics.ratio_mean.unwrap(), s, 1e-6), "one ratio");
    assert!(close(metrics.clip_fraction, 0.5, 1e-9));
}

fn bounded<'a>(row: RowInputs<'a>, low: &'a [f32], high: &'a [f32]) -> RowInputs<'a> {
    RowInputs {
        clip: Some(ClipBounds { low, high }),
        ..row
    }
}

#[test]
fn bounds_and_marks_that_do_not_fit_are_refused() {
    let golden = golden();
    let row = &golden.rows[0];
    let entropies = vec![0.0; row.weights.len()];
    let inputs = row.inputs(&entropies, true, true);
    let clip = LossSpec::new(clip(0.2, 0.2, None));
    let mut low = row.clip_low.clone();
    low[1] = 2.0;
    let refused = |inputs: &RowInputs<'_>| row_loss(&clip, inputs).unwrap_err();
    assert!(matches!(
        refused(&bounded(inputs, &low, &row.clip_high)),
        LossError::ClipOrder { index: 1, .. }
    ));
    // Token 0 has no weight, so nothing of it is read.
    low[1] = 0.5;
    low[0] = 9.0;
    row_loss(&clip, &bounded(inputs, &low, &row.clip_high)).unwrap();
    assert!(matches!(
        refused(&bounded(inputs, &low[1..], &row.clip_high)),
        LossError::Length {
            field: "clip_low",
            ..
        }
    ));
    let marks = RowInputs {
        in_ratio: Some(&row.in_ratio[1..]),
        ..inputs
    };
    assert!(matches!(
        refused(&marks),
        LossError::Length {
            field: "in_ratio",
            ..
        }
    ));
    let dro = LossSpec::new(Surrogate::Dro { beta: -0.1 });
    assert!(matches!(
        validate_spec(&dro),
        Err(LossSpecError::Value {
            field: "surrogate.beta",
            ..
        })
    ));
}
