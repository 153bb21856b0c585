//! `sinew show` and `sinew episodes`: one episode of a run's store, or a list of them.
//!
//! The store is opened for reading: a run that trains is not disturbed, and its newest committed episodes
//! are shown.

use crate::output;
use crate::{EpisodesArgs, ShowArgs};
use clap::ValueEnum;
use serde_json::json;
use sinew_assembly::{ENVIRONMENTS, Failure, run_reader};
use sinew_dashboard::{Flagged, ListError, Outcomes, Suspicion, WAITS};
use sinew_render::Renderer;
use sinew_runs::RunDirError;
use sinew_store::{Cursor, EndKind, EpisodeSummary, ExportFormat, Filter, StoreReader, export};
use sinew_types::{EpisodeId, Trace};
use sinew_view::{Limits, ShowOptions, visible};
use std::io::IsTerminal;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// End of an episode, as a value of `--end`. Truncated is not failed: a limit ended it, and it counts.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum End {
    /// The task ended
    Terminated,
    /// A limit of turns, tokens or time ended it
    Truncated,
    /// A part of the system failed
    Failed,
}

impl From<End> for EndKind {
    fn from(end: End) -> Self {
        match end {
            End::Terminated => Self::Terminated,
            End::Truncated => Self::Truncated,
            End::Failed => Self::Failed,
        }
    }
}

/// An episode of a run's store, as it was stored.
///
/// # Errors
/// If there is no store, or the episode is not in it.
pub(crate) fn stored_episode(run_dir: &Path, id: &str) -> Result<Trace, Failure> {
    one(&run_reader(run_dir)?, run_dir, id)
}

fn one(store: &StoreReader, run_dir: &Path, id: &str) -> Result<Trace, Failure> {
    let found = store.get(&EpisodeId::new(id)).map_err(Failure::system)?;
    found.ok_or_else(|| {
        Failure::input(format!(
            "episode {id} is not in {}\n  hint: `sinew episodes --run-dir {}` lists what is there",
            run_dir.display(),
            run_dir.display()
        ))
    })
}

/// The outcomes that count of a run's episodes. A store without a recipe has no rewards from outside.
///
/// # Errors
/// If the recipe cannot be read.
fn outcomes<'a>(run_dir: &Path, store: &'a StoreReader) -> Result<Outcomes<'a>, Failure> {
    let late = match sinew_assembly::recipe_of(run_dir) {
        Ok(recipe) => sinew_assembly::late_config(&recipe),
        Err(RunDirError::NoRun { .. }) => None,
        Err(e) => return Err(e.into()),
    };
    Ok(Outcomes::new(store, late))
}

/// `sinew show`: an episode as text, tokens or JSON; without `--run-dir`, the counts of a run.
///
/// Tokens are decoded with the tokenizer that the run keeps.
///
/// # Errors
/// If the episode is not in the store, or the run keeps no tokenizer and that of its recipe cannot be found.
pub(crate) fn show(args: &ShowArgs) -> Result<(), Failure> {
    let Some(run_dir) = &args.run_dir else {
        let run = sinew_runs::summary(Path::new(&args.what), ENVIRONMENTS)?;
        if args.json {
            output::print_json(&json!(run));
        } else {
            output::print(&run.text());
        }
        return Ok(());
    };
    let store = run_reader(run_dir)?;
    let mut trace = one(&store, run_dir, &args.what)?;
    let recipe = sinew_assembly::recipe_of(run_dir)?;
    let outcomes = outcomes(run_dir, &store)?;
    outcomes.settle(&mut trace).map_err(Failure::system)?;
    let renderer = sinew_assembly::renderer_of(run_dir, &recipe);
    if let Some(file) = &args.html {
        return page(&trace, &renderer, file);
    }
    let renderer = renderer?;
    if args.json {
        let text = sinew_view::json(&trace, renderer.as_ref()).map_err(Failure::system)?;
        output::print(&(text + "\n"));
    } else {
        let options = ShowOptions {
            color: std::io::stdout().is_terminal(),
            tokens: args.tokens,
        };
        output::print_as_it_is(sinew_view::text(&trace, renderer.as_ref(), options).as_bytes());
    }
    Ok(())
}

