//! The runs that a dashboard shows: their folders, and the records that were read.
//!
//! Files of records are read on from the end of the last reading, as a run appends whole lines. A resumed run
//! may write a file again: then it is read from its start.

use crate::error::{NoRenderer, NoStore, ViewError};
use crate::series::{Spread, pooled};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sinew_env::Registry;
use sinew_orchestrator::{EvalRecord, StepRecord, Verdict};
use sinew_recipe::RunPlan;
use sinew_render::Renderer;
use sinew_runs::{holds_run, keeps_episodes, process_of};
use sinew_store::StoreReader;
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Runs that are shown at most.
pub(crate) const MAX_RUNS: usize = 500;
/// Steps at the end of a run whose training episodes its row shows.
const RECENT: usize = 5;

/// Makes the tokenizer of a run from its folder and recipe.
pub type OpenRenderer =
    dyn Fn(&Path, &RunPlan) -> Result<Arc<dyn Renderer>, NoRenderer> + Send + Sync;
/// Config of a run's rewards from outside.
pub type LateOf = dyn Fn(&RunPlan) -> Option<sinew_orchestrator::LateConfig> + Send + Sync;

/// Opens the store of a run's folder for reading.
pub type OpenStore = dyn Fn(&Path) -> Result<StoreReader, NoStore> + Send + Sync;

/// Functions that the wiring of the program provides.
#[derive(Clone)]
pub struct Ports {
    /// Stores of episodes.
    pub store: Arc<OpenStore>,
    /// Tokenizers.
    pub renderer: Arc<OpenRenderer>,
    /// Rewards from outside.
    pub late: Arc<LateOf>,
    /// Environments that recipes can name.
    pub environments: Registry,
}

sinew_types::debug_fields!(Ports);

/// Folders of runs, or folders that hold such folders.
#[derive(Debug)]
pub(crate) struct Runs {
    /// Folders as they were named.
    roots: Vec<PathBuf>,
    /// Ports of every run.
    ports: Ports,
    /// Runs that were found, by name. A name stays with its folder as long as the server runs.
    open: Mutex<BTreeMap<String, Arc<Run>>>,
}

impl Runs {
    /// Creates the list without reading anything.
    pub(crate) fn new(roots: Vec<PathBuf>, ports: Ports) -> Self {
        Self {
            roots,
            ports,
            open: Mutex::default(),
        }
    }

    /// Returns all runs by name, in order, including those that began since the last call.
    pub(crate) fn all(&self) -> Vec<Arc<Run>> {
        let mut open = lock(&self.open);
        for path in self.folders() {
            if open.len() == MAX_RUNS || open.values().any(|run| run.path == path) {
                continue;
            }
            let name = free_name(&path, &open);
            let run = Run::new(name.clone(), path, self.ports.clone());
            open.insert(name, Arc::new(run));
        }
        open.retain(|_, run| holds_run(&run.path));
        open.values().cloned().collect()
    }

    /// A run by its name. One that began a moment ago is found, too.
    ///
    /// # Errors
    /// If there is no such run.
    pub(crate) fn get(&self, name: &str) -> Result<Arc<Run>, ViewError> {
        let found = lock(&self.open).get(name).cloned();
        let found = found.or_else(|| self.all().into_iter().find(|run| run.name == name));
        found.ok_or_else(|| {
            ViewError::missing(format!("no run {name:?} is here; /api/runs lists them"))
        })
    }

    /// Folders of runs below the roots, in order.
    fn folders(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for root in &self.roots {
            collect(root, 2, &mut found);
        }
        found
    }
}

/// Adds the runs in a folder and below it, to this depth.
fn collect(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    if holds_run(folder) {
        found.push(folder.to_owned());
        return;
    }
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let mut below: Vec<PathBuf> = entries.map(|e| e.path()).filter(|p| p.is_dir()).collect();
    below.sort();
    for path in below.into_iter().take(MAX_RUNS).filter(|_| depth > 0) {
        collect(&path, depth - 1, found);
    }
}

/// Name of the folder; with its parent's or a number where another run has that name.
fn free_name(path: &Path, taken: &BTreeMap<String, Arc<Run>>) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let name = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned());
    let own = name(&path).unwrap_or_else(|| "run".into());
    let longer = path
        .parent()
        .and_then(name)
        .map(|parent| format!("{parent}-{own}"));
    let numbered = (2..).map(|n| format!("{own}-{n}"));
    let mut names = [Some(own.clone()), longer]
        .into_iter()
        .flatten()
        .chain(numbered);
    names.find(|n| !taken.contains_key(n)).unwrap_or(own)
}

