//! Scores of a server's models, and the frozen models that do nothing else.

use crate::client::SharedClient;
use crate::wire::{
    Bin, ForwardAnswer, ForwardBody, Lane, ScoreColumns, TopAnswer, TopBody, TopColumns, Verb,
};
use sinew_train::checkpoint::{CheckpointError, Draft, LoadedCheckpoint};
use sinew_train::optim::{Outcome, Update};
use sinew_train::pack::MicroBatch;
use sinew_train::{OutputChoice, Policy, PolicyError, ScoreGrads, Scores, TopTokens};
use sinew_types::{PolicyVersion, TensorSource, TokenLogprob};
use std::sync::Arc;

/// A server with its limits.
#[derive(Clone, Debug)]
pub(crate) struct Scoring {
    pub(crate) client: SharedClient,
    /// Maximum number of micro-batches in a wave.
    pub(crate) lanes: usize,
    /// Maximum number of ranked tokens.
    pub(crate) vocabulary: usize,
}

impl Scoring {
    /// The scores of model `of`: `policy`, `base` or the name of a frozen one; each with the load-balancing
    /// loss of its routers, 0 if it is not computed.
    ///
    /// # Errors
    /// The server's, and those of a wave that it could not compute.
    pub(crate) fn forward(
        &self,
        wave: &[&MicroBatch],
        want: OutputChoice,
        of: &str,
    ) -> Result<Vec<(Scores, f32)>, PolicyError> {
        let body = ForwardBody {
            wave: self.lanes_of(wave)?,
            of,
            entropies: want.entropies,
            values: want.values,
            backward: want.backward,
        };
        let answer: ForwardAnswer = self.client.lock().call(Verb::Forward, &body)?;
        expect("scores", answer.scores.len(), wave.len())?;
        let lanes = wave.iter().zip(&answer.scores);
        lanes
            .map(|(batch, columns)| {
                let scores = scores(columns, want, batch.items.len())?;
                Ok((scores, columns.router))
            })
            .collect()
    }

    /// The `k` most likely tokens of each item by model `of`, best first.
    ///
    /// # Errors
    /// The server's, and those of a wave that it could not compute.
    pub(crate) fn top(
        &self,
        wave: &[&MicroBatch],
        k: usize,
        of: &str,
    ) -> Result<Vec<TopTokens>, PolicyError> {
        let wave_lanes = self.lanes_of(wave)?;
        if k == 0 {
            let none = |batch: &&MicroBatch| vec![Vec::new(); batch.items.len()];
            return Ok(wave.iter().map(none).collect());
        }
        let body = TopBody {
            wave: wave_lanes,
            k: u32::try_from(k.min(self.vocabulary)).unwrap_or(u32::MAX),
            of,
        };
        let answer: TopAnswer = self.client.lock().call(Verb::Top, &body)?;
        expect("rankings", answer.tops.len(), wave.len())?;
        let lanes = wave.iter().zip(&answer.tops);
        lanes
            .map(|(batch, columns)| ranked(columns, batch.items.len()))
            .collect()
    }

    fn lanes_of<'a>(&self, wave: &[&'a MicroBatch]) -> Result<Vec<Lane<'a>>, PolicyError> {
        if !(1..=self.lanes).contains(&wave.len()) {
            return Err(PolicyError::failed(format!(
                "a wave of {} micro-batches, the torch trainer computes 1 to {}",
                wave.len(),
                self.lanes
            )));
        }
        Ok(wave.iter().map(|batch| Lane::of(batch)).collect())
    }
}

/// Refuses an answer with another number of parts.
fn expect(what: &str, found: usize, expected: usize) -> Result<(), PolicyError> {
    if found == expected {
        return Ok(());
    }
    Err(PolicyError::failed(format!(
        "the torch trainer answered {found} {what}, expected {expected}"
    )))
}

