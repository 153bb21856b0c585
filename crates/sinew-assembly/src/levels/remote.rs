//! Sandboxes of other hosts.

use crate::levels::error::LevelError;
use sinew_recipe::SandboxPlan;
use sinew_sandbox::SandboxProvider;
use sinew_sandbox_http::client::{RemoteConfig, RemoteProvider};
use std::sync::Arc;

/// Sandboxes of the servers at `urls`, which keep as many ready as they were started for.
pub(crate) fn sandboxes(
    section: &SandboxPlan,
    urls: &[String],
) -> Result<Arc<dyn SandboxProvider>, LevelError> {
    let variable = &section.server_key_env;
    let token = std::env::var(variable).map_err(|_| {
        LevelError::input(format!(
            "sandbox.server_key_env = {variable:?}: the environment variable is not set\n  \
             hint: export {variable}=TOKEN, with a token of the server's --token-file"
        ))
    })?;
    let provider = RemoteProvider::connect(RemoteConfig {
        servers: urls.to_vec(),
        token,
        level: section.level.name(),
        image: section.image.clone(),
        max_live: section.max_sandboxes,
        finder: None,
    })
    .map_err(LevelError::system)?;
    Ok(Arc::new(provider))
}
