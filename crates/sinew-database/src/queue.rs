//! A queue of many processes by the address of its server.

use crate::address::{Address, ServerKind};
use crate::connection::DatabaseOptions;
use crate::postgres_log::PostgresLog;
use crate::redis_log::RedisLog;
use crate::runtime::random_name;
use sinew_store::StoreError;
use sinew_store::queue::{LeaseClock, Log, QueueLimits, SharedQueue};

/// Opens the queue `name` of a server, or creates it. All processes should give the same limits.
///
/// # Errors
/// If the name has other characters than letters, digits, - and _, or the server cannot be reached.
pub fn open_queue(
    address: &Address,
    name: &str,
    limits: QueueLimits,
    options: DatabaseOptions,
    clock: LeaseClock,
) -> Result<SharedQueue, StoreError> {
    let log: Box<dyn Log> = match address.kind() {
        ServerKind::Postgres => Box::new(PostgresLog::open(address, name, options)?),
        ServerKind::Redis => Box::new(RedisLog::open(address, name, options)?),
    };
    SharedQueue::open(log, limits, &random_name()?, clock)
}
