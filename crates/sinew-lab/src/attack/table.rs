//! `sinew sandbox attack`: the suite of each level, as one table.

use super::{AttackOutcome, AttackRow};
use crate::{LabError, output};

/// Width of the column of cases.
const CASE: usize = 46;

/// Table of printed rows.
#[derive(Debug)]
pub(crate) struct Table {
    /// One object a row.
    as_json: bool,
    /// Level, for the last line.
    level: String,
    /// Counts of outcomes.
    held: usize,
    escaped: usize,
    not_applicable: usize,
    skipped: usize,
}

impl Table {
    pub(crate) fn new(level: &str, as_json: bool) -> Self {
        Self {
            as_json,
            level: level.into(),
            held: 0,
            escaped: 0,
            not_applicable: 0,
            skipped: 0,
        }
    }

    /// Counts and prints a row.
    pub(crate) fn row(&mut self, row: &AttackRow) {
        let count = match row.outcome {
            AttackOutcome::Held => &mut self.held,
            AttackOutcome::Escaped => &mut self.escaped,
            AttackOutcome::NotApplicable => &mut self.not_applicable,
            AttackOutcome::Skipped => &mut self.skipped,
        };
        *count += 1;
        if self.as_json {
            output::json(row);
            return;
        }
        let (outcome, case, why) = (row.outcome.name(), &row.case, &row.why);
        output::print(&format!("{outcome:<14}  {case:<CASE$}  {why}\n"));
    }

    /// The last line, after all rows.
    ///
    /// # Errors
    /// If an attack escaped, or none was made.
    pub(crate) fn finish(self) -> Result<(), LabError> {
        let all = self.held + self.escaped + self.not_applicable + self.skipped;
        if all == 0 {
            return Err(LabError::input(
                "no case matches --filter\n  hint: a number (07), a range (31-45) or part of a name; without it, all cases run",
            ));
        }
        if !self.as_json {
            let Self {
                level,
                held,
                escaped,
                not_applicable,
                skipped,
                ..
            } = &self;
            output::print(&format!(
                "level {level}: {held} held, {escaped} escaped, {not_applicable} not applicable, {skipped} skipped\n"
            ));
        }
        match self.escaped {
            0 => Ok(()),
            many => Err(LabError::system(format!("{many} attacks escaped"))),
        }
    }
}
