//! Rows of a table by id: token embeddings, and picking rows of any matrix.

use super::row_grain;
use crate::buffer::SharedMut;
use crate::cpu::Cpu;

/// `out[i] = table[ids[i]]`; `table`: `[vocab, dim]`, `out`: `[ids.len(), dim]`.
///
/// # Panics
/// If an id is beyond the table, or `out` has another length.
pub fn embedding(dev: &Cpu, table: &[f32], dim: usize, ids: &[u32], out: &mut [f32]) {
    assert_eq!(out.len(), ids.len() * dim, "out [{}, {dim}]", ids.len());
    let out = SharedMut::new(out);
    dev.pool()
        .parallel_ranges(ids.len(), row_grain(dim), &|rows| {
            for i in rows {
                let id = ids[i] as usize;
                // SAFETY: only this task touches row `i`.
                let out = unsafe { out.range(i * dim..(i + 1) * dim) };
                out.copy_from_slice(&table[id * dim..(id + 1) * dim]);
            }
        });
}

/// No row in the `place` of [`spread`].
pub const NOWHERE: u32 = u32::MAX;

/// The reverse of picking rows with [`embedding`]: `out[i] = x[place[i]]`, zeros where `place[i]`
/// is [`NOWHERE`]. `x`: `[n, dim]`, `out`: `[place.len(), dim]`.
///
/// # Panics
/// If a place is beyond `x`, or `out` has another length.
pub fn spread(dev: &Cpu, x: &[f32], dim: usize, place: &[u32], out: &mut [f32]) {
    assert_eq!(out.len(), place.len() * dim, "out [{}, {dim}]", place.len());
    let out = SharedMut::new(out);
    dev.pool()
        .parallel_ranges(place.len(), row_grain(dim), &|rows| {
            for i in rows {
                // SAFETY: only this task touches row `i`.
                let out = unsafe { out.range(i * dim..(i + 1) * dim) };
                match place[i] {
                    NOWHERE => out.fill(0.0),
                    at => out.copy_from_slice(&x[at as usize * dim..][..dim]),
                }
            }
        });
}

/// Gradient of [`embedding`]: `dtable[ids[i]] += dy[i]`, in the order of `i` for every table row:
/// an id that occurs often gets the same bits with any number of threads.
pub fn embedding_backward(dev: &Cpu, ids: &[u32], dy: &[f32], dim: usize, dtable: &mut [f32]) {
    assert_eq!(dy.len(), ids.len() * dim, "dy [{}, {dim}]", ids.len());
    let dtable = SharedMut::new(dtable);
    // Each task owns the ids of one residue class, so no two write one row and the order stays.
    let tasks = dev.threads().min(dy.len().div_ceil(super::GRAIN)).max(1);
    dev.pool().parallel_for(tasks, &|task| {
        for (row, &id) in dy.chunks_exact(dim.max(1)).zip(ids) {
            let id = id as usize;
            if id % tasks == task {
                // SAFETY: only this task touches rows of its residue class.
                let sum = unsafe { dtable.range(id * dim..(id + 1) * dim) };
                sum.iter_mut().zip(row).for_each(|(sum, dy)| *sum += dy);
            }
        }
    });
}
