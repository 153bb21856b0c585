//! `sinew sandbox`: uses sandboxes without a run.
//!
//! `run` makes a sandbox as a recipe would, runs one program in it and destroys it. The program's output is
//! hostile: a terminal shows its control characters and does not carry them out.

use crate::lab::{self, LabArgs};
use crate::output;
use crate::runtime;
use crate::sandbox_image::{self, ImageCommand};
use crate::shell;
use crate::snapshot_args::SnapshotArgs;
use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use serde_json::json;
use sinew_assembly::Failure;
use sinew_recipe::{LEVEL_NAMES, Level, SandboxPlan, Urls};
use sinew_sandbox::{
    Ending, ExecRequest, ExecResult, Program, Protection, SandboxError, WritableRoot,
};
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum CPU time of a session in seconds: what a sandbox server gives at most.
const MAX_SHELL_CPU_S: f64 = 3600.0;

/// A root that the program can change, for the container levels.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct RootArgs {
    /// Let the program write everywhere, into a layer of this many MiB that ends with the sandbox; it
    /// runs as the image's user, in the image's folder
    #[arg(long, value_name = "MIB")]
    writable_root: Option<u64>,
    /// User of the program: a name or number of the image, USER:GROUP for both
    #[arg(long, value_name = "USER", requires = "writable_root")]
    user: Option<String>,
    /// Folder in which the program starts
    #[arg(long, value_name = "FOLDER", requires = "writable_root")]
    workdir: Option<String>,
}

/// Largest layer of a writable root, in MiB.
const MAX_ROOT_MIB: u64 = 1 << 20;

impl RootArgs {
    /// The root of a sandbox of `section`.
    ///
    /// # Errors
    /// If the size is out of range, or the image cannot be read.
    fn writable_root(&self, section: &SandboxPlan) -> Result<Option<WritableRoot>, Failure> {
        let Some(mib) = self.writable_root else {
            return Ok(None);
        };
        if !(1..=MAX_ROOT_MIB).contains(&mib) {
            return Err(Failure::input(format!(
                "--writable-root {mib}: allowed: 1 to {MAX_ROOT_MIB}"
            )));
        }
        let config = sinew_assembly::levels::image(section)?.map(|image| image.config);
        let config = config.unwrap_or_default();
        let mut root = sinew_assembly::levels::writable_root(&config, mib << 20);
        if let Some(user) = &self.user {
            root.user.clone_from(user);
        }
        if let Some(workdir) = &self.workdir {
            root.workdir.clone_from(workdir);
        }
        Ok(Some(root))
    }
}

