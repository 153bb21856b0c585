//! The memory of the service for tests: sessions, models in the order of their commands, results.

use super::model::Table;
use super::{Answer, BASE, Fault};
use crate::desk::types::{
    SampleInput, SampleOutput, SampledSequence, SamplerRef, Stop, StopReason,
};
use crate::types::{FbOutput, Tensor, TensorValues};
use crate::wire::{
    TrainRequest, WireLimits, read_sample, read_train_request, write_sample_output,
    write_train_output,
};
use axum::body::Body;
use bytes::Bytes;
use serde_json::{Value, json};
use sinew_types::TokenLogprob;
use std::collections::BTreeMap;

/// A model with the number of its next command.
pub(in crate::client) struct Model {
    pub(in crate::client) table: Table,
    next: u64,
}

/// The result of a command.
#[derive(Clone)]
enum Done {
    Json(Value),
    Train(FbOutput),
    Sample(Box<SampleOutput>),
}

/// A command as it was sent.
pub(super) struct Command {
    /// Model, or sampling session.
    of: String,
    seq: u64,
    /// The body, by which repetitions are recognized.
    body: Bytes,
    work: Work,
}

enum Work {
    Train(TrainRequest),
    Json(String, Value),
    Sample(SampleInput),
}

impl Command {
    pub(super) fn train(body: Bytes) -> Self {
        let request = read_train_request(body.clone(), &WireLimits::default()).unwrap();
        assert_eq!(request.loss.name, "cross_entropy");
        Self {
            of: request.model.clone(),
            seq: request.seq,
            body,
            work: Work::Train(request),
        }
    }

    pub(super) fn json(path: &str, sent: &Value) -> Self {
        Self {
            of: sent["model_id"].as_str().unwrap().to_owned(),
            seq: sent["seq_id"].as_u64().unwrap(),
            body: sent.to_string().into(),
            work: Work::Json(path.to_owned(), sent.clone()),
        }
    }

    pub(super) fn sample(body: &Bytes, sent: &Value) -> Self {
        let request = read_sample(body, &WireLimits::default()).unwrap();
        let SamplerRef::Session(session) = request.sampler else {
            panic!("the client samples in sampling sessions: {sent}");
        };
        Self {
            of: session.as_str().to_owned(),
            seq: request.seq.unwrap(),
            body: body.clone(),
            work: Work::Sample(request.input),
        }
    }
}

/// Everything that a service keeps.
pub(in crate::client) struct State {
    pub(in crate::client) key: String,
    pub(in crate::client) faults: Vec<(&'static str, Fault)>,
    /// Settings for clients.
    pub(in crate::client) config: Value,
    /// Whether steps report the norm of the gradients.
    pub(in crate::client) reports_norm: bool,
    /// Bodies of steps.
    pub(in crate::client) steps: Vec<Value>,
    /// Numbers of datums of all passes, with whether they had gradients.
    pub(in crate::client) passes: Vec<(usize, bool)>,
    pub(in crate::client) models: BTreeMap<String, Model>,
    /// Logits by path.
    pub(in crate::client) saved: BTreeMap<String, Vec<f32>>,
    pub(in crate::client) deleted: Vec<String>,
    /// Weights of sampling sessions: a path or the base model.
    pub(in crate::client) samplers: BTreeMap<String, String>,
    pub(in crate::client) cancelled: Vec<String>,
    pub(in crate::client) unloaded: Vec<String>,
    sessions: u64,
    /// Commands by model and number, with their ids, and those that wait for others.
    known: BTreeMap<(String, u64), (Bytes, String)>,
    waiting: BTreeMap<(String, u64), (String, Work, Option<&'static str>)>,
    results: BTreeMap<String, Result<Done, &'static str>>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            key: "secret".to_owned(),
            faults: Vec::new(),
            config: json!({ "proto_compress_fwdbwd": true }),
            reports_norm: true,
            steps: Vec::new(),
            passes: Vec::new(),
            models: BTreeMap::new(),
            saved: BTreeMap::new(),
            deleted: Vec::new(),
            samplers: BTreeMap::new(),
            cancelled: Vec::new(),
            unloaded: Vec::new(),
            sessions: 0,
            known: BTreeMap::new(),
            waiting: BTreeMap::new(),
            results: BTreeMap::new(),
        }
    }
}

impl State {
    /// Takes the next fault of a path.
    pub(super) fn fault(&mut self, path: &str) -> Option<Fault> {
        let at = self.faults.iter().position(|(of, _)| *of == path)?;
        Some(self.faults.remove(at).1)
    }

