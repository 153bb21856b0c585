//! `sinew setup`: installs parts that are not in this program: the Python environment of the trainer with
//! PyTorch here, coding agents in `agents.rs`.
//!
//! The environment is separate from those of engines, whose pins of torch conflict. It is made and tried
//! under `DIR.part` and renamed at its end, so that `DIR` never holds half of one. An environment contains
//! its own path in its scripts, which are rewritten before the rename. A lock keeps a second call away
//! meanwhile. The rest of a killed call under `DIR.part` is removed by the next one.

mod agents;

use crate::bounded;
use crate::check::disk::nearest;
use crate::output;
use clap::{Args, Subcommand};
use rustix::fs::{FlockOperation, flock};
use serde_json::json;
use sinew_assembly::Failure;
use sinew_torch::{EnvironmentVariables, PythonReport, probe, requirements};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Bytes that must be free: those of the environment, measured 5.6 GB with the libraries of CUDA, and some
/// for downloads.
const ROOM: u64 = 7_000_000_000;
/// Time that the new environment has to import all packages.
const PROBE_WITHIN: Duration = Duration::from_secs(300);
/// Time of small programs, such as one that prints a version.
const ASK_WITHIN: Duration = Duration::from_secs(30);
/// The lowest version of Python that the packages run with.
const LEAST_PYTHON: (u32, u32) = (3, 10);
/// File in the environment with the packages that it was made for.
const MADE_FOR: &str = "sinew-requirements.txt";
/// Largest script that is rewritten: larger files in `bin` are programs.
const MOST_SCRIPT: u64 = 1 << 20;

/// Arguments of `sinew setup`.
#[derive(Debug, Args)]
pub(crate) struct SetupArgs {
    #[command(subcommand)]
    command: SetupCommand,
}

#[derive(Debug, Subcommand)]
enum SetupCommand {
    /// Make the Python environment of PyTorch trainers (about 5.6 GB), if it is not there yet
    #[command(
        after_help = "Examples: sinew setup torch\n          sinew setup torch --index-url https://download.pytorch.org/whl/cpu"
    )]
    Torch(TorchArgs),
    /// Install coding agents for `harness = { type = "cli" }`, each with its lock
    #[command(after_help = "Example: sinew setup agents claude-code codex")]
    Agents(agents::AgentsArgs),
}

/// Arguments of `sinew setup torch`.
#[derive(Debug, Args)]
struct TorchArgs {
    /// Folder of the environment; default: torch in the cache folder, where runs look for it
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Python 3.10 or later that the environment is made with: a path, or a name in PATH
    #[arg(long, default_value = "python3")]
    python: String,
    /// Package index for torch only, such as the one for machines without GPUs; the other packages come from
    /// the usual index
    #[arg(long, value_name = "URL")]
    index_url: Option<String>,
    /// One JSON object with the versions
    #[arg(long)]
    json: bool,
}

/// Variables that name the place of the Python of PyTorch.
pub(crate) fn variables() -> EnvironmentVariables {
    let path = |name: &str| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    EnvironmentVariables {
        torch_python: path("SINEW_TORCH_PYTHON"),
        sinew_cache: path("SINEW_CACHE"),
        xdg_cache_home: path("XDG_CACHE_HOME"),
        home: path("HOME"),
    }
}

/// Runs `sinew setup`.
///
/// # Errors
/// If a program fails, there is too little room, or a package of the new environment cannot be imported.
pub(crate) fn run(args: &SetupArgs) -> Result<(), Failure> {
    match &args.command {
        SetupCommand::Torch(args) => torch(args),
        SetupCommand::Agents(args) => agents::run(args),
    }
}

