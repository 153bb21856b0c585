//! Requests and answers of the protocol: MessagePack maps, with columns as little-endian byte strings.

use crate::error::{Fault, TorchError};
use crate::options::{
    Attention, Checkpointing, OpenOptions, PublishForm, Residence, Sharing, TorchDtype, absolute,
};
use bytemuck::Pod;
use serde::de::{DeserializeOwned, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sinew_train::checkpoint::StoredFile;
use sinew_train::pack::MicroBatch;
use sinew_types::WeightsManifestTensor;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

// Columns are sent as they lie in memory, and the format is little-endian.
const _: () = assert!(cfg!(target_endian = "little"));

/// Maximum bytes of a request.
pub(crate) const MAX_REQUEST: usize = 1 << 30;

/// A byte string.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bin<'a>(pub(crate) Cow<'a, [u8]>);

impl<'a> Bin<'a> {
    /// The bytes of a column.
    pub(crate) fn of<T: Pod>(values: &'a [T]) -> Self {
        Self(Cow::Borrowed(bytemuck::cast_slice(values)))
    }

    /// The bytes of a column that is made for the call.
    fn owned<T: Pod>(values: &[T]) -> Self {
        Self(Cow::Owned(bytemuck::cast_slice::<T, u8>(values).to_vec()))
    }

    /// The values of a column; `None` if the bytes are no whole number of values.
    pub(crate) fn values<T: Pod>(&self) -> Option<Vec<T>> {
        let whole = self.0.len().is_multiple_of(size_of::<T>());
        // The bytes may begin at any address.
        let chunks = self.0.chunks_exact(size_of::<T>());
        whole.then(|| chunks.map(bytemuck::pod_read_unaligned).collect())
    }
}

impl Serialize for Bin<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

struct BytesVisitor;

impl Visitor<'_> for BytesVisitor {
    type Value = Vec<u8>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a byte string")
    }

    fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
        Ok(bytes.to_vec())
    }

    fn visit_byte_buf<E>(self, bytes: Vec<u8>) -> Result<Vec<u8>, E> {
        Ok(bytes)
    }
}

impl<'de> Deserialize<'de> for Bin<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = deserializer.deserialize_byte_buf(BytesVisitor)?;
        Ok(Self(Cow::Owned(bytes)))
    }
}

/// The calls of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Open,
    Forward,
    Backward,
    Top,
    Zero,
    Apply,
    Save,
    Load,
    Publish,
    Reside,
    Close,
}

impl Verb {
    /// Whether it needs the devices.
    pub(crate) fn computes(self) -> bool {
        matches!(
            self,
            Self::Forward | Self::Backward | Self::Top | Self::Apply
        )
    }

    /// Name in the address of a call.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Top => "top",
            Self::Zero => "zero",
            Self::Apply => "apply",
            Self::Save => "save",
            Self::Load => "load",
            Self::Publish => "publish",
            Self::Reside => "reside",
            Self::Close => "close",
        }
    }
}

/// A call with its owner and its number.
#[derive(Debug, Serialize)]
pub(crate) struct Call<'a, B> {
    pub(crate) fence: u64,
    pub(crate) seq: u64,
    #[serde(flatten)]
    pub(crate) body: &'a B,
}

/// The body of a call without arguments, and of an answer without results.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Nothing {}

#[derive(Debug, Serialize)]
pub(crate) struct LoraBody<'a> {
    pub(crate) rank: u32,
    pub(crate) alpha: f32,
    pub(crate) targets: &'a [String],
    pub(crate) seed: u64,
    pub(crate) base_name: Option<&'a str>,
}

#[derive(Debug, Serialize)]
pub(crate) struct CriticBody<'a> {
    pub(crate) head: Bin<'a>,
    pub(crate) lr_scale: f32,
}

