//! `sinew env check FOLDER`: the solution of each task passes, and an agent that does nothing does not.

use crate::output;
use crate::sandbox::at_level;
use serde_json::{Value, json};
use sinew_assembly::{Failure, harbor_environments, harbor_tasks};
use sinew_harbor::{CheckRun, Harbor, HarborTasks, HeldOutTasks, SkipReason, TaskCheck};
use sinew_recipe::SandboxPlan;
use sinew_types::Task;
use tokio::runtime::Runtime;

/// Options of a check.
#[derive(Debug)]
pub(crate) struct HarborCheck<'a> {
    /// A task, a folder of tasks, or a registry file.
    pub(crate) folder: &'a str,
    /// Tasks to check; `None`: all.
    pub(crate) tasks: Option<usize>,
    /// Tasks at once.
    pub(crate) sessions: usize,
    /// Level of the sandboxes; `None`: `process`, if all tasks can run there.
    pub(crate) level: Option<&'a str>,
    /// One JSON object.
    pub(crate) json: bool,
}

/// Limits of a sandbox of a task that runs without a container.
fn sandbox(level: &str, sessions: usize) -> Result<SandboxPlan, Failure> {
    let plan = at_level(level)?;
    Ok(SandboxPlan {
        memory_mb: plan.memory_mb.max(1024),
        work_mb: plan.work_mb.max(256),
        processes: plan.processes.max(256),
        cpu_s: plan.cpu_s.max(600.0),
        // Each task may have a verifier of its own beside its agent.
        max_sandboxes: (2 * sessions).max(plan.max_sandboxes),
        ..plan
    })
}

/// The tasks, at the level that was asked for, or the first that runs all of them.
fn tasks(args: &HarborCheck<'_>, keys: &Harbor) -> Result<(HarborTasks, SandboxPlan), Failure> {
    let plan = sandbox(args.level.unwrap_or("process"), args.sessions)?;
    let tasks = harbor_tasks(keys, &plan)?;
    let container = |reason: &SkipReason| {
        matches!(
            reason,
            SkipReason::NeedsContainer { .. } | SkipReason::HostLists
        )
    };
    let needed = tasks.skipped().iter().any(|s| container(&s.reason));
    if args.level.is_some() || !needed || cfg!(not(feature = "container")) {
        return Ok((tasks, plan));
    }
    let plan = sandbox("container", args.sessions)?;
    Ok((harbor_tasks(keys, &plan)?, plan))
}

/// Checks the tasks, and prints a line for each.
///
/// # Errors
/// If the folder is wrong or the level cannot be started; with status 1 if a task does not pass; with status
/// 3 if none can run here.
pub(crate) fn run(args: &HarborCheck<'_>, runtime: &Runtime) -> Result<(), Failure> {
    let keys = Harbor {
        held_out: Some(HeldOutTasks::Share(1.0)),
        ..Harbor::new(args.folder)
    };
    let (found, plan) = tasks(args, &keys)?;
    let all: Vec<Task> = found.all().cloned().collect();
    let some = &all[..args.tasks.unwrap_or(all.len()).min(all.len())];
    let mut checks = Vec::new();
    if !some.is_empty() {
        let envs = harbor_environments(&keys, &plan)?;
        let seen = |check: &TaskCheck| {
            if !args.json {
                output::print(&line(check));
            }
        };
        checks = runtime.block_on(envs.check_all(some, args.sessions, seen));
    }
    let failed = checks.iter().filter(|check| !check.passed()).count();
    report(args, &found, &checks, &plan);
    if some.is_empty() {
        Err(Failure::outside("no task of the folder can run here"))
    } else if failed > 0 {
        // The lines say which.
        Err(Failure::Program(1, String::new()))
    } else {
        Ok(())
    }
}

/// Prints what was left out, and the counts; with `--json` everything as one object.
fn report(args: &HarborCheck<'_>, found: &HarborTasks, checks: &[TaskCheck], plan: &SandboxPlan) {
    let passed = checks.iter().filter(|check| check.passed()).count();
    if args.json {
        let checked = checks.iter().map(row);
        let skipped = found.skipped().iter().map(|skipped| {
            json!({
                "task": skipped.name,
                "oracle": null,
                "null": null,
                "skipped": skipped.reason.name(),
                "why": skipped.reason.to_string(),
            })
        });
        output::print_json(&json!({
            "folder": args.folder,
            "level": plan.level.name(),
            "passed": passed,
            "failed": checks.len() - passed,
            "skipped": found.skipped().len(),
            "tasks": checked.chain(skipped).collect::<Vec<_>>(),
        }));
        return;
    }
    for skipped in found.skipped() {
        let (name, reason) = (&skipped.name, &skipped.reason);
        output::print(&format!("skip  {name}: {reason}\n"));
    }
    let not_run = found.all().count() - checks.len();
    let more = match not_run {
        0 => String::new(),
        n => format!(", {n} not run (--all runs all)"),
    };
    output::print(&format!(
        "{passed} of {} tasks pass at level {}, {} skipped{more}\n",
        checks.len(),
        plan.level,
        found.skipped().len()
    ));
}

/// The name of a task without the beginning of its id.
fn name(check: &TaskCheck) -> &str {
    let id = check.task.as_str();
    id.strip_prefix("harbor/held-out/").unwrap_or(id)
}

/// A checked task as JSON.
fn row(check: &TaskCheck) -> Value {
    json!({
        "task": name(check),
        "kind": check.kind,
        "oracle": check.oracle.reward,
        "oracle_parts": check.oracle.parts,
        "null": check.null.reward,
        "null_parts": check.null.parts,
        "passed": check.passed(),
        "seconds": check.oracle.seconds + check.null.seconds,
        "oracle_s": check.oracle.seconds,
        "null_s": check.null.seconds,
        "why": why(check),
    })
}

/// The reason why a task does not pass.
fn why(check: &TaskCheck) -> Option<String> {
    let own = |of: &str, run: &CheckRun| run.why.as_ref().map(|why| format!("{of}: {why}"));
    let oracle = own("oracle", &check.oracle);
    let null = || own("null", &check.null);
    let solved = || {
        let solved = check.null.success;
        solved.then(|| "null: the task counts as solved without any work".to_owned())
    };
    let low = || (!check.oracle.success).then(|| "oracle: its reward is no success".to_owned());
    oracle.or_else(null).or_else(solved).or_else(low)
}

/// A checked task as a line of the table.
fn line(check: &TaskCheck) -> String {
    let mark = if check.passed() { "ok  " } else { "FAIL" };
    let run = |run: &CheckRun| {
        let reward = run.reward.map_or("-".to_owned(), |r| format!("{r:.3}"));
        format!("{reward:>6} {:>7.1} s", run.seconds)
    };
    let why = why(check).map_or_else(String::new, |why| format!("  {why}"));
    format!(
        "{mark}  {:40} oracle {}  null {}{why}\n",
        name(check),
        run(&check.oracle),
        run(&check.null)
    )
}
