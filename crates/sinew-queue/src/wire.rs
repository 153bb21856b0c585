//! Calls and answers between client and server, in MessagePack with names of fields.
//!
//! Values of rows travel as byte strings. A client may leave out nothing and add nothing: unknown fields are
//! refused, as both sides are of one build.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sinew_store::queue::{
    AckedRow, Consumer, LeaseBatch, LeaseId, NewRow, PutOutcome, QueueError, QueueStats,
    ReturnOutcome, RowRequest, RowState, RowView,
};
use std::borrow::Cow;

/// Content type of calls and answers.
pub(crate) const MESSAGE_PACK: &str = "application/msgpack";

/// Header that names a call which changes something: repeated with the same name, it is not done again.
pub(crate) const CALL_ID: &str = "sinew-call";

/// Maximum bytes of a call's name.
pub(crate) const MAX_CALL_ID: usize = 64;

/// Maximum bytes of a request: rows of one put, with some room for their names.
pub const MAX_REQUEST: usize = 256 << 20;

/// Bytes of rows that one lease gives at most, except for its first row or group.
pub const MAX_LEASE: u64 = 128 << 20;

/// Maximum bytes that a client reads of an answer.
pub(crate) const MAX_ANSWER: u64 = 2 << 30;

/// Maximum rows of one page of a listing.
pub const MAX_PAGE: usize = 10_000;

/// Maximum time of one wait at the server; a client that has more time asks again.
pub(crate) const MAX_WAIT_MS: u64 = 20_000;

/// A call of [`sinew_store::queue::Queue`]. Times are those of the server's clock.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Call<'a> {
    Put(Cow<'a, [NewRow]>),
    Fill(Cow<'a, [AckedRow]>),
    Join(Cow<'a, Consumer>),
    Lease(Cow<'a, RowRequest>),
    Ack(Cow<'a, str>, LeaseId, Cow<'a, [AckedRow]>),
    Release(Cow<'a, str>, LeaseId, Cow<'a, [String]>),
    /// The last part is the reason.
    Fail(Cow<'a, str>, LeaseId, Cow<'a, [String]>, Cow<'a, str>),
    /// The last part is the time in milliseconds.
    Renew(Cow<'a, str>, LeaseId, Cow<'a, [String]>, u64),
    Revive(Cow<'a, str>, Cow<'a, [String]>),
    Remove(Cow<'a, [String]>),
    Sweep(usize),
    /// Key and field.
    Read(Cow<'a, str>, Cow<'a, str>),
    /// Consumer and key.
    State(Cow<'a, str>, Cow<'a, str>),
    /// Row number after which the list starts, and the maximum number of rows.
    Rows(Option<u64>, usize),
    Stats,
}

impl Call<'_> {
    /// Whether doing it twice differs from doing it once.
    pub(crate) fn changes(&self) -> bool {
        !matches!(
            self,
            Self::Join(_) | Self::Read(..) | Self::State(..) | Self::Rows(..) | Self::Stats
        )
    }
}

/// Result of a call, or the reason why the queue refuses it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Put(Vec<PutOutcome>),
    Count(usize),
    Done,
    Loan(LeaseBatch),
    Settled(ReturnOutcome),
    Value(Option<Value>),
    State(Option<RowState>),
    Rows(Vec<RowView>),
    Stats(QueueStats),
    Refused(QueueError),
}

/// The value of a field.
pub(crate) type Value = sinew_store::queue::Field;

/// Reasons for which a call or an answer cannot be sent or read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error(transparent)]
    Encode(#[from] rmp_serde::encode::Error),
    #[error(transparent)]
    Decode(#[from] rmp_serde::decode::Error),
}

/// Encodes as MessagePack.
pub(crate) fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, WireError> {
    Ok(rmp_serde::to_vec_named(value)?)
}

/// Decodes MessagePack.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    Ok(rmp_serde::from_slice(bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_store::queue::Field;

    #[test]
    fn values_travel_as_byte_strings() {
        let rows = vec![NewRow::new("a", Field::new("trace", vec![200u8; 1000]))];
        let bytes = encode(&Call::Put(Cow::Borrowed(&rows))).unwrap();
        assert!(bytes.len() < 1200, "{}", bytes.len());
        let Call::Put(read) = decode::<Call<'static>>(&bytes).unwrap() else {
            panic!("another call");
        };
        assert_eq!(read, rows);
        assert!(decode::<Call<'static>>(&bytes[..50]).is_err());
    }
}
