//! Errors of the torch trainer.

use sinew_train::PolicyError;
use std::fmt;
use std::path::{Path, PathBuf};

/// An error that the server reported: the first one of any rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    /// Reason, for display.
    pub text: String,
    /// Rank that failed, from 0; `None` for errors of a request.
    pub rank: Option<u32>,
    /// The work in which it failed, such as `backward`.
    pub phase: Option<String>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(rank) = self.rank {
            write!(f, "rank {rank}, ")?;
        }
        if let Some(phase) = &self.phase {
            write!(f, "in {phase}: ")?;
        }
        f.write_str(&self.text)
    }
}

/// Reasons for which the torch trainer did not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TorchError {
    /// A request that all ranks refuse, or files that they cannot write. Nothing is changed, and the server
    /// is usable.
    #[error("the torch trainer refuses the request: {0}")]
    Input(Fault),
    /// A rank has no memory left. The server has to be started again.
    #[error(
        "the torch trainer has no memory left: {0}\n  hint: lower `train.micro_batch_tokens`, or set \
         `trainer.checkpointing` to \"full\" or \"offload\""
    )]
    Memory(Fault),
    /// A rank failed. The server has to be started again.
    #[error("the torch trainer failed: {0}")]
    Rank(Fault),
    /// The server is unusable since an earlier failure, which is this one. It has to be started again.
    #[error("the torch trainer is unusable since a failure: {0}")]
    Broken(Fault),
    /// Another owner with a higher fence uses the server.
    #[error("the torch trainer has another owner: {0}")]
    Fence(Fault),
    /// The number of a call is not the one that the server expects.
    #[error("the calls of the torch trainer are out of order: {0}")]
    Gap(Fault),
    /// A call took too long.
    #[error("the torch trainer did not answer `{verb}` within {seconds} s; {ranks}")]
    Deadline {
        /// Name of the call.
        verb: &'static str,
        /// Its limit, in seconds.
        seconds: u64,
        /// The phase of each rank, in words.
        ranks: String,
    },
    /// There is no connection, or the server does not accept the call.
    #[error("the torch trainer is not reached for `{verb}`: {why}")]
    Connection {
        /// Name of the call.
        verb: &'static str,
        /// Reason in words.
        why: String,
    },
    /// An answer is not that of the protocol.
    #[error("the answer of the torch trainer to `{verb}` cannot be used: {why}")]
    Answer {
        /// Name of the call.
        verb: &'static str,
        /// Reason in words.
        why: String,
    },
    /// A process of the server ended.
    #[error("rank {rank} of the torch trainer ended: {why}")]
    Ended {
        /// Its number, from 0.
        rank: usize,
        /// Its status, and the end of its standard error.
        why: String,
    },
    /// The Python, the ranks or the request cannot be prepared.
    #[error("torch trainer: {0}")]
    Setup(String),
    /// The file system refuses an operation.
    #[error("torch trainer: cannot {operation} {}: {why}", .path.display())]
    Io {
        /// The operation as a verb, such as `create`.
        operation: &'static str,
        /// File or folder of the operation.
        path: PathBuf,
        /// Error of the operating system.
        why: String,
    },
}

impl TorchError {
    /// Whether the server has computed the call, so that its number is taken.
    pub(crate) fn is_answer(&self) -> bool {
        matches!(self, Self::Input(_) | Self::Memory(_) | Self::Rank(_))
    }

    /// Whether no later call can succeed.
    pub(crate) fn is_final(&self) -> bool {
        !matches!(self, Self::Input(_) | Self::Setup(_) | Self::Io { .. })
    }

    /// Makes the error of an operation of the file system.
    pub(crate) fn io(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |error| Self::Io {
            operation,
            path,
            why: error.to_string(),
        }
    }
}

impl From<TorchError> for PolicyError {
    fn from(error: TorchError) -> Self {
        let text = error.to_string();
        match error {
            TorchError::Rank(_)
            | TorchError::Broken(_)
            | TorchError::Deadline { .. }
            | TorchError::Connection { .. }
            | TorchError::Ended { .. } => Self::Lost(text),
            TorchError::Input(_)
            | TorchError::Memory(_)
            | TorchError::Fence(_)
            | TorchError::Gap(_)
            | TorchError::Answer { .. }
            | TorchError::Setup(_)
            | TorchError::Io { .. } => Self::Failed(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_rank_and_phase() {
        let fault = Fault {
            text: "CUDA out of memory".into(),
            rank: Some(3),
            phase: Some("backward".into()),
        };
        let text = TorchError::Memory(fault.clone()).to_string();
        assert!(
            text.contains("rank 3, in backward: CUDA out of memory"),
            "{text}"
        );
        assert!(
            text.contains("hint: lower `train.micro_batch_tokens`"),
            "{text}"
        );
        let plain = Fault {
            rank: None,
            phase: None,
            ..fault
        };
        assert_eq!(
            TorchError::Input(plain).to_string(),
            "the torch trainer refuses the request: CUDA out of memory"
        );
    }
}
