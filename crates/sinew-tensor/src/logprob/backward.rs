//! Gradients of hidden states and weights, over sections of the vocabulary.
//!
//! For each section, first every strip of rows recomputes its logits, turns them into gradients and
//! adds their product with the weights to its rows' gradient; then every panel of the section adds
//! the product of the kept gradients with the hidden states to its weights' gradient. No two tasks
//! of a step add to the same values.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the kernels are pointer arithmetic throughout"
)]

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use super::strips::{Cut, Loaded, MAX_LANES, ROW_STEP, load_rows, padded_weights, transposed};
use super::{LinearLogprob, LogprobGrad, LogprobScratch};
use crate::attention::Workspaces;
use crate::attention::tile::{In, Out, Product, Right, exp2};
use crate::buffer::{Scratch, SharedMut};
use crate::device::Device;
use crate::simd::{Vector, simd_fn};

/// Values of the gradients of logits that are kept for one section.
const SECTION_LEN: usize = 4 << 20;
/// Strips whose gradients of logits lie side by side: the depth of the weights' sums.
const BLOCK_STRIPS: usize = 5;
/// Tasks that few rows are cut into, by parts of the vocabulary.
const LEAST_TASKS: usize = 8;

/// One section of the vocabulary, for all rows.
struct Section<'a> {
    cut: &'a Cut,
    input: &'a LinearLogprob<'a>,
    grad: &'a LogprobGrad<'a>,
    /// Rows of the input that have a gradient; strips are made of these.
    active: &'a [u32],
    /// Hidden states as in [`Loaded`].
    panels: &'a [f32],
    columns: &'a [f32],
    tokens: Range<usize>,
    /// Gradients of logits, `[blocks, section rows, BLOCK_STRIPS * width]`.
    d_logits: SharedMut<'a>,
}

impl Section<'_> {
    fn block_width(&self) -> usize {
        BLOCK_STRIPS * self.cut.width
    }

    /// Gradients of logits of the token at `offset` in the section and of `strip`'s first lane.
    fn d_logits_at(&self, strip: usize, offset: usize) -> usize {
        let section_rows = self.tokens.len().next_multiple_of(ROW_STEP);
        let block = strip / BLOCK_STRIPS * section_rows + offset;
        block * self.block_width() + strip % BLOCK_STRIPS * self.cut.width
    }

    /// First step: gradients of logits, and the sums of rows, `[parts, strips, padded, width]`.
    fn grade_rows(
        &self,
        dev: &Device,
        (sums, parts): (&mut [f32], usize),
        workspaces: &Workspaces,
    ) {
        let sums = SharedMut::new(sums);
        let len = self.cut.strip_len();
        dev.pool().parallel_for(self.cut.strips * parts, &|i| {
            let (strip, part) = (i / parts, i % parts);
            let at = (part * self.cut.strips + strip) * len;
            // SAFETY: each strip and part has sums of its own.
            let sums = unsafe { sums.range(at..at + len) };
            // SAFETY: strips and parts write different gradients of logits.
            workspaces.with(|m| unsafe { grade(dev, self, strip, part..parts, sums, m) });
        });
    }

    /// Second step: the gradient of the section's weights.
    fn add_weights(&self, dev: &Device, dw: &mut [f32], workspaces: &Workspaces) {
        let (panel, count) = (self.cut.panel_rows(), self.tokens.len());
        let dw = SharedMut::new(dw);
        dev.pool().parallel_for(count.div_ceil(panel), &|i| {
            let offsets = i * panel..((i + 1) * panel).min(count);
            // SAFETY: panels are disjoint, and all gradients of logits are written.
            workspaces.with(|m| unsafe { add_weights(dev, self, offsets, dw, m) });
        });
    }
}

