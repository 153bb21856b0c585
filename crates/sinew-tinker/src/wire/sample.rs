//! Bodies of `asample` and their results.
//!
//! The SDK sends JSON and reads protobuf; the result in JSON is for other programs, and for older SDKs.

use super::proto::{self, LENGTH, STOP};
use super::tensor::{self, Budget, Csr, JsonTensor};
use super::train::{JsonInput, WireLimits, checked_token, tensor_json};
use crate::desk::types::{
    Alternatives, SampleInput, SampleOutput, SampleParams, SampledSequence, SamplerId, SamplerRef,
    Stop, StopReason, TargetLayout,
};
use crate::error::TinkerError;
use crate::loss::stability_not_served;
use crate::types::{Tensor, TensorValues};
use bytes::Bytes;
use prost::Message;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_types::{TokenId, TokenLogprob};
use std::fmt::Display;

/// Log-probability of places without a number in the SDK's matrices; their token is 0.
pub(crate) const NO_LOGPROB: f32 = -99999.0;
/// Most stop tokens or stop strings of a request.
const MAX_STOPS: usize = 64;
/// Most bytes of one stop string.
const MAX_STOP_BYTES: usize = 256;

/// A request for samples.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleRequest {
    /// The weights that sample.
    pub sampler: SamplerRef,
    /// Number of the request in the sampling session.
    pub seq: Option<u64>,
    /// The prompt, and the samples that are wanted.
    pub input: SampleInput,
}

/// `stop` of the SDK.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum JsonStop {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<i64>),
}

/// `sampling_params` of the SDK.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonParams {
    #[serde(default)]
    max_tokens: Option<i64>,
    #[serde(default)]
    seed: Option<i64>,
    #[serde(default)]
    stop: Option<JsonStop>,
    #[serde(default = "one")]
    temperature: f32,
    #[serde(default = "all")]
    top_k: i64,
    #[serde(default = "one")]
    top_p: f32,
}

fn one() -> f32 {
    1.0
}

fn all() -> i64 {
    -1
}

fn single() -> i64 {
    1
}

/// The body of the SDK.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonSample {
    prompt: JsonInput,
    sampling_params: JsonParams,
    #[serde(default = "single")]
    num_samples: i64,
    #[serde(default)]
    base_model: Option<String>,
    #[serde(default)]
    model_path: Option<String>,
    #[serde(default)]
    sampling_session_id: Option<String>,
    #[serde(default)]
    seq_id: Option<i64>,
    #[serde(default)]
    prompt_logprobs: Option<bool>,
    #[serde(default)]
    topk_prompt_logprobs: i64,
    #[serde(default)]
    topk_sample_logprobs: i64,
    #[serde(default)]
    target_prompt_logprobs: Option<JsonTensor>,
    #[serde(default)]
    prompt_alt_tokens_k: i64,
    #[serde(default)]
    prompt_logprobs_last_n: Option<i64>,
    #[serde(default)]
    record_stability_info: Option<bool>,
    #[serde(default, rename = "type")]
    #[expect(dead_code, reason = "the path names the request")]
    kind: Option<String>,
}

