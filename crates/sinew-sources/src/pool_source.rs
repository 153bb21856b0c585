//! The data pool as a source: groups are leased, stored here, then acknowledged.

use crate::ledger::{Ledger, StepLeases};
use crate::pool_client::PoolClient;
use serde_json::{Value, json};
use sinew_algo::{Algorithm, Columns};
use sinew_orchestrator::{PipelineError, by_group};
use sinew_pipeline::{GroupRequest, SampleSource, SourceGroups};
use sinew_pool::schema::Kind;
use sinew_pool::{Entry, PassedOver};
use sinew_store::{Filter, TraceStore, summaries};
use sinew_types::{EpisodeId, Origin, Trace, mix_seed};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Interval between two requests for groups.
const POLL: Duration = Duration::from_millis(500);

/// Reason why an algorithm cannot train on a group, whatever else is in the batch; `None`: it can.
pub(crate) fn unusable(algorithm: &Algorithm, group: &Vec<Trace>) -> Option<String> {
    if let Err(e) = algorithm.spent(std::slice::from_ref(group)) {
        return Some(e.to_string());
    }
    let by_state = algorithm.needs().states;
    let mut nodes = group.iter().flat_map(|t| &t.nodes);
    let without = by_state && nodes.all(|n| n.state_hash.is_none());
    without.then(|| "it compares states, but no turn has a state_hash".to_owned())
}

/// The groups of stored traces: those of lost episodes, and those that the algorithm cannot use, are dropped.
pub(crate) fn usable_groups(
    algorithm: &Algorithm,
    traces: Vec<Trace>,
    lost: &BTreeSet<EpisodeId>,
) -> SourceGroups {
    let mut given = SourceGroups::default();
    for group in by_group(traces) {
        let reason = match unusable(algorithm, &group) {
            _ if group.iter().any(|t| lost.contains(&t.episode)) => {
                "of a group that went to another trainer".to_owned()
            }
            // Stored for this step by a run whose algorithm was another.
            Some(reason) => format!("of a group that cannot be used: {reason}"),
            None => {
                given.groups.push(group);
                continue;
            }
        };
        let dropped = group.into_iter().map(|t| (t.episode, reason.clone()));
        given.dropped.extend(dropped);
    }
    given
}

/// Settings for a run that draws from a pool.
#[derive(Clone, Debug)]
pub struct PoolSourceConfig {
    /// Folder of the run, which notes what each step leased.
    pub run_dir: PathBuf,
    /// Kind of entries that the algorithm learns from.
    pub kind: Kind,
    /// Maximum wait of a step for its groups.
    pub wait: Duration,
    /// Time for which the pool holds them for this run.
    pub lease_s: f64,
    /// Minimum trajectories of a group that the algorithm can use.
    pub min_group: usize,
}

/// Pool from which a run draws its trajectories.
#[derive(Debug)]
pub struct PoolSource {
    /// The server.
    client: PoolClient,
    /// Same as [`PoolSourceConfig::kind`].
    kind: Kind,
    /// Name under which entries are leased.
    consumer: String,
    /// Maximum wait of a step for enough entries.
    wait: Duration,
    /// Seconds after which leased entries go to others.
    lease_s: f64,
    /// Entries that each step took; a file in the run's folder.
    ledger: Ledger,
    /// Minimum trajectories of a group that the algorithm can use.
    min_group: usize,
    cancel: watch::Receiver<bool>,
    /// Groups that wait at the pool for others, by its last answer.
    passed_over: Mutex<PassedOver>,
}

/// A trajectory's id in the run's own store.
fn own_id(id: &str) -> EpisodeId {
    EpisodeId::new(format!("pool-{id}"))
}

