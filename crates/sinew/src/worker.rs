//! `sinew worker`: a process that works for a run of another process or host.
//!
//! | role | what it does | ends |
//! |---|---|---|
//! | `rollout` | runs episodes with weights that follow the run's | with the run, or when it is asked to |
//! | `engine` | serves the run's newest weights to its workers, and to clients with its token | as above |
//! | `scorer` | scores rows of a queue by the recipe's reward | when it is asked to |
//! | `sandbox` | serves sandboxes, as `sinew serve --sandbox-only` | when it is asked to |
//!
//! The recipe comes from the owner of the run. Files that it names (rows, functions, models) must be here as
//! well, in the same versions.

mod engine;
mod presence;
mod rollout;
mod scorer;

use crate::serve::ServeArgs;
use clap::{Args, Parser};
use sinew_assembly::{Failure, ServeAt, TlsArgs, WorkerEngines, WorkerOptions};
use sinew_control::RoleKind;
use sinew_workers::{DeskClient, DeskError, RunTerms};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::watch;

/// Arguments of `sinew worker`.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// Work of the process: rollout, engine, scorer or sandbox
    #[arg(long, value_name = "ROLE", default_value = "rollout")]
    role: RoleKind,
    /// Address of the owner of the run, which `sinew train --control` prints
    #[arg(long, value_name = "URL")]
    owner: String,
    /// File with the token of the owner: the run's control-token
    #[arg(long, value_name = "FILE")]
    token_file: PathBuf,
    /// Name that a launcher gave the process; left out: the owner names it
    #[arg(long, default_value = "")]
    name: String,
    /// The host may be taken away at short notice
    #[arg(long)]
    preemptible: bool,
    /// Role rollout: episodes at the same time; default: rollout.max_in_flight of the recipe, at most 32
    #[arg(long, value_parser = crate::at_least_one)]
    slots: Option<usize>,
    /// Role rollout: engines that sample its episodes: its own, or roles of the registry; auto, the default:
    /// roles if the recipe has `[launch.engine]`
    #[arg(long, value_enum, value_name = "WHICH")]
    engines: Option<WorkerEngines>,
    /// Roles rollout and engine: folder of this host for the run's weights, which all of its workers share;
    /// default: a folder in the memory of the host
    #[arg(long, value_name = "DIR")]
    weights_dir: Option<PathBuf>,
    /// Role rollout: address at which a service of harness.type = "service", or agents of harness.type =
    /// "live", reach the model of this worker
    #[arg(long, value_name = "ADDR")]
    serve: Option<SocketAddr>,
    /// Roles engine and sandbox: address to listen on
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// Address at which others reach --listen or --serve, if it is another one
    #[arg(long, value_name = "URL")]
    advertise: Option<String>,
    /// Role sandbox: file of lines OWNER:TOKEN that open the sandboxes
    #[arg(long, value_name = "FILE")]
    sandbox_token_file: Option<PathBuf>,
    /// Role scorer: address of the queue; default: that of the recipe's `[data]`
    #[arg(long, value_name = "URL")]
    queue: Option<String>,
    /// Role scorer: file with the token of the queue
    #[arg(long, value_name = "FILE", requires = "queue")]
    queue_token_file: Option<PathBuf>,
    #[command(flatten)]
    tls: TlsArgs,
    /// Seconds for episodes to end after the first signal; what has not ended then goes to other workers
    #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    notice_s: u64,
    /// Seconds without an answer of the owner, after which the process ends
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    patience_s: u64,
    /// Stop, as by a signal, when standard input ends
    #[arg(long)]
    stop_on_eof: bool,
    /// JSON lines on standard output
    #[arg(long)]
    json: bool,
}

/// Whether the process is asked to end.
pub(crate) type Stop = Arc<dyn Fn() -> bool + Send + Sync>;

/// Runs the role until it is asked to end, or its run is over.
///
/// # Errors
/// If an option has no effect with the role, the owner refuses it or does not answer, or a part cannot be
/// made.
pub(crate) fn run(args: &WorkerArgs) -> Result<(), Failure> {
    args.check()?;
    match args.role {
        RoleKind::Rollout => rollout::run(args),
        RoleKind::Engine => engine::run(args),
        RoleKind::Scorer => scorer::run(args),
        RoleKind::Sandbox => args.sandbox(),
        RoleKind::Trainer => Err(Failure::input(
            "--role trainer: the trainer is part of the run\n  hint: [trainer] type = \"torch\" trains with several \
             processes, which the run starts by itself",
        )),
    }
}

