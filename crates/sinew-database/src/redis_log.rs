//! The log of a shared queue in Redis: a stream of entries, a hash of values for each row, and a hash with
//! the snapshot. Every call is one script, which Redis runs as a whole.
//!
//! The keys of a queue share a hash tag. Entry number `n` has the id `n + 1 - 0` in its stream, since Redis
//! refuses 0-0.

use crate::address::Address;
use crate::connection::DatabaseOptions;
use crate::runtime::random_name;
use bytes::Bytes;
use redis::{
    Client, Connection, ConnectionInfo, ErrorKind, IntoConnectionInfo, RedisError, RedisResult,
};
use sinew_store::StoreError;
use sinew_store::queue::{Log, LogEntry, LogMark, LogPage, LogSnapshot, LogWrite};
use std::time::{Duration, Instant};

/// Maximum entries of one read.
const PAGE: usize = 256;
/// Time for a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Pauses between attempts: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Oldest supported version: scripts replicate their effects, and streams are trimmed by id.
const OLDEST: (u32, u32) = (6, 2);

/// Creates an empty log: stream, snapshot; id of the first entry, state.
const CREATE: &str = "
if redis.call('EXISTS', KEYS[1]) == 0 then
    redis.call('XADD', KEYS[1], '1-0', 'id', ARGV[1], 'changes', ARGV[2])
    redis.call('HSET', KEYS[2], 'position', '0', 'state', ARGV[2])
end
return 1";

/// Reads entries: stream, snapshot; first id, count. Returns time, position of the snapshot, then id in the
/// stream, id and changes of each entry.
const READ: &str = "
local t = redis.call('TIME')
local out = {string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000)),
    redis.call('HGET', KEYS[2], 'position') or '0'}
