//! A connection to PostgreSQL that is made again when it breaks, for callers that block.

use crate::address::Address;
use crate::runtime::{outside, random_name};
use crate::tls::Tls;
use sinew_store::StoreError;
use std::path::Path;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Config};

/// Time for a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Idle time after which the system asks whether the server is still there.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// A connection is made anew if its bytes are not acknowledged for this time. The system repeats them at
/// pauses that double, so that a connection may be silent for as long again as the network was away.
const UNACKNOWLEDGED: Duration = Duration::from_secs(10);
/// Pauses between attempts: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Parameter of an address that names a file with trusted certificates.
const ROOTS: &str = "sslrootcert";

/// Times for calls to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatabaseOptions {
    /// Longest wait for a server that does not answer. Default 2 minutes: a restart takes seconds.
    pub patience: Duration,
    /// Longest wait for the server when a store or a queue is opened. Default 10 s.
    pub first_patience: Duration,
    /// Longest duration of one statement, and of a pause within a transaction. Default 1 minute.
    pub deadline: Duration,
}

impl Default for DatabaseOptions {
    fn default() -> Self {
        Self {
            patience: Duration::from_secs(120),
            first_patience: Duration::from_secs(10),
            deadline: Duration::from_secs(60),
        }
    }
}

/// Reason for which an attempt failed.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The database or the connection failed.
    Sql(tokio_postgres::Error),
    /// The statement took longer than its deadline.
    Deadline,
    /// The call is refused; another attempt would be, too.
    Refused(StoreError),
}

impl From<tokio_postgres::Error> for Fault {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Sql(error)
    }
}

impl From<StoreError> for Fault {
    fn from(error: StoreError) -> Self {
        Self::Refused(error)
    }
}

/// Connections to the schema of one store or queue, one at a time.
pub(crate) struct Postgres {
    config: Config,
    tls: Tls,
    shown: String,
    schema: String,
    options: DatabaseOptions,
    session: String,
    slot: Mutex<Slot>,
}

/// The open connection, and the number of the last call.
#[derive(Default)]
struct Slot {
    client: Option<Client>,
    calls: i64,
}

sinew_types::debug_fields!(Postgres as this, server = this.shown, schema = this.schema);

/// Takes the file with trusted certificates out of an address, which the driver does not know.
fn without_roots(url: &str) -> (String, Option<String>) {
    let Some((before, query)) = url.split_once('?') else {
        return (url.to_owned(), None);
    };
    let prefix = format!("{ROOTS}=");
    let mut roots = None;
    let mut kept = Vec::new();
    for part in query.split('&') {
        match part.strip_prefix(&prefix) {
            Some(file) => roots = Some(file.to_owned()),
            None => kept.push(part),
        }
    }
    let mark = if kept.is_empty() { "" } else { "?" };
    (format!("{before}{mark}{}", kept.join("&")), roots)
}

/// Whether all hosts of an address are this machine.
fn is_local(config: &Config) -> bool {
    config.get_hosts().iter().all(|host| match host {
        Host::Tcp(name) => {
            let address = name.parse::<std::net::IpAddr>();
            name == "localhost" || address.is_ok_and(|a| a.is_loopback())
        }
        #[cfg(unix)]
        Host::Unix(_) => true,
    })
}

impl Postgres {
    /// Reads an address. Nothing is connected.
    pub(crate) fn new(
        address: &Address,
        schema: &str,
        options: DatabaseOptions,
    ) -> Result<Self, StoreError> {
        let shown = address.shown();
        let refused = |reason: String| StoreError::Server {
            server: shown.clone(),
            reason,
        };
        let (url, roots) = without_roots(address.url());
        // The driver's message names the wrong part without its value.
        let mut config = Config::from_str(&url).map_err(|e| refused(described(&e)))?;
        if let Some(password) = address
            .password()
            .filter(|_| config.get_password().is_none())
        {
            config.password(password);
        }
        if !url.contains("sslmode=") {
            config.ssl_mode(if is_local(&config) {
                SslMode::Disable
            } else {
                SslMode::Require
            });
        }
        config.application_name("sinew");
        config.connect_timeout(CONNECT);
        config.keepalives_idle(KEEPALIVE);
        if config.get_tcp_user_timeout().is_none() {
            config.tcp_user_timeout(UNACKNOWLEDGED);
        }
        let roots = roots.as_deref().map(Path::new);
        Ok(Self {
            config,
            tls: Tls::new(roots).map_err(refused)?,
            shown,
            schema: schema.to_owned(),
            options,
            session: random_name()?,
            slot: Mutex::default(),
        })
    }

    /// The address without its password.
    pub(crate) fn shown(&self) -> &str {
        &self.shown
    }

