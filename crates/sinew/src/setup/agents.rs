//! `sinew setup agents`: installs coding agents for the harness `cli`.
//!
//! Each package has a folder of its own, which is made under `NAME.part` and renamed at its end. Package
//! managers get the lock of the package, so they check the hash of everything that they install. Install
//! scripts do not run.

use super::{ASK_WITHIN, MADE_FOR, beside, failed, has_uv, lock, place, program, remove};
use crate::bounded;
use crate::output;
use clap::Args;
use serde_json::json;
use sinew_agents::{AGENTS, Agent, Manager, Package, find};
use sinew_assembly::Failure;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Arguments of `sinew setup agents`.
#[derive(Debug, Args)]
pub(super) struct AgentsArgs {
    /// Agents to install, such as claude-code; left out: all of them (about 2 GB)
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Folder of the agents; default: agents in the cache folder, where runs look for it
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Python 3.11 or later for agents in Python: the one that their sandbox has
    #[arg(long, default_value = "/usr/bin/python3")]
    python: String,
    /// One JSON object for each package
    #[arg(long)]
    json: bool,
}

/// Installs what is not there yet.
///
/// # Errors
/// If an agent is not known, a package manager fails, or a folder holds something else.
pub(super) fn run(args: &AgentsArgs) -> Result<(), Failure> {
    let packages = wanted(&args.names)?;
    let default = sinew_assembly::agents_folder;
    let dir = args.dir.clone().unwrap_or_else(default);
    let dir = std::path::absolute(&dir).map_err(|e| failed(&dir, e))?;
    fs::create_dir_all(&dir).map_err(|e| failed(&dir, e))?;
    let _lock = lock(&dir, "`sinew setup agents` installs into this folder")?;
    for package in packages {
        let begun = Instant::now();
        let made = install(package, &dir, &args.python)?;
        let seconds = begun.elapsed().as_secs_f64();
        let folder = dir.join(package.name);
        if args.json {
            let name = package.name;
            output::print_json(&json!({
                "package": name, "dir": folder, "made": made, "seconds": seconds,
            }));
            continue;
        }
        let state = if made {
            format!("installed in {seconds:.0} s")
        } else {
            "is there already".to_owned()
        };
        output::print(&format!("{}: {state}\n", folder.display()));
    }
    if args.dir.is_some() && !args.json {
        let folder = dir.display().to_string();
        output::print(&format!("Runs find it with harness.folder = {folder:?}\n"));
    }
    Ok(())
}

/// The packages of agents, each once.
fn wanted(names: &[String]) -> Result<Vec<&'static Package>, Failure> {
    let mut agents: Vec<&'static Agent> = Vec::new();
    for name in names {
        let known: Vec<&str> = AGENTS.iter().map(|agent| agent.name).collect();
        let unknown = || {
            let known = known.join(", ");
            Failure::input(format!("there is no agent {name:?}; allowed: {known}"))
        };
        agents.push(find(name).ok_or_else(unknown)?);
    }
    if names.is_empty() {
        agents.extend(AGENTS);
    }
    let mut packages: Vec<&'static Package> = Vec::new();
    for package in agents.into_iter().flat_map(|agent| agent.packages()) {
        if !packages.iter().any(|known| known.name == package.name) {
            packages.push(package);
        }
    }
    Ok(packages)
}

