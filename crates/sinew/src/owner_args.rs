//! The owner of a run on the command line: by the run's folder, or by its address and token.

use clap::Args;
use sinew_assembly::Failure;
use sinew_control::{ControlError, ControlPlace, OwnerClient};
use std::path::{Path, PathBuf};

/// The run whose roles are meant.
#[derive(Debug, Args)]
pub(crate) struct OwnerArgs {
    /// Folder of a run that works, or the address of its owner
    #[arg(value_name = "RUN|URL")]
    owner: String,
    /// File with the token of the owner; default: the one that the run's folder names
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl OwnerArgs {
    /// Whether the owner was named by its address.
    fn is_address(&self) -> bool {
        self.owner.starts_with("http://") || self.owner.starts_with("https://")
    }

    /// The run's folder, if it was not named by its address.
    pub(crate) fn folder(&self) -> Option<&Path> {
        (!self.is_address()).then(|| Path::new(&self.owner))
    }

    /// The client of the owner. Nothing is sent.
    ///
    /// # Errors
    /// If the folder has no owner, or the token cannot be read.
    pub(crate) fn client(&self) -> Result<OwnerClient, Failure> {
        let given = self.token_file.as_deref();
        if self.is_address() {
            let file = given.ok_or_else(|| {
                Failure::input(format!(
                    "{}: an address needs --token-file FILE, the control-token of the run",
                    self.owner
                ))
            })?;
            let token = sinew_assembly::token_of("--token-file", file)?;
            return OwnerClient::new(&self.owner, &token).map_err(Failure::input);
        }
        let folder = Path::new(&self.owner);
        let mut place = ControlPlace::read(folder).map_err(|e| {
            let hint = match owner_log(folder) {
                Some(log) => format!("its owner begins, or failed: see {}", log.display()),
                None => "a run has an owner with roles if its recipe has [launch], or it was started by \
                         `sinew launch`"
                    .to_owned(),
            };
            Failure::input(format!("{e}\n  hint: {hint}"))
        })?;
        if let Some(file) = given {
            place.token_file = file.to_owned();
        }
        OwnerClient::at(&place).map_err(Failure::input)
    }
}

/// The newest log of an owner that an engine started with its output in the run's folder.
fn owner_log(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder.join("roles")).ok()?;
    let logs = entries.filter_map(|entry| {
        let path = entry.ok()?.path();
        let owners = path.file_name()?.to_str()?.contains("-owner-0-");
        let written = path.metadata().ok()?.modified().ok()?;
        owners.then_some((written, path))
    });
    logs.max().map(|(_, path)| path)
}

/// The failure of a call to an owner.
pub(crate) fn failed(error: ControlError) -> Failure {
    match error {
        ControlError::Unreachable { .. } => Failure::outside(error),
        other => Failure::input(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_without_an_owner_names_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let args = OwnerArgs {
            owner: dir.path().display().to_string(),
            token_file: None,
        };
        let why = args.client().unwrap_err();
        assert!(why.text().contains("[launch]"), "{}", why.text());
        let roles = dir.path().join("roles");
        std::fs::create_dir(&roles).unwrap();
        for name in ["r-1-owner-0-0.log", "r-1-rollout-0-0.log"] {
            std::fs::write(roles.join(name), "").unwrap();
        }
        let why = args.client().unwrap_err();
        assert!(why.text().contains("r-1-owner-0-0.log"), "{}", why.text());
    }
}
