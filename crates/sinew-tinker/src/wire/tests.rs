//! Bodies that the SDK made (`tests/fixtures/make_wire.py`), and bodies that it refuses to make.

use super::requests::{
    CancelFuture, ClientConfig, CopyWeights, CreateModel, CreateSamplingSession, CreateSession,
    Finish, FuturesTarget, Heartbeat, JoinSamplingSession, LoadWeights, OfModel, OptimStep,
    RetrieveFuture, RetrieveFutures, SamplerKind, SaveExternal, SaveForSampler, SaveWeights,
    SearchSessions, Ttl, WeightsInfo,
};
use super::*;
use crate::desk::types::{
    Alternatives, LoraSpec, SampleOutput, SampledSequence, SamplerId, SamplerRef, Stop, StopReason,
    TargetLayout,
};
use crate::types::{Datum, FbOutput, LossValue, Tensor, TensorValues};
use bytes::Bytes;
use prost::Message;
use serde_json::json;
use sinew_types::TokenLogprob;
use std::collections::BTreeMap;

const DENSE: &[u8] = include_bytes!("../../tests/fixtures/request_dense.bin");
const SPARSE: &[u8] = include_bytes!("../../tests/fixtures/request_sparse.bin");
const SPANS: &[u8] = include_bytes!("../../tests/fixtures/request_spans.bin");
const IMAGE: &[u8] = include_bytes!("../../tests/fixtures/request_image.bin");
const PPO: &[u8] = include_bytes!("../../tests/fixtures/request_ppo.bin");
const TRAIN_OUTPUT: &[u8] = include_bytes!("../../tests/fixtures/train_output.bin");
const SAMPLE_OUTPUT: &[u8] = include_bytes!("../../tests/fixtures/sample_output.bin");
const BODIES: &[u8] = include_bytes!("../../tests/fixtures/bodies.json");

fn read(body: &'static [u8]) -> Result<TrainRequest, TinkerError> {
    read_train_request(Bytes::from_static(body), &WireLimits::default())
}

fn datum(tokens: &[u32], inputs: &[(&str, Tensor)]) -> Datum {
    let inputs = inputs.iter().cloned();
    Datum {
        tokens: tokens.to_vec(),
        inputs: inputs
            .map(|(name, tensor)| (name.to_owned(), tensor))
            .collect(),
    }
}

fn matrix(shape: [usize; 2], values: TensorValues) -> Tensor {
    Tensor::new("matrix", shape.to_vec(), values).unwrap()
}

#[test]
fn requests_of_the_sdk_are_read() {
    let dense = read(DENSE).unwrap();
    assert_eq!((dense.model.as_str(), dense.seq), ("s:train:0", 3));
    assert_eq!(dense.loss.name, "cross_entropy");
    assert!(!dense.forward_only && dense.loss.config.is_empty());
    let first = datum(
        &[1, 2, 3],
        &[
            ("target_tokens", Tensor::integers(vec![2, 3, 4])),
            ("weights", Tensor::floats(vec![0.0, 1.0, -2.5])),
        ],
    );
    let second = datum(
        &[7],
        &[
            ("target_tokens", Tensor::integers(vec![8])),
            ("weights", Tensor::floats(vec![0.5])),
        ],
    );
    assert_eq!(dense.data, [first, second]);

    let sparse = read(SPARSE).unwrap();
    assert!(sparse.forward_only);
    let targets = vec![5, 0, 0, 6, 0, 0, 0, 0, 0, 9, 0, 0];
    let weights = vec![0.25, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0];
    let inputs = [
        ("target_tokens", matrix([3, 4], TensorValues::I64(targets))),
        ("weights", matrix([3, 4], TensorValues::F32(weights))),
    ];
    assert_eq!(sparse.data, [datum(&[1, 2, 3], &inputs)]);

    let ppo = read(PPO).unwrap();
    let config = [
        ("clip_high_threshold", LossValue::Number(1.25)),
        ("clip_low_threshold", LossValue::Number(0.8)),
        ("kind", LossValue::Text("text".into())),
    ];
    let config = config.map(|(name, value)| (name.to_owned(), value));
    assert_eq!(ppo.loss.config, BTreeMap::from(config));
    assert_eq!(read(SPANS).unwrap().data[0].tokens, [1, 2]);
}

#[test]
fn what_is_not_text_is_refused_by_its_name() {
    let error = read(IMAGE).unwrap_err();
    assert_eq!(error.category(), crate::Category::User);
    let text = error.to_string();
    assert!(text.contains("data[0].model_input.chunks[0]"), "{text}");
    assert!(text.contains("image"), "{text}");
}

