//! State of one live sandbox.

use super::children::Child;
use super::cpu::Spent;
use super::files::Files;
use super::pending_exec::{PendingExec, Way};
use super::users::User;
use crate::cgroup::Group;
use crate::error::{Error, Result};
use crate::protocol::{Creation, End, Numbered};
use std::os::fd::OwnedFd;
use std::rc::Rc;

/// A request that names none, or one that is being destroyed.
pub(super) const NO_SANDBOX: Error = Error::NoSuch("sandbox");
/// Requests that wait for one sandbox; a host has one or two under way. More are refused as to a busy
/// one.
pub(super) const MAX_DEFERRED: usize = 16;

/// The first process of an execution's namespaces.
#[derive(Debug)]
pub(super) struct InitState {
    pub(super) serial: u32,
    pub(super) child: Rc<Child>,
    /// Whether its namespaces are complete and programs can enter them.
    pub(super) ready: bool,
}

/// One live sandbox.
#[derive(Debug)]
pub(super) struct Live {
    /// Properties that were requested.
    pub(super) creation: Creation,
    pub(super) group: Group,
    /// `None` once it is being destroyed.
    pub(super) files: Option<Files>,
    /// User that no other sandbox has as long as a process of this one may be there.
    pub(super) user: Option<Rc<User>>,
    /// Landlock ruleset for these files.
    pub(super) ruleset: Option<OwnedFd>,
    /// Network shared by all its executions. A sandbox with a loopback interface, in which the host's
    /// listeners are, makes it at its start, others with the first execution.
    pub(super) net_ns: Option<OwnedFd>,
    /// First process of its namespaces, which each execution has new.
    pub(super) init: Option<InitState>,
    /// Number of the last init.
    pub(super) serial: u32,
    /// An interpreter that waits for a program.
    pub(super) warm: Option<PendingExec>,
    /// The next program is expected to be of Python, as the last one was.
    pub(super) python_next: bool,
    pub(super) running: Option<PendingExec>,
    /// Number of the request that runs.
    pub(super) run: u64,
    /// The end of what ran, while its namespaces are not gone yet.
    pub(super) ended: Option<End>,
    /// Whether its files are being copied for a snapshot; requests wait meanwhile.
    pub(super) copying: bool,
    /// Requests that wait, at most [`MAX_DEFERRED`].
    pub(super) deferred: Vec<(Numbered, Vec<OwnedFd>)>,
    /// The interpreter that waits is to make way for a program.
    pub(super) evict: bool,
    /// A step that failed before hostile code ran.
    pub(super) failed: Option<(u32, i32)>,
    /// CPU time of what runs.
    pub(super) spent: Spent,
    /// Children that were not reaped yet.
    pub(super) children: usize,
    /// Request to answer when the sandbox is gone.
    pub(super) destroyed_by: Option<u64>,
}

impl Live {
    /// One in which nothing runs yet, and nothing waits.
    pub(super) fn new(
        creation: Creation,
        group: Group,
        (files, user): (Files, Option<Rc<User>>),
        net_ns: Option<OwnedFd>,
        python_next: bool,
    ) -> Self {
        Self {
            creation,
            group,
            files: Some(files),
            user,
            ruleset: None,
            net_ns,
            init: None,
            serial: 0,
            warm: None,
            python_next,
            running: None,
            run: 0,
            ended: None,
            copying: false,
            deferred: Vec::new(),
            evict: false,
            failed: None,
            spent: Spent::default(),
            children: 0,
            destroyed_by: None,
        }
    }

    /// Whether a request that needs a sandbox at rest has to wait or is refused.
    pub(super) fn busy(&self) -> bool {
        self.running.is_some()
            || self.ended.is_some()
            || self.copying
            || self.destroyed_by.is_some()
    }

    /// # Errors
    /// If it is being destroyed.
    pub(super) fn files(&self) -> Result<&Files> {
        self.files.as_ref().ok_or(NO_SANDBOX)
    }

    pub(super) fn uid(&self) -> Option<u32> {
        self.user.as_ref().map(|user| user.uid)
    }

    /// Whether an interpreter is to be made ready in it.
    pub(super) fn wants_warm(&self) -> bool {
        self.creation.warm && !self.busy() && self.init.is_none()
    }

    /// Bytes that its files take.
    pub(super) fn file_bytes(&self) -> u64 {
        self.files.as_ref().map_or(0, |files| files.usage().0)
    }

    /// The fork that was requested from the zygote; there is at most one.
    pub(super) fn unforked(&mut self, serial: u32) -> Option<&mut PendingExec> {
        let both = [self.running.as_mut(), self.warm.as_mut()];
        let python = |e: &&mut PendingExec| matches!(e.way, Way::Python { .. });
        both.into_iter()
            .flatten()
            .find(|e| e.serial == serial && e.child.is_none() && python(e))
    }
}
