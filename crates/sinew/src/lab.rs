//! `sinew bench` and `sinew sandbox attack|bench|leaks`: other programs, `sinew-bench` and `sinew-lab`, carry
//! them out.
//!
//! Benches and hostile programs are not a part of the product, so that its size and its dependencies do not
//! grow with them.

use clap::Args;
use sinew_assembly::Failure;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Programs that are installed apart.
pub(crate) const BENCH: &str = "sinew-bench";
pub(crate) const LAB: &str = "sinew-lab";

/// Arguments that are handed on as they are, also those that begin with `-`.
#[derive(Debug, Args)]
pub(crate) struct LabArgs {
    /// Arguments of the other program; `--help` lists them
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGS"
    )]
    args: Vec<OsString>,
}

/// Becomes `PROGRAM COMMAND ARGS`: its output and its exit code are those of this command. Returns only with
/// an error.
pub(crate) fn run(program: &str, command: &[&str], args: &LabArgs) -> Result<(), Failure> {
    let own = std::env::current_exe().map_err(Failure::system)?;
    let search = std::env::var_os("PATH").unwrap_or_default();
    let Some(found) = find(program, &own, &search) else {
        return Err(Failure::outside(format!(
            "this command needs the program {program}, which is not beside {} or on PATH\n  \
             hint: cargo build -p {program} (or cargo install --path crates/{program})",
            own.display()
        )));
    };
    let error = Command::new(&found).args(command).args(&args.args).exec();
    Err(Failure::system(format!("{}: {error}", found.display())))
}

/// The program in the folder of this one, else the first on the search path: a build finds its own
/// programs before installed ones.
fn find(program: &str, own: &Path, search: &OsString) -> Option<PathBuf> {
    let beside = own.with_file_name(program);
    let on_path = std::env::split_paths(search).map(|dir| dir.join(program));
    std::iter::once(beside).chain(on_path).find(|p| p.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_beside_this_one_comes_first() {
        let dir = tempfile::tempdir().unwrap();
        let (beside, on_path) = (dir.path().join("a"), dir.path().join("b"));
        for folder in [&beside, &on_path] {
            std::fs::create_dir(folder).unwrap();
        }
        let (own, search) = (beside.join("sinew"), on_path.clone().into_os_string());
        assert_eq!(find(LAB, &own, &search), None);
        std::fs::write(on_path.join(LAB), "").unwrap();
        assert_eq!(find(LAB, &own, &search), Some(on_path.join(LAB)));
        std::fs::write(beside.join(LAB), "").unwrap();
        assert_eq!(find(LAB, &own, &search), Some(beside.join(LAB)));
    }
}
