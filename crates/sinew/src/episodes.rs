//! Looking into a run's store: one episode, or a list of them.

use crate::failure::Failure;
use crate::output;
use crate::run_dir::{self, store_path};
use crate::show::{self, ShowOptions};
use crate::show_run::RunSummary;
use crate::visible::visible;
use crate::wire;
use crate::{EpisodesArgs, ShowArgs};
use serde_json::json;
use sinew_store::{Filter, StoreReader};
use sinew_types::EpisodeId;
use std::io::IsTerminal;
use std::path::Path;

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

/// `sinew show`.
pub(crate) fn show(args: &ShowArgs) -> Result<(), Failure> {
    let Some(run_dir) = &args.run_dir else {
        let run = RunSummary::read(Path::new(&args.what))?;
        if args.json {
            output::print_json(&json!(run));
        } else {
            output::print(&run.text());
        }
        return Ok(());
    };
    let store = open_store(run_dir)?;
    let id = EpisodeId::new(args.what.clone());
    let Some(trace) = store.get(&id).map_err(Failure::system)? else {
        return Err(Failure::input(format!(
            "episode {id} is not in {}\n  hint: `sinew episodes --run-dir {}` lists what is there",
            run_dir.display(),
            run_dir.display()
        )));
    };
    let recipe = run_dir::recipe(run_dir)?;
    let renderer = wire::renderer(&recipe)?;
    if args.json {
        let text = show::json(&trace, renderer.as_ref()).map_err(Failure::system)?;
        output::print(&(text + "\n"));
    } else {
        let options = ShowOptions {
            color: std::io::stdout().is_terminal(),
            tokens: args.tokens,
        };
        output::print(&show::text(&trace, renderer.as_ref(), options));
    }
    Ok(())
}

/// `sinew episodes`.
pub(crate) fn list(args: &EpisodesArgs) -> Result<(), Failure> {
    let store = open_store(&args.run_dir)?;
    let filter = Filter {
        steps: args.step.map(|s| s..=s),
        purpose: args.purpose.clone(),
        limit: args.limit,
        ..Filter::default()
    };
    let page = store.list(&filter).map_err(Failure::input)?;
    for e in &page.episodes {
        if args.json {
            output::print_json(&json!(e));
        } else {
            output::print(&format!(
                "{:24} step {:>4}  {:12} {:10} reward {:>6.3}  turns {:>2}  tokens {:>4}  {}\n",
                visible(e.episode.as_str()),
                e.step,
                visible(&e.purpose),
                visible(&e.task_kind),
                e.reward,
                e.turns,
                e.sampled_tokens,
                e.end.name()
            ));
        }
    }
    let asked = args.purpose.is_some() || args.step.is_some();
    if page.episodes.is_empty() && asked {
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
            args.run_dir.display(),
            if any {
                "\n  hint: without --purpose and --step all are listed; purposes are train, eval-before, eval-after, ..."
            } else {
                ": it has none yet"
            }
        )));
    }
    if !args.json && page.next.is_some() {
        output::print("... more: raise --limit, or narrow with --step or --purpose\n");
    }
    Ok(())
}