/// `--html`: an episode as a page. It is whole without the tokenizer, too, except for the text of tokens.
///
/// # Errors
/// If the file cannot be written.
fn page(
    trace: &Trace,
    renderer: &Result<Arc<dyn Renderer>, Failure>,
    file: &Path,
) -> Result<(), Failure> {
    let why = renderer.as_ref().err().map(|e| e.text().to_owned());
    let renderer = match renderer {
        Ok(renderer) => Ok(renderer.as_ref()),
        Err(_) => Err(why.as_deref().unwrap_or_default()),
    };
    let page = sinew_view::html(trace, renderer, Limits::default());
    sinew_runs::write_atomic(file, page.as_bytes())
        .map_err(|e| Failure::input(format!("--html = {:?}: {e}", file.display())))?;
    output::print(&format!("{} bytes in {}\n", page.len(), file.display()));
    Ok(())
}

/// `sinew episodes`: one line an episode, in the order of the store, a page at a time. Text of models and
/// programs is shown without control characters.
///
/// # Errors
/// If nothing fits the filters: a script that counts lines must not take a mistyped filter for an empty run.
pub(crate) fn list(args: &EpisodesArgs) -> Result<(), Failure> {
    let run_dir = args.run.as_ref().or(args.run_dir.as_ref());
    let run_dir = run_dir.map_or(Path::new("."), PathBuf::as_path);
    let store = run_reader(run_dir)?;
    let limit = args.limit.unwrap_or(LISTED);
    let filter = filter(args, limit)?;
    if let Some(file) = &args.export {
        return write(args, &store, &filter, file);
    }
    let (rows, next) = rows(args, run_dir, &store, &filter)?;
    for ((e, waits), flags) in &rows {
        if args.json {
            let mut row = json!(e);
            row["waits"] = json!(waits);
            if args.suspicious {
                row["suspicious"] = json!(flags);
            }
            output::print_json(&row);
        } else {
            output::print(&(line(e, *waits) + &reasons(flags)))
        }
    }
    let unfiltered = Filter {
        limit,
        ..Filter::default()
    };
    if rows.is_empty() && args.suspicious {
        // No suspicious episode is a good result, not a mistyped filter.
        if !args.json {
            output::print("no suspicious episode\n");
        }
        return Ok(());
    }
    if rows.is_empty() && filter != unfiltered {
        let all = Filter {
            limit: 1,
            ..Filter::default()
        };
        let any = !store
            .list(&all)
            .map_err(Failure::input)?
            .episodes
            .is_empty();
        return Err(Failure::input(format!(
            "no episode of {} fits{}",
            run_dir.display(),
            if any {
                "\n  hint: without filters all are listed; purposes are train, eval-before, eval-after, ..."
            } else {
                ": it has none yet"
            }
        )));
    }
    if let Some(next) = next.filter(|_| !args.json) {
        output::print(&format!(
            "... more: go on with --after {}, raise --limit, or filter\n",
            next.0
        ));
    }
    Ok(())
}

/// The rows to list, and the cursor of the last if more follow.
///
/// # Errors
/// If the store cannot be read or refuses the filter.
fn rows(
    args: &EpisodesArgs,
    run_dir: &Path,
    store: &StoreReader,
    filter: &Filter,
) -> Result<(Vec<Flagged>, Option<Cursor>), Failure> {
    let outcomes = outcomes(run_dir, store)?;
    let page = if args.suspicious {
        let protected = match sinew_assembly::recipe_of(run_dir) {
            Ok(recipe) => recipe.trust.protected,
            Err(RunDirError::NoRun { .. }) => Vec::new(),
            Err(e) => return Err(e.into()),
        };
        outcomes.suspicious(filter, &protected)
    } else {
        outcomes.page(filter).map(|(rows, next)| {
            let rows = rows.into_iter().map(|row| (row, Vec::new()));
            (rows.collect(), next)
        })
    };
    page.map_err(|e| match e {
        ListError::Filter(e) => Failure::input(e),
        ListError::Store(e) => Failure::system(e),
    })
}

