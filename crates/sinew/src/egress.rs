//! The egress proxy of sandboxes, which have no other network; refused where this program was built
//! without the feature `egress`.
//!
//! The rules of a recipe are read and checked in every build: a recipe that cannot run here is refused
//! with the name of the feature, and not as one with an unknown key.

use crate::failure::Failure;
use sinew_egress::EgressConfig;
use sinew_recipe::SandboxPlan;
use sinew_sandbox::SandboxProvider;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(not(feature = "egress"))]
pub(crate) use absent::EgressProxy;
#[cfg(not(feature = "egress"))]
use absent::WithEgress;
#[cfg(feature = "egress")]
pub(crate) use sinew_provision::EgressProxy;
#[cfg(feature = "egress")]
use sinew_provision::{EgressStartError, WithEgress};

/// A file with the keys of `[sandbox.egress]`.
pub(crate) fn load(path: &Path) -> Result<EgressConfig, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Failure::input(format!("--egress {}: {e}", path.display())))?;
    toml::from_str(&text).map_err(|e| Failure::input(format!("--egress {}: {e}", path.display())))
}

/// The proxy of a recipe's sandboxes; `None` without `[sandbox.egress]`.
///
/// # Errors
/// If a credential of the rules is not in the environment, or the feature is missing.
pub(crate) fn start(section: &SandboxPlan) -> Result<Option<EgressProxy>, Failure> {
    let audit = section.egress_audit.as_ref().map(PathBuf::from);
    let rules = section.egress.clone();
    rules.map(|r| proxy(r, audit)).transpose()
}

/// Starts a proxy with rules that were read.
#[cfg(feature = "egress")]
pub(crate) fn proxy(rules: EgressConfig, audit: Option<PathBuf>) -> Result<EgressProxy, Failure> {
    EgressProxy::start(rules, audit).map_err(|e| match e {
        EgressStartError::Rules(_) => Failure::input(e),
        EgressStartError::Host(_) => Failure::system(e),
    })
}

/// A build without proxies refuses the rules.
#[cfg(not(feature = "egress"))]
pub(crate) fn proxy(_: EgressConfig, _: Option<PathBuf>) -> Result<EgressProxy, Failure> {
    Err(crate::features::missing("sandbox.egress", "egress"))
}

/// A provider whose sandboxes reach the network through the proxy, each with a session of its own.
pub(crate) fn wrap(
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
    pub(crate) enum EgressProxy {}

    impl EgressProxy {
        pub(crate) fn shows(&self) -> (PathBuf, PathBuf) {
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
