//! `sinew check`: refuses early the recipes that would fail later. Nothing is trained and nothing is kept.
//!
//! | row | what is checked | made |
//! |---|---|---|
//! | `recipe` | keys and values | always |
//! | `device` | kernels and threads of this machine | always |
//! | `template` | joins between turns against a full render | always |
//! | `model` | files and shape, context, adapters | always |
//! | `reference.model`, `teacher.model` | files and vocabulary | where the recipe has them |
//! | `data` | each row, or the pool | with `[data]` |
//! | `gpus`, `trainer`, `generation` | GPUs, and the bytes of trainer and engine on each | if PyTorch trains |
//! | `memory`, `disk` | what a run will need against what is there | with a model |
//! | `sandbox` | one Python program in a sandbox | if the environment runs code |
//! | `engine` | connections to the servers, or the models of the Tinker service | if it is not in this process |
//! | `harness`, `program` | the sandbox of a program, and that it asks the model | with an agent program |
//! | `reward` | keys, models and servers of rewards | with judges, reward servers and reward models |
//! | `algorithm` | what it reads, which every environment gives | where it reads more than outcomes |
//! | `tasks`, `env` | counts; the solutions of some tasks, or attempts at them where a reward scores them | always |
//! | `prompts` | tokens of prompts and solutions against the limits | with the built-in loop |
//!
//! A row is one check: its name, `ok` or `FAIL`, and the finding. All rows are made even after one failed,
//! except those that need its result: there is no memory to estimate if there is no model.
//!
//! Scripts go by its exit code: 0 the recipe runs, 1 it is refused, 3 it is right but needs something
//! outside first (a server that answers, a program that starts), which is named.

mod attempts;
pub(crate) mod disk;
mod gpu;
pub(crate) mod memory;
pub(crate) mod prompts;
pub(crate) mod reach;

use crate::output;
use crate::runtime;
use serde_json::{Value, json};
use sinew_assembly::ENVIRONMENTS;
use sinew_assembly::Failure;
use sinew_env::{EnvFactory, Split, Taskset};
use sinew_recipe::{DataSection, EngineType, ModelSection, Recipe, RecipeError, RunPlan};
use sinew_render::{MockTrajectory, conformance_check};
use sinew_sim::Gpus;
use sinew_types::Task;
use std::path::Path;
use std::time::{Duration, Instant};

/// The rows so far.
struct Report {
    /// Rows are JSON lines.
    json: bool,
    /// Checks that failed, as `name: reason`.
    failures: Vec<String>,
    /// Missing parts outside; the recipe itself is right.
    missing: Vec<String>,
    /// GPUs that the user states.
    gpus: Option<Gpus>,
}

impl Report {
    /// Prints one check; whether it succeeded. A text with "warning: " is marked. A failure of the kind
    /// `Outside` counts as missing and not as a refusal.
    fn row(&mut self, name: &str, result: Result<String, Failure>) -> bool {
        self.figures(name, result, &Value::Null)
    }

    /// Prints a check like [`Report::row`]; a JSON line also has its figures.
    fn figures(&mut self, name: &str, result: Result<String, Failure>, figures: &Value) -> bool {
        let (ok, text) = match result {
            Ok(text) => (true, text),
            Err(e) => {
                let text = e.text();
                let text = text.strip_prefix(&format!("{name}: ")).unwrap_or(text);
                match e {
                    Failure::Outside(_) => self.missing.push(format!("{name}: {text}")),
                    _ => self.failures.push(format!("{name}: {text}")),
                }
                (false, text.to_string())
            }
        };
        let warns = ok && text.contains("warning: ");
        if self.json {
            let mut row = json!({ "check": name, "ok": ok, "warning": warns, "detail": text });
            if !figures.is_null() {
                row["figures"] = figures.clone();
            }
            output::print_json(&row);
        } else {
            let mark = match (ok, warns) {
                (false, _) => "FAIL",
                (true, true) => "warn",
                (true, false) => "ok  ",
            };
            output::print(&format!("{mark}  {name:12} {text}\n"));
        }
        ok
    }

