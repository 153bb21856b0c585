//! Stores in databases: that of a run, by its recipe, and any by its address.
//!
//! The folder of a run keeps the random name of its store, so that a run cannot go on with the store of
//! another one that has the same name in the same database.

use crate::failure::Failure;
use crate::token::first_line;
use sinew_recipe::StorePlan;
use sinew_store::TraceStore;
use std::path::Path;
use std::sync::Arc;

/// Address of a store in a database, and of its payloads.
#[cfg_attr(
    not(feature = "databases"),
    expect(dead_code, reason = "only the feature reads it")
)]
pub(crate) struct DatabasePlace {
    /// May contain a password.
    pub(crate) url: String,
    pub(crate) name: String,
    pub(crate) payloads: Option<String>,
}

/// Whether a store that is not there is begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    Yes,
    No,
}

/// The store of a run in a database, for the run itself, which begins it.
///
/// # Errors
/// If the database cannot be reached, or holds the store of another run under that name.
pub(crate) fn store_of(plan: &StorePlan, dir: &Path) -> Result<Arc<dyn TraceStore>, Failure> {
    opened(&place_of(plan, dir)?, Some(dir), Begin::Yes)
}

/// The store of a run in a database, which the run began before. Opening it writes nothing.
///
/// # Errors
/// If the database cannot be reached, or has not the store that the folder of the run names.
pub(crate) fn begun_store_of(plan: &StorePlan, dir: &Path) -> Result<Arc<dyn TraceStore>, Failure> {
    opened(&place_of(plan, dir)?, Some(dir), Begin::No)
}

fn place_of(plan: &StorePlan, dir: &Path) -> Result<DatabasePlace, Failure> {
    let url = match (&plan.url, &plan.url_file) {
        (Some(url), _) => url.clone(),
        (None, Some(file)) => first_line("store.url_file", Path::new(file))?,
        (None, None) => return Err(Failure::input("store.url is missing")),
    };
    Ok(DatabasePlace {
        url,
        name: plan.name.clone().unwrap_or_else(|| folder_name(dir)),
        payloads: plan.payloads.clone(),
    })
}

/// Name of a store in a database, from the folder of its run: other characters than letters, digits, - and _
/// become -.
pub(crate) fn folder_name(dir: &Path) -> String {
    // `.` has a name, too.
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let name: String = name
        .chars()
        .map(|c| if fits(c) { c } else { '-' })
        .collect();
    if name.is_empty() {
        "run".into()
    } else {
        name.chars().take(48).collect()
    }
}

/// Opens a store, and compares it with the one that the folder of a run names.
#[cfg(feature = "databases")]
pub(crate) fn opened(
    place: &DatabasePlace,
    run: Option<&Path>,
    begin: Begin,
) -> Result<Arc<dyn TraceStore>, Failure> {
    let store = server::open(place, begin)?;
    if let Some(dir) = run {
        server::check_identity(&store, dir)?;
    }
    Ok(Arc::new(store))
}

#[cfg(not(feature = "databases"))]
pub(crate) fn opened(
    _: &DatabasePlace,
    _: Option<&Path>,
    _: Begin,
) -> Result<Arc<dyn TraceStore>, Failure> {
    Err(crate::levels::missing_feature("store.type = \"postgres\"", "databases").into())
}

/// Records the name of a store in the folder of a run whose episodes were copied into it.
#[cfg(feature = "databases")]
pub(crate) fn adopt(place: &DatabasePlace, dir: &Path) -> Result<(), Failure> {
    let store = server::open(place, Begin::No)?;
    server::write_identity(&store, dir)
}

#[cfg(not(feature = "databases"))]
pub(crate) fn adopt(place: &DatabasePlace, dir: &Path) -> Result<(), Failure> {
    opened(place, Some(dir), Begin::No).map(drop)
}

#[cfg(feature = "databases")]
mod server {
    use super::{Begin, DatabasePlace};
    use crate::failure::Failure;
    use sinew_database::{Address, DatabaseOptions, Payloads, PostgresStore, ServerKind};
    use sinew_runs::store_id_path;
    use sinew_store::{StoreError, TraceStore};
    use std::io::ErrorKind;
    use std::path::Path;

    pub(super) fn open(place: &DatabasePlace, begin: Begin) -> Result<PostgresStore, Failure> {
        let asked = match begin {
            Begin::Yes => "may this user create schemas?",
            Begin::No => {
                "is the name that of the store? Without store.name it is that of the run's folder."
            }
        };
        let failed = |e: StoreError| match e {
            e @ StoreError::Server { .. } => Failure::outside(format!(
                "{e}\n  hint: is PostgreSQL running there, and {asked} Its password: PGPASSWORD"
            )),
            other => Failure::input(format!("store: {other}")),
        };
        let address = Address::new(&place.url, None).map_err(failed)?;
        if address.kind() != ServerKind::Postgres {
            return Err(Failure::input(format!(
                "{}: stores are in PostgreSQL\n  hint: postgres://USER@HOST/DATABASE",
                address.shown()
            )));
        }
        let payloads = place.payloads.as_deref().map(Payloads::open).transpose();
        let payloads = payloads.map_err(|e| Failure::input(format!("store.payloads: {e}")))?;
        let (name, usual) = (&place.name, DatabaseOptions::default());
        let opened = match begin {
            Begin::Yes => PostgresStore::open(&address, name, payloads, usual),
            Begin::No => {
                // A command can be typed again: it does not wait long for a server that was lost.
                let options = DatabaseOptions {
                    patience: usual.first_patience,
                    ..usual
                };
                PostgresStore::existing(&address, name, payloads, options)
            }
        };
        opened.map_err(failed)
    }

    pub(super) fn check_identity(store: &PostgresStore, dir: &Path) -> Result<(), Failure> {
        let file = store_id_path(dir);
        match std::fs::read_to_string(&file) {
            Ok(known) if known.trim() == store.identity() => Ok(()),
            Ok(_) => Err(Failure::input(format!(
                "{} is another store than the one that this run began with\n  hint: restore store.url and store.name; \
                 {} names the store",
                store.shown(),
                file.display()
            ))),
            Err(e) if e.kind() == ErrorKind::NotFound => {
                let stats = store.stats().map_err(Failure::outside)?;
                let fence = store.newest_fence().map_err(Failure::outside)?;
                if stats.episodes + stats.collected + stats.batches + fence > 0 {
                    return Err(Failure::input(format!(
                        "{} holds the episodes of another run\n  hint: give this run another store.name",
                        store.shown()
                    )));
                }
                write_identity(store, dir)
            }
            Err(e) => Err(Failure::system(format!("{}: {e}", file.display()))),
        }
    }

    pub(super) fn write_identity(store: &PostgresStore, dir: &Path) -> Result<(), Failure> {
        let file = store_id_path(dir);
        let text = format!("{}\n", store.identity());
        sinew_runs::write_atomic(&file, text.as_bytes())
            .map_err(|e| Failure::system(format!("{}: {e}", file.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_folders_become_names_of_schemas() {
        for (folder, name) in [
            ("runs/quickstart", "quickstart"),
            ("runs/my run.2", "my-run-2"),
            ("/", "run"),
        ] {
            assert_eq!(folder_name(Path::new(folder)), name);
        }
        assert_eq!(folder_name(Path::new(&"x".repeat(99))).len(), 48);
    }
}
