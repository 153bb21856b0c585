//! Scores given rows by a model: a frozen reference, a teacher, a critic, or the policy itself.

use crate::pack::MicroBatch;
use crate::policy::{OutputChoice, Policy, Scores, pack_for, waves};
use crate::trainer::{TrainError, check_scores, spread};
use sinew_types::{TokenLogprob, TrainRow};

/// Returns the log-probability of every trained token of every row (0 elsewhere), one column per row and of
/// the row's length.
///
/// Shared prefixes are computed once, at most `micro_batch_tokens` packed tokens at a time.
///
/// # Errors
/// If the rows cannot be packed or the model fails.
pub fn score_rows<P: Policy + ?Sized>(
    policy: &mut P,
    rows: &[TrainRow],
    micro_batch_tokens: usize,
) -> Result<Vec<Vec<f32>>, TrainError> {
    columns(
        policy,
        rows,
        micro_batch_tokens,
        OutputChoice::default(),
        |s| s.logprobs,
    )
}

/// Returns the critic's value before each trained token of every row (0 elsewhere), in columns as
/// [`score_rows`].
///
/// # Errors
/// If there is no critic, the rows cannot be packed, or the model fails.
pub fn score_values<P: Policy + ?Sized>(
    policy: &mut P,
    rows: &[TrainRow],
    micro_batch_tokens: usize,
) -> Result<Vec<Vec<f32>>, TrainError> {
    if !policy.has_critic() {
        return Err(TrainError::NoCritic);
    }
    let want = OutputChoice {
        values: true,
        ..OutputChoice::default()
    };
    columns(policy, rows, micro_batch_tokens, want, |s| s.values)
}

/// Returns the `k` most likely tokens of a model, such as a teacher, at the position of every trained token
/// of every row (empty elsewhere), best first.
///
/// # Errors
/// If the rows cannot be packed, or the model cannot rank tokens.
pub fn score_top<P: Policy + ?Sized>(
    policy: &mut P,
    rows: &[TrainRow],
    micro_batch_tokens: usize,
    k: usize,
) -> Result<Vec<Vec<Vec<TokenLogprob>>>, TrainError> {
    let packing = pack_for(policy, rows, micro_batch_tokens)?;
    let empty = |r: &TrainRow| vec![Vec::new(); r.tokens.len()];
    let mut columns: Vec<Vec<Vec<TokenLogprob>>> = rows.iter().map(empty).collect();
    let batches: Vec<&MicroBatch> = packing.micro_batches.iter().collect();
    for wave in waves(&batches, policy.lanes()) {
        let tops = policy.top(&wave, k)?;
        for (batch, top) in wave.iter().zip(tops) {
            for packed in &batch.rows {
                for term in &packed.terms {
                    columns[packed.row][term.t as usize].clone_from(&top[term.item as usize]);
                }
            }
        }
    }
    Ok(columns)
}

fn columns<P: Policy + ?Sized>(
    policy: &mut P,
    rows: &[TrainRow],
    micro_batch_tokens: usize,
    want: OutputChoice,
    pick: fn(Scores) -> Vec<f32>,
) -> Result<Vec<Vec<f32>>, TrainError> {
    let packing = pack_for(policy, rows, micro_batch_tokens)?;
    let mut columns: Vec<Vec<f32>> = rows.iter().map(|r| vec![0.0; r.tokens.len()]).collect();
    let batches: Vec<&MicroBatch> = packing.micro_batches.iter().collect();
    for wave in waves(&batches, policy.lanes()) {
        let all = policy.forward(&wave, want)?;
        check_scores(&wave, &all, want)?;
        for (batch, scores) in wave.iter().zip(all) {
            let items = pick(scores);
            for packed in &batch.rows {
                columns[packed.row] = spread(rows[packed.row].tokens.len(), packed, &items);
            }
        }
    }
    Ok(columns)
}
