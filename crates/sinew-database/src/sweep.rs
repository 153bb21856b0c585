//! Deletes objects that no episode refers to: media of removed episodes, and what a crash left between an
//! object and its row.
//!
//! Names of objects have an epoch. A sweep that has something to delete begins another one first. A commit
//! checks the epoch of its objects in its transaction, and writes them again under the newer one if it has
//! passed. So objects of past epochs lose references and never gain any: what is found without one stays so,
//! also while other processes commit. A sweep that was cut short is taken up by another.

use crate::connection::{Fault, Postgres};
use crate::payloads::{Payloads, StoredObject};
use sinew_store::{StoreError, Sweep, SweepReport};
use std::collections::HashSet;
use tokio_postgres::{Client, Row};

/// Epoch in the name of an object.
fn epoch_of(name: &str) -> Option<i64> {
    name.split('/').nth(1)?.parse().ok()
}

/// Deletes the objects of a store that `sweep` selects, or only lists them. `next_epoch` begins another
/// epoch and returns it.
pub(crate) fn run(
    postgres: &Postgres,
    payloads: &Payloads,
    store: &str,
    sweep: &Sweep<'_>,
    next_epoch: impl Fn() -> Result<i64, StoreError>,
) -> Result<SweepReport, StoreError> {
    let (mut report, mut after, mut current) = (SweepReport::default(), String::new(), None);
    loop {
        let mut page = payloads.list(store, &after)?;
        let Some(last) = page.last() else {
            return Ok(report);
        };
        after.clone_from(&last.name);
        page.retain(|o| o.written_unix_s < sweep.before_unix_s && epoch_of(&o.name).is_some());
        let mut idle = unused(postgres, page, sweep)?;
        if idle.is_empty() {
            continue;
        }
        if !sweep.dry_run {
            let epoch = match current {
                Some(epoch) => epoch,
                None => *current.insert(next_epoch()?),
            };
            idle.retain(|o| epoch_of(&o.name).is_some_and(|of| of < epoch));
            // A commit may have named one before the epoch began.
            idle = unused(postgres, idle, sweep)?;
            let names: Vec<String> = idle.iter().map(|o| o.name.clone()).collect();
            payloads.delete(&names)?;
        }
        idle.into_iter().for_each(|o| report.add(o.name, o.bytes));
    }
}

/// Those of some objects that no episode refers to, except for those that count as gone.
fn unused(
    postgres: &Postgres,
    objects: Vec<StoredObject>,
    sweep: &Sweep<'_>,
) -> Result<Vec<StoredObject>, StoreError> {
    if objects.is_empty() {
        return Ok(objects);
    }
    let names: Vec<&str> = objects.iter().map(|o| o.name.as_str()).collect();
    let gone: Vec<&str> = sweep.gone.iter().map(|e| e.as_str()).collect();
    let used: HashSet<String> = postgres.run(async |client: &mut Client| {
        let sql = "SELECT object FROM episodes WHERE object = ANY($1) AND episode <> ALL($2) \
                   UNION SELECT m.object FROM media m JOIN episodes e ON e.seq = m.seq \
                   WHERE m.object = ANY($1) AND e.episode <> ALL($2)";
        let rows = client.query(sql, &[&names, &gone]).await?;
        let name = |row: &Row| Ok::<String, Fault>(row.try_get(0)?);
        rows.iter().map(name).collect()
    })?;
    let unused = objects.into_iter().filter(|o| !used.contains(&o.name));
    Ok(unused.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_with_an_epoch_belong_to_a_store() {
        assert_eq!(epoch_of("s/12/ab/x"), Some(12));
        for other in ["s", "s/ab/x", "s//x"] {
            assert_eq!(epoch_of(other), None, "{other}");
        }
    }
}
