//! Copies of stores between folders and databases: `sinew runs copy`.

use crate::database::{Begin, DatabasePlace, adopt, folder_name, opened};
use crate::failure::Failure;
use crate::store::{database_of, disk_store};
use crate::token::{first_line, refuse_password};
use sinew_runs::store_path;
use sinew_store::{CopyError, CopyProgress, CopyReport, StoreError, TraceStore, copy};
use sinew_types::is_database;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A store to copy from or into, as it is typed.
#[derive(Clone, Debug)]
pub struct StorePlace {
    /// Folder of a run or of a store, or the address of a database with `#NAME` of the store.
    pub place: String,
    /// File with the address, which may contain a password there.
    pub url_file: Option<PathBuf>,
    /// Place of the traces of a store in a database.
    pub payloads: Option<String>,
}

/// A store and what it is.
enum Opened {
    Folder(PathBuf),
    Database(DatabasePlace),
}

impl StorePlace {
    /// Reads the place. `other` is the folder on the other side of the copy, whose name a store in a database
    /// takes if it is not given.
    fn read(&self, other: &str) -> Result<Opened, Failure> {
        let typed = match &self.url_file {
            Some(file) => first_line("--url-file", file)?,
            None => self.place.clone(),
        };
        if !is_database(&typed) {
            if self.payloads.is_some() {
                return Err(Failure::input(
                    "--payloads is a place of a store in a database, and both places are folders",
                ));
            }
            return Ok(Opened::Folder(PathBuf::from(typed)));
        }
        if self.url_file.is_none() {
            refuse_password("the address", &typed)?;
        }
        if let Some(place) = self
            .payloads
            .as_deref()
            .filter(|p| !p.starts_with("file://"))
        {
            refuse_password("--payloads", place)?;
        }
        let (url, name) = match typed.rsplit_once('#') {
            Some((url, name)) => (url.to_owned(), name.to_owned()),
            None => (typed, folder_name(Path::new(other))),
        };
        Ok(Opened::Database(DatabasePlace {
            url,
            name,
            payloads: self.payloads.clone(),
        }))
    }
}

/// The folder of a store: that of a run has it inside.
fn folder_of(place: &Path) -> PathBuf {
    let inside = store_path(place);
    if inside.is_dir() || place.join("recipe.toml").is_file() {
        inside
    } else {
        place.to_owned()
    }
}

/// Opens a target, which may be new.
fn target_of(place: &Opened) -> Result<Arc<dyn TraceStore>, Failure> {
    match place {
        Opened::Database(place) => opened(place, None, Begin::Yes),
        Opened::Folder(folder) => writable(&folder_of(folder)),
    }
}

/// Opens a source, which must be there.
fn source_of(place: &Opened) -> Result<Arc<dyn TraceStore>, Failure> {
    match place {
        Opened::Database(place) => opened(place, None, Begin::No),
        Opened::Folder(folder) => {
            if let Some(store) = database_of(folder)? {
                return Ok(store);
            }
            let path = folder_of(folder);
            if !path.join("segments").is_dir() {
                return Err(Failure::input(format!(
                    "{} holds no store\n  hint: give the folder of a run, or postgres://HOST/DATABASE#NAME",
                    folder.display()
                )));
            }
            writable(&path)
        }
    }
}

fn writable(folder: &Path) -> Result<Arc<dyn TraceStore>, Failure> {
    let store = disk_store(folder, false).map_err(|e| match e {
        StoreError::Locked { .. } => Failure::input(format!(
            "{e}\n  hint: end the run first; what it stores during a copy would be missing"
        )),
        other => Failure::input(other),
    })?;
    Ok(Arc::new(store))
}

/// Copies a store, and takes up a copy that was cut short. The folder of a run that was copied into a
/// database then names that store, so that the run can continue there.
///
/// # Errors
/// If a place cannot be opened, the target holds other data, or the stores differ in the end.
pub fn copy_store(
    from: &StorePlace,
    to: &StorePlace,
    tell: &mut dyn FnMut(CopyProgress),
) -> Result<CopyReport, Failure> {
    let (source, target) = (from.read(&to.place)?, to.read(&from.place)?);
    let report = copy(
        source_of(&source)?.as_ref(),
        target_of(&target)?.as_ref(),
        tell,
    );
    let report = report.map_err(|e| match e {
        CopyError::OtherData { .. } => Failure::input(e),
        CopyError::Store(StoreError::Server { .. }) => Failure::outside(e),
        other => Failure::system(other),
    })?;
    if let (Opened::Folder(folder), Opened::Database(place)) = (&source, &target)
        && folder.join("recipe.toml").is_file()
    {
        adopt(place, folder)?;
    }
    Ok(report)
}