    /// The result of the command: refusals before what is missing.
    fn end(self) -> Result<(), Failure> {
        let of_the = |what: &str, all: &[String]| {
            format!("{} of the checks {what}; the first: {}", all.len(), all[0])
        };
        if !self.failures.is_empty() {
            return Err(Failure::system(of_the("failed", &self.failures)));
        }
        if !self.missing.is_empty() {
            let what = "need something outside first";
            return Err(Failure::outside(of_the(what, &self.missing)));
        }
        Ok(())
    }
}

/// Runs every check and reports each. Checks that share a cause are reported once: without a model,
/// `template` and `model` fail for one reason.
///
/// `gpus` are those of another machine, for recipes that PyTorch trains.
pub(crate) fn check(path: &Path, json: bool, gpus: Option<Gpus>) -> Result<(), Failure> {
    let recipe = Recipe::load(path, ENVIRONMENTS).map_err(|e| refused(e, json))?;
    if gpus.is_some() && !has_torch(&recipe) {
        let path = path.display();
        return Err(Failure::input(format!(
            "--gpus: has an effect with [trainer] type = \"torch\" only, which {path} does not have"
        )));
    }
    let mut report = Report {
        gpus,
        json,
        failures: Vec::new(),
        missing: Vec::new(),
    };
    report.row(
        "recipe",
        Ok(format!("{} parses; all values are allowed", path.display())),
    );
    report.row("device", device());
    match &recipe {
        Recipe::Run(plan) => plan_rows(plan, &mut report),
        Recipe::Chain(chain) => {
            for (at, stage) in chain.stages.iter().enumerate() {
                let of = format!("{} of {}: {}", at + 1, chain.stages.len(), stage.name);
                report.row("stage", Ok(of));
                plan_rows(&chain.before_it_runs(at), &mut report);
            }
        }
    }
    report.end()
}

/// Whether PyTorch trains a recipe, or a stage of it.
fn has_torch(recipe: &Recipe) -> bool {
    match recipe {
        Recipe::Run(plan) => plan.torch().is_some(),
        Recipe::Chain(chain) => chain
            .stages
            .iter()
            .any(|stage| stage.plan.torch().is_some()),
    }
}

/// The checks of a run, or of a stage before any has run.
fn plan_rows(recipe: &RunPlan, report: &mut Report) {
    let (joins, shape) = (template(recipe), model(recipe));
    // Checks that need the model would repeat the reason why there is none.
    let same_reason = match (&joins, &shape) {
        (Err(joins), Err(shape)) => joins.text() == shape.text(),
        _ => false,
    };
    if !same_reason {
        report.row("template", joins);
    }
    let has_model = report.row("model", shape);
    if has_model {
        model_rows(recipe, report);
    }
    if recipe.env.needs().sandbox {
        sandbox_rows(recipe, report);
    }
    if recipe.engine.kind != EngineType::Embedded {
        report.row("engine", reach::engine(recipe));
    }
    let tasks = sinew_assembly::tasks(recipe);
    if !recipe.harness.is_built_in() {
        let row = sinew_assembly::check_harness(&recipe.harness, &recipe.sandbox);
        let starts = recipe.harness.program().is_some();
        if report.row("harness", row)
            && starts
            && let Ok(tasks) = &tasks
        {
            let all = tasks.all.as_ref();
            let asks = sinew_assembly::asks_model(recipe, all);
            report.row(
                "program",
                asks.map(|()| "starts, and the gateway takes its first call".into()),
            );
        }
    }
    let tasks = match tasks {
        Ok(tasks) => tasks,
        Err(e) => {
            report.row("tasks", Err(e));
            return;
        }
    };
    report.row("tasks", counts(recipe, &tasks));
    let outside = recipe
        .worlds()
        .iter()
        .any(|w| w.reward.is_some_and(|r| r.is_outside()));
    let world = match sinew_assembly::world(recipe, &tasks) {
        Ok(world) => world,
        Err(e) => {
            let row = if outside { "reward" } else { "env" };
            report.row(row, Err(e));
            return;
        }
    };
    if let Some(read) = recipe.inputs_read() {
        report.row("algorithm", Ok(read));
    }
    // Checks that play episodes need the rewards, and would repeat the same fault.
    if outside && !report.row("reward", rewards(recipe)) {
        return;
    }
    let live = recipe.harness.live().is_some();
    let solved = !live && report.row("env", solvable(recipe, &world));
    if solved && has_model && recipe.harness.is_built_in() {
        report.row("prompts", prompts::prompts(recipe, &world));
    }
}