/// The flags of an episode as lines for people.
fn reasons(flags: &[Suspicion]) -> String {
    let line = |s: &Suspicion| format!("    {}: {}\n", s.flag, visible(&s.evidence));
    flags.iter().map(line).collect()
}

/// The filter of the arguments.
///
/// # Errors
/// If the range of rewards is empty, or the recipe of `--env-changed` cannot be read.
fn filter(args: &EpisodesArgs, limit: usize) -> Result<Filter, Failure> {
    Ok(Filter {
        task_kind: args.kind.clone(),
        env: args.env.clone(),
        env_changed: args
            .env_changed
            .as_deref()
            .map(sinew_assembly::versions)
            .transpose()?,
        unique: args.unique,
        failed: args.failed,
        turns: args.turns.clone(),
        at_turn: args.at_turn,
        versions: args.versions.clone(),
        draws: args.draw.map(|d| d..=d),
        updates: args.step.map(|s| s..=s),
        purpose: args.purpose.clone(),
        success: args.success,
        end: args.end.map(EndKind::from),
        reward: rewards(args)?,
        after: args.after.map(Cursor),
        limit,
        ..Filter::default()
    })
}

/// An episode as a line for people.
fn line(e: &EpisodeSummary, waits: bool) -> String {
    format!(
        "{:24} draw {:>5}  {:>10}  {:12} {:10} reward {:>6}  turns {:>2}  tokens {:>4}  {}{}\n",
        visible(e.episode.as_str()),
        e.draw,
        match e.update {
            Some(step) => format!("step {step:>5}"),
            None => String::new(),
        },
        visible(&e.purpose),
        visible(&e.task_kind),
        if e.unscored || e.end == EndKind::Failed {
            "-".to_owned()
        } else {
            format!("{:.3}", e.reward)
        },
        e.turns,
        e.sampled_tokens,
        e.end.name(),
        if waits {
            format!("  {WAITS}")
        } else {
            String::new()
        }
    )
}

/// Episodes of a listing without `--limit`.
const LISTED: usize = 50;

/// `--export`: what fits the filter as a file.
///
/// # Errors
/// If the ending of the file is none, or the file cannot be written.
fn write(
    args: &EpisodesArgs,
    store: &StoreReader,
    filter: &Filter,
    file: &Path,
) -> Result<(), Failure> {
    let refused = |why| Failure::input(format!("--export = {:?}: {why}", file.display()));
    let format = ExportFormat::of(file)
        .ok_or_else(|| refused("allowed: a file that ends in .jsonl, .parquet or .arrow"))?;
    if !format.is_built() {
        return Err(refused(
            "this build writes .jsonl only: build with `--features parquet` (the wheel has it)",
        ));
    }
    let done = export(store, filter, args.limit, file, format, args.tokens);
    let done = done.map_err(Failure::system)?;
    let (count, mute) = (done.episodes, done.without_messages);
    if args.json {
        output::print_json(&json!({ "episodes": count, "without_messages": mute, "file": file }));
        return Ok(());
    }
    let mute = match mute {
        0 => String::new(),
        n => format!("; the messages of {n} are null: a part of them was recorded as tokens alone"),
    };
    output::print(&format!("{count} episodes in {}{mute}\n", file.display()));
    Ok(())
}

/// The range of rewards of `--min-reward` and `--max-reward`, both included; `None` without either.
///
/// # Errors
/// If the least reward is above the most: nothing could fit.
fn rewards(args: &EpisodesArgs) -> Result<Option<RangeInclusive<f64>>, Failure> {
    let (least, most) = (args.min_reward, args.max_reward);
    if least.is_none() && most.is_none() {
        return Ok(None);
    }
    let least = least.unwrap_or(f64::NEG_INFINITY);
    let most = most.unwrap_or(f64::INFINITY);
    if least > most {
        return Err(Failure::input(format!(
            "--min-reward {least} is above --max-reward {most}"
        )));
    }
    Ok(Some(least..=most))
}
