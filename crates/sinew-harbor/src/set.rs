//! Tasks of a folder: one task, a tree of them, or a data set of a registry file; their kinds and splits.

use crate::error::{HarborError, SkipReason, Skipped};
use crate::folder::{Base, TASK_FILE, TaskFolder, read_error};
use crate::manifest::NetworkPolicy;
use crate::servers;
use crate::template::PassedEnv;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_env::{McpFacts, SandboxFacts, Split, Taskset, TasksetError, hash64};
use sinew_types::{Task, TaskId, mix_seed};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Once;

/// File with data sets.
const REGISTRY: &str = "registry.json";

/// Maximum bytes of that file.
const MAX_REGISTRY_BYTES: u64 = 64 << 20;

/// Maximum number of tasks of a folder.
const MAX_TASKS: usize = 100_000;

/// Maximum depth of folders between the named one and a task.
const MAX_DEPTH: usize = 8;

/// Share of the tasks that is held out where nothing else is said.
const SHARE: f64 = 0.05;

/// Source of a task's kind, for tables, weights and curricula.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TaskKind {
    /// `metadata.category`; without it the name of the folder without the number at its end.
    #[default]
    Category,
    /// `metadata.difficulty`.
    Difficulty,
    /// The first of `metadata.tags`.
    Tag,
    /// The name of the folder without the number at its end.
    Name,
}

/// Tasks that are held out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "a share such as 0.1, a folder of tasks, or a list of families"
)]
pub enum HeldOutTasks {
    /// A share, chosen by the hash of the names; with 1 there are none to train on.
    Share(f64),
    /// Another folder of tasks.
    Folder(String),
    /// Families: those of `metadata.category`, or the start of the names up to a `-`, `_` or `/`.
    Families(Vec<String>),
}

/// Source of tasks and their split.
#[derive(Clone, Debug, PartialEq)]
pub struct TasksConfig {
    /// A task, a folder of tasks, or a file of data sets.
    pub tasks: PathBuf,
    /// Data set of the file, as `NAME` or `NAME@VERSION`; `None`: the only one.
    pub dataset: Option<String>,
    /// Tasks that are held out; `None`: 5 %.
    pub held_out: Option<HeldOutTasks>,
    /// Source of a task's kind.
    pub kind: TaskKind,
    /// Seed of the tasks.
    pub seed: u64,
}

impl TasksConfig {
    /// All tasks of a folder, held out for a measurement.
    pub fn measured(tasks: impl Into<PathBuf>) -> Self {
        Self {
            tasks: tasks.into(),
            dataset: None,
            held_out: Some(HeldOutTasks::Share(1.0)),
            kind: TaskKind::default(),
            seed: 0,
        }
    }
}

/// Reasons of a place to leave out tasks that others can run.
#[derive(Clone, Debug, PartialEq)]
pub struct PlaceFacts {
    /// Tasks run in containers.
    pub containers: bool,
    /// Sandboxes reach hosts by the rules of the recipe.
    pub network: bool,
    /// Tasks can have lists of hosts.
    pub host_lists: bool,
    /// An agent program plays, which works in the container of its task.
    pub program: bool,
    /// MCP servers that the player can use. It is `None` without a player, and tasks run without servers.
    pub mcp: Option<McpFacts>,
    /// Variables of the host that are passed.
    pub passed: PassedEnv,
}

impl PlaceFacts {
    /// The facts of a recipe's sandboxes.
    pub fn new(facts: &SandboxFacts, passed: PassedEnv) -> Self {
        Self {
            containers: facts.level == "container",
            network: facts.network,
            host_lists: facts.host_lists,
            program: facts.program,
            mcp: facts.mcp,
            passed,
        }
    }

    /// The reason why a task cannot run there.
    pub fn refuses(&self, task: &TaskFolder) -> Option<SkipReason> {
        if let Some(skip) = &task.skip {
            return Some(skip.clone());
        }
        if let Some(what) = task.needs_container().filter(|_| !self.containers) {
            return Some(SkipReason::NeedsContainer { what });
        }
        if self.program && task.base == Base::Empty {
            return Some(SkipReason::NoContainer);
        }
        if self.program && !task.prior.is_empty() {
            let why = "agent programs do not begin with one".into();
            return Some(SkipReason::Trajectory { why });
        }
        let player = self.mcp.as_ref();
        let refused = player.and_then(|p| servers::refused(&task.manifest.environment, p));
        if refused.is_some() {
            return refused;
        }
        match task.network() {
            NetworkPolicy::Hosts(_) if !self.host_lists => return Some(SkipReason::HostLists),
            NetworkPolicy::None if self.network && !self.containers => {
                return Some(SkipReason::NoNetwork);
            }
            _ => {}
        }
        let manifest = &task.manifest;
        let of_task = [
            ("environment.env", &manifest.environment.env),
            ("solution.env", &manifest.solution_env),
        ];
        let verifiers = task.steps.iter().map(|s| &s.verifier);
        let of_verifiers = verifiers.flat_map(|verifier| {
            let own = verifier.separate.as_ref();
            let own = own.map(|own| ("verifier.environment.env", &own.environment.env));
            own.into_iter()
                .chain([("verifier.env", &verifier.keys.env)])
        });
        of_task
            .into_iter()
            .chain(of_verifiers)
            .find_map(|(key, env)| {
                let name = self.passed.fill(env).err()?;
                let key = key.to_owned();
                Some(SkipReason::Variable { key, name })
            })
    }
}