#[test]
fn a_message_is_written_as_it_was_read() {
    for body in [DENSE, SPARSE, SPANS, PPO] {
        let message = proto::ForwardBackwardRequest::decode(body).unwrap();
        assert_eq!(message.encode_to_vec(), body);
    }
    // The body of the compressed one is the same.
    let packed = include_bytes!("../../tests/fixtures/request_dense.bin.zst");
    assert_eq!(zstd::decode_all(&packed[..]).unwrap(), DENSE);
}

/// A request with one change.
fn changed(
    change: impl FnOnce(&mut proto::ForwardBackwardRequest),
) -> Result<TrainRequest, String> {
    let mut message = proto::ForwardBackwardRequest::decode(SPARSE).unwrap();
    change(&mut message);
    let body = message.encode_to_vec().into();
    let limits = WireLimits {
        datums: 2,
        tensor_values: 24,
    };
    read_train_request(body, &limits).map_err(|error| error.to_string())
}

fn sparse_of(message: &mut proto::ForwardBackwardRequest) -> &mut proto::SparseCsr {
    let inputs = &mut message.data[0].loss_fn_inputs;
    match inputs.get_mut("weights").unwrap().encoding.as_mut() {
        Some(proto::Encoding::SparseCsr(sparse)) => sparse,
        _ => panic!("the fixture is sparse"),
    }
}

#[test]
fn tensors_that_lie_about_themselves_are_refused() {
    type Change = fn(&mut proto::ForwardBackwardRequest);
    assert!(changed(|_| ()).is_ok());
    let cases: [(Change, &str); 8] = [
        (|m| m.seq_id = 0, "seq_id"),
        (
            |m| {
                let first = m.data[0].clone();
                m.data = vec![first; 3];
            },
            "the number of datums is 3",
        ),
        (
            |m| {
                let inputs = &mut m.data[0].loss_fn_inputs;
                inputs.get_mut("weights").unwrap().shape = vec![3, 5];
            },
            "the numbers of all tensors",
        ),
        (
            |m| {
                let inputs = &mut m.data[0].loss_fn_inputs;
                inputs.get_mut("weights").unwrap().shape = vec![3, -4];
            },
            "data[0].loss_fn_inputs.weights.shape",
        ),
        (
            |m| {
                let inputs = &mut m.data[0].loss_fn_inputs;
                inputs.get_mut("weights").unwrap().dtype = 9;
            },
            "data[0].loss_fn_inputs.weights.dtype",
        ),
        (
            |m| sparse_of(m).crow_indices = Bytes::from_static(&[0; 32]),
            "weights.sparse_crow_indices",
        ),
        (
            |m| sparse_of(m).col_indices = Bytes::from_static(&[0; 24]),
            "weights.sparse_col_indices",
        ),
        (
            |m| sparse_of(m).values = Bytes::from_static(&[0; 11]),
            "a multiple of 4 bytes",
        ),
    ];
    for (change, named) in cases {
        let text = changed(change).unwrap_err();
        assert!(text.contains(named), "{named}: {text}");
    }
    let garbage = read_train_request(Bytes::from_static(&[255; 40]), &WireLimits::default());
    assert!(garbage.unwrap_err().to_string().contains("protobuf"));
}

#[test]
fn narrow_numbers_become_those_of_the_protocol() {
    let numbers = |dtype, bytes: &[u8]| tensor::numbers("x", dtype, bytes).unwrap();
    let halves = [0x80, 0x3f, 0x20, 0xc0];
    assert_eq!(
        numbers(proto::BFLOAT16, &halves),
        TensorValues::F32(vec![1.0, -2.5])
    );
    assert_eq!(
        numbers(proto::INT32, &(-3_i32).to_le_bytes()),
        TensorValues::I64(vec![-3])
    );
}

#[test]
fn the_same_request_is_read_from_json() {
    let body = json!({
        "model_id": "s:train:0",
        "seq_id": 3,
        "forward_backward_input": {
            "loss_fn": "cross_entropy",
            "data": [
                {
                    "model_input": {"chunks": [
                        {"type": "encoded_text", "tokens": [1, 2]},
                        {"type": "encoded_text", "tokens": [3]},
                    ]},
                    "loss_fn_inputs": {
                        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
                        "weights": {"data": [0, 1.0, -2.5], "dtype": "float32"},
                    },
                },
                {
                    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [7]}]},
                    "loss_fn_inputs": {
                        "target_tokens": {"data": [8], "dtype": "int64"},
                        "weights": {"data": [0.5], "dtype": "float32", "shape": [1]},
                    },
                },
            ],
        },
    });
    let body = serde_json::to_vec(&body).unwrap();
    let limits = WireLimits::default();
    let plain = read_train_json(&body, false, &limits).unwrap();
    assert_eq!(plain, read(DENSE).unwrap());
    assert!(read_train_json(&body, true, &limits).unwrap().forward_only);
    let unknown = String::from_utf8(body).unwrap();
    let unknown = unknown.replace("\"loss_fn\"", "\"loss_fnn\"");
    let error = read_train_json(unknown.as_bytes(), false, &limits).unwrap_err();
    assert!(error.to_string().contains("loss_fnn"), "{error}");
}

