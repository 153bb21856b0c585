//! The row of coding agents.

use super::row::{Mark, Row};
use sinew_agents::{AGENTS, Agent};

/// Looks for the agents that `sinew setup agents` installs.
pub(super) fn installed(name: &str) -> Vec<Row> {
    let folder = sinew_assembly::agents_folder();
    let (there, missing): (Vec<&Agent>, Vec<&Agent>) = AGENTS
        .into_iter()
        .partition(|agent| agent.missing(&folder).is_none());
    if there.is_empty() {
        let missing: Vec<&str> = missing.iter().map(|agent| agent.name).collect();
        return vec![Row::new(
            Mark::Warn,
            name,
            format!("no coding agent in {}", folder.display()),
            format!(
                "`sinew setup agents NAME` installs one for harness.type = \"cli\": {}",
                missing.join(", ")
            ),
        )];
    }
    let there: Vec<String> = there
        .iter()
        .map(|agent| format!("{} {}", agent.name, agent.version))
        .collect();
    let detail = format!("{} in {}", there.join(", "), folder.display());
    vec![Row::ok(name, detail)]
}
