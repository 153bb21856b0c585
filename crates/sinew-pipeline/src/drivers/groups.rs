//! Groups that are scored as a whole, while other episodes run.

use super::sync::Driver;
use sinew_orchestrator::{Command, Draw, Event, PipelineError};
use std::collections::BTreeMap;

impl Driver {
    /// Begins to score a group. If no port can, its members stay as they are.
    pub(super) fn score_group(&mut self, members: Vec<Draw>) -> Result<Vec<Event>, PipelineError> {
        let group = members.first().map(|m| m.group.clone());
        let Some(scorer) = &mut self.p.groups else {
            let outcomes = BTreeMap::new();
            return Ok(group
                .map(|group| Event::GroupScored { group, outcomes })
                .into_iter()
                .collect());
        };
        scorer.start(self.episodes.members(members))?;
        self.episodes.scoring += 1;
        Ok(Vec::new())
    }

    /// Takes in the groups that were scored; with `wait`, at least one if any is being scored.
    pub(super) fn scored_groups(&mut self, wait: bool) -> Result<Vec<Command>, PipelineError> {
        let scoring = self.episodes.scoring > 0;
        let Some(scorer) = self.p.groups.as_mut().filter(|_| scoring) else {
            return Ok(Vec::new());
        };
        let mut commands = Vec::new();
        for scored in scorer.scored(wait)? {
            let event = self.episodes.add_scores(scored);
            commands.extend(self.on(event));
        }
        Ok(commands)
    }
}