pub(super) fn backward(
    dev: &Device,
    input: &LinearLogprob<'_>,
    grad: &LogprobGrad<'_>,
    dx: &mut [f32],
    mut dw: Option<&mut [f32]>,
    scratch: &mut LogprobScratch,
) {
    dx.fill(0.0);
    let active: Vec<u32> = (0..input.targets.len() as u32)
        .filter(|&r| grad.touches(r as usize))
        .collect();
    if active.is_empty() {
        return;
    }
    let cut = Cut::new(dev, active.len(), input.dim);
    let len = cut.strips * cut.strip_len();
    let panels = scratch.rows.take(len);
    let columns = scratch.columns.take(len);
    let to = Loaded {
        columns: &mut *columns,
        panels: Some(&mut *panels),
    };
    load_rows(
        dev,
        &cut,
        &active,
        (input.x, input.scale()),
        to,
        &scratch.workspaces,
    );
    let (panels, columns) = (&*panels, &*columns);
    // Few rows: several tasks share a strip, each with sums of its own.
    let parts = if cut.strips >= LEAST_TASKS {
        1
    } else {
        LEAST_TASKS.div_ceil(cut.strips)
    };
    let d_rows = scratch.d_rows.take(parts * len);
    d_rows.fill(0.0);
    let lanes = cut.strips.next_multiple_of(BLOCK_STRIPS) * cut.width;
    let panel = cut.panel_rows();
    let section = (SECTION_LEN / lanes / panel * panel).max(panel);
    let vocab = input.vocab();
    let d_logits = scratch
        .d_logits
        .take(section.min(vocab.next_multiple_of(ROW_STEP)) * lanes);
    for first in (0..vocab).step_by(section) {
        let tokens = first..(first + section).min(vocab);
        let d_logits = SharedMut::new(d_logits);
        let section = Section {
            cut: &cut,
            input,
            grad,
            active: &active,
            panels,
            columns,
            tokens,
            d_logits,
        };
        section.grade_rows(dev, (d_rows, parts), &scratch.workspaces);
        if let Some(dw) = dw.as_deref_mut() {
            let dw = &mut dw[first * cut.dim..section.tokens.end * cut.dim];
            section.add_weights(dev, dw, &scratch.workspaces);
        }
    }
    store_rows(dev, &cut, &active, (d_rows, parts), dx, &scratch.workspaces);
}

simd_fn! {
    /// Gradients of the logits of `strip` in part `part.start` of `part.end` of the section, and what
    /// they add to the strip's transposed gradient of hidden states, `sums` `[padded, width]`.
    ///
    /// # Safety
    /// No other task works on the same strip and part.
    fn grade<V: Product>(
        section: &Section<'_>,
        strip: usize,
        part: Range<usize>,
        sums: &mut [f32],
        memory: &mut Scratch,
    ) {
        match section.cut.vectors {
            1 => grade_strip::<V, 1>(section, strip, part, sums, memory),
            2 => grade_strip::<V, 2>(section, strip, part, sums, memory),
            _ => grade_strip::<V, 3>(section, strip, part, sums, memory),
        }
    }
}

/// What turns a logit `z` of a lane, in units of `ln 2`, into its gradient: with `b = z - lse`,
/// `2^b (scale + slope b)`, and `target` on top for the target.
struct Lanes<const NV: usize, V> {
    lse: [V; NV],
    scale: [V; NV],
    slope: [V; NV],
}

#[inline(always)]
unsafe fn load_lanes<V: Vector, const NV: usize>(
    section: &Section<'_>,
    rows: &[u32],
) -> (Lanes<NV, V>, [f32; MAX_LANES]) {
    let mut target = [0.0; MAX_LANES];
    let mut lse = [0.0; MAX_LANES];
    let mut scale = [0.0; MAX_LANES];
    let mut slope = [0.0; MAX_LANES];
    let (grad, temperature) = (section.grad, section.input.temperature);
    for (lane, &row) in rows.iter().enumerate() {
        let row = row as usize;
        lse[lane] = grad.lse[row] * LOG2_E;
        target[lane] = grad.d_logprob[row] / temperature;
        scale[lane] = -target[lane];
        if let Some((entropy, d_entropy)) = grad.entropy {
            scale[lane] -= d_entropy[row] * entropy[row] / temperature;
            slope[lane] = -d_entropy[row] * LN_2 / temperature;
        }
    }
    let zero = [V::splat(0.0); NV];
    let mut lanes = Lanes {
        lse: zero,
        scale: zero,
        slope: zero,
    };
    let mut v = 0;
    while v < NV {
        lanes.lse[v] = V::load(lse.as_ptr().add(v * V::LANES));
        lanes.scale[v] = V::load(scale.as_ptr().add(v * V::LANES));
        lanes.slope[v] = V::load(slope.as_ptr().add(v * V::LANES));
        v += 1;
    }
    (lanes, target)
}