/// Takes a lock even if its holder panicked. This is safe, since the guarded data is read again.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A run, and the data read from it.
pub(crate) struct Run {
    /// Name in links.
    pub(crate) name: String,
    /// Folder of the run.
    pub(crate) path: PathBuf,
    ports: Ports,
    /// Records that were read from its files.
    records: Mutex<Records>,
    /// Opened when it is first asked for.
    store: Mutex<Option<Arc<StoreReader>>>,
    /// Made when the first episode is shown.
    renderer: Mutex<Option<Arc<dyn Renderer>>>,
}

sinew_types::debug_fields!(Run, path);

/// Records read so far.
#[derive(Debug, Default)]
struct Records {
    steps: Lines<StepRecord>,
    evals: Lines<EvalRecord>,
}

/// Lines of a file and how far it was read.
#[derive(Debug)]
struct Lines<T> {
    /// Rows in the order of the file.
    rows: Arc<Vec<T>>,
    /// Bytes that were read, up to the end of a line.
    offset: u64,
    /// Inode of the file that was read: another file is read from its start.
    inode: u64,
    /// Lines that are not records.
    unread: usize,
}

impl<T> Default for Lines<T> {
    fn default() -> Self {
        Self {
            rows: Arc::default(),
            offset: 0,
            inode: 0,
            unread: 0,
        }
    }
}

impl<T: DeserializeOwned + Clone> Lines<T> {
    /// Reads on. A line that is not a record is left out and counted.
    fn read(&mut self, path: &Path) -> Arc<Vec<T>> {
        let Ok(mut file) = sinew_view::open_regular(path) else {
            *self = Self::default();
            return Arc::clone(&self.rows);
        };
        let meta = file
            .metadata()
            .map(|m| (m.ino(), m.len()))
            .unwrap_or_default();
        if meta.0 != self.inode || meta.1 < self.offset {
            *self = Self::default();
            self.inode = meta.0;
        }
        let mut text = Vec::new();
        let read = file
            .seek(SeekFrom::Start(self.offset))
            // Reads no further than its size at the opening: a link may lead to a file that grows.
            .and_then(|_| {
                file.take(meta.1.saturating_sub(self.offset))
                    .read_to_end(&mut text)
            });
        let whole = text.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1);
        if read.is_ok() && whole > 0 {
            self.offset += whole as u64;
            let rows = Arc::make_mut(&mut self.rows);
            let lines = text[..whole].split(|b| *b == b'\n');
            for line in lines.filter(|line| !line.is_empty()) {
                match serde_json::from_slice(line) {
                    Ok(row) => rows.push(row),
                    Err(_) => self.unread += 1,
                }
            }
        }
        Arc::clone(&self.rows)
    }
}

/// A run in the list of runs.
#[derive(Debug, Serialize)]
pub(crate) struct RunRow {
    /// Name of the run in links.
    run: String,
    /// Folder of the run.
    path: String,
    /// Name of the recipe.
    title: String,
    /// `running`, `ended`, `interrupted`, `failed` or `killed`.
    state: String,
    /// Reason of its failure, if it recorded one.
    why: Option<String>,
    /// The one verdict on it.
    verdict: Verdict,
    /// The verdict is not one to be shown in green.
    bad: bool,
    /// Model as the recipe names it; empty if the recipe cannot be read, as are the next three.
    model: String,
    algorithm: String,
    env: String,
    mode: String,
    /// Seed as text: numbers of a page have 53 bits.
    seed: String,
    /// The last recorded step, of how many.
    steps: u64,
    of_steps: u64,
    /// Seconds over all sessions.
    wall_s: f64,
    /// Training episodes, and those that the system failed.
    episodes: usize,
    failed: usize,
    /// Held-out success, first and last measurement.
    before: Option<Share>,
    after: Option<Share>,
    /// Mean reward and success of the last steps' training episodes.
    reward: Option<f64>,
    success: Option<Share>,
    /// Entropy of the last step that trained.
    entropy: Option<f64>,
    /// Success of the training episodes, thinned to a few dozen points; `None` where none has a score.
    spark: Vec<Option<f64>>,
    /// It keeps its episodes.
    stored: bool,
    /// Equal for runs that repeat each other with other seeds.
    repeats: Option<String>,
    /// Lines of its records that cannot be read, which no page shows.
    unread: usize,
}

/// A share of episodes, and how sure it is.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Share {
    share: f64,
    #[serde(flatten)]
    spread: Spread,
}

impl Share {
    fn of(measured: &EvalRecord) -> Option<Self> {
        pooled([&measured.stats]).map(|(share, spread)| Self { share, spread })
    }
}

impl Run {
    /// Creates the run without opening any file.
    fn new(name: String, path: PathBuf, ports: Ports) -> Self {
        Self {
            name,
            path,
            ports,
            records: Mutex::default(),
            store: Mutex::default(),
            renderer: Mutex::default(),
        }
    }

