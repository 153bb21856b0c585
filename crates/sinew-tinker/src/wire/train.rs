//! Bodies of `forward_backward` and their results, in protobuf and in JSON.
//!
//! The SDK sends and reads protobuf; JSON is for other programs, and for older SDKs.

use super::proto::{self, ArrayRecord, BatchedTensor, ChunkKind, LossConfig};
use super::tensor::{self, Budget, JsonTensor};
use crate::error::TinkerError;
use crate::types::{Datum, FbOutput, LossRequest, LossValue, Tensor};
use bytes::{Bytes, BytesMut};
use prost::Message;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sinew_types::TokenId;
use std::collections::BTreeMap;

/// Bounds of the bodies that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireLimits {
    /// Datums of one request.
    pub datums: usize,
    /// Numbers of all tensors of one request, sparse ones counted as dense.
    pub tensor_values: u64,
}

impl Default for WireLimits {
    fn default() -> Self {
        Self {
            datums: 1024,
            tensor_values: 64 << 20,
        }
    }
}

/// A `forward` or `forward_backward` request.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainRequest {
    /// Model.
    pub model: String,
    /// Place among the commands of the model, from 1.
    pub seq: u64,
    /// Sequences with the inputs of the loss.
    pub data: Vec<Datum>,
    /// The loss.
    pub loss: LossRequest,
    /// Whether the gradients stay as they are.
    pub forward_only: bool,
}

/// Reads a request in protobuf.
///
/// # Errors
/// If the bytes are not such a message, or a field has a value that is not allowed.
pub fn read_train_request(body: Bytes, limits: &WireLimits) -> Result<TrainRequest, TinkerError> {
    let sent = proto::ForwardBackwardRequest::decode(body);
    let sent = sent.map_err(|error| {
        TinkerError::value("the body", error, "a ForwardBackwardRequest in protobuf")
    })?;
    check_count(sent.data.len(), limits)?;
    let mut budget = Budget::new(limits.tensor_values);
    let mut data = Vec::with_capacity(sent.data.len());
    for (at, datum) in sent.data.into_iter().enumerate() {
        data.push(proto_datum(at, datum, &mut budget)?);
    }
    let config = if sent.loss_fn_config_v2.is_empty() {
        let numbers = sent.loss_fn_config.into_iter();
        numbers
            .map(|(name, value)| (name, LossValue::Number(value)))
            .collect()
    } else {
        proto_config(sent.loss_fn_config_v2)?
    };
    Ok(TrainRequest {
        model: sent.model_id,
        seq: checked_seq(i64::from(sent.seq_id))?,
        data,
        loss: LossRequest {
            name: sent.loss_fn,
            config,
        },
        forward_only: sent.forward_only,
    })
}

fn check_count(datums: usize, limits: &WireLimits) -> Result<(), TinkerError> {
    if datums > limits.datums {
        return Err(TinkerError::Limit {
            what: "the number of datums".into(),
            value: datums as u64,
            limit: limits.datums as u64,
            hint: "divide the batch; the SDK does so by fwdbwd_max_chunk_len of client/config"
                .into(),
        });
    }
    Ok(())
}

/// Place of a command: commands of a model are counted from 1.
pub(crate) fn checked_seq(seq: i64) -> Result<u64, TinkerError> {
    let allowed = "1 or more: the commands of a model are counted from 1";
    let seq = u64::try_from(seq).ok().filter(|&seq| seq >= 1);
    seq.ok_or_else(|| TinkerError::value("seq_id", "0 or less", allowed))
}

fn proto_config(
    sent: BTreeMap<String, proto::LossConfigValue>,
) -> Result<BTreeMap<String, LossValue>, TinkerError> {
    let value = |(name, value): (String, proto::LossConfigValue)| match value.value {
        Some(LossConfig::Number(number)) => Ok((name, LossValue::Number(number))),
        Some(LossConfig::Text(text)) => Ok((name, LossValue::Text(text))),
        None => {
            let field = format!("loss_fn_config.{name}");
            Err(TinkerError::missing(field, "send a number or a text"))
        }
    };
    sent.into_iter().map(value).collect()
}

fn proto_datum(at: usize, sent: proto::Datum, budget: &mut Budget) -> Result<Datum, TinkerError> {
    let mut tokens = Vec::new();
    for (place, chunk) in sent.model_input.into_iter().enumerate() {
        let field = format!("data[{at}].model_input.chunks[{place}]");
        match chunk.chunk {
            Some(ChunkKind::EncodedText(text)) => read_tokens(&field, &text.tokens, &mut tokens)?,
            Some(ChunkKind::Image(_)) => return Err(refused_chunk(&field, "image")),
            Some(ChunkKind::Dmel(_)) => return Err(refused_chunk(&field, "dmel (audio)")),
            None => return Err(refused_chunk(&field, "this kind")),
        }
    }
    let mut inputs = BTreeMap::new();
    for (name, sent) in &sent.loss_fn_inputs {
        let field = format!("data[{at}].loss_fn_inputs.{name}");
        let tensor = tensor::from_proto(&field, sent)?.dense(&field, 0, budget)?;
        inputs.insert(name.clone(), tensor);
    }
    Ok(Datum { tokens, inputs })
}