/// A column of an answer, which must have `expected` values.
fn column(what: &str, bytes: &Bin<'_>, expected: usize) -> Result<Vec<f32>, PolicyError> {
    let values = bytes.values().unwrap_or_default();
    expect(what, values.len(), expected)?;
    Ok(values)
}

fn scores(
    columns: &ScoreColumns<'_>,
    want: OutputChoice,
    items: usize,
) -> Result<Scores, PolicyError> {
    let asked = |asked: bool| if asked { items } else { 0 };
    Ok(Scores {
        logprobs: column("log-probabilities", &columns.logprobs, items)?,
        entropies: column("entropies", &columns.entropies, asked(want.entropies))?,
        values: column("values", &columns.values, asked(want.values))?,
    })
}

/// Best tokens by item. Where a mask allows fewer than `k` tokens, the others have no probability and are
/// left out.
fn ranked(columns: &TopColumns, items: usize) -> Result<TopTokens, PolicyError> {
    let ids: Vec<u32> = columns.ids.values().unwrap_or_default();
    let logprobs = column("log-probabilities of tokens", &columns.logprobs, ids.len())?;
    let k = ids.len().checked_div(items).unwrap_or(0);
    expect("ranked tokens", ids.len(), k * items)?;
    if k == 0 {
        return Ok(vec![Vec::new(); items]);
    }
    let pairs = ids.chunks(k).zip(logprobs.chunks(k));
    let item = |(ids, logprobs): (&[u32], &[f32])| -> Vec<TokenLogprob> {
        let tokens = ids.iter().zip(logprobs).filter(|(_, l)| l.is_finite());
        tokens
            .map(|(&id, &logprob)| TokenLogprob { id, logprob })
            .collect()
    };
    Ok(pairs.map(item).collect())
}

/// A frozen model of a server, such as the reference of a KL term or a teacher. It shares the processes of a
/// [`TorchPolicy`](crate::TorchPolicy), which ends them.
#[derive(Debug)]
pub struct TorchScorer {
    scoring: Scoring,
    name: String,
}

impl TorchScorer {
    pub(crate) fn new(scoring: Scoring, name: String) -> Self {
        Self { scoring, name }
    }

    fn frozen(&self) -> String {
        format!("`{}` is frozen: it only scores", self.name)
    }

    fn no_part(&self) -> CheckpointError {
        PolicyError::failed(self.frozen()).into()
    }
}

impl Policy for TorchScorer {
    fn lanes(&self) -> usize {
        self.scoring.lanes
    }

    fn forward(
        &mut self,
        wave: &[&MicroBatch],
        want: OutputChoice,
    ) -> Result<Vec<Scores>, PolicyError> {
        if want.backward || want.values {
            return Err(PolicyError::failed(self.frozen()));
        }
        let scored = self.scoring.forward(wave, want, &self.name)?;
        Ok(scored.into_iter().map(|(scores, _)| scores).collect())
    }

    fn backward(&mut self, _: &[&MicroBatch], _: &[ScoreGrads]) -> Result<(), PolicyError> {
        Err(PolicyError::failed(self.frozen()))
    }

    fn top(&mut self, wave: &[&MicroBatch], k: usize) -> Result<Vec<TopTokens>, PolicyError> {
        self.scoring.top(wave, k, &self.name)
    }

    fn zero_gradients(&mut self) -> Result<(), PolicyError> {
        Err(PolicyError::failed(self.frozen()))
    }

    fn apply(&mut self, _: &Update) -> Result<Outcome, PolicyError> {
        Err(PolicyError::failed(self.frozen()))
    }

    fn save(&mut self, _: &mut Draft<'_>) -> Result<Vec<String>, CheckpointError> {
        Err(self.no_part())
    }

    fn load(&mut self, _: &LoadedCheckpoint, _: &[String], _: u64) -> Result<(), CheckpointError> {
        Err(self.no_part())
    }

    fn weights(&mut self, _: PolicyVersion) -> Result<Arc<dyn TensorSource>, PolicyError> {
        Err(PolicyError::failed(self.frozen()))
    }
}
