//! Datums to micro-batches, a loss to gradients, log-probabilities to outputs.

use crate::error::TinkerError;
use crate::loss::{Columns, Loss, Space};
use crate::types::{Datum, FbOutput, Tensor, TensorValues};
use sinew_train::loss::row_loss;
use sinew_train::pack::TargetRow;
use sinew_train::{Policy, TargetError, run_targets};
use std::collections::BTreeMap;

/// Class name of the output records, as the hosted service has it.
const OUTPUT_TYPE: &str = "ArrayRecord";

/// Sizes that a request has to fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Maximum input tokens of a datum: the context of the model.
    pub context: usize,
    /// Maximum packed tokens of one pass. A datum is never divided, so it is a maximum of its tokens, too.
    pub micro_batch_tokens: usize,
    /// Maximum targets of a datum; each one takes the memory of a hidden state.
    pub targets: usize,
}

/// Computes the outputs of datums, and with `backward` adds gradients to those of the policy.
///
/// The outputs are `logprobs` of each datum in the shape of its `target_tokens`, and the metric `loss:sum`.
/// All inputs are checked before anything is computed. Prefixes that datums share are computed once if the
/// policy shares them; the result does not depend on it beyond the rounding of `f32`.
///
/// # Errors
/// The caller's: inputs that the loss does not take, or that do not fit the limits; nothing was computed. The
/// server's: the policy failed. Gradients may then be those of some of the datums, and have to be zeroed.
pub fn forward_backward(
    policy: &mut dyn Policy,
    data: &[Datum],
    loss: &Loss,
    backward: bool,
    limits: &BatchLimits,
) -> Result<FbOutput, TinkerError> {
    let columns = columns(data, loss, limits)?;
    let rows: Vec<TargetRow<'_>> = data
        .iter()
        .zip(&columns)
        .map(|(datum, columns)| TargetRow {
            tokens: &datum.tokens,
            targets: &columns.targets,
        })
        .collect();
    let spec = loss.spec();
    let mut logprobs: Vec<Vec<f32>> = vec![Vec::new(); data.len()];
    let mut losses = vec![0.0; data.len()];
    run_targets(
        policy,
        &rows,
        limits.micro_batch_tokens,
        backward,
        |row, found| {
            let result = row_loss(&spec, &columns[row].inputs(found))?;
            losses[row] = result.loss;
            logprobs[row] = found.to_vec();
            Ok(result.d_logprob)
        },
    )
    .map_err(failed)?;
    let outputs = columns.into_iter().zip(logprobs).map(|(columns, values)| {
        let tensor = Tensor {
            shape: columns.shape,
            values: TensorValues::F32(values),
        };
        BTreeMap::from([("logprobs".to_owned(), tensor)])
    });
    Ok(FbOutput {
        output_type: OUTPUT_TYPE.to_owned(),
        outputs: outputs.collect(),
        metrics: BTreeMap::from([("loss:sum".to_owned(), losses.iter().sum::<f64>())]),
    })
}

/// Checks all datums and reads their inputs.
fn columns(data: &[Datum], loss: &Loss, limits: &BatchLimits) -> Result<Vec<Columns>, TinkerError> {
    if data.is_empty() {
        return Err(TinkerError::value("data", "[]", "at least one datum"));
    }
    let space = Space {
        vocab: limits.vocab,
        targets: limits.targets,
    };
    let of = |(index, datum): (usize, &Datum)| {
        check_tokens(index, datum, limits)?;
        loss.columns(index, datum, space)
    };
    data.iter().enumerate().map(of).collect()
}

/// Refuses an input that is empty, too long, or has a token outside the vocabulary.
fn check_tokens(index: usize, datum: &Datum, limits: &BatchLimits) -> Result<(), TinkerError> {
    let field = format!("data[{index}].model_input");
    let n = datum.tokens.len();
    if n == 0 {
        return Err(TinkerError::value(field, "empty", "at least one token"));
    }
    let (limit, what) = if limits.context <= limits.micro_batch_tokens {
        (limits.context, "the context of the model")
    } else {
        (limits.micro_batch_tokens, "the tokens of one pass")
    };
    if n > limit {
        return Err(TinkerError::Limit {
            what: format!("the length of {field}"),
            value: n as u64,
            limit: limit as u64,
            hint: format!("that is {what}; shorten the datum"),
        });
    }
    let outside = |&token: &u32| token as usize >= limits.vocab;
    match datum.tokens.iter().position(outside) {
        None => Ok(()),
        Some(at) => Err(TinkerError::value(
            format!("{field}[{at}]"),
            datum.tokens[at],
            format!(
                "a token of the vocabulary, 0 to {}",
                limits.vocab.saturating_sub(1)
            ),
        )),
    }
}

/// Inputs were checked before, so a failure is not the caller's.
fn failed(error: TargetError) -> TinkerError {
    match error {
        TargetError::Policy(error) => TinkerError::Policy(error),
        TargetError::Loss { row, error } => TinkerError::Internal(format!("data[{row}]: {error}")),
        TargetError::NotFinite { row, index, value } => TinkerError::Internal(format!(
            "data[{row}]: the log-probability of target {index} is {value}; load a state from before the \
             weights became infinite"
        )),
        TargetError::Pack(error) => TinkerError::Internal(error.to_string()),
    }
}
