//! Start of workers: sandboxes, code and deadlines.

use crate::code::PythonCode;
use crate::runs::HostHelp;
use crate::target::TargetKind;
use sinew_sandbox::{SandboxProvider, SandboxSpec};
use std::sync::Arc;
use std::time::Duration;

/// Plan for starting and calling workers.
pub(crate) struct Plan {
    /// Makes a sandbox for each worker.
    pub(crate) provider: Arc<dyn SandboxProvider>,
    /// Limits of the recipe. A worker raises some of them for itself.
    pub(crate) spec: SandboxSpec,
    pub(crate) code: PythonCode,
    /// Deadline of one call.
    pub(crate) timeout: Duration,
    /// Deadline of a start, with the imports of the user's code.
    pub(crate) startup_timeout: Duration,
    /// Help of the host for code in workers.
    pub(crate) help: Arc<HostHelp>,
    /// Several sessions may be in one worker.
    pub(crate) shared: bool,
}

impl Plan {
    /// True if a target is a class of environments.
    pub(crate) fn has_env(&self) -> bool {
        self.code.loads.iter().any(|l| l.kind == TargetKind::Env)
    }
}