    /// Name of the schema.
    pub(crate) fn schema(&self) -> &str {
        &self.schema
    }

    /// Random name of this process's use of the schema.
    pub(crate) fn session(&self) -> &str {
        &self.session
    }

    /// An error of this server.
    pub(crate) fn refuse(&self, reason: impl Into<String>) -> StoreError {
        StoreError::Server {
            server: self.shown.clone(),
            reason: reason.into(),
        }
    }

    /// Runs a job, again after a lost connection, for the time that a new store or queue may take.
    pub(crate) fn first<T: Send>(
        &self,
        job: impl AsyncFn(&mut Client) -> Result<T, Fault> + Sync,
    ) -> Result<T, StoreError> {
        self.within(
            self.options.first_patience,
            async |client: &mut Client, _: i64| job(client).await,
        )
    }

    /// Runs a job, again after a lost connection. The job must be one that may run twice.
    pub(crate) fn run<T: Send>(
        &self,
        job: impl AsyncFn(&mut Client) -> Result<T, Fault> + Sync,
    ) -> Result<T, StoreError> {
        self.within(
            self.options.patience,
            async |client: &mut Client, _: i64| job(client).await,
        )
    }

    /// Runs a job like [`Postgres::run`], with a number that is the same in all attempts and larger in the
    /// next call.
    pub(crate) fn run_numbered<T: Send>(
        &self,
        job: impl AsyncFn(&mut Client, i64) -> Result<T, Fault> + Sync,
    ) -> Result<T, StoreError> {
        self.within(self.options.patience, job)
    }

    fn within<T: Send>(
        &self,
        patience: Duration,
        job: impl AsyncFn(&mut Client, i64) -> Result<T, Fault> + Sync,
    ) -> Result<T, StoreError> {
        // A panic leaves at worst a connection in the middle of a call, which is not used again.
        let mut slot = self.slot.lock().unwrap_or_else(|poisoned| {
            let mut slot = PoisonError::into_inner(poisoned);
            slot.client = None;
            slot
        });
        slot.calls += 1;
        let slot = &mut *slot;
        outside(|runtime| runtime.block_on(self.persist(slot, patience, &job)))?
    }

    /// Repeats attempts until one succeeds, is refused, or the patience ends.
    async fn persist<T>(
        &self,
        slot: &mut Slot,
        patience: Duration,
        job: &impl AsyncFn(&mut Client, i64) -> Result<T, Fault>,
    ) -> Result<T, StoreError> {
        let began = Instant::now();
        let (mut pause, longest) = PAUSES;
        let mut away = false;
        loop {
            let (reason, conflict) = match self.attempt(slot, job).await {
                Ok(done) => {
                    if away {
                        let seconds = began.elapsed().as_secs_f64();
                        tracing::info!(server = %self.shown, seconds, "the database answers again");
                    }
                    return Ok(done);
                }
                Err(Fault::Refused(error)) => return Err(error),
                Err(Fault::Sql(error)) if !may_pass(&error) => {
                    return Err(self.refuse(described(&error)));
                }
                Err(Fault::Sql(error)) => (described(&error), is_conflict(&error)),
                Err(Fault::Deadline) => {
                    let seconds = self.options.deadline.as_secs_f64();
                    (format!("no answer within {seconds} s"), false)
                }
            };
            slot.client = None;
            let left = patience.saturating_sub(began.elapsed());
            if left.is_zero() {
                let waited = patience.as_secs_f64();
                return Err(self.refuse(format!("{reason} (asked for {waited} s)")));
            }
            if !away && !conflict {
                away = true;
                let server = &self.shown;
                tracing::warn!(%server, %reason, "the database does not answer: the call is repeated");
            }
            tracing::debug!(server = %self.shown, %reason, "the database is asked again");
            tokio::time::sleep(pause.min(left)).await;
            pause = (pause * 2).min(longest);
        }
    }

    /// One attempt, on the open connection or a new one.
    async fn attempt<T>(
        &self,
        slot: &mut Slot,
        job: &impl AsyncFn(&mut Client, i64) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        if slot.client.as_ref().is_some_and(Client::is_closed) {
            slot.client = None;
            let server = &self.shown;
            tracing::warn!(%server, "the connection to the database was lost, and is made again");
        }
        if slot.client.is_none() {
            slot.client = Some(self.connect().await?);
        }
        let Some(client) = slot.client.as_mut() else {
            return Err(Fault::Deadline);
        };
        // Several statements make a call; each has the deadline on the server.
        let limit = self.options.deadline * 4;
        match tokio::time::timeout(limit, job(client, slot.calls)).await {
            Ok(done) => done,
            Err(_) => Err(Fault::Deadline),
        }
    }

