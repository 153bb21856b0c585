//! Groups that wait for rewards from outside.
//!
//! A group whose episodes have ended waits in [`WaitingGroups`] until every required reward was given, or its
//! time is up. Its traces stay in the store; [`WaitingGroups`] holds only ids, times and versions, and can be
//! rebuilt from the store: every training episode that no commit names is waiting. The fate of a group is a
//! function of the waiting groups, the scores and the time, which is an argument.

use crate::error::PipelineError;
use crate::rows::by_group;
use crate::score_records::{completed, grouped};
use crate::status::{NOT_GIVEN, came_late};
use sinew_env::waits_for_group;
use sinew_store::{Cursor, Filter, MAX_PAGE, ScoreRecord, ScoreRule, TraceStore};
use sinew_types::{EpisodeEnd, EpisodeId, GroupId, Trace};
use std::collections::{BTreeMap, BTreeSet};

/// Purpose of the episodes that may wait for rewards.
const TRAIN: &str = "train";

/// Rule for a group whose rewards arrived after the policy advanced beyond the allowed staleness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StaleGroups {
    /// The group is left out, with the reason.
    Drop,
    /// The group is trained, but at most one such group for each current group of the step.
    Offline,
}

/// Rules for waiting for rewards from outside.
#[derive(Clone, Debug, PartialEq)]
pub struct LateConfig {
    /// Rule that combines the episode's own reward and the later scores into its outcome.
    pub rule: ScoreRule,
    /// Whether an episode without its own reward is scored by the later scores only.
    pub own_if_given: bool,
    /// Seconds to wait after the end of a group's last episode.
    pub wait_s: f64,
    /// Optimizer updates that a group may be behind the policy.
    pub max_staleness: u64,
    /// Rule for groups that are further behind.
    pub after: StaleGroups,
    /// Whether a group is trained, after its waiting time, on those episodes that have their rewards.
    pub partial: bool,
    /// Maximum number of waiting groups; no other group is started while this many wait.
    pub max_waiting: usize,
}

/// A group that waits for rewards.
#[derive(Clone, Debug)]
struct WaitingGroup {
    /// Name of the group, as its traces have it.
    name: GroupId,
    /// Episodes in their order.
    episodes: Vec<EpisodeId>,
    /// Episodes that the system failed, so that they get no reward.
    failed: BTreeSet<EpisodeId>,
    /// End of the last episode, in seconds since 1970.
    ended_s: f64,
    /// The oldest weights version that sampled a token of the group.
    oldest: u64,
    /// Whether the group was handed out to a step; the commit of the step removes it.
    taken: bool,
    /// Whether rewards were missing at the last check.
    pending: bool,
}

/// Groups between their last episode and their commit.
#[derive(Debug)]
pub struct WaitingGroups {
    config: LateConfig,
    groups: BTreeMap<GroupId, WaitingGroup>,
    /// Position of the last score that was read.
    seen: Cursor,
    /// Whether nothing but the time and the policy has changed since the last check.
    quiet: bool,
    /// Version of the policy at the last check.
    version: u64,
}

/// Result of [`WaitingGroups::collect`].
#[derive(Clone, Debug, Default)]
pub struct CollectedGroups {
    /// Groups to train, with the outcomes computed from their scores.
    pub groups: Vec<Vec<Trace>>,
    /// Episodes to leave out, with the reason.
    pub dropped: BTreeMap<EpisodeId, String>,
    /// Number of `groups` that are further behind the policy than allowed ([`StaleGroups::Offline`]).
    pub old: usize,
    /// Number of ready groups that are held back because the step already has a group of that name.
    pub held: usize,
    /// Whether more groups may be started.
    pub may_begin: bool,
}

/// Inputs of [`WaitingGroups::collect`].
#[derive(Clone, Copy, Debug)]
pub struct CollectRequest<'a> {
    /// Seconds since 1970.
    pub now_s: f64,
    /// Version of the policy, in optimizer updates.
    pub version: u64,
    /// Maximum number of groups to return.
    pub most: usize,
    /// Number of groups that the step already has: those within the allowed staleness, and older ones.
    pub given: (usize, usize),
    /// Names of groups that the step already has; no further groups of these names are returned.
    pub names: &'a BTreeSet<GroupId>,
}