    /// Forgets the sampling sessions, as a service that was started without its disk.
    pub(in crate::client) fn forget_samplers(&mut self) {
        self.samplers.clear();
    }

    /// Requests that are answered at once.
    pub(super) fn at_once(&mut self, path: &str, sent: &Value) -> Option<Value> {
        Some(match path {
            "client/config" => self.config.clone(),
            "healthz" => json!({ "status": "ok" }),
            "get_server_capabilities" => json!({ "supported_models": [
                { "model_name": BASE, "max_context_length": 64, "trainable": true },
            ] }),
            "create_session" => {
                self.sessions += 1;
                json!({ "session_id": format!("s{}", self.sessions) })
            }
            "session_heartbeat" => json!({ "type": "session_heartbeat" }),
            "create_model" => {
                let (session, seq) = (sent["session_id"].as_str()?, &sent["model_seq_id"]);
                let model = format!("{session}:train:{seq}");
                let table = Table::base();
                let new = Model { table, next: 1 };
                self.models.entry(model.clone()).or_insert(new);
                let id = format!("create:{model}");
                let done = json!({ "model_id": model, "type": "create_model" });
                self.results.insert(id.clone(), Ok(Done::Json(done)));
                json!({ "request_id": id })
            }
            "create_sampling_session" => {
                let seq = &sent["sampling_session_seq_id"];
                let id = format!("{}:sample:{seq}", sent["session_id"].as_str()?);
                let of = sent["model_path"].as_str().or(sent["base_model"].as_str());
                self.samplers.insert(id.clone(), of?.to_owned());
                json!({ "sampling_session_id": id })
            }
            "unload_model" => {
                let model = sent["model_id"].as_str()?.to_owned();
                self.unloaded.push(model);
                json!({ "request_id": "unload" })
            }
            "cancel_future" => {
                self.cancelled.push(sent["request_id"].as_str()?.to_owned());
                Value::Null
            }
            _ => return None,
        })
    }

    /// Takes a command, and carries out all whose turn it is.
    pub(super) fn submit(
        &mut self,
        command: Command,
        fails: Option<&'static str>,
    ) -> Result<String, (u16, String)> {
        let place = (command.of.clone(), command.seq);
        if let Some((body, id)) = self.known.get(&place) {
            return if *body == command.body {
                Ok(id.clone())
            } else {
                Err((409, format!("{place:?} holds another command")))
            };
        }
        let is_sampler = self.samplers.contains_key(&command.of);
        if !is_sampler && !self.models.contains_key(&command.of) {
            return Err((404, format!("there is no {:?}", command.of)));
        }
        let id = format!("{}:{}", command.of, command.seq);
        self.known.insert(place.clone(), (command.body, id.clone()));
        self.waiting
            .insert(place, (id.clone(), command.work, fails));
        if is_sampler {
            self.sample(&command.of, command.seq);
        } else {
            self.proceed(&command.of);
        }
        Ok(id)
    }

    /// Carries out the commands of a model in the order of their numbers.
    fn proceed(&mut self, of: &str) {
        loop {
            let next = self.models[of].next;
            let Some((id, work, fails)) = self.waiting.remove(&(of.to_owned(), next)) else {
                return;
            };
            let result = match fails {
                Some(category) => Err(category),
                None => Ok(self.carry_out(of, work)),
            };
            self.results.insert(id, result);
            if let Some(model) = self.models.get_mut(of) {
                model.next += 1;
            }
        }
    }

    fn carry_out(&mut self, of: &str, work: Work) -> Done {
        let Some(model) = self.models.get_mut(of) else {
            panic!("no model {of}");
        };
        let (path, sent) = match work {
            Work::Train(request) => {
                self.passes
                    .push((request.data.len(), !request.forward_only));
                return Done::Train(model.table.pass(&request.data, request.forward_only));
            }
            Work::Json(path, sent) => (path, sent),
            Work::Sample(_) => panic!("a model does not sample"),
        };
        let name = sent["path"].as_str().unwrap_or_default();
        Done::Json(match path.as_str() {
            "optim_step" => {
                let lr = sent["adam_params"]["learning_rate"].as_f64().unwrap();
                let norm = model.table.step(lr as f32);
                self.steps.push(sent["adam_params"].clone());
                let reported = json!({ "grad_norm": norm });
                json!({ "metrics": if self.reports_norm { reported } else { Value::Null } })
            }
            "load_weights" => {
                model.table = Table::of(self.saved[name].clone());
                json!({ "path": name, "type": path })
            }
            _ => {
                let kind = if path == "save_weights" {
                    "weights"
                } else {
                    "sampler_weights"
                };
                let saved = format!("tinker://{of}/{kind}/{name}");
                self.saved.insert(saved.clone(), model.table.logits.clone());
                json!({ "path": saved })
            }
        })
    }