/// Runs `sinew setup torch`.
fn torch(args: &TorchArgs) -> Result<(), Failure> {
    let begun = Instant::now();
    let default = || sinew_assembly::resolve_env().cache_dir.join("torch");
    let dir = args.dir.clone().unwrap_or_else(default);
    let dir = std::path::absolute(&dir).map_err(|e| failed(&dir, e))?;
    let _lock = lock(&dir, "`sinew setup torch` makes this environment")?;
    let there = is_made(&dir);
    if !there {
        make(args, &dir)?;
    }
    let report = tried(&python_of(&dir))?;
    let seconds = begun.elapsed().as_secs_f64();
    if args.json {
        output::print_json(&json!({
            "dir": dir,
            "python": python_of(&dir),
            "made": !there,
            "seconds": seconds,
            "packages": report.packages,
            "python_version": report.python,
            "cuda": report.cuda,
        }));
        return Ok(());
    }
    let state = if there {
        "is there already".to_owned()
    } else {
        format!("made in {seconds:.0} s")
    };
    output::print(&format!(
        "{}: {state}\n{}\n",
        dir.display(),
        versions(&report)
    ));
    if args.dir.is_some() {
        let python = python_of(&dir).display().to_string();
        output::print(&format!(
            "Runs find it with SINEW_TORCH_PYTHON={python} or trainer.python = {python:?}\n"
        ));
    }
    Ok(())
}

/// All versions of an environment, on one line.
pub(crate) fn versions(report: &PythonReport) -> String {
    let packages = report.packages.iter().map(|(name, version)| {
        let version = version.as_deref().unwrap_or("missing");
        format!("{name} {version}")
    });
    let packages: Vec<String> = packages.collect();
    let cuda = match &report.cuda {
        Some(version) => format!("CUDA {version}"),
        None => "no CUDA".to_owned(),
    };
    format!("Python {}, {}, {cuda}", report.python, packages.join(", "))
}

fn python_of(dir: &Path) -> PathBuf {
    dir.join("bin/python")
}

fn failed(path: &Path, error: impl std::fmt::Display) -> Failure {
    Failure::system(format!("{}: {error}", path.display()))
}

/// A path beside the environment.
fn beside(dir: &Path, ending: &str) -> PathBuf {
    let mut name = dir.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// Keeps other calls for the same folder away until the result is dropped. `work`: what the other one does.
fn lock(dir: &Path, work: &str) -> Result<File, Failure> {
    let path = beside(dir, ".lock");
    let parent = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(parent).map_err(|e| failed(parent, e))?;
    let file = File::create(&path).map_err(|e| failed(&path, e))?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        Failure::outside(format!(
            "{}: another {work} now: wait for its end",
            dir.display()
        ))
    })?;
    Ok(file)
}

/// Whether the environment was made for the packages of this program.
fn is_made(dir: &Path) -> bool {
    let made_for = fs::read_to_string(dir.join(MADE_FOR));
    made_for.is_ok_and(|text| text == requirements()) && python_of(dir).exists()
}

/// Makes the environment: in `DIR.part`, tried there, then in its place.
fn make(args: &TorchArgs, dir: &Path) -> Result<(), Failure> {
    let own = dir.join(MADE_FOR).exists();
    let is_free = !dir.exists() || dir.read_dir().is_ok_and(|mut all| all.next().is_none());
    if !own && !is_free {
        return Err(Failure::input(format!(
            "{}: it is not empty, and `sinew setup torch` did not make it: name another --dir, or use it \
             with SINEW_TORCH_PYTHON",
            dir.display()
        )));
    }
    room(dir, args)?;
    let part = beside(dir, ".part");
    remove(&part)?;
    announce(args, dir);
    let made = install(args, &part).and_then(|()| tried(&python_of(&part)));
    let placed = made.and_then(|_| {
        let written = fs::write(part.join(MADE_FOR), requirements());
        let moved = written.and_then(|()| rewrite(&part, dir));
        moved.map_err(|e| failed(&part, e))?;
        place(&part, dir, own)
    });
    if placed.is_err() {
        // The first error matters more than what is left over, which the next call removes.
        let _ = remove(&part);
    }
    placed
}

/// Puts the new environment in its place; an older one is removed after that.
fn place(part: &Path, dir: &Path, replaces: bool) -> Result<(), Failure> {
    let old = beside(dir, ".old");
    remove(&old)?;
    if replaces {
        fs::rename(dir, &old).map_err(|e| failed(dir, e))?;
    }
    fs::rename(part, dir).map_err(|e| failed(dir, e))?;
    remove(&old)
}

