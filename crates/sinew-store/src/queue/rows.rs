//! Plain data of the queue: rows, consumers, leases, refusals.

pub use crate::error::QueueError;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Names of common fields. Others may be used, too.
pub mod fields {
    /// Name of the field with the compressed trace of the episode.
    pub const TRACE: &str = "trace";
    /// Name of the field with the episode's outcome.
    pub const REWARD: &str = "reward";
}

/// Id of a lease: the rows that a holder received in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

/// Limits of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Maximum number of rows that are not done. Default 65,536. Further puts are refused, which slows the
    /// producer down.
    pub max_rows: usize,
    /// Maximum bytes of their fields. Default 1 GiB. Fields that consumers write count but are never refused,
    /// since a refusal would keep rows in the queue.
    pub max_bytes: u64,
    /// Maximum number of leases of a row by one consumer, after which it is dead for that consumer. Default
    /// 8. A row that crashes every holder therefore does not block the others.
    pub max_attempts: u32,
}

impl Default for QueueLimits {
    fn default() -> Self {
        Self {
            max_rows: 65_536,
            max_bytes: 1 << 30,
            max_attempts: 8,
        }
    }
}

/// A named value of a row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Field {
    /// Name, 1 to [`MAX_NAME`] bytes.
    pub name: String,
    /// Value, which the queue does not interpret. Clones share it.
    #[serde(with = "shared")]
    pub value: Bytes,
}

impl Field {
    /// Creates a field with this name and value.
    pub fn new(name: impl Into<String>, value: impl Into<Bytes>) -> Self {
        Self {
            name: name.into(),
            value: value.into(),
        }
    }
}

/// Returns the value of the field with this name.
pub fn field<'a>(fields: &'a [Field], name: &str) -> Option<&'a Bytes> {
    fields.iter().find(|f| f.name == name).map(|f| &f.value)
}

/// Values as byte strings, where the default would be lists of numbers.
mod shared {
    use bytes::Bytes;
    use serde::de::{Deserializer, Error, Visitor};
    use serde::ser::Serializer;

    pub(super) fn serialize<S: Serializer>(value: &Bytes, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(value)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Bytes, D::Error> {
        from.deserialize_byte_buf(ByteString)
    }

    struct ByteString;

    impl Visitor<'_> for ByteString {
        type Value = Bytes;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a byte string")
        }
        fn visit_bytes<E: Error>(self, value: &[u8]) -> Result<Bytes, E> {
            Ok(Bytes::copy_from_slice(value))
        }
        fn visit_byte_buf<E: Error>(self, value: Vec<u8>) -> Result<Bytes, E> {
            Ok(value.into())
        }
    }
}

/// Maximum bytes of the name of a field, a consumer or a holder.
pub const MAX_NAME: usize = 256;

/// Maximum bytes of a key, and of a group's name.
pub const MAX_KEY: usize = 1024;

/// Maximum rows of one call.
pub const MAX_CALL_ROWS: usize = 65_536;

/// Maximum number of field names in one queue, since a row's set of fields is one 64-bit word.
pub const MAX_FIELDS: usize = 64;

/// Maximum consumers of one queue.
pub const MAX_CONSUMERS: usize = 32;

/// Maximum bytes of a reason; a longer one is cut.
pub const MAX_REASON: usize = 512;

/// A row to put. Rows with the same key are the same row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewRow {
    /// Unique in the queue, chosen by the producer.
    pub key: String,
    /// Group name; rows with the same name belong together. Empty: the row has no group.
    pub group: String,
    /// Number of rows in the complete group, 1 or more. The largest value among its rows counts. Further rows
    /// of that name start another group.
    pub group_size: u32,
    /// Priority; rows with a higher one are leased first.
    pub priority: i32,
    /// Number of tokens of the row, for limits and for batches of equal size.
    pub tokens: u64,
    /// Oldest weights version that sampled tokens of the row.
    pub version: u64,
    /// Fields that are known when the row is put.
    pub fields: Vec<Field>,
}

impl NewRow {
    /// Creates a row without a group, with one field.
    pub fn new(key: impl Into<String>, field: Field) -> Self {
        Self {
            key: key.into(),
            group: String::new(),
            group_size: 1,
            priority: 0,
            tokens: 0,
            version: 0,
            fields: vec![field],
        }
    }

    /// Bytes of its fields.
    pub fn bytes(&self) -> u64 {
        self.fields.iter().map(|f| f.value.len() as u64).sum()
    }
}

/// Result of putting a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PutOutcome {
    /// The row was added.
    New,
    /// The key was known, in any state; the row was not changed.
    Duplicate,
}

/// A consumer: a reader of the queue with a separate cursor. Any number of holders, in any number of
/// processes, may lease under its name; each row is leased to one of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Consumer {
    /// Name, 1 to [`MAX_NAME`] bytes.
    pub name: String,
    /// Fields that a row must have before it is ready. They are returned with the lease.
    pub needs: Vec<String>,
    /// Fields that each of its acks must contain. A row that already has all of them is not ready for it. No
    /// other consumer may write them.
    pub writes: Vec<String>,
    /// Whether rows wait for this consumer: a row is done, and its fields are deleted, once every consumer
    /// with this mark has acked it.
    pub last: bool,
}

/// Order of ready rows with equal priority; a higher priority always comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Oldest put first.
    #[default]
    Oldest,
    /// Newest version first.
    Freshest,
}

