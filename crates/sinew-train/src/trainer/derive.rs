//! Computes the loss from a micro-batch's scores, and its derivatives with respect to the scores.
//!
//! Rows that share a token share its item: their derivatives add up there.

use super::{Prox, StepState, TrainError};
use crate::loss::{
    LossError, MetricSums, RowInputs, ValueLoss, row_loss, teacher_divergence, value_loss,
};
use crate::pack::{MicroBatch, PackedRow, Term};
use crate::policy::{ScoreGrads, Scores};
use sinew_types::{TeacherSpec, TrainRow};

/// Computes the loss of a micro-batch's rows, and its derivatives with respect to the items' scores.
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
        if let Some(teacher) = &state.spec.teacher {
            let (logprobs, weights) = (&scores.logprobs, &columns.weights);
            let slopes = &mut grads.logprobs;
            state.report.loss +=
                teacher_loss(teacher, row, packed, logprobs, weights, slopes, &mut sums);
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

/// Computes the teacher's term of one row: adds to the items' derivatives, and returns the loss.
fn teacher_loss(
    spec: &TeacherSpec,
    row: &TrainRow,
    packed: &PackedRow,
    logprobs: &[f32],
    weights: &[f32],
    grads: &mut [f32],
    sums: &mut MetricSums,
) -> f64 {
    let mut loss = 0.0;
    let mut items = packed.tops.iter().map(|&item| item as usize);
    let tops = row.teacher_top.as_deref().unwrap_or_default();
    for (term, &weight) in packed.terms.iter().zip(weights) {
        let top = &tops[term.t as usize];
        let items: Vec<usize> = items.by_ref().take(top.len()).collect();
        let teacher: Vec<f32> = top.iter().map(|t| t.logprob).collect();
        let policy: Vec<f32> = items.iter().map(|&i| logprobs[i]).collect();
        let (value, slopes) = teacher_divergence(spec.divergence, &teacher, &policy);
        let scale = f64::from(weight) * f64::from(spec.coefficient);
        loss += scale * value;
        sums.add_teacher(scale * value, value);
        for (item, slope) in items.into_iter().zip(slopes) {
            grads[item] += (scale * slope) as f32;
        }
    }
    loss
}

/// The columns of a row's trained tokens, together with the micro-batch's scores.
struct Columns {
    weights: Vec<f32>,
    advantages: Vec<f32>,
    behaviour: Vec<f32>,
    prox: Vec<f32>,
    reference: Option<Vec<f32>>,
    logprobs: Vec<f32>,
    entropies: Vec<f32>,
    values: Vec<f32>,
    /// Values of the critic at sampling time; empty without a critic.
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
            clip: None,
            in_ratio: None,
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
