//! `sinew worker --role rollout`: episodes of a run, with weights that follow it.

use super::presence::RolePresence;
use super::{Stop, WorkerArgs, begin, refused};
use crate::output;
use serde_json::json;
use sinew_assembly::{Failure, WorkerRun, join};
use sinew_queue::HttpQueue;
use sinew_view::say;
use sinew_workers::{
    DeskClient, RunTerms, WorkerCounts, WorkerEnd, WorkerError, WorkerParts, work,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

/// Time after which a call to the queue is given up and made again later.
const CALL_PATIENCE: Duration = Duration::from_secs(5);
/// Episodes at the same time, unless --slots names another number.
const SLOTS: usize = 32;

pub(super) fn run(args: &WorkerArgs) -> Result<(), Failure> {
    let (runtime, _signals, stop) = begin(args)?;
    let owner = Arc::new(DeskClient::new(&args.owner, &args.token()?).map_err(refused)?);
    let mut counts = WorkerCounts::default();
    let why = loop {
        let Some(terms) = args.terms(&owner, &stop)? else {
            break ASKED;
        };
        let options = args.options(runtime.handle().clone(), &stop)?;
        let Some(made) = join(&owner, &terms, &options)? else {
            break ASKED;
        };
        let (end, done) = works(args, &runtime, (&owner, terms), &made, &stop)?;
        counts.finished += done.finished;
        counts.returned += done.returned;
        counts.interrupted += done.interrupted;
        counts.stopped += done.stopped;
        if *made.spent.borrow() {
            return Err(Failure::outside(
                "a budget of a judge is spent, so that no episode can be scored here\n  hint: raise it in the recipe",
            ));
        }
        match end {
            WorkerEnd::Drained => break ASKED,
            WorkerEnd::RunEnded => {
                made.run_is_over();
                break "the run is over";
            }
            WorkerEnd::NewOwner => say("another owner continues the run: the parts are made anew"),
        }
    };
    ended(args, why, counts);
    Ok(())
}

/// Reason of a regular end.
const ASKED: &str = "asked to end";

/// Works for one owner.
fn works(
    args: &WorkerArgs,
    runtime: &Runtime,
    (owner, terms): (&Arc<DeskClient>, RunTerms),
    made: &WorkerRun,
    stop: &Stop,
) -> Result<(WorkerEnd, WorkerCounts), Failure> {
    let queue = HttpQueue::new(&args.owner, &args.token()?, CALL_PATIENCE);
    let most = made.recipe.rollout.max_in_flight.min(SLOTS);
    let slots = args.slots.unwrap_or(most);
    let presence = RolePresence::register(args, slots, None)?;
    let name = presence.id();
    if args.json {
        let joined = json!({"run": terms.run, "name": name, "slots": slots, "fence": terms.fence});
        output::print_json(&json!({ "worker": joined }));
    } else {
        output::print(&format!(
            "{name}: up to {slots} episodes of {} at a time\n",
            terms.run
        ));
    }
    let (asked, spent) = (Arc::clone(stop), made.spent.clone());
    let parts = WorkerParts {
        name,
        owner: Arc::clone(owner),
        queue: Arc::new(queue.map_err(Failure::input)?),
        terms,
        episode: made.episode.clone(),
        options: made.options.clone(),
        slots,
        weights: made.weights.clone(),
        agents: made.agents.clone(),
        presence: Box::new(presence),
        runtime: runtime.handle().clone(),
        notice: Duration::from_secs(args.notice_s),
        patience: args.patience(),
        stop: Arc::new(move || asked() || *spent.borrow()),
    };
    let mut report = |counts: WorkerCounts| {
        if args.json {
            output::print_json(&json!({ "episodes": counts }));
        }
    };
    work(parts, &mut report).map_err(|e| match e {
        WorkerError::Desk(error) => refused(error),
        WorkerError::Queue(_) | WorkerError::Away { .. } => Failure::outside(e),
        WorkerError::Batch(_) | WorkerError::Thread(_) => Failure::system(e),
    })
}

/// Says how a worker ended.
fn ended(args: &WorkerArgs, why: &str, counts: WorkerCounts) {
    if args.json {
        output::print_json(&json!({ "ended": why, "episodes": counts }));
    } else {
        let WorkerCounts {
            finished,
            returned,
            interrupted,
            stopped,
        } = counts;
        output::print(&format!(
            "{why}: {finished} episodes finished, {returned} returned (of which {interrupted} had begun), \
             {stopped} stopped\n"
        ));
    }
}