/// State of a waiting group.
#[derive(Debug, PartialEq)]
enum Readiness {
    Waiting,
    /// All rewards have arrived; or the waiting time is over, and the episodes with rewards are trained.
    Ready,
    /// The group is left out, for this reason.
    Expired(String),
}

impl WaitingGroups {
    /// Creates the state without groups.
    pub fn new(config: LateConfig) -> Self {
        Self {
            config,
            groups: BTreeMap::new(),
            seen: Cursor::default(),
            quiet: false,
            version: 0,
        }
    }

    /// Restores training episodes that earlier sessions left waiting: those of draws below `draws` that are
    /// not in `settled`. Later draws belong to a step that is started again.
    ///
    /// # Errors
    /// Fails if the store does.
    pub fn restore(
        &mut self,
        store: &dyn TraceStore,
        settled: &BTreeSet<EpisodeId>,
        draws: u64,
    ) -> Result<(), PipelineError> {
        let Some(last) = draws.checked_sub(1) else {
            return Ok(());
        };
        let mut filter = Filter {
            purpose: Some(TRAIN.into()),
            trained: Some(false),
            draws: Some(0..=last),
            limit: MAX_PAGE,
            ..Filter::default()
        };
        loop {
            let page = store.list(&filter).map_err(PipelineError::system)?;
            let open = page
                .episodes
                .iter()
                .filter(|e| !settled.contains(&e.episode));
            let traces = open.map(|e| store.get(&e.episode));
            let traces: Result<Vec<_>, _> = traces.collect();
            let traces = traces.map_err(PipelineError::system)?.into_iter().flatten();
            for group in by_group(traces.collect()) {
                self.join(&group);
            }
            match page.next {
                Some(next) => filter.after = Some(next),
                None => return Ok(()),
            }
        }
    }

    /// Adds the episodes of a group that has ended. A known group stays unchanged.
    pub fn add(&mut self, group: &[Trace]) {
        let Some(first) = group.first() else { return };
        if !self.groups.contains_key(&first.group) {
            self.join(group);
        }
    }

    /// Adds the episodes of a group that has ended as a separate group, even if others have the same name.
    pub fn add_another(&mut self, group: &[Trace]) {
        if let Some(first) = group.first() {
            let place = GroupId::new(first.episode.as_str());
            self.join_at(|_| &place, group);
        }
    }

    /// Adds episodes to their group.
    fn join(&mut self, group: &[Trace]) {
        self.join_at(|trace| &trace.group, group);
    }