/// Sub-commands. `attack`, `bench` and `leaks` are those of `sinew-lab`.
#[derive(Debug, Subcommand)]
pub(crate) enum SandboxCommand {
    /// Run code in a fresh sandbox and say how it ended
    #[command(
        after_help = "Exit code: the program's own; 128 and the number of the signal that ended it (137 for too much \
                      memory or output, 159 for a forbidden system call); 124 after its time; 1 if the sandbox fails, \
                      2 for wrong input. `ending` in JSON says which."
    )]
    Run {
        /// Python code
        #[arg(long, conflicts_with = "shell")]
        code: Option<String>,
        /// Shell script
        #[arg(long)]
        shell: Option<String>,
        /// Root of the sandbox: registry:HOST/NAME:TAG, built:TAG, local:NAME, an OCI layout (folder or
        /// tar file), a tar file of `docker save`, or a folder; PATH:TAG where it holds several images
        #[arg(long)]
        image: Option<String>,
        /// Folder that the sandbox sees at /volumes/NAME, read-only; may be given several times
        #[arg(long, value_name = "NAME=FOLDER")]
        volume: Vec<String>,
        /// Program and its arguments; left out: what the image names
        #[arg(last = true, conflicts_with_all = ["code", "shell"])]
        argv: Vec<String>,
        /// Wall-time limit in seconds
        #[arg(long, default_value_t = 5.0)]
        timeout: f64,
        /// Memory limit in MiB
        #[arg(long, default_value_t = 256)]
        memory_mb: u64,
        /// Refuse to run if a protection cannot be enforced
        #[arg(long)]
        strict: bool,
        /// Level: process, wasm, container (or an engine of it) or microvm
        #[arg(long, default_value = "process", value_parser = level_names())]
        level: String,
        #[command(flatten)]
        kept: SnapshotArgs,
        #[command(flatten)]
        root: RootArgs,
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// Build images for sandboxes from folders with a Dockerfile, list and remove them
    Image {
        #[command(subcommand)]
        command: ImageCommand,
    },
    /// Open a shell with a terminal in a fresh sandbox
    #[command(
        after_help = "Exit code: as that of `sinew sandbox run`; 130 if a signal ends the session.\n\
                      Examples: sinew sandbox shell --image registry:docker.io/debian:12\n          \
                      sinew sandbox shell --server http://10.0.0.7:8081 -- python3"
    )]
    Shell {
        /// Root of the sandbox, as for `run`
        #[arg(long, conflicts_with = "server")]
        image: Option<String>,
        /// Folder that the sandbox sees at /volumes/NAME, read-only; may be given several times
        #[arg(long, value_name = "NAME=FOLDER", conflicts_with = "server")]
        volume: Vec<String>,
        /// Make the sandbox on this server (`sinew serve --sandbox-only`)
        #[arg(long, value_name = "URL")]
        server: Option<String>,
        /// Environment variable with the token for the server
        #[arg(
            long,
            value_name = "NAME",
            default_value = "SINEW_SANDBOX_TOKEN",
            requires = "server"
        )]
        server_key_env: String,
        /// Program and its arguments; left out: /bin/sh
        #[arg(last = true)]
        argv: Vec<String>,
        /// Wall-time limit of the session in seconds
        #[arg(long, default_value_t = 3600.0)]
        timeout: f64,
        /// Memory limit in MiB
        #[arg(long, default_value_t = 256)]
        memory_mb: u64,
        /// Refuse to run if a protection cannot be enforced
        #[arg(long)]
        strict: bool,
        /// Level: process
        #[arg(long, default_value = "process", value_parser = ["process"])]
        level: String,
        #[command(flatten)]
        kept: SnapshotArgs,
    },
    /// Attack a sandbox from inside and report what held (runs sinew-lab)
    #[command(
        disable_help_flag = true,
        after_help = "Example: sinew sandbox attack --filter 31-45"
    )]
    Attack(LabArgs),
    /// Measure sandboxes against fork+exec and other launchers (runs sinew-lab)
    #[command(
        disable_help_flag = true,
        after_help = "Example: sinew sandbox bench --only true,fresh --json"
    )]
    Bench(LabArgs),
    /// Make, use and destroy sandboxes in a loop, and report what of them is left (runs sinew-lab)
    #[command(
        disable_help_flag = true,
        after_help = "Example: sinew sandbox leaks --level crun --loops 100"
    )]
    Leaks(LabArgs),
    /// Say what this host enforces
    Probe {
        /// Level: process, wasm, container (or an engine of it) or microvm
        #[arg(long, default_value = "process", value_parser = level_names())]
        level: String,
        /// One JSON object a protection, and one for each performance degradation
        #[arg(long)]
        json: bool,
    },
}