/// The checks that need the shape of the model.
fn model_rows(recipe: &RunPlan, report: &mut Report) {
    let mut scored = true;
    for (key, source) in sinew_assembly::scoring_sources(recipe) {
        scored &= report.row(key, scoring_model(recipe, key, &source));
    }
    if recipe.data.is_some() {
        let data = reach::pool(recipe).and_then(|()| data(recipe));
        report.row("data", data);
    }
    if scored {
        memory_rows(recipe, report);
    }
    report.row("disk", disk::disk(recipe, Path::new(".")));
}

/// Memory of this process, or where PyTorch trains, of GPUs and host.
fn memory_rows(recipe: &RunPlan, report: &mut Report) {
    if recipe.torch().is_none() {
        report.row("memory", memory::memory(recipe));
        return;
    }
    match gpu::rows(recipe, report.gpus) {
        Ok(rows) => {
            for row in rows {
                let result = row.result.map_err(Failure::input);
                report.figures(row.name, result, &row.figures);
            }
        }
        Err(e) => {
            report.row("trainer", Err(e));
        }
    }
}

/// A recipe that cannot be read: as an `error` object too where rows are JSON. `sinew check` ends with 1.
fn refused(error: RecipeError, json: bool) -> Failure {
    let failure = Failure::from(error);
    if json {
        output::print_json(&failure.json());
    }
    Failure::system(failure.text())
}

/// The checks that `sinew train` makes before it creates anything: those of `sinew check`, less those
/// that play solutions, start a program or connect to the engine. The first that fails ends them.
///
/// It gives the tasks that it read, so that their rows are read once.
pub(crate) fn before_training(
    run_dir: &Path,
    recipe: &RunPlan,
) -> Result<sinew_assembly::Tasks, Failure> {
    template(recipe)?;
    model(recipe)?;
    for (key, source) in sinew_assembly::scoring_sources(recipe) {
        scoring_model(recipe, key, &source)?;
    }
    data(recipe)?;
    let tasks = before_episodes(recipe)?;
    match recipe.torch() {
        Some(_) => gpu::check(recipe)?,
        None => drop(memory::memory(recipe)?),
    }
    disk::disk(recipe, &run_dir.join("checkpoints"))?;
    Ok(tasks)
}

/// The checks that `sinew collect` makes before it creates anything: those of `sinew train`, less those of
/// what is trained.
pub(crate) fn before_sampling(
    _: &Path,
    recipe: &RunPlan,
) -> Result<sinew_assembly::Tasks, Failure> {
    template(recipe)?;
    model(recipe)?;
    if let Some(DataSection::Gold {}) = recipe.data {
        data(recipe)?;
    }
    before_episodes(recipe)
}

/// The checks of a benchmark before anything is created: those of `sinew collect`, but no solution must fit,
/// for nothing is learned. The first task is asked, which starts what its environment needs. A model behind
/// a server has a template here, and no shape.
pub(crate) fn before_measuring(
    recipe: &RunPlan,
    is_served: bool,
) -> Result<sinew_assembly::Tasks, Failure> {
    template(recipe)?;
    if !is_served {
        model(recipe)?;
    }
    let tasks = before_tasks(recipe)?;
    let first = tasks.all.get(Split::HeldOut, 0).map_err(Failure::system)?;
    let world = sinew_assembly::world(recipe, &tasks)?;
    let runtime = runtime::on_this_thread()?;
    runtime.block_on(prompts::ask(world.envs.as_ref(), &first))?;
    Ok(tasks)
}

/// Requirements of episodes: a sandbox, an agent, tasks that fit.
fn before_episodes(recipe: &RunPlan) -> Result<sinew_assembly::Tasks, Failure> {
    let tasks = before_tasks(recipe)?;
    if recipe.harness.is_built_in() {
        prompts::prompts(recipe, &sinew_assembly::world(recipe, &tasks)?)?;
    }
    Ok(tasks)
}

