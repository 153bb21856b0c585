//! The other direction of the wire, for the client: requests that it writes, and results that it reads.

use super::proto::{
    self, ArrayRecord, ChunkKind, EncodedText, LENGTH, LossConfig, LossConfigValue, STOP,
};
use super::sample::{NO_LOGPROB, SampleRequest};
use super::tensor;
use super::train::tensor_json;
use crate::desk::types::{SampleOutput, SampledSequence, SamplerRef, Stop, StopReason};
use crate::error::TinkerError;
use crate::types::{Datum, FbOutput, LossRequest, LossValue, Tensor, TensorValues};
use bytes::Bytes;
use prost::Message;
use serde_json::{Value, json};
use sinew_types::{TokenId, TokenLogprob};
use std::collections::BTreeMap;

/// Most numbers of a result's tensor: an answer that claims more is refused before it takes memory.
const MAX_NUMBERS: u64 = 1 << 26;
/// Most places of a sequence, more than any context has.
const MAX_PLACES: usize = 1 << 21;

/// Writes a `forward_backward` request in protobuf.
///
/// # Errors
/// If the number of the command does not fit the message.
pub(crate) fn write_train_request(
    model: &str,
    seq: u64,
    data: &[Datum],
    loss: &LossRequest,
    forward_only: bool,
) -> Result<Bytes, TinkerError> {
    let seq_id = i32::try_from(seq);
    let seq_id = seq_id.map_err(|_| TinkerError::value("seq_id", seq, "1 to 2147483647"))?;
    let config = |(name, value): (&String, &LossValue)| {
        let value = match value {
            LossValue::Number(number) => LossConfig::Number(*number),
            LossValue::Text(text) => LossConfig::Text(text.clone()),
        };
        (name.clone(), LossConfigValue { value: Some(value) })
    };
    let number = |(name, value): (&String, &LossValue)| match value {
        LossValue::Number(number) => Some((name.clone(), *number)),
        LossValue::Text(_) => None,
    };
    let message = proto::ForwardBackwardRequest {
        model_id: model.to_owned(),
        seq_id,
        data: data.iter().map(datum).collect(),
        loss_fn: loss.name.clone(),
        loss_fn_config: loss.config.iter().filter_map(number).collect(),
        forward_only,
        loss_fn_config_v2: loss.config.iter().map(config).collect(),
    };
    Ok(message.encode_to_vec().into())
}

fn datum(datum: &Datum) -> proto::Datum {
    let tokens = tensor::token_bytes(datum.tokens.iter().copied());
    let inputs = datum.inputs.iter();
    proto::Datum {
        model_input: vec![proto::Chunk {
            chunk: Some(ChunkKind::EncodedText(EncodedText { tokens })),
        }],
        loss_fn_inputs: inputs
            .map(|(name, values)| (name.clone(), tensor::to_proto(values)))
            .collect(),
        model_input_spans: Vec::new(),
        loss_fn_input_spans: Vec::new(),
    }
}

/// Reads the result of `forward_backward` in protobuf.
///
/// # Errors
/// If the bytes are not such a message, or its tensors do not fit their places.
pub(crate) fn read_train_output(body: &[u8]) -> Result<FbOutput, TinkerError> {
    let read = proto::ForwardBackwardOutput::decode(body);
    let read = read.map_err(|error| {
        TinkerError::value("the body", error, "a ForwardBackwardOutput in protobuf")
    })?;
    let mut outputs = Vec::new();
    for (at, record) in read.loss_fn_outputs.iter().enumerate() {
        outputs.extend(datums(at, record, body.len())?);
    }
    Ok(FbOutput {
        output_type: read.loss_fn_output_type,
        outputs,
        metrics: read.metrics,
    })
}

/// The tensors of each datum of a record, of which there are at most `most`.
fn datums(
    at: usize,
    record: &ArrayRecord,
    most: usize,
) -> Result<Vec<BTreeMap<String, Tensor>>, TinkerError> {
    let count = usize::try_from(record.num_datums).ok();
    let count = count.filter(|&count| count <= most).ok_or_else(|| {
        let field = format!("loss_fn_outputs[{at}].num_datums");
        TinkerError::value(field, record.num_datums, format!("0 to {most}"))
    })?;
    let mut all = vec![BTreeMap::new(); count];
    for (name, batched) in &record.fields {
        let field = format!("loss_fn_outputs[{at}].{name}");
        let wrong = |value: String, allowed: &str| {
            Err(TinkerError::value(
                format!("{field}.offsets"),
                value,
                allowed,
            ))
        };
        let ends = tensor::indices(&field, "offsets", &batched.offsets)?;
        if ends.len() != count + 1 {
            let allowed = format!("{} numbers for {count} datums", count + 1);
            return wrong(format!("{} numbers", ends.len()), &allowed);
        }
        let trailing: Option<Vec<usize>> = batched
            .trailing_shape
            .iter()
            .map(|&axis| usize::try_from(axis).ok())
            .collect();
        let Some(trailing) = trailing else {
            return wrong("a negative axis".to_owned(), "axes of 0 or more");
        };
        for (datum, pair) in all.iter_mut().zip(ends.windows(2)) {
            let bytes = (pair[0] as usize)..(pair[1] as usize);
            let Some(bytes) = batched.data.get(bytes) else {
                let allowed = format!("rising, up to {}", batched.data.len());
                return wrong(format!("{pair:?}"), &allowed);
            };
            let values = tensor::numbers(&field, batched.dtype, bytes)?;
            datum.insert(name.clone(), shaped(&field, &trailing, values)?);
        }
    }
    Ok(all)
}