impl PoolSource {
    /// A pool for the run in a folder. The pool identifies the run by the folder's name and a hash of its
    /// path. `cancel` ends a wait.
    ///
    /// # Errors
    /// If there is no such folder.
    pub fn new(
        client: PoolClient,
        config: PoolSourceConfig,
        cancel: watch::Receiver<bool>,
    ) -> Result<Self, PipelineError> {
        let folder = std::fs::canonicalize(&config.run_dir).map_err(PipelineError::system)?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let hash = blake3::hash(folder.as_os_str().as_encoded_bytes());
        Ok(Self {
            client,
            kind: config.kind,
            consumer: format!("{name:.64}-{}", &hash.to_hex()[..12]),
            wait: config.wait,
            lease_s: config.lease_s,
            ledger: Ledger::new(config.run_dir.join("pool.jsonl")),
            min_group: config.min_group,
            cancel,
            passed_over: Mutex::default(),
        })
    }

    /// Draws up to `groups` groups of trajectories for a step: as many as come in time, none if the pool
    /// stays empty. Groups that the algorithm cannot use go to the pool's quarantine, with the reason. The
    /// others belong to the run once it has stored and acknowledged them.
    fn draw(&self, wanted: &GroupRequest<'_>) -> Result<Vec<Trace>, PipelineError> {
        let step = wanted.step;
        if let Some(before) = self.ledger.taken(step)? {
            // Entries that were given out but never stored go back to the pool before anything is drawn.
            self.give_back(&before)?;
        }
        let mut taken = StepLeases {
            step,
            ..StepLeases::default()
        };
        let (mut traces, mut drawn) = (Vec::new(), 0);
        let begun = Instant::now();
        while drawn < wanted.groups {
            let (lease, given) = self.lease(wanted, drawn)?;
            let nothing = given.is_empty();
            let mut ids = Vec::new();
            for group in given {
                let names = group.iter().map(|t| t.episode.0.clone());
                let names: Vec<String> = names.collect();
                if let Some(reason) = unusable(wanted.algorithm, &group) {
                    self.reject(lease, &names, &reason)?;
                    continue;
                }
                let place = drawn as u64;
                drawn += 1;
                ids.extend(names);
                traces.extend(group.into_iter().map(|t| (place, t)));
            }
            if !ids.is_empty() {
                taken.leases.push((lease, ids));
                // The note comes before the next wait, so that a step that is killed in it gives back its
                // leases.
                self.ledger.note(&taken)?;
            }
            if *self.cancel.borrow() {
                self.give_back(&taken)?;
                return Err(PipelineError::Interrupted);
            }
            if nothing {
                if begun.elapsed() >= self.wait {
                    break;
                }
                std::thread::sleep(POLL.min(self.wait));
            }
        }
        let first = (step - 1) * wanted.groups as u64;
        let own = |(place, t): (u64, Trace)| Trace {
            episode: own_id(t.episode.as_str()),
            origin: Origin {
                draw: first + place,
                purpose: "train".into(),
                ..t.origin
            },
            ..t
        };
        Ok(traces.into_iter().map(own).collect())
    }

    /// A lease on groups that are missing, and what it gives; 0 and nothing if none is ready.
    fn lease(
        &self,
        wanted: &GroupRequest<'_>,
        drawn: usize,
    ) -> Result<(u64, Vec<Vec<Trace>>), PipelineError> {
        let step = wanted.step.wrapping_mul(65_537);
        let asked = json!({
            "consumer": self.consumer, "kind": self.kind, "groups": wanted.groups - drawn,
            "ttl_s": self.lease_s, "version": wanted.learner.version(),
            "max_path_tokens": wanted.max_path_tokens, "min_group": self.min_group,
            "seed": mix_seed(wanted.seed, step + drawn as u64),
        });
        let mut loan = self.client.call("POST", "/pool/lease", &asked)?;
        let given: Vec<Vec<Entry>> =
            serde_json::from_value(loan["groups"].take()).map_err(PipelineError::system)?;
        let passed: PassedOver =
            serde_json::from_value(loan["passed_over"].take()).map_err(PipelineError::system)?;
        if let Ok(mut told) = self.passed_over.lock() {
            *told = passed;
        }
        let groups = given.into_iter();
        let groups = groups.map(|g| g.into_iter().map(|e| e.trace).collect());
        Ok((loan["lease"].as_u64().unwrap_or_default(), groups.collect()))
    }