/// The tasks, once sandboxes and the agent work.
fn before_tasks(recipe: &RunPlan) -> Result<sinew_assembly::Tasks, Failure> {
    // Servers that register at an owner may come later: at the owner of this very run they can only.
    let later = recipe.sandbox.owner.is_some() && recipe.sandbox.servers().is_empty();
    if recipe.env.needs().sandbox && !later {
        sandbox(recipe)?;
    }
    if !recipe.harness.is_built_in() {
        sinew_assembly::check_harness(&recipe.harness, &recipe.sandbox)?;
    }
    let tasks = sinew_assembly::tasks(recipe)?;
    counts(recipe, &tasks)?;
    Ok(tasks)
}

/// The kernels and threads that everything is computed with.
pub(crate) fn device() -> Result<String, Failure> {
    let device = sinew_assembly::device()?;
    let (kernels, threads) = (sinew_assembly::kernels(&device), device.threads());
    Ok(format!("kernels {kernels}, {threads} threads"))
}

/// The shape of the model. Its files are read, except for the weights.
fn model(recipe: &RunPlan) -> Result<String, Failure> {
    if recipe.torch().is_some() {
        return trained_elsewhere(recipe);
    }
    if recipe.tinker().is_some() {
        return Ok(sinew_assembly::service_model(recipe)?.0);
    }
    let config = sinew_assembly::model_config(recipe)?;
    sinew_assembly::check_lora(recipe, &config)?;
    sinew_assembly::check_context(recipe.rollout.max_context_tokens, config.max_context)?;
    Ok(format!(
        "{:?}, {} layers of {}, context {}",
        config.family, config.layers, config.d_model, config.max_context
    ))
}

/// The shape of a model that PyTorch trains: any family, unless the embedded engine samples from it.
fn trained_elsewhere(recipe: &RunPlan) -> Result<String, Failure> {
    if recipe.engine.kind == EngineType::Embedded {
        sinew_assembly::model_config(recipe)?;
    }
    let shape = sinew_assembly::model_shape(recipe)?;
    let (asked, most) = (
        u64::from(recipe.rollout.max_context_tokens),
        shape.max_context,
    );
    if let Some(most) = most.filter(|most| asked > *most) {
        return Err(Failure::input(format!(
            "rollout.max_context_tokens = {asked}: allowed: up to {most}, the context of the model"
        )));
    }
    let context = most.map_or(String::new(), |most| format!(", context {most}"));
    let counted = if shape.exact { "" } else { "about " };
    Ok(format!(
        "{}, {} layers of {}, {counted}{:.2} billion parameters{context}",
        shape.family,
        shape.layers,
        shape.hidden,
        shape.parameters as f64 / 1e9
    ))
}

/// Joins between turns must give the ids that a full render gives, or training is refused: the policy
/// would learn from tokens that it never saw. Mock conversations are rendered both ways.
fn template(recipe: &RunPlan) -> Result<String, Failure> {
    let renderer = sinew_assembly::renderer(&recipe.model, &recipe.env)?;
    let tiny = matches!(
        sinew_assembly::origin(&recipe.model)?,
        ModelSection::Scratch { .. }
    );
    let (system, text) = if tiny {
        (None, "l")
    } else {
        (Some("You are helpful."), "Print 17 * 23.")
    };
    let mut trajectories = MockTrajectory::standard(system, text);
    if !tiny {
        trajectories.extend(MockTrajectory::agentic(system));
    }
    let report = conformance_check(renderer.as_ref(), &trajectories)
        .map_err(|e| Failure::input(format!("chat template: {e}")))?;
    let mut told = format!(
        "{} of {} joins between turns equal a full render, {} turns with calls read back",
        report.exact(),
        report.steps.len(),
        report.turns_with_calls
    );
    for rewrite in report.rewrites() {
        told.push_str(&format!("; {}", rewrite.rule()));
    }
    for (name, why) in &report.refused {
        told.push_str(&format!("; the template refuses `{name}`: {why}"));
    }
    Ok(told)
}

