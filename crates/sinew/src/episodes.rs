//! `sinew show` and `sinew episodes`: one episode of a run's store, or a list of them.
//!
//! The store is opened for reading: a run that trains is not disturbed, and its newest committed episodes
//! are shown.

use crate::output;
use crate::{EpisodesArgs, ShowArgs};
use clap::ValueEnum;
use serde_json::json;
use sinew_pipeline::{LateConfig, settle};
use sinew_project::{RunDirError, store_path};
use sinew_store::{Cursor, EndKind, EpisodeSummary, ExportFormat, Filter, StoreReader, export};
use sinew_types::{EpisodeId, Trace};
use sinew_view::{ShowOptions, visible};
use sinew_wire::Failure;
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// How an episode ended, as a value of `--end`. Truncated is not failed: a limit ended it, and it counts.
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

/// Opens the store of a run for reading.
///
/// # Errors
/// If the folder has no store, as with `store.type = "memory"`, or it cannot be read.
fn open_store(run_dir: &Path) -> Result<StoreReader, Failure> {
    let path = store_path(run_dir);
    if !path.exists() {
        return Err(Failure::input(format!(
            "{} holds no stored run\n  hint: --run-dir is the folder given to `sinew train`; runs with store.type = \"memory\" keep nothing",
            run_dir.display()
        )));
    }
    StoreReader::open(&path).map_err(Failure::system)
}

/// `sinew show`: an episode as text, tokens or JSON; without `--run-dir`, the counts of a run.
///
/// Tokens are decoded with the tokenizer of the run's recipe, which must be reachable.
///
/// # Errors
/// If the episode is not in the store, or the tokenizer cannot be found.
pub(crate) fn show(args: &ShowArgs) -> Result<(), Failure> {
    let Some(run_dir) = &args.run_dir else {
        let run = sinew_project::summary(Path::new(&args.what))?;
        if args.json {
            output::print_json(&json!(run));
        } else {
            output::print(&run.text());
        }
        return Ok(());
    };
    let store = open_store(run_dir)?;
    let id = EpisodeId::new(args.what.clone());
    let Some(mut trace) = store.get(&id).map_err(Failure::system)? else {
        return Err(Failure::input(format!(
            "episode {id} is not in {}\n  hint: `sinew episodes --run-dir {}` lists what is there",
            run_dir.display(),
            run_dir.display()
        )));
    };
    let recipe = sinew_project::recipe(run_dir)?;
    Outcomes::of(run_dir, &store)?.settle(&mut trace)?;
    let renderer = sinew_wire::renderer(&recipe.model, &recipe.env)?;
    if args.json {
        let text = sinew_view::json(&trace, renderer.as_ref()).map_err(Failure::system)?;
        output::print(&(text + "\n"));
    } else {
        let options = ShowOptions {
            color: std::io::stdout().is_terminal(),
            tokens: args.tokens,
        };
        output::print(&sinew_view::text(&trace, renderer.as_ref(), options));
    }
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
    let store = open_store(run_dir)?;
    let limit = args.limit.unwrap_or(LISTED);
    let filter = filter(args, limit)?;
    if let Some(file) = &args.export {
        return write(args, &store, &filter, file);
    }
    let outcomes = Outcomes::of(run_dir, &store)?;
    let (rows, next) = outcomes.page(&filter)?;
    for (e, waits) in &rows {
        match args.json {
            true => {
                let mut row = json!(e);
                row["waits"] = json!(waits);
                output::print_json(&row);
            }
            false => output::print(&line(e, *waits)),
        }
    }
    let unfiltered = Filter {
        limit,
        ..Filter::default()
    };
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
            .map(sinew_wire::versions)
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

/// An episode of a listing with the outcome that counts, and whether it waits for its reward.
type Row = (EpisodeSummary, bool);

/// The outcomes that count of a run's stored episodes, with the scores of groups and from outside.
struct Outcomes<'a> {
    store: &'a StoreReader,
    /// How rewards from outside count, if the recipe waits for some.
    late: Option<LateConfig>,
    /// Episodes that updates left out, with the reason; read when the first is asked for.
    left_out: OnceCell<BTreeMap<EpisodeId, String>>,
}

impl<'a> Outcomes<'a> {
    /// Those of a run. A store without a recipe has no rewards from outside.
    ///
    /// # Errors
    /// If the recipe cannot be read.
    fn of(run_dir: &Path, store: &'a StoreReader) -> Result<Self, Failure> {
        let late = match sinew_project::recipe(run_dir) {
            Ok(recipe) => sinew_wire::late_config(&recipe),
            Err(RunDirError::NoRun { .. }) => None,
            Err(e) => return Err(e.into()),
        };
        Ok(Self {
            store,
            late,
            left_out: OnceCell::new(),
        })
    }

