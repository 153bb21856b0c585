//! Plain data of the queue: rows, consumers, leases, refusals.

pub use crate::error::QueueError;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Names of the fields that parts of the system agree on. Others may be used, too.
pub mod fields {
    /// Field of the episode: its name in a store, or the episode itself if no store has it.
    pub const TRACE: &str = "trace";
    /// Score of the episode.
    pub const REWARD: &str = "reward";
}

/// One lease: what a holder was given in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

/// Bounds of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Rows that are not done. Default 65,536. Further puts are refused, which holds the producer back.
    pub max_rows: usize,
    /// Their fields. Default 1 GiB. Fields that consumers write count, but are never refused: a refusal would
    /// keep rows from leaving.
    pub max_bytes: u64,
    /// Leases of one row by one consumer before it is dead for that consumer.
    /// Default 8. A row that no holder survives does not stop the others.
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
    /// 1 to [`MAX_NAME`] bytes.
    pub name: String,
    /// Opaque to the queue, and shared where it is copied.
    #[serde(with = "shared")]
    pub value: Bytes,
}

impl Field {
    /// A field of this name and value.
    pub fn new(name: impl Into<String>, value: impl Into<Bytes>) -> Self {
        Self {
            name: name.into(),
            value: value.into(),
        }
    }
}

/// The value among `fields` that has this name.
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

/// Maximum names of fields in one queue: a row keeps its set of fields in a word.
pub const MAX_FIELDS: usize = 64;

/// Maximum consumers of one queue.
pub const MAX_CONSUMERS: usize = 32;

/// Maximum bytes of a reason; a longer one is cut.
pub const MAX_REASON: usize = 512;

/// A row to be put. The same key is the same row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewRow {
    /// Unique in the queue, chosen by the producer.
    pub key: String,
    /// Rows of one name belong together; empty: the row has no group.
    pub group: String,
    /// Rows that make the group whole, 1 or more. The largest of its rows counts; further rows of the name
    /// begin another group.
    pub group_size: u32,
    /// Higher ones are given out first.
    pub priority: i32,
    /// Number of tokens of the row, for budgets and for batches of equal size.
    pub tokens: u64,
    /// Version of the oldest weights that sampled it, for freshness.
    pub version: u64,
    /// Fields that are known at the put.
    pub fields: Vec<Field>,
}

impl NewRow {
    /// A row without a group, with one field.
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
    /// It was added.
    New,
    /// The key is known, in whatever state; the row was not changed.
    Duplicate,
}

/// A reader of the queue with a separate cursor. Any number of holders, in any number of processes, may lease
/// under its name: each row goes to one of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Consumer {
    /// 1 to [`MAX_NAME`] bytes.
    pub name: String,
    /// Fields that a row must have before it is ready, and that are given out.
    pub needs: Vec<String>,
    /// Fields that each of its acks brings. A row that has all of them is not ready for it. No other
    /// consumer may write them.
    pub writes: Vec<String>,
    /// A row is done, and its fields go, once every consumer with this mark has acked it.
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

/// A selection of ready rows. Every condition holds together with the others; the first row, or group, is
/// given even if it exceeds `bytes` or `tokens`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Maximum rows, 1 to [`MAX_CALL_ROWS`].
    pub rows: usize,
    /// Maximum bytes of all their fields.
    pub bytes: u64,
    /// Maximum tokens.
    pub tokens: u64,
    /// Only whole groups, all of whose rows are ready.
    pub whole_groups: bool,
    /// Order of the rows.
    pub order: Order,
    /// Only rows of this version or a later one; with `whole_groups` all rows of a group.
    pub from_version: u64,
    /// Deals the rows into this number of parts with about equal numbers of tokens, 1 or more.
    pub parts: usize,
}

impl Sample {
    /// The oldest rows up to a number.
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

/// Selection of rows in a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowSelection {
    /// Rows that the queue chooses.
    Sample(Sample),
    /// These rows: all of them or none.
    Keys(Vec<String>),
}

/// A request for rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowRequest {
    /// A consumer that joined.
    pub consumer: String,
    /// Name of the worker, for reports.
    pub holder: String,
    /// Milliseconds until the rows go to another holder, 1 or more.
    pub ttl_ms: u64,
    pub take: RowSelection,
}

/// A row as it was given to a holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasedRow {
    /// `key` and `group` as put.
    pub key: String,
    pub group: String,
    /// 1 for the first delivery to this consumer.
    pub attempt: u32,
    /// `tokens` and `version` as put.
    pub tokens: u64,
    pub version: u64,
    /// Index of the part, below [`Sample::parts`].
    pub part: usize,
    /// Those that the consumer needs, in the order in which it named them.
    pub fields: Vec<Field>,
}

/// Rows of one `lease` call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseBatch {
    /// Names the delivery in acks, releases and renewals; `None`: nothing was ready.
    pub lease: Option<LeaseId>,
    /// Time at which the rows go to another holder, on the clock of the queue's process.
    pub until_ms: u64,
    /// Rows by part, then in the order in which they were chosen.
    pub rows: Vec<LeasedRow>,
}

/// A row that a holder is done with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AckedRow {
    /// Key of the leased row.
    pub key: String,
    /// Fields that the consumer writes: all of them, and no others.
    pub fields: Vec<Field>,
}

impl AckedRow {
    /// A row for a consumer that writes nothing.
    pub fn of(key: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            fields: Vec::new(),
        }
    }
}

/// Result of giving rows back in any way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReturnOutcome {
    /// Rows that changed; one that had been given back in this way before did not.
    pub changed: usize,
    /// Keys that the lease does not hold any more: the row went to another holder, or out of the queue.
    pub lost: Vec<String>,
}

/// State of a row for one consumer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowState {
    /// It lacks a field that the consumer needs, or has all that the consumer writes.
    Waiting,
    /// It may be leased.
    Ready,
    /// A holder has it.
    Leased { until_ms: u64, holder: String },
    /// The consumer is done with it.
    Acked,
    /// Leased [`QueueLimits::max_attempts`] times without an ack, with the last reason.
    /// [`super::Queue::revive`] makes it ready again.
    Dead { reason: String },
}

/// A row without its values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowView {
    /// Its place in the order of puts, for the next page.
    pub seq: u64,
    /// `key` and `group` as put.
    pub key: String,
    pub group: String,
    /// Names of the fields that it has.
    pub fields: Vec<String>,
    /// Every consumer that has to do with it is done; the fields are gone and the key stays known.
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
    /// Its name.
    pub name: String,
    /// Rows that lack something, see [`RowState::Waiting`].
    pub waiting: usize,
    /// Rows that may be leased.
    pub ready: usize,
    /// Rows that holders have.
    pub leased: usize,
    /// Rows that it is done with and that are still known.
    pub acked: usize,
    /// Rows that are left to a person.
    pub dead: usize,
}

/// Counts and sizes of a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueStats {
    /// Rows that are not done.
    pub rows: usize,
    /// Rows that are done and whose keys are still known.
    pub done: usize,
    /// Fields of rows that are not done.
    pub bytes: u64,
    /// Consumers in the order in which they joined.
    pub consumers: Vec<ConsumerStats>,
}

impl QueueStats {
    /// Counts of one consumer; all zeros if it has not joined.
    pub fn of(&self, consumer: &str) -> ConsumerStats {
        let found = self.consumers.iter().find(|c| c.name == consumer);
        found.cloned().unwrap_or_default()
    }
}
