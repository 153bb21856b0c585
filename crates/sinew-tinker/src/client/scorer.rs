//! Frozen models of a service: a second model that is never trained, or a sampler that scores prompts.

use super::api::SamplerSource;
use super::error::ClientError;
use super::flat::{FlatDatum, Place};
use super::future::Job;
use super::http::Message;
use super::model::RemoteModel;
use super::outputs::{check_outputs, passed, scores, unweighted};
use super::service::Service;
use crate::desk::types::{SampleInput, SampleOutput, SampleParams, SamplerId, SamplerRef, Stop};
use crate::types::{Tensor, TensorValues};
use crate::wire::SampleRequest;
use crate::wire::client::{read_sample_output, write_sample};
use sinew_train::checkpoint::{CheckpointError, Draft, LoadedCheckpoint};
use sinew_train::optim::{Outcome, Update};
use sinew_train::pack::MicroBatch;
use sinew_train::{OutputChoice, Policy, PolicyError, ScoreGrads, Scores, TopTokens};
use sinew_types::{PolicyVersion, TensorSource, TokenId, TokenLogprob};
use std::sync::Arc;

/// Beginning of the addresses of checkpoints.
const ADDRESS: &str = "tinker://";
/// Micro-batches of a wave.
const LANES: usize = 64;
/// Name of the calls in messages.
const CALL: &str = "asample";

/// A frozen model of a service, such as the reference of a KL term or a teacher.
#[derive(Debug)]
pub struct TinkerScorer(Source);

#[derive(Debug)]
enum Source {
    Model(RemoteModel),
    Sampler(Sampler),
}

/// A sampler whose prompts are scored.
#[derive(Debug)]
pub(super) struct Sampler {
    service: Arc<Service>,
    session: String,
    /// Number of the next request.
    next: u64,
}

impl TinkerScorer {
    pub(super) fn of_model(model: RemoteModel) -> Self {
        Self(Source::Model(model))
    }

    /// The sampler of a base model by its name, or of an address.
    pub(super) fn of_sampler(service: Arc<Service>, source: &str) -> Result<Self, ClientError> {
        Ok(Self(Source::Sampler(Sampler::open(service, source)?)))
    }

    fn no_part() -> CheckpointError {
        frozen().into()
    }
}

fn frozen() -> PolicyError {
    PolicyError::failed("the model of the Tinker service is frozen: it only scores")
}

impl Sampler {
    /// The sampler of a base model by its name, or of an address.
    pub(super) fn open(service: Arc<Service>, source: &str) -> Result<Self, ClientError> {
        let of = if source.starts_with(ADDRESS) {
            SamplerSource::Path(source.to_owned())
        } else {
            SamplerSource::Base(source.to_owned())
        };
        Ok(Self {
            session: service.sampler(&of)?,
            service,
            next: 0,
        })
    }

    /// Carries out requests, all at once.
    pub(super) fn prompts(
        &mut self,
        inputs: Vec<SampleInput>,
    ) -> Result<Vec<SampleOutput>, ClientError> {
        let mut jobs = Vec::with_capacity(inputs.len());
        for input in inputs {
            let request = SampleRequest {
                sampler: SamplerRef::Session(SamplerId::from(self.session.as_str())),
                seq: Some(self.next),
                input,
            };
            self.next += 1;
            let message = Message::json("/api/v1/asample", &write_sample(&request));
            jobs.push(Job {
                call: CALL,
                message,
                wants_protobuf: true,
            });
        }
        let results = self.service.run_group(&jobs).map_err(|e| e.error)?;
        let read =
            |body: Vec<u8>| read_sample_output(&body).map_err(|e| ClientError::unreadable(CALL, e));
        results
            .into_iter()
            .map(|payload| payload.protobuf(CALL).and_then(read))
            .collect()
    }

    /// Log-probabilities of the targets of datums.
    fn logprobs(&mut self, datums: &[&FlatDatum]) -> Result<Vec<Vec<f32>>, ClientError> {
        let inputs = datums.iter().map(|datum| scored_prompt(datum)).collect();
        let outputs = self.prompts(inputs)?;
        let pairs = datums.iter().zip(&outputs);
        pairs
            .map(|(datum, output)| target_logprobs(datum, output))
            .collect()
    }