    /// Gives a trace its outcome that counts, and returns whether it waits for its reward.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn settle(&self, trace: &mut Trace) -> Result<bool, Failure> {
        let records = self.store.scores(&trace.episode);
        let records = records.map_err(Failure::system)?;
        if !settle(trace, &records, self.late.as_ref()) {
            return Ok(false);
        }
        let reason = self.left_out()?.get(&trace.episode);
        let waits = reason.is_none();
        let reason = reason.map_or(WAITS, String::as_str);
        trace.outcome.unscored_reason = Some(reason.to_owned());
        Ok(waits)
    }

    /// A row of a listing. The trace is read where its outcome that counts may differ from that of the index.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn listed(&self, e: &EpisodeSummary) -> Result<Row, Failure> {
        let mut e = e.clone();
        if !e.unscored && self.late.is_none() {
            return Ok((e, false));
        }
        let Some(mut trace) = self.store.get(&e.episode).map_err(Failure::system)? else {
            return Ok((e, false));
        };
        let waits = self.settle(&mut trace)?;
        e.unscored = trace.outcome.unscored;
        e.reward = trace.total_reward();
        e.success = trace.outcome.success && !e.unscored;
        Ok((e, waits))
    }

    /// A page of a listing by the outcomes that count, and the cursor of its last row if more follow.
    /// Conditions on the outcome are met here: the index has the outcomes of traces alone.
    ///
    /// # Errors
    /// If the store cannot be read or refuses the filter.
    fn page(&self, filter: &Filter) -> Result<(Vec<Row>, Option<Cursor>), Failure> {
        let mut wider = Filter {
            success: None,
            failed: false,
            reward: None,
            ..filter.clone()
        };
        let all = wider == *filter;
        let mut rows: Vec<Row> = Vec::new();
        loop {
            let page = self.store.list(&wider).map_err(Failure::input)?;
            for e in &page.episodes {
                let (e, waits) = self.listed(e)?;
                if !fits(&e, filter) {
                    continue;
                }
                if rows.len() == filter.limit {
                    let last = rows.last().map(|(e, _)| e.cursor);
                    return Ok((rows, last));
                }
                rows.push((e, waits));
            }
            match page.next {
                Some(next) if !all => wider.after = Some(next),
                next => return Ok((rows, next)),
            }
        }
    }

    /// # Errors
    /// If the store cannot be read.
    fn left_out(&self) -> Result<&BTreeMap<EpisodeId, String>, Failure> {
        if let Some(known) = self.left_out.get() {
            return Ok(known);
        }
        let batches = self.store.trained_batches().map_err(Failure::system)?;
        let all = batches.into_iter().flat_map(|b| b.dropped).collect();
        Ok(self.left_out.get_or_init(|| all))
    }
}

/// Whether an episode meets the conditions of a filter on its outcome. One without a score is no success, no
/// failure and within no range.
fn fits(e: &EpisodeSummary, filter: &Filter) -> bool {
    let success = |wanted: bool| !e.unscored && e.success == wanted;
    let failed = success(false) || e.end == EndKind::Failed;
    let range = filter.reward.as_ref();
    filter.success.is_none_or(success)
        && (failed || !filter.failed)
        && range.is_none_or(|range| !e.unscored && range.contains(&e.reward))
}

/// Of an episode whose reward has not come yet.
const WAITS: &str = "waits for its reward";

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
        match e.unscored || e.end == EndKind::Failed {
            true => "-".to_owned(),
            false => format!("{:.3}", e.reward),
        },
        e.turns,
        e.sampled_tokens,
        e.end.name(),
        match waits {
            true => format!("  {WAITS}"),
            false => String::new(),
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
    let count = export(store, filter, args.limit, (file, format), args.tokens);
    let count = count.map_err(Failure::system)?;
    match args.json {
        true => output::print_json(&json!({ "episodes": count, "file": file })),
        false => output::print(&format!("{count} episodes in {}\n", file.display())),
    }
    Ok(())
}

/// A number, or a range such as `2..5`, both ends included.
///
/// # Errors
/// If the text is neither, or the range is empty.
pub(crate) fn range<T: FromStr + Copy + PartialOrd>(
    text: &str,
) -> Result<RangeInclusive<T>, String> {
    let number = |text: &str| {
        let number = text.parse::<T>();
        number.map_err(|_| "allowed: a number such as 3, or a range such as 2..5".to_owned())
    };
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    let (first, last) = (number(first)?, number(last)?);
    match first <= last {
        true => Ok(first..=last),
        false => Err("the first number is above the last".to_owned()),
    }
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
