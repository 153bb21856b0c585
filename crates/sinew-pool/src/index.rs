//! The rows by group, without their contents: waiting and complete groups.
//!
//! A key of a row is its content hash and its id, so that equal pushes are found without a read. The index
//! holds for each group the kind, the task type, the number of rows, their sizes, rewards and versions, and
//! the time of the oldest row.

use crate::check::{Entry, longest_path};
use crate::schema::Kind;
use sinew_algo::{AdaptiveConfig, Estimates, unit};
use sinew_types::{PolicyVersion, mix_seed};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A row's key in the queue: the content's hash and the id.
pub(crate) fn key(hash: &str, id: &str) -> String {
    format!("{hash}:{id}")
}

/// Hash and id of a key.
pub(crate) fn parts(key: &str) -> (&str, &str) {
    key.split_once(':').unwrap_or(("", key))
}

/// A row that is not acknowledged.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// Key in the queue.
    pub(crate) key: String,
    pub(crate) success: bool,
    pub(crate) reward: f64,
    /// Oldest version of its sampled tokens.
    pub(crate) oldest: PolicyVersion,
    /// Stored size.
    pub(crate) bytes: u64,
    /// Tokens of its longest path.
    pub(crate) path_tokens: usize,
}

/// Rows whose rewards are compared.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) task_kind: String,
    /// Number of rows that make it complete.
    pub(crate) size: u32,
    /// Seconds since 1970 at which its first row was admitted.
    pub(crate) since_s: f64,
    /// Whether it has been complete; acknowledged rows leave it.
    pub(crate) whole: bool,
    pub(crate) rows: Vec<Row>,
}

/// Kind and name of a group.
pub(crate) type GroupKey = (Kind, String);

/// All rows that are not acknowledged, by group, and all known ids.
#[derive(Debug, Default)]
pub(crate) struct Index {
    /// Hash of the contents by id, acknowledged rows included.
    pub(crate) ids: HashMap<String, String>,
    /// Groups by their place in the order of arrival.
    pub(crate) groups: BTreeMap<u64, (GroupKey, Group)>,
    /// Places of the groups that are still incomplete.
    open: HashMap<GroupKey, u64>,
    /// Last place that was given.
    next: u64,
}

impl Index {
    /// Adds a row to its group. A row for a group that is complete begins another group of the same
    /// name.
    pub(crate) fn add(&mut self, entry: &Entry, bytes: u64) {
        let trace = &entry.trace;
        let id = trace.episode.as_str();
        self.ids.insert(id.to_owned(), entry.hash.clone());
        let name = (entry.kind, trace.group.as_str().to_owned());
        let seq = self.open.get(&name).copied().unwrap_or_else(|| {
            self.next += 1;
            self.open.insert(name.clone(), self.next);
            self.next
        });
        let (_, group) = self.groups.entry(seq).or_insert_with(|| {
            let group = Group {
                task_kind: trace.task_kind.clone(),
                size: entry.group_size,
                since_s: entry.admitted_unix_s,
                whole: false,
                rows: Vec::new(),
            };
            (name.clone(), group)
        });
        group.size = group.size.max(entry.group_size);
        group.rows.push(Row {
            key: key(&entry.hash, id),
            success: trace.outcome.success,
            reward: trace.total_reward(),
            oldest: trace.oldest_version().unwrap_or_default(),
            bytes,
            path_tokens: longest_path(&trace.nodes),
        });
        // A later row of the same name begins another group.
        group.whole = group.rows.len() >= group.size as usize;
        if group.whole {
            self.open.remove(&name);
        }
    }

    /// Ids that are not known, and the keys of the others.
    pub(crate) fn keys(&self, ids: &[String]) -> (Vec<String>, Vec<String>) {
        let (mut unknown, mut keys) = (Vec::new(), Vec::new());
        for id in ids {
            match self.ids.get(id) {
                Some(hash) => keys.push(key(hash, id)),
                None => unknown.push(id.clone()),
            }
        }
        (unknown, keys)
    }

