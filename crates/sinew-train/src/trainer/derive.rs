//! From a micro-batch's scores to the loss and its derivatives by them.

use super::{Prox, StepState, TrainError};
use crate::loss::{LossError, MetricSums, RowInputs, ValueLoss, row_loss, value_loss};
use crate::pack::{MicroBatch, PackedRow, Term};
use crate::policy::{ScoreGrads, Scores};
use sinew_types::TrainRow;

/// The loss of a micro-batch's rows and its derivatives by the items' scores.
pub(super) fn derive(
    batch: &MicroBatch,
    scores: &Scores,
    scale: f64,
    state: &mut StepState<'_>,
) -> Result<(ScoreGrads, MetricSums), TrainError> {
    let zeros = |wanted: bool| vec![0.0f32; if wanted { batch.items.len() } else { 0 }];
    let mut grads = ScoreGrads {
        logprobs: zeros(true),
        entropies: zeros(state.spec.entropy != 0.0),
        values: zeros(state.spec.value.is_some()),
    };
    let mut sums = MetricSums::default();
    for packed in &batch.rows {
        let row = &state.rows[packed.row];
        let failed = |error| TrainError::Loss {
            episode: row.episode.clone(),
            error,
        };
        let columns = Columns::gather(row, packed, scores, scale, &state.prox[packed.row]);
        let loss = row_loss(state.spec, &columns.inputs()).map_err(failed)?;
        state.report.loss += loss.loss;
        sums.merge(&loss.sums);
        for (i, term) in packed.terms.iter().enumerate() {
            let item = term.item as usize;
            grads.logprobs[item] += loss.d_logprob[i];
            if let Some(d) = grads.entropies.get_mut(item) {
                *d += loss.d_entropy[i];
            }
        }
        if let Some((coefficient, clip)) = state.spec.value {
            let value = columns.value_loss(coefficient, clip).map_err(failed)?;
            state.report.loss += value.loss;
            sums.add_values(value.loss, value.clipped_tokens);
            for (term, d) in packed.terms.iter().zip(&value.d_value) {
                grads.values[term.item as usize] += d;
            }
        }
    }
    Ok((grads, sums))
}

/// A row's trained tokens: its columns and the micro-batch's scores side by side.
struct Columns {
    weights: Vec<f32>,
    advantages: Vec<f32>,
    behaviour: Vec<f32>,
    prox: Vec<f32>,
    reference: Option<Vec<f32>>,
    logprobs: Vec<f32>,
    entropies: Vec<f32>,
    values: Vec<f32>,
    /// At sampling time; empty without a critic.
    old_values: Vec<f32>,
    returns: Vec<f32>,
}

impl Columns {
    fn gather(
        row: &TrainRow,
        packed: &PackedRow,
        scores: &Scores,
        scale: f64,
        prox: &Prox,
    ) -> Self {
        let column = |column: &[f32]| -> Vec<f32> {
            packed
                .terms
                .iter()
                .map(|term| column[term.t as usize])
                .collect()
        };
        let optional = |given: &Option<Vec<f32>>| given.as_deref().map(column);
        let items = |column: &[f32]| -> Vec<f32> {
            let item = |term: &Term| column.get(term.item as usize).copied();
            packed.terms.iter().filter_map(item).collect()
        };
        let mut weights = column(&row.weights);
        weights
            .iter_mut()
            .for_each(|w| *w = (f64::from(*w) * scale) as f32);
        let logprobs = items(&scores.logprobs);
        let given = optional(&row.prox_logprobs).or_else(|| optional(prox));
        Self {
            weights,
            advantages: column(&row.advantages),
            behaviour: column(&row.behaviour_logprobs),
            prox: given.unwrap_or_else(|| logprobs.clone()),
            reference: optional(&row.ref_logprobs),
            logprobs,
            entropies: items(&scores.entropies),
            values: items(&scores.values),
            old_values: optional(&row.values).unwrap_or_default(),
            returns: optional(&row.returns).unwrap_or_default(),
        }
    }

    fn inputs(&self) -> RowInputs<'_> {
        RowInputs {
            weights: &self.weights,
            advantages: &self.advantages,
            behaviour: &self.behaviour,
            prox: Some(&self.prox),
            reference: self.reference.as_deref(),
            logprobs: &self.logprobs,
            entropies: &self.entropies,
        }
    }

    fn value_loss(&self, coefficient: f32, clip: Option<f32>) -> Result<ValueLoss, LossError> {
        let weights: Vec<f32> = self.weights.iter().map(|w| w * coefficient).collect();
        value_loss(
            &self.values,
            &self.old_values,
            &self.returns,
            &weights,
            clip,
        )
    }
}