#[inline(always)]
unsafe fn grade_strip<V: Product, const NV: usize>(
    section: &Section<'_>,
    strip: usize,
    part: Range<usize>,
    sums: &mut [f32],
    memory: &mut Scratch,
) {
    let (cut, panel_rows) = (section.cut, section.cut.panel_rows());
    let rows = &section.active[cut.strip_rows(strip)];
    let (lanes, target) = load_lanes::<V, NV>(section, rows);
    let columns = In {
        ptr: section.columns[strip * cut.strip_len()..].as_ptr(),
        stride: cut.width,
    };
    let sums = Out {
        ptr: sums.as_mut_ptr(),
        stride: cut.width,
    };
    let copy = memory.take(panel_rows * cut.padded);
    let panels = section.tokens.len().div_ceil(panel_rows);
    for panel in panels * part.start / part.end..panels * (part.start + 1) / part.end {
        let offset = panel * panel_rows;
        let count = panel_rows.min(section.tokens.len() - offset);
        let first = section.tokens.start + offset;
        let weights = padded_weights(cut, section.input.w, first, count, copy);
        let at = section.d_logits_at(strip, offset);
        let d_logits = Out {
            ptr: section.d_logits.as_ptr().add(at),
            stride: section.block_width(),
        };
        let steps = count.next_multiple_of(ROW_STEP);
        V::product::<NV, false>(steps, cut.dim, weights, columns, d_logits, false);
        for token in 0..count {
            let mut v = 0;
            while v < NV {
                let at = d_logits.ptr.add(token * d_logits.stride + v * V::LANES);
                let below = V::load(at).sub(lanes.lse[v]);
                let slope = lanes.slope[v].fma(below, lanes.scale[v]);
                exp2(below).mul(slope).store(at);
                v += 1;
            }
        }
        for (lane, &row) in rows.iter().enumerate() {
            let token = (section.input.targets[row as usize] as usize).wrapping_sub(first);
            if token < count {
                *d_logits.ptr.add(token * d_logits.stride + lane) += target[lane];
            }
        }
        V::product::<NV, true>(cut.padded, count, weights, d_logits.as_in(), sums, true);
    }
}

simd_fn! {
    /// Adds the gradient of the weights at `offsets` of the section to `dw`, the section's rows.
    ///
    /// # Safety
    /// No other task works on the same rows of `dw`.
    fn add_weights<V: Product>(
        section: &Section<'_>,
        offsets: Range<usize>,
        dw: SharedMut<'_>,
        memory: &mut Scratch,
    ) {
        add_panel::<V>(section, offsets, dw, memory);
    }
}

#[inline(always)]
unsafe fn add_panel<V: Product>(
    section: &Section<'_>,
    offsets: Range<usize>,
    dw: SharedMut<'_>,
    memory: &mut Scratch,
) {
    let cut = section.cut;
    let dw = dw.range(offsets.start * cut.dim..offsets.end * cut.dim);
    let steps = offsets.len().next_multiple_of(ROW_STEP);
    let direct = cut.dim == cut.padded && offsets.len() == steps;
    let copy = memory.take(steps * cut.padded);
    let to = if direct {
        Out {
            ptr: dw.as_mut_ptr(),
            stride: cut.dim,
        }
    } else {
        copy.fill(0.0);
        Out {
            ptr: copy.as_mut_ptr(),
            stride: cut.padded,
        }
    };
    for strip in (0..cut.strips).step_by(BLOCK_STRIPS) {
        let at = section.d_logits_at(strip, offsets.start);
        let d_logits = In {
            ptr: section.d_logits.as_ptr().add(at),
            stride: section.block_width(),
        };
        let first = strip * cut.width;
        let depth = section.block_width().min(cut.rows - first);
        let rows = Right::Panels {
            ptr: section.panels.as_ptr(),
            rows: cut.strips * cut.width,
            first,
        };
        V::accumulate(steps, cut.padded, depth, d_logits, rows, to);
    }
    if !direct {
        for (to, from) in dw
            .chunks_exact_mut(cut.dim)
            .zip(copy.chunks_exact(cut.padded))
        {
            to.iter_mut().zip(from).for_each(|(t, f)| *t += f);
        }
    }
}

/// Adds up the parts of each strip and writes its rows of `dx`.
fn store_rows(
    dev: &Device,
    cut: &Cut,
    active: &[u32],
    (d_rows, parts): (&mut [f32], usize),
    dx: &mut [f32],
    workspaces: &Workspaces,
) {
    let dx = SharedMut::new(dx);
    let d_rows = SharedMut::new(d_rows);
    let len = cut.strip_len();
    dev.pool().parallel_for(cut.strips, &|strip| {
        // SAFETY: each strip's sums, in any part, are used by one task.
        let part = |p: usize| unsafe {
            d_rows.range((p * cut.strips + strip) * len..(p * cut.strips + strip + 1) * len)
        };
        let sums = part(0);
        for p in 1..parts {
            sums.iter_mut().zip(part(p)).for_each(|(s, f)| *s += *f);
        }
        workspaces.with(|memory| {
            let rows = memory.take(len);
            // SAFETY: both hold `padded * width` values, multiples of a vector.
            unsafe { transposed(dev, cut.padded, cut.width, sums, rows) };
            for (from, &row) in rows
                .chunks_exact(cut.padded)
                .zip(&active[cut.strip_rows(strip)])
            {
                let at = row as usize * cut.dim;
                // SAFETY: each row lies in one strip.
                unsafe { dx.range(at..at + cut.dim) }.copy_from_slice(&from[..cut.dim]);
            }
        });
    });
}