/// Selection of ready rows. All conditions apply together. The first row or group is returned even if it
/// exceeds `bytes` or `tokens`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Maximum number of rows, 1 to [`MAX_CALL_ROWS`].
    pub rows: usize,
    /// Maximum bytes of all their fields.
    pub bytes: u64,
    /// Maximum number of tokens.
    pub tokens: u64,
    /// Whether to return only complete groups whose rows are all ready or already acked.
    pub whole_groups: bool,
    /// Order of the rows.
    pub order: Order,
    /// Minimum version of the rows; with `whole_groups` of all rows of a group.
    pub from_version: u64,
    /// Number of parts into which the rows are divided, with similar numbers of tokens; 1 or more.
    pub parts: usize,
}

impl Sample {
    /// Selects the oldest rows, at most `rows`.
    pub fn rows(rows: usize) -> Self {
        Self {
            rows,
            bytes: u64::MAX,
            tokens: u64::MAX,
            whole_groups: false,
            order: Order::Oldest,
            from_version: 0,
            parts: 1,
        }
    }
}

/// Rows to lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowSelection {
    /// Rows that the queue selects.
    Sample(Sample),
    /// Rows with these keys: all of them or none.
    Keys(Vec<String>),
}

/// A request for rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowRequest {
    /// Name of a consumer that has joined.
    pub consumer: String,
    /// Name of the worker, shown in reports.
    pub holder: String,
    /// Duration of the lease in milliseconds, 1 or more. Afterwards, other holders may lease the rows.
    pub ttl_ms: u64,
    pub take: RowSelection,
}

/// A leased row as its holder receives it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasedRow {
    /// `key` and `group` as put.
    pub key: String,
    pub group: String,
    /// Number of the delivery to this consumer, from 1.
    pub attempt: u32,
    /// `tokens` and `version` as put.
    pub tokens: u64,
    pub version: u64,
    /// Index of the part, below [`Sample::parts`].
    pub part: usize,
    /// Fields that the consumer needs, in the order of [`Consumer::needs`].
    pub fields: Vec<Field>,
}

/// Rows of one `lease` call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseBatch {
    /// Id of the lease for acks, releases and renewals; `None` if no row was ready.
    pub lease: Option<LeaseId>,
    /// End of the lease, on the clock of the queue's process.
    pub until_ms: u64,
    /// Rows sorted by part, then in the order of selection.
    pub rows: Vec<LeasedRow>,
}

/// Acknowledgement of a row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AckedRow {
    /// Key of the leased row.
    pub key: String,
    /// Fields that the consumer writes: exactly those of [`Consumer::writes`].
    pub fields: Vec<Field>,
}

impl AckedRow {
    /// Creates the acknowledgement for a consumer that writes no fields.
    pub fn of(key: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            fields: Vec::new(),
        }
    }
}

/// Result of an ack, a release, a failure or a renewal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReturnOutcome {
    /// Number of changed rows; a row that was returned in the same way before does not count.
    pub changed: usize,
    /// Keys that the lease no longer holds: the row was leased again, released or failed, or it left the
    /// queue. A renewal also reports acked rows and rows that were taken back after the lease expired.
    pub lost: Vec<String>,
}

/// State of a row for one consumer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowState {
    /// The row lacks a field that the consumer needs, already has all fields that it writes, or is done.
    Waiting,
    /// It may be leased.
    Ready,
    /// A holder has leased it.
    Leased { until_ms: u64, holder: String },
    /// The consumer has acknowledged it.
    Acked,
    /// Leased [`QueueLimits::max_attempts`] times without an ack, with the last reason.
    /// [`super::Queue::revive`] makes it ready again.
    Dead { reason: String },
}

/// A row without its values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowView {
    /// Sequence number in the order of puts, for the next page.
    pub seq: u64,
    /// `key` and `group` as put.
    pub key: String,
    pub group: String,
    /// Names of the fields that it has.
    pub fields: Vec<String>,
    /// Whether all consumers with the mark `last` are done with it; the fields are deleted and the key stays
    /// known.
    pub done: bool,
    /// States by consumer, in the order in which the consumers joined.
    pub states: Vec<(String, RowState)>,
}

impl RowView {
    /// The row's state for one consumer.
    pub fn state(&self, consumer: &str) -> Option<&RowState> {
        let mut states = self.states.iter();
        states.find(|(name, _)| name == consumer).map(|(_, s)| s)
    }
}

/// Counts of rows by state for one consumer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsumerStats {
    /// Name of the consumer.
    pub name: String,
    /// Number of waiting rows, see [`RowState::Waiting`]; done rows that it has not acked are included.
    pub waiting: usize,
    /// Number of rows that may be leased.
    pub ready: usize,
    /// Number of leased rows.
    pub leased: usize,
    /// Number of acknowledged rows that are still known.
    pub acked: usize,
    /// Number of dead rows, which a user has to revive or remove.
    pub dead: usize,
}

/// Counts and sizes of a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueStats {
    /// Number of rows that are not done.
    pub rows: usize,
    /// Number of rows that are done and whose keys are still known.
    pub done: usize,
    /// Total bytes of fields of rows that are not done.
    pub bytes: u64,
    /// Consumers in the order in which they joined.
    pub consumers: Vec<ConsumerStats>,
}

impl QueueStats {
    /// Returns the counts of one consumer; all zeros if it has not joined.
    pub fn of(&self, consumer: &str) -> ConsumerStats {
        let found = self.consumers.iter().find(|c| c.name == consumer);
        found.cloned().unwrap_or_default()
    }
}
