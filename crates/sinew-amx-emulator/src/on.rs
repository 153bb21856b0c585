//! Tests that run on emulated tiles and on those of the CPU.

use sinew_tensor::{AmxError, Cpu, KernelSetError};

use crate::{EmulationError, emulated, hardware};

/// Execution of AMX instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// The emulator carries them out.
    Emulated,
    /// The CPU carries them out.
    Hardware,
}

impl On {
    /// Creates a device. Returns `None`, and prints the reason, if the CPU has no AMX (emulated: no AVX-512,
    /// which the kernels need in addition to tiles).
    ///
    /// # Panics
    /// Panics if results are wrong, or the kernels cannot run for another reason.
    #[must_use]
    pub fn device(self, threads: usize) -> Option<Cpu> {
        let (answer, absent): (_, fn(&AmxError) -> bool) = match self {
            Self::Emulated => {
                let answer = match emulated(threads) {
                    Err(EmulationError::Kernels(why)) => Err(why),
                    Err(other) => panic!("{other}"),
                    Ok(device) => Ok(device),
                };
                (answer, |why| matches!(why, AmxError::Avx512))
            }
            Self::Hardware => (hardware(threads), |why| {
                !matches!(why, AmxError::SelfCheck { .. } | AmxError::Emulated)
            }),
        };
        match answer {
            Ok(device) => Some(device),
            Err(KernelSetError::Amx { why, .. }) if absent(&why) => {
                eprintln!("not run {self:?}: {why}");
                None
            }
            Err(other) => panic!("{other}"),
        }
    }
}

/// Defines two tests for each named function with an [`On`] parameter: `emulated::name` and `hardware::name`.
/// Each needs its own process, as with `cargo nextest`.
#[macro_export]
macro_rules! on_both {
    ($($name:ident),* $(,)?) => {
        mod emulated {
            $(#[test]
            fn $name() {
                super::$name($crate::On::Emulated);
            })*
        }
        mod hardware {
            $(#[test]
            fn $name() {
                super::$name($crate::On::Hardware);
            })*
        }
    };
}