for _, e in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])) do
    out[#out + 1] = e[1]
    out[#out + 1] = e[2][2]
    out[#out + 1] = e[2][4]
end
return out";

/// Appends an entry: stream, prefix of rows; its id in the stream, id, changes, those of the entry before it,
/// number of values, row and field and value of each, number of finished rows, the rows.
const APPEND: &str = "
local own = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])
if own[1] then return own[1][2][2] == ARGV[2] and 1 or 0 end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not last or last[1] ~= ARGV[4] or last[2][2] ~= ARGV[5] then return 0 end
redis.call('XADD', KEYS[1], ARGV[1], 'id', ARGV[2], 'changes', ARGV[3])
local at = 7
for _ = 1, tonumber(ARGV[6]) do
    redis.call('HSET', KEYS[2] .. ARGV[at], ARGV[at + 1], ARGV[at + 2])
    at = at + 3
end
for i = 1, tonumber(ARGV[at]) do redis.call('DEL', KEYS[2] .. ARGV[at + i]) end
return 1";

/// Replaces the snapshot: stream, snapshot; position, state, first id that stays in the stream.
const COMPACT: &str = "
if tonumber(redis.call('HGET', KEYS[2], 'position') or '0') < tonumber(ARGV[1]) then
    redis.call('HSET', KEYS[2], 'position', ARGV[1], 'state', ARGV[2])
end
redis.call('XTRIM', KEYS[1], 'MINID', ARGV[3])
return 1";

/// The log of one queue.
pub(crate) struct RedisLog {
    client: Client,
    connection: Option<Connection>,
    shown: String,
    /// Keys of the stream and of the snapshot, and the beginning of those of rows.
    stream: String,
    snapshot: String,
    row: String,
    options: DatabaseOptions,
}

sinew_types::debug_fields!(RedisLog as this, server = this.shown, stream = this.stream);

/// Id in the stream of the entry at a position.
fn stream_id(position: u64) -> String {
    format!("{}-0", position + 1)
}

/// Inverse of [`stream_id`].
fn position_of(id: &str) -> Option<u64> {
    id.strip_suffix("-0")?.parse::<u64>().ok()?.checked_sub(1)
}

/// An address for the client, with the password that is given apart.
fn connection_info(address: &Address) -> RedisResult<ConnectionInfo> {
    let info = address.url().into_connection_info()?;
    let Some(password) = address.password() else {
        return Ok(info);
    };
    let settings = info.redis_settings().clone().set_password(password);
    Ok(info.set_redis_settings(settings))
}

impl RedisLog {
    /// Opens the log of queue `name`, or creates it.
    pub(crate) fn open(
        address: &Address,
        name: &str,
        options: DatabaseOptions,
    ) -> Result<Self, StoreError> {
        crate::schema::schema_of("sinew_queue", name)?;
        let shown = address.shown();
        // The client's library asks the process for its cryptography; another part may have set the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = connection_info(address).and_then(Client::open);
        let client = client.map_err(|e| StoreError::Remote {
            url: shown.clone(),
            reason: described(&e),
        })?;
        let mut log = Self {
            client,
            connection: None,
            shown,
            stream: format!("sinew:{{{name}}}:log"),
            snapshot: format!("sinew:{{{name}}}:snapshot"),
            row: format!("sinew:{{{name}}}:row:"),
            options,
        };
        let info = |c: &mut Connection| redis::cmd("INFO").arg("server").query::<String>(c);
        let info = log.within(options.first_patience, info)?;
        log.check_version(&info)?;
        let (state, id) = (LogSnapshot::empty()?.state, random_name()?);
        let keys = [log.stream.clone(), log.snapshot.clone()];
        log.script(CREATE, &keys, &[id.as_bytes(), &state])?;
        Ok(log)
    }

    /// Refuses a server that lacks what the scripts need.
    fn check_version(&self, info: &str) -> Result<(), StoreError> {
        let version = info
            .lines()
            .find_map(|line| line.strip_prefix("redis_version:"));
        let mut numbers = version
            .unwrap_or_default()
            .split('.')
            .map(|n| n.trim().parse().ok());
        let mut next = || numbers.next().flatten().unwrap_or(0);
        let found = (next(), next());
        if found >= OLDEST {
            return Ok(());
        }
        Err(self.remote(format!(
            "it has version {}.{}, needed: {}.{} or newer",
            found.0, found.1, OLDEST.0, OLDEST.1
        )))
    }

    fn remote(&self, reason: impl Into<String>) -> StoreError {
        StoreError::Remote {
            url: self.shown.clone(),
            reason: reason.into(),
        }
    }

    /// Runs a script that returns a number.
    fn script(&mut self, script: &str, keys: &[String], args: &[&[u8]]) -> Result<i64, StoreError> {
        let mut call = redis::cmd("EVAL");
        call.arg(script).arg(keys.len());
        keys.iter().for_each(|key| {
            call.arg(key.as_str());
        });
        args.iter().for_each(|arg| {
            call.arg(*arg);
        });
        self.run(|connection| call.query(connection))
    }

    fn run<T>(
        &mut self,
        call: impl Fn(&mut Connection) -> RedisResult<T>,
    ) -> Result<T, StoreError> {
        self.within(self.options.patience, call)
    }

    /// Repeats a call until it is answered or refused, or the patience ends. Every call may run twice.
    fn within<T>(
        &mut self,
        patience: Duration,
        call: impl Fn(&mut Connection) -> RedisResult<T>,
    ) -> Result<T, StoreError> {
        let began = Instant::now();
        let (mut pause, longest) = PAUSES;
        loop {
            let error = match self.attempt(&call) {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            self.connection = None;
            let left = patience.saturating_sub(began.elapsed());
            if !may_pass(&error) {
                return Err(self.remote(described(&error)));
            }
            if left.is_zero() {
                let waited = patience.as_secs_f64();
                return Err(self.remote(format!("{} (asked for {waited} s)", described(&error))));
            }
            tracing::debug!(server = %self.shown, reason = %described(&error), "Redis is asked again");
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(longest);
        }
    }

    fn attempt<T>(&mut self, call: &impl Fn(&mut Connection) -> RedisResult<T>) -> RedisResult<T> {
        let connection = match self.connection.take() {
            Some(open) => open,
            None => {
                let opened = self.client.get_connection_with_timeout(CONNECT)?;
                opened.set_read_timeout(Some(self.options.deadline))?;
                opened.set_write_timeout(Some(self.options.deadline))?;
                opened
            }
        };
        call(self.connection.insert(connection))
    }

    fn broken(&self, reason: &str) -> StoreError {
        StoreError::QueueLog {
            reason: format!("{}: {reason}", self.shown),
        }
    }
}

/// Whether an error may pass: the connection is lost, or the server starts, changes roles or runs a script of
/// another client.
fn may_pass(error: &RedisError) -> bool {
    let passing = ["LOADING", "TRYAGAIN", "MASTERDOWN", "READONLY", "BUSY"];
    error.kind() == ErrorKind::Io
        || error.is_timeout()
        || error.is_connection_dropped()
        || error.is_connection_refusal()
        || error.code().is_some_and(|code| passing.contains(&code))
}

/// An error in one line. The library does not put passwords into its messages.
fn described(error: &RedisError) -> String {
    error.to_string().replace('\n', " ")
}

impl Log for RedisLog {
    fn read(&mut self, from: u64) -> Result<LogPage, StoreError> {
        let mut call = redis::cmd("EVAL");
        call.arg(READ).arg(2).arg(&self.stream).arg(&self.snapshot);
        call.arg(stream_id(from)).arg(PAGE + 1);
        let parts: Vec<Vec<u8>> = self.run(|connection| call.query(connection))?;
        let text = |part: &[u8]| String::from_utf8_lossy(part).into_owned();
        let [now_ms, snapshot, rest @ ..] = parts.as_slice() else {
            return Err(self.broken("an answer without a time"));
        };
        let number = |part: &[u8]| text(part).parse::<u64>().ok();
        let mut entries = Vec::with_capacity(rest.len() / 3);
        for part in rest.chunks_exact(3).take(PAGE) {
            let position = position_of(&text(&part[0]));
            entries.push(LogEntry {
                mark: LogMark {
                    position: position.ok_or_else(|| self.broken("an entry with another id"))?,
                    id: text(&part[1]),
                },
                changes: Bytes::copy_from_slice(&part[2]),
            });
        }
        let bad = || self.broken("an answer without numbers");
        Ok(LogPage {
            now_ms: number(now_ms).ok_or_else(bad)?,
            snapshot: number(snapshot).ok_or_else(bad)?,
            entries,
            more: rest.len() / 3 > PAGE,
        })
    }

    fn snapshot(&mut self) -> Result<LogSnapshot, StoreError> {
        let mut call = redis::cmd("HMGET");
        call.arg(&self.snapshot).arg("position").arg("state");
        let parts: Vec<Option<Vec<u8>>> = self.run(|connection| call.query(connection))?;
        let [Some(position), Some(state)] = parts.as_slice() else {
            return Err(self.broken("it has no snapshot: was the queue deleted?"));
        };
        let position = String::from_utf8_lossy(position).parse();
        Ok(LogSnapshot {
            position: position.map_err(|_| self.broken("a snapshot without a number"))?,
            state: Bytes::copy_from_slice(state),
        })
    }

    fn append(&mut self, after: &LogMark, write: &LogWrite) -> Result<bool, StoreError> {
        let mark = &write.entry.mark;
        let (own, before) = (stream_id(mark.position), stream_id(after.position));
        let keys = [self.stream.clone(), self.row.clone()];
        let count = write.values.len().to_string();
        let names: Vec<[String; 2]> = write
            .values
            .iter()
            .map(|(row, field, _)| [row.to_string(), field.to_string()])
            .collect();
        let finished: Vec<String> = write.finished.iter().map(u64::to_string).collect();
        let finished_count = finished.len().to_string();
        let mut args: Vec<&[u8]> = vec![
            own.as_bytes(),
            mark.id.as_bytes(),
            &write.entry.changes[..],
            before.as_bytes(),
            after.id.as_bytes(),
            count.as_bytes(),
        ];
        for ([row, field], (.., value)) in names.iter().zip(&write.values) {
            args.extend([row.as_bytes(), field.as_bytes(), &value[..]]);
        }
        args.push(finished_count.as_bytes());
        args.extend(finished.iter().map(|row| row.as_bytes()));
        Ok(self.script(APPEND, &keys, &args)? == 1)
    }

    fn compact(&mut self, snapshot: &LogSnapshot, keep_from: u64) -> Result<(), StoreError> {
        let keys = [self.stream.clone(), self.snapshot.clone()];
        let (position, from) = (snapshot.position.to_string(), stream_id(keep_from));
        let args = [position.as_bytes(), &snapshot.state[..], from.as_bytes()];
        self.script(COMPACT, &keys, &args).map(drop)
    }

    fn values(
        &mut self,
        rows: &[u64],
        fields: &[usize],
    ) -> Result<Vec<(u64, usize, Bytes)>, StoreError> {
        let mut calls = redis::pipe();
        for row in rows {
            calls.cmd("HMGET").arg(format!("{}{row}", self.row));
            for field in fields {
                calls.arg(*field);
            }
        }
        let found: Vec<Vec<Option<Vec<u8>>>> = self.run(|connection| calls.query(connection))?;
        let mut values = Vec::new();
        for (row, found) in rows.iter().zip(found) {
            let found = fields.iter().zip(found);
            let found = found.filter_map(|(field, value)| Some((*row, *field, value?.into())));
            values.extend(found);
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_apart_is_used_and_never_shown() {
        for (url, user, password) in [
            ("redis://h:6379/1", None, "a/b"),
            ("rediss://u@h", Some("u"), "a/b"),
            ("redis://u:0wn@h", Some("u"), "0wn"),
        ] {
            let info = connection_info(&Address::new(url, Some("a/b")).unwrap()).unwrap();
            let settings = info.redis_settings();
            let used = (settings.username(), settings.password());
            assert_eq!(used, (user, Some(password)), "{url}");
            let debug = format!("{info:?}");
            assert!(!debug.contains("a/b") && !debug.contains("0wn"), "{debug}");
        }
    }

    #[test]
    fn positions_are_ids_of_the_stream() {
        for position in [0, 1, 41, u64::MAX - 1] {
            assert_eq!(position_of(&stream_id(position)), Some(position));
        }
        for other in ["", "0-0", "3-1", "x-0"] {
            assert_eq!(position_of(other), None, "{other}");
        }
    }
}
