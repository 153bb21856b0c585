//! One container as a sandbox.

use crate::containers::{Containers, RunningContainer};
use crate::net::listen_in;
use crate::snapshot::keep;
use crate::spec::Body;
use crate::state::{Folder, io};
use sinew_jail::cgroup::{CgroupEvents as Events, Group};
use sinew_sandbox::guest::{Entry, Guest, Outcome, Place};
use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, ExecResult, Network, Protection, Sandbox, SandboxError,
    SandboxFuture, SandboxSpec, SandboxStats, Snapshot, UploadOptions, Usage,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::OwnedSemaphorePermit;

/// Maximum time of the kernel to count the event that killed a container.
const COUNTING: Duration = Duration::from_millis(50);

/// One container behind the port. Dropping it ends the container without waiting; [`Sandbox::destroy`] waits.
pub(crate) struct ContainerSandbox {
    /// Limits, environment and network.
    spec: SandboxSpec,
    /// Connection to the agent. It is dropped before the container: the agent ends with it, and the container
    /// with the agent.
    guest: Guest,
    /// `None` once it is destroyed.
    body: Option<Body>,
    /// First process in the host's numbers.
    pid: i32,
    /// Control groups, for usage and limits that were reached.
    group: Group,
    /// Files at the start, to which a reset returns. Empty: none.
    base: Arc<Vec<Entry>>,
    /// Protections that are in force.
    protections: Arc<Vec<Protection>>,
    /// Completed executions.
    executions: u64,
    /// CPU seconds of all executions.
    cpu_s: f64,
    /// Folder on the host, removed with the sandbox.
    folder: Folder,
    /// Permit of the provider, held until the container is gone.
    permit: OwnedSemaphorePermit,
    /// Last: the provider's folder is removed after the container.
    inner: Arc<Containers>,
}

impl ContainerSandbox {
    pub(crate) fn new(
        inner: Arc<Containers>,
        spec: SandboxSpec,
        started: RunningContainer,
        base: Arc<Vec<Entry>>,
        protections: Arc<Vec<Protection>>,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            protections,
            inner,
            spec,
            guest: started.guest,
            body: Some(started.body),
            pid: started.pid,
            group: started.group,
            base,
            executions: 0,
            cpu_s: 0.0,
            folder: started.folder,
            permit,
        }
    }

    /// Refuses an operation that needs a read-only root, or else a writable one.
    fn needs_root(&self, writable: bool, operation: &'static str) -> Result<(), SandboxError> {
        if self.spec.writable_root.is_some() == writable {
            Ok(())
        } else {
            Err(SandboxError::Unsupported { operation })
        }
    }

    /// Bytes or number of files as the agent counts them. A daemon's layer lies on a disk with other files.
    fn counted(&self, files: u64) -> u64 {
        let shared = self.spec.writable_root.is_some() && matches!(self.body, Some(Body::Named(_)));
        if shared { 0 } else { files }
    }

    /// Runs a program through the agent. If the agent dies, the ending reports that and the sandbox cannot be
    /// used again.
    async fn run(&mut self, request: ExecRequest, options: ExecOptions) -> ExecDone {
        let began = Instant::now();
        if self.spec.writable_root.is_none() {
            options.refuse_user_and_workdir()?;
        }
        let place = Place {
            user: options.user.unwrap_or_default(),
            workdir: options.workdir.unwrap_or_default(),
        };
        let limits = &self.spec.limits;
        self.group.begin();
        let most = limits.output_bytes;
        let done = self
            .guest
            .exec_at(&request, &options.env, &place, most, options.output)
            .await;
        let outcome = match done {
            Ok(outcome) => outcome,
            Err(SandboxError::Died(why)) => return Ok(self.died(began, &why).await),
            Err(e) => return Err(e),
        };
        let events = self.group.events(true);
        let result = self.result(began, outcome, events);
        self.executions += 1;
        self.cpu_s += result.usage.cpu_s;
        Ok(result)
    }

    /// Result of a program that ended. Peak memory is that of the group where the kernel counts it.
    fn result(&self, began: Instant, outcome: Outcome, events: Events) -> ExecResult {
        let ended = outcome.ended;
        let mut usage = ended.usage(began);
        if events.peak_memory_bytes > 0 {
            usage.peak_memory_bytes = events.peak_memory_bytes;
        }
        usage.file_bytes = self.counted(usage.file_bytes);
        ExecResult {
            ending: ended.ending(
                events.oom_kills,
                events.process_refusals,
                self.spec.limits.cpu_s,
            ),
            stdout: outcome.stdout,
            stderr: outcome.stderr,
            truncated: ended.truncated,
            usage,
            protections: Arc::clone(&self.protections),
        }
    }

    /// Result of an execution in which the container ended, or its agent broke the rules of the connection.
    async fn died(&mut self, began: Instant, why: &str) -> ExecResult {
        tokio::time::sleep(COUNTING).await;
        tracing::warn!(why, "a container died");
        let out_of_memory = self.group.events(true).oom_kills > 0;
        ExecResult {
            ending: if out_of_memory {
                Ending::OutOfMemory
            } else {
                Ending::SandboxDied
            },
            stdout: Vec::new(),
            stderr: why.as_bytes().to_vec(),
            truncated: false,
            usage: Usage {
                wall_s: began.elapsed().as_secs_f64(),
                ..Usage::default()
            },
            protections: Arc::clone(&self.protections),
        }
    }
}