/// A tensor whose axes after the first are known.
fn shaped(field: &str, trailing: &[usize], values: TensorValues) -> Result<Tensor, TinkerError> {
    let inner = trailing.iter().product::<usize>();
    let outer = values.len().checked_div(inner).unwrap_or(0);
    let shape = std::iter::once(outer).chain(trailing.iter().copied());
    Tensor::new(field, shape.collect(), values)
}

/// Writes an `asample` request in JSON.
pub(crate) fn write_sample(request: &SampleRequest) -> Value {
    let input = &request.input;
    let params = &input.params;
    let mut sampling = json!({
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
    });
    if let Some(max_tokens) = params.max_tokens {
        sampling["max_tokens"] = json!(max_tokens);
    }
    if let Some(seed) = params.seed {
        sampling["seed"] = json!(seed);
    }
    match &params.stop {
        Stop::Model => {}
        Stop::Never => sampling["stop"] = json!([]),
        Stop::Tokens(ids) => sampling["stop"] = json!(ids),
        Stop::Texts(texts) => sampling["stop"] = json!(texts),
    }
    let mut body = json!({
        "type": "sample",
        "num_samples": input.samples,
        "prompt": { "chunks": [{ "type": "encoded_text", "tokens": input.prompt }] },
        "sampling_params": sampling,
        "topk_prompt_logprobs": input.top_prompt,
        "topk_sample_logprobs": input.top_sample,
    });
    match &request.sampler {
        SamplerRef::Session(id) => body["sampling_session_id"] = json!(id),
        SamplerRef::Base(name) => body["base_model"] = json!(name),
        SamplerRef::Path(path) => body["model_path"] = json!(path),
    }
    if let Some(seq) = request.seq {
        body["seq_id"] = json!(seq);
    }
    if input.prompt_logprobs {
        body["prompt_logprobs"] = json!(true);
    }
    if let Some(last) = input.prompt_last {
        body["prompt_logprobs_last_n"] = json!(last);
    }
    if let Some(targets) = &input.targets {
        body["target_prompt_logprobs"] = tensor_json(targets);
    }
    if input.alternatives > 0 {
        body["prompt_alt_tokens_k"] = json!(input.alternatives);
    }
    body
}

/// Reads the result of `asample` in protobuf.
///
/// # Errors
/// If the bytes are not such a message, or its numbers do not belong together.
pub(crate) fn read_sample_output(body: &[u8]) -> Result<SampleOutput, TinkerError> {
    let read = proto::SampleResponse::decode(body);
    let read = read
        .map_err(|error| TinkerError::value("the body", error, "a SampleResponse in protobuf"))?;
    let mut sequences = Vec::with_capacity(read.sequences.len());
    for (at, sequence) in read.sequences.iter().enumerate() {
        sequences.push(read_sequence(&format!("sequences[{at}]"), sequence)?);
    }
    let scored = |bytes: &Bytes| -> Result<Vec<Option<f32>>, TinkerError> {
        let values = floats("prompt_logprobs", bytes)?;
        Ok(values
            .into_iter()
            .map(|value| (!value.is_nan()).then_some(value))
            .collect())
    };
    let top =
        |matrix: &proto::TopkLogprobs| -> Result<Vec<Option<Vec<TokenLogprob>>>, TinkerError> {
            let rows = read_matrix("topk_prompt_logprobs", matrix)?;
            Ok(rows
                .into_iter()
                .map(|row| (!row.is_empty()).then_some(row))
                .collect())
        };
    let targets = |sent: &proto::Tensor| {
        let field = "target_prompt_logprobs";
        let limit = sent.shape.iter().fold(1u64, |product, &axis| {
            product.saturating_mul(u64::try_from(axis).unwrap_or(0))
        });
        let mut budget = tensor::Budget::new(limit.min(MAX_NUMBERS));
        tensor::from_proto(field, sent)?.dense(field, 0, &mut budget)
    };
    Ok(SampleOutput {
        sequences,
        prompt_logprobs: read.prompt_logprobs.as_ref().map(scored).transpose()?,
        top_prompt: read.topk_prompt_logprobs.as_ref().map(top).transpose()?,
        targets: read
            .target_prompt_logprobs
            .as_ref()
            .map(targets)
            .transpose()?,
        cached_prompt_tokens: u32::try_from(read.prompt_cache_hit_tokens).unwrap_or(0),
        ..SampleOutput::default()
    })
}

