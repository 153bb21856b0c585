//! Finds the keys of a recipe in its text.

use std::ops::Range;
use toml::de::{DeTable, DeValue};

/// Finds a key such as `train.lora.rank` or `env[1].weight` in the text. Returns the ranges of its name and
/// its value.
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
