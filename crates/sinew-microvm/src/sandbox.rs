//! One machine as a sandbox.

use crate::monitor::{Machine, Shared, restore};
use crate::provider::{Inner, setup_of};
use sinew_guest::Entry;
use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, ExecResult, Sandbox, SandboxError, SandboxFuture,
    SandboxSpec, SandboxStats, Snapshot, Usage,
};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::OwnedSemaphorePermit;

pub(crate) struct MicrovmSandbox {
    inner: Arc<Inner>,
    spec: SandboxSpec,
    /// `None` once it died.
    machine: Option<Machine>,
    /// What it started from.
    base: Shared,
    executions: u64,
    cpu_s: f64,
    _permit: OwnedSemaphorePermit,
}

fn dead() -> SandboxError {
    SandboxError::Died("its machine ended before".into())
}

impl MicrovmSandbox {
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

    fn machine(&mut self) -> Result<&mut Machine, SandboxError> {
        self.machine.as_mut().ok_or_else(dead)
    }

    /// After a failure: a machine that cannot be trusted any more is ended.
    fn look_after(&mut self) {
        if self.machine.as_ref().is_some_and(|m| !m.guest.usable()) {
            self.machine = None;
        }
    }

    /// Other limits for a machine that is there.
    pub(crate) async fn set_up_again(&mut self) -> Result<(), SandboxError> {
        let setup = setup_of(&self.spec);
        self.machine()?.guest.set_up(&setup).await
    }

    /// Programs run as the first user of the guest.
    pub(crate) async fn open_walls(&mut self) -> Result<(), SandboxError> {
        let mut setup = setup_of(&self.spec);
        setup.uid = 0;
        setup.warm_python = false;
        self.machine()?.guest.set_up(&setup).await
    }

    pub(crate) async fn entries(&mut self, most: u64) -> Result<Vec<Entry>, SandboxError> {
        self.machine()?.guest.entries(most).await
    }

    pub(crate) async fn import(&mut self, entries: &[Entry]) -> Result<Snapshot, SandboxError> {
        self.machine()?.guest.restore(entries).await?;
        self.save().await
    }

    pub(crate) async fn end(mut self) {
        if let Some(machine) = self.machine.take() {
            machine.end().await;
        }
    }

    async fn save(&mut self) -> Result<Snapshot, SandboxError> {
        let inner = Arc::clone(&self.inner);
        let base = Arc::clone(&self.base);
        let saved = self.machine()?.save(&base).await;
        // What was refused leaves the machine as it was.
        if matches!(saved, Err(SandboxError::Died(_))) {
            self.machine = None;
        }
        Ok(inner.keep(&base, saved?, &self.spec))
    }

    async fn run(
        &mut self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> Result<ExecResult, SandboxError> {
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

    async fn restart(&mut self) -> Result<(), SandboxError> {
        if let Some(machine) = self.machine.take() {
            machine.end().await;
        }
        self.machine = Some(restore(self.inner.monitor.as_ref(), &self.base).await?);
        Ok(())
    }

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