/// Tasks of a folder, split, with those that were left out.
#[derive(Clone, Debug)]
pub struct HarborTasks {
    train: Vec<Task>,
    held_out: Vec<Task>,
    skipped: Vec<Skipped>,
    notes: Vec<String>,
}

/// A task before the split.
struct Found {
    /// Path below the folder.
    name: String,
    category: Option<String>,
    task: Task,
}

impl HarborTasks {
    /// Reads the tasks of a folder, without those that `place` cannot run.
    ///
    /// # Errors
    /// If the folder has no task, a task is broken, or a split is empty.
    pub fn open(config: &TasksConfig, place: &PlaceFacts) -> Result<Self, HarborError> {
        let mut all = Self {
            train: Vec::new(),
            held_out: Vec::new(),
            skipped: Vec::new(),
            notes: Vec::new(),
        };
        let found = all.read(config, &config.tasks, place)?;
        let own = match &config.held_out {
            Some(HeldOutTasks::Folder(folder)) => Some(all.read(config, folder.as_ref(), place)?),
            _ => None,
        };
        all.split(found, own, config)?;
        all.count();
        Ok(all)
    }

    /// Tasks that were left out, with their reasons.
    pub fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    /// All tasks, those of the training split first.
    pub fn all(&self) -> impl Iterator<Item = &Task> {
        self.train.iter().chain(&self.held_out)
    }

    /// Reads the tasks of one folder.
    fn read(
        &mut self,
        config: &TasksConfig,
        folder: &Path,
        place: &PlaceFacts,
    ) -> Result<Vec<Found>, HarborError> {
        let (places, absent) = places(folder, config.dataset.as_deref())?;
        self.skipped.extend(absent);
        let mut unknown = BTreeMap::<String, usize>::new();
        let mut found = Vec::new();
        for (name, path) in places {
            let task = TaskFolder::read(&path)?;
            for key in &task.manifest.unknown {
                *unknown.entry(key.clone()).or_default() += 1;
            }
            match place.refuses(&task) {
                Some(reason) => self.skipped.push(Skipped { name, reason }),
                None => found.push(row(config, name, &task)),
            }
        }
        let keys = unknown.into_iter().map(|(key, n)| format!("{key} ({n})"));
        let keys: Vec<String> = keys.collect();
        if !keys.is_empty() {
            let keys = keys.join(", ");
            let note = format!(
                "{}: keys of task.toml that are not known: {keys}",
                folder.display()
            );
            // A command reads the tasks more than once.
            static WARNED: Once = Once::new();
            WARNED.call_once(|| tracing::warn!("{note}"));
            self.notes.push(note);
        }
        Ok(found)
    }

    /// Fills the splits.
    fn split(
        &mut self,
        found: Vec<Found>,
        own: Option<Vec<Found>>,
        config: &TasksConfig,
    ) -> Result<(), HarborError> {
        let all = found.len();
        let (held_out, train): (Vec<Found>, Vec<Found>) = match (own, &config.held_out) {
            (Some(own), _) => (own, found),
            (None, Some(HeldOutTasks::Families(names))) => {
                found.into_iter().partition(|f| of_family(f, names))
            }
            (None, Some(HeldOutTasks::Share(share))) => by_share(found, *share),
            (None, _) => by_share(found, SHARE),
        };
        let measured = matches!(config.held_out, Some(HeldOutTasks::Share(1.0)));
        // A measurement of tasks that cannot run says why.
        let told = measured && !self.skipped.is_empty();
        if (held_out.is_empty() || (train.is_empty() && !measured)) && !told {
            let left_out = self.skipped.len();
            let empty = if held_out.is_empty() {
                "no task is held out for the evaluation"
            } else {
                "no task is left to train on"
            };
            let first = self.skipped.first();
            let first = first.map(|s| format!(", such as {}: {}", s.name, s.reason));
            return Err(HarborError::Format {
                path: config.tasks.clone(),
                reason: format!(
                    "{empty}: {all} tasks can run, {left_out} are left out{}\n  hint: change env.held_out, or \
                     name a folder with more tasks",
                    first.unwrap_or_default()
                ),
            });
        }
        let numbered = |split: Split, list: Vec<Found>| -> Vec<Task> {
            list.into_iter()
                .map(|f| Task {
                    id: TaskId::new(format!("harbor/{}/{}", split.as_str(), f.name)),
                    ..f.task
                })
                .collect()
        };
        self.train = numbered(Split::Train, train);
        self.held_out = numbered(Split::HeldOut, held_out);
        Ok(())
    }