/// Removes a folder, if it is there.
fn remove(dir: &Path) -> Result<(), Failure> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed(dir, e)),
        _ => Ok(()),
    }
}

/// Refuses a disk that is too full. A given index may have smaller packages.
fn room(dir: &Path, args: &TorchArgs) -> Result<(), Failure> {
    let at = nearest(dir);
    let free = sinew_telemetry::disk_free(at).map_err(|e| failed(at, e))?;
    if free >= ROOM || args.index_url.is_some() {
        return Ok(());
    }
    Err(Failure::outside(format!(
        "{}: {:.1} GB free, the environment needs {:.1} GB while it is made\n  hint: free some space, or \
         name a folder of another disk with --dir",
        at.display(),
        free as f64 / 1e9,
        ROOM as f64 / 1e9
    )))
}

/// Announces what will be installed, how large it is and how long it takes.
fn announce(args: &TorchArgs, dir: &Path) {
    let packages: Vec<&str> = requirements().lines().collect();
    let by = if has_uv() { "uv" } else { "venv and pip" };
    let size = match &args.index_url {
        Some(url) => format!("torch comes from {url}"),
        None => {
            "about 5.6 GB with the libraries of CUDA; it took 83 s on two cores with a fast network"
                .to_owned()
        }
    };
    output::say_error(&format!(
        "sinew: {by} installs {} into {}: {size}\n",
        packages.join(", "),
        dir.display()
    ));
}

fn has_uv() -> bool {
    bounded::output(Command::new("uv").arg("--version"), ASK_WITHIN).is_ok()
}

/// Makes an environment with all packages.
fn install(args: &TorchArgs, part: &Path) -> Result<(), Failure> {
    let packages: Vec<&str> = requirements().lines().collect();
    let (torch, others): (Vec<&str>, Vec<&str>) = packages
        .iter()
        .copied()
        .partition(|name| name.starts_with("torch>"));
    let uv = has_uv();
    if uv {
        let venv = ["venv", "--quiet", "--python", args.python.as_str()];
        program(Command::new("uv").args(venv).arg(part), INDEX)?;
    } else {
        recent_enough(&args.python)?;
        program(
            Command::new(&args.python).args(["-m", "venv"]).arg(part),
            INDEX,
        )?;
    }
    let pip = || {
        let mut pip = Command::new(if uv { "uv".into() } else { python_of(part) });
        if uv {
            pip.args(["pip", "install", "--python"])
                .arg(python_of(part));
        } else {
            let quiet = ["-m", "pip", "install", "--disable-pip-version-check"];
            pip.args(quiet);
        }
        pip
    };
    match &args.index_url {
        Some(url) => {
            program(pip().arg("--index-url").arg(url).args(torch), INDEX)?;
            program(pip().args(others), INDEX)
        }
        None => program(pip().args(packages), INDEX),
    }
}

/// Refuses an interpreter that is too old.
fn recent_enough(python: &str) -> Result<(), Failure> {
    let code = "import sys; print(*sys.version_info[:2])";
    let hint = "name one with --python (Debian: apt-get install python3 python3-venv)";
    let said = bounded::output(Command::new(python).args(["-c", code]), ASK_WITHIN)
        .map_err(|e| Failure::outside(format!("{e}\n  hint: {hint}")))?;
    let mut numbers = said.split(' ').filter_map(|n| n.parse().ok());
    let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if found >= LEAST_PYTHON {
        return Ok(());
    }
    Err(Failure::outside(format!(
        "{python} is Python {}.{}, torch needs {}.{} or later\n  hint: {hint}",
        found.0, found.1, LEAST_PYTHON.0, LEAST_PYTHON.1
    )))
}

/// Hint for a package manager of Python that fails.
const INDEX: &str = "a package index must be reachable (UV_INDEX_URL or PIP_INDEX_URL name another), and \
     `python3 -m venv` needs python3-venv on Debian";

