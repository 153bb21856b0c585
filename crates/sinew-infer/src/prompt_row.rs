//! Log-probabilities of a prompt's tokens, from the rows of logits before them.
//!
//! They are those of the model itself: full softmax at temperature 1, no bias, nothing truncated.

use crate::draw::map_indices;
use crate::softmax;
use sinew_tensor::Cpu;
use sinew_tensor::logprob::SoftmaxRow;
use sinew_types::{EngineError, PromptLogprob, TokenId, TokenLogprob};

/// One token of a prompt whose log-probability is asked for.
#[derive(Clone, Copy, Debug)]
pub struct PromptRow<'a> {
    /// Index of the row before the token, in [`Batch::logit_rows`](crate::Batch::logit_rows).
    pub row: usize,
    /// Position of the token in its prompt.
    pub position: usize,
    /// The token.
    pub token: TokenId,
    /// Number of most likely tokens to report.
    pub top: u8,
    /// Tokens whose log-probabilities are reported as well.
    pub targets: &'a [TokenId],
}

/// The log-probabilities at a [`PromptRow`]. An error concerns only its request.
pub type Scored = Result<PromptLogprob, EngineError>;

/// The result of each row, from `[rows, vocab]` logits, in parallel on the threads of `cpu`. A `cpu` gives
/// log-probabilities the bits of training.
pub(crate) fn score(
    logits: &[f32],
    vocab: usize,
    rows: &[PromptRow<'_>],
    cpu: Option<&Cpu>,
) -> Vec<Scored> {
    map_indices(rows.len(), cpu, |i| {
        let row = &rows[i];
        let logits = &logits[row.row * vocab..(row.row + 1) * vocab];
        score_row(logits, row, cpu)
    })
}

/// The log-probabilities of one row.
fn score_row(logits: &[f32], row: &PromptRow<'_>, cpu: Option<&Cpu>) -> Scored {
    let maxima = softmax::maxima(logits).map_err(|e| EngineError::Failed(e.to_string()))?;
    let trained = cpu.map(|cpu| SoftmaxRow::new(cpu, logits, 1.0, None));
    let log_sum = match trained {
        Some(_) => 0.0,
        None => {
            let sum = softmax::exp_sums(logits, maxima.max, 1.0, &mut Vec::new());
            f64::from(maxima.max) + sum.ln()
        }
    };
    let of_logit = |logit: f32| match &trained {
        Some(row) => row.logprob(logit),
        None => (f64::from(logit) - log_sum) as f32,
    };
    let of_token = |id: TokenId| of_logit(logits[id as usize]);
    let count = usize::from(row.top);
    let top = softmax::largest(logits, &maxima, count, f32::NEG_INFINITY);
    Ok(PromptLogprob {
        position: row.position as u32,
        logprob: of_token(row.token),
        top: top
            .into_iter()
            .map(|(logit, id)| TokenLogprob {
                id,
                logprob: of_logit(logit),
            })
            .collect(),
        targets: row.targets.iter().map(|&id| of_token(id)).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_tensor::KernelSet;

    #[test]
    fn rows_have_the_log_softmax_of_their_tokens() {
        let logits = [1.0f32, 2.0, 0.5, -1.0, 0.0, 0.0, 9.0, 0.0];
        let exact = |row: usize, id: usize| {
            let row = &logits[row * 4..][..4];
            let sum: f64 = row.iter().map(|&z| f64::from(z).exp()).sum();
            (f64::from(row[id]) - sum.ln()) as f32
        };
        let rows = [
            PromptRow {
                row: 1,
                position: 7,
                token: 0,
                top: 1,
                targets: &[3, 2],
            },
            PromptRow {
                row: 0,
                position: 6,
                token: 2,
                top: 9,
                targets: &[],
            },
        ];
        let cpu = Cpu::new(KernelSet::detect_f32(), 2);
        for cpu in [None, Some(&cpu)] {
            let scored = score(&logits, 4, &rows, cpu);
            let scored: Vec<PromptLogprob> = scored.into_iter().map(Result::unwrap).collect();
            let near = |a: f32, b: f32| assert!((a - b).abs() < 1e-5, "{a} for {b}");
            assert_eq!((scored[0].position, scored[1].position), (7, 6));
            near(scored[0].logprob, exact(1, 0));
            near(scored[0].targets[0], exact(1, 3));
            near(scored[0].targets[1], exact(1, 2));
            assert_eq!((scored[0].top.len(), scored[0].top[0].id), (1, 2));
            near(scored[1].logprob, exact(0, 2));
            let ids: Vec<_> = scored[1].top.iter().map(|t| t.id).collect();
            assert_eq!(ids, [1, 0, 2, 3], "as many as there are, best first");
            near(scored[1].top[3].logprob, exact(0, 3));
        }
    }

    #[test]
    fn broken_logits_fail_their_own_row_only() {
        let logits = [0.0, f32::NAN, 0.0, 1.0];
        let row = |row| PromptRow {
            row,
            position: row,
            token: 0,
            top: 0,
            targets: &[],
        };
        let scored = score(&logits, 2, &[row(0), row(1)], None);
        assert!(matches!(&scored[0], Err(EngineError::Failed(why)) if why.contains("finite")));
        assert!(scored[1].is_ok());
    }
}