    /// Adds a note for each reason by which tasks were left out.
    fn count(&mut self) {
        let mut reasons = BTreeMap::<&str, (usize, &Skipped)>::new();
        for skipped in &self.skipped {
            let entry = reasons.entry(skipped.reason.name());
            entry.or_insert((0, skipped)).0 += 1;
        }
        let notes = reasons.into_values().map(|(count, first)| {
            let (name, why) = (&first.name, &first.reason);
            format!("{count} tasks are left out, such as {name}: {why}")
        });
        let notes: Vec<String> = notes.collect();
        self.notes.extend(notes);
    }

    fn tasks(&self, split: Split) -> &[Task] {
        match split {
            Split::Train => &self.train,
            Split::HeldOut => &self.held_out,
        }
    }
}

impl Taskset for HarborTasks {
    fn name(&self) -> &str {
        "harbor"
    }

    fn len(&self, split: Split) -> usize {
        self.tasks(split).len()
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        let tasks = self.tasks(split);
        tasks
            .get(index)
            .cloned()
            .ok_or_else(|| TasksetError::Index {
                taskset: "harbor".into(),
                split,
                index,
                len: tasks.len(),
            })
    }

    fn kind(&self, split: Split, index: usize) -> Result<String, TasksetError> {
        match self.tasks(split).get(index) {
            Some(task) => Ok(task.kind.clone()),
            None => self.get(split, index).map(|task| task.kind),
        }
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }
}

/// A task before the split, with its kind.
fn row(config: &TasksConfig, name: String, folder: &TaskFolder) -> Found {
    let metadata = &folder.manifest.metadata;
    let family = family(&name);
    let kind = match config.kind {
        TaskKind::Category => metadata.category.clone(),
        TaskKind::Difficulty => metadata.difficulty.clone(),
        TaskKind::Tag => metadata.tags.first().cloned(),
        TaskKind::Name => None,
    };
    let instruction = folder.steps.first().map(|s| s.instruction.clone());
    let data = serde_json::json!({
        "folder": folder.path.to_string_lossy(),
        "name": name,
        "category": metadata.category,
        "difficulty": metadata.difficulty,
        "tags": metadata.tags,
    });
    let task = Task {
        id: TaskId::new(name.clone()),
        kind: kind.filter(|k| !k.is_empty()).unwrap_or(family),
        preamble: Vec::new(),
        prompt: instruction.unwrap_or_default(),
        data,
        seed: mix_seed(config.seed, hash64(name.as_bytes())),
    };
    Found {
        category: metadata.category.clone(),
        name,
        task,
    }
}

/// The last part of a name without the number at its end.
fn family(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or(name);
    let short = last.trim_end_matches(|c: char| c.is_ascii_digit());
    let short = short.trim_end_matches(['-', '_', '.']);
    if short.is_empty() { last } else { short }.to_owned()
}

/// Whether a task belongs to one of the families.
fn of_family(found: &Found, names: &[String]) -> bool {
    let last = found.name.rsplit('/').next().unwrap_or_default();
    names.iter().any(|family| {
        let starts = |name: &str| {
            let rest = name.strip_prefix(family.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '_', '/']))
        };
        found.category.as_ref() == Some(family) || starts(&found.name) || starts(last)
    })
}

/// Splits off a share by the hash of the names, at least one task; the others stay where they are when tasks
/// are added.
fn by_share(found: Vec<Found>, share: f64) -> (Vec<Found>, Vec<Found>) {
    if share >= 1.0 {
        return (found, Vec::new());
    }
    let number = |f: &Found| hash64(f.name.as_bytes()) as f64 / u64::MAX as f64;
    let lowest = found.iter().map(number).reduce(f64::min);
    let below =
        |f: &Found| number(f) < share || lowest.is_some_and(|l| l >= share && number(f) <= l);
    found.into_iter().partition(below)
}

/// Names and folders of tasks, and those that are not here.
type Places = (Vec<(String, PathBuf)>, Vec<Skipped>);