/// Runs a program to its end; it writes to standard error, so that standard output has the result only.
fn program(command: &mut Command, hint: &str) -> Result<(), Failure> {
    let shown = command.get_program().to_string_lossy().into_owned();
    let status = command
        .stdin(Stdio::null())
        .stdout(io::stderr())
        .env_remove("PYTHONPATH")
        .env_remove("PYTHONHOME")
        .status()
        .map_err(|e| Failure::outside(format!("{shown}: {e}\n  hint: {hint}")))?;
    if status.success() {
        return Ok(());
    }
    let words: Vec<_> = command
        .get_args()
        .map(|word| word.to_string_lossy())
        .collect();
    Err(Failure::outside(format!(
        "{shown} {}: {status}; its own message is above\n  hint: {hint}",
        words.join(" ")
    )))
}

/// Imports every package of an environment.
fn tried(python: &Path) -> Result<PythonReport, Failure> {
    let report = probe(python, PROBE_WITHIN).map_err(|e| Failure::outside(e.to_string()))?;
    let missing = report.missing();
    if missing.is_empty() {
        return Ok(report);
    }
    Err(Failure::outside(format!(
        "{}: {} cannot be imported\n  hint: remove the folder and run `sinew setup torch` again, or try \
         `{} -c 'import {}'` for the reason",
        python.display(),
        missing.join(", "),
        python.display(),
        missing[0]
    )))
}

/// Replaces the path of the environment in its scripts and in `pyvenv.cfg`. Links and programs stay.
fn rewrite(part: &Path, dir: &Path) -> io::Result<()> {
    let (from, to) = (part.display().to_string(), dir.display().to_string());
    let mut files = vec![part.join("pyvenv.cfg")];
    for entry in part.join("bin").read_dir()? {
        let entry = entry?;
        if entry.file_type()?.is_file() && entry.metadata()?.len() <= MOST_SCRIPT {
            files.push(entry.path());
        }
    }
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else {
            continue;
        };
        if text.contains(&from) {
            // Writing in place keeps the mode.
            fs::write(&file, text.replace(&from, &to))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_move_with_their_environment() {
        let root = tempfile::tempdir().unwrap();
        let (part, dir) = (root.path().join("torch.part"), root.path().join("torch"));
        fs::create_dir_all(part.join("bin")).unwrap();
        let script = |path: &Path| format!("#!{}/bin/python\nprint(1)\n", path.display());
        fs::write(part.join("bin/torchrun"), script(&part)).unwrap();
        fs::write(part.join("bin/tool"), [0xff, 0xfe, 0]).unwrap();
        fs::write(part.join("pyvenv.cfg"), "home = /usr/bin\n").unwrap();
        std::os::unix::fs::symlink("/usr/bin/python3", part.join("bin/python")).unwrap();
        rewrite(&part, &dir).unwrap();
        let read = |name: &str| fs::read(part.join("bin").join(name)).unwrap();
        assert_eq!(read("torchrun"), script(&dir).into_bytes());
        assert_eq!(read("tool"), [0xff, 0xfe, 0]);
        assert!(
            fs::symlink_metadata(part.join("bin/python"))
                .unwrap()
                .is_symlink()
        );
    }

    #[test]
    fn an_older_environment_is_replaced_as_a_whole() {
        let root = tempfile::tempdir().unwrap();
        let (part, dir) = (root.path().join("torch.part"), root.path().join("torch"));
        for (folder, name) in [(&part, "new"), (&dir, "old")] {
            fs::create_dir_all(folder).unwrap();
            fs::write(folder.join(name), "").unwrap();
        }
        place(&part, &dir, true).unwrap();
        assert!(dir.join("new").exists() && !dir.join("old").exists());
        let left: Vec<_> = root.path().read_dir().unwrap().collect();
        assert_eq!(left.len(), 1);
        assert!(!is_made(&dir));
    }

    #[test]
    fn a_second_call_waits_for_nobody() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("torch");
        let first = lock(&dir).unwrap();
        assert!(lock(&dir).unwrap_err().text().contains("wait for its end"));
        drop(first);
        assert!(lock(&dir).is_ok());
    }

    /// `python/requirements-torch.txt` is the list that users read.
    #[test]
    fn the_listed_packages_are_those_that_are_installed() {
        let listed = include_str!("../../../python/requirements-torch.txt");
        let sorted = |text: &str| {
            let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        assert_eq!(sorted(listed), sorted(requirements()));
    }
}
