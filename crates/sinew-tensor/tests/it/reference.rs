//! Plain forms of the operators in `f64`: the definition of the fast ones, which are tested against them.
//!
//! Shapes are those of the operators of the same name in [`sinew_tensor::ops`], all dense. Their gradients
//! are tested against finite differences of their forward forms.

use sinew_tensor::ops::AdamW;

/// `x · wᵀ` with `x` `[m, k]` and `w` `[n, k]`; answers `[m, n]`.
pub(crate) fn matmul_nt(x: &[f32], w: &[f32], k: usize) -> Vec<f64> {
    let dot = |a: &[f32], b: &[f32]| {
        a.iter()
            .zip(b)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum()
    };
    x.chunks_exact(k)
        .flat_map(|x| w.chunks_exact(k).map(move |w| dot(x, w)))
        .collect()
}

/// Normalizes each group of `w.len()` values.
pub(crate) fn rms_norm(x: &[f32], w: &[f32], eps: f32) -> Vec<f64> {
    x.chunks_exact(w.len())
        .flat_map(|x| {
            let rstd = rstd(x, eps);
            x.iter()
                .zip(w)
                .map(move |(&x, &w)| f64::from(x) * rstd * f64::from(w))
        })
        .collect()
}

fn rstd(x: &[f32], eps: f32) -> f64 {
    let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
    1.0 / (squares / x.len() as f64 + f64::from(eps)).sqrt()
}

/// Gradients of [`rms_norm`]: `dx` and `dw`.
pub(crate) fn rms_norm_backward(
    x: &[f32],
    w: &[f32],
    eps: f32,
    dy: &[f32],
) -> (Vec<f64>, Vec<f64>) {
    let dim = w.len();
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; dim]);
    for ((x, dy), dx) in x
        .chunks_exact(dim)
        .zip(dy.chunks_exact(dim))
        .zip(dx.chunks_exact_mut(dim))
    {
        let rstd = rstd(x, eps);
        let n: Vec<f64> = x.iter().map(|&x| f64::from(x) * rstd).collect();
        let g: Vec<f64> = dy
            .iter()
            .zip(w)
            .map(|(&dy, &w)| f64::from(dy) * f64::from(w))
            .collect();
        let mean = n.iter().zip(&g).map(|(n, g)| n * g).sum::<f64>() / dim as f64;
        for j in 0..dim {
            dx[j] = rstd * (g[j] - n[j] * mean);
            dw[j] += f64::from(dy[j]) * n[j];
        }
    }
    (dx, dw)
}

/// Turns heads of `head_dim` in rows of `heads * head_dim` to their positions; `sign` -1 turns back.
pub(crate) fn rope(
    x: &[f32],
    heads: usize,
    head_dim: usize,
    positions: &[u32],
    base: f64,
    sign: f64,
) -> Vec<f64> {
    let half = head_dim / 2;
    let mut y: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    for (row, &position) in y.chunks_exact_mut(heads * head_dim).zip(positions) {
        for head in row.chunks_exact_mut(head_dim) {
            for j in 0..half {
                let angle = f64::from(position) * base.powf(-2.0 * j as f64 / head_dim as f64);
                let (sin, cos) = (sign * angle).sin_cos();
                let (a, b) = (head[j], head[j + half]);
                head[j] = a * cos - b * sin;
                head[j + half] = b * cos + a * sin;
            }
        }
    }
    y
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `silu(gate) * up` over rows of `ff` gates and `ff` ups.
pub(crate) fn swiglu(gate_up: &[f32], ff: usize) -> Vec<f64> {
    gate_up
        .chunks_exact(2 * ff)
        .flat_map(|row| {
            let (gate, up) = row.split_at(ff);
            gate.iter()
                .zip(up)
                .map(|(&g, &u)| f64::from(g) * sigmoid(f64::from(g)) * f64::from(u))
        })
        .collect()
}

/// Gradient of [`swiglu`].
pub(crate) fn swiglu_backward(gate_up: &[f32], dout: &[f32], ff: usize) -> Vec<f64> {
    let mut grad = vec![0.0; gate_up.len()];
    for ((row, dout), grad) in gate_up
        .chunks_exact(2 * ff)
        .zip(dout.chunks_exact(ff))
        .zip(grad.chunks_exact_mut(2 * ff))
    {
        for j in 0..ff {
            let (g, u, d) = (
                f64::from(row[j]),
                f64::from(row[ff + j]),
                f64::from(dout[j]),
            );
            let s = sigmoid(g);
            grad[j] = d * u * s * (1.0 + g * (1.0 - s));
            grad[ff + j] = d * g * s;
        }
    }
    grad
}

/// Sum of the rows of `dy` `[m, n]`.
pub(crate) fn bias_backward(dy: &[f32], n: usize) -> Vec<f64> {
    let mut sums = vec![0.0; n];
    for row in dy.chunks_exact(n) {
        sums.iter_mut()
            .zip(row)
            .for_each(|(sum, &dy)| *sum += f64::from(dy));
    }
    sums
}

/// Sum of the rows of `dy` `[ids.len(), dim]` per id; answers `[vocab, dim]`.
pub(crate) fn embedding_backward(ids: &[u32], dy: &[f32], dim: usize, vocab: usize) -> Vec<f64> {
    let mut table = vec![0.0; vocab * dim];
    for (row, &id) in dy.chunks_exact(dim).zip(ids) {
        let sums = &mut table[id as usize * dim..][..dim];
        sums.iter_mut()
            .zip(row)
            .for_each(|(sum, &dy)| *sum += f64::from(dy));
    }
    table
}

/// One step of one parameter `p` with gradient `g`; answers the new `[p, m, v]`.
pub(crate) fn adamw(config: &AdamW, step: u64, [p, m, v]: [f64; 3], g: f64) -> [f64; 3] {
    let AdamW {
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
    } = *config;
    let (lr, b1, b2) = (f64::from(lr), f64::from(beta1), f64::from(beta2));
    let m = b1 * m + (1.0 - b1) * g;
    let v = b2 * v + (1.0 - b2) * g * g;
    let m_hat = m / (1.0 - b1.powf(step as f64));
    let v_hat = v / (1.0 - b2.powf(step as f64));
    let p = p - lr * f64::from(weight_decay) * p - lr * m_hat / (v_hat.sqrt() + f64::from(eps));
    [p, m, v]
}