/// `sinew sandbox ...`.
///
/// # Errors
/// If a limit is out of range or the level is not available; else with the status of the program.
pub(crate) fn run(command: &SandboxCommand) -> Result<(), Failure> {
    match command {
        SandboxCommand::Probe { level, json } => probe(level, *json),
        SandboxCommand::Attack(args) => lab::run(lab::LAB, &["sandbox", "attack"], args),
        SandboxCommand::Bench(args) => lab::run(lab::LAB, &["sandbox", "bench"], args),
        SandboxCommand::Leaks(args) => lab::run(lab::LAB, &["sandbox", "leaks"], args),
        SandboxCommand::Image { command } => sandbox_image::run(command),
        SandboxCommand::Shell {
            image,
            volume,
            server,
            server_key_env,
            argv,
            timeout,
            memory_mb,
            strict,
            level,
            kept,
        } => {
            check_limits(*timeout, *memory_mb)?;
            let section = SandboxPlan {
                image: image.clone(),
                volumes: volumes(volume, level)?,
                server: server.clone().map(Urls::One),
                server_key_env: server_key_env.clone(),
                memory_mb: *memory_mb,
                strict: *strict,
                cpu_s: timeout.min(MAX_SHELL_CPU_S),
                ..at_level(level)?
            };
            shell(&section, argv, *timeout, kept)
        }
        SandboxCommand::Run {
            code,
            shell,
            image,
            volume,
            argv,
            timeout,
            memory_mb,
            strict,
            level,
            kept,
            root,
            json,
        } => {
            check_limits(*timeout, *memory_mb)?;
            let section = SandboxPlan {
                image: image.clone(),
                volumes: volumes(volume, level)?,
                memory_mb: *memory_mb,
                strict: *strict,
                cpu_s: *timeout,
                ..at_level(level)?
            };
            let program = match (code, shell) {
                (Some(code), _) => Program::Python(code.clone()),
                (None, Some(script)) => Program::Shell(script.clone()),
                (None, None) => words(&section, argv)?,
            };
            let deadline = Duration::from_secs_f64(*timeout);
            exec(&section, program, deadline, (kept, root), *json)
        }
    }
}

/// The volumes of `--volume`, which two levels have.
fn volumes(arguments: &[String], level: &str) -> Result<BTreeMap<String, PathBuf>, Failure> {
    let has = matches!(at_level(level)?.level, Level::Process | Level::Container);
    if !has && !arguments.is_empty() {
        return Err(Failure::input(format!(
            "--volume with --level {level}: allowed with the level process and container"
        )));
    }
    Ok(sinew_assembly::levels::parse_volumes(arguments)?)
}

/// Refuses times and memory that no sandbox has.
fn check_limits(timeout: f64, memory_mb: u64) -> Result<(), Failure> {
    if !sinew_recipe::is_time(timeout) {
        let allowed = sinew_recipe::TIME;
        return Err(Failure::input(format!(
            "--timeout {timeout}: allowed: {allowed}"
        )));
    }
    let range = sinew_recipe::MEMORY_MB;
    if !range.contains(&memory_mb) {
        return Err(Failure::input(format!(
            "--memory-mb {memory_mb}: allowed: {} to {}",
            range.start(),
            range.end()
        )));
    }
    Ok(())
}

/// A session on a terminal; its exit code is the program's.
fn shell(
    section: &SandboxPlan,
    argv: &[String],
    timeout: f64,
    kept: &SnapshotArgs,
) -> Result<(), Failure> {
    let result = shell::run(section, argv, Duration::from_secs_f64(timeout), kept)?;
    shell::tell(&result);
    match status(result.ending) {
        0 => Ok(()),
        code => Err(Failure::Program(code, String::new())),
    }
}

/// The program of the command line, else that of the image. A name without a slash is looked up in the
/// image, on the image's own `PATH`.
fn words(section: &SandboxPlan, argv: &[String]) -> Result<Program, Failure> {
    let Some(image) = sinew_assembly::levels::image(section)? else {
        return if argv.is_empty() {
            Err(nothing_to_run())
        } else {
            Ok(Program::Argv(argv.to_vec()))
        };
    };
    let mut words = if argv.is_empty() {
        image.config.argv()
    } else {
        argv.to_vec()
    };
    let first = words.first_mut().ok_or_else(nothing_to_run)?;
    *first = image.program(first).map_err(Failure::input)?;
    Ok(Program::Argv(words))
}

