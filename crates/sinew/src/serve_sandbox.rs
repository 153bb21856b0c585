//! `sinew serve --sandbox-only`: sandboxes over HTTP, without engine and gateway.
//!
//! It serves agents whose code runs elsewhere. Each owner has a token, sees only its own sandboxes, and has
//! separate quotas. The level `process` is always offered; the others if the command line names their
//! requirements.

use crate::output;
use crate::sandbox_presence::{self, PresenceArgs};
use crate::signals::StopSignals;
use clap::Args;
use serde_json::json;
use sinew_assembly::levels::egress;
use sinew_assembly::{Failure, TlsArgs};
use sinew_recipe::{Level, SandboxPlan};
use sinew_sandbox::{ProcessConfig, ProcessProvider, SandboxProvider};
use sinew_sandbox_http::{Bounds, Egress, Service, Tokens};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Interval of looks whether a server that is about to end has sandboxes.
const LOOK: Duration = Duration::from_millis(50);
/// Maximum number of named images.
const MAX_NAMED: usize = 64;

/// Arguments of `sinew serve --sandbox-only`.
#[derive(Debug, Args)]
pub(crate) struct SandboxOnlyArgs {
    /// Serve sandboxes alone, to agents outside: no engine, no gateway
    #[arg(long)]
    pub(crate) sandbox_only: bool,
    /// File of lines OWNER:TOKEN that open the sandboxes; without it one token is made up and printed
    #[arg(long, requires = "sandbox_only")]
    token_file: Option<PathBuf>,
    /// TOML file with the rules by which sandboxes reach the network (keys of [sandbox.egress])
    #[arg(long, requires = "sandbox_only")]
    egress: Option<PathBuf>,
    /// Folder for a log of what each sandbox asked of the network
    #[arg(long, requires = "egress")]
    egress_audit: Option<PathBuf>,
    /// Root of the sandboxes of level `process` and `container`, as `sandbox.image` of a recipe
    #[arg(long, requires = "sandbox_only")]
    image: Option<String>,
    /// Another root, for sandboxes of level `process` that name it (`"image": NAME`); may be given several
    /// times
    #[arg(long, value_name = "NAME=IMAGE", requires = "sandbox_only")]
    named_image: Vec<String>,
    /// Folder in which images are unpacked
    #[arg(long, requires = "sandbox_only", default_value = ".cache/images")]
    image_cache: String,
    /// Folder that sandboxes of level `process` and `container` see at /volumes/NAME, read-only;
    /// may be given several times
    #[arg(long, value_name = "NAME=FOLDER", requires = "sandbox_only")]
    volume: Vec<String>,
    /// Folder of compiled interpreters: offers the level `wasm`, too
    #[arg(long, requires = "sandbox_only")]
    wasm_modules: Option<PathBuf>,
    /// Offer the level `container`, too
    #[arg(long, requires = "sandbox_only")]
    containers: bool,
    /// Folder of kernels and roots: offers the level `microvm`, too
    #[arg(long, requires = "sandbox_only")]
    microvm_images: Option<PathBuf>,
    /// Maximum number of live sandboxes, of one owner and of all together
    #[arg(long, default_value_t = 256, value_parser = crate::at_least_one)]
    max_sandboxes: usize,
    /// Maximum bytes that the snapshots of one owner keep in memory
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 30, requires = "sandbox_only")]
    max_snapshot_bytes: u64,
    /// Price of this host for an hour, in any currency: clients of several servers fill cheap ones first
    #[arg(long, value_name = "PRICE", value_parser = price, requires = "sandbox_only")]
    price_per_hour: Option<f64>,
    /// Seconds that live sandboxes get to end after Ctrl-C, TERM or HUP; no new ones are made meanwhile
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=86_400), requires = "sandbox_only")]
    sandbox_drain_s: u64,
    #[command(flatten)]
    presence: PresenceArgs,
    /// Maximum number of open connections of one owner
    #[arg(long, default_value_t = 512, value_parser = crate::at_least_one, requires = "sandbox_only")]
    max_connections: usize,
}