    fn join_at<'a>(&mut self, place: impl Fn(&'a Trace) -> &'a GroupId, group: &'a [Trace]) {
        for trace in group {
            let entry = self.groups.entry(place(trace).clone());
            let entry = entry.or_insert_with(|| WaitingGroup {
                name: trace.group.clone(),
                episodes: Vec::new(),
                failed: BTreeSet::new(),
                ended_s: f64::MIN,
                oldest: u64::MAX,
                taken: false,
                pending: true,
            });
            let oldest = trace.oldest_version().map_or(u64::MAX, |v| v.0);
            entry.oldest = entry.oldest.min(oldest);
            let ended_s = trace.timing.started_unix_s + trace.timing.total_s;
            entry.ended_s = entry.ended_s.max(ended_s);
            if matches!(trace.end, EpisodeEnd::Failed { .. }) {
                entry.failed.insert(trace.episode.clone());
            }
            entry.episodes.push(trace.episode.clone());
            entry.pending = true;
        }
        self.quiet = false;
    }

    /// Removes the groups of episodes that a commit trained or left out.
    pub fn settled<'a>(&mut self, episodes: impl IntoIterator<Item = &'a EpisodeId>) {
        let done: BTreeSet<&EpisodeId> = episodes.into_iter().collect();
        let open = |entry: &WaitingGroup| !entry.episodes.iter().any(|e| done.contains(e));
        self.groups.retain(|_, entry| open(entry));
    }

    /// Returns the episodes that no commit names.
    pub fn episodes(&self) -> impl Iterator<Item = &EpisodeId> {
        self.groups.values().flat_map(|g| &g.episodes)
    }

    /// Number of waiting groups, without those that were handed out.
    pub fn waiting(&self) -> usize {
        self.groups.values().filter(|g| !g.taken).count()
    }

    /// Number of waiting groups whose rewards have not arrived.
    pub fn pending(&self) -> usize {
        let pending = |g: &&WaitingGroup| !g.taken && g.pending;
        self.groups.values().filter(pending).count()
    }

    /// Leaves out the oldest groups while more than `max_waiting` wait. This is for callers that cannot stop
    /// new groups from arriving.
    pub fn bound(&mut self, found: &mut CollectedGroups) {
        let most = self.config.max_waiting;
        let order = self.in_order();
        for id in order.iter().take(order.len().saturating_sub(most)) {
            let reason =
                format!("more than {most} groups wait for rewards (reward.late.max_waiting)");
            self.leave_out(id, &reason, found);
        }
    }

    /// Finds groups that can be trained or must be left out. Returns the oldest first.
    ///
    /// # Errors
    /// Fails if the store does.
    pub fn collect(
        &mut self,
        store: &dyn TraceStore,
        request: CollectRequest<'_>,
    ) -> Result<CollectedGroups, PipelineError> {
        let CollectRequest { now_s, most, .. } = request;
        let mut found = CollectedGroups::default();
        let moved = std::mem::replace(&mut self.version, request.version) != request.version;
        if self.changed(store)? || self.due(now_s) || moved {
            let (fresh, old) = self.ready(store, request, &mut found)?;
            let ready = fresh.len() + old.len();
            let mut names = request.names.clone();
            let fresh = self.chosen(fresh, most, &mut names, &mut found.held);
            let others = (request.given.0 + fresh.len()).max(1);
            let replayed = others.saturating_sub(request.given.1);
            let replayed = replayed.min(most - fresh.len());
            let old = self.chosen(old, replayed, &mut names, &mut found.held);
            found.old = old.len();
            self.quiet = ready == fresh.len() + old.len();
            for id in fresh.iter().chain(&old) {
                found
                    .groups
                    .extend(self.hand_out(store, id, &mut found.dropped)?);
            }
        }
        found.may_begin = self.waiting() < self.config.max_waiting;
        Ok(found)
    }

    /// Returns the groups that can be trained: those within the allowed staleness, and separately the older
    /// ones that [`StaleGroups::Offline`] allows. Groups that must be left out are recorded in `found`.
    fn ready(
        &mut self,
        store: &dyn TraceStore,
        request: CollectRequest<'_>,
        found: &mut CollectedGroups,
    ) -> Result<(Vec<GroupId>, Vec<GroupId>), PipelineError> {
        let (mut fresh, mut old) = (Vec::new(), Vec::new());
        for id in self.in_order() {
            let entry = &self.groups[&id];
            let state = self.state(store, entry, request.now_s)?;
            let behind = request.version.saturating_sub(entry.oldest);
            if let Some(entry) = self.groups.get_mut(&id) {
                entry.pending = state == Readiness::Waiting;
            }
            let (most, after) = (self.config.max_staleness, self.config.after);
            match (state, after) {
                (Readiness::Expired(reason), _) => self.leave_out(&id, &reason, found),
                // Rewards would come for nothing: the policy only moves on.
                (_, StaleGroups::Drop) if behind > most => {
                    self.leave_out(&id, &came_late(behind, most), found);
                }
                (Readiness::Waiting, _) => {}
                (Readiness::Ready, StaleGroups::Offline) if behind > most => old.push(id),
                (Readiness::Ready, _) => fresh.push(id),
            }
        }
        Ok((fresh, old))
    }

    /// Chooses at most `most` of the `ready` groups and none of a taken name; counts the latter in `held`.
    fn chosen(
        &self,
        ready: Vec<GroupId>,
        most: usize,
        names: &mut BTreeSet<GroupId>,
        held: &mut usize,
    ) -> Vec<GroupId> {
        let mut chosen = Vec::new();
        for id in ready {
            if names.contains(&self.groups[&id].name) {
                *held += 1;
            } else if chosen.len() < most {
                names.insert(self.groups[&id].name.clone());
                chosen.push(id);
            }
        }
        chosen
    }

    /// Whether a group or a score has arrived since the last check.
    fn changed(&mut self, store: &dyn TraceStore) -> Result<bool, PipelineError> {
        let mut came = !self.quiet;
        loop {
            let page = store.scores_after(self.seen, MAX_PAGE);
            let page = page.map_err(PipelineError::system)?;
            if page.scores.is_empty() {
                return Ok(came);
            }
            came = true;
            self.seen = page.end;
        }
    }

    /// Whether the waiting time of a group is over.
    fn due(&self, now_s: f64) -> bool {
        let mut waiting = self.groups.values().filter(|g| !g.taken);
        waiting.any(|g| now_s >= g.ended_s + self.config.wait_s)
    }

    /// Groups that wait, the oldest first.
    fn in_order(&self) -> Vec<GroupId> {
        let waiting = self.groups.iter().filter(|(_, g)| !g.taken);
        let mut order: Vec<(f64, &GroupId)> = waiting.map(|(id, g)| (g.ended_s, id)).collect();
        order.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(b.1)));
        order.into_iter().map(|(_, id)| id.clone()).collect()
    }

    fn state(
        &self,
        store: &dyn TraceStore,
        entry: &WaitingGroup,
        now_s: f64,
    ) -> Result<Readiness, PipelineError> {
        let (mut missing, mut answered) = (None, 0);
        for episode in entry.episodes.iter().filter(|e| !entry.failed.contains(*e)) {
            let scores = store.scores(episode).map_err(PipelineError::system)?;
            match self.config.rule.awaited(&scores).first() {
                Some(name) => missing = missing.or_else(|| Some((*name).to_owned())),
                None => answered += 1,
            }
        }
        let Some(name) = missing else {
            return Ok(Readiness::Ready);
        };
        if now_s < entry.ended_s + self.config.wait_s {
            return Ok(Readiness::Waiting);
        }
        Ok(if self.config.partial && answered > 0 {
            Readiness::Ready
        } else {
            Readiness::Expired(format!(
                "{NOT_GIVEN}{name}: not given within {} s",
                self.config.wait_s
            ))
        })
    }

    /// Marks a group as handed out, with all of its episodes left out.
    fn leave_out(&mut self, id: &GroupId, reason: &str, found: &mut CollectedGroups) {
        if let Some(entry) = self.groups.get_mut(id) {
            entry.taken = true;
            let episodes = entry.episodes.iter().cloned();
            found
                .dropped
                .extend(episodes.map(|e| (e, reason.to_owned())));
        }
    }

    /// Marks a group as handed out and reads its traces, with the outcomes computed from the scores. Episodes
    /// that garbage collection removed in the meantime are left out.
    fn hand_out(
        &mut self,
        store: &dyn TraceStore,
        id: &GroupId,
        dropped: &mut BTreeMap<EpisodeId, String>,
    ) -> Result<Option<Vec<Trace>>, PipelineError> {
        let Some(entry) = self.groups.get_mut(id) else {
            return Ok(None);
        };
        entry.taken = true;
        let mut group = Vec::new();
        for episode in &entry.episodes {
            match store.get(episode).map_err(PipelineError::system)? {
                Some(trace) => {
                    let mut trace = completed(store, trace)?;
                    let scores = store.scores(episode).map_err(PipelineError::system)?;
                    score(&self.config, &mut trace, &scores);
                    group.push(trace);
                }
                None => {
                    dropped.insert(episode.clone(), "no longer in the store".into());
                }
            }
        }
        Ok((!group.is_empty()).then_some(group))
    }
}

