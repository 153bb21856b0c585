//! Messages of the protocol in protobuf, with the field numbers of the SDK 0.38 (`tinker_public_pb2`).
//!
//! Numbers of tensors are little-endian bytes. Maps are sorted by name, so that equal messages have equal
//! bytes. Fields that a later SDK adds are skipped.

use bytes::Bytes;
use prost::{Message, Oneof};
use std::collections::BTreeMap;

/// `DType`: 32-bit floating point.
pub(crate) const FLOAT32: i32 = 1;
/// `DType`: 64-bit integer.
pub(crate) const INT64: i32 = 2;
/// `DType`: 32-bit integer.
pub(crate) const INT32: i32 = 3;
/// `DType`: upper half of a 32-bit floating point number.
pub(crate) const BFLOAT16: i32 = 4;

/// `StopReason`: a stop token or a stop string was sampled.
pub(crate) const STOP: i32 = 0;
/// `StopReason`: the maximum number of tokens was sampled.
pub(crate) const LENGTH: i32 = 1;

/// Body of `forward_backward`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ForwardBackwardRequest {
    #[prost(string, tag = "1")]
    pub(crate) model_id: String,
    #[prost(int32, tag = "2")]
    pub(crate) seq_id: i32,
    #[prost(message, repeated, tag = "3")]
    pub(crate) data: Vec<Datum>,
    #[prost(string, tag = "4")]
    pub(crate) loss_fn: String,
    /// Numbers only; SDKs that send `loss_fn_config_v2` repeat them here.
    #[prost(btree_map = "string, double", tag = "5")]
    pub(crate) loss_fn_config: BTreeMap<String, f64>,
    #[prost(bool, tag = "6")]
    pub(crate) forward_only: bool,
    #[prost(btree_map = "string, message", tag = "7")]
    pub(crate) loss_fn_config_v2: BTreeMap<String, LossConfigValue>,
}

/// The first fields of a [`ForwardBackwardRequest`], which name its place; the others are skipped.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Place {
    #[prost(string, tag = "1")]
    pub(crate) model_id: String,
    #[prost(int32, tag = "2")]
    pub(crate) seq_id: i32,
}

/// One value of a loss's configuration.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct LossConfigValue {
    #[prost(oneof = "LossConfig", tags = "1, 2")]
    pub(crate) value: Option<LossConfig>,
}

/// The two forms of a [`LossConfigValue`].
#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum LossConfig {
    #[prost(double, tag = "1")]
    Number(f64),
    #[prost(string, tag = "2")]
    Text(String),
}

/// One training example.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Datum {
    #[prost(message, repeated, tag = "1")]
    pub(crate) model_input: Vec<Chunk>,
    #[prost(btree_map = "string, message", tag = "2")]
    pub(crate) loss_fn_inputs: BTreeMap<String, Tensor>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) model_input_spans: Vec<ProvenanceSpan>,
    #[prost(message, repeated, tag = "4")]
    pub(crate) loss_fn_input_spans: Vec<ProvenanceSpan>,
}

/// Origin of a run of a datum's tokens.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ProvenanceSpan {
    #[prost(oneof = "Provenance", tags = "1, 2")]
    pub(crate) span: Option<Provenance>,
}

/// The two origins of a [`ProvenanceSpan`]; both messages have the same fields.
#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Provenance {
    #[prost(message, tag = "1")]
    Prompt(Span),
    #[prost(message, tag = "2")]
    Sampled(Span),
}

/// A run of tokens in a sampled sequence or its prompt.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Span {
    #[prost(string, tag = "1")]
    pub(crate) sequence_id: String,
    #[prost(int64, tag = "2")]
    pub(crate) offset: i64,
    #[prost(int64, tag = "3")]
    pub(crate) length: i64,
}

/// A piece of a model's input.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Chunk {
    #[prost(oneof = "ChunkKind", tags = "1, 2, 3")]
    pub(crate) chunk: Option<ChunkKind>,
}

/// The kinds of a [`Chunk`].
#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum ChunkKind {
    #[prost(message, tag = "1")]
    EncodedText(EncodedText),
    #[prost(message, tag = "2")]
    Image(Image),
    #[prost(message, tag = "3")]
    Dmel(Dmel),
}

/// Tokens of text.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct EncodedText {
    /// `int32` each.
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) tokens: Bytes,
}