/// A reference or teacher must be there and have the policy's vocabulary.
fn scoring_model(recipe: &RunPlan, key: &str, source: &str) -> Result<String, Failure> {
    if recipe.torch().is_some() {
        let vocab = sinew_assembly::model_shape(recipe)?.vocab;
        let shape = sinew_assembly::scoring_shape(key, source, vocab)?;
        let (family, layers, width) = (shape.family, shape.layers, shape.hidden);
        return Ok(format!("{family}, {layers} layers of {width}"));
    }
    let vocab = if recipe.tinker().is_none() {
        sinew_assembly::model_config(recipe)?.vocab
    } else if sinew_assembly::is_at_service(source)? {
        return Ok("the Tinker service has it, and scores".into());
    } else {
        sinew_assembly::service_model(recipe)?.1
    };
    let config = sinew_assembly::check_scoring(key, source, vocab)?;
    Ok(format!(
        "{:?}, {} layers of {}",
        config.family, config.layers, config.d_model
    ))
}

/// The rows of `[data]`, all of them read and tokenized, or the pool, or the queue.
fn data(recipe: &RunPlan) -> Result<String, Failure> {
    if recipe.draws_from_pool() {
        return sinew_assembly::check_pool(recipe);
    }
    if recipe.draws_from_queue() {
        return sinew_assembly::check_queue(recipe);
    }
    if let Some(DataSection::Gold {}) = recipe.data {
        return sinew_assembly::check_gold(recipe);
    }
    let renderer = sinew_assembly::renderer(&recipe.model, &recipe.env)?;
    let loaded = sinew_assembly::dataset(recipe, renderer.as_ref())?;
    let Some(data) = loaded else {
        return Ok("0 rows to train on".into());
    };
    let unused = data.unused().iter();
    let unused: String = unused
        .map(|(what, n)| format!("; {what} ({n}) is not trained on"))
        .collect();
    Ok(format!("{} rows to train on{unused}", data.len()))
}

/// The checks of an environment that runs code.
fn sandbox_rows(recipe: &RunPlan, report: &mut Report) {
    let image = image(recipe).transpose();
    // Checks that need the image would repeat the reason why there is none.
    if image.is_none_or(|row| report.row("image", row)) {
        report.row("sandbox", sandbox(recipe));
    }
}

/// Pulls `sandbox.image`, if it is one of a registry, and returns the image's name.
fn image(recipe: &RunPlan) -> Result<Option<String>, Failure> {
    let name = recipe.sandbox.image.as_deref().unwrap_or_default();
    if recipe.sandbox.is_elsewhere() || !sinew_image::is_registry(name) {
        return Ok(None);
    }
    Ok(
        sinew_assembly::levels::image(&recipe.sandbox)?.map(|image| {
            let how = if image.fresh {
                "pulled into"
            } else {
                "found in"
            };
            let (mib, cache) = (image.bytes.div_ceil(1 << 20), &recipe.sandbox.image_cache);
            format!("{name}: {how} {cache}: sha256:{}, {mib} MiB", image.id)
        }),
    )
}

/// Runs a program in a sandbox of the recipe, and lists the protections that are not in force.
fn sandbox(recipe: &RunPlan) -> Result<String, Failure> {
    let section = sinew_assembly::levels::egress::unrecorded(&recipe.sandbox);
    let probed = crate::sandbox::probed(&section)?;
    let (level, in_force) = (&recipe.sandbox.level, probed.in_force());
    // The monitor of virtual machines here, and the reason.
    let machine = probed.how("machine");
    let machine = machine.map_or(String::new(), |how| format!("; {how}"));
    Ok(format!("{level}: {in_force}{machine}"))
}

