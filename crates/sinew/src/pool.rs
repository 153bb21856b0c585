//! The data pool: behind `sinew serve --pool`, asked by `sinew pool`, drawn from by `sinew train`.

use crate::failure::Failure;
use crate::output;
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use sinew_algo::Advantage;
use sinew_gateway::Router;
use sinew_pipeline::{PoolClient, PoolSource, PoolSourceConfig};
use sinew_pool::Scorer;
use sinew_pool::schema::Kind;
#[cfg(feature = "pool")]
use sinew_pool::{Folder, Pool, PoolConfig};
use sinew_recipe::RunPlan;
use sinew_render::Renderer;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

#[cfg(feature = "pool")]
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolFile {
    pool: PoolConfig,
}

/// The refusal of `serve --pool`, whose routes this program was built without.
#[cfg(not(feature = "pool"))]
pub(crate) fn router(
    file: &Path,
    _: Option<&Path>,
    _: bool,
    _: Arc<dyn Renderer>,
    _: Scorer,
) -> Result<Router, Failure> {
    let what = format!("--pool {}", file.display());
    Err(crate::features::missing(&what, "pool"))
}

/// The routes of the pool that a file configures; without a folder it is kept in memory.
#[cfg(feature = "pool")]
pub(crate) fn router(
    file: &Path,
    store: Option<&Path>,
    accept_loss: bool,
    renderer: Arc<dyn Renderer>,
    scorer: Scorer,
) -> Result<Router, Failure> {
    let refused =
        |e: &dyn std::fmt::Display| Failure::input(format!("--pool {}: {e}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|e| refused(&e))?;
    let read: PoolFile =
        toml::from_str(&text).map_err(|e| refused(&sinew_recipe::explain(&text, &e)))?;
    read.pool.check().map_err(|e| refused(&e))?;
    let folder = store.map(|s| s.join("pool"));
    let folder = folder.as_deref().map(|path| Folder { path, accept_loss });
    let pool = Pool::open(folder, read.pool, renderer, Some(scorer));
    let pool = Arc::new(pool.map_err(|e| refused(&e))?);
    use std::time::{SystemTime, UNIX_EPOCH};
    let now = || SystemTime::now().duration_since(UNIX_EPOCH);
    let clock = move || now().map_or(0.0, |d| d.as_secs_f64());
    Ok(sinew_pool::http::router(pool, Arc::new(clock)))
}

/// What a recipe's algorithm draws from a pool.
pub(crate) fn kind_of(recipe: &RunPlan) -> Kind {
    let composition = recipe.algorithm.composition(recipe.rollout.group_size);
    match composition.map(|c| c.advantage) {
        Ok(Advantage::One) => Kind::Sft,
        Ok(Advantage::Preference { .. }) => Kind::Dpo,
        _ => Kind::Rl,
    }
}

/// A recipe's pool, if it answers and has the tokenizer of the model, and what it says of itself.
fn reached(recipe: &RunPlan) -> Result<(PoolClient, Value), Failure> {
    let Some(sinew_recipe::DataSection::Pool {
        url, token_file, ..
    }) = &recipe.data
    else {
        return Err(Failure::system("data.type is not `pool`"));
    };
    let client = PoolClient::new(url, Path::new(token_file))?;
    let told = client.call("GET", "/pool", &Value::Null)?;
    let own = sinew_pool::tokenizer_hash(crate::wire::renderer(recipe)?.as_ref());
    if told["tokenizer"] != own.as_str() {
        return Err(Failure::input(format!(
            "data.url = {url:?}: its tokenizer is {}, this model's is {own}\n  \
             hint: serve the pool with the same --model",
            told["tokenizer"]
        )));
    }
    Ok((client, told))
}

/// Whether a recipe's pool can be drawn from, in words.
pub(crate) fn check(recipe: &RunPlan) -> Result<String, Failure> {
    let (_, told) = reached(recipe)?;
    Ok(format!(
        "pool: {} whole groups wait",
        told["groups"]["whole"]
    ))
}

/// Minimum trajectories of a group that a recipe's algorithm compares.
fn min_group(recipe: &RunPlan) -> usize {
    let composition = recipe.algorithm.composition(recipe.rollout.group_size);
    let compares = composition.is_ok_and(|c| c.advantage.compares());
    if compares { 2 } else { 1 }
}

/// The pool of `[data] type = "pool"`; `None` with other data.
pub(crate) fn source(
    recipe: &RunPlan,
    run_dir: &Path,
    cancel: watch::Receiver<bool>,
) -> Result<Option<PoolSource>, Failure> {
    let Some(sinew_recipe::DataSection::Pool {
        wait_s, lease_s, ..
    }) = &recipe.data
    else {
        return Ok(None);
    };
    let (client, _) = reached(recipe)?;
    let config = PoolSourceConfig {
        run_dir: run_dir.into(),
        kind: kind_of(recipe),
        wait: Duration::from_secs_f64(*wait_s),
        lease_s: *lease_s,
        min_group: min_group(recipe),
    };
    Ok(Some(PoolSource::new(client, config, cancel)?))
}

#[derive(Debug, Args)]
pub(crate) struct PoolArgs {
    /// Where `sinew serve --pool` listens
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
    /// Send trajectories: a JSON batch, or an Arrow stream in a file that ends in .arrow
    Push { file: PathBuf },
    /// List the quarantine, oldest first, one JSON object a line
    Quarantine {
        /// Maximum rows
        #[arg(long, default_value_t = 100)]
        limit: usize,
        /// Start after this row
        #[arg(long)]
        after: Option<String>,
    },
    /// Check a row of the quarantine again, and admit it if nothing speaks against it any more
    Release {
        id: String,
        /// Admit it as another kind: sft or dpo for what says only text
        #[arg(long)]
        kind: Option<String>,
    },
    /// Delete a row of the quarantine
    Delete { id: String },
}

/// `sinew pool`.
pub(crate) fn run(args: &PoolArgs) -> Result<(), Failure> {
    let client = PoolClient::new(&args.url, &args.token_file)?;
    match &args.command {
        PoolCommand::Status => {
            let told = client.call("GET", "/pool", &Value::Null)?;
            let text = serde_json::to_string_pretty(&told).map_err(Failure::system)?;
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
            let told = client.call("POST", &path, &json!({"kind": kind}))?;
            output::print_json(&told);
        }
        PoolCommand::Delete { id } => {
            let path = format!("/pool/quarantine/{id}");
            output::print_json(&client.call("DELETE", &path, &Value::Null)?);
        }
    }
    Ok(())
}
