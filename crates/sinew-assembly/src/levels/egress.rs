//! The egress proxy of sandboxes, which have no other network; refused without the feature `egress`.
//!
//! The rules of a recipe are read and checked in every build: a recipe that cannot run here is refused
//! with the name of the feature, and not as one with an unknown key.

use crate::levels::error::LevelError;
use sinew_egress::{EgressConfig, Mode};
use sinew_recipe::SandboxPlan;
use sinew_sandbox::SandboxProvider;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(not(feature = "egress"))]
pub use absent::EgressProxy;
#[cfg(not(feature = "egress"))]
use absent::WithEgress;
#[cfg(feature = "egress")]
pub use sinew_sandbox_http::EgressProxy;
#[cfg(feature = "egress")]
use sinew_sandbox_http::{EgressStartError, WithEgress};

/// A file with the keys of `[sandbox.egress]`.
///
/// # Errors
/// If it cannot be read, or has other keys.
pub fn load(path: &Path) -> Result<EgressConfig, LevelError> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| LevelError::input(format!("--egress {}: {e}", path.display())))?;
    toml::from_str(&text)
        .map_err(|e| LevelError::input(format!("--egress {}: {e}", path.display())))
}

/// Folder of what the network answered, in the folder of a run.
const RECORDINGS: &str = "network";
/// Folder of audit logs, in the scratch folder of a replay.
const AUDIT: &str = "audit";

/// The section of a run in `run_dir`: with `mode = "record"`, what the network answers is kept there.
pub fn recorded(section: &SandboxPlan, run_dir: &Path) -> SandboxPlan {
    let mut section = section.clone();
    if let Some(rules) = records(&mut section) {
        rules.folder = Some(run_dir.join(RECORDINGS));
    }
    section
}

/// The section where there is no run whose folder could hold recordings: nothing is recorded.
pub fn unrecorded(section: &SandboxPlan) -> SandboxPlan {
    let mut section = section.clone();
    if let Some(rules) = records(&mut section) {
        rules.mode = Mode::Live;
    }
    section
}

/// The rules of a section that records without a folder.
fn records(section: &mut SandboxPlan) -> Option<&mut EgressConfig> {
    let rules = section.egress.as_mut()?;
    (rules.mode == Mode::Record && rules.folder.is_none()).then_some(rules)
}

/// The section for running episodes of the run in `run_dir` again: its recordings answer, and the network is
/// never used. `scratch` is an empty folder for audit logs, and takes the place of missing recordings. The
/// mode in the rules of a replay is ignored.
pub fn replayed(section: &SandboxPlan, run_dir: &Path, scratch: &Path) -> SandboxPlan {
    let mut section = section.clone();
    if let Some(rules) = &mut section.egress {
        let kept = run_dir.join(RECORDINGS);
        rules.folder = Some(if kept.is_dir() {
            kept
        } else {
            scratch.join(RECORDINGS)
        });
        rules.mode = Mode::Replay;
        section.egress_audit = Some(scratch.join(AUDIT).to_string_lossy().into_owned());
    }
    section
}

/// Requests that sandboxes of [`replayed`] made and of which no answer was recorded, in the order of their
/// sandboxes: method and URL of each, and why it was not answered.
///
/// # Errors
/// If a log cannot be read.
#[cfg(feature = "egress")]
pub fn not_recorded(scratch: &Path) -> Result<Vec<(String, String)>, LevelError> {
    sinew_egress::not_recorded(&scratch.join(AUDIT))
        .map_err(|e| LevelError::system(format!("log of the egress proxy: {e}")))
}

/// A build without proxies has no logs.
///
/// # Errors
/// Never.
#[cfg(not(feature = "egress"))]
pub fn not_recorded(_: &Path) -> Result<Vec<(String, String)>, LevelError> {
    Ok(Vec::new())
}

/// The proxy of a recipe's sandboxes; `None` without `[sandbox.egress]`.
///
/// # Errors
/// If a credential of the rules is not in the environment, or the feature is missing.
pub fn start(section: &SandboxPlan) -> Result<Option<EgressProxy>, LevelError> {
    let audit = section.egress_audit.as_ref().map(PathBuf::from);
    let rules = section.egress.clone();
    rules.map(|r| proxy(r, audit)).transpose()
}

/// Starts a proxy with rules that were read.
///
/// # Errors
/// If a credential of the rules is not in the environment, or the host refuses.
#[cfg(feature = "egress")]
pub fn proxy(rules: EgressConfig, audit: Option<PathBuf>) -> Result<EgressProxy, LevelError> {
    EgressProxy::start(rules, audit).map_err(|e| match e {
        EgressStartError::Rules(_) => LevelError::input(e),
        EgressStartError::Host(_) => LevelError::system(e),
    })
}

/// A build without proxies refuses the rules.
///
/// # Errors
/// Always.
#[cfg(not(feature = "egress"))]
pub fn proxy(_: EgressConfig, _: Option<PathBuf>) -> Result<EgressProxy, LevelError> {
    Err(crate::levels::error::missing_feature(
        "sandbox.egress",
        "egress",
    ))
}

/// A provider whose sandboxes reach the network through the proxy, each with a separate session.
pub fn wrap(
    provider: Arc<dyn SandboxProvider>,
    proxy: Option<EgressProxy>,
) -> Arc<dyn SandboxProvider> {
    match proxy {
        Some(proxy) => WithEgress::wrap(provider, proxy),
        None => provider,
    }
}

#[cfg(not(feature = "egress"))]
mod absent {
    use sinew_sandbox::SandboxProvider;
    use std::path::PathBuf;
    use std::sync::Arc;

    /// A proxy that cannot be started: there is no value of this type.
    #[derive(Debug)]
    pub enum EgressProxy {}

    impl EgressProxy {
        pub fn shows(&self) -> (PathBuf, PathBuf) {
            match *self {}
        }
    }

    impl sinew_sandbox_http::Egress for EgressProxy {
        fn port(&self) -> u16 {
            match *self {}
        }

        fn environment(&self) -> Vec<(String, String)> {
            match *self {}
        }

        fn serve(
            &self,
            _: &str,
            _: &str,
            _: std::net::TcpListener,
        ) -> Result<Box<dyn Send + Sync>, sinew_sandbox_http::EgressError> {
            match *self {}
        }
    }

    /// The other half of [`EgressProxy`].
    pub(crate) struct WithEgress;

    impl WithEgress {
        pub(crate) fn wrap(
            _: Arc<dyn SandboxProvider>,
            proxy: EgressProxy,
        ) -> Arc<dyn SandboxProvider> {
            match proxy {}
        }
    }
}