/// The refusal of `sinew sandbox run` without code, script, program or image that names one.
fn nothing_to_run() -> Failure {
    Failure::input("nothing to run\n  hint: sinew sandbox run --code 'print(6 * 7)'")
}

/// Values of `--level`.
fn level_names() -> PossibleValuesParser {
    PossibleValuesParser::new(LEVEL_NAMES.split(", "))
}

/// The plan of `--level`, with the defaults of a recipe for everything else.
///
/// # Errors
/// If there is no level of this name.
pub(crate) fn at_level(level: &str) -> Result<SandboxPlan, Failure> {
    SandboxPlan::at(level)
        .ok_or_else(|| Failure::input(format!("--level {level:?}: allowed: {LEVEL_NAMES}")))
}

/// A level that was started, and in which a program ran.
pub(crate) struct Probed {
    pub(crate) protections: Arc<Vec<Protection>>,
    /// Reasons for which it is slower than it could be.
    pub(crate) degradations: Vec<String>,
    /// Time that the first sandbox took, with a Python program in it.
    pub(crate) program: Duration,
}

impl Probed {
    /// Protections that are not in force, with the reason.
    pub(crate) fn missing(&self) -> Vec<String> {
        let missing = self.protections.iter().filter(|p| !p.enforced);
        missing.map(|p| format!("{} ({})", p.name, p.how)).collect()
    }

    /// Protections in words.
    pub(crate) fn in_force(&self) -> String {
        match self.missing() {
            missing if missing.is_empty() => {
                format!("all {} protections are in force", self.protections.len())
            }
            missing => format!("not enforced here: {}", missing.join(", ")),
        }
    }

    /// The reason of a protection; nothing at levels that do not have it.
    pub(crate) fn how(&self, name: &str) -> Option<&str> {
        let found = self.protections.iter().find(|p| p.name == name);
        found.map(|p| p.how.as_str())
    }
}

/// Starts a level, and runs `print(6 * 7)` in a sandbox of it, which is destroyed afterwards.
///
/// # Errors
/// If the level cannot be started here, or the program does not print 42.
pub(crate) fn probed(section: &SandboxPlan) -> Result<Probed, Failure> {
    let provider = sinew_assembly::levels::sandboxes(section)?;
    let spec = sinew_assembly::levels::sandbox_spec(section)?;
    let runtime = runtime::on_this_thread()?;
    let begun = Instant::now();
    let answer = runtime.block_on(async {
        let mut sandbox = provider.acquire(&spec).await?;
        let request = ExecRequest {
            program: Program::Python("print(6 * 7)".into()),
            stdin: Vec::new(),
            deadline: Duration::from_secs(20),
        };
        let result = sandbox.exec(request).await?;
        sandbox.destroy().await?;
        Ok(result.stdout)
    });
    let answer = answer.map_err(|e: SandboxError| Failure::system(e))?;
    if answer != b"42\n" {
        return Err(Failure::system(format!(
            "a sandboxed Python printed {:?} instead of 42",
            String::from_utf8_lossy(&answer)
        )));
    }
    Ok(Probed {
        protections: provider.protections(),
        degradations: provider.degradations(),
        program: begun.elapsed(),
    })
}

/// Prints each protection of a level, whether it is in force here, and what makes the level slower.
fn probe(level: &str, as_json: bool) -> Result<(), Failure> {
    let probed = probed(&at_level(level)?)?;
    for p in probed.protections.iter() {
        if as_json {
            output::print_json(&json!(p));
        } else {
            let mark = if p.enforced { "yes" } else { "NO " };
            output::print(&format!("{mark}  {:16} {}\n", p.name, p.how));
        }
    }
    for degradation in probed.degradations {
        if as_json {
            output::print_json(&json!({ "degradation": degradation }))
        } else {
            output::print(&format!("degradation: {degradation}\n"))
        }
    }
    Ok(())
}