    /// The `k` most likely tokens at each place of datums.
    fn top(
        &mut self,
        datums: &[&FlatDatum],
        k: usize,
    ) -> Result<Vec<Vec<Vec<TokenLogprob>>>, ClientError> {
        if k == 0 {
            let none = |datum: &&FlatDatum| vec![Vec::new(); datum.tokens.len()];
            return Ok(datums.iter().map(none).collect());
        }
        let ranked = |datum: &&FlatDatum| SampleInput {
            top_prompt: u32::try_from(k).unwrap_or(u32::MAX),
            ..whole_prompt(datum)
        };
        let outputs = self.prompts(datums.iter().map(ranked).collect())?;
        let pairs = datums.iter().zip(outputs);
        pairs
            .map(|(datum, output)| top_tokens(datum, output, k))
            .collect()
    }
}

/// Whether the targets of a datum are its own next tokens: then its prompt has them.
fn follows_itself(datum: &FlatDatum) -> bool {
    datum.width == 1
        && datum
            .targets
            .iter()
            .zip(datum.tokens.iter().skip(1))
            .all(|(a, b)| a == b)
}

/// The shortest request with a prompt: it samples one token, which is dropped.
pub(super) fn short_request(prompt: Vec<TokenId>) -> SampleInput {
    SampleInput {
        prompt,
        samples: 1,
        params: SampleParams {
            max_tokens: Some(1),
            seed: Some(0),
            stop: Stop::Never,
            ..SampleParams::default()
        },
        ..SampleInput::default()
    }
}

/// The request that scores the tokens of a datum and its last target, as a prompt.
fn whole_prompt(datum: &FlatDatum) -> SampleInput {
    let mut prompt: Vec<TokenId> = datum.tokens.clone();
    prompt.extend(datum.targets.last());
    SampleInput {
        prompt_logprobs: true,
        ..short_request(prompt)
    }
}

/// The request that scores the targets of a datum. Those that are not its next tokens are named.
fn scored_prompt(datum: &FlatDatum) -> SampleInput {
    let targets = (!follows_itself(datum)).then(|| Tensor {
        shape: vec![datum.tokens.len(), datum.width],
        values: TensorValues::I64(datum.targets.iter().map(|&id| i64::from(id)).collect()),
    });
    SampleInput {
        targets,
        ..whole_prompt(datum)
    }
}

/// The log-probabilities of a datum's targets in a result.
fn target_logprobs(datum: &FlatDatum, output: &SampleOutput) -> Result<Vec<f32>, ClientError> {
    let wrong = |why: &str| ClientError::unreadable(CALL, why);
    if follows_itself(datum) {
        let scored = output.prompt_logprobs.as_deref().unwrap_or_default();
        let scored: Option<Vec<f32>> = scored.iter().skip(1).copied().collect();
        let fits = scored.filter(|scored| scored.len() == datum.tokens.len());
        return fits.ok_or_else(|| wrong("it does not score each token of the prompt"));
    }
    match &output.targets {
        Some(Tensor {
            values: TensorValues::F32(values),
            ..
        }) if values.len() == datum.targets.len() => Ok(values.clone()),
        _ => Err(wrong(
            "it does not score the targets: does the service have `target_prompt_logprobs`?",
        )),
    }
}

/// The most likely tokens at each place of a datum in a result.
fn top_tokens(
    datum: &FlatDatum,
    output: SampleOutput,
    k: usize,
) -> Result<Vec<Vec<TokenLogprob>>, ClientError> {
    let wrong = || {
        let why =
            "it does not rank tokens at each place: does the service have `topk_prompt_logprobs`?";
        ClientError::unreadable(CALL, why)
    };
    let rows = output.top_prompt.unwrap_or_default();
    let rows: Option<Vec<Vec<TokenLogprob>>> = rows.into_iter().skip(1).collect();
    let mut rows = rows.ok_or_else(wrong)?;
    if rows.len() != datum.tokens.len() {
        return Err(wrong());
    }
    rows.iter_mut().for_each(|row| row.truncate(k));
    Ok(rows)
}

impl Policy for TinkerScorer {
    fn lanes(&self) -> usize {
        LANES
    }

    fn shares_prefixes(&self) -> bool {
        false
    }

    fn has_entropies(&self) -> bool {
        false
    }

