//! The judges of a run together: the files of their decisions, and the run that a spent budget ends.

use crate::judge::Judge;
use crate::ledger::{JudgeUsage, Ledger};
use crate::paid::BudgetEnd;
use crate::user::ModelUser;
use std::collections::HashMap;
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
    user: Arc<Mutex<Option<Arc<ModelUser>>>>,
}

sinew_types::debug_fields!(Bench as this, spent = this.spent());

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

    /// The simulated user, which `make` makes where it is first asked for. The environments of a mixture
    /// share it, so that its budget counts once.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn user<E>(
        &self,
        make: impl FnOnce() -> Result<ModelUser, E>,
    ) -> Result<Arc<ModelUser>, E> {
        let mut user = self.user.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(user) = &*user {
            return Ok(Arc::clone(user));
        }
        let made = Arc::new(make()?);
        *user = Some(Arc::clone(&made));
        Ok(made)
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
        named_ledger(&folder.join(format!("{name}.jsonl")))
    }

    /// The ledger of the simulated user, in memory without a run.
    ///
    /// # Errors
    /// Fails as [`Ledger::open`] does; the message names the file.
    pub fn user_ledger(&self) -> io::Result<Ledger> {
        match self.run.as_ref().and_then(|(folder, _)| folder.parent()) {
            Some(run) => named_ledger(&user_file(run)),
            None => Ok(Ledger::in_memory()),
        }
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

/// File with the spending of the simulated user of the run in `dir`.
fn user_file(dir: &Path) -> PathBuf {
    dir.join("user.jsonl")
}

/// Opens a ledger; a failure names its file.
fn named_ledger(path: &Path) -> io::Result<Ledger> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    Ledger::open(path).map_err(named)
}

/// Spending of the simulated user of the run in `dir`, over all its sessions; `None`: it has none.
///
/// # Errors
/// If the file cannot be read.
pub fn user_spent(dir: &Path) -> io::Result<Option<JudgeUsage>> {
    let path = user_file(dir);
    if !path.is_file() {
        return Ok(None);
    }
    Ok(Some(named_ledger(&path)?.spent()))
}