    /// Forgets a group; its ids stay known.
    pub(crate) fn remove(&mut self, seq: u64) -> Option<(GroupKey, Group)> {
        let removed = self.groups.remove(&seq)?;
        if self.open.get(&removed.0) == Some(&seq) {
            self.open.remove(&removed.0);
        }
        Some(removed)
    }

    /// Forgets a row.
    pub(crate) fn drop_row(&mut self, key: &str) {
        let holds = |g: &Group| g.rows.iter().any(|r| r.key == key);
        let found = self.groups.iter().find(|(_, (_, g))| holds(g));
        let Some(seq) = found.map(|(seq, _)| *seq) else {
            return;
        };
        if let Some((_, group)) = self.groups.get_mut(&seq) {
            group.rows.retain(|r| r.key != key);
            if group.rows.is_empty() {
                self.remove(seq);
            }
        }
    }
}

/// Selects up to `count` of the `ready` groups (place, group): in their order, or by what there is
/// to learn from their task types, as estimated from the waiting rows.
pub(crate) fn draw(
    adaptive: Option<&AdaptiveConfig>,
    ready: &[(u64, &Group)],
    seed: u64,
    count: usize,
) -> Vec<u64> {
    let Some(config) = adaptive else {
        return ready.iter().take(count).map(|(seq, _)| *seq).collect();
    };
    let mut estimates = Estimates::default();
    let rows = ready.iter().flat_map(|(_, g)| {
        let one = |r: &Row| (g.task_kind.as_str(), r.success, r.reward);
        g.rows.iter().map(one).collect::<Vec<_>>()
    });
    estimates.update(config, rows);
    let mut waiting: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
    for (seq, group) in ready {
        let kind = waiting.entry(&group.task_kind).or_default();
        kind.insert(*seq);
    }
    let mut drawn = Vec::new();
    while drawn.len() < count {
        let kinds: Vec<&str> = waiting.keys().copied().collect();
        let uniform = unit(mix_seed(seed, drawn.len() as u64));
        let Some(kind) = estimates.draw(config, &kinds, uniform).map(|i| kinds[i]) else {
            break;
        };
        let Some(groups) = waiting.get_mut(kind) else {
            break;
        };
        drawn.extend(groups.pop_first());
        if groups.is_empty() {
            waiting.remove(kind);
        }
    }
    drawn
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(task_kind: &str, successes: &[bool]) -> Group {
        let row = |success: &bool| Row {
            key: String::new(),
            success: *success,
            reward: f64::from(u8::from(*success)),
            oldest: PolicyVersion(0),
            bytes: 0,
            path_tokens: 0,
        };
        Group {
            task_kind: task_kind.into(),
            size: 1,
            since_s: 0.0,
            whole: true,
            rows: successes.iter().map(row).collect(),
        }
    }

    #[test]
    fn adaptive_draws_prefer_what_teaches_and_give_each_group_once() {
        let mut groups: Vec<Group> = (0..200).map(|_| group("solved", &[true; 4])).collect();
        groups.extend((0..200).map(|_| group("half", &[true, false])));
        let ready: Vec<_> = groups
            .iter()
            .enumerate()
            .map(|(i, g)| (i as u64, g))
            .collect();
        let config = AdaptiveConfig::default();
        let drawn = draw(Some(&config), &ready, 7, 100);
        assert_eq!(drawn, draw(Some(&config), &ready, 7, 100));
        assert_ne!(drawn, draw(Some(&config), &ready, 8, 100));
        let half: Vec<u64> = drawn.iter().copied().filter(|s| *s >= 200).collect();
        assert!(half.len() > 70 && half.len() < 100, "{}", half.len());
        // The oldest of a type first.
        let expected: Vec<u64> = (200..200 + half.len() as u64).collect();
        assert_eq!(half, expected);
        let all: BTreeSet<u64> = draw(Some(&config), &ready, 7, 1000).into_iter().collect();
        assert_eq!(all.len(), 400);
        assert_eq!(draw(None, &ready, 7, 3), [0, 1, 2]);
    }
}
