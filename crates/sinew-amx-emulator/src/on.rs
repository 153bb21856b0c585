//! One test on both: emulated, and on the CPU's own tiles.

use sinew_tensor::{AmxError, Device, KernelSetError};

use crate::{EmulationError, emulated, hardware};

/// What runs the instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    Emulated,
    Hardware,
}

impl On {
    /// A device; none, with a line that says why, where the CPU has no AMX (emulated: where it lacks the AVX-512
    /// that the kernels use in addition to tiles).
    ///
    /// # Panics
    /// If results are wrong, or something else than the CPU keeps the kernels from running.
    #[must_use]
    pub fn device(self, threads: usize) -> Option<Device> {
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

/// Makes each named function, which takes an [`On`], two tests: `emulated::name` and `hardware::name`. Each needs a
/// process of its own, which `cargo nextest` gives it.
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
