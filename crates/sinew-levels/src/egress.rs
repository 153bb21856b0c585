//! The egress proxy of sandboxes, which have no other network; refused without the feature `egress`.
//!
//! The rules of a recipe are read and checked in every build: a recipe that cannot run here is refused
//! with the name of the feature, and not as one with an unknown key.

use crate::error::LevelError;
use sinew_egress::EgressConfig;
use sinew_recipe::SandboxPlan;
use sinew_sandbox::SandboxProvider;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(not(feature = "egress"))]
pub use absent::EgressProxy;
#[cfg(not(feature = "egress"))]
use absent::WithEgress;
#[cfg(feature = "egress")]
pub use sinew_provision::EgressProxy;
#[cfg(feature = "egress")]
use sinew_provision::{EgressStartError, WithEgress};

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
    Err(crate::error::missing_feature("sandbox.egress", "egress"))
}

/// A provider whose sandboxes reach the network through the proxy, each with a session of its own.
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

    impl sinew_provision::Egress for EgressProxy {
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
        ) -> Result<Box<dyn Send + Sync>, String> {
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