/// Adds the tokens of a chunk, `int32` each.
pub(crate) fn read_tokens(
    field: &str,
    bytes: &[u8],
    tokens: &mut Vec<TokenId>,
) -> Result<(), TinkerError> {
    let (pieces, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        let value = format!("{} bytes", bytes.len());
        let allowed = "a multiple of 4 bytes: int32 token ids";
        return Err(TinkerError::value(
            format!("{field}.tokens"),
            value,
            allowed,
        ));
    }
    tokens.reserve(pieces.len());
    for piece in pieces {
        let id = i64::from(i32::from_le_bytes(*piece));
        tokens.push(checked_token(&format!("{field}.tokens"), id)?);
    }
    Ok(())
}

/// A token id that is not negative and has at most 31 bits.
pub(crate) fn checked_token(field: &str, id: i64) -> Result<TokenId, TinkerError> {
    let id = i32::try_from(id).ok().and_then(|id| u32::try_from(id).ok());
    id.ok_or_else(|| TinkerError::value(field, "a negative or huge id", "token ids of the model"))
}

/// The refusal of input that is not text.
pub(crate) fn refused_chunk(field: &str, kind: &str) -> TinkerError {
    TinkerError::not_served(
        format!("{field}: input of type {kind}"),
        "models of this server read text tokens only: send encoded_text",
    )
}

/// A chunk of a model's input in JSON.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum JsonChunk {
    /// Tokens of text.
    EncodedText {
        /// Token ids.
        tokens: Vec<i64>,
    },
    /// An image; refused.
    Image {},
    /// An image elsewhere; refused.
    ImageAssetPointer {},
    /// Audio; refused.
    Dmel {},
}

/// A model's input in JSON.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JsonInput {
    chunks: Vec<JsonChunk>,
}

impl JsonInput {
    /// Its tokens.
    ///
    /// # Errors
    /// If a chunk is not text, or a token id is not one.
    pub(crate) fn tokens(self, field: &str) -> Result<Vec<TokenId>, TinkerError> {
        let mut tokens = Vec::new();
        for (place, chunk) in self.chunks.into_iter().enumerate() {
            let field = format!("{field}.chunks[{place}]");
            match chunk {
                JsonChunk::EncodedText { tokens: ids } => {
                    let field = format!("{field}.tokens");
                    tokens.reserve(ids.len());
                    for id in ids {
                        tokens.push(checked_token(&field, id)?);
                    }
                }
                JsonChunk::Image {} => return Err(refused_chunk(&field, "image")),
                JsonChunk::ImageAssetPointer {} => {
                    return Err(refused_chunk(&field, "image_asset_pointer"));
                }
                JsonChunk::Dmel {} => return Err(refused_chunk(&field, "dmel (audio)")),
            }
        }
        Ok(tokens)
    }
}

/// One training example in JSON.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonDatum {
    model_input: JsonInput,
    #[serde(default)]
    loss_fn_inputs: BTreeMap<String, JsonTensor>,
    /// Origins of tokens: kept by no loss that this server has.
    #[serde(default)]
    #[expect(dead_code, reason = "accepted, and read by no loss")]
    model_input_spans: Option<Value>,
    #[serde(default)]
    #[expect(dead_code, reason = "accepted, and read by no loss")]
    loss_fn_input_spans: Option<Value>,
}

/// Data and loss in JSON.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonBatch {
    data: Vec<JsonDatum>,
    loss_fn: String,
    #[serde(default)]
    loss_fn_config: Option<BTreeMap<String, LossValue>>,
}

/// The body in JSON. Older SDKs name the batch of `forward` otherwise.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonTrain {
    #[serde(alias = "forward_input")]
    forward_backward_input: JsonBatch,
    model_id: String,
    seq_id: i64,
    #[serde(default)]
    forward_only: bool,
    #[serde(default, rename = "type")]
    #[expect(dead_code, reason = "the path names the request")]
    kind: Option<String>,
}

