//! `sinew train` and `sinew eval`: the training loop with its readers, and the summary at its end.
//! `sinew collect` works in a session of the same kind.
//!
//! The loop itself is in `sinew-pipeline`. Here it gets its parts from [`sinew_assembly::pipeline`], its
//! readers (live view or lines, report), and the signals that stop it.
//!
//! The last line of `sinew train --json`:
//!
//! | field | content |
//! |---|---|
//! | `eval.before`, `eval.after` | `null` without held-out tasks, else averages over their episodes: `success`, `reward`, `turns`, `sampled_tokens`, `success_interval` (Wilson, 95 %, `of` scored episodes), metrics; `by_env` has the same for each `[[env]]` |
//! | `eval.gain` | gain of success with its 95 % interval, paired by task: `sampled`, `greedy`, `by_env`; `null` without held-out tasks |
//! | `wall_s` | wall time of the run, in seconds |
//! | `samples` | episodes trained, dropped for a reason, trained twice, lost |
//! | `tokens` | what became of each sampled token |
//! | `waits` | seconds that engine and trainer worked or waited, by cause |
//! | `staleness` | trained rows, by updates that they were behind the weights |
//! | `verdict` | how the run did: `verdict`, `why`, `change` |
//! | `trouble` | reasons for a bad end; empty: there are none |

use crate::adapter_args::AdapterArg;
use crate::signals;
use crate::track::Trackers;
use serde_json::{Map, Value};
use sinew_assembly::Failure;
use sinew_judge::Bench;
use sinew_orchestrator::{
    Bus, EpisodeStats, Goal, Phase, PipelineError, Process, RunEvent, RunOutcome, StepRecord,
};
use sinew_recipe::RunPlan;
use sinew_runs::{Resume, RunDir};
use sinew_telemetry::{Signals, SignalsConfig};
use sinew_view::{LiveFile, LiveView, OutputForm, Printer, ReportFile, Status, Summary, say};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Exit code of a run that a second signal ends at once.
const INTERRUPTED: i32 = 130;

/// Options of the command.
#[derive(Clone, Debug)]
pub(crate) struct TrainOptions {
    /// `train`, `eval` or `collect`.
    pub(crate) command: &'static str,
    /// Go on with the run in the folder; `None`: it is new.
    pub(crate) resume: Option<Resume>,
    /// Standard output is JSON lines: no live view, no summary.
    pub(crate) json: bool,
    /// The end of standard input is a signal to stop.
    pub(crate) stop_on_eof: bool,
    /// Stored episodes that are gone are not a reason to end badly.
    pub(crate) accept_loss: bool,
    /// Tasks that a check has read already; `None`: they are read here.
    pub(crate) tasks: Option<sinew_assembly::Tasks>,
    /// Address of the run's dashboard, if it has one.
    pub(crate) view: Option<std::net::SocketAddr>,
    /// Destinations of the run's export.
    pub(crate) signals_to: Option<SignalsConfig>,
    /// Adapter that a measurement samples with.
    pub(crate) adapter: Option<AdapterArg>,
    /// Trackers that get the numbers of the run.
    pub(crate) track: Option<Trackers>,
    /// Address for agents outside.
    pub(crate) serve: sinew_assembly::ServeAt,
    /// Arguments to repeat in the command that resumes, each after a space.
    pub(crate) typed: String,
    /// Signals so far, where the command runs more than this; `None`: they are counted here.
    pub(crate) signals: Option<watch::Receiver<u32>>,
    /// Command that continues an interrupted one, where that is not with the recipe in the folder.
    pub(crate) go_on: Option<String>,
}

impl TrainOptions {
    /// The end of an interrupted command.
    fn interrupted(&self, dir: &RunDir) -> Failure {
        match &self.go_on {
            Some(text) => Failure::Interrupt(format!("interrupted; {text}")),
            None => Failure::interrupt(self.command, dir.path(), &self.typed),
        }
    }
}

/// Result of a command that has ended.
#[derive(Debug)]
pub(crate) struct CommandEnd {
    /// The last line for `--json`.
    pub(crate) last: serde_json::Value,
    /// Reason why it did not reach its goal, if it did not.
    pub(crate) trouble: Option<Failure>,
}