fn read_sequence(
    field: &str,
    sequence: &proto::SampledSequence,
) -> Result<SampledSequence, TinkerError> {
    let tokens = tokens(field, &sequence.tokens)?;
    let logprobs = match &sequence.logprobs {
        Some(bytes) => floats(&format!("{field}.logprobs"), bytes)?,
        None => Vec::new(),
    };
    let top = sequence.topk_sampled_logprobs.as_ref();
    let top = top.map(|matrix| read_matrix(&format!("{field}.topk_sampled_logprobs"), matrix));
    let stop = match sequence.stop_reason {
        STOP => StopReason::Stop,
        LENGTH => StopReason::Length,
        other => {
            let allowed = "0 (a stop token or string) or 1 (the maximum number of tokens)";
            let field = format!("{field}.stop_reason");
            return Err(TinkerError::value(field, other, allowed));
        }
    };
    Ok(SampledSequence {
        tokens,
        logprobs,
        stop,
        top: top.transpose()?,
    })
}

/// Rows of the most likely tokens, without the marks of empty places.
fn read_matrix(
    field: &str,
    matrix: &proto::TopkLogprobs,
) -> Result<Vec<Vec<TokenLogprob>>, TinkerError> {
    let (rows, width) = (matrix.length as usize, matrix.k as usize);
    let ids = tokens(field, &matrix.token_ids)?;
    let logprobs = floats(&format!("{field}.logprobs"), &matrix.logprobs)?;
    let size = rows.checked_mul(width);
    let fits = rows <= MAX_PLACES;
    if !fits || size != Some(ids.len()) || ids.len() != logprobs.len() {
        let value = format!("{} ids and {} log-probs", ids.len(), logprobs.len());
        let allowed = format!("{width} of both for each of {rows} places");
        return Err(TinkerError::value(field, value, allowed));
    }
    if width == 0 {
        return Ok(vec![Vec::new(); rows]);
    }
    let row = |(ids, logprobs): (&[TokenId], &[f32])| -> Vec<TokenLogprob> {
        let entries = ids.iter().zip(logprobs);
        entries
            .filter(|(_, logprob)| **logprob > NO_LOGPROB)
            .map(|(&id, &logprob)| TokenLogprob { id, logprob })
            .collect()
    };
    Ok(ids
        .chunks(width)
        .zip(logprobs.chunks(width))
        .map(row)
        .collect())
}

fn floats(field: &str, bytes: &[u8]) -> Result<Vec<f32>, TinkerError> {
    match tensor::numbers(field, proto::FLOAT32, bytes)? {
        TensorValues::F32(values) => Ok(values),
        TensorValues::I64(_) => Ok(Vec::new()),
    }
}