impl SandboxOnlyArgs {
    /// Quotas of an owner, and the service's defaults for the others.
    fn bounds(&self) -> Bounds {
        Bounds {
            sandboxes: self.max_sandboxes,
            snapshot_bytes: self.max_snapshot_bytes,
            connections: self.max_connections,
            ..Bounds::default()
        }
    }
}

/// Runs until Ctrl-C, TERM or HUP, then destroys every sandbox. Sandboxes do not survive the process.
pub(crate) fn run(
    args: &SandboxOnlyArgs,
    listen: SocketAddr,
    tls: &TlsArgs,
    as_json: bool,
) -> Result<(), Failure> {
    let (tokens, shown) = tokens(args, listen)?;
    let endpoint = tls.endpoint("--listen", listen)?;
    let proxy = match &args.egress {
        None => None,
        Some(path) => Some(Arc::new(egress::proxy(
            egress::load(path)?,
            args.egress_audit.clone(),
        )?)),
    };
    let section = SandboxPlan {
        image: args.image.clone(),
        image_cache: args.image_cache.clone(),
        volumes: sinew_assembly::levels::parse_volumes(&args.volume)?,
        max_sandboxes: args.max_sandboxes,
        ..SandboxPlan::default()
    };
    let shows: Vec<_> = proxy.as_ref().map(|w| w.shows()).into_iter().collect();
    let (provider, env) = processes(&section, &shows)?;
    let named = named_images(args, &section, &shows)?;
    let mut providers = vec![provider];
    providers.extend(other_levels(args, section)?);
    let bounds = args.bounds();
    let egress = proxy.map(|w| w as Arc<dyn Egress>);
    let service = Service::new(providers, tokens, bounds, egress).with_env(env);
    let mut service = service.with_price(args.price_per_hour);
    for (name, (provider, env)) in named {
        service = service.with_image(name, provider, env);
    }
    let service = Arc::new(service);
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::system)?;
    runtime.block_on(async {
        // A script may send one as soon as it reads the address.
        let mut signals = StopSignals::new()?;
        let listener = endpoint.bind().await;
        let listener = listener.map_err(|e| Failure::input(format!("--listen {listen}: {e}")))?;
        let address = listener.local_addr().map_err(Failure::system)?;
        announce(address, listener.scheme(), shown.as_deref(), as_json);
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let presence = sandbox_presence::start(&args.presence, &service, args.max_sandboxes)?;
        let own = Arc::clone(&service);
        let serving = sinew_sandbox_http::serve(listener, own, async { drop(stopped.await) });
        tokio::pin!(serving);
        tokio::select! {
            ended = &mut serving => return ended.map_err(Failure::system),
            () = drained(&service, &mut signals, args.sandbox_drain_s) => {}
        }
        drop(presence);
        // The receiver is gone only if serving has ended already.
        let _ = stop.send(());
        serving.await.map_err(Failure::system)
    })
}

/// Waits for a signal, and then until no sandbox lives, the time is over or another signal comes.
async fn drained(service: &Service, signals: &mut StopSignals, seconds: u64) {
    signals.next().await;
    service.drain();
    let until = tokio::time::Instant::now() + Duration::from_secs(seconds);
    while service.live().0 > 0 && tokio::time::Instant::now() < until {
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = signals.next() => return,
        }
    }
}

/// A price of 0 or more.
fn price(text: &str) -> Result<f64, String> {
    let price: f64 = text.parse().map_err(|e| format!("{e}"))?;
    if price.is_finite() && price >= 0.0 {
        Ok(price)
    } else {
        Err("allowed: 0 or more".into())
    }
}

/// Makes sandboxes of a root, with the environment variables of its image.
type Rooted = (Arc<dyn SandboxProvider>, Vec<(String, String)>);

/// The level `process` with the image and the volumes of `section`, and with what else `shows` names.
fn processes(section: &SandboxPlan, shows: &[(PathBuf, PathBuf)]) -> Result<Rooted, Failure> {
    let image = sinew_assembly::levels::image(section)?;
    let mut config = ProcessConfig::new(&std::env::var("PATH").unwrap_or_default());
    config
        .shows
        .extend(sinew_assembly::levels::volumes(&section.volumes)?);
    config.image = image.as_ref().map(|i| i.root.clone());
    config.max_live = section.max_sandboxes;
    config.shows.extend_from_slice(shows);
    let provider = ProcessProvider::start(config).map_err(Failure::system)?;
    let env = image.map(|i| i.config.env).unwrap_or_default();
    Ok((Arc::new(provider), env))
}