/// `sinew train`: held-out tasks, training, held-out tasks again.
///
/// # Errors
/// If it cannot start or continue. A run that ended, but collapsed or lost data, is not an error here: see
/// [`CommandEnd::trouble`].
pub(crate) fn train(
    recipe: &RunPlan,
    dir: &RunDir,
    options: &TrainOptions,
) -> Result<CommandEnd, Failure> {
    let ended = run_again(recipe, dir, options)?;
    if !options.json {
        let history: Vec<StepRecord> =
            sinew_view::lines(&dir.metrics_path()).map_err(Failure::system)?;
        let most = recipe.sandbox.max_sandboxes;
        let bound = recipe.env.needs().sandbox && most < recipe.rollout.max_in_flight;
        let summary = Summary {
            steps: recipe.train.steps,
            sandboxes: bound.then_some(most),
            run_dir: dir.path(),
            ended: &ended,
            history: &history,
        };
        crate::output::print(&summary.text());
    }
    let last = serde_json::json!({
        "eval": {
            "before": measured(&ended.before),
            "after": measured(&ended.after),
            "gain": ended.gain,
        },
        "wall_s": ended.wall_s,
        "samples": ended.samples,
        "tokens": ended.tokens,
        "waits": ended.totals.waits,
        "staleness": ended.totals.staleness,
        "not_begun": ended.totals.not_begun,
        "resumed": ended.totals.resumed,
        "verdict": ended.verdict,
        "trouble": ended.trouble,
    });
    Ok(finished(last, &ended))
}

/// Runs a recipe's held-out tasks once, and trains nothing.
pub(crate) fn evaluate(
    recipe: &RunPlan,
    dir: &RunDir,
    options: &TrainOptions,
) -> Result<CommandEnd, Failure> {
    let ended = run(recipe, dir, options, Goal::Measure)?;
    if !options.json {
        let example = ended.examples.first().map(|e| e.as_str());
        let text = sinew_view::measured(&ended.after, dir.path(), ended.wall_s, example);
        crate::output::print(&text);
    }
    let mut last = serde_json::json!({ "eval": measures(&ended.after), "wall_s": ended.wall_s });
    if let Some(adapter) = &options.adapter {
        last["adapter"] = adapter.name.as_str().into();
    }
    Ok(finished(last, &ended))
}

/// The end of a command; all reasons of trouble in one failure.
fn finished(last: serde_json::Value, ended: &RunOutcome) -> CommandEnd {
    let trouble = (!ended.trouble.is_empty()).then(|| Failure::system(ended.trouble.join("\n")));
    CommandEnd { last, trouble }
}

/// Message after the first signal.
fn stopping(command: &str) -> &'static str {
    match command {
        "collect" => {
            "stopping: episodes that ended are stored, those under way are given up and run again with --resume; \
             Ctrl-C once more ends at once"
        }
        "eval" => {
            "stopping: episodes that ended are stored, those under way are given up; Ctrl-C once more ends at once"
        }
        _ => {
            "stopping: the work at hand ends, then a checkpoint is made; Ctrl-C once more ends at once"
        }
    }
}

/// The first signal makes `sender` true and is answered at once; the second ends the process, also in the
/// middle of a pass. Committed data stay, as after `kill -9`.
#[expect(
    clippy::disallowed_methods,
    reason = "the second signal asks for no clean end, and the main thread may be deep in a pass"
)]
fn stop_on_signal(
    runtime: &Runtime,
    mut signals: watch::Receiver<u32>,
    sender: watch::Sender<bool>,
    bus: Bus,
    command: &'static str,
    live: bool,
) {
    runtime.spawn(async move {
        // Nobody asks any more once the counting ends.
        if signals.wait_for(|n| *n > 0).await.is_err() {
            return;
        }
        let _ = sender.send(true);
        say(stopping(command));
        // An event that cannot be recorded ends the run by itself.
        let _ = bus.emit(RunEvent::Phase(Phase::Stopping));
        if signals.wait_for(|n| *n > 1).await.is_err() {
            return;
        }
        if live {
            LiveView::leave_terminal();
        }
        std::process::exit(INTERRUPTED);
    });
}

