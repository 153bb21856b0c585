//! `sinew tasks`: tasks as the model will see them.
//!
//! The prompt is made as in a run: the environment starts an episode of the task, and its first messages are
//! rendered with the model's chat template. The model's weights are not loaded. Sandboxes start only if the
//! environment needs them.

use crate::check::prompts::ask;
use crate::output::{print, print_json};
use crate::runtime;
use clap::{Args, ValueEnum};
use serde_json::json;
use sinew_assembly::ENVIRONMENTS;
use sinew_assembly::Failure;
use sinew_env::{EnvFactory, Split};
use sinew_recipe::RunPlan;
use sinew_render::Renderer;
use sinew_types::Task;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct TasksArgs {
    /// Recipe file (TOML)
    pub(crate) recipe: PathBuf,
    /// Part of the tasks
    #[arg(long, value_enum, default_value = "train")]
    split: SplitArg,
    /// Number of tasks, from the first
    #[arg(long, default_value_t = 3)]
    limit: usize,
    /// One JSON object a task
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SplitArg {
    Train,
    HeldOut,
}

/// One task with its prompt.
struct Shown {
    /// The task, with all columns of its row.
    task: Task,
    /// Text of the prompt's tokens, control tokens included.
    text: String,
    /// Tokens of the prompt. A run compares them with `rollout.max_context_tokens`.
    tokens: usize,
}

/// Prints tasks of one split, then the number of tasks and of rows that are left out.
///
/// # Errors
/// The first task that cannot be read or rendered, with its row.
pub(crate) fn run(args: &TasksArgs) -> Result<(), Failure> {
    let recipe = RunPlan::load(&args.recipe, ENVIRONMENTS).map_err(Failure::input)?;
    let tasks = sinew_assembly::tasks(&recipe)?;
    let sinew_assembly::World { taskset, envs, .. } = sinew_assembly::world(&recipe, &tasks)?;
    let renderer = sinew_assembly::renderer(&recipe.model, &recipe.env)?;
    let split = match args.split {
        SplitArg::Train => Split::Train,
        SplitArg::HeldOut => Split::HeldOut,
    };
    let runtime = runtime::on_this_thread()?;
    let limit = recipe.rollout.max_context_tokens as usize;
    for index in 0..taskset.len(split).min(args.limit) {
        let task = taskset.get(split, index).map_err(Failure::input)?;
        let shown = runtime.block_on(show(envs.as_ref(), renderer.as_ref(), task))?;
        if args.json {
            print_json(&json!({
                "task": shown.task.id, "kind": shown.task.kind, "data": shown.task.data,
                "prompt": shown.text, "tokens": shown.tokens,
            }))
        } else {
            print(&text(&shown, limit))
        }
    }
    if !args.json {
        let (train, held_out) = (taskset.len(Split::Train), taskset.len(Split::HeldOut));
        print(&format!("{train} tasks to train on, {held_out} held out"));
        if let Some((filtered, overlapping)) = tasks.left_out {
            print(&format!(
                "; rows left out: {filtered} by the filter, {overlapping} that are held out as well"
            ));
        }
        print("\n");
        tasks
            .notes
            .iter()
            .for_each(|note| print(&format!("note: {note}\n")));
    }
    Ok(())
}

/// The first messages of a task's environment, rendered for the model.
async fn show(
    envs: &dyn EnvFactory,
    renderer: &dyn Renderer,
    task: Task,
) -> Result<Shown, Failure> {
    let (messages, tools) = ask(envs, &task).await?;
    let tokens = renderer.render_prompt(&messages, &tools);
    let tokens = tokens.map_err(|e| Failure::input(format!("task {}: {e}", task.id)))?;
    Ok(Shown {
        text: renderer.decode_with_special(&tokens),
        tokens: tokens.len(),
        task,
    })
}

/// A task for people: its name and size, the prompt, the columns.
fn text(shown: &Shown, limit: usize) -> String {
    let Shown { task, text, tokens } = shown;
    let over = if *tokens < limit {
        String::new()
    } else {
        format!(" (too long: rollout.max_context_tokens = {limit})")
    };
    let mut out = format!(
        "--- {} [{}], {tokens} tokens{over}\n{text}\n",
        task.id, task.kind
    );
    for (name, value) in task.data.as_object().into_iter().flatten() {
        out.push_str(&format!("    {name} = {value}\n"));
    }
    out
}