    /// Records of all steps.
    pub(crate) fn steps(&self) -> Arc<Vec<StepRecord>> {
        lock(&self.records)
            .steps
            .read(&self.path.join("metrics.jsonl"))
    }

    /// Held-out measurements.
    pub(crate) fn evals(&self) -> Arc<Vec<EvalRecord>> {
        lock(&self.records)
            .evals
            .read(&self.path.join("evals.jsonl"))
    }

    /// Lines of the records that were read and are none.
    pub(crate) fn unread(&self) -> usize {
        let records = lock(&self.records);
        records.steps.unread + records.evals.unread
    }

    /// The recipe as it ran.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) fn recipe(&self) -> Result<RunPlan, ViewError> {
        sinew_runs::recipe(&self.path, self.ports.environments).map_err(ViewError::system)
    }

    /// Equal for runs that repeat each other: one recipe, except for its name, its seed and what bounds it.
    /// `None` if it cannot be read.
    pub(crate) fn repeats(&self) -> Option<String> {
        let mut recipe = self.recipe().ok()?;
        (recipe.name, recipe.seed) = (String::new(), 0);
        recipe.hash().ok()
    }

    /// Equal for runs whose tasks and rewards are the same; empty if the recipe cannot be read.
    pub(crate) fn world(&self) -> String {
        let plan = self
            .recipe()
            .ok()
            .and_then(|r| serde_json::to_value(r).ok());
        let world = plan.map(|p| ["env", "tasks", "reward", "judge"].map(|key| p[key].to_string()));
        world.map_or_else(String::new, |w| w.join("\n"))
    }

    /// Config of rewards from outside.
    pub(crate) fn late(&self) -> Option<sinew_orchestrator::LateConfig> {
        self.recipe()
            .ok()
            .and_then(|recipe| (self.ports.late)(&recipe))
    }

    /// The store, opened once.
    ///
    /// # Errors
    /// If the run keeps nothing, or it cannot be read.
    pub(crate) fn store(&self) -> Result<Arc<StoreReader>, ViewError> {
        let mut open = lock(&self.store);
        if let Some(store) = open.as_ref() {
            return Ok(Arc::clone(store));
        }
        if !keeps_episodes(&self.path) {
            return Err(ViewError::missing(format!(
                "{} keeps no episodes (store.type = \"memory\", or it has not begun)",
                self.path.display()
            )));
        }
        let store = (self.ports.store)(&self.path).map_err(ViewError::system)?;
        let store = Arc::new(store);
        *open = Some(Arc::clone(&store));
        Ok(store)
    }

    /// The store, if the run keeps one.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) fn kept_store(&self) -> Result<Option<Arc<StoreReader>>, ViewError> {
        match self.store() {
            Err(ViewError::Missing(_)) => Ok(None),
            opened => opened.map(Some),
        }
    }

    /// The tokenizer, made once.
    pub(crate) fn renderer(&self) -> Result<Arc<dyn Renderer>, NoRenderer> {
        let mut open = lock(&self.renderer);
        if let Some(renderer) = open.as_ref() {
            return Ok(Arc::clone(renderer));
        }
        let recipe = self.recipe().map_err(|e| NoRenderer(e.to_string()))?;
        let renderer = (self.ports.renderer)(&self.path, &recipe)?;
        *open = Some(Arc::clone(&renderer));
        Ok(renderer)
    }

    /// Returns the present state, and the reason of its end.
    pub(crate) fn state(&self) -> (String, Option<String>) {
        let (process, why) = process_of(&self.path);
        (process.name().to_owned(), why)
    }

    /// The one verdict on it.
    pub(crate) fn verdict(&self) -> Verdict {
        let (process, end) = process_of(&self.path);
        Verdict::of(&self.steps(), &self.evals(), process, end.as_deref())
    }

    /// Returns the row of the run in the list.
    pub(crate) fn row(&self) -> RunRow {
        let (steps, evals, recipe) = (self.steps(), self.evals(), self.recipe().ok());
        let (state, why) = self.state();
        let verdict = self.verdict();
        let r = recipe.as_ref();
        let recent = || steps.iter().rev().take(RECENT).map(|r| &r.rollout);
        let success = pooled(recent()).map(|(share, spread)| Share { share, spread });
        let reward = success.map(|s| {
            let sum: f64 = recent().map(|r| r.reward * r.scored() as f64).sum();
            sum / s.spread.n as f64
        });
        let stride = steps.len().div_ceil(40).max(1);
        let spark = steps
            .chunks(stride)
            .map(|part| pooled(part.iter().map(|r| &r.rollout)).map(|p| p.0));
        let before = evals.first().and_then(Share::of);
        let after = evals.last().filter(|_| evals.len() > 1).and_then(Share::of);
        let last_eval = evals.last().map_or(0.0, |e| e.wall_s);
        RunRow {
            run: self.name.clone(),
            path: self.path.display().to_string(),
            title: r.map_or_else(|| self.name.clone(), |r| r.name.clone()),
            state,
            why,
            bad: verdict.verdict.is_bad(),
            verdict,
            model: r.map(RunPlan::model_source).unwrap_or_default(),
            algorithm: r
                .map(|r| r.algorithm.kind.name().to_owned())
                .unwrap_or_default(),
            env: env_names(&steps, &evals),
            mode: r
                .map(|r| r.train.mode.name().to_owned())
                .unwrap_or_default(),
            seed: r.map_or_else(String::new, |r| r.seed.to_string()),
            steps: steps.last().map_or(0, |s| s.step),
            of_steps: r.map_or(0, |r| r.train.steps),
            wall_s: steps.last().map_or(0.0, |s| s.wall_s).max(last_eval),
            episodes: steps.iter().map(|s| s.rollout.episodes).sum(),
            failed: steps.iter().map(|s| s.rollout.failed).sum(),
            before,
            after,
            reward,
            success,
            entropy: steps.iter().rev().find_map(StepRecord::entropy),
            spark: spark.collect(),
            stored: keeps_episodes(&self.path),
            repeats: self.repeats(),
            unread: self.unread(),
        }
    }

    /// Returns lengths and times of the files that a page shows, to detect changes.
    pub(crate) fn stamp(&self) -> Stamp {
        let of = |file: &str| {
            let meta = std::fs::metadata(self.path.join(file));
            meta.map(|m| (m.len(), m.mtime(), m.mtime_nsec()))
                .unwrap_or_default()
        };
        let steps = (of("metrics.jsonl"), of("evals.jsonl"));
        let mut episodes = (of("store/index.sqlite"), of("store/index.sqlite-wal"));
        if episodes == (FileStamp::default(), FileStamp::default()) {
            // A database shows no changes by itself: its pages follow the steps.
            episodes = steps;
        }
        Stamp {
            steps,
            live: of(sinew_view::LIVE_FILE),
            episodes,
            ended: of("end.json"),
        }
    }
}

