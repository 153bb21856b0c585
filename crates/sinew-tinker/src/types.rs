//! Data of training requests, independent of the wire: datums with named tensors, the loss that is asked for,
//! and the outputs.

use crate::error::TinkerError;
use serde::{Deserialize, Serialize};
use sinew_types::TokenId;
use std::collections::BTreeMap;

/// One training example: input tokens, and the tensors that the loss reads.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Datum {
    /// Input of the model: its chunks of tokens one after the other.
    pub tokens: Vec<TokenId>,
    /// Inputs of the loss by name, such as `target_tokens`; the first axis is the position in `tokens`.
    pub inputs: BTreeMap<String, Tensor>,
}

/// A dense tensor of numbers, row after row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tensor {
    /// Length of each axis; empty for a scalar.
    pub shape: Vec<usize>,
    /// The numbers, as many as the product of `shape`.
    pub values: TensorValues,
}

/// Numbers of a tensor, in one of the two types of the protocol.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorValues {
    /// `float32`.
    F32(Vec<f32>),
    /// `int64`.
    I64(Vec<i64>),
}

impl TensorValues {
    /// The count of numbers.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::I64(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Name of the type on the wire.
    pub fn dtype(&self) -> &'static str {
        match self {
            Self::F32(_) => "float32",
            Self::I64(_) => "int64",
        }
    }
}

impl Tensor {
    /// A tensor whose shape fits its numbers; `field` is its path in the request, for the error.
    ///
    /// # Errors
    /// If the product of `shape` is not the number of values.
    pub fn new(field: &str, shape: Vec<usize>, values: TensorValues) -> Result<Self, TinkerError> {
        let size = shape
            .iter()
            .try_fold(1usize, |product, &axis| product.checked_mul(axis));
        if size != Some(values.len()) {
            return Err(TinkerError::value(
                format!("{field}.shape"),
                format!("{shape:?}"),
                format!("axes whose product is its {} values", values.len()),
            ));
        }
        Ok(Self { shape, values })
    }

    /// A vector of `float32`.
    pub fn floats(values: Vec<f32>) -> Self {
        Self {
            shape: vec![values.len()],
            values: TensorValues::F32(values),
        }
    }

    /// A vector of `int64`.
    pub fn integers(values: Vec<i64>) -> Self {
        Self {
            shape: vec![values.len()],
            values: TensorValues::I64(values),
        }
    }

    /// The count of numbers.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}

/// A loss by its name, with its configuration as it was sent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossRequest {
    /// `loss_fn`.
    pub name: String,
    /// `loss_fn_config`.
    pub config: BTreeMap<String, LossValue>,
}

/// One value of a loss's configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LossValue {
    /// A number.
    Number(f64),
    /// A text.
    Text(String),
}

/// Result of a `forward` or `forward_backward` request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FbOutput {
    /// `loss_fn_output_type`: the class name of the records.
    pub output_type: String,
    /// `loss_fn_outputs`: tensors by name, one record a datum, in the order of the request.
    pub outputs: Vec<BTreeMap<String, Tensor>>,
    /// Numbers of the whole request. The part of a name after its colon states how the SDK combines the
    /// values of the requests that it divided a batch into (`loss:sum`).
    pub metrics: BTreeMap<String, f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_that_does_not_fit_its_values_is_refused() {
        let values = TensorValues::F32(vec![1.0, 2.0, 3.0]);
        let error = Tensor::new("data[0].loss_fn_inputs.weights", vec![2, 2], values)
            .expect_err("3 values are not [2, 2]");
        assert_eq!(
            error.to_string(),
            "data[0].loss_fn_inputs.weights.shape is [2, 2], allowed: axes whose product is its 3 values"
        );
        let huge = Tensor::new("x", vec![usize::MAX, 2], TensorValues::I64(vec![]));
        assert!(huge.is_err(), "a product that overflows is not a size");
        let scalar = Tensor::new("x", vec![], TensorValues::F32(vec![0.5])).expect("a scalar");
        assert_eq!(scalar.len(), 1);
    }
}
