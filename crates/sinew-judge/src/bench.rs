//! The judges of a run together: the files of their decisions, and the run that a spent budget ends.

use crate::judge::{BudgetEnd, Judge};
use crate::ledger::Ledger;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tokio::sync::watch;

/// The judges of a run. A bench without a run keeps nothing, and a spent budget leaves samples unscored.
#[derive(Clone, Default)]
pub struct Bench {
    run: Option<(PathBuf, watch::Sender<bool>)>,
    spent: Arc<OnceLock<String>>,
    judges: Arc<Mutex<HashMap<String, Arc<Judge>>>>,
}

impl fmt::Debug for Bench {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bench")
            .field("spent", &self.spent())
            .finish_non_exhaustive()
    }
}

impl Bench {
    /// The judges of the run in `dir`, which ends once `stop` is true. Verdicts go to `DIR/judges`.
    pub fn of_run(dir: &Path, stop: watch::Sender<bool>) -> Self {
        Self {
            run: Some((dir.join("judges"), stop)),
            ..Self::default()
        }
    }

    /// The judge `name`, which `make` makes where it is first asked for. The environments of a mixture share
    /// it, so that its budget counts once, and equal questions are asked once.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn judge<E>(
        &self,
        name: &str,
        make: impl FnOnce() -> Result<Judge, E>,
    ) -> Result<Arc<Judge>, E> {
        // The table is whole at every step, also after a panic of `make`.
        let mut judges = self.judges.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(judge) = judges.get(name) {
            return Ok(Arc::clone(judge));
        }
        let judge = Arc::new(make()?);
        judges.insert(name.to_owned(), Arc::clone(&judge));
        Ok(judge)
    }

    /// The budget that ended the run, if one did.
    pub fn spent(&self) -> Option<&str> {
        self.spent.get().map(String::as_str)
    }

    /// The ledger of the judge `name`, in memory without a run.
    ///
    /// # Errors
    /// Fails as [`Ledger::open`] does; the message names the file.
    pub fn ledger(&self, name: &str) -> io::Result<Ledger> {
        let Some((folder, _)) = &self.run else {
            return Ok(Ledger::in_memory());
        };
        let path = folder.join(format!("{name}.jsonl"));
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        Ledger::open(&path).map_err(named)
    }

    /// Reaction to a spent budget: it ends the run, and the first reason is kept. Samples are unscored
    /// without a run.
    pub fn exhausted(&self) -> BudgetEnd {
        let Some((_, stop)) = &self.run else {
            return BudgetEnd::Unscored;
        };
        let (stop, spent) = (stop.clone(), Arc::clone(&self.spent));
        BudgetEnd::Stop(Arc::new(move |why| {
            // The first one counts; the others follow from it.
            let _ = spent.set(why.to_owned());
            stop.send_replace(true);
        }))
    }
}