/// The images of `--named-image`, pulled and unpacked, by their names.
fn named_images(
    args: &SandboxOnlyArgs,
    section: &SandboxPlan,
    shows: &[(PathBuf, PathBuf)],
) -> Result<BTreeMap<String, Rooted>, Failure> {
    if args.named_image.len() > MAX_NAMED {
        let count = args.named_image.len();
        return Err(Failure::input(format!(
            "--named-image: {count} of them; allowed: at most {MAX_NAMED}, as each has a process of its own"
        )));
    }
    let mut images = BTreeMap::new();
    for argument in &args.named_image {
        let wrong = |why: &str| {
            Failure::input(format!(
                "--named-image {argument:?}: {why}; allowed: NAME=IMAGE, with a name of letters, digits, '.', \
                 '-' and '_'"
            ))
        };
        let (name, image) = argument
            .split_once('=')
            .ok_or_else(|| wrong("it has no ="))?;
        let plain = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
            return Err(wrong("that is no name of 1 to 64 characters"));
        }
        let section = SandboxPlan {
            image: Some(image.to_owned()),
            ..section.clone()
        };
        let rooted = processes(&section, shows)?;
        if images.insert(name.to_owned(), rooted).is_some() {
            return Err(wrong("the name is there twice"));
        }
    }
    Ok(images)
}

/// The levels in addition to `process` that the command line asks for; containers with the settings of
/// `section`.
fn other_levels(
    args: &SandboxOnlyArgs,
    section: SandboxPlan,
) -> Result<Vec<Arc<dyn SandboxProvider>>, Failure> {
    let mut providers = Vec::new();
    if let Some(folder) = &args.wasm_modules {
        providers.push(sinew_assembly::levels::sandboxes(&SandboxPlan {
            level: Level::Wasm,
            wasm_modules: folder.to_string_lossy().into_owned(),
            max_sandboxes: args.max_sandboxes,
            ..SandboxPlan::default()
        })?);
    }
    if args.containers {
        providers.push(sinew_assembly::levels::sandboxes(&SandboxPlan {
            level: Level::Container,
            ..section
        })?);
    }
    if let Some(folder) = &args.microvm_images {
        providers.push(sinew_assembly::levels::sandboxes(&SandboxPlan {
            level: Level::Microvm,
            microvm_images: folder.to_string_lossy().into_owned(),
            max_sandboxes: args.max_sandboxes,
            ..SandboxPlan::default()
        })?);
    }
    Ok(providers)
}

/// The owners of `--token-file`, or one with a random token, which is returned to be printed. An address
/// that other hosts reach needs a file.
fn tokens(args: &SandboxOnlyArgs, listen: SocketAddr) -> Result<(Tokens, Option<String>), Failure> {
    let Some(path) = &args.token_file else {
        if !listen.ip().is_loopback() {
            return Err(Failure::input(format!(
                "--listen {listen}: other hosts can reach it, so it needs --token-file\n  \
                 hint: echo \"me:$(head -c 24 /dev/urandom | base64)\" > tokens"
            )));
        }
        let (tokens, text) = Tokens::generate().map_err(Failure::system)?;
        return Ok((tokens, Some(text)));
    };
    let named =
        |e: &dyn std::fmt::Display| Failure::input(format!("--token-file {}: {e}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|e| named(&e))?;
    Ok((Tokens::parse(&text).map_err(|e| named(&e))?, None))
}

/// Prints where it listens. A token from a file is not shown.
fn announce(address: SocketAddr, scheme: &str, token: Option<&str>, as_json: bool) {
    let url = format!("{scheme}://{address}");
    if as_json {
        output::print_json(
            &json!({ "listening": address.to_string(), "url": url, "token": token }),
        );
        return;
    }
    let token = token.unwrap_or("in --token-file");
    output::print(&format!(
        "listening on {url}\ntoken: {token}\n\
         make a sandbox: curl -X POST -H 'Authorization: Bearer TOKEN' {url}/v1/sandboxes\n"
    ));
}
