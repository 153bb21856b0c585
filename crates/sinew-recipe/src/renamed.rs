//! Keys that have another name now, and keys that are gone.
//!
//! A recipe that people write is refused with the new name. A recipe that an earlier version saved
//! with its run is read with the new names, so that the run can be resumed.

use std::ops::Range;
use toml::de::{DeTable, DeValue};

/// A key as earlier versions called it, and its name.
const RENAMED: [(&str, &str); 8] = [
    ("tasks.memory", "tasks.decay"),
    ("train.max_rows", "train.micro_batch_tokens"),
    ("engine.max_running", "engine.max_num_seqs"),
    ("engine.pass_tokens", "engine.max_batched_tokens"),
    ("engine.speculation", "engine.speculative_tokens"),
    ("rollout.admission.kv_room", "rollout.admission.kv_capacity"),
    ("harness.max_live", "harness.max_programs"),
    ("sandbox.max_live", "sandbox.max_sandboxes"),
];

/// Keys that have no successor, and what to do without them.
const REMOVED: [(&str, &str); 8] = [
    ("rollout.admission.growth", CONTROLLER),
    ("rollout.admission.grow_below", CONTROLLER),
    ("rollout.admission.target", CONTROLLER),
    ("rollout.admission.trim_above", CONTROLLER),
    ("rollout.admission.stop_above", CONTROLLER),
    ("rollout.admission.preemption_cut", CONTROLLER),
    ("rollout.admission.escalated_cut", CONTROLLER),
    ("rollout.admission.queue_cut", CONTROLLER),
];

const CONTROLLER: &str =
    "is no key any more: the controller has fixed constants; remove it, or set adaptive = false";

/// The first key of a recipe that has another name or is gone: its place, and what to do.
pub(crate) fn old_key(root: &DeTable<'_>) -> Option<(Range<usize>, String)> {
    let renamed = RENAMED.iter().map(|(old, new)| {
        let message = format!("`{old}` is called `{new}`");
        (old, message)
    });
    let removed = REMOVED.iter().map(|(old, why)| {
        let message = format!("`{old}` {why}");
        (old, message)
    });
    let found = renamed
        .chain(removed)
        .filter_map(|(old, message)| Some((typed(root, old)?.0, message)));
    found.min_by_key(|(span, _)| span.start)
}

/// Where a key such as `train.lora.rank` or `env[1].weight` stands, if it is typed: its name and its value.
pub(crate) fn typed(table: &DeTable<'_>, key: &str) -> Option<(Range<usize>, Range<usize>)> {
    let (name, below) = match key.split_once('.') {
        Some((name, below)) => (name, Some(below)),
        None => (key, None),
    };
    let (name, index) = match name.strip_suffix(']').and_then(|n| n.split_once('[')) {
        Some((name, index)) => (name, Some(index.parse::<usize>().ok()?)),
        None => (name, None),
    };
    let (at, mut value) = table.iter().find(|(k, _)| k.get_ref() == name)?;
    if let (Some(index), DeValue::Array(items)) = (index, value.get_ref()) {
        value = items.get(index)?;
    }
    match (below, value.get_ref()) {
        (None, _) => Some((at.span(), value.span())),
        (Some(below), DeValue::Table(table)) => typed(table, below),
        (Some(_), _) => None,
    }
}

/// A saved recipe with the names of this version; `None` where it has no old ones.
pub(crate) fn upgraded(text: &str) -> Option<String> {
    old_key(DeTable::parse(text).ok()?.get_ref())?;
    let mut table: toml::Table = text.parse().ok()?;
    for (old, new) in RENAMED {
        if let Some(value) = take(&mut table, old) {
            put(&mut table, new, value);
        }
    }
    for (old, _) in REMOVED {
        take(&mut table, old);
    }
    toml::to_string(&table).ok()
}

fn take(table: &mut toml::Table, key: &str) -> Option<toml::Value> {
    match key.split_once('.') {
        None => table.remove(key),
        Some((name, below)) => take(table.get_mut(name)?.as_table_mut()?, below),
    }
}

/// Puts a value where its table is there already.
fn put(table: &mut toml::Table, key: &str, value: toml::Value) {
    match key.split_once('.') {
        None => {
            table.entry(key).or_insert(value);
        }
        Some((name, below)) => {
            let inner = table.get_mut(name).and_then(toml::Value::as_table_mut);
            if let Some(inner) = inner {
                put(inner, below, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn old_key(text: &str) -> Option<(Range<usize>, String)> {
        super::old_key(DeTable::parse(text).unwrap().get_ref())
    }

    #[test]
    fn old_names_are_refused_with_the_new_one_and_their_place() {
        let text = "name = \"t\"\n[train]\nsteps = 3\nmax_rows = 64\n[engine]\npass_tokens = 8\n";
        let (span, message) = old_key(text).unwrap();
        assert_eq!(&text[span], "max_rows");
        assert_eq!(
            message,
            "`train.max_rows` is called `train.micro_batch_tokens`"
        );
        let text = "[rollout.admission]\ngrowth = 2.0\n";
        let (span, message) = old_key(text).unwrap();
        assert_eq!(&text[span], "growth");
        assert!(message.contains("no key any more"), "{message}");
        assert_eq!(
            old_key("max_rows = 64\n[other.train]\nmax_rows = 1\n"),
            None
        );
    }

    #[test]
    fn a_saved_recipe_gets_the_new_names() {
        let old = "[train]\nmax_rows = 64\n[rollout.admission]\nkv_room = false\ngrowth = 2.0\n";
        let new: toml::Table = upgraded(old).unwrap().parse().unwrap();
        let expected =
            "[train]\nmicro_batch_tokens = 64\n[rollout.admission]\nkv_capacity = false\n";
        assert_eq!(new, expected.parse().unwrap());
        assert_eq!(upgraded(expected), None);
    }
}
