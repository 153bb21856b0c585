//! Groups that are scored as a whole, while other episodes run.

use super::sync::Driver;
use crate::ports::ScoredGroup;
use sinew_orchestrator::{Command, Draw, Event, PipelineError, task_outcome};
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
        let traced = |draw: Draw| {
            let trace = self.traces.get(&draw.episode)?.clone();
            Some((draw, trace))
        };
        scorer.start(members.into_iter().filter_map(traced).collect())?;
        self.scoring += 1;
        Ok(Vec::new())
    }

    /// Takes in the groups that were scored; with `wait`, at least one if any is being scored.
    pub(super) fn scored_groups(&mut self, wait: bool) -> Result<Vec<Command>, PipelineError> {
        let Some(scorer) = self.p.groups.as_mut().filter(|_| self.scoring > 0) else {
            return Ok(Vec::new());
        };
        let scored = scorer.scored(wait)?;
        self.scoring -= scored.len().min(self.scoring);
        let mut commands = Vec::new();
        for ScoredGroup { group, outcomes } in scored {
            for (episode, outcome) in outcomes {
                if let Some(trace) = self.traces.get_mut(&episode) {
                    trace.outcome = outcome;
                }
            }
            let members = self.traces.values().filter(|t| t.group == group);
            let outcomes = members
                .filter_map(|t| Some((t.episode.clone(), task_outcome(t)?)))
                .collect();
            commands.extend(self.on(Event::GroupScored { group, outcomes }));
        }
        Ok(commands)
    }
}
