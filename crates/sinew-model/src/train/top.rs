//! The most likely tokens after given rows: the part of a teacher's distribution that distillation
//! over top-k tokens reads.

use super::forward::check_temperatures;
use super::{Activations, TrainModel, Weights};
use crate::decoder::{ForwardError, check_len};
use sinew_tensor::logprob::{Masks, head_logits};
use sinew_tensor::{Cpu, Mat};
use sinew_types::{TokenId, TokenLogprob};

/// Rows whose logits are in memory at once.
const CHUNK: usize = 32;

impl TrainModel {
    /// The `k` most likely tokens (fewer if fewer exist or are allowed) after each of `rows` of the
    /// last forward pass, best first, of equal ones the lower id; natural log-probabilities under
    /// the softmax of the logits, divided by the row's entry in `temperatures` (`[rows]`, above 0;
    /// empty: 1 for all), over the tokens that the row's mask allows. Rows can repeat.
    ///
    /// # Errors
    /// Works like [`TrainModel::logprobs`], but a mask has no target to bar.
    #[expect(clippy::too_many_arguments, reason = "a pass, and what it asks")]
    pub fn top(
        &self,
        dev: &Cpu,
        weights: Weights<'_>,
        acts: &mut Activations,
        rows: &[u32],
        temperatures: &[f32],
        masks: Option<Masks<'_>>,
        k: usize,
    ) -> Result<Vec<Vec<TokenLogprob>>, ForwardError> {
        let pass = self.pass(dev, weights)?;
        let all_rows = acts.current()?.rows();
        let (n, d) = (rows.len(), pass.config().d_model);
        let vocab = pass.config().vocab;
        check_temperatures(temperatures, n)?;
        if let Some(masks) = &masks {
            check_len("rows of masks", masks.rows.len(), n)?;
        }
        let place = |&row: &u32| acts.place("row of a ranking", row, all_rows);
        let places = rows.iter().map(place).collect::<Result<Vec<_>, _>>()?;
        let left = acts.left(all_rows);
        pass.ask(places, acts.xs.last(), left, &mut acts.values);
        let hidden = acts.values.h.take(n * d);
        let head = pass.values(&pass.layout().head());
        let mut logits = vec![0.0; CHUNK.min(n) * vocab];
        let mut out = Vec::with_capacity(n);
        for chunk in hidden.chunks(CHUNK * d) {
            let count = chunk.len() / d;
            let logits = &mut logits[..count * vocab];
            let (x, scratch) = (Mat::new(chunk, count, d), &mut acts.work.logprob);
            head_logits(dev, x, head, pass.head_adapter(), logits, scratch);
            for row in logits.chunks(vocab) {
                let temperature = temperatures.get(out.len()).copied().unwrap_or(1.0);
                let allowed = |id| masks.is_none_or(|masks| masks.allows(out.len(), id));
                let best = best(row, temperature, allowed, k);
                out.push(best);
            }
        }
        Ok(out)
    }
}

/// The `k` largest allowed logits as log-probabilities.
fn best(
    logits: &[f32],
    temperature: f32,
    allowed: impl Fn(TokenId) -> bool,
    k: usize,
) -> Vec<TokenLogprob> {
    let scale = 1.0 / f64::from(temperature);
    let mut ids: Vec<TokenId> = (0..logits.len() as TokenId)
        .filter(|&id| allowed(id))
        .collect();
    let logit = |id: TokenId| logits[id as usize];
    let largest = ids
        .iter()
        .map(|&id| logit(id))
        .fold(f32::NEG_INFINITY, f32::max);
    let mass = |&id: &TokenId| (f64::from(logit(id) - largest) * scale).exp();
    let sum: f64 = ids.iter().map(mass).sum();
    let lse = f64::from(largest) * scale + sum.ln();
    let k = k.min(ids.len());
    let order = |a: &TokenId, b: &TokenId| logit(*b).total_cmp(&logit(*a)).then(a.cmp(b));
    if k > 0 && k < ids.len() {
        ids.select_nth_unstable_by(k - 1, order);
    }
    ids.truncate(k);
    ids.sort_unstable_by(order);
    let entry = |id: TokenId| TokenLogprob {
        id,
        logprob: (f64::from(logit(id)) * scale - lse) as f32,
    };
    ids.into_iter().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_come_first_and_ties_go_to_the_lower_id() {
        let top = best(&[0.0, 2.0, 1.0, 2.0], 1.0, |_| true, 3);
        let ids: Vec<TokenId> = top.iter().map(|t| t.id).collect();
        assert_eq!(ids, [1, 3, 2]);
        for temperature in [0.7, 1.0, 1.2] {
            let all = best(&[0.0, 2.0, 1.0, 2.0], temperature, |_| true, 9);
            let sum: f32 = all.iter().map(|t| t.logprob.exp()).sum();
            assert!((sum - 1.0).abs() < 1e-6);
            let gap = all[0].logprob - all[3].logprob;
            assert!((gap - 2.0 / temperature).abs() < 1e-6, "{gap}");
        }
        assert!(best(&[1.0], 1.0, |_| true, 0).is_empty());
    }
    #[test]
    fn barred_tokens_are_neither_ranked_nor_counted() {
        let top = best(&[5.0, 2.0, 1.0, 2.0, 9.0], 0.7, |id| id > 0 && id < 4, 5);
        let ids: Vec<TokenId> = top.iter().map(|t| t.id).collect();
        assert_eq!(ids, [1, 3, 2]);
        let sum: f32 = top.iter().map(|t| t.logprob.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6);
        let only = best(&[5.0, 2.0], 1.0, |id| id == 1, 5);
        assert_eq!((only.len(), only[0].logprob), (1, 0.0));
    }
}
