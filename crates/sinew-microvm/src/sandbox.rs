//! One machine as a sandbox.

use crate::monitor::{Machine, Shared, restore};
use crate::provider::{Inner, setup_of};
use sinew_sandbox::guest::Entry;
use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, ExecResult, Sandbox, SandboxError, SandboxFuture,
    SandboxSpec, SandboxStats, Snapshot, Usage,
};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::OwnedSemaphorePermit;

/// One machine behind the port. Dropping it ends the monitor without waiting.
pub(crate) struct MicrovmSandbox {
    /// State of the provider.
    inner: Arc<Inner>,
    /// Limits and environment.
    spec: SandboxSpec,
    /// The machine. `None` after it has died: every request then fails until a reset.
    machine: Option<Machine>,
    /// Base from which it started, for a reset.
    base: Shared,
    /// Executions, including the one in which the machine died.
    executions: u64,
    /// CPU seconds of all executions.
    cpu_s: f64,
    /// Permit of the provider.
    _permit: OwnedSemaphorePermit,
}

/// Error for a machine that has died before.
fn dead() -> SandboxError {
    SandboxError::Died("its machine ended before".into())
}

impl MicrovmSandbox {
    /// A sandbox with a running machine that is set up for `spec`.
    pub(crate) fn new(
        inner: Arc<Inner>,
        spec: SandboxSpec,
        machine: Machine,
        base: Shared,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            inner,
            spec,
            machine: Some(machine),
            base,
            executions: 0,
            cpu_s: 0.0,
            _permit: permit,
        }
    }

    /// The machine, or an error if it has died.
    fn machine(&mut self) -> Result<&mut Machine, SandboxError> {
        self.machine.as_mut().ok_or_else(dead)
    }

    /// Ends the machine after a failure if its agent cannot be trusted any more.
    fn look_after(&mut self) {
        if self.machine.as_ref().is_some_and(|m| !m.guest.usable()) {
            self.machine = None;
        }
    }

    /// Sets new limits in a running machine.
    pub(crate) async fn set_up_again(&mut self) -> Result<(), SandboxError> {
        let setup = setup_of(&self.spec);
        self.machine()?.guest.set_up(&setup).await
    }

    /// Makes programs run as the first user of the guest, without walls.
    pub(crate) async fn open_walls(&mut self) -> Result<(), SandboxError> {
        let mut setup = setup_of(&self.spec);
        setup.uid = 0;
        setup.warm_python = false;
        self.machine()?.guest.set_up(&setup).await
    }

    /// Files of the work folder, at most `most` bytes.
    pub(crate) async fn entries(&mut self, most: u64) -> Result<Vec<Entry>, SandboxError> {
        self.machine()?.guest.entries(most).await
    }

    /// Writes files into the work folder and takes a snapshot.
    pub(crate) async fn import(&mut self, entries: &[Entry]) -> Result<Snapshot, SandboxError> {
        self.machine()?.guest.restore(entries).await?;
        self.save().await
    }

    /// Ends the machine and waits until nothing of it is left.
    pub(crate) async fn end(mut self) {
        if let Some(machine) = self.machine.take() {
            machine.end().await;
        }
    }

    /// Takes a snapshot. A machine that does not survive it has died.
    async fn save(&mut self) -> Result<Snapshot, SandboxError> {
        let inner = Arc::clone(&self.inner);
        let base = Arc::clone(&self.base);
        let saved = self.machine()?.save().await;
        // A refused snapshot leaves the machine unchanged.
        if matches!(saved, Err(SandboxError::Died(_))) {
            self.machine = None;
        }
        Ok(inner.keep(&base, saved?, &self.spec))
    }

    /// Runs a program through the agent. A machine that ends meanwhile is the ending `sandbox_died`, not an
    /// error.
    async fn run(
        &mut self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> Result<ExecResult, SandboxError> {
        options.refuse_user_and_workdir()?;
        let began = Instant::now();
        let limits = self.spec.limits.clone();
        let machine = self.machine()?;
        let ran = machine
            .guest
            .exec(&request, &options.env, limits.output_bytes, options.output)
            .await;
        let protections = Arc::clone(&self.inner.protections);
        self.executions += 1;
        let outcome = match ran {
            Ok(outcome) => outcome,
            // Panic, halt, reboot, an agent or a monitor that was taken over: no more answers.
            Err(SandboxError::Died(why)) => {
                tracing::warn!(%why, "a machine died");
                self.machine = None;
                return Ok(ExecResult {
                    ending: Ending::SandboxDied,
                    stdout: Vec::new(),
                    stderr: Vec::new(),
                    truncated: false,
                    usage: Usage {
                        wall_s: began.elapsed().as_secs_f64(),
                        ..Usage::default()
                    },
                    protections,
                });
            }
            Err(e) => {
                self.look_after();
                return Err(e);
            }
        };
        let ended = outcome.ended;
        let usage = ended.usage(began);
        self.cpu_s += usage.cpu_s;
        Ok(ExecResult {
            ending: ended.ending(ended.oom_kills, ended.refusals, limits.cpu_s),
            stdout: outcome.stdout,
            stderr: outcome.stderr,
            truncated: ended.truncated,
            usage,
            protections,
        })
    }

    /// Ends the machine and starts another one from the same base.
    async fn restart(&mut self) -> Result<(), SandboxError> {
        if let Some(machine) = self.machine.take() {
            machine.end().await;
        }
        self.machine = Some(restore(&self.inner.qemu, &self.base).await?);
        Ok(())
    }

    /// Usage of machine and agent. Memory is that of the monitor's group.
    async fn count(&mut self) -> Result<SandboxStats, SandboxError> {
        let (executions, cpu_s) = (self.executions, self.cpu_s);
        let machine = self.machine()?;
        let count = machine.guest.count().await?;
        Ok(SandboxStats {
            memory_bytes: machine.memory_bytes().unwrap_or(0),
            processes: count.processes,
            file_bytes: count.file_bytes,
            file_count: count.file_count,
            layers: 0,
            executions,
            cpu_s,
        })
    }
}

impl Sandbox for MicrovmSandbox {
    fn exec_with(
        &mut self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> SandboxFuture<'_, ExecResult> {
        Box::pin(self.run(request, options))
    }

    fn write_file<'a>(&'a mut self, path: &'a str, content: &'a [u8]) -> SandboxFuture<'a, ()> {
        Box::pin(async move {
            let done = self.machine()?.guest.write_file(path, content).await;
            self.look_after();
            done
        })
    }

    fn read_file<'a>(&'a mut self, path: &'a str, max_bytes: u64) -> SandboxFuture<'a, Vec<u8>> {
        Box::pin(async move {
            let done = self.machine()?.guest.read_file(path, max_bytes).await;
            self.look_after();
            done
        })
    }

    fn snapshot(&mut self) -> SandboxFuture<'_, Snapshot> {
        Box::pin(self.save())
    }

    fn reset(&mut self) -> SandboxFuture<'_, ()> {
        Box::pin(self.restart())
    }

    fn stats(&mut self) -> SandboxFuture<'_, SandboxStats> {
        Box::pin(self.count())
    }

    fn destroy(self: Box<Self>) -> SandboxFuture<'static, ()> {
        Box::pin(async move {
            self.end().await;
            Ok(())
        })
    }
}
