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
            Failure::input(format!(
                "{e}\n  hint: a run has an owner with roles if its recipe has [launch], or it was started by \
                 `sinew launch`"
            ))
        })?;
        if let Some(file) = given {
            place.token_file = file.to_owned();
        }
        OwnerClient::at(&place).map_err(Failure::input)
    }
}

/// The failure of a call to an owner.
pub(crate) fn failed(error: ControlError) -> Failure {
    match error {
        ControlError::Unreachable { .. } => Failure::outside(error),
        other => Failure::input(other),
    }
}