/// Reads a request.
///
/// # Errors
/// If the bytes are not such an object, a field has a value that is not allowed, or asks for something that
/// this server does not have.
pub fn read_sample(body: &[u8], limits: &WireLimits) -> Result<SampleRequest, TinkerError> {
    let sent: JsonSample = super::json(body)?;
    if sent.record_stability_info == Some(true) {
        return Err(stability_not_served("record_stability_info"));
    }
    let (sampler, seq) = sampler(
        sent.sampling_session_id,
        sent.seq_id,
        sent.model_path,
        sent.base_model,
    )?;
    let prompt = sent.prompt.tokens("prompt")?;
    if prompt.is_empty() {
        let hint = "a prompt has at least one token";
        return Err(TinkerError::missing("prompt.chunks", hint));
    }
    let prompt_logprobs = sent.prompt_logprobs.unwrap_or(false);
    let prompt_last = last(sent.prompt_logprobs_last_n, prompt_logprobs, prompt.len())?;
    let (targets, target_layout) = match sent.target_prompt_logprobs {
        Some(tensor) => targets(tensor, prompt.len(), limits)?,
        None => (None, None),
    };
    let count = |field: &str, value: i64, least: i64| {
        let allowed = format!("integers from {least} to {}", i32::MAX);
        let fits = (least..=i64::from(i32::MAX)).contains(&value);
        if fits {
            Ok(value as u32)
        } else {
            Err(TinkerError::value(field, value, allowed))
        }
    };
    let input = SampleInput {
        prompt,
        samples: count("num_samples", sent.num_samples, 1)?,
        params: params(sent.sampling_params)?,
        prompt_logprobs,
        prompt_last,
        top_prompt: count("topk_prompt_logprobs", sent.topk_prompt_logprobs, 0)?,
        top_sample: count("topk_sample_logprobs", sent.topk_sample_logprobs, 0)?,
        targets,
        target_layout,
        alternatives: count("prompt_alt_tokens_k", sent.prompt_alt_tokens_k, 0)?,
    };
    Ok(SampleRequest {
        sampler,
        seq,
        input,
    })
}

/// The weights that a request names, and its number in the sampling session.
fn sampler(
    session: Option<String>,
    seq: Option<i64>,
    path: Option<String>,
    base: Option<String>,
) -> Result<(SamplerRef, Option<u64>), TinkerError> {
    let number = |seq: i64| {
        let value = u64::try_from(seq);
        value.map_err(|_| TinkerError::value("seq_id", seq, "0 or more"))
    };
    let seq = seq.map(number).transpose()?;
    match (session, path, base) {
        (Some(session), _, _) => {
            if seq.is_none() {
                let hint = "the number of the request in its sampling session";
                return Err(TinkerError::missing("seq_id", hint));
            }
            Ok((SamplerRef::Session(SamplerId::from(session)), seq))
        }
        // A path determines its base model.
        (None, Some(path), _) => Ok((SamplerRef::Path(path), None)),
        (None, None, Some(base)) => Ok((SamplerRef::Base(base), None)),
        (None, None, None) => Err(TinkerError::missing(
            "sampling_session_id",
            "name the weights: sampling_session_id with seq_id, model_path or base_model",
        )),
    }
}

fn params(sent: JsonParams) -> Result<SampleParams, TinkerError> {
    let max_tokens = sent.max_tokens.map(|value| {
        let count = u32::try_from(value).ok().filter(|&count| count >= 1);
        count.ok_or_else(|| {
            TinkerError::value("sampling_params.max_tokens", value, "integers from 1 on")
        })
    });
    let seed = sent.seed.map(|value| {
        let seed = u64::try_from(value);
        seed.map_err(|_| TinkerError::value("sampling_params.seed", value, "0 or more"))
    });
    let (temperature, top_k, top_p) = (sent.temperature, sent.top_k, sent.top_p);
    let wrong = |name: &str, value: &dyn Display, allowed: &str| {
        let field = format!("sampling_params.{name}");
        Err(TinkerError::value(field, value, allowed))
    };
    if !(temperature.is_finite() && temperature >= 0.0) {
        return wrong("temperature", &temperature, "a number of 0 or more");
    }
    if top_k != -1 && top_k < 1 {
        return wrong("top_k", &top_k, "-1 for all tokens, or 1 or more");
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return wrong("top_p", &top_p, "a number above 0 and at most 1");
    }
    Ok(SampleParams {
        max_tokens: max_tokens.transpose()?,
        seed: seed.transpose()?,
        stop: stop(sent.stop)?,
        temperature,
        top_k,
        top_p,
    })
}

