//! Calls of clients with the fixed key: each of their conversations is a separate rollout. The name of the
//! model chooses an adapter.

use crate::conversations::{MAX_OPEN, prompt_keys};
use crate::gateway::Gateway;
use crate::rollout::Rollout;
use crate::session::RolloutSpec;
use sinew_dialect::fields::Notes;
use sinew_dialect::{ApiError, Dialect, Prompt};
use sinew_types::{AdapterName, EpisodeId};
use std::sync::Arc;

/// Returns the rollout of the conversation that a body continues, or opens a new one.
///
/// # Errors
/// If the body is wrong, or no rollout can be opened.
pub(crate) fn rollout(
    gateway: &Gateway,
    dialect: &dyn Dialect,
    body: &[u8],
) -> Result<Arc<Rollout>, ApiError> {
    let request = dialect.read(body, &Notes::new(false))?;
    let adapter = gateway.adapters().resolve(&request.model)?;
    let prompts = match &request.prompt {
        Prompt::Messages(messages) => prompt_keys(adapter.as_ref(), messages),
        _ => Vec::new(),
    };
    let known = gateway.conversations();
    let find = |id: EpisodeId| gateway.rollouts().find(id.as_str());
    let earlier = known.earlier(&request, &prompts).and_then(find);
    let rollout = match earlier.filter(|rollout| !rollout.session().is_over()) {
        Some(rollout) => same(rollout, adapter.as_ref(), &request.model)?,
        None => {
            let mut spec = RolloutSpec {
                task_kind: "conversation".into(),
                adapter,
                ..RolloutSpec::default()
            };
            if spec.adapter.is_some() {
                gateway.admit(&mut spec)?;
            }
            let id = gateway.open_rollout(spec)?.id;
            gateway.rollouts().known(&id)?
        }
    };
    known.used(rollout.session().id(), &prompts);
    Ok(rollout)
}

/// Returns the rollout if it uses the adapter that the request names: the answer that a request continues by
/// its id may be of another one.
fn same(
    rollout: Arc<Rollout>,
    adapter: Option<&AdapterName>,
    model: &str,
) -> Result<Arc<Rollout>, ApiError> {
    if rollout.session().spec().adapter.as_ref() == adapter {
        return Ok(rollout);
    }
    let why = format!(
        "model {model:?}: the answer that this request continues is of another model or adapter; name that one, \
         or send the whole conversation"
    );
    Err(ApiError::invalid("model", why))
}

/// Finishes rollouts above the limit, the least recently used ones first.
pub(crate) async fn trim(gateway: &Gateway) {
    let half = gateway.config().server.max_rollouts / 2;
    let limit = MAX_OPEN.min(half).max(1);
    let find = |id: &EpisodeId| gateway.rollouts().find(id.as_str());
    let idle = |id: &EpisodeId| find(id).is_none_or(|r| r.session().stats().running == 0);
    while let Some(id) = gateway.conversations().take_oldest(limit, idle) {
        if find(&id).is_some()
            && let Err(error) = gateway.finish(&id, None).await
        {
            tracing::error!(rollout = %id, %error, "a conversation could not be stored");
        }
    }
}