fn train_output() -> FbOutput {
    let record = |tensor: Tensor| BTreeMap::from([("logprobs".to_owned(), tensor)]);
    FbOutput {
        output_type: "TokenLogprobs".into(),
        outputs: vec![
            record(Tensor::floats(vec![-0.5, -1.0])),
            record(Tensor::floats(vec![-0.25])),
            record(matrix(
                [2, 2],
                TensorValues::F32(vec![-1.0, -2.0, -3.0, -4.0]),
            )),
        ],
        metrics: BTreeMap::from([("loss:sum".into(), 1.5), ("tokens:sum".into(), 5.0)]),
    }
}

#[test]
fn results_of_losses_have_the_bytes_that_the_sdk_reads() {
    let output = train_output();
    assert_eq!(write_train_output(&output).unwrap(), TRAIN_OUTPUT);
    let mut other = output;
    other.outputs[1].insert("more".into(), Tensor::floats(vec![0.0]));
    assert!(write_train_output(&other).is_err());
    let none = write_train_output(&FbOutput::default()).unwrap();
    assert!(none.is_empty());
}

#[test]
fn results_of_losses_are_written_as_json_too() {
    let value = train_output_json(&train_output());
    assert_eq!(value["loss_fn_output_type"], "TokenLogprobs");
    assert_eq!(
        value["loss_fn_outputs"][2]["logprobs"],
        json!({"data": [-1.0, -2.0, -3.0, -4.0], "dtype": "float32", "shape": [2, 2]})
    );
    assert_eq!(value["metrics"]["loss:sum"], 1.5);
    let broken = BTreeMap::from([
        ("a".to_owned(), f64::NAN),
        ("b".to_owned(), f64::NEG_INFINITY),
    ]);
    assert_eq!(metrics_json(&broken), json!({"a": "NaN", "b": "-inf"}));
}

fn likely(id: u32, logprob: f32) -> TokenLogprob {
    TokenLogprob { id, logprob }
}

fn sample_output() -> SampleOutput {
    SampleOutput {
        sequences: vec![
            SampledSequence {
                tokens: vec![4, 5],
                logprobs: vec![-0.5, -0.25],
                stop: StopReason::Length,
                top: Some(vec![
                    vec![likely(4, -0.5), likely(6, -1.5)],
                    vec![likely(5, -0.25)],
                ]),
            },
            SampledSequence {
                tokens: vec![2],
                logprobs: vec![-0.125],
                stop: StopReason::Stop,
                top: None,
            },
        ],
        prompt_logprobs: Some(vec![None, Some(-1.0), Some(-2.0)]),
        top_prompt: Some(vec![
            None,
            Some(vec![likely(8, -1.0)]),
            Some(vec![likely(9, -0.75)]),
        ]),
        targets: Some(matrix(
            [2, 3],
            TensorValues::F32(vec![0.0, 0.0, 0.0, -3.0, 0.0, -4.0]),
        )),
        target_layout: Some(TargetLayout {
            rows: vec![0, 0, 2],
            columns: vec![0, 2],
        }),
        alternatives: Some(Alternatives {
            tokens: matrix([2, 1], TensorValues::I64(vec![7, 8])),
            logprobs: matrix([2, 1], TensorValues::F32(vec![-0.5, -0.75])),
        }),
        cached_prompt_tokens: 2,
    }
}

#[test]
fn samples_have_the_bytes_that_the_sdk_reads() {
    assert_eq!(write_sample_output(&sample_output()), SAMPLE_OUTPUT);
    let mut dense = sample_output();
    dense.target_layout = None;
    let message = proto::SampleResponse::decode(write_sample_output(&dense)).unwrap();
    let targets = message.target_prompt_logprobs.unwrap();
    assert_eq!(targets.shape, [2, 3]);
    assert!(matches!(targets.encoding, Some(proto::Encoding::Dense(bytes)) if bytes.len() == 24));
}

