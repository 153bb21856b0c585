//! The handle that every operator takes: kernels and threads.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::amx::{self, AmxError};
use crate::pool::Pool;

/// A family of kernels for one instruction set.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KernelSet {
    /// Plain Rust, any CPU.
    Portable,
    /// NEON, 2 registers of 4 lanes: every aarch64 CPU.
    Neon,
    /// AVX2 and FMA, 8 lanes.
    Avx2,
    /// AVX-512 F, DQ, BW and VL, 16 lanes.
    Avx512,
    /// AMX tiles for matrix products of operands rounded to bfloat16 ([`crate::amx`]), the rest as in
    /// `Avx512`.
    Amx,
}

/// Reasons why a kernel set cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelSetError {
    /// The name is none of ours.
    #[error("kernel set `{0}` is unknown: use `amx`, `avx512`, `avx2`, `neon` or `portable`")]
    Unknown(String),
    /// This CPU lacks the instructions.
    #[error(
        "kernel set `{wanted}` needs instructions that this CPU lacks: use `{best}` or leave the choice open"
    )]
    Unavailable {
        /// The set asked for.
        wanted: KernelSet,
        /// The best set that would run.
        best: KernelSet,
    },
    /// AMX needs more than a CPU that has it.
    #[error("kernel set `amx`: {why}; use `{best}` or leave the choice open")]
    Amx {
        /// The missing requirement.
        why: AmxError,
        /// The best set that would run.
        best: KernelSet,
    },
}

impl KernelSetError {
    /// Whether the CPU has the instructions, and something else keeps them from use.
    #[must_use]
    pub fn is_about_this_system(&self) -> bool {
        use AmxError::{Permission, SelfCheck, System};
        match self {
            Self::Amx { why, .. } => {
                matches!(why, System { .. } | Permission { .. } | SelfCheck { .. })
            }
            _ => false,
        }
    }
}

impl KernelSet {
    const ALL: [Self; 5] = [
        Self::Portable,
        Self::Neon,
        Self::Avx2,
        Self::Avx512,
        Self::Amx,
    ];

    /// The fastest set that this CPU runs.
    #[must_use]
    pub fn detect() -> Self {
        match amx::hardware() {
            Ok(()) => Self::Amx,
            Err(_) => Self::detect_f32(),
        }
    }

    /// The fastest set that this CPU runs and whose products are those of `f32` operands.
    #[must_use]
    pub fn detect_f32() -> Self {
        Self::available_f32()
            .into_iter()
            .max()
            .unwrap_or(Self::Portable)
    }

    /// The set called `name` (`amx`, `avx512`, `avx2`, `neon`, `portable`; letter case does not matter), if
    /// it runs here.
    pub fn parse(name: &str) -> Result<Self, KernelSetError> {
        let set: Self = name.parse()?;
        let best = Self::detect();
        match (set, amx::support()) {
            (Self::Amx, Err(why)) => Err(KernelSetError::Amx { why, best }),
            _ if set.is_available() => Ok(set),
            _ => Err(KernelSetError::Unavailable { wanted: set, best }),
        }
    }

    /// All sets whose products are those of `f32` operands and that this CPU runs, slowest first.
    #[must_use]
    pub fn available_f32() -> Vec<Self> {
        Self::ALL
            .into_iter()
            .filter(|set| *set != Self::Amx && set.is_available())
            .collect()
    }

    /// Whether this CPU (and operating system) runs the set.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Neon => cfg!(target_arch = "aarch64"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
            Self::Amx => amx::support().is_ok(),
        }
    }

    /// The name that [`KernelSet::parse`] takes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }
}

impl FromStr for KernelSet {
    type Err = KernelSetError;
    fn from_str(name: &str) -> Result<Self, KernelSetError> {
        let name = name.trim();
        Self::ALL
            .into_iter()
            .find(|set| set.name().eq_ignore_ascii_case(name))
            .ok_or_else(|| KernelSetError::Unknown(name.to_owned()))
    }
}

impl fmt::Display for KernelSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A CPU with its kernels and threads. Clones share the threads.
#[derive(Debug, Clone)]
pub struct Cpu {
    kernels: KernelSet,
    pool: Arc<Pool>,
}

impl Cpu {
    /// A CPU that runs `kernels` on `threads` threads. Panics when the CPU cannot run `kernels`:
    /// get the set from [`KernelSet::detect`] or [`KernelSet::parse`].
    #[must_use]
    pub fn new(kernels: KernelSet, threads: usize) -> Self {
        // Every unsafe call of a kernel relies on this check.
        assert!(
            kernels.is_available(),
            "kernel set `{kernels}` does not run on this CPU"
        );
        Self {
            kernels,
            pool: Arc::new(Pool::new(threads)),
        }
    }

    /// Returns a device with the same threads whose kernels multiply `f32` operands; it is the same device
    /// unless that uses AMX.
    #[must_use]
    pub fn with_f32_products(&self) -> Self {
        let kernels = match self.kernels {
            KernelSet::Amx => KernelSet::Avx512,
            other => other,
        };
        Self {
            kernels,
            pool: Arc::clone(&self.pool),
        }
    }

    /// The kernels in use.
    #[must_use]
    pub fn kernels(&self) -> KernelSet {
        self.kernels
    }

    /// The threads in use.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Number of threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_and_others_are_refused() {
        assert_eq!(KernelSet::parse(" Portable "), Ok(KernelSet::Portable));
        assert_eq!("AVX2".parse(), Ok(KernelSet::Avx2));
        let neon = KernelSet::parse("neon");
        assert_eq!(neon.is_ok(), cfg!(target_arch = "aarch64"), "{neon:?}");
        assert_eq!(
            KernelSet::parse("sse"),
            Err(KernelSetError::Unknown("sse".into()))
        );
        assert!(KernelSet::available_f32().contains(&KernelSet::detect_f32()));
        assert!(KernelSet::detect().is_available());
    }

    #[test]
    fn amx_runs_or_says_what_is_missing() {
        match KernelSet::parse("amx") {
            Ok(set) => assert_eq!(set, KernelSet::detect()),
            Err(error) => {
                let KernelSetError::Amx { why, best } = &error else {
                    panic!("{error}")
                };
                assert_eq!(*best, KernelSet::detect());
                assert!(
                    !matches!(why, AmxError::SelfCheck { .. }),
                    "the instructions are there, with results that are wrong: {error}"
                );
                assert!(error.to_string().contains(&why.to_string()));
                let on_cpu = matches!(
                    why,
                    AmxError::Cpu(_) | AmxError::Avx512 | AmxError::Platform
                );
                assert_eq!(error.is_about_this_system(), !on_cpu);
            }
        }
    }
}