/// Numbers of tasks, which `eval.tasks` and `rollout.tasks_per_step` must not exceed.
fn counts(recipe: &RunPlan, tasks: &sinew_assembly::Tasks) -> Result<String, Failure> {
    if recipe.harness.live().is_some() {
        return Ok("agents bring their own".into());
    }
    let left_out = match tasks.left_out {
        Some((filtered, overlapping)) if filtered + overlapping > 0 => {
            format!("; left out: {filtered} by the filter, {overlapping} that are held out as well")
        }
        _ => String::new(),
    };
    let notes: String = tasks.notes.iter().map(|note| format!("; {note}")).collect();
    let taskset = &tasks.all;
    let (train, held_out) = (taskset.len(Split::Train), taskset.len(Split::HeldOut));
    if let Some(asked) = recipe.eval.tasks.filter(|asked| *asked > held_out) {
        return Err(Failure::input(format!(
            "eval.tasks = {asked}: allowed: up to {held_out}, the held-out tasks of `{}`; left out, all are taken",
            taskset.name()
        )));
    }
    if train == 0 {
        return Ok(format!(
            "{}: {held_out} held out, none to train on: only `sinew eval` runs it{left_out}{notes}",
            taskset.name()
        ));
    }
    if recipe.rollout.tasks_per_step > train {
        return Err(Failure::input(format!(
            "rollout.tasks_per_step = {}: allowed: up to {train}, the training tasks of `{}`",
            recipe.rollout.tasks_per_step,
            taskset.name()
        )));
    }
    sinew_assembly::sampling(recipe, taskset.as_ref())?;
    Ok(format!(
        "{}: {train} to train on, {held_out} held out{left_out}{notes}{}",
        taskset.name(),
        readable(recipe)
    ))
}

/// A warning if code that the model can influence may read the file of the tasks.
fn readable(recipe: &RunPlan) -> String {
    for world in recipe.worlds() {
        let source = world.tasks.source.as_deref().map(Path::new);
        let Some(file) = source.and_then(|source| source.canonicalize().ok()) else {
            continue;
        };
        let shown = world.env.config().shows();
        if shown.iter().any(|folder| file.starts_with(folder)) {
            return format!(
                "; warning: code of the environment can read {}: keep tasks with solutions out of its folder",
                file.display()
            );
        }
    }
    String::new()
}

/// Maximum number of tasks of each split that are played with their solutions.
const GOLD_TASKS: usize = 4;

/// Time for playing all of them: a verdict comes even where an environment or a reward hangs.
const PLAYING: Duration = Duration::from_secs(120);

/// Nothing more is started after this time: neither tasks of a slow environment, nor one after a task without
/// a score, which others would wait for as long.
const PATIENCE: Duration = Duration::from_secs(10);

/// The result if it comes within [`PLAYING`]; otherwise an error that something hangs.
async fn in_time<T>(what: &str, played: impl Future<Output = T>) -> Result<T, Failure> {
    let late = |_| {
        Failure::input(format!(
            "{what}: no verdict within {} s: it hangs, or waits for something outside; try one task with a \
             shorter deadline, such as timeout_s",
            PLAYING.as_secs()
        ))
    };
    tokio::time::timeout(PLAYING, played).await.map_err(late)
}

/// The solutions of some tasks must succeed in their environment: else a reward or a tool is broken,
/// and no training could find that out.
fn solvable(recipe: &RunPlan, world: &sinew_assembly::World) -> Result<String, Failure> {
    let sinew_assembly::World { taskset, envs, .. } = world;
    let tasks = some_tasks(taskset.as_ref(), GOLD_TASKS)?;
    let runtime = runtime::on_this_thread()?;
    let rewards: Vec<_> = recipe.worlds().iter().filter_map(|w| w.reward).collect();
    if rewards.iter().any(|reward| !reward.terms().is_empty()) {
        let tried = attempts::attempts(recipe, envs.as_ref(), &tasks);
        return runtime.block_on(in_time("reward", tried))?;
    }
    if !rewards.is_empty() && recipe.worlds().iter().any(|w| w.env.needs().reward) {
        return Ok(format!(
            "{}: every score comes from outside, as [reward.late] says: nothing to try",
            envs.name()
        ));
    }
    let (played, turns) = runtime
        .block_on(in_time("env", solved(envs.as_ref(), &tasks)))?
        .map_err(|e| Failure::input(format!("env: {e}")))?;
    let can = envs.capabilities();
    let names = [
        ("concurrent", can.concurrent),
        ("deterministic", can.deterministic),
        ("states", can.states()),
    ];
    let can: Vec<&str> = names.iter().filter(|n| n.1).map(|n| n.0).collect();
    Ok(format!(
        "{}: the solutions of {played} tasks succeed in {turns} turns; {}",
        envs.name(),
        can.join(", ")
    ))
}