/// Sets the outcome of an episode from its scores. An episode that the system failed stays unchanged.
fn score(config: &LateConfig, trace: &mut Trace, scores: &[ScoreRecord]) {
    if matches!(trace.end, EpisodeEnd::Failed { .. }) {
        return;
    }
    trace.outcome = if config.own_if_given && trace.outcome.unscored {
        ScoreRule {
            own: None,
            ..config.rule.clone()
        }
        .outcome(trace, scores)
    } else {
        config.rule.outcome(trace, scores)
    };
}

/// Sets the outcome of a stored episode: its own reward, completed by the score of its group and by rewards
/// from outside. `late` holds the rules of the episode's run; only training episodes use them.
///
/// Returns whether a score is still waited for. Then the episode is unscored.
pub fn settle(trace: &mut Trace, records: &[ScoreRecord], late: Option<&LateConfig>) -> bool {
    trace.outcome = grouped(trace, records);
    let mut waits = waits_for_group(&trace.outcome);
    let trains = trace.origin.purpose == TRAIN && !matches!(trace.end, EpisodeEnd::Failed { .. });
    if let Some(late) = late.filter(|_| trains) {
        waits |= !late.rule.awaited(records).is_empty();
        score(late, trace, records);
    }
    waits && trace.outcome.unscored
}