/// Runs a recipe, and continues from its last checkpoint after the trainer's processes or the model of a
/// Tinker service were lost, as often as `trainer.restarts` allows: episodes are stored, so only updates are
/// computed again.
fn run_again(
    recipe: &RunPlan,
    dir: &RunDir,
    options: &TrainOptions,
) -> Result<RunOutcome, Failure> {
    let mut options = options.clone();
    let trainer = recipe.torch().or(recipe.tinker());
    let mut left = trainer.map_or(0, |trainer| trainer.restarts);
    loop {
        match run(recipe, dir, &options, Goal::Train) {
            Err(Failure::TrainerLost(why)) if left > 0 => {
                say(&format!(
                    "{why}\n  the trainer is started again from the last checkpoint ({left} more times at most)"
                ));
                left -= 1;
                options.resume.get_or_insert_default();
            }
            ended => return ended,
        }
    }
}

/// Builds the loop of a recipe with its readers, and runs it.
fn run(
    recipe: &RunPlan,
    dir: &RunDir,
    options: &TrainOptions,
    goal: Goal,
) -> Result<RunOutcome, Failure> {
    in_session(recipe, dir, options, recipe.train.steps, |session| {
        let config = sinew_assembly::Invocation {
            goal,
            command: options.command,
            accept_loss: options.accept_loss,
            adapter: options.adapter.as_ref().map(AdapterArg::folder),
        };
        let bus = session.bus.clone();
        let (pipeline, renderer) = sinew_assembly::pipeline(recipe, config, session)?;
        dir.write_recipe(recipe).map_err(Failure::input)?;
        if goal == Goal::Train {
            let facts = sinew_assembly::facts(recipe)?;
            bus.record(Box::new(ReportFile::new(
                dir.report_path(),
                facts,
                renderer,
            )));
        }
        Ok(sinew_pipeline::run(pipeline))
    })
}