fn stop(sent: Option<JsonStop>) -> Result<Stop, TinkerError> {
    let field = "sampling_params.stop";
    let stop = match sent {
        None => Stop::Model,
        Some(JsonStop::Text(text)) => Stop::Texts(vec![text]),
        Some(JsonStop::Texts(texts)) if texts.is_empty() => Stop::Never,
        Some(JsonStop::Texts(texts)) => Stop::Texts(texts),
        Some(JsonStop::Tokens(ids)) => {
            let ids = ids.into_iter().map(|id| checked_token(field, id));
            Stop::Tokens(ids.collect::<Result<_, _>>()?)
        }
    };
    let count = match &stop {
        Stop::Model | Stop::Never => 0,
        Stop::Tokens(ids) => ids.len(),
        Stop::Texts(texts) => {
            let fits = |text: &String| !text.is_empty() && text.len() <= MAX_STOP_BYTES;
            if !texts.iter().all(fits) {
                let allowed = format!("strings of 1 to {MAX_STOP_BYTES} bytes");
                return Err(TinkerError::value(
                    field,
                    "an empty or long string",
                    allowed,
                ));
            }
            texts.len()
        }
    };
    if count > MAX_STOPS {
        let allowed = format!("at most {MAX_STOPS}");
        return Err(TinkerError::value(
            field,
            format!("a list of {count}"),
            allowed,
        ));
    }
    Ok(stop)
}

/// Number of the last tokens that are scored.
fn last(asked: Option<i64>, scored: bool, prompt: usize) -> Result<Option<u32>, TinkerError> {
    let field = "prompt_logprobs_last_n";
    let Some(value) = asked else { return Ok(None) };
    if !scored {
        return Err(TinkerError::missing(
            "prompt_logprobs",
            "prompt_logprobs_last_n needs it",
        ));
    }
    let count = u32::try_from(value)
        .ok()
        .filter(|&n| n >= 1 && (n as usize) < prompt);
    match count {
        Some(count) => Ok(Some(count)),
        None => {
            let allowed = format!("1 to {}, the tokens after the first", prompt - 1);
            Err(TinkerError::value(field, value, allowed))
        }
    }
}

/// Token ids to score at each place after the first, and their layout if they were sparse.
type Targets = (Option<Tensor>, Option<TargetLayout>);

fn targets(sent: JsonTensor, prompt: usize, limits: &WireLimits) -> Result<Targets, TinkerError> {
    let field = "target_prompt_logprobs";
    let sent = sent.read(field)?;
    let layout = sent.layout();
    let dense = sent.dense(field, -1, &mut Budget::new(limits.tensor_values))?;
    let TensorValues::I64(ids) = &dense.values else {
        return Err(TinkerError::value(
            format!("{field}.dtype"),
            "float32",
            "int64 token ids",
        ));
    };
    if dense.shape.len() != 2 || dense.shape[0] != prompt - 1 {
        let allowed = format!(
            "[{}, K], one row for each token after the first",
            prompt - 1
        );
        return Err(TinkerError::value(
            format!("{field}.shape"),
            format!("{:?}", dense.shape),
            allowed,
        ));
    }
    if let Some(&wrong) = ids.iter().find(|&&id| id < -1 || id > i64::from(i32::MAX)) {
        let allowed = "token ids, or -1 for none";
        return Err(TinkerError::value(format!("{field}.data"), wrong, allowed));
    }
    if ids.iter().all(|&id| id < 0) {
        let hint = "at least one token id to score";
        return Err(TinkerError::missing(format!("{field}.data"), hint));
    }
    let layout = layout.map(|Csr { rows, columns }| TargetLayout { rows, columns });
    Ok((Some(dense), layout))
}

/// A result in protobuf.
pub fn write_sample_output(output: &SampleOutput) -> Bytes {
    let scored = |scores: &Vec<Option<f32>>| {
        let numbers: Vec<f32> = scores.iter().map(|s| s.unwrap_or(f32::NAN)).collect();
        tensor::float_bytes(&numbers)
    };
    let top = |rows: &Vec<Option<Vec<TokenLogprob>>>| {
        top_matrix(rows.iter().map(|row| row.as_deref().unwrap_or_default()))
    };
    let message = proto::SampleResponse {
        sequences: output.sequences.iter().map(sequence).collect(),
        prompt_logprobs: output.prompt_logprobs.as_ref().map(scored),
        topk_prompt_logprobs: output.top_prompt.as_ref().map(top),
        prompt_cache_hit_tokens: i32::try_from(output.cached_prompt_tokens).unwrap_or(i32::MAX),
        target_prompt_logprobs: scored_targets(output),
        prompt_alt_tokens: output.alternatives.as_ref().map(alternatives),
    };
    message.encode_to_vec().into()
}

