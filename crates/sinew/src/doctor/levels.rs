//! Rows of the sandbox levels.

use super::row::{Mark, Row};
use crate::sandbox::{Probed, at_level, probed};

/// The level that every run has.
pub(super) fn process(level: &str) -> Vec<Row> {
    vec![row(level, Mark::Fail)]
}

/// A level that recipes ask for.
pub(super) fn other(level: &str) -> Vec<Row> {
    vec![row(level, Mark::Warn)]
}

/// Starts a level and runs a program in a sandbox of it. `missing` is the mark of a level that does not work.
fn row(level: &str, missing: Mark) -> Row {
    let found = at_level(level).and_then(|section| probed(&section));
    let probed = match found {
        Ok(probed) => probed,
        Err(e) => {
            let hint = format!(
                "what the line above names; `sinew sandbox probe --level {level}` tries it again"
            );
            return Row::failed(missing, level, e.text(), &hint);
        }
    };
    let Probed {
        program,
        degradations,
        ..
    } = &probed;
    let mut detail = format!(
        "a program took {} ms; {}",
        program.as_millis(),
        probed.in_force()
    );
    if degradations.is_empty() && probed.missing().is_empty() {
        return Row::ok(level, detail);
    }
    for degradation in degradations {
        detail.push_str(&format!("\nslower: {degradation}"));
    }
    let hint = format!(
        "it works so; sandbox.strict = true refuses to run without all protections, and `sinew sandbox probe --level \
         {level}` lists them"
    );
    Row::new(Mark::Warn, level, detail, hint)
}