/// Does `work` in a session of a recipe: with its readers, and the signals that stop it. They are caught
/// before the model is loaded, which may take minutes. Views show so many steps, or none. `work` fails if it
/// does not begin, and gives what it came to otherwise.
///
/// # Errors
/// If the work did not begin, or ended badly, with the reason.
pub(crate) fn in_session<T>(
    recipe: &RunPlan,
    dir: &RunDir,
    options: &TrainOptions,
    steps: u64,
    work: impl FnOnce(sinew_assembly::Session<'_>) -> Result<Result<T, PipelineError>, Failure>,
) -> Result<T, Failure> {
    let runtime = Runtime::new().map_err(|e| Failure::system(format!("async runtime: {e}")))?;
    let signals = match &options.signals {
        Some(signals) => signals.clone(),
        None => signals::count(&runtime, options.stop_on_eof)?,
    };
    let started = Instant::now();
    let (bus, live) = (Bus::default(), !options.json && LiveView::is_possible());
    let out = output_form(live, options.json);
    let printer = Printer { out, steps };
    printer.begin(&recipe.name, dir.path());
    bus.record(Box::new(printer));
    // The link is printed before the live view starts, so that the terminal keeps a long one whole.
    if let Some(listen) = options.view {
        let tls = &options.serve.tls;
        let endpoint = tls.endpoint_of_run("--view", listen, dir.path())?;
        crate::view::of_run(&runtime, endpoint, dir.path(), options.json)?;
    }
    let view = live.then(|| live_view(recipe, steps, &bus));
    let _live_file = LiveFile::start(dir.path(), steps, &bus);
    let _signals = options
        .signals_to
        .as_ref()
        .map(|config| start_signals(config, recipe, dir, &bus, &runtime))
        .transpose()?;
    let (sender, cancel) = watch::channel(false);
    let stop_ordered = Arc::<AtomicBool>::default();
    let bench = Bench::of_run(dir.path(), sender.clone());
    let command = options.command;
    stop_on_signal(
        &runtime,
        signals,
        sender.clone(),
        bus.clone(),
        command,
        live,
    );
    let tasks = options.tasks.clone();
    let tasks = tasks.map_or_else(|| sinew_assembly::tasks(recipe), Ok)?;
    let session = sinew_assembly::Session {
        dir,
        resume: options.resume.as_ref(),
        tasks,
        runtime: runtime.handle().clone(),
        bus: bus.clone(),
        cancel,
        stop: sender,
        stop_ordered: Arc::clone(&stop_ordered),
        bench: bench.clone(),
        started,
        serve: options.serve.clone(),
    };
    let ended = work(session).and_then(|ended| {
        ended.map_err(|e| match (e.is_interrupt(), bench.spent()) {
            (true, Some(why)) => Failure::spent(why, options.command, dir.path()),
            (true, None) => options
                .interrupted(dir)
                .by_order(stop_ordered.load(Ordering::Acquire)),
            (false, _) => e.into(),
        })
    });
    drop(view);
    ended.inspect_err(|failure| tell_end(&bus, failure))
}

/// Form of the output: a live view, lines of JSON or lines for people.
fn output_form(live: bool, json: bool) -> OutputForm {
    match (live, json) {
        (true, _) => OutputForm::Live,
        (false, true) => OutputForm::Json,
        (false, false) => OutputForm::Lines,
    }
}

/// Starts the live view of a run whose model is being loaded.
fn live_view(recipe: &RunPlan, steps: u64, bus: &Bus) -> LiveView {
    let status = Status {
        title: recipe.name.clone(),
        phase: Phase::Loading.name(),
        steps,
        ..Status::default()
    };
    LiveView::start(status, bus)
}

/// Reports to the readers of a run why it does not continue. The command ends with the failure itself.
fn tell_end(bus: &Bus, failure: &Failure) {
    let process = match failure {
        Failure::Interrupt(_) | Failure::Stopped(_) => Process::Interrupted,
        _ => Process::Failed,
    };
    let why = Some(failure.text().to_owned());
    let _ = bus.emit(RunEvent::Ended { process, why });
}

/// Exports the run to other systems for as long as the value lives.
///
/// # Errors
/// If an address that the file names cannot be used.
fn start_signals(
    config: &SignalsConfig,
    recipe: &RunPlan,
    dir: &RunDir,
    bus: &Bus,
    runtime: &Runtime,
) -> Result<Signals, Failure> {
    let run = sinew_telemetry::Run {
        name: recipe.name.clone(),
        model: recipe.model_source(),
        folder: dir.path().to_owned(),
    };
    let signals = Signals::start(config, &run, bus, runtime.handle());
    let signals = signals.map_err(Failure::input)?;
    if let Some(address) = signals.address() {
        say(&format!("metrics: http://{address}/metrics"));
    }
    Ok(signals)
}

/// The averages of a measurement; `None` without held-out tasks: nothing measured is not 0.
fn measured(s: &EpisodeStats) -> Option<Map<String, Value>> {
    (s.episodes > 0).then(|| measures(s))
}

/// Averages over episodes, by name; metrics of the environment with the names that it gives them, and of a
/// mixture the same for each environment.
fn measures(s: &EpisodeStats) -> Map<String, Value> {
    let mut map = Map::new();
    let averages = [
        ("success", s.success),
        ("reward", s.reward),
        ("turns", s.turns),
        ("sampled_tokens", s.sampled_tokens),
    ];
    let averages = averages.map(|(name, value)| (name.to_owned(), value));
    let greedy = s.greedy_success.map(|g| ("greedy_success".to_owned(), g));
    let metrics = s.metrics.iter().map(|(name, value)| (name.clone(), *value));
    for (name, value) in averages.into_iter().chain(greedy).chain(metrics) {
        map.entry(name).or_insert(value.into());
    }
    if let Some(i) = s.success_interval {
        let interval = serde_json::json!({"low": i.low, "high": i.high, "of": s.scored()});
        map.insert("success_interval".into(), interval);
    }
    let by_env = s.by_env.iter().map(|(name, own)| {
        let mut own_map = measures(own);
        own_map.insert("episodes".into(), own.episodes.into());
        (name.clone(), Value::Object(own_map))
    });
    let by_env: Map<String, Value> = by_env.collect();
    if !by_env.is_empty() {
        map.insert("by_env".into(), by_env.into());
    }
    map
}
