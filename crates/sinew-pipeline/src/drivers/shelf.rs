//! Groups that earlier sessions left waiting for rewards from outside.

use crate::late::Late;
use crate::state::RunStore;
use sinew_orchestrator::{CoreState, PipelineError, Shelf};

/// Returns the groups that earlier sessions left waiting, if rewards come from outside, and notes the begun
/// steps in `state`. If training overlaps, they wait once their draws are begun again.
pub(super) fn restore(
    late: Option<&Late>,
    store: &RunStore,
    (tasks_per_step, overlaps): (usize, bool),
    state: &mut CoreState,
) -> Result<Option<Shelf>, PipelineError> {
    let Some(late) = late else {
        return Ok(None);
    };
    let mut shelf = Shelf::new(late.config.clone());
    if overlaps {
        return Ok(Some(shelf));
    }
    let (named, steps) = store.settled()?;
    state.begun = store.begun(steps, tasks_per_step)?;
    let draws = steps * store.draws_per_step;
    shelf.restore(store.traces.as_ref(), &named, draws)?;
    Ok(Some(shelf))
}