type ExecDone = Result<ExecResult, SandboxError>;

impl Sandbox for ContainerSandbox {
    fn exec_with(
        &mut self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> SandboxFuture<'_, ExecResult> {
        Box::pin(self.run(request, options))
    }

    fn write_file<'a>(&'a mut self, path: &'a str, content: &'a [u8]) -> SandboxFuture<'a, ()> {
        Box::pin(self.guest.write_file(path, content))
    }

    fn read_file<'a>(&'a mut self, path: &'a str, max_bytes: u64) -> SandboxFuture<'a, Vec<u8>> {
        Box::pin(self.guest.read_file(path, max_bytes))
    }

    fn upload<'a>(
        &'a mut self,
        to: &'a str,
        entries: &'a [Entry],
        options: &'a UploadOptions,
    ) -> SandboxFuture<'a, ()> {
        Box::pin(async move {
            self.needs_root(true, "take files at absolute paths without a writable root")?;
            let user = options.user.as_deref().unwrap_or_default();
            self.guest.upload(to, entries, user, options.replace).await
        })
    }

    fn download<'a>(
        &'a mut self,
        path: &'a str,
        max_bytes: u64,
    ) -> SandboxFuture<'a, Option<Vec<Entry>>> {
        Box::pin(async move {
            self.needs_root(true, "give files at absolute paths without a writable root")?;
            self.guest.download(path, max_bytes).await
        })
    }

    fn snapshot(&mut self) -> SandboxFuture<'_, Snapshot> {
        Box::pin(async move {
            self.needs_root(false, "take snapshots of a writable root")?;
            let most = self.spec.limits.work_bytes;
            self.guest.entries(most).await.map(keep)
        })
    }

    fn reset(&mut self) -> SandboxFuture<'_, ()> {
        Box::pin(async move {
            self.needs_root(false, "reset a writable root; make a new sandbox")?;
            self.guest.reset().await?;
            if self.base.is_empty() {
                Ok(())
            } else {
                self.guest.restore(&self.base).await
            }
        })
    }

    fn stats(&mut self) -> SandboxFuture<'_, SandboxStats> {
        Box::pin(async move {
            let count = self.guest.count().await?;
            Ok(SandboxStats {
                memory_bytes: self.group.memory_bytes().unwrap_or(0),
                // The agent does not count.
                processes: self.group.processes().unwrap_or(0).saturating_sub(1),
                file_bytes: self.counted(count.file_bytes),
                file_count: self.counted(count.file_count),
                layers: 0,
                executions: self.executions,
                cpu_s: self.cpu_s,
            })
        })
    }

    fn listen_inside(&mut self, port: u16) -> SandboxFuture<'_, std::net::TcpListener> {
        Box::pin(async move {
            if self.spec.network != Network::Loopback {
                return Err(SandboxError::Unsupported {
                    operation: "listen inside without network = loopback",
                });
            }
            listen_in(self.pid, port).map_err(|e| io(format!("listen inside on port {port}"), e))
        })
    }

    fn destroy(mut self: Box<Self>) -> SandboxFuture<'static, ()> {
        Box::pin(async move {
            let body = self.body.take();
            let Self {
                inner,
                guest,
                folder,
                permit,
                ..
            } = *self;
            // The agent ends with its connection, and the container with the agent.
            drop(guest);
            let done = match body {
                Some(body) => inner.engine.end(body).await,
                None => Ok(()),
            };
            drop((folder, permit));
            done
        })
    }
}