/// Length, seconds and nanoseconds of the last change of a file.
type FileStamp = (u64, i64, i64);

/// File stamps of a run's folder at a look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// Records of steps, and of measurements.
    pub(crate) steps: (FileStamp, FileStamp),
    /// The live state.
    pub(crate) live: FileStamp,
    /// The index of the store, and its log; those of the steps where there is no index.
    pub(crate) episodes: (FileStamp, FileStamp),
    /// The end of the process.
    pub(crate) ended: FileStamp,
}

/// Environments of a mixture, or types of tasks of one environment.
fn env_names(steps: &[StepRecord], evals: &[EvalRecord]) -> String {
    let stats = steps.last().map(|s| &s.rollout);
    let Some(stats) = stats.or_else(|| evals.last().map(|e| &e.stats)) else {
        return String::new();
    };
    let names: Vec<&str> = if stats.by_env.is_empty() {
        stats.success_by_kind.keys().map(String::as_str).collect()
    } else {
        stats.by_env.keys().map(String::as_str).collect()
    };
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_on_and_read_anew_after_a_rewrite() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let mut lines = Lines::<u64>::default();
        assert!(lines.read(&path).is_empty());
        std::fs::write(&path, "1\n2\n3").unwrap();
        assert_eq!(*lines.read(&path), [1, 2]);
        std::fs::write(&path, "1\n2\n34\nno\n5\n").unwrap();
        assert_eq!(*lines.read(&path), [1, 2, 34, 5]);
        assert_eq!(lines.unread, 1);
        std::fs::write(&path, "9\n").unwrap();
        assert_eq!(*lines.read(&path), [9]);
        assert_eq!(lines.unread, 0);
    }

    #[test]
    fn equal_names_of_folders_stay_apart() {
        let ports = Ports {
            store: Arc::new(|_| Err(NoStore("none".into()))),
            renderer: Arc::new(|_, _| Err(NoRenderer("none".into()))),
            late: Arc::new(|_| None),
            environments: Registry::new(&sinew_env::BUILT_IN),
        };
        let dir = tempfile::tempdir().unwrap();
        for folder in ["a/run", "b/run", "c"] {
            std::fs::create_dir_all(dir.path().join(folder)).unwrap();
            std::fs::write(dir.path().join(folder).join("recipe.toml"), "").unwrap();
        }
        let runs = Runs::new(vec![dir.path().to_owned()], ports);
        let names: Vec<String> = runs.all().iter().map(|r| r.name.clone()).collect();
        assert_eq!(names, ["b-run", "c", "run"]);
        assert!(runs.get("nope").is_err());
    }
}