/// Runs one program in a sandbox of `section`, prints what it wrote and destroys the sandbox, also after an
/// error.
///
/// # Errors
/// The program's status if it is not 0.
fn exec(
    section: &SandboxPlan,
    program: Program,
    deadline: Duration,
    (kept, root): (&SnapshotArgs, &RootArgs),
    as_json: bool,
) -> Result<(), Failure> {
    kept.check()?;
    let provider = sinew_assembly::levels::sandboxes(section)?;
    let mut spec = sinew_assembly::levels::sandbox_spec(section)?;
    spec.writable_root = root.writable_root(section)?;
    let runtime = runtime::on_this_thread()?;
    let (result, digest) = runtime.block_on(async {
        let mut sandbox = kept.begin(provider.as_ref(), &spec).await?;
        let request = ExecRequest {
            program,
            stdin: Vec::new(),
            deadline,
        };
        let result = sandbox.exec(request).await.map_err(Failure::system);
        let digest = match &result {
            Ok(_) => kept.leave(provider.as_ref(), sandbox.as_mut()).await,
            Err(_) => Ok(None),
        };
        sandbox.destroy().await.map_err(Failure::system)?;
        Ok::<_, Failure>((result?, digest?))
    })?;
    show(&result, digest.as_deref(), as_json)
}

/// Prints a result: as one JSON object, or output and the reason of a bad end apart.
fn show(result: &ExecResult, digest: Option<&str>, as_json: bool) -> Result<(), Failure> {
    if as_json {
        output::print_json(&json!({
            "ending": result.ending,
            "stdout": String::from_utf8_lossy(&result.stdout),
            "stderr": String::from_utf8_lossy(&result.stderr),
            "truncated": result.truncated,
            "usage": result.usage,
            "protections": *result.protections,
            "snapshot": digest,
        }));
        return match status(result.ending) {
            0 => Ok(()),
            code => Err(Failure::Program(code, String::new())),
        };
    }
    if std::io::stdout().is_terminal() {
        output::print(&String::from_utf8_lossy(&result.stdout))
    } else {
        output::print_as_it_is(&result.stdout)
    }
    if let Some(digest) = digest {
        output::print(&format!("snapshot {digest}\n"));
    }
    output::print_error(&result.stderr);
    let how = match result.ending {
        Ending::Exited { code: 0 } => return Ok(()),
        Ending::Exited { code } => format!("exited with code {code}"),
        Ending::Signalled { signal } => format!("was ended by signal {signal}"),
        Ending::Timeout => "ran into its limit of time".into(),
        Ending::OutOfMemory => "ran out of memory".into(),
        Ending::TooManyProcesses => "started too many processes".into(),
        Ending::OutputLimit => "wrote more than is kept".into(),
        Ending::Denied => "made a forbidden system call".into(),
        Ending::SandboxDied => "died with its sandbox".into(),
    };
    let text = format!("the program {how}, after {:.3} s", result.usage.wall_s);
    Err(Failure::Program(status(result.ending), text))
}

/// Exit code of `sinew sandbox run`, as shells and `timeout` have it.
///
/// | code | ending |
/// |---|---|
/// | 0 to 255 | the program's own |
/// | 124 | after its time, by the clock or on the processor |
/// | 128 + n | by signal n |
/// | 137 | too much memory or output: killed (9) |
/// | 159 | a forbidden system call (31) |
/// | 1 | the sandbox failed, or the program started too many processes |
fn status(ending: Ending) -> u8 {
    let byte = |code: i32| u8::try_from(code).unwrap_or(1);
    match ending {
        Ending::Exited { code } => byte(code),
        Ending::Signalled { signal } => byte(128 + signal),
        Ending::Timeout => 124,
        // Killed: by SIGKILL, by SIGSYS.
        Ending::OutOfMemory | Ending::OutputLimit => 137,
        Ending::Denied => 159,
        Ending::TooManyProcesses | Ending::SandboxDied => 1,
    }
}
