//! The processor that everything is computed with.
//!
//! Kernels and threads come from the environment and not from the recipe: they belong to the machine. The
//! kernel set is recorded in each trace, since other kernels round differently.

use crate::failure::Failure;
use sinew_model::Precision;
use sinew_recipe::{EnginePlan, WeightFormat};
use sinew_tensor::{Cpu, KernelSet};

/// The device of `SINEW_CPU` (a kernel set) and `SINEW_THREADS` (1 to 1024). Left out: the best kernels
/// of this processor, and a thread for each core that this process may use.
///
/// # Errors
/// If the processor lacks the kernels, or the number is out of range.
pub fn device() -> Result<Cpu, Failure> {
    let kernels = match std::env::var("SINEW_CPU") {
        Ok(name) => {
            KernelSet::parse(&name).map_err(|e| Failure::input(format!("SINEW_CPU: {e}")))?
        }
        Err(_) => {
            // A CPU that has AMX and cannot use it is worth a word; one without is not.
            if let Err(error) = KernelSet::parse("amx")
                && error.is_about_this_system()
            {
                tracing::warn!(%error, "this processor's AMX cannot be used");
            }
            KernelSet::detect()
        }
    };
    let threads = match std::env::var("SINEW_THREADS") {
        Ok(text) => match text.parse() {
            Ok(n @ 1..=1024) => n,
            _ => {
                return Err(Failure::input(format!(
                    "SINEW_THREADS = {text:?}: allowed: 1 to 1024"
                )));
            }
        },
        Err(_) => std::thread::available_parallelism().map_or(1, usize::from),
    };
    Ok(Cpu::new(kernels, threads))
}

/// The kernels in words, with how they round.
pub fn kernels(device: &Cpu) -> String {
    let rounding = match device.kernels() {
        KernelSet::Amx => {
            " (operands of products rounded to bfloat16, in engine and trainer alike)"
        }
        _ => "",
    };
    format!("{}{rounding}", device.kernels())
}

/// Storage format of the embedded engine's matrices: `engine.weights`, adapted to the kernels and the number
/// of sequences in a pass.
pub fn precision(engine: &EnginePlan, kernels: KernelSet) -> Precision {
    let asked = match engine.weights {
        WeightFormat::F32 => Precision::F32,
        WeightFormat::Bf16 => Precision::Bf16,
        WeightFormat::Int8 => Precision::Int8,
    };
    asked.suited(kernels, engine.max_num_seqs)
}