    /// Reports entries that cannot be trained on, with the reason.
    fn reject(&self, lease: u64, ids: &[String], reason: &str) -> Result<(), PipelineError> {
        tracing::error!(
            first = %ids.first().map(String::as_str).unwrap_or_default(), trajectories = ids.len(), reason,
            "a group of the pool cannot be used: it goes to the pool's quarantine"
        );
        let body = json!({"lease": lease, "ids": ids, "reason": reason});
        self.client.call("POST", "/pool/reject", &body)?;
        Ok(())
    }

    /// Releases the leases of a step that is drawn again.
    fn give_back(&self, taken: &StepLeases) -> Result<(), PipelineError> {
        for (lease, ids) in &taken.leases {
            let body = json!({"lease": lease, "ids": ids});
            self.client.call("POST", "/pool/release", &body)?;
        }
        Ok(())
    }

    /// Confirms to the pool that the groups of `step` are stored here. Returns the episodes that went to
    /// another trainer meanwhile; those must not be trained.
    fn acknowledge(&self, step: u64) -> Result<BTreeSet<EpisodeId>, PipelineError> {
        let mut lost = BTreeSet::new();
        let leases = self
            .ledger
            .taken(step)?
            .map(|t| t.leases)
            .unwrap_or_default();
        for (lease, ids) in leases {
            let body = json!({"lease": lease, "ids": ids});
            let told = self.client.call("POST", "/pool/ack", &body)?;
            let ids = told["lost"].as_array().cloned().unwrap_or_default();
            lost.extend(ids.iter().filter_map(Value::as_str).map(own_id));
        }
        Ok(lost)
    }
}

/// Training episodes of `step` that the store holds, where each step has `groups` draws.
pub(crate) fn stored_step(
    store: &dyn TraceStore,
    step: u64,
    groups: u64,
) -> Result<Vec<Trace>, PipelineError> {
    let filter = Filter {
        draws: Some((step - 1) * groups..=(step * groups).saturating_sub(1)),
        purpose: Some("train".into()),
        limit: 1000,
        ..Filter::default()
    };
    let mut traces = Vec::new();
    for e in summaries(store, filter) {
        let trace = e.and_then(|e| store.get(&e.episode));
        traces.extend(trace.map_err(PipelineError::system)?);
    }
    Ok(traces)
}

impl SampleSource for PoolSource {
    fn groups(&mut self, wanted: GroupRequest<'_>) -> Result<SourceGroups, PipelineError> {
        let mut traces = stored_step(wanted.store, wanted.step, wanted.groups as u64)?;
        if traces.is_empty() {
            traces = self.draw(&wanted)?;
            if self.kind != Kind::Rl && !traces.is_empty() {
                let mut groups = match self.kind {
                    Kind::Dpo => by_group(traces),
                    _ => vec![traces],
                };
                let known = Columns::new();
                wanted
                    .learner
                    .score_data(wanted.algorithm, &mut groups, &known)?;
                traces = groups.into_iter().flatten().collect();
            }
            let stored = wanted.store.commit_batch(&traces);
            stored.map_err(PipelineError::system)?;
        }
        // If there are no traces, the entries that the ledger has for the step were given back.
        let lost = if traces.is_empty() {
            BTreeSet::new()
        } else {
            self.acknowledge(wanted.step)?
        };
        Ok(usable_groups(wanted.algorithm, traces, &lost))
    }

    /// Reason why there is nothing more to train on, for users.
    fn why_dry(&self) -> String {
        let passed = self.passed_over.lock().map(|told| *told);
        let PassedOver {
            too_small,
            too_long,
        } = passed.unwrap_or_default();
        let mut why = "the pool had no whole group for this recipe in data.wait_s".to_owned();
        if too_small > 0 {
            let least = self.min_group;
            why += &format!(
                "; {too_small} groups with fewer than {least} trajectories wait there, but this algorithm compares the \
                 trajectories of a group"
            );
        }
        if too_long > 0 {
            why += &format!(
                "; {too_long} groups with paths longer than rollout.max_context_tokens wait there"
            );
        }
        why + "\n  hint: `sinew pool status` tells what waits there"
    }
}
