//! State of a proxy, its sessions and their connections, and the audit line of each request.
//!
//! A [`Connection`] is cloned for every request and every task of it, so that the connection's slot is free
//! when the last of them has ended.

use crate::audit::{Audit, AuditLine};
use crate::authority::Authority;
use crate::body::{Body, Problem, failed, failed_with, refusal};
use crate::config::Mode;
use crate::policy::Policy;
use crate::quota::{Meter, Quota};
use crate::record::{FolderQuota, Recordings};
use crate::request::Target;
use crate::upstream::{Names, Resolve};
use hyper::Response;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_rustls::rustls::ClientConfig;

/// State shared by all sessions.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Signs the certificates of intercepted hosts.
    pub(crate) authority: Authority,
    /// Resolver of host names.
    pub(crate) resolver: Arc<dyn Resolve>,
    /// TLS settings for connections to servers.
    pub(crate) upstream_tls: Arc<ClientConfig>,
    /// Quotas by folder of recordings.
    pub(crate) folder_quotas: Mutex<HashMap<PathBuf, Arc<FolderQuota>>>,
}

/// State of a session.
#[derive(Debug)]
pub(crate) struct Inner {
    /// State of the proxy.
    pub(crate) shared: Arc<Shared>,
    /// Rules of the session.
    pub(crate) policy: Policy,
    /// Source of responses.
    pub(crate) mode: Mode,
    /// Limits of the session.
    pub(crate) quota: Quota,
    /// Usage of the session.
    pub(crate) meter: Meter,
    /// Audit log of the session.
    pub(crate) audit: Audit,
    /// Recordings, except in live mode.
    pub(crate) recordings: Option<Recordings>,
    /// Start of the session.
    pub(crate) started: Instant,
    /// Free connections.
    pub(crate) slots: Arc<Semaphore>,
    /// Look-ups of the session.
    pub(crate) names: Names,
    /// Bytes that bodies of requests may still hold.
    pub(crate) held_up: Arc<Semaphore>,
    /// Bytes that whole responses may still hold.
    pub(crate) held_down: Arc<Semaphore>,
}

/// Bytes of a session's memory, returned on drop.
pub(crate) type Held = OwnedSemaphorePermit;

/// Takes bytes of memory, and waits for them until `deadline`. All at once, so that two requests that wait
/// for each other's bytes do not exist.
pub(crate) async fn hold(
    memory: &Arc<Semaphore>,
    bytes: u64,
    deadline: tokio::time::Instant,
) -> Result<Held, Problem> {
    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    let held = Arc::clone(memory).acquire_many_owned(bytes);
    let held = tokio::time::timeout_at(deadline, held).await;
    held.map_err(|_| failed("other requests of this sandbox held all of its held_bytes"))?
        .map_err(failed)
}

impl Inner {
    /// Counts a request. Fails if the audit log cannot be written.
    pub(crate) fn begin(&self) -> Result<(), Problem> {
        let unlogged = |e| failed_with("the audit log cannot be written", e);
        self.audit.check().map_err(unlogged)?;
        Ok(self.meter.request(self.started.elapsed().as_secs_f64())?)
    }
}

/// Tasks of a listener's connections. Dropping it aborts them.
#[derive(Debug, Default)]
pub(crate) struct Tasks(Mutex<JoinSet<()>>);

impl Tasks {
    /// Aborts all tasks, and with them the connections to servers.
    pub(crate) fn abort(&self) {
        let mut set = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        set.abort_all();
    }

    /// Starts a task and removes finished ones.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut set = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while set.try_join_next().is_some() {}
        set.spawn(task);
    }
}

/// Context of the requests of one connection.
#[derive(Clone, Debug)]
pub(crate) struct Connection {
    /// Session that serves the connection.
    pub(crate) session: Arc<Inner>,
    /// Tasks of the listener.
    pub(crate) tasks: Arc<Tasks>,
    /// Target of the intercepted tunnel that contains the requests.
    pub(crate) tunnel: Option<Target>,
    /// Connection slot, held until all tasks of the connection have ended.
    pub(crate) _permit: Arc<tokio::sync::OwnedSemaphorePermit>,
}

/// Audit line of one request. It is written on drop, after the last part of the response.
#[derive(Debug)]
pub(crate) struct AuditEntry {
    /// Session whose log gets the line.
    session: Arc<Inner>,
    /// Start of the request.
    began: Instant,
    /// The line so far.
    pub(crate) line: AuditLine,
}

impl AuditEntry {
    /// Starts a line. Its decision is `failed` (`aborted`) until it is changed.
    pub(crate) fn new(session: &Arc<Inner>, method: &str, url: String) -> Self {
        Self {
            session: Arc::clone(session),
            began: Instant::now(),
            line: AuditLine {
                at_s: session.started.elapsed().as_secs_f64(),
                decision: "failed".into(),
                reason: Some("aborted".into()),
                method: method.into(),
                url,
                ..AuditLine::default()
            },
        }
    }

    /// Sets the decision of a successful request: `allowed` or `replayed`.
    pub(crate) fn allowed(&mut self, decision: &str) {
        self.line.decision = decision.into();
        self.line.reason = None;
    }

    /// Sets decision, reason and detail of a failed request.
    pub(crate) fn problem(&mut self, problem: &Problem) {
        let reason = match problem {
            Problem::Denied(d) => {
                self.session.meter.deny();
                self.line.decision = "denied".into();
                d.reason.name()
            }
            Problem::Failed { .. } => {
                self.line.decision = "failed".into();
                "failed"
            }
        };
        self.line.reason = Some(reason.into());
        self.line.detail = Some(problem.to_string());
    }

    /// Answers with a problem.
    pub(crate) fn refuse(&mut self, problem: &Problem) -> Response<Body> {
        self.problem(problem);
        let response = refusal(problem);
        self.line.status = Some(response.status().as_u16());
        response
    }
}

impl Drop for AuditEntry {
    fn drop(&mut self) {
        self.line.wall_s = self.began.elapsed().as_secs_f64();
        // A failure is counted, and the next request is refused if it persists.
        let _ = self.session.audit.write(std::mem::take(&mut self.line));
    }
}