fn tokens(field: &str, bytes: &[u8]) -> Result<Vec<TokenId>, TinkerError> {
    let mut tokens = Vec::new();
    super::train::read_tokens(field, bytes, &mut tokens)?;
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desk::types::{SampleInput, SampleParams, SamplerId};
    use crate::wire::{
        WireLimits, read_sample, read_train_request, write_sample_output, write_train_output,
    };

    fn data() -> Vec<Datum> {
        let one = |tokens: &[TokenId], width: usize| {
            let n = tokens.len();
            let targets = Tensor {
                shape: vec![n, width],
                values: TensorValues::I64((0..(n * width) as i64).collect()),
            };
            let weights = Tensor {
                shape: vec![n, width],
                values: TensorValues::F32(vec![-0.5; n * width]),
            };
            Datum {
                tokens: tokens.to_vec(),
                inputs: BTreeMap::from([
                    ("target_tokens".to_owned(), targets),
                    ("weights".to_owned(), weights),
                ]),
            }
        };
        vec![one(&[1, 2, 3], 1), one(&[4], 2)]
    }

    #[test]
    fn the_server_reads_the_training_requests_of_the_client() {
        let loss = LossRequest {
            name: "ppo".to_owned(),
            config: BTreeMap::from([
                ("clip_low_threshold".to_owned(), LossValue::Number(0.8)),
                ("loss_id".to_owned(), LossValue::Text("a".to_owned())),
            ]),
        };
        let body = write_train_request("s:train:0", 7, &data(), &loss, true).unwrap();
        let read = read_train_request(body, &WireLimits::default()).unwrap();
        assert_eq!((read.model.as_str(), read.seq), ("s:train:0", 7));
        assert!(read.forward_only);
        assert_eq!(read.data, data());
        assert_eq!(read.loss, loss);
        assert!(write_train_request("m", 1 << 40, &[], &loss, true).is_err());
    }

    #[test]
    fn the_client_reads_the_training_results_of_the_server() {
        let logprobs = |values: &[f32], shape: &[usize]| Tensor {
            shape: shape.to_vec(),
            values: TensorValues::F32(values.to_vec()),
        };
        let record = |tensor| BTreeMap::from([("logprobs".to_owned(), tensor)]);
        let output = FbOutput {
            output_type: "ArrayRecord".to_owned(),
            outputs: vec![
                record(logprobs(&[-1.0, -2.0], &[2])),
                record(logprobs(&[-3.0], &[1])),
                record(logprobs(&[-4.0, -5.0, -6.0, -7.0], &[2, 2])),
            ],
            metrics: BTreeMap::from([("loss:sum".to_owned(), 2.5)]),
        };
        let body = write_train_output(&output).unwrap();
        assert_eq!(read_train_output(&body).unwrap(), output);
        assert!(read_train_output(&body[..body.len() - 3]).is_err());
        let empty = read_train_output(&[]).unwrap();
        assert!(empty.outputs.is_empty());
    }

    #[test]
    fn answers_that_claim_more_than_they_have_are_refused() {
        let record = ArrayRecord {
            num_datums: i64::MAX,
            ..ArrayRecord::default()
        };
        let output = proto::ForwardBackwardOutput {
            loss_fn_outputs: vec![record],
            ..proto::ForwardBackwardOutput::default()
        };
        let error = read_train_output(&output.encode_to_vec()).unwrap_err();
        assert!(error.to_string().contains("num_datums"), "{error}");
        let matrix = proto::TopkLogprobs {
            length: u32::MAX,
            ..proto::TopkLogprobs::default()
        };
        assert!(read_matrix("top", &matrix).is_err());
    }

    #[test]
    fn the_server_reads_the_sample_requests_of_the_client() {
        let request = SampleRequest {
            sampler: SamplerRef::Session(SamplerId::from("s:sample:1")),
            seq: Some(3),
            input: SampleInput {
                prompt: vec![1, 2, 3],
                samples: 1,
                params: SampleParams {
                    max_tokens: Some(9),
                    seed: Some(5),
                    stop: Stop::Tokens(vec![7]),
                    temperature: 0.5,
                    ..SampleParams::default()
                },
                prompt_logprobs: true,
                prompt_last: Some(1),
                top_prompt: 2,
                top_sample: 4,
                targets: Some(Tensor {
                    shape: vec![2, 1],
                    values: TensorValues::I64(vec![5, -1]),
                }),
                ..SampleInput::default()
            },
        };
        let body = write_sample(&request).to_string();
        let read = read_sample(body.as_bytes(), &WireLimits::default()).unwrap();
        assert_eq!(read, request);
        let never = SampleRequest {
            sampler: SamplerRef::Base("b".to_owned()),
            seq: None,
            input: SampleInput {
                prompt: vec![1],
                samples: 1,
                params: SampleParams {
                    stop: Stop::Never,
                    ..SampleParams::default()
                },
                ..SampleInput::default()
            },
        };
        let body = write_sample(&never).to_string();
        assert_eq!(
            read_sample(body.as_bytes(), &WireLimits::default()).unwrap(),
            never
        );
    }

    #[test]
    fn the_client_reads_the_samples_of_the_server() {
        let entry = |id, logprob| TokenLogprob { id, logprob };
        let output = SampleOutput {
            sequences: vec![SampledSequence {
                tokens: vec![4, 7],
                logprobs: vec![-0.5, -0.25],
                stop: StopReason::Stop,
                top: Some(vec![
                    vec![entry(4, -0.5), entry(2, -1.0)],
                    vec![entry(7, -0.25)],
                ]),
            }],
            prompt_logprobs: Some(vec![None, Some(-2.0)]),
            top_prompt: Some(vec![None, Some(vec![entry(1, -0.1)])]),
            targets: Some(Tensor {
                shape: vec![1, 1],
                values: TensorValues::F32(vec![-3.0]),
            }),
            cached_prompt_tokens: 2,
            ..SampleOutput::default()
        };
        let body = write_sample_output(&output);
        assert_eq!(read_sample_output(&body).unwrap(), output);
        assert!(read_sample_output(b"\xff\xff").is_err());
    }
}
