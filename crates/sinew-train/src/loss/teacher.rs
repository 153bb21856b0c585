//! Divergence from a teacher's distribution, for distillation over the teacher's top tokens.

use sinew_types::Divergence;

/// Minimum probability of all other tokens together. Below it, their share of the divergence is constant,
/// which avoids division by 0.
const TAIL_FLOOR: f64 = 1e-6;

/// Divergence at one token over the teacher's top tokens and all others together, in nats, and
/// its derivatives by the policy's log-probabilities of the top tokens.
///
/// The probabilities of teacher and policy are `p` and `q`, with the rests `p_r = 1 − Σp` and `q_r = 1 − Σq`.
/// The divergence is: forward `Σ p(ln p − ln q) + p_r(ln p_r − ln q_r)` with
/// `∂/∂ln q_j = −p_j + p_r·q_j/q_r`, reverse `Σ q(ln q − ln p) + q_r(ln q_r − ln p_r)` with
/// `∂/∂ln q_j = q_j[(ln q_j − ln p_j) − (ln q_r − ln p_r)]`.
///
/// `teacher` and `policy` are log-probabilities of the same tokens, `[k]`. Merging all other tokens
/// into one outcome gives a lower bound of the full divergence.
pub fn teacher_divergence(
    divergence: Divergence,
    teacher: &[f32],
    policy: &[f32],
) -> (f64, Vec<f64>) {
    let rest = |logprobs: &[f32]| 1.0 - logprobs.iter().map(|&l| f64::from(l).exp()).sum::<f64>();
    let p_rest = rest(teacher).max(TAIL_FLOOR);
    let (q_rest, moves) = match rest(policy) {
        q if q > TAIL_FLOOR => (q, 1.0),
        _ => (TAIL_FLOOR, 0.0),
    };
    let mut value = match divergence {
        Divergence::Forward => p_rest * (p_rest / q_rest).ln(),
        Divergence::Reverse => q_rest * (q_rest / p_rest).ln(),
    };
    let mut slopes = Vec::with_capacity(policy.len());
    for (&teacher, &policy) in teacher.iter().zip(policy) {
        let (lp, lq) = (f64::from(teacher), f64::from(policy));
        let (p, q) = (lp.exp(), lq.exp());
        match divergence {
            Divergence::Forward => {
                value += p * (lp - lq);
                slopes.push(-p + moves * p_rest * q / q_rest);
            }
            Divergence::Reverse => {
                value += q * (lq - lp);
                let tail = moves * ((q_rest / p_rest).ln() + 1.0);
                slopes.push(q * (lq - lp + 1.0 - tail));
            }
        }
    }
    (value, slopes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log_softmax(logits: &[f64]) -> Vec<f64> {
        let lse = logits.iter().map(|z| z.exp()).sum::<f64>().ln();
        logits.iter().map(|z| z - lse).collect()
    }

    fn narrow(values: &[f64]) -> Vec<f32> {
        values.iter().map(|&v| v as f32).collect()
    }

    #[test]
    fn with_all_but_one_token_it_is_the_whole_divergence() {
        let p = log_softmax(&[0.3, -1.0, 0.8, 0.1]);
        let q = log_softmax(&[-0.5, 0.2, 0.4, 0.9]);
        let full =
            |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a.exp() * (a - b)).sum() };
        let (forward, _) =
            teacher_divergence(Divergence::Forward, &narrow(&p[..3]), &narrow(&q[..3]));
        let (reverse, _) =
            teacher_divergence(Divergence::Reverse, &narrow(&p[..3]), &narrow(&q[..3]));
        assert!((forward - full(&p, &q)).abs() < 1e-6);
        assert!((reverse - full(&q, &p)).abs() < 1e-6);
    }

    #[test]
    fn it_is_zero_where_both_agree_and_nowhere_less() {
        let p = narrow(&log_softmax(&[0.3, -1.0, 0.8, 0.1])[..2]);
        for divergence in [Divergence::Forward, Divergence::Reverse] {
            let (value, slopes) = teacher_divergence(divergence, &p, &p);
            assert!(value.abs() < 1e-6 && slopes.iter().all(|d| d.abs() < 1e-6));
            for other in [[-0.1, -5.0], [-3.0, -3.0], [-0.7, -0.8]] {
                assert!(teacher_divergence(divergence, &p, &other).0 > 0.0);
            }
        }
    }

    #[test]
    fn slopes_are_derivatives_and_stay_finite_at_the_edges() {
        let p = [-0.9f32, -1.4, -3.0];
        let q = [-1.6f32, -0.8, -4.0];
        let step = 1e-3;
        for divergence in [Divergence::Forward, Divergence::Reverse] {
            let (_, slopes) = teacher_divergence(divergence, &p, &q);
            for j in 0..3 {
                let at = |h: f32| {
                    let mut q = q;
                    q[j] += h;
                    teacher_divergence(divergence, &p, &q).0
                };
                let numeric = (at(step) - at(-step)) / f64::from(2.0 * step);
                assert!(
                    (slopes[j] - numeric).abs() < 2e-4,
                    "{} {numeric}",
                    slopes[j]
                );
            }
            // All the mass on one token, on either side.
            for (p, q) in [([0.0, -80.0], [-1.0, -1.0]), ([-1.0, -1.0], [0.0, -80.0])] {
                let (value, slopes) = teacher_divergence(divergence, &p, &q);
                assert!(value.is_finite() && slopes.iter().all(|d| d.is_finite()));
            }
        }
    }
}
