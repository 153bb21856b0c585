//! The way to the network for sandboxes; refused where this program was built without the feature `egress`.

#[cfg(feature = "egress")]
mod proxy;

use crate::failure::Failure;
use sinew_egress::EgressConfig;
use std::path::Path;

#[cfg(not(feature = "egress"))]
pub(crate) use absent::{WayOut, WithEgress};
#[cfg(feature = "egress")]
pub(crate) use proxy::{WayOut, WithEgress};

/// A file with the keys of `[sandbox.egress]`.
pub(crate) fn load(path: &Path) -> Result<EgressConfig, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Failure::input(format!("--egress {}: {e}", path.display())))?;
    toml::from_str(&text).map_err(|e| Failure::input(format!("--egress {}: {e}", path.display())))
}

#[cfg(not(feature = "egress"))]
mod absent {
    use crate::failure::Failure;
    use sinew_egress::EgressConfig;
    use sinew_sandbox::SandboxProvider;
    use std::path::PathBuf;
    use std::sync::Arc;

    /// A proxy that cannot be started: there is no value of this type.
    pub(crate) enum WayOut {}

    impl WayOut {
        pub(crate) fn start(_: EgressConfig, _: Option<PathBuf>) -> Result<Self, Failure> {
            Err(crate::features::missing("sandbox.egress", "egress"))
        }

        pub(crate) fn shows(&self) -> (PathBuf, PathBuf) {
            match *self {}
        }
    }

    impl sinew_provision::Egress for WayOut {
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

    /// The other half of [`WayOut`].
    pub(crate) struct WithEgress;

    impl WithEgress {
        pub(crate) fn wrap(
            _: Arc<dyn SandboxProvider>,
            way_out: WayOut,
        ) -> Arc<dyn SandboxProvider> {
            match way_out {}
        }
    }
}
