//! Invariants of the whole system, and faults of the harness that show that they can be broken.

use serde::{Deserialize, Serialize};
use sinew_orchestrator::UpdateCommit;
use sinew_types::{EpisodeEnd, EpisodeId, Trace};
use std::collections::HashSet;
use std::fmt;

/// Virtual microseconds without an update after which a run is stuck.
const STUCK: u64 = 4 * 3_600_000_000;

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Name: `lost`, `twice`, `staleness`, `order`, `kv`, `slots`, `leases`, `versions`, `ends`, `progress`.
    pub invariant: &'static str,
    /// Description of the fault.
    pub found: String,
}

impl Violation {
    pub(crate) fn new(invariant: &'static str, found: impl Into<String>) -> Self {
        Self {
            invariant,
            found: found.into(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.found)
    }
}

/// A fault of the harness around the cores: each breaks one invariant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bug {
    /// An episode that is to be run is not.
    Forget,
    /// An episode of the previous update is trained again.
    TrainTwice,
    /// A commit is not written.
    SkipCommit,
    /// The age of groups is hidden from the core.
    Stale,
    /// An engine that could not load reports that it did.
    OldWeights,
    /// An episode's place is not returned.
    LeakSlot,
    /// An engine takes more than its cache holds.
    Overfill,
    /// Rows of an update are not acked.
    SkipAck,
}

impl Bug {
    /// All faults, each with the invariants that it breaks.
    pub const ALL: [(Self, &'static [&'static str]); 8] = [
        (Self::Forget, &["progress", "lost"]),
        (Self::TrainTwice, &["twice"]),
        (Self::SkipCommit, &["order", "lost"]),
        (Self::Stale, &["staleness"]),
        (Self::OldWeights, &["versions"]),
        (Self::LeakSlot, &["slots"]),
        (Self::Overfill, &["kv"]),
        (Self::SkipAck, &["leases"]),
    ];
}

/// State of every episode.
#[derive(Debug)]
pub(crate) struct Ledger {
    /// Whether invariants are held.
    pub(crate) checks: bool,
    /// Updates that an episode may be behind.
    max_staleness: u64,
    /// Episodes that the core asked for.
    pub(crate) begun: usize,
    /// Episodes that asked to begin.
    asked: HashSet<EpisodeId>,
    /// Stored episodes of all sessions.
    stored: HashSet<EpisodeId>,
    /// Episodes that are trained.
    trained: HashSet<EpisodeId>,
    /// Episodes that are left out.
    dropped: HashSet<EpisodeId>,
    /// The last committed update.
    commits: u64,
    /// The request that sampled last, and the weights.
    last_sampled: (u64, Option<u64>),
    /// The first violation.
    found: Option<Violation>,
    /// Time at which the last update was over.
    last_update: u64,
}

impl Ledger {
    pub(crate) fn new(checks: bool, max_staleness: u64) -> Self {
        Self {
            checks,
            max_staleness,
            begun: 0,
            asked: HashSet::new(),
            stored: HashSet::new(),
            trained: HashSet::new(),
            dropped: HashSet::new(),
            commits: 0,
            last_sampled: (0, None),
            found: None,
            last_update: 0,
        }
    }

    /// Records a violation; only the first one counts.
    pub(crate) fn note(&mut self, invariant: &'static str, found: String) {
        if self.checks && self.found.is_none() {
            self.found = Some(Violation::new(invariant, found));
        }
    }

    /// Takes the first violation.
    pub(crate) fn take(&mut self) -> Option<Violation> {
        self.found.take()
    }

    pub(crate) fn began(&mut self, id: &EpisodeId) {
        self.begun += 1;
        if self.checks {
            self.asked.insert(id.clone());
            if self.trained.contains(id) {
                self.note("twice", format!("{id} is run again after it was trained"));
            }
        }
    }

    /// An episode is over: its trace must be whole.
    pub(crate) fn ended(&mut self, trace: &Trace) {
        if !self.checks {
            return;
        }
        let failed = matches!(trace.end, EpisodeEnd::Failed { .. });
        if let (Err(error), false) = (trace.validate(), failed) {
            self.note(
                "ends",
                format!("the trace of {} is not valid: {error}", trace.episode),
            );
        }
    }