    fn forward(
        &mut self,
        wave: &[&MicroBatch],
        want: OutputChoice,
    ) -> Result<Vec<Scores>, PolicyError> {
        check_outputs(want)?;
        if want.backward {
            return Err(frozen());
        }
        let passed = match &mut self.0 {
            Source::Model(model) => passed(wave, |datums| unweighted(model, datums)),
            Source::Sampler(sampler) => passed(wave, |datums| sampler.logprobs(datums)),
        };
        Ok(scores(&passed?))
    }

    fn backward(&mut self, _: &[&MicroBatch], _: &[ScoreGrads]) -> Result<(), PolicyError> {
        Err(frozen())
    }

    fn top(&mut self, wave: &[&MicroBatch], k: usize) -> Result<Vec<TopTokens>, PolicyError> {
        let Source::Sampler(sampler) = &mut self.0 else {
            return Err(PolicyError::failed(
                "models in training rank no tokens at a Tinker service: name a base model, or weights for \
                 samplers",
            ));
        };
        let passed = passed(wave, |datums| sampler.top(datums, k))?;
        let tops = passed.iter().map(|(flat, rows)| {
            let of = |place: &Place| {
                let at = place.index / flat.datums[place.datum].width;
                rows[place.datum][at].clone()
            };
            flat.places.iter().map(of).collect()
        });
        Ok(tops.collect())
    }

    fn zero_gradients(&mut self) -> Result<(), PolicyError> {
        Err(frozen())
    }

    fn apply(&mut self, _: &Update) -> Result<Outcome, PolicyError> {
        Err(frozen())
    }

    fn save(&mut self, _: &mut Draft<'_>) -> Result<Vec<String>, CheckpointError> {
        Err(Self::no_part())
    }

    fn load(&mut self, _: &LoadedCheckpoint, _: &[String], _: u64) -> Result<(), CheckpointError> {
        Err(Self::no_part())
    }

    fn weights(&mut self, _: PolicyVersion) -> Result<Arc<dyn TensorSource>, PolicyError> {
        Err(frozen())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datum(tokens: &[TokenId], targets: &[TokenId], width: usize) -> FlatDatum {
        FlatDatum {
            tokens: tokens.to_vec(),
            width,
            targets: targets.to_vec(),
        }
    }

    #[test]
    fn next_tokens_are_scored_in_the_prompt_and_others_are_named() {
        let own = datum(&[1, 2, 3], &[2, 3, 4], 1);
        let input = scored_prompt(&own);
        assert_eq!(input.prompt, [1, 2, 3, 4]);
        assert!(input.targets.is_none() && input.prompt_logprobs);
        let output = SampleOutput {
            prompt_logprobs: Some(vec![None, Some(-1.0), Some(-2.0), Some(-3.0)]),
            ..SampleOutput::default()
        };
        assert_eq!(target_logprobs(&own, &output), Ok(vec![-1.0, -2.0, -3.0]));
        let other = datum(&[1, 2], &[2, 9, 5, 6], 2);
        let named = scored_prompt(&other).targets.unwrap();
        assert_eq!(named.shape, [2, 2]);
        assert!(target_logprobs(&other, &output).is_err());
        let scored = SampleOutput {
            targets: Some(Tensor {
                shape: vec![2, 2],
                values: TensorValues::F32(vec![-1.0, -2.0, -3.0, -4.0]),
            }),
            ..SampleOutput::default()
        };
        assert_eq!(
            target_logprobs(&other, &scored),
            Ok(vec![-1.0, -2.0, -3.0, -4.0])
        );
    }

    #[test]
    fn results_that_score_too_little_are_refused() {
        let own = datum(&[1, 2], &[2, 4], 1);
        for scored in [None, Some(vec![None, Some(-1.0)]), Some(vec![None; 3])] {
            let output = SampleOutput {
                prompt_logprobs: scored,
                ..SampleOutput::default()
            };
            assert!(target_logprobs(&own, &output).is_err());
            assert!(top_tokens(&own, output, 2).is_err());
        }
        let entry = |id| TokenLogprob { id, logprob: -1.0 };
        let output = SampleOutput {
            top_prompt: Some(vec![
                None,
                Some(vec![entry(1), entry(2)]),
                Some(vec![entry(3)]),
            ]),
            ..SampleOutput::default()
        };
        let top = top_tokens(&own, output, 1).unwrap();
        assert_eq!(top, [vec![entry(1)], vec![entry(3)]]);
    }
}
