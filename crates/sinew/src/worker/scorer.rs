//! `sinew worker --role scorer`: rewards of a run's recipe for the rows of a queue.

use super::presence::{Beats, RolePresence};
use super::{WorkerArgs, begin, refused};
use crate::output;
use serde_json::json;
use sinew_assembly::{ENVIRONMENTS, Failure};
use sinew_queue::{QUEUE_NAME, ScoredCounts, ScorerConfig, score_rows};
use sinew_recipe::RunPlan;
use sinew_store::queue::Order;
use sinew_workers::{DeskClient, WorkerStatus};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Rows and sampled tokens of one lease.
const ROWS: usize = 32;
const TOKENS: u64 = 1 << 20;
/// Time after which the rows of a scorer that died go to another.
const LEASE: Duration = Duration::from_secs(60);
/// Attempts at a row before it goes on without a reward.
const ATTEMPTS: u32 = 3;

pub(super) fn run(args: &WorkerArgs) -> Result<(), Failure> {
    let (_runtime, _signals, stop) = begin(args)?;
    let owner = Arc::new(DeskClient::new(&args.owner, &args.token()?).map_err(refused)?);
    let Some(terms) = args.terms(&owner, &stop)? else {
        return Ok(());
    };
    let recipe = RunPlan::parse(
        Path::new("recipe of the owner"),
        &terms.recipe,
        ENVIRONMENTS,
    )?;
    let place = match &args.queue {
        Some(queue) => {
            let token = args.queue_token_file.as_deref();
            sinew_assembly::queue_place(queue, QUEUE_NAME, token)?
        }
        None => sinew_assembly::data_queue(&recipe)?.ok_or_else(|| {
            Failure::input("--queue: the recipe has no [data] type = \"queue\", so name a queue")
        })?,
    };
    let score = sinew_assembly::recipe_score(&recipe, &sinew_assembly::tasks(&recipe)?)?;
    let queue = sinew_assembly::open_queue(&place)?;
    let presence = RolePresence::register(args, ROWS, None)?;
    let config = ScorerConfig {
        holder: presence.id(),
        rows: ROWS,
        tokens: TOKENS,
        order: Order::Oldest,
        lease: LEASE,
        attempts: ATTEMPTS,
        until_empty: false,
    };
    let (beats, ends) = Beats::start(presence, WorkerStatus::default, stop)?;
    let mut report = |so_far: ScoredCounts| {
        if args.json {
            output::print_json(&json!({ "scoring": so_far }));
        }
    };
    let done = score_rows(queue.as_ref(), &score, &config, &*ends, &mut report);
    drop(beats);
    let done = done.map_err(|e| Failure::outside(format!("--queue: {e}")))?;
    if args.json {
        output::print_json(&json!({ "scored": done }));
    } else {
        output::print(&format!(
            "{} rows scored, {} left without a reward\n",
            done.scored, done.unscored
        ));
    }
    Ok(())
}
