//! Resident memory of this process and of all its children, which are the workers.

use crate::{BenchError, machine};
use std::collections::{BTreeMap, BTreeSet};

/// Resident bytes of this process and its descendants. Pages that several of them share count for each.
pub(super) fn resident() -> Result<f64, BenchError> {
    let mut parents = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").map_err(BenchError::system)? {
        let name = entry.map_err(BenchError::system)?.file_name();
        let Some(pid) = name.to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        // A process that has ended meanwhile holds nothing.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        if let Some(parent) = parent(&stat) {
            parents.insert(pid, parent);
        }
    }
    let family = family(&parents, std::process::id());
    let bytes = family.iter();
    let bytes = bytes.map(|pid| machine::resident_memory(&pid.to_string()).unwrap_or_default());
    Ok(bytes.sum())
}

/// The parent of a process, by its line of proc_pid_stat(5).
fn parent(stat: &str) -> Option<u32> {
    let fields = stat.rsplit_once(") ")?.1;
    fields.split(' ').nth(1)?.parse().ok()
}

/// A process and all that descend from it.
fn family(parents: &BTreeMap<u32, u32>, root: u32) -> BTreeSet<u32> {
    let mut found = BTreeSet::from([root]);
    loop {
        let more = parents.iter().filter(|(_, up)| found.contains(up));
        let more: Vec<u32> = more.map(|(pid, _)| *pid).collect();
        let known = found.len();
        found.extend(more);
        if found.len() == known {
            return found;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_of_children_count_and_others_do_not() {
        assert_eq!(parent("7 (a b) c) S 3 7 7 0"), Some(3));
        assert_eq!(parent(""), None);
        let parents = BTreeMap::from([(2, 1), (3, 2), (4, 3), (5, 1), (6, 5)]);
        assert_eq!(family(&parents, 2), BTreeSet::from([2, 3, 4]));
        let before = resident().unwrap();
        let held = vec![1u8; 64 << 20];
        let after = resident().unwrap();
        assert!(
            after - before > f64::from(32 << 20),
            "{before} {after} {}",
            held.len()
        );
    }
}