    /// Connects. The task that carries the connection ends with the client.
    async fn connect(&self) -> Result<Client, Fault> {
        let connected = self.config.connect(self.tls.clone());
        let limit = self.options.deadline.max(CONNECT);
        let connected = tokio::time::timeout(limit, connected).await;
        let (client, connection) = connected.map_err(|_| Fault::Deadline)??;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "the connection to the database ended");
            }
        });
        let deadline_ms = self.options.deadline.as_millis();
        let settings = format!(
            "SET search_path TO \"{}\"; SET statement_timeout = {deadline_ms}; \
             SET idle_in_transaction_session_timeout = {deadline_ms}; SET synchronous_commit = on",
            self.schema
        );
        client.batch_execute(&settings).await?;
        Ok(client)
    }
}

/// Whether an error may pass: the connection is lost, the statement took too long, or the server starts,
/// stops or chose this transaction to end a deadlock.
fn may_pass(error: &tokio_postgres::Error) -> bool {
    if error.is_closed() {
        return true;
    }
    if let Some(code) = error.code() {
        let passing = [
            SqlState::QUERY_CANCELED,
            SqlState::ADMIN_SHUTDOWN,
            SqlState::CRASH_SHUTDOWN,
            SqlState::CANNOT_CONNECT_NOW,
            SqlState::TOO_MANY_CONNECTIONS,
            SqlState::T_R_SERIALIZATION_FAILURE,
            SqlState::T_R_DEADLOCK_DETECTED,
            SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT,
        ];
        return passing.contains(code) || code.code().starts_with("08");
    }
    let source = std::error::Error::source(error);
    source.is_some_and(|cause| cause.is::<std::io::Error>())
}

/// Whether a transaction stood in the way of another one, which is daily work.
fn is_conflict(error: &tokio_postgres::Error) -> bool {
    let conflicts = [
        SqlState::T_R_SERIALIZATION_FAILURE,
        SqlState::T_R_DEADLOCK_DETECTED,
    ];
    error.code().is_some_and(|code| conflicts.contains(code))
}

/// An error in one line: the server's message with its code, or the innermost cause.
fn described(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(db) => format!("{} (SQLSTATE {})", db.message(), db.code().code()),
        None => {
            let cause = sinew_http::cause(error);
            let whole = error.to_string();
            if whole.contains(&cause) {
                whole
            } else {
                format!("{whole}: {cause}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(url: &str) -> Result<Postgres, StoreError> {
        Postgres::new(
            &Address::new(url, Some("s3cret"))?,
            "s",
            DatabaseOptions::default(),
        )
    }

    #[test]
    fn connections_beyond_this_host_are_encrypted_unless_the_address_says_otherwise() {
        for (url, mode) in [
            ("postgres://u@127.0.0.1/db", SslMode::Disable),
            ("postgres://u@localhost:5433/db", SslMode::Disable),
            ("postgres://u@db.example/db", SslMode::Require),
            ("postgres://u@127.0.0.1,db.example/db", SslMode::Require),
            (
                "postgres://u@db.example/db?sslmode=disable",
                SslMode::Disable,
            ),
        ] {
            let postgres = made(url).unwrap();
            assert_eq!(postgres.config.get_ssl_mode(), mode, "{url}");
            let limit = postgres.config.get_tcp_user_timeout();
            assert_eq!(limit, Some(&UNACKNOWLEDGED), "{url}");
            assert_eq!(postgres.config.get_password(), Some(&b"s3cret"[..]));
            assert!(!format!("{postgres:?}").contains("s3cret"));
        }
    }

    #[test]
    fn a_file_of_certificates_is_read() {
        let refused = made("postgres://h/db?sslrootcert=/none.pem&connect_timeout=3");
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("/none.pem"), "{refused}");
        let (url, roots) = without_roots("postgres://h/db?a=b&sslrootcert=x&c=d");
        assert_eq!(
            (url.as_str(), roots.as_deref()),
            ("postgres://h/db?a=b&c=d", Some("x"))
        );
        assert_eq!(
            without_roots("postgres://h/db?sslrootcert=x").0,
            "postgres://h/db"
        );
    }

    #[test]
    fn a_server_that_is_not_there_is_named() {
        let options = DatabaseOptions {
            patience: Duration::ZERO,
            ..DatabaseOptions::default()
        };
        // Port 1 of this host has no server.
        let address = Address::new("postgres://u:s3cret@127.0.0.1:1/db", None).unwrap();
        let postgres = Postgres::new(&address, "s", options).unwrap();
        let refused = postgres
            .run(async |_: &mut Client| Ok(()))
            .unwrap_err()
            .to_string();
        assert!(
            refused.contains("u@127.0.0.1:1/db") && refused.contains("refused"),
            "{refused}"
        );
        assert!(!refused.contains("s3cret"));
    }
}
