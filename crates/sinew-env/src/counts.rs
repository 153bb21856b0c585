//! Counts of an episode with tools: the same metrics for every environment with tools.
//!
//! `tool_calls`, `tool_errors` and `malformed` are numbers per episode; `used_tool` is 0 or 1;
//! `format_penalty` is a share of turns, 0 to 1.

use crate::port::Action;
use sinew_types::{InputPresence, Outcome};

/// Turn counts of an episode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Turns of the model.
    turns: u32,
    /// Valid calls, including those that failed.
    calls: u32,
    /// Calls whose result is an error.
    errors: u32,
    /// Turns with a call that could not be parsed.
    malformed: u32,
}

/// Whether episodes have these counts, which only episodes with tools do.
pub fn counted(tools: bool) -> InputPresence {
    if tools {
        InputPresence::Yes
    } else {
        InputPresence::No("without tools there are no calls to count; add a tool")
    }
}

impl Counts {
    /// Adds a turn, `errors` of whose calls failed.
    pub fn turn(&mut self, action: &Action, errors: u32) {
        self.turns += 1;
        self.calls += action.tool_calls.len() as u32;
        self.errors += errors;
        self.malformed += u32::from(action.call_error.is_some());
    }

    /// Adds the counts to the metrics of an outcome. Existing metrics of the same name are kept.
    pub fn add_to(self, outcome: &mut Outcome) {
        let flag = |b: bool| f64::from(u8::from(b));
        let penalty = f64::from(self.malformed) / f64::from(self.turns.max(1));
        for (name, value) in [
            ("tool_calls", f64::from(self.calls)),
            ("tool_errors", f64::from(self.errors)),
            ("used_tool", flag(self.calls > self.errors)),
            ("malformed", f64::from(self.malformed)),
            // Share of malformed turns.
            ("format_penalty", penalty),
        ] {
            outcome.metrics.entry(name.to_owned()).or_insert(value);
        }
    }
}