/// Installs one package, unless it is there in this version. Whether it was installed.
fn install(package: &Package, dir: &Path, python: &str) -> Result<bool, Failure> {
    let folder = dir.join(package.name);
    let made_for = fs::read_to_string(folder.join(MADE_FOR)).ok();
    let own = made_for.is_some();
    if made_for.as_deref() == Some(package.lock()) && folder.join(package.program).exists() {
        return Ok(false);
    }
    if folder.exists() && !own {
        return Err(Failure::input(format!(
            "{}: it is there, and `sinew setup agents` did not make it: name another --dir",
            folder.display()
        )));
    }
    let part = beside(&folder, ".part");
    remove(&part)?;
    fs::create_dir_all(&part).map_err(|e| failed(&part, e))?;
    output::say_error(&format!(
        "sinew: installing {} into {}\n",
        package.name,
        folder.display()
    ));
    let made = fetch(package, &part, python).and_then(|()| {
        let program = part.join(package.program);
        if !program.exists() {
            return Err(Failure::system(format!(
                "there is no {}",
                program.display()
            )));
        }
        let stamp = part.join(MADE_FOR);
        fs::write(&stamp, package.lock()).map_err(|e| failed(&stamp, e))?;
        place(&part, &folder, own)
    });
    if made.is_err() {
        // The first error matters more than what is left over, which the next call removes.
        let _ = remove(&part);
    }
    made.map(|()| true)
}

/// Runs the package manager in a new folder.
fn fetch(package: &Package, part: &Path, python: &str) -> Result<(), Failure> {
    let write = |name: &str, text: &str| {
        let path = part.join(name);
        fs::write(&path, text).map_err(|e| failed(&path, e))
    };
    match package.manager {
        Manager::Npm { manifest, lock } => {
            write("package.json", manifest)?;
            write("package-lock.json", lock)?;
            let mut npm = Command::new("npm");
            npm.args([
                "install",
                "--ignore-scripts",
                "--omit=optional",
                "--no-save",
            ])
            .args(["--no-audit", "--no-fund", "--loglevel=error", "--prefix"])
            .arg(part);
            let hint = "npm must be there (Debian: apt-get install npm) and its registry reachable";
            program(&mut npm, hint)
        }
        Manager::Pip { requirements } => {
            write("requirements.txt", requirements)?;
            let found = version(python)?;
            if found < (3, 11) {
                let (major, minor) = found;
                return Err(Failure::outside(format!(
                    "{python} is Python {major}.{minor}, {} needs 3.11 or later\n  hint: name one with --python",
                    package.name
                )));
            }
            let uv = has_uv();
            let mut pip = Command::new(if uv { "uv" } else { python });
            if uv {
                pip.args(["pip", "install", "--quiet", "--python", python]);
            } else {
                pip.args(["-m", "pip", "install", "--quiet"]).args([
                    "--disable-pip-version-check",
                    "--root-user-action",
                    "ignore",
                ]);
            }
            pip.args(["--no-deps", "--only-binary", ":all:", "--require-hashes"])
                .arg("--target")
                .arg(part.join("site"))
                .arg("--requirement")
                .arg(part.join("requirements.txt"));
            let hint =
                "pip must be there (Debian: apt-get install python3-pip) and its index reachable";
            program(&mut pip, hint)
        }
    }
}

/// Major and minor version of an interpreter.
fn version(python: &str) -> Result<(u32, u32), Failure> {
    let code = "import sys; print(*sys.version_info[:2])";
    let said = bounded::output(Command::new(python).args(["-c", code]), ASK_WITHIN);
    let said = said.map_err(|e| Failure::outside(e.to_string()))?;
    let mut numbers = said.split_whitespace().filter_map(|n| n.parse().ok());
    Ok((numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_wanted_once_and_by_known_names() {
        let names = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
            let packages = wanted(&names).map_err(|e| e.text().to_owned())?;
            Ok::<_, String>(packages.iter().map(|p| p.name).collect::<Vec<_>>())
        };
        assert_eq!(
            names(&["pi", "qwen-code"]).unwrap(),
            ["node", "pi", "qwen-code"]
        );
        assert_eq!(names(&[]).unwrap().len(), AGENTS.len() + 1);
        assert!(names(&["vim"]).unwrap_err().contains("claude-code"));
    }

    #[test]
    fn a_folder_of_someone_else_stays() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("codex")).unwrap();
        let package = &find("codex").unwrap().package;
        let error = install(package, dir.path(), "python3").unwrap_err();
        assert!(error.text().contains("did not make it"), "{}", error.text());
    }
}
