//! The data pool: its routes for `sinew serve --pool`, and its client `sinew pool`.
//!
//! The server needs the feature `pool`; the client and training from a pool do not.

use crate::output;
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use sinew_assembly::Failure;
#[cfg(feature = "pool")]
use sinew_gateway::{ApiError, RolloutSpec, refuse_adapter};
use sinew_gateway::{RolloutHooks, Router};
use sinew_pool::Scorer;
#[cfg(feature = "pool")]
use sinew_pool::{Folder, Pool, PoolConfig, schema::Pushed};
use sinew_render::Renderer;
use sinew_sources::PoolClient;
#[cfg(feature = "pool")]
use sinew_types::Trace;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Routes of a pool, and what hands it the gateway's own rollouts.
type PoolRoutes = (Router, Arc<dyn RolloutHooks>);

#[cfg(feature = "pool")]
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolFile {
    /// Limits and checks of the pool, see `docs/pool.md`.
    pool: PoolConfig,
}

/// The refusal of `serve --pool`, whose routes this program was built without. Training from a pool works
/// without them.
#[cfg(not(feature = "pool"))]
pub(crate) fn router(
    file: &Path,
    _: Option<&Path>,
    _: bool,
    _: Arc<dyn Renderer>,
    _: Scorer,
) -> Result<PoolRoutes, Failure> {
    let what = format!("--pool {}", file.display());
    Err(sinew_assembly::levels::missing_feature(&what, "pool").into())
}

/// The routes of the pool that a file configures; without a folder it is kept in memory. `scorer` is
/// the engine that is asked for log-probs.
///
/// # Errors
/// If the file is not a pool, or the folder is in use or holds something else.
#[cfg(feature = "pool")]
pub(crate) fn router(
    file: &Path,
    store: Option<&Path>,
    accept_loss: bool,
    renderer: Arc<dyn Renderer>,
    scorer: Scorer,
) -> Result<PoolRoutes, Failure> {
    let refused =
        |e: &dyn std::fmt::Display| Failure::input(format!("--pool {}: {e}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|e| refused(&e))?;
    let read: PoolFile = toml::from_str(&text).map_err(|e| {
        refused(&sinew_recipe::explain(
            &text,
            &e,
            sinew_assembly::ENVIRONMENTS,
        ))
    })?;
    read.pool.check().map_err(|e| refused(&e))?;
    let folder = store.map(|s| s.join("pool"));
    let folder = folder.as_deref().map(|path| Folder { path, accept_loss });
    let pool = Pool::open(folder, read.pool, renderer, Some(scorer));
    let pool = Arc::new(pool.map_err(|e| refused(&e))?);
    use std::time::{SystemTime, UNIX_EPOCH};
    let now = || SystemTime::now().duration_since(UNIX_EPOCH);
    let clock = move || now().map_or(0.0, |d| d.as_secs_f64());
    let own = OwnRollouts(Arc::clone(&pool), clock);
    Ok((
        sinew_pool::http::router(pool, Arc::new(clock)),
        Arc::new(own),
    ))
}

/// Finished rollouts of the gateway as trajectories of the pool.
#[cfg(feature = "pool")]
struct OwnRollouts<C>(Arc<Pool>, C);

#[cfg(feature = "pool")]
impl<C: Fn() -> f64 + Send + Sync> RolloutHooks for OwnRollouts<C> {
    fn opening(&self, spec: &mut RolloutSpec) -> Result<(), ApiError> {
        refuse_adapter(spec)
    }

    fn finished(&self, trace: &Trace) {
        let Self(pool, clock) = self;
        let size = pool.config().rollout_group_size;
        let pushed = Pushed::of_rollout(trace, size, pool.tokenizer());
        // Finishing is answered once the pool has it.
        let answer = tokio::task::block_in_place(|| pool.push(vec![pushed], clock()));
        if let Err(error) = answer {
            tracing::error!(rollout = %trace.episode, %error, "the pool did not take a finished rollout");
        }
    }
}

/// Arguments of `sinew pool`: the server is named after the sub-command, too.
#[derive(Debug, Args)]
pub(crate) struct PoolArgs {
    /// Address of `sinew serve --pool`
    #[arg(long, global = true, default_value = "http://127.0.0.1:8080")]
    url: String,
    /// File with its control token
    #[arg(long, global = true, default_value = "token")]
    token_file: PathBuf,
    #[command(subcommand)]
    command: PoolCommand,
}

#[derive(Debug, Subcommand)]
enum PoolCommand {
    /// Count what waits, by task type, and what is in quarantine, by reason
    Status,
    /// Send the trajectories of a JSON batch
    Push {
        /// File to send
        file: PathBuf,
    },
    /// List the quarantine, oldest first, one JSON object a line
    Quarantine {
        /// Maximum number of rows
        #[arg(long, default_value_t = 100)]
        limit: usize,
        /// Start after this row
        #[arg(long)]
        after: Option<String>,
    },
    /// Check a row of the quarantine again, and admit it if nothing speaks against it any more
    Release {
        /// Id of the row, as `sinew pool quarantine` lists it
        id: String,
        /// Admit it as another kind: sft or dpo for what says only text
        #[arg(long)]
        kind: Option<String>,
    },
    /// Delete a row of the quarantine
    Delete {
        /// Id of the row, as `sinew pool quarantine` lists it
        id: String,
    },
}

/// `sinew pool`: one call of the pool's HTTP API; replies are JSON.
pub(crate) fn run(args: &PoolArgs) -> Result<(), Failure> {
    let client = PoolClient::new(&args.url, &args.token_file)?;
    match &args.command {
        PoolCommand::Status => {
            let reply = client.call("GET", "/pool", &Value::Null)?;
            let text = serde_json::to_string_pretty(&reply).map_err(Failure::system)?;
            output::print(&(text + "\n"));
        }
        PoolCommand::Push { file } => output::print_json(&client.push(file)?),
        PoolCommand::Quarantine { limit, after } => {
            let after = after.as_ref().map(|a| format!("&after={a}"));
            let path = format!(
                "/pool/quarantine?limit={limit}{}",
                after.unwrap_or_default()
            );
            let page = client.call("GET", &path, &Value::Null)?;
            for row in page["rows"]
                .as_array()
                .map(Vec::as_slice)
                .unwrap_or_default()
            {
                output::print_json(row);
            }
        }
        PoolCommand::Release { id, kind } => {
            let path = format!("/pool/quarantine/{id}/release");
            let reply = client.call("POST", &path, &json!({"kind": kind}))?;
            output::print_json(&reply);
        }
        PoolCommand::Delete { id } => {
            let path = format!("/pool/quarantine/{id}");
            output::print_json(&client.call("DELETE", &path, &Value::Null)?);
        }
    }
    Ok(())
}