    /// Records a stored episode.
    pub(crate) fn stored(&mut self, id: &EpisodeId) {
        if self.checks && !self.stored.insert(id.clone()) {
            self.note("twice", format!("{id} is stored twice"));
        }
    }

    /// Whether a commit names it.
    pub(crate) fn is_named(&self, id: &EpisodeId) -> bool {
        self.trained.contains(id) || self.dropped.contains(id)
    }

    /// An episode is trained by weights that are `age` updates ahead of its oldest token.
    pub(crate) fn trains(&mut self, id: &EpisodeId, age: u64) {
        if self.checks && age > self.max_staleness {
            let most = self.max_staleness;
            self.note(
                "staleness",
                format!("{id} is {age} updates behind, allowed: {most}"),
            );
        }
    }

    /// An update is committed.
    pub(crate) fn commit(&mut self, commit: &UpdateCommit) {
        let step = commit.step;
        if step != self.commits + 1 && !(commit.again && step <= self.commits) {
            let before = self.commits;
            self.note(
                "order",
                format!("update {step} is committed after update {before}"),
            );
        }
        self.commits = self.commits.max(step);
        for id in &commit.trained {
            let twice = !self.trained.insert(id.clone()) || self.dropped.contains(id);
            if twice && !commit.again {
                self.note(
                    "twice",
                    format!("update {step} trains {id}, which was named before"),
                );
            }
            if self.checks && !self.stored.contains(id) {
                self.note(
                    "lost",
                    format!("update {step} trains {id}, which is not stored"),
                );
            }
        }
        for id in commit.dropped.keys() {
            let known = self.trained.contains(id) || !self.dropped.insert(id.clone());
            if known && !commit.again {
                self.note(
                    "twice",
                    format!("update {step} drops {id}, which was named before"),
                );
            }
        }
    }

    /// An engine sampled for a request with these weights.
    pub(crate) fn sampled(&mut self, request: u64, version: Option<u64>, count: u64) {
        if count > 0 {
            self.last_sampled = (request, version);
        }
    }

    /// Tokens arrived with these versions.
    pub(crate) fn handed_on(&mut self, request: u64, versions: Option<(u64, u64)>, count: u64) {
        let Some((first, last)) = versions else {
            return;
        };
        let real = self.last_sampled;
        if real.0 == request && (real.1 != Some(first) || first != last) {
            let said = real.1.map_or("none".to_owned(), |v| format!("v{v}"));
            let why = format!("{count} tokens are marked v{first}, weights {said} sampled them");
            self.note("versions", why);
        }
    }

    /// A request got its last event.
    pub(crate) fn request_ended(&mut self, request: u64) {
        if self.last_sampled.0 == request {
            self.last_sampled = (0, None);
        }
    }

    /// The process is killed: what was not durable is started again, or never.
    pub(crate) fn killed(&mut self) {
        let (stored, trained, dropped) = (&self.stored, &self.trained, &self.dropped);
        self.asked
            .retain(|id| stored.contains(id) || trained.contains(id) || dropped.contains(id));
    }

    /// A session continues from a checkpoint.
    pub(crate) fn goes_on(&mut self, checkpoint: u64) {
        if checkpoint > self.commits {
            let commits = self.commits;
            self.note(
                "order",
                format!("checkpoint {checkpoint} holds more than {commits} commits"),
            );
        }
    }

    /// An update is over.
    pub(crate) fn progress(&mut self, now: u64) {
        self.last_update = now;
    }

    pub(crate) fn is_stuck(&self, now: u64) -> bool {
        self.checks && now > self.last_update + STUCK
    }

    /// Checks at the end that no episode is missing. The episodes of `open` have begun and wait for an update
    /// that does not come.
    pub(crate) fn end(&mut self, open: &[EpisodeId]) -> Option<Violation> {
        let open: HashSet<&EpisodeId> = open.iter().collect();
        let named = |id: &EpisodeId| self.trained.contains(id) || self.dropped.contains(id);
        let mut lost: Vec<&EpisodeId> = self
            .asked
            .iter()
            .filter(|id| !named(id) && !open.contains(id))
            .collect();
        lost.sort();
        let first = lost.first()?;
        let count = lost.len();
        Some(Violation::new(
            "lost",
            format!("{count} episodes, the first {first}, are in no update and not open"),
        ))
    }
}