/// An image, which is refused: only its presence and format are read.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Image {
    #[prost(string, tag = "2")]
    pub(crate) format: String,
}

/// Audio, which is refused: only its presence is read.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Dmel {}

/// A tensor.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Tensor {
    #[prost(oneof = "Encoding", tags = "1, 2")]
    pub(crate) encoding: Option<Encoding>,
    #[prost(int32, tag = "3")]
    pub(crate) dtype: i32,
    #[prost(int64, repeated, tag = "4")]
    pub(crate) shape: Vec<i64>,
}

/// Layouts of a [`Tensor`].
#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Encoding {
    /// All numbers, row after row.
    #[prost(bytes = "bytes", tag = "1")]
    Dense(Bytes),
    #[prost(message, tag = "2")]
    SparseCsr(SparseCsr),
}

/// A matrix of few numbers, in compressed rows.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SparseCsr {
    /// The numbers that are listed, in the type of the tensor.
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) values: Bytes,
    /// Start of each row in `values`, and the end of the last one; `int64` each.
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) crow_indices: Bytes,
    /// Column of each number; `int64` each.
    #[prost(bytes = "bytes", tag = "3")]
    pub(crate) col_indices: Bytes,
}

/// Result of `forward_backward`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ForwardBackwardOutput {
    #[prost(string, tag = "1")]
    pub(crate) loss_fn_output_type: String,
    #[prost(message, repeated, tag = "2")]
    pub(crate) loss_fn_outputs: Vec<ArrayRecord>,
    #[prost(btree_map = "string, double", tag = "3")]
    pub(crate) metrics: BTreeMap<String, f64>,
}

/// Outputs of consecutive datums whose tensors agree in names, types and all axes but the first.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ArrayRecord {
    #[prost(string, tag = "1")]
    pub(crate) type_tag: String,
    #[prost(btree_map = "string, message", tag = "2")]
    pub(crate) fields: BTreeMap<String, BatchedTensor>,
    #[prost(int64, tag = "3")]
    pub(crate) num_datums: i64,
}

/// Tensors of several datums, one after the other.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct BatchedTensor {
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) data: Bytes,
    /// First byte of each datum in `data`, and the end of the last one; `int64` each.
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) offsets: Bytes,
    #[prost(int32, tag = "3")]
    pub(crate) dtype: i32,
    /// Axes of a datum's tensor after the first one.
    #[prost(int64, repeated, tag = "4")]
    pub(crate) trailing_shape: Vec<i64>,
}

/// Result of `asample`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SampleResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) sequences: Vec<SampledSequence>,
    /// `float32` for each token of the prompt; NaN where none was computed.
    #[prost(bytes = "bytes", optional, tag = "2")]
    pub(crate) prompt_logprobs: Option<Bytes>,
    #[prost(message, optional, tag = "3")]
    pub(crate) topk_prompt_logprobs: Option<TopkLogprobs>,
    #[prost(int32, tag = "4")]
    pub(crate) prompt_cache_hit_tokens: i32,
    #[prost(message, optional, tag = "5")]
    pub(crate) target_prompt_logprobs: Option<Tensor>,
    #[prost(message, optional, tag = "6")]
    pub(crate) prompt_alt_tokens: Option<PromptAltTokens>,
}

/// Tokens that were drawn at each place of the prompt.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PromptAltTokens {
    #[prost(message, optional, tag = "1")]
    pub(crate) tokens: Option<Tensor>,
    #[prost(message, optional, tag = "2")]
    pub(crate) logprobs: Option<Tensor>,
}

/// One sampled sequence.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SampledSequence {
    #[prost(int32, tag = "1")]
    pub(crate) stop_reason: i32,
    /// `int32` each.
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) tokens: Bytes,
    /// `float32` each.
    #[prost(bytes = "bytes", optional, tag = "3")]
    pub(crate) logprobs: Option<Bytes>,
    #[prost(message, optional, tag = "4")]
    pub(crate) topk_sampled_logprobs: Option<TopkLogprobs>,
}

/// The most likely tokens at each of `length` places, `k` each.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct TopkLogprobs {
    /// `int32` each.
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) token_ids: Bytes,
    /// `float32` each.
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) logprobs: Bytes,
    #[prost(uint32, tag = "3")]
    pub(crate) k: u32,
    #[prost(uint32, tag = "4")]
    pub(crate) length: u32,
}
