//! Sandboxes of other hosts.

use crate::levels::error::LevelError;
use sinew_control::{RoleClient, RoleKind, RoleState};
use sinew_recipe::SandboxPlan;
use sinew_sandbox::SandboxProvider;
use sinew_sandbox_http::client::{Finder, RemoteConfig, RemoteProvider};
use std::sync::Arc;

/// Sandboxes of the servers that are given and of those that the owner of a run has, which keep as many ready
/// as they were started for.
pub(crate) fn sandboxes(section: &SandboxPlan) -> Result<Arc<dyn SandboxProvider>, LevelError> {
    let token = secret(
        "sandbox.server_key_env",
        &section.server_key_env,
        "--token-file",
    )?;
    let provider = RemoteProvider::connect(RemoteConfig {
        servers: section.servers().to_vec(),
        token,
        level: section.level.name(),
        image: section.image.clone(),
        max_live: section.max_sandboxes,
        finder: finder(section)?,
    })
    .map_err(LevelError::system)?;
    Ok(Arc::new(provider))
}

/// The value of the variable that a key names.
fn secret(key: &str, variable: &str, option: &str) -> Result<String, LevelError> {
    std::env::var(variable).map_err(|_| {
        LevelError::input(format!(
            "{key} = {variable:?}: the environment variable is not set\n  \
             hint: export {variable}=TOKEN, with a token of the server's {option}"
        ))
    })
}

/// Finds the sandbox servers that are registered at the owner, if there is one.
fn finder(section: &SandboxPlan) -> Result<Option<Finder>, LevelError> {
    let Some(owner) = section.owner.clone() else {
        return Ok(None);
    };
    let variable = &section.owner_key_env;
    let token = secret("sandbox.owner_key_env", variable, "--control-token-file")?;
    let find = move || -> Result<Vec<String>, String> {
        let views = RoleClient::roles(&owner, &token, Some(RoleKind::Sandbox));
        let views = views.map_err(|e| e.to_string())?;
        // One that drains says so itself, and keeps what it has.
        let there = |state| matches!(state, RoleState::Ready | RoleState::Draining);
        let there = views.into_iter().filter(|v| there(v.state));
        Ok(there.filter_map(|v| v.registration.address).collect())
    };
    let finder: Finder = Arc::new(find);
    Ok(Some(finder))
}