impl WorkerArgs {
    /// Refuses options that have no effect with the role.
    fn check(&self) -> Result<(), Failure> {
        use RoleKind::{Engine, Rollout, Sandbox, Scorer};
        let given: [(&str, bool, &[RoleKind]); 8] = [
            ("--slots", self.slots.is_some(), &[Rollout]),
            ("--engines", self.engines.is_some(), &[Rollout]),
            ("--serve", self.serve.is_some(), &[Rollout]),
            (
                "--weights-dir",
                self.weights_dir.is_some(),
                &[Rollout, Engine],
            ),
            ("--listen", self.listen.is_some(), &[Engine, Sandbox]),
            (
                "--advertise",
                self.advertise.is_some(),
                &[Rollout, Engine, Sandbox],
            ),
            (
                "--sandbox-token-file",
                self.sandbox_token_file.is_some(),
                &[Sandbox],
            ),
            ("--queue", self.queue.is_some(), &[Scorer]),
        ];
        let unused = given
            .iter()
            .find(|(_, is_given, roles)| *is_given && !roles.contains(&self.role));
        match unused {
            Some((option, _, roles)) => {
                let names: Vec<&str> = roles.iter().map(|role| role.name()).collect();
                let names = names.join(" and ");
                Err(Failure::input(format!(
                    "{option}: it has no effect with --role {}; it is for {names}",
                    self.role
                )))
            }
            None => Ok(()),
        }
    }

    fn token(&self) -> Result<String, Failure> {
        sinew_assembly::token_of("--token-file", &self.token_file)
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.patience_s)
    }

    /// Facts of the run; `None` if the process is asked to end before.
    fn terms(&self, owner: &DeskClient, stop: &Stop) -> Result<Option<RunTerms>, Failure> {
        match owner.terms(self.patience(), stop.as_ref()) {
            Ok(terms) => Ok(Some(terms)),
            Err(_) if stop() => Ok(None),
            Err(error) => Err(refused(error)),
        }
    }

    fn options(&self, runtime: Handle, stop: &Stop) -> Result<WorkerOptions, Failure> {
        let (public, tls) = (self.advertise.clone(), self.tls.clone());
        Ok(WorkerOptions {
            token: self.token()?,
            engines: self.engines.unwrap_or_default(),
            weights_dir: self.weights_dir.clone(),
            serve: ServeAt::of_worker(self.serve, public, &self.token_file, tls),
            patience: self.patience(),
            runtime,
            stop: Arc::clone(stop),
        })
    }

    /// Sandboxes over HTTP: the command that serves them, with the owner at which it registers.
    fn sandbox(&self) -> Result<(), Failure> {
        let Some(listen) = self.listen else {
            return Err(no_address("sandbox"));
        };
        let advertise = match &self.advertise {
            Some(url) => url.clone(),
            None => format!(
                "{}://{listen}",
                self.tls.endpoint("--listen", listen)?.scheme()
            ),
        };
        let mut words = vec!["sinew".to_owned(), "--sandbox-only".to_owned()];
        let file = |path: &PathBuf| path.display().to_string();
        let options = [
            ("--listen", Some(listen.to_string())),
            ("--owner", Some(self.owner.clone())),
            ("--owner-token-file", Some(file(&self.token_file))),
            ("--advertise", Some(advertise)),
            ("--role-name", Some(self.name.clone())),
            ("--token-file", self.sandbox_token_file.as_ref().map(file)),
        ];
        for (option, value) in options {
            words.extend(value.map(|value| format!("{option}={value}")));
        }
        words.extend(self.preemptible.then(|| "--preemptible".to_owned()));
        words.extend(self.json.then(|| "--json".to_owned()));
        let words = ServeWords::try_parse_from(words).map_err(Failure::input)?;
        crate::serve::run(&words.args.with_tls(&self.tls))
    }
}

/// The arguments of `sinew serve`, without the rest of the command line.
#[derive(Debug, Parser)]
struct ServeWords {
    #[command(flatten)]
    args: ServeArgs,
}

/// A runtime, and whether a signal came.
fn begin(args: &WorkerArgs) -> Result<(Runtime, watch::Receiver<u32>, Stop), Failure> {
    let runtime = Runtime::new().map_err(Failure::system)?;
    let signals = crate::signals::count(&runtime, args.stop_on_eof)?;
    let seen = signals.clone();
    let stop: Stop = Arc::new(move || *seen.borrow() > 0);
    Ok((runtime, signals, stop))
}

/// The failure of a call to an owner.
fn refused(error: DeskError) -> Failure {
    match error {
        DeskError::Address { .. } => Failure::input(error),
        error => Failure::outside(error),
    }
}

fn no_address(role: &str) -> Failure {
    Failure::input(format!(
        "--role {role}: it needs --listen ADDR, at which others reach it"
    ))
}
