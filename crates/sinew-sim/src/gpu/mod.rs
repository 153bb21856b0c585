//! Memory of a PyTorch trainer and of its engine, on each GPU and on the host.
//!
//! All figures are computed from sizes, not measured, unless a line states a measurement. They are upper
//! bounds for a full micro-batch. Symbols: `N` parameters, `A` those that are trained, `R` ranks, `b` bytes
//! of the compute type (f32 4, bf16 2), `T` packed tokens of a micro-batch, `L` layers, `d` width of the
//! residual stream, `V` vocabulary.
//!
//! One limit: with rows that are computed flat, a shared prefix counts once for each row, and `T` is the
//! number of tokens after that.
//!
//! Sources: bytes of states as in mixed-precision training with f32 masters (Micikevicius et al. 2018;
//! ZeRO, Rajbhandari et al. 2020); gathered layers and reduction buffers as FSDP2 of PyTorch allocates them
//! (`fully_shard`: the root stays gathered, one layer is fetched ahead, gradients are reduced in f32);
//! activations counted operation by operation as in Korthikanti et al. 2022, for RMS norms, gated
//! feed-forward layers and attention that keeps no scores.

mod engine;
mod plan;
mod trainer;
mod ways;

pub use engine::{EngineBytes, EngineSetup};
pub use plan::{GpuPlan, Gpus, PlanRow};
pub use trainer::{
    Adapters, AttentionMemory, Checkpointing, ComputeType, TrainerBytes, TrainerSetup,
};
pub use ways::KeyNames;

/// A number of bytes for people: `12.3 GB` (10^9 bytes), below one tenth of it `45 MB`.
pub(crate) fn amount(bytes: u64) -> String {
    let gb = bytes as f64 / 1e9;
    if gb < 0.095 {
        format!("{:.0} MB", bytes as f64 / 1e6)
    } else {
        format!("{gb:.1} GB")
    }
}

#[cfg(test)]
mod tests;
