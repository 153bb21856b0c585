//! What goes wrong with a call to a server, and what is to blame.

use sinew_types::{EngineError, PolicyVersion, TokenId};
use std::fmt;

/// Tokens that cannot be right.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TokenFault {
    #[error("{ids} ids came with {logprobs} log-probs")]
    Count { ids: usize, logprobs: usize },
    #[error("token {position}: id {id} is outside the vocabulary of {vocab}")]
    UnknownId {
        position: usize,
        id: TokenId,
        vocab: usize,
    },
    #[error("token {position} (id {id}): log-prob {value:?} is not a log-probability")]
    Logprob {
        position: usize,
        id: TokenId,
        value: Option<f64>,
    },
    #[error("{sampled} tokens came, {asked} were asked for")]
    TooMany { sampled: usize, asked: u32 },
    #[error("token {position} follows the stop id {stop}")]
    PastStop { position: usize, stop: TokenId },
    #[error("the server used another prompt: position {position} is {found:?}, {sent:?} was sent")]
    Prompt {
        position: usize,
        sent: Option<TokenId>,
        found: Option<TokenId>,
    },
    #[error("token {position} was {before} and became {now}")]
    Rewritten {
        position: usize,
        before: TokenId,
        now: TokenId,
    },
    #[error("the server's end ({end}) contradicts its {sampled} tokens: {why}")]
    End {
        end: String,
        sampled: usize,
        why: String,
    },
}

/// The part of a call in which the time ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Connect,
    FirstToken,
    BetweenTokens,
    Whole,
    Control,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connect => "connection",
            Self::FirstToken => "first token",
            Self::BetweenTokens => "next token",
            Self::Whole => "end of the generation",
            Self::Control => "answer",
        })
    }
}

/// Why a call to a server failed. Tokens that it had handed on before stay valid, but for
/// [`AttemptError::Version`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AttemptError {
    #[error("connect to {to}: {why}")]
    Connect { to: String, why: String },
    #[error("no {stage} within {limit_s} s")]
    Timeout { stage: Stage, limit_s: f64 },
    /// The server has no capacity now.
    #[error("busy, status {status}: {body}")]
    Busy { status: u16, body: String },
    #[error("status {status}: {body}")]
    Status { status: u16, body: String },
    /// The stream ended without saying why.
    #[error("the stream was cut: {0}")]
    Cut(String),
    #[error("unreadable answer: {0}")]
    Protocol(String),
    #[error("wrong tokens: {0}")]
    Tokens(#[from] TokenFault),
    #[error("weights {expected} were to sample, the server has {found}")]
    Version {
        expected: PolicyVersion,
        found: String,
    },
    /// The request itself is at fault: no server would take it.
    #[error("refused: {0}")]
    Refused(#[from] EngineError),
    #[error("this server cannot: {0}")]
    Unsupported(String),
}

/// Whose fault an error is: decides between retry, failover and giving up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The request's: it fails.
    Request,
    /// The load's: the same engine may do it later.
    Moment,
    /// The engine's: another one should do it; several in a row open the breaker.
    Engine,
    /// The engine's, and nothing it says is believed until it is verified again.
    Trust,
}

impl AttemptError {
    /// Whose fault it is.
    pub fn blame(&self) -> Blame {
        match self {
            Self::Refused(_) => Blame::Request,
            Self::Busy { .. } => Blame::Moment,
            Self::Connect { .. }
            | Self::Timeout { .. }
            | Self::Status { .. }
            | Self::Cut(_)
            | Self::Unsupported(_) => Blame::Engine,
            Self::Protocol(_) | Self::Tokens(_) | Self::Version { .. } => Blame::Trust,
        }
    }
}