    /// Carries out a request of a sampling session.
    fn sample(&mut self, of: &str, seq: u64) {
        let place = (of.to_owned(), seq);
        let Some((id, Work::Sample(input), fails)) = self.waiting.remove(&place) else {
            return;
        };
        let source = &self.samplers[of];
        let result = match (fails, self.saved.get(source)) {
            (Some(category), _) => Err(category),
            (None, Some(logits)) => Ok(Done::Sample(Box::new(sampled(
                &Table::of(logits.clone()),
                &input,
            )))),
            (None, None) if source == BASE => {
                Ok(Done::Sample(Box::new(sampled(&Table::base(), &input))))
            }
            (None, None) => Err("user"),
        };
        self.results.insert(id, result);
    }

    /// The result of a command.
    pub(super) fn retrieved(&mut self, id: &str, wants_protobuf: bool) -> Answer {
        let json = |value: Value| (200, Body::from(value.to_string()), false);
        let proto = |bytes: Bytes| (200, Body::from(bytes), true);
        match self.results.get(id) {
            None if self.known.values().any(|(_, known)| known == id) => {
                let waits = json!({ "queue_state": "active" });
                (408, Body::from(waits.to_string()), false)
            }
            None => (404, Body::from("{\"detail\": \"no such future\"}"), false),
            Some(Err(category)) => json(json!({ "error": "it failed", "category": category })),
            Some(Ok(Done::Json(value))) => json(value.clone()),
            Some(Ok(done)) => {
                assert!(wants_protobuf, "{id} is asked for in JSON");
                match done {
                    Done::Train(output) => proto(write_train_output(output).unwrap()),
                    Done::Sample(output) => proto(write_sample_output(output)),
                    Done::Json(_) => panic!("answered above"),
                }
            }
        }
    }
}

/// The result of a sample request.
fn sampled(table: &Table, input: &SampleInput) -> SampleOutput {
    let stop: &[u32] = match &input.params.stop {
        Stop::Tokens(ids) => ids,
        _ => &[],
    };
    let last = *input.prompt.last().unwrap();
    let most = input.params.max_tokens.unwrap();
    let tokens = table.sample(last, most, stop, input.params.seed.unwrap_or(0));
    let ended = tokens.last().is_some_and(|(id, _)| stop.contains(id));
    let ranked = |last: u32, k: u32| {
        let after = table.after(last).into_iter().zip(0u32..);
        let mut all: Vec<TokenLogprob> = after
            .map(|(logprob, id)| TokenLogprob { id, logprob })
            .collect();
        all.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
        all.truncate(k as usize);
        all
    };
    let before: Vec<u32> = std::iter::once(last)
        .chain(tokens.iter().map(|(id, _)| *id))
        .collect();
    let top = || before[..tokens.len()].iter();
    let pairs = || input.prompt.iter().zip(input.prompt.iter().skip(1));
    let scored = pairs().map(|(a, b)| Some(table.after(*a)[*b as usize]));
    let ranked_prompt = pairs().map(|(a, _)| Some(ranked(*a, input.top_prompt)));
    SampleOutput {
        sequences: vec![SampledSequence {
            logprobs: tokens.iter().map(|(_, logprob)| *logprob).collect(),
            stop: if ended {
                StopReason::Stop
            } else {
                StopReason::Length
            },
            top: (input.top_sample > 0)
                .then(|| top().map(|last| ranked(*last, input.top_sample)).collect()),
            tokens: before[1..].to_vec(),
        }],
        prompt_logprobs: input
            .prompt_logprobs
            .then(|| std::iter::once(None).chain(scored).collect()),
        top_prompt: (input.top_prompt > 0)
            .then(|| std::iter::once(None).chain(ranked_prompt).collect()),
        targets: input
            .targets
            .as_ref()
            .map(|asked| targets(table, input, asked)),
        cached_prompt_tokens: 1,
        ..SampleOutput::default()
    }
}

/// Log-probabilities of the tokens that are asked for at each place of a prompt.
fn targets(table: &Table, input: &SampleInput, asked: &Tensor) -> Tensor {
    let TensorValues::I64(ids) = &asked.values else {
        panic!("targets are integers");
    };
    let width = asked.shape[1];
    let score = |(at, id): (usize, &i64)| match usize::try_from(*id) {
        Ok(id) => table.after(input.prompt[at / width])[id],
        Err(_) => 0.0,
    };
    Tensor {
        shape: asked.shape.clone(),
        values: TensorValues::F32(ids.iter().enumerate().map(score).collect()),
    }
}