#[test]
fn samples_are_written_as_json_too() {
    let value = sample_output_json(&sample_output());
    assert_eq!(value["prompt_logprobs"], json!([null, -1.0, -2.0]));
    assert_eq!(value["sequences"][0]["stop_reason"], "length");
    assert_eq!(
        value["sequences"][0]["topk_logprobs"],
        json!([[[4, -0.5], [6, -1.5]], [[5, -0.25]]])
    );
    assert_eq!(value["topk_prompt_logprobs"][0], Value::Null);
}

/// Body of a request, as the SDK made it.
fn body(name: &str) -> Vec<u8> {
    let bodies: Value = serde_json::from_slice(BODIES).unwrap();
    serde_json::to_vec(&bodies[name]).unwrap()
}

fn sent<T: DeserializeOwned>(name: &str) -> T {
    request(&body(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn a_sample_request_of_the_sdk_is_read() {
    let limits = WireLimits::default();
    let full = read_sample(&body("asample"), &limits).unwrap();
    let session = SamplerRef::Session(SamplerId::from("s:sample:1"));
    assert_eq!((full.sampler, full.seq), (session, Some(0)));
    let input = full.input;
    assert_eq!(
        (input.prompt.as_slice(), input.samples),
        (&[1, 2, 3][..], 2)
    );
    assert_eq!(input.params.max_tokens, Some(5));
    assert_eq!(input.params.seed, Some(7));
    assert_eq!(
        input.params.stop,
        Stop::Texts(vec!["\n".into(), "end".into()])
    );
    assert_eq!(
        (
            input.params.temperature,
            input.params.top_k,
            input.params.top_p
        ),
        (0.5, 3, 0.9)
    );
    assert!(input.prompt_logprobs && input.prompt_last == Some(2));
    assert_eq!(
        (input.top_prompt, input.top_sample, input.alternatives),
        (1, 2, 1)
    );
    let targets = TensorValues::I64(vec![-1, -1, -1, 5, -1, 6]);
    assert_eq!(input.targets, Some(matrix([2, 3], targets)));
    let layout = TargetLayout {
        rows: vec![0, 0, 2],
        columns: vec![0, 2],
    };
    assert_eq!(input.target_layout, Some(layout));

    let plain = read_sample(&body("asample_plain"), &limits).unwrap();
    let base = SamplerRef::Base("org/model:alias".into());
    assert_eq!((plain.sampler, plain.seq), (base, None));
    assert_eq!(plain.input.params.stop, Stop::Tokens(vec![2]));
    assert_eq!(plain.input.params.max_tokens, None);
}

#[test]
fn sample_requests_that_cannot_be_served_are_refused_by_their_field() {
    let plain: Value = serde_json::from_slice(&body("asample_plain")).unwrap();
    let refused = |path: &[&str], value: Value| {
        let mut changed = plain.clone();
        let mut place = &mut changed;
        for name in path {
            place = &mut place[*name];
        }
        *place = value;
        let bytes = serde_json::to_vec(&changed).unwrap();
        let read = read_sample(&bytes, &WireLimits::default());
        read.map(|_| ()).map_err(|error| error.to_string())
    };
    let params = |name| ["sampling_params", name];
    let cases: [(&[&str], Value, &str); 17] = [
        (&["num_samples"], json!(0), "num_samples"),
        (&params("max_tokens"), json!(0), "max_tokens"),
        (&params("temperature"), json!(-1.0), "temperature"),
        (&params("top_k"), json!(0), "top_k"),
        (&params("top_p"), json!(0.0), "top_p"),
        (&params("seed"), json!(-1), "seed"),
        (&params("stop"), json!([""]), "stop"),
        (&params("stop"), json!([-4]), "stop"),
        (&params("presence_penalty"), json!(1), "presence_penalty"),
        (&["prompt", "chunks"], json!([]), "prompt.chunks"),
        (
            &["prompt", "chunks"],
            json!([{"type": "dmel", "dmel": ""}]),
            "dmel",
        ),
        (&["record_stability_info"], json!(true), "record_stability"),
        (&["prompt_logprobs_last_n"], json!(1), "prompt_logprobs"),
        (&["sampling_session_id"], json!("x"), "seq_id"),
        (
            &["target_prompt_logprobs"],
            json!({"data": [1, 2], "dtype": "int64", "shape": [1, 2]}),
            "target_prompt_logprobs.shape",
        ),
        (
            &["target_prompt_logprobs"],
            json!({"data": [-1, -1], "dtype": "int64", "shape": [2, 1]}),
            "target_prompt_logprobs.data",
        ),
        (&["base_model"], Value::Null, "sampling_session_id"),
    ];
    for (path, value, named) in cases {
        let text = refused(path, value).unwrap_err();
        assert!(text.contains(named), "{named}: {text}");
    }
    let stop = |value: Value| {
        let mut changed = plain.clone();
        changed["sampling_params"]["stop"] = value;
        let bytes = serde_json::to_vec(&changed).unwrap();
        let read = read_sample(&bytes, &WireLimits::default()).unwrap();
        read.input.params.stop
    };
    assert_eq!(stop(json!([])), Stop::Never);
    assert_eq!(stop(Value::Null), Stop::Model);
    assert_eq!(stop(json!("x")), Stop::Texts(vec!["x".into()]));
}

#[test]
fn bodies_of_all_other_requests_are_read() {
    assert_eq!(sent::<ClientConfig>("client_config").sdk_version, "0.38.0");
    assert_eq!(sent::<CreateSession>("create_session").tags, ["a"]);
    assert_eq!(sent::<Heartbeat>("session_heartbeat").session_id, "s");
    let sampling = sent::<CreateSamplingSession>("create_sampling_session");
    assert!(sampling.base_model.is_none() && sampling.model_path.is_some());
    let joined = sent::<JoinSamplingSession>("join_sampling_session");
    assert_eq!(joined.sampling_session_id, "s:sample:1");
    let model = sent::<CreateModel>("create_model");
    let lora = LoraSpec::from(model.lora_config.unwrap());
    assert_eq!((lora.rank, lora.seed), (8, Some(1)));
    assert!(lora.unembed && lora.mlp && lora.attn);
    assert_eq!(sent::<OfModel>("get_info").model_id, "s:train:0");
    let adam = sent::<OptimStep>("optim_step").adam().unwrap();
    assert_eq!((adam.learning_rate, adam.beta2), (1e-3, 0.95));
    assert_eq!(adam.grad_clip_norm, 0.0);
    let dimuon = sent::<OptimStep>("optim_step_dimuon").adam().unwrap_err();
    assert!(dimuon.to_string().contains("dimuon"), "{dimuon}");
    let saved = sent::<SaveWeights>("save_weights");
    assert!(saved.overwrite && saved.ttl_seconds == Some(7200));
    let loaded = sent::<LoadWeights>("load_weights");
    assert!(loaded.optimizer && loaded.seq_id == Some(6));
    let new = sent::<LoadWeights>("load_weights_new");
    assert_eq!((new.model_seq_id, new.model_id), (Some(1), None));
    let sampler = sent::<SaveForSampler>("save_weights_for_sampler");
    assert_eq!(sampler.kind, SamplerKind::Inflight);
    assert_eq!(sent::<SaveExternal>("save_weights_external").path, "out");
    assert_eq!(sent::<CopyWeights>("copy_weights").model_seq_id, Some(2));
    assert!(sent::<RetrieveFuture>("retrieve_future").allow_metadata_only);
    let futures = sent::<RetrieveFutures>("retrieve_futures");
    let FuturesTarget::SamplingSession {
        cloned_sampler_id, ..
    } = futures.target;
    assert_eq!((cloned_sampler_id, futures.prev_cursor), (2, 4));
    assert_eq!(sent::<CancelFuture>("cancel_future").request_id, "r");
    assert_eq!(sent::<SearchSessions>("search").limit, 50);
    assert!(sent::<Finish>("finish").detail.is_none());
    assert_eq!(sent::<Ttl>("ttl").ttl_seconds, None);
    assert!(
        sent::<WeightsInfo>("weights_info")
            .tinker_path
            .starts_with("tinker://")
    );
}

#[test]
fn a_wrong_field_is_named() {
    let wrong = request::<CreateModel>(br#"{"session_id": "s", "model_seq_id": "x"}"#).unwrap_err();
    assert!(wrong.to_string().starts_with("model_seq_id is"), "{wrong}");
    let unknown = request::<OfModel>(br#"{"model_id": "m", "modl": 1}"#).unwrap_err();
    assert!(unknown.to_string().contains("modl"), "{unknown}");
    assert!(request::<OfModel>(b"[]").is_err());
    assert!(request::<OfModel>(b"{\"model_id\": \"m\"} x").is_err());
}

#[test]
fn the_place_of_a_wrong_body_is_found() {
    let model = "s:train:0".to_owned();
    assert_eq!(proto_place(IMAGE), Some((model.clone(), 3)));
    assert_eq!(proto_place(&[255; 9]), None);
    assert_eq!(place(&body("optim_step_dimuon")), Some((model, 4)));
    assert_eq!(place(&body("load_weights_new")), None);
    assert_eq!(place(b"{\"model_id\": \"m\", \"seq_id\": 0}"), None);
}
