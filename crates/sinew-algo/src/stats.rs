//! Statistics of small samples.

/// Mean, 0 for no values.
pub(crate) fn mean(values: &[f64]) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    values.iter().sum::<f64>() / values.len() as f64
}

/// Unbiased standard deviation (`n − 1`), 0 for fewer than two values.
pub(crate) fn std_unbiased(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let m = mean(values);
    let squares: f64 = values.iter().map(|v| (v - m) * (v - m)).sum();
    (squares / (values.len() - 1) as f64).sqrt()
}

/// True if the range of the values is at most 1e-9 of the largest magnitude. The bound is relative, so that
/// small rewards are not considered equal.
pub(crate) fn all_equal(values: &[f64]) -> bool {
    let (low, high) = values
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), &v| {
            (l.min(v), h.max(v))
        });
    values.is_empty() || high - low <= 1e-9 * low.abs().max(high.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments() {
        assert_eq!(mean(&[]), 0.0);
        assert_eq!(std_unbiased(&[5.0]), 0.0);
        assert!((std_unbiased(&[1.0, 2.0, 3.0]) - 1.0).abs() < 1e-12);
        assert!(all_equal(&[0.1 + 0.2, 0.3]));
        assert!(!all_equal(&[1e-8, 2e-8]));
    }
}
