//! `sinew view`, and `--view` of commands that run a recipe: the dashboard over folders of runs.

use crate::output;
use crate::signals::StopSignals;
use clap::Args;
use serde_json::json;
use sinew_assembly::{Endpoint, Failure, TlsArgs};
use sinew_dashboard::{Dashboard, NoRenderer, NoStore, Ports};
use sinew_recipe::RunPlan;
use sinew_view::say;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Arguments of `sinew view`.
#[derive(Debug, Args)]
pub(crate) struct ViewArgs {
    /// Folders of runs, or folders that hold them; default: runs
    runs: Vec<PathBuf>,
    /// Address to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    #[command(flatten)]
    tls: TlsArgs,
    /// One JSON object on standard output: `url` with the token, `listen`, `token`, `runs`
    #[arg(long)]
    json: bool,
}

/// Ports from the dashboard to the wiring.
fn ports() -> Ports {
    Ports {
        renderer: Arc::new(|folder: &Path, recipe: &RunPlan| {
            let renderer = sinew_assembly::renderer_of(folder, recipe);
            renderer.map_err(|e| NoRenderer(e.text().to_owned()))
        }),
        store: Arc::new(|folder: &Path| {
            sinew_assembly::run_reader(folder).map_err(|e| NoStore(e.text().to_owned()))
        }),
        late: Arc::new(sinew_assembly::late_config),
        environments: sinew_assembly::ENVIRONMENTS,
    }
}

/// Serves until Ctrl-C, TERM or HUP.
///
/// # Errors
/// If a folder is not there, or the address cannot be taken.
pub(crate) fn run(args: &ViewArgs) -> Result<(), Failure> {
    let folders = if args.runs.is_empty() {
        vec![PathBuf::from("runs")]
    } else {
        args.runs.clone()
    };
    if let Some(folder) = folders.iter().find(|f| !f.is_dir()) {
        return Err(Failure::input(format!(
            "{} is no folder\n  hint: give folders of runs; `sinew train RECIPE` makes one in runs/NAME",
            folder.display()
        )));
    }
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::system)?;
    runtime.block_on(async {
        let mut signals = StopSignals::new()?;
        let dashboard = bind(
            "--listen",
            args.tls.endpoint("--listen", args.listen)?,
            folders,
        )
        .await?;
        let runs = dashboard.runs();
        if args.json {
            output::print_json(&json!({
                "url": dashboard.url(), "listen": dashboard.address().to_string(),
                "token": dashboard.token(), "runs": runs,
            }))
        } else {
            let what = if runs == 1 { "run" } else { "runs" };
            output::print(&format!("{runs} {what}: {}\n", dashboard.url()));
        }
        tokio::select! {
            () = dashboard.serve() => {}
            () = signals.next() => {}
        }
        Ok(())
    })
}

/// # Errors
/// If the address cannot be taken; plain HTTP that other machines reach is named.
async fn bind(
    option: &str,
    endpoint: Endpoint,
    folders: Vec<PathBuf>,
) -> Result<Dashboard, Failure> {
    let listen = endpoint.address;
    if !listen.ip().is_loopback() && endpoint.tls.is_none() {
        say("the dashboard speaks plain HTTP: a listener on the network can read the token");
    }
    let bound = Dashboard::bind(endpoint, folders, ports()).await;
    bound.map_err(|e| Failure::input(format!("{option} {listen}: {e}")))
}

/// Serves the dashboard of one run for as long as the runtime lives, and prints its address.
///
/// # Errors
/// If the address cannot be taken.
pub(crate) fn of_run(
    runtime: &tokio::runtime::Runtime,
    endpoint: Endpoint,
    folder: &Path,
    json: bool,
) -> Result<(), Failure> {
    let dashboard = runtime.block_on(bind("--view", endpoint, vec![folder.to_owned()]))?;
    if json {
        output::print_json(&json!({ "view": dashboard.url() }))
    } else {
        say(&format!("dashboard: {}", dashboard.url()))
    }
    runtime.spawn(dashboard.serve());
    Ok(())
}
