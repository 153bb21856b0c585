//! Messages and reductions between training processes: the [`Comm`] trait.
//!
//! Rank 0 leads: it holds the rows, the optimizer and the checkpoints. The others compute the gradients of
//! the parts that it sends. [`SingleProcess`] is a group of one process, [`ProcessComm`] a group of processes
//! on one host.

mod process;

pub use process::{Link, ProcessComm};

use std::any::Any;
use std::fmt::Debug;

/// Reasons for which an exchange failed. The update did not take place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// A process ended, or did not answer within the deadline.
    #[error("training process {rank} of {ranks} is gone: {reason}")]
    Gone {
        rank: usize,
        ranks: usize,
        reason: String,
    },
    /// A process is running, but could not compute its part.
    #[error("training process {rank} of {ranks} failed: {reason}")]
    Failed {
        rank: usize,
        ranks: usize,
        reason: String,
    },
    /// The peer closed the connection between two messages.
    #[error("training process {rank} has ended")]
    Closed { rank: usize },
    /// The two ranks have no connection, since data parallelism needs none between followers.
    #[error(
        "training processes {from} and {to} have no connection: only those with process 0 exist"
    )]
    NoLink { from: usize, to: usize },
}

/// The group of processes that train one model together, seen from one of them (its rank).
///
/// Contract of every implementation:
/// - **Order.** All ranks call the same collective operations ([`Comm::broadcast`], [`Comm::all_reduce`],
///   [`Comm::all_gather`]) in the same order with buffers of the same lengths. Messages between two ranks
///   arrive in the order in which they were sent.
/// - **Determinism.** The sum of [`Comm::all_reduce`] is a function only of the inputs and of the number of
///   ranks, and every rank gets the same bits. Processes on one host add in the order of ranks, `((r0 + r1) +
///   r2) + ...`. Another order is right too if it is always the same: with NCCL a fixed algorithm, protocol
///   and number of channels (`NCCL_ALGO`, `NCCL_PROTO`, `NCCL_MAX_NCHANNELS`). A resumed run gets its bits
///   only from the implementation and the number of ranks that began it.
/// - **Deadlines.** No call of the leading rank waits for ever: a rank that ended, or gave no answer within
///   the deadline of the implementation, is an error. Other ranks wait for work without limit, and end when
///   rank 0 does. An error makes the group unusable. NCCL has to be asked for this (`ncclCommGetAsyncError`,
///   `ncclCommAbort`).
/// - **Memory.** Buffers here lie in host memory. A policy on a device need not pass through them: with
///   `(comm as &mut dyn Any).downcast_mut()` it reaches its own crate's communicator, and sums its device
///   buffers in [`Policy::reduce_gradients`](crate::Policy::reduce_gradients).
///
/// [`crate::conformance::comm`] tests it.
pub trait Comm: Any + Debug + Send {
    /// Number of this process, from 0.
    fn rank(&self) -> usize;

    /// Number of processes, this one included.
    fn ranks(&self) -> usize;

    /// Sends a message to one rank. Returns when the message is queued, possibly before it is read.
    fn send(&mut self, to: usize, message: &[u8]) -> Result<(), CommError>;

    /// Receives the next message of one rank.
    ///
    /// # Errors
    /// [`CommError::Closed`] if the other end was closed between two messages, which is how a group
    /// ends.
    fn receive(&mut self, from: usize) -> Result<Vec<u8>, CommError>;

    /// Overwrites the buffers of all ranks with those of rank 0.
    fn broadcast(&mut self, buffers: &mut [&mut [f32]]) -> Result<(), CommError>;

    /// Replaces the buffers of all ranks by their sums, element by element.
    fn all_reduce(&mut self, buffers: &mut [&mut [f32]]) -> Result<(), CommError>;

    /// Exchanges one message per rank; returns the messages of all ranks in rank order.
    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError>;
}

/// Group of a single process, which has nothing to exchange.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleProcess;

impl Comm for SingleProcess {
    fn rank(&self) -> usize {
        0
    }

    fn ranks(&self) -> usize {
        1
    }

    fn send(&mut self, to: usize, _: &[u8]) -> Result<(), CommError> {
        Err(CommError::NoLink { from: 0, to })
    }

    fn receive(&mut self, from: usize) -> Result<Vec<u8>, CommError> {
        Err(CommError::NoLink { from, to: 0 })
    }

    fn broadcast(&mut self, _: &mut [&mut [f32]]) -> Result<(), CommError> {
        Ok(())
    }

    fn all_reduce(&mut self, _: &mut [&mut [f32]]) -> Result<(), CommError> {
        Ok(())
    }

    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        Ok(vec![own.to_vec()])
    }
}
