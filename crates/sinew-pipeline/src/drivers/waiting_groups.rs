//! Groups that earlier sessions left waiting for rewards from outside.

use crate::late::LateRewards;
use crate::state::RunStore;
use sinew_orchestrator::{CoreState, PipelineError, WaitingGroups};

/// Returns the groups that earlier sessions left waiting, if rewards come from outside, and notes the begun
/// steps in `state`. If training overlaps, they wait once their draws are started again.
pub(super) fn restore(
    late: Option<&LateRewards>,
    store: &RunStore,
    (tasks_per_step, overlaps): (usize, bool),
    state: &mut CoreState,
) -> Result<Option<WaitingGroups>, PipelineError> {
    let Some(late) = late else {
        return Ok(None);
    };
    let mut waiting_groups = WaitingGroups::new(late.config.clone());
    if overlaps {
        return Ok(Some(waiting_groups));
    }
    let (named, steps) = store.settled()?;
    state.begun = store.begun(steps, tasks_per_step)?;
    let draws = steps * store.draws_per_step;
    waiting_groups.restore(store.traces.as_ref(), &named, draws)?;
    Ok(Some(waiting_groups))
}
