//! Messages between owner and workers, as plain data.

use serde::{Deserialize, Serialize};
use sinew_rollout::Hops;
use std::collections::BTreeMap;

/// Facts of a run that a worker needs before it makes its parts: the answer to `GET /run`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunTerms {
    /// Name of the run, which its traces have.
    pub run: String,
    /// Name that no other run has: letters, digits and hyphens. Folders of its weights are called by it.
    pub id: String,
    /// Generation of the owner.
    pub fence: u64,
    /// The effective recipe, as TOML.
    pub recipe: String,
    /// Version of the owner's program.
    pub build: String,
    /// Versions of the parts that a recipe names: rows, environments, functions, rubrics, tokenizer.
    pub parts: BTreeMap<String, String>,
    /// Whether the owner serves the weights, so that the engines of workers follow them.
    pub weights: bool,
    /// Time of a lease on a ticket.
    pub lease_ms: u64,
}

/// A part that a worker has in another version than the owner.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{name}: the owner has {owner}, this worker has {own}\n  hint: install here what the owner has; workers \
     run the same program, rows, functions and environments as the run"
)]
pub struct OtherPart {
    /// Name of the part.
    pub name: String,
    /// Version of the owner.
    pub owner: String,
    /// Version of this process.
    pub own: String,
}

impl RunTerms {
    /// Compares build and parts with those of a worker.
    ///
    /// # Errors
    /// The first part whose version differs, or that only one side has.
    pub fn check(&self, build: &str, parts: &BTreeMap<String, String>) -> Result<(), OtherPart> {
        let differs = |name: &str, owner: Option<&String>, own: Option<&String>| {
            let text = |version: Option<&String>| {
                version.map_or_else(|| "none".to_owned(), |v| v.chars().take(64).collect())
            };
            OtherPart {
                name: name.to_owned(),
                owner: text(owner),
                own: text(own),
            }
        };
        if self.build != build {
            let own = build.to_owned();
            return Err(differs("program", Some(&self.build), Some(&own)));
        }
        for name in self.parts.keys().chain(parts.keys()) {
            let (owner, own) = (self.parts.get(name), parts.get(name));
            if owner != own {
                return Err(differs(name, owner, own));
            }
        }
        Ok(())
    }
}

/// Published weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedMark {
    /// Version and lineage, as the name of their folder.
    pub id: String,
    /// BLAKE3 of the manifest's file, hexadecimal: the same version may be published with other weights. Of
    /// weights at a service, that of their address.
    pub manifest: String,
    /// Address of the weights at a service that computes with them; left out: the owner serves their files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
}

/// Counters of a worker since its start, and the phases of its episodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerReading {
    /// Seconds in which its engine computed.
    pub engine_busy_s: f64,
    /// Seconds for which its episodes waited for sandboxes, added up.
    pub sandbox_s: f64,
    /// Sampled tokens.
    pub sampled_tokens: u64,
    /// Times that a request gave up its KV capacity.
    pub preemptions: u64,
    /// Episodes that had begun when it left, and begin again on other workers.
    pub interrupted: u64,
    /// Rollouts that agents opened at its gateway.
    pub opened: u64,
    /// Episodes that have started and not ended, and those of them in each phase.
    pub in_flight: usize,
    pub booting: usize,
    pub generating: usize,
    pub in_tool: usize,
    /// Calls of the worker.
    pub hops: Hops,
}

/// The body of `POST /tickets`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerReport {
    /// Name of the worker.
    pub worker: String,
    /// Its counters.
    pub reading: WorkerReading,
}

/// The answer to a report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TicketOrders {
    /// Name of the run that no other run has: two runs may have the same address, token and generation.
    pub id: String,
    /// Generation of the owner: tickets of another one are not wanted.
    pub fence: u64,
    /// No ticket is to be leased; running episodes continue.
    pub paused: bool,
    /// The run is over.
    pub ended: bool,
    /// Keys of tickets whose episodes are to be stopped.
    pub cancelled: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_build_or_part_is_named() {
        let parts =
            |version: &str| BTreeMap::from([("env.version".to_owned(), version.to_owned())]);
        let terms = RunTerms {
            run: "r".into(),
            id: "r-1".into(),
            fence: 1,
            recipe: String::new(),
            build: "1".into(),
            parts: parts("a"),
            weights: true,
            lease_ms: 1000,
        };
        terms.check("1", &parts("a")).unwrap();
        assert_eq!(terms.check("2", &parts("a")).unwrap_err().name, "program");
        let other = terms.check("1", &parts("b")).unwrap_err();
        assert_eq!((other.owner.as_str(), other.own.as_str()), ("a", "b"));
        let missing = terms.check("1", &BTreeMap::new()).unwrap_err();
        assert_eq!(missing.own, "none");
        let text = missing.to_string();
        assert!(
            text.contains("env.version") && text.contains("hint"),
            "{text}"
        );
    }
}