/// Finds the tasks of a path.
fn places(path: &Path, dataset: Option<&str>) -> Result<Places, HarborError> {
    if path.join(TASK_FILE).is_file() {
        let name = path.canonicalize().map_err(|e| read_error(path, e))?;
        let name = name.file_name().unwrap_or_default().to_string_lossy();
        return Ok((vec![(name.into_owned(), path.into())], Vec::new()));
    }
    let registry = if path.is_file() {
        path.to_path_buf()
    } else {
        path.join(REGISTRY)
    };
    if registry.is_file() {
        return of_registry(&registry, dataset);
    }
    if let Some(name) = dataset {
        return Err(HarborError::Format {
            path: path.into(),
            reason: format!("env.dataset = {name:?}: there is no {REGISTRY} in this folder"),
        });
    }
    let mut found = Vec::new();
    walk(path, "", 0, &mut found)?;
    if found.is_empty() {
        return Err(HarborError::Format {
            path: path.into(),
            reason: format!(
                "no tasks here; allowed: a folder with {TASK_FILE}, folders of such folders, or a \
                 folder with {REGISTRY}"
            ),
        });
    }
    Ok((found, Vec::new()))
}

/// Adds the tasks below a folder in the order of their names. Hidden folders and links are left out.
fn walk(
    path: &Path,
    prefix: &str,
    depth: usize,
    found: &mut Vec<(String, PathBuf)>,
) -> Result<(), HarborError> {
    let mut folders = BTreeSet::new();
    for entry in fs::read_dir(path).map_err(|e| read_error(path, e))? {
        let entry = entry.map_err(|e| read_error(path, e))?;
        let folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let name = entry.file_name().to_string_lossy().into_owned();
        if folder && !name.starts_with('.') {
            folders.insert(name);
        }
    }
    for name in folders {
        let (below, whole) = (path.join(&name), format!("{prefix}{name}"));
        if below.join(TASK_FILE).is_file() {
            found.push((whole, below));
        } else if depth < MAX_DEPTH {
            walk(&below, &format!("{whole}/"), depth + 1, found)?;
        }
        if found.len() > MAX_TASKS {
            return Err(HarborError::Format {
                path: path.into(),
                reason: format!("more than {MAX_TASKS} tasks; name a folder with fewer"),
            });
        }
    }
    Ok(())
}

/// A data set of the registry file.
#[derive(Deserialize)]
struct DataSet {
    name: String,
    #[serde(default)]
    version: String,
    tasks: Vec<RegistryTask>,
}

/// A task of a data set.
#[derive(Deserialize)]
struct RegistryTask {
    name: String,
    path: PathBuf,
    git_url: Option<String>,
}

/// The tasks of a data set of a registry file.
fn of_registry(file: &Path, dataset: Option<&str>) -> Result<Places, HarborError> {
    let wrong = |reason: String| HarborError::Format {
        path: file.into(),
        reason,
    };
    let bytes = fs::metadata(file).map_err(|e| read_error(file, e))?.len();
    if bytes > MAX_REGISTRY_BYTES {
        return Err(wrong(format!(
            "it has more than {MAX_REGISTRY_BYTES} bytes"
        )));
    }
    let text = fs::read_to_string(file).map_err(|e| read_error(file, e))?;
    let sets: Vec<DataSet> = serde_json::from_str(&text)
        .map_err(|e| wrong(format!("not a list of data sets with name and tasks: {e}")))?;
    let whole = |set: &DataSet| format!("{}@{}", set.name, set.version);
    let names: Vec<String> = sets.iter().map(whole).collect();
    let mut chosen = sets
        .into_iter()
        .filter(|set| dataset.is_none_or(|name| name == set.name || name == whole(set)));
    let (Some(set), None) = (chosen.next(), chosen.next()) else {
        return Err(wrong(format!(
            "env.dataset = {:?}: allowed: one of {}",
            dataset.unwrap_or_default(),
            names.join(", ")
        )));
    };
    let folder = file.parent().unwrap_or(Path::new("."));
    let (mut found, mut absent) = (Vec::new(), Vec::new());
    for task in set.tasks.into_iter().take(MAX_TASKS) {
        let inside = |c: Component<'_>| matches!(c, Component::Normal(_) | Component::CurDir);
        if !task.path.components().all(inside) {
            let path = task.path.display();
            return Err(wrong(format!(
                "task {}: path {path} leads out of the folder",
                task.name
            )));
        }
        let path = folder.join(&task.path);
        if path.join(TASK_FILE).is_file() {
            found.push((task.name, path));
        } else {
            let url = task.git_url.unwrap_or_default();
            let place = format!("{url} {}", task.path.display());
            absent.push(Skipped {
                name: task.name,
                reason: SkipReason::NotHere {
                    place: place.trim().to_owned(),
                },
            });
        }
    }
    Ok((found, absent))
}
