//! A model of a service: its commands, in the order of their numbers.
//!
//! A number is used once the service has taken the command. A command that was refused leaves its number to
//! the next one, since the service waits for each number.

use super::error::ClientError;
use super::future::{GroupError, Job, Payload};
use super::http::Message;
use super::options::AdapterOptions;
use super::service::Service;
use crate::types::{Datum, LossRequest, Tensor, TensorValues};
use crate::wire::client::{read_train_output, write_train_request};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Loss whose derivative by each log-probability is minus its weight.
const LOSS: &str = "cross_entropy";
/// Level of compression: the fastest.
const LEVEL: i32 = 1;
/// Names of metrics with the norm of the gradients before clipping, without their reduction.
const NORMS: [&str; 4] = ["grad_norm", "unclipped_grad_l2", "gradient_norm", "grad_l2"];

/// Numbers of one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct AdamBody {
    pub(super) learning_rate: f32,
    pub(super) beta1: f32,
    pub(super) beta2: f32,
    pub(super) eps: f32,
    pub(super) weight_decay: f32,
    /// 0: the gradients are not clipped.
    pub(super) grad_clip_norm: f32,
}

/// A model that a service holds for this session.
#[derive(Debug)]
pub(super) struct RemoteModel {
    service: Arc<Service>,
    id: String,
    /// Number of the next command, from 1.
    next: u64,
    /// Error after which no command is of use.
    broken: Option<ClientError>,
}

#[derive(Deserialize)]
struct CreatedModel {
    model_id: String,
}

#[derive(Deserialize)]
struct SavedPath {
    path: Option<String>,
}

#[derive(Deserialize)]
struct Stepped {
    #[serde(default)]
    metrics: Option<BTreeMap<String, f64>>,
}

/// Log-probabilities of the targets of each datum, `[tokens, width]`.
pub(super) type Logprobs = Vec<Vec<f32>>;

impl RemoteModel {
    /// Makes a new model.
    pub(super) fn create(
        service: Arc<Service>,
        base_model: &str,
        adapters: Option<AdapterOptions>,
        seed: u64,
    ) -> Result<Self, ClientError> {
        let call = "create_model";
        let mut body = json!({
            "type": call,
            "session_id": service.session().id,
            "model_seq_id": service.session().next_model(),
            "base_model": base_model,
            "user_metadata": service.api().labels(),
        });
        if let Some(adapters) = adapters {
            body["lora_config"] = json!({
                "rank": adapters.rank,
                // Services keep seeds in 32 bits.
                "seed": seed & 0x7fff_ffff,
                "train_attn": adapters.attn,
                "train_mlp": adapters.mlp,
                "train_unembed": adapters.unembed,
            });
        }
        let job = Job {
            call,
            message: Message::json("/api/v1/create_model", &body),
            wants_protobuf: false,
        };
        let created: CreatedModel = service.run(&job)?.json(call)?;
        Ok(Self {
            service,
            id: created.model_id,
            next: 1,
            broken: None,
        })
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// Refuses all later commands.
    pub(super) fn give_up(&mut self, error: ClientError) -> ClientError {
        self.broken.get_or_insert(error).clone()
    }

    /// Computes log-probabilities and, unless `forward_only`, adds gradients: one request for each part of
    /// `data`.
    ///
    /// # Errors
    /// If the service refuses or fails. Of a pass with gradients, the service may have added a part.
    pub(super) fn pass(
        &mut self,
        parts: &[&[Datum]],
        forward_only: bool,
    ) -> Result<Logprobs, ClientError> {
        let call = if forward_only {
            "forward"
        } else {
            "forward_backward"
        };
        let loss = LossRequest {
            name: LOSS.to_owned(),
            config: BTreeMap::new(),
        };
        let compresses = self.service.api().config.proto_compress_fwdbwd;
        let mut jobs = Vec::with_capacity(parts.len());
        for (part, seq) in parts.iter().zip(self.next..) {
            let body = write_train_request(&self.id, seq, part, &loss, forward_only);
            let body = body.map_err(|e| ClientError::unwritable(&e))?;
            let body = if compresses { packed(&body)? } else { body };
            let message = Message::protobuf("/api/v1/forward_backward", body, compresses);
            jobs.push(Job {
                call,
                message: message.wanting_protobuf(),
                wants_protobuf: true,
            });
        }
        let results = self.commands(&jobs)?;
        let mut all = Vec::new();
        for (part, result) in parts.iter().zip(results) {
            all.extend(logprobs(call, part, result)?);
        }
        Ok(all)
    }

    /// Applies the gradients, and returns the norm that they had before they were clipped, if the service
    /// reports it.
    pub(super) fn step(&mut self, adam: &AdamBody) -> Result<Option<f64>, ClientError> {
        let call = "optim_step";
        let more = json!({ "adam_params": adam });
        let stepped: Stepped = self.command(call, "/api/v1/optim_step", more)?.json(call)?;
        Ok(stepped.metrics.as_ref().and_then(norm))
    }

    /// Saves weights and optimizer state under a name, and returns their path.
    pub(super) fn save_state(&mut self, name: &str) -> Result<String, ClientError> {
        let call = "save_weights";
        let labels = self.service.api().labels();
        let more = json!({ "path": name, "overwrite": false, "user_metadata": labels });
        let saved = self.command(call, "/api/v1/save_weights", more)?;
        path_of(call, &saved)
    }

    /// Replaces weights, and the optimizer's state if asked for, by those of a path.
    pub(super) fn load_state(&mut self, path: &str, optimizer: bool) -> Result<(), ClientError> {
        let more = json!({ "path": path, "optimizer": optimizer });
        self.command("load_weights", "/api/v1/load_weights", more)?;
        Ok(())
    }

    /// Saves weights for samplers under a name for so many seconds, and returns their path.
    pub(super) fn save_for_sampler(
        &mut self,
        name: &str,
        ttl_seconds: u64,
    ) -> Result<String, ClientError> {
        let call = "save_weights_for_sampler";
        let more = json!({ "path": name, "kind": "snapshot", "ttl_seconds": ttl_seconds });
        let saved = self.command(call, "/api/v1/save_weights_for_sampler", more)?;
        path_of(call, &saved)
    }

    /// Number of the next command.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Carries out a command in JSON, to whose fields its number and model are added.
    fn command(
        &mut self,
        call: &'static str,
        path: &str,
        mut body: Value,
    ) -> Result<Payload, ClientError> {
        body["type"] = json!(call);
        body["model_id"] = json!(self.id);
        body["seq_id"] = json!(self.next);
        let job = Job {
            call,
            message: Message::json(path, &body),
            wants_protobuf: false,
        };
        let mut results = self.commands(&[job])?;
        results
            .pop()
            .ok_or_else(|| ClientError::unreadable(call, "there is no result"))
    }

    /// Carries out commands with the next numbers.
    fn commands(&mut self, jobs: &[Job]) -> Result<Vec<Payload>, ClientError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        match self.service.run_group(jobs) {
            Ok(results) => {
                self.next += jobs.len() as u64;
                Ok(results)
            }
            Err(GroupError { error, is_taken }) => {
                if is_taken {
                    self.next += jobs.len() as u64;
                }
                // The number of one refused command is free; of several, later ones may be taken.
                let is_refused = matches!(
                    error,
                    ClientError::Refused { .. } | ClientError::Key { .. } | ClientError::Setup(_)
                );
                let is_known = if is_taken {
                    matches!(error, ClientError::Failed { .. })
                } else {
                    is_refused && jobs.len() == 1
                };
                if is_known {
                    return Err(error);
                }
                Err(self.give_up(error))
            }
        }
    }
}