/// Reads a request in JSON. `forward_only` is set by the path `forward`.
pub(crate) fn read_train_json(
    body: &[u8],
    forward_only: bool,
    limits: &WireLimits,
) -> Result<TrainRequest, TinkerError> {
    let sent: JsonTrain = super::json(body)?;
    let batch = sent.forward_backward_input;
    check_count(batch.data.len(), limits)?;
    let mut budget = Budget::new(limits.tensor_values);
    let mut data = Vec::with_capacity(batch.data.len());
    for (at, datum) in batch.data.into_iter().enumerate() {
        let tokens = datum
            .model_input
            .tokens(&format!("data[{at}].model_input"))?;
        let mut inputs = BTreeMap::new();
        for (name, sent) in datum.loss_fn_inputs {
            let field = format!("data[{at}].loss_fn_inputs.{name}");
            let tensor = sent.read(&field)?.dense(&field, 0, &mut budget)?;
            inputs.insert(name, tensor);
        }
        data.push(Datum { tokens, inputs });
    }
    Ok(TrainRequest {
        model: sent.model_id,
        seq: checked_seq(sent.seq_id)?,
        data,
        loss: LossRequest {
            name: batch.loss_fn,
            config: batch.loss_fn_config.unwrap_or_default(),
        },
        forward_only: forward_only || sent.forward_only,
    })
}

/// A result in protobuf.
///
/// # Errors
/// If the records of two datums have other names, which the message cannot hold.
pub fn write_train_output(output: &FbOutput) -> Result<Bytes, TinkerError> {
    let names = |record: &BTreeMap<String, Tensor>| record.keys().cloned().collect::<Vec<_>>();
    let first = output.outputs.first().map(names).unwrap_or_default();
    if output.outputs.iter().any(|record| names(record) != first) {
        let text = "the outputs of two datums have other names: a defect of the loss";
        return Err(TinkerError::Internal(text.into()));
    }
    let alike = |a: &BTreeMap<String, Tensor>, b: &BTreeMap<String, Tensor>| {
        let mut pairs = a.values().zip(b.values());
        pairs.all(|(a, b)| {
            tensor::proto_dtype(&a.values) == tensor::proto_dtype(&b.values)
                && trailing(a) == trailing(b)
        })
    };
    let records = output.outputs.chunk_by(alike);
    let message = proto::ForwardBackwardOutput {
        loss_fn_output_type: output.output_type.clone(),
        loss_fn_outputs: records
            .map(|run| record(&output.output_type, run))
            .collect(),
        metrics: output.metrics.clone(),
    };
    Ok(message.encode_to_vec().into())
}

/// Axes after the first.
fn trailing(tensor: &Tensor) -> &[usize] {
    tensor.shape.get(1..).unwrap_or_default()
}

/// Outputs of datums that agree in all but the length of the first axis, at least one.
fn record(kind: &str, run: &[BTreeMap<String, Tensor>]) -> ArrayRecord {
    let field = |(name, first): (&String, &Tensor)| {
        let (mut data, mut offsets) = (BytesMut::new(), vec![0]);
        for datum in run {
            if let Some(tensor) = datum.get(name) {
                data.extend_from_slice(&tensor::value_bytes(&tensor.values));
            }
            offsets.push(data.len() as i64);
        }
        let batched = BatchedTensor {
            data: data.freeze(),
            offsets: tensor::integer_bytes(offsets.into_iter()),
            dtype: tensor::proto_dtype(&first.values),
            trailing_shape: trailing(first).iter().map(|&axis| axis as i64).collect(),
        };
        (name.clone(), batched)
    };
    ArrayRecord {
        type_tag: kind.to_owned(),
        fields: run.first().into_iter().flatten().map(field).collect(),
        num_datums: run.len() as i64,
    }
}

/// A result in JSON.
pub(crate) fn train_output_json(output: &FbOutput) -> Value {
    let record = |record: &BTreeMap<String, Tensor>| {
        let fields = record
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor_json(tensor)));
        Value::Object(fields.collect::<Map<_, _>>())
    };
    json!({
        "loss_fn_output_type": output.output_type,
        "loss_fn_outputs": output.outputs.iter().map(record).collect::<Vec<_>>(),
        "metrics": metrics_json(&output.metrics),
    })
}

/// Numbers by name in JSON, which has no number that is not finite: those are texts, which the SDK reads as
/// numbers.
pub(crate) fn metrics_json(metrics: &BTreeMap<String, f64>) -> Value {
    let number = |(name, &value): (&String, &f64)| {
        let value = if value.is_finite() {
            json!(value)
        } else {
            json!(value.to_string())
        };
        (name.clone(), value)
    };
    Value::Object(metrics.iter().map(number).collect())
}

/// A dense tensor in JSON.
pub(crate) fn tensor_json(tensor: &Tensor) -> Value {
    let data = match &tensor.values {
        crate::types::TensorValues::F32(values) => json!(values),
        crate::types::TensorValues::I64(values) => json!(values),
    };
    json!({"data": data, "dtype": tensor.values.dtype(), "shape": tensor.shape})
}