/// So many tasks of each split, evenly spread; the splits take turns, so that the first tasks are of both.
fn some_tasks(taskset: &dyn Taskset, count: usize) -> Result<Vec<Task>, Failure> {
    let mut tasks = Vec::new();
    for number in 0..count {
        for split in [Split::Train, Split::HeldOut] {
            let len = taskset.len(split);
            let index = number * (len / count).max(1);
            if index < len {
                tasks.push(taskset.get(split, index).map_err(Failure::system)?);
            }
        }
    }
    Ok(tasks)
}

/// Plays tasks with their solutions, in their order, until [`PATIENCE`] is over. Returns how many, and the
/// turns of their solutions.
async fn solved(
    envs: &dyn EnvFactory,
    tasks: &[Task],
) -> Result<(usize, usize), sinew_env::EnvError> {
    let begun = Instant::now();
    let (mut played, mut turns) = (0, 0);
    for task in tasks {
        turns += sinew_env::validate(envs, std::slice::from_ref(task)).await?;
        played += 1;
        if begun.elapsed() > PATIENCE {
            break;
        }
    }
    Ok((played, turns))
}

/// Keys, rubrics and models of rewards from models and servers, whose servers must take a connection.
fn rewards(recipe: &RunPlan) -> Result<String, Failure> {
    reach::rewards(recipe)?;
    let rewards = recipe.worlds().into_iter().filter_map(|w| w.reward);
    let terms = rewards.flat_map(|r| r.terms());
    let named = terms.map(|term| match recipe.compared_pairs(&term) {
        Some(pairs) => format!("{} (up to {pairs} pairs of a group)", term.name),
        None => term.name.to_owned(),
    });
    Ok(format!("ready: {}", named.collect::<Vec<_>>().join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "name = \"t\"\nenv = { type = \"tiny\" }\nalgorithm = { type = \"grpo\" }\n\
        model = { type = \"scratch\", d_model = 64, layers = 1, heads = 2, kv_heads = 1, d_ff = 64 }\n\
        [train.lora]\nrank = 4\n";

    fn sizes(recipe: &RunPlan) -> Result<(), Failure> {
        memory::memory(recipe)?;
        disk::disk(recipe, Path::new(".")).map(|_| ())
    }

    /// Sets every whole number below `at`, one at a time.
    fn altered(whole: &toml::Value, at: &toml::Value, path: &[&str], found: &mut Vec<String>) {
        for (key, value) in at.as_table().into_iter().flatten() {
            let path = [path, &[key.as_str()]].concat();
            altered(whole, value, &path, found);
            if !value.is_integer() {
                continue;
            }
            let mut changed = whole.clone();
            let place = path.iter().try_fold(&mut changed, |v, key| v.get_mut(key));
            *place.unwrap() = "@".into();
            found.push(toml::to_string(&changed).unwrap());
        }
    }

    /// No number overflows on the way to being refused.
    #[test]
    fn the_largest_numbers_do_not_panic() {
        let plan = RunPlan::parse(Path::new("r.toml"), TEXT, ENVIRONMENTS).unwrap();
        let whole: toml::Value = toml::from_str(&toml::to_string(&plan).unwrap()).unwrap();
        let (mut texts, mut measured) = (Vec::new(), 0);
        altered(&whole, &whole, &[], &mut texts);
        for largest in ["18446744073709551615", "9223372036854775807", "4294967295"] {
            for text in &texts {
                let text = text.replace("\"@\"", largest);
                if let Ok(plan) = RunPlan::parse(Path::new("r.toml"), &text, ENVIRONMENTS) {
                    let refused = sizes(&plan).err();
                    assert!(refused.is_none_or(|e| !e.text().is_empty()), "{text}");
                    measured += 1;
                }
            }
        }
        assert!(
            texts.len() > 20 && measured > 5,
            "{} {measured}",
            texts.len()
        );
    }
}
