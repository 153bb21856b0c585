//! Errors of calls to servers, and the part at fault for each.

use sinew_types::{EngineError, TokenId, WeightsId};
use std::fmt;

/// A text that does not name a mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModeError {
    /// The value is not a supported source of log-probabilities.
    #[error("{0:?} is neither raw nor processed")]
    Logprobs(String),
    /// The value is not a supported format; contains those that are.
    #[error("{0:?}: allowed: {1}")]
    Format(String, String),
}

/// Tokens that cannot be right. Positions count from the attempt's first token.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TokenFault {
    /// There is not one log-probability for each id.
    #[error("{ids} ids came with {logprobs} log-probs")]
    Count {
        /// Number of ids.
        ids: usize,
        /// Number of log-probabilities.
        logprobs: usize,
    },
    /// An id at or above the vocabulary.
    #[error("token {position}: id {id} is outside the vocabulary of {vocab}")]
    UnknownId {
        /// Index of the token.
        position: usize,
        /// The unknown id.
        id: TokenId,
        /// Size of the vocabulary; ids are below it.
        vocab: usize,
    },
    /// Missing, not finite, above 0, or a server's mark for "none".
    #[error("token {position} (id {id}): log-prob {value:?} is not a log-probability")]
    Logprob {
        /// Index of the token.
        position: usize,
        /// Id of the token.
        id: TokenId,
        /// Number that the server sent; `None`: it sent none.
        value: Option<f64>,
    },
    /// More tokens than `max_tokens`.
    #[error("{sampled} tokens came, {asked} were asked for")]
    TooMany {
        /// Tokens that came so far.
        sampled: usize,
        /// The attempt's `max_tokens`.
        asked: u32,
    },
    /// The server did not stop where the request asked it to.
    #[error("token {position} follows the stop id {stop}")]
    PastStop {
        /// Index of the token after the stop id.
        position: usize,
        /// The stop id.
        stop: TokenId,
    },
    /// The echoed prompt differs from the one that was sent.
    #[error("the server used another prompt: position {position} is {found:?}, {sent:?} was sent")]
    Prompt {
        /// Index in the prompt of the first difference, from 0.
        position: usize,
        /// Id that was sent; `None`: the sent prompt is shorter.
        sent: Option<TokenId>,
        /// Id in the echo; `None`: the echo is shorter.
        found: Option<TokenId>,
    },
    /// Log-probabilities of a prompt that cannot be right, or do not come before the first token.
    #[error("log-probs of the prompt, position {position}: {why}")]
    PromptLogprob {
        /// Index in the prompt.
        position: usize,
        /// Reason in words.
        why: String,
    },
    /// A server that repeats all tokens in each piece changed one of them.
    #[error("token {position} was {before} and became {now}")]
    Rewritten {
        /// Index of the token.
        position: usize,
        /// Id in an earlier piece.
        before: TokenId,
        /// Id in the latest piece.
        now: TokenId,
    },
    /// The reason of the end does not fit the tokens.
    #[error("the server's end ({end}) contradicts its {sampled} tokens: {why}")]
    End {
        /// The server's reason of the end, as Rust prints it for debugging.
        end: String,
        /// Number of tokens of the attempt.
        sampled: usize,
        /// Reason in words.
        why: String,
    },
}

/// The part of a call in which the time ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Opening the connection.
    Connect,
    /// Queue and prompt.
    FirstToken,
    /// A piece of the stream.
    BetweenTokens,
    /// The attempt as a whole.
    Whole,
    /// A call that does not generate.
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

/// Reasons why a call to a server failed. Tokens that it had forwarded earlier stay valid, except for
/// [`AttemptError::Version`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AttemptError {
    /// No connection: the server is down, or the address is wrong.
    #[error("connect to {to}: {why}")]
    Connect {
        /// Address or name of the server.
        to: String,
        /// Cause in words.
        why: String,
    },
    /// Nothing arrived within the time limit of a stage.
    #[error("no {stage} within {limit_s} s")]
    Timeout {
        /// Part of the call that took too long.
        stage: Stage,
        /// Limit of that part in seconds.
        limit_s: f64,
    },
    /// The server has no capacity now.
    #[error("busy, status {status}: {body}")]
    Busy {
        /// HTTP status, 429 or 503.
        status: u16,
        /// Text of the answer or the error event, or the engine's message.
        body: String,
    },
    /// A status that no other variant stands for.
    #[error("status {status}: {body}")]
    Status {
        /// HTTP status, or the code of an error event in a stream.
        status: u16,
        /// Text of the answer or the error event.
        body: String,
    },
    /// The stream ended without saying why.
    #[error("the stream was cut: {0}")]
    Cut(String),
    /// An answer that is not of the expected form: perhaps another kind of server.
    #[error("unreadable answer: {0}")]
    Protocol(String),
    /// Tokens that cannot be right.
    #[error("wrong tokens: {0}")]
    Tokens(#[from] TokenFault),
    /// The server has other weights than the attempt must be sampled by. Tokens that came before
    /// are not trusted.
    #[error("weights {expected} were to sample, the server has {found}")]
    Version {
        /// Version and lineage that the attempt was given.
        expected: WeightsId,
        /// Weights or label that the server reports.
        found: String,
    },
    /// The weights in the server's memory are not those of another replica that was given the same version.
    #[error(
        "its weights differ from those of {replica} in {differing} of {tensors} tensors, the first is \
         `{tensor}`"
    )]
    Sums {
        /// Address of the replica that loaded the version first.
        replica: String,
        /// Number of tensors that differ.
        differing: usize,
        /// Number of tensors that were compared.
        tensors: usize,
        /// Name of the first of them, with its place in the server.
        tensor: String,
    },
    /// The request itself is at fault: no server would take it.
    #[error("refused: {0}")]
    Refused(#[from] EngineError),
    /// The server, as it was started, has no such function.
    #[error("this server cannot: {0}")]
    Unsupported(String),
}

/// The part that an error blames: decides between retry, failover and giving up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The request: it fails at once, since no engine would take it.
    Request,
    /// The load of the server: the same engine may do it after a pause. Does not count as a
    /// failure.
    Moment,
    /// The engine: another one should do it; several such errors in a row open its breaker.
    Engine,
    /// The engine, whose reports are not trusted until its weights are verified again; opens its breaker at
    /// once.
    Trust,
}

impl AttemptError {
    /// The part to blame; the table of the module `http` shows which answers become which errors.
    pub fn blame(&self) -> Blame {
        match self {
            Self::Refused(_) => Blame::Request,
            Self::Busy { .. } => Blame::Moment,
            Self::Connect { .. }
            | Self::Timeout { .. }
            | Self::Status { .. }
            | Self::Cut(_)
            | Self::Unsupported(_) => Blame::Engine,
            Self::Protocol(_) | Self::Tokens(_) | Self::Version { .. } | Self::Sums { .. } => {
                Blame::Trust
            }
        }
    }
}