fn alternatives(drawn: &Alternatives) -> proto::PromptAltTokens {
    proto::PromptAltTokens {
        tokens: Some(tensor::to_proto(&drawn.tokens)),
        logprobs: Some(tensor::to_proto(&drawn.logprobs)),
    }
}

/// Log-probabilities of the asked tokens, in the layout in which these were asked.
fn scored_targets(output: &SampleOutput) -> Option<proto::Tensor> {
    let dense = output.targets.as_ref()?;
    Some(match &output.target_layout {
        None => tensor::to_proto(dense),
        Some(TargetLayout { rows, columns }) => {
            let (rows, columns) = (rows.clone(), columns.clone());
            Csr { rows, columns }.listed(dense)
        }
    })
}

fn sequence(sampled: &SampledSequence) -> proto::SampledSequence {
    let top = |rows: &Vec<Vec<TokenLogprob>>| top_matrix(rows.iter().map(Vec::as_slice));
    proto::SampledSequence {
        stop_reason: match sampled.stop {
            StopReason::Stop => STOP,
            StopReason::Length => LENGTH,
        },
        tokens: tensor::token_bytes(sampled.tokens.iter().copied()),
        logprobs: Some(tensor::float_bytes(&sampled.logprobs)),
        topk_sampled_logprobs: sampled.top.as_ref().map(top),
    }
}

/// Rows of any length as one matrix, filled up with the SDK's marks of empty places.
fn top_matrix<'a>(rows: impl Iterator<Item = &'a [TokenLogprob]> + Clone) -> proto::TopkLogprobs {
    let width = rows.clone().map(<[_]>::len).max().unwrap_or(0);
    let (mut ids, mut logprobs, mut length) = (Vec::new(), Vec::new(), 0);
    for row in rows {
        for place in 0..width {
            let entry = row.get(place);
            ids.push(entry.map_or(0, |entry| entry.id));
            logprobs.push(entry.map_or(NO_LOGPROB, |entry| entry.logprob));
        }
        length += 1;
    }
    proto::TopkLogprobs {
        token_ids: tensor::token_bytes(ids.into_iter()),
        logprobs: tensor::float_bytes(&logprobs),
        k: width as u32,
        length,
    }
}

/// A result in JSON.
pub(crate) fn sample_output_json(output: &SampleOutput) -> Value {
    let sequence = |sampled: &SampledSequence| {
        json!({
            "stop_reason": match sampled.stop {
                StopReason::Stop => "stop",
                StopReason::Length => "length",
            },
            "tokens": sampled.tokens,
            "logprobs": sampled.logprobs,
            "topk_logprobs": sampled.top.as_ref().map(|rows| {
                rows.iter().map(|row| pairs(row)).collect::<Vec<_>>()
            }),
        })
    };
    let top = |rows: &Vec<Option<Vec<TokenLogprob>>>| {
        let row = |row: &Option<Vec<TokenLogprob>>| row.as_ref().map(|row| pairs(row));
        rows.iter().map(row).collect::<Vec<_>>()
    };
    json!({
        "type": "sample",
        "sequences": output.sequences.iter().map(sequence).collect::<Vec<_>>(),
        "prompt_logprobs": output.prompt_logprobs,
        "topk_prompt_logprobs": output.top_prompt.as_ref().map(top),
        "target_prompt_logprobs": output.targets.as_ref().map(tensor_json),
        "prompt_alt_tokens": output.alternatives.as_ref().map(|drawn| json!({
            "tokens": tensor_json(&drawn.tokens),
            "logprobs": tensor_json(&drawn.logprobs),
        })),
        "prompt_cache_hit_tokens": output.cached_prompt_tokens,
    })
}

fn pairs(row: &[TokenLogprob]) -> Vec<(TokenId, f32)> {
    row.iter().map(|entry| (entry.id, entry.logprob)).collect()
}
