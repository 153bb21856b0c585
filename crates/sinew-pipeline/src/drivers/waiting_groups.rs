//! Groups that wait for rewards from outside, also from earlier sessions.

use crate::late::LateRewards;
use crate::state::RunStore;
use sinew_orchestrator::{CoreState, PipelineError, WaitingGroups};
use std::time::{Duration, Instant};

/// Interval between two readings while episodes run or the learner works.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Part of the time that looks may take: a look reads the scores of all groups that wait.
const LOOKS_SHARE: u32 = 20;

/// Groups that wait for rewards, and the looks at them.
pub(super) struct AwaitedGroups {
    /// `None` if no rewards come from outside.
    pub(super) groups: Option<WaitingGroups>,
    /// Time of the next look, if training overlaps.
    look_due: Option<Instant>,
}

impl AwaitedGroups {
    /// Returns the groups that earlier sessions left waiting, if rewards come from outside, and notes the
    /// begun steps in `state`. If training overlaps, they wait once their draws are begun again.
    pub(super) fn restore(
        late: Option<&LateRewards>,
        store: &RunStore,
        (tasks_per_step, overlaps): (usize, bool),
        state: &mut CoreState,
    ) -> Result<Self, PipelineError> {
        let mut groups = late.map(|late| WaitingGroups::new(late.config.clone()));
        if let Some(groups) = groups.as_mut().filter(|_| !overlaps) {
            let (named, steps) = store.settled()?;
            state.begun = store.begun(steps, tasks_per_step)?;
            let draws = steps * store.draws_per_step;
            groups.restore(store.traces.as_ref(), &named, draws)?;
        }
        Ok(Self {
            groups,
            look_due: None,
        })
    }

    /// Number of groups that wait.
    pub(super) fn count(&self) -> usize {
        self.groups.as_ref().map_or(0, WaitingGroups::waiting)
    }

    /// Whether to look at the groups that wait; with `wait`, the next look is due at once.
    pub(super) fn is_look_due(&self, now: Instant, wait: bool) -> bool {
        self.count() > 0 && (wait || self.look_due.is_none_or(|due| now >= due))
    }

    /// Sets the next look after one that began then.
    pub(super) fn looked(&mut self, began: Instant) {
        self.look_due = Some(Instant::now() + LOOK_EVERY.max(began.elapsed() * LOOKS_SHARE));
    }
}
