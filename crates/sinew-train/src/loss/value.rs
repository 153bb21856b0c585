//! The critic's loss: squared error against the returns, with PPO's clip around the old values.

use super::LossError;

/// Value loss of one row, its derivatives, and the number of clipped tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueLoss {
    /// Weighted sum over the row's tokens.
    pub loss: f64,
    /// Derivative with respect to each value; 0 where the clip is active.
    pub d_value: Vec<f32>,
    /// Number of tokens at which the clipped error was the larger one.
    pub clipped_tokens: u64,
}

/// `Σ_t weight_t · ½·max((V−R)², (clip(V, V_old−c, V_old+c) − R)²)`, without `c` plain squared
/// error (Schulman et al. 2017; the ½ is that of verl, AReaL and OpenRLHF).
///
/// Positions with weight 0 are never read.
///
/// # Errors
/// If a column has another length than `weights`, or is not finite at a trained token.
pub fn value_loss(
    values: &[f32],
    old_values: &[f32],
    returns: &[f32],
    weights: &[f32],
    clip: Option<f32>,
) -> Result<ValueLoss, LossError> {
    let expected = weights.len();
    for (field, column) in [
        ("values", values),
        ("old_values", old_values),
        ("returns", returns),
    ] {
        if column.len() != expected {
            return Err(LossError::Length {
                field,
                actual: column.len(),
                expected,
            });
        }
        let bad = |&(t, v): &(usize, &f32)| weights[t] != 0.0 && !v.is_finite();
        if let Some((index, &value)) = column.iter().enumerate().find(bad) {
            return Err(LossError::NotFinite {
                field,
                index,
                value,
            });
        }
    }
    let mut out = ValueLoss {
        loss: 0.0,
        d_value: vec![0.0; expected],
        clipped_tokens: 0,
    };
    for t in (0..expected).filter(|&t| weights[t] != 0.0) {
        let weight = f64::from(weights[t]);
        let (value, target) = (f64::from(values[t]), f64::from(returns[t]));
        let mut error = value - target;
        let mut slope = error;
        if let Some(c) = clip.map(f64::from) {
            let old = f64::from(old_values[t]);
            let bounded = value.clamp(old - c, old + c) - target;
            if bounded.abs() > error.abs() {
                error = bounded;
                slope = 0.0;
                out.clipped_tokens += 1;
            }
        }
        out.loss += weight * 0.5 * error * error;
        out.d_value[t] = (weight * slope) as f32;
    }
    Ok(out)
}
