//! Plain attention over a [`TreeLayout`] in f64, the reference of the fast kernels.

use super::{AttentionShape, TreeLayout};

/// Result of [`forward`]: `out` `[rows, heads * head_dim]` and `lse` `[rows, heads]`.
#[derive(Clone, Debug)]
pub(crate) struct Forward {
    /// Attention output.
    pub(crate) out: Vec<f64>,
    /// Natural logarithm of the softmax denominator.
    pub(crate) lse: Vec<f64>,
}

/// Rows that `row` attends to, in order of position; the last one is `row` itself.
fn visible_rows(layout: &TreeLayout, row: usize) -> Vec<u32> {
    let (row, segments) = (row as u32, layout.segments());
    let mut index = segments.partition_point(|s| s.start <= row) - 1;
    let mut runs = vec![(segments[index].start, row + 1)];
    while let Some(parent) = segments[index].parent {
        index = parent as usize;
        let segment = &segments[index];
        runs.push((segment.start, segment.start + segment.len));
    }
    runs.iter().rev().flat_map(|&(lo, hi)| lo..hi).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Softmax attention, `softmax(q k^T / sqrt(head_dim)) v`, of `qkv` `[rows, qkv_width]`.
///
/// # Panics
/// If `qkv` is shorter than the layout asks.
pub(crate) fn forward(layout: &TreeLayout, shape: &AttentionShape, qkv: &[f64]) -> Forward {
    let hd = shape.head_dim();
    let mut out = vec![0.0; layout.rows() * shape.out_width()];
    let mut lse = vec![0.0; layout.rows() * shape.heads()];
    for row in 0..layout.rows() {
        let visible = visible_rows(layout, row);
        for head in 0..shape.heads() {
            let scores = scores(shape, qkv, row, head, &visible);
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let log_sum = max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
            lse[row * shape.heads() + head] = log_sum;
            let start = row * shape.out_width() + head * hd;
            for (score, &key) in scores.iter().zip(&visible) {
                let p = (score - log_sum).exp();
                let value = &qkv[shape.value_at(key as usize, shape.group_of(head))..][..hd];
                for (o, v) in out[start..start + hd].iter_mut().zip(value) {
                    *o += p * v;
                }
            }
        }
    }
    Forward { out, lse }
}

fn scores(
    shape: &AttentionShape,
    qkv: &[f64],
    row: usize,
    head: usize,
    visible: &[u32],
) -> Vec<f64> {
    let hd = shape.head_dim();
    let query = &qkv[shape.query_at(row, head)..][..hd];
    let key_at = |key: u32| shape.key_at(key as usize, shape.group_of(head));
    visible
        .iter()
        .map(|&key| dot(query, &qkv[key_at(key)..][..hd]) / (hd as f64).sqrt())
        .collect()
}

/// Gradient of `sum(out * d_out)` with respect to `qkv`, `[rows, qkv_width]`.
///
/// # Panics
/// If a slice is shorter than the layout asks.
pub(crate) fn backward(
    layout: &TreeLayout,
    shape: &AttentionShape,
    qkv: &[f64],
    d_out: &[f64],
) -> Vec<f64> {
    let hd = shape.head_dim();
    let scale = 1.0 / (hd as f64).sqrt();
    let saved = forward(layout, shape, qkv);
    let mut d_qkv = vec![0.0; qkv.len()];
    for row in 0..layout.rows() {
        let visible = visible_rows(layout, row);
        for head in 0..shape.heads() {
            let start = row * shape.out_width() + head * hd;
            let d_row = &d_out[start..start + hd];
            let delta = dot(d_row, &saved.out[start..start + hd]);
            let scores = scores(shape, qkv, row, head, &visible);
            for (score, &key) in scores.iter().zip(&visible) {
                let p = (score - saved.lse[row * shape.heads() + head]).exp();
                let query_at = shape.query_at(row, head);
                let key_at = shape.key_at(key as usize, shape.group_of(head));
                let value_at = shape.value_at(key as usize, shape.group_of(head));
                let d_score = p * (dot(d_row, &qkv[value_at..value_at + hd]) - delta) * scale;
                for d in 0..hd {
                    d_qkv[query_at + d] += d_score * qkv[key_at + d];
                    d_qkv[key_at + d] += d_score * qkv[query_at + d];
                    d_qkv[value_at + d] += p * d_row[d];
                }
            }
        }
    }
    d_qkv
}