#[derive(Debug, Serialize)]
pub(crate) struct OpenBody<'a> {
    pub(crate) model: String,
    pub(crate) dtype: TorchDtype,
    pub(crate) attention: Attention,
    pub(crate) sharing: Sharing,
    pub(crate) checkpointing: Checkpointing,
    pub(crate) max_tokens: u32,
    pub(crate) head_chunk: Option<u32>,
    pub(crate) deterministic: bool,
    pub(crate) seed: u64,
    /// Whether gradients have a load-balancing loss; a model without one is refused.
    pub(crate) router_loss: bool,
    pub(crate) lora: Option<LoraBody<'a>>,
    pub(crate) critic: Option<CriticBody<'a>>,
    pub(crate) frozen: BTreeMap<&'a str, String>,
}

impl<'a> OpenBody<'a> {
    /// The body for these options.
    ///
    /// # Errors
    /// If a path is not Unicode.
    pub(crate) fn of(options: &'a OpenOptions) -> Result<Self, TorchError> {
        let mut frozen = BTreeMap::new();
        for (name, path) in &options.frozen {
            frozen.insert(name.as_str(), absolute(path)?);
        }
        Ok(Self {
            model: absolute(&options.model)?,
            dtype: options.dtype,
            attention: options.attention,
            sharing: options.sharing,
            checkpointing: options.checkpointing,
            max_tokens: options.max_tokens,
            head_chunk: options.head_chunk,
            deterministic: options.deterministic,
            seed: options.seed,
            router_loss: options.router_loss > 0.0,
            lora: options.lora.as_ref().map(|lora| LoraBody {
                rank: lora.rank,
                alpha: lora.alpha,
                targets: &lora.targets,
                seed: lora.seed,
                base_name: lora.base_name.as_deref(),
            }),
            critic: options.critic.as_ref().map(|critic| CriticBody {
                head: Bin::of(&critic.head),
                lr_scale: critic.lr_scale,
            }),
            frozen,
        })
    }
}

/// A micro-batch: tree, tokens, items and experts as columns.
#[derive(Debug, Serialize)]
pub(crate) struct Lane<'a> {
    tokens: Bin<'a>,
    /// Start, length, position and parent + 1 (0: a root) of each segment.
    segments: Bin<'a>,
    rows: Bin<'a>,
    targets: Bin<'a>,
    temperatures: Bin<'a>,
    masks: Bin<'a>,
    mask_words: u32,
    mask_table: Bin<'a>,
    /// Number of an expert as u16, `[tokens][layers][top_k]`, 65535 where the routers choose; or nothing.
    routes: Bin<'a>,
    route_layers: u32,
    route_top_k: u32,
}