impl Drop for RemoteModel {
    fn drop(&mut self) {
        self.service.unload(&self.id);
    }
}

/// A body, compressed by zstd.
fn packed(body: &Bytes) -> Result<Bytes, ClientError> {
    let packed = zstd::bulk::compress(body, LEVEL);
    let packed = packed.map_err(|e| ClientError::Setup(format!("zstd: {e}")))?;
    Ok(packed.into())
}

/// The log-probabilities of a result, as many for each datum as it has targets.
fn logprobs(call: &'static str, part: &[Datum], result: Payload) -> Result<Logprobs, ClientError> {
    let output = read_train_output(&result.protobuf(call)?);
    let output = output.map_err(|e| ClientError::unreadable(call, e))?;
    let wrong = |why: String| ClientError::unreadable(call, why);
    if output.outputs.len() != part.len() {
        let (found, sent) = (output.outputs.len(), part.len());
        return Err(wrong(format!("{found} outputs for {sent} datums")));
    }
    let mut all = Vec::with_capacity(part.len());
    for (datum, mut output) in part.iter().zip(output.outputs) {
        let expected = datum.inputs.values().next().map_or(0, Tensor::len);
        let values = match output.remove(super::flat::LOGPROBS) {
            Some(Tensor {
                values: TensorValues::F32(values),
                ..
            }) => values,
            _ => return Err(wrong("an output has no `logprobs` in float32".to_owned())),
        };
        if values.len() != expected {
            let found = values.len();
            return Err(wrong(format!("{found} log-probs for {expected} targets")));
        }
        all.push(values);
    }
    Ok(all)
}

fn path_of(call: &'static str, saved: &Payload) -> Result<String, ClientError> {
    let SavedPath { path } = saved.json(call)?;
    path.ok_or_else(|| ClientError::unreadable(call, "it names no path"))
}

/// The norm of the gradients among the metrics of a step; the part after a colon is how it was combined.
fn norm(metrics: &BTreeMap<String, f64>) -> Option<f64> {
    let named = |wanted: &&str| {
        let found = metrics.iter().find(|(name, _)| {
            let name = name.split(':').next().unwrap_or_default();
            name == *wanted
        });
        found.map(|(_, value)| *value)
    };
    NORMS.iter().find_map(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_is_found_by_its_name() {
        let metrics = |name: &str| BTreeMap::from([(name.to_owned(), 0.5), ("a".to_owned(), 1.0)]);
        assert_eq!(norm(&metrics("grad_norm")), Some(0.5));
        assert_eq!(norm(&metrics("unclipped_grad_l2:mean")), Some(0.5));
        assert_eq!(norm(&metrics("grad_norm_clipped")), None);
    }
}