impl<'a> Lane<'a> {
    /// The columns of a micro-batch.
    pub(crate) fn of(batch: &'a MicroBatch) -> Self {
        let segments = batch.layout.segments().iter().flat_map(|segment| {
            let parent = segment.parent.map_or(0, |parent| parent + 1);
            [segment.start, segment.len, segment.position, parent]
        });
        let column = |f: fn(&sinew_train::pack::LossItem) -> u32| {
            let values: Vec<u32> = batch.items.iter().map(f).collect();
            Bin::owned(&values)
        };
        let temperatures: Vec<f32> = batch.items.iter().map(|i| i.temperature).collect();
        Self {
            tokens: Bin::of(&batch.tokens),
            segments: Bin::owned(&segments.collect::<Vec<u32>>()),
            rows: column(|item| item.row),
            targets: column(|item| item.target),
            temperatures: Bin::owned(&temperatures),
            masks: column(|item| item.mask),
            mask_words: batch.masks.words as u32,
            mask_table: Bin::of(&batch.masks.table),
            routes: Bin::of(&batch.routes.experts),
            route_layers: batch.routes.layers as u32,
            route_top_k: batch.routes.top_k as u32,
        }
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct ForwardBody<'a> {
    pub(crate) wave: Vec<Lane<'a>>,
    pub(crate) of: &'a str,
    pub(crate) entropies: bool,
    pub(crate) values: bool,
    pub(crate) backward: bool,
}

/// The columns of scores, or of derivatives by them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ScoreColumns<'a> {
    pub(crate) logprobs: Bin<'a>,
    #[serde(default)]
    pub(crate) entropies: Bin<'a>,
    #[serde(default)]
    pub(crate) values: Bin<'a>,
    /// The load-balancing loss, or its factor in the loss; 0 without one.
    #[serde(default)]
    pub(crate) router: f32,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ForwardAnswer {
    pub(crate) scores: Vec<ScoreColumns<'static>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct BackwardBody<'a> {
    pub(crate) grads: Vec<ScoreColumns<'a>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct TopBody<'a> {
    pub(crate) wave: Vec<Lane<'a>>,
    pub(crate) k: u32,
    pub(crate) of: &'a str,
}

/// The best tokens of a lane's items, `[items][k]`.
#[derive(Debug, Deserialize)]
pub(crate) struct TopColumns {
    pub(crate) ids: Bin<'static>,
    pub(crate) logprobs: Bin<'static>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct TopAnswer {
    pub(crate) tops: Vec<TopColumns>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ApplyBody {
    pub(crate) number: u64,
    pub(crate) lr: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) eps: f32,
    pub(crate) decay: f32,
    pub(crate) max_grad_norm: Option<f32>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ApplyAnswer {
    #[serde(default)]
    pub(crate) grad_norm: Option<f64>,
    #[serde(default)]
    pub(crate) skipped: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct SaveBody {
    pub(crate) folder: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct SaveAnswer {
    pub(crate) files: Vec<StoredFile>,
}

#[derive(Debug, Serialize)]
pub(crate) struct LoadBody {
    pub(crate) folder: String,
    pub(crate) number: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct PublishBody {
    pub(crate) folder: String,
    pub(crate) form: PublishForm,
    pub(crate) dtype: TorchDtype,
    pub(crate) untied: bool,
}

#[derive(Debug, Deserialize)]
pub(crate) struct PublishAnswer {
    pub(crate) tensors: Vec<WeightsManifestTensor>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ResideBody {
    #[serde(rename = "where")]
    pub(crate) place: Residence,
}

/// The parts that every answer has.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct AnswerUsage {
    #[serde(default)]
    pub(crate) seconds: f64,
    #[serde(default)]
    pub(crate) peak_bytes: Vec<u64>,
}

/// An error in the words of the server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Reported {
    kind: String,
    #[serde(default)]
    text: String,
    #[serde(default)]
    rank: Option<u32>,
    #[serde(default)]
    phase: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ErrorAnswer {
    error: Reported,
}

/// The error of an answer; `None` if it has none of a known kind.
pub(crate) fn reported(body: &[u8]) -> Option<TorchError> {
    let answer: ErrorAnswer = rmp_serde::from_slice(body).ok()?;
    let Reported {
        kind,
        text,
        rank,
        phase,
    } = answer.error;
    let fault = Fault { text, rank, phase };
    Some(match kind.as_str() {
        "input" => TorchError::Input(fault),
        "memory" => TorchError::Memory(fault),
        "rank" => TorchError::Rank(fault),
        "broken" => TorchError::Broken(fault),
        "fence" => TorchError::Fence(fault),
        "gap" => TorchError::Gap(fault),
        _ => return None,
    })
}

/// Encodes a request as MessagePack with the names of its fields.
///
/// # Errors
/// If it is longer than the server accepts.
pub(crate) fn encode<B: Serialize>(verb: Verb, call: &Call<'_, B>) -> Result<Vec<u8>, TorchError> {
    let refused =
        |why: String| TorchError::Setup(format!("`{}` cannot be sent: {why}", verb.name()));
    let body = rmp_serde::to_vec_named(call).map_err(|e| refused(e.to_string()))?;
    if body.len() > MAX_REQUEST {
        let why = format!(
            "it has {} bytes, allowed are {MAX_REQUEST}; lower `train.micro_batch_tokens`",
            body.len()
        );
        return Err(refused(why));
    }
    Ok(body)
}

/// Decodes an answer.
///
/// # Errors
/// If a field is missing or of another type.
pub(crate) fn decode<T: DeserializeOwned>(
    verb: &'static str,
    body: &[u8],
) -> Result<T, TorchError> {
    rmp_serde::from_slice(body).map_err(|e| TorchError::Answer {
        verb,
        why: e.to_string(),
    })
}

#[cfg(test)]
mod tests;
