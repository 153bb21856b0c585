//! Launchers: how a role becomes a process. Restarts are the supervisor's, so that one policy decides.

mod files;
pub(crate) mod hosts;
pub(crate) mod kubernetes;
pub(crate) mod local;
pub(crate) mod ray;
pub(crate) mod slurm;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// A process that a launcher starts.
#[derive(Clone, Debug, PartialEq)]
pub struct RoleSpec {
    /// Name: `RUN-ROLE-INDEX-INCARNATION`. Two processes of one name never run.
    pub name: String,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Variables of its environment, in addition.
    pub env: Vec<(String, String)>,
    /// Working directory; `None`: that of the launcher. Kubernetes has one for all roles.
    pub folder: Option<PathBuf>,
    /// Cores.
    pub cpus: u32,
    /// Accelerators.
    pub gpus: u32,
    /// Memory in MiB; `None`: the engine's default.
    pub memory_mb: Option<u64>,
    /// The engine itself starts it again when its host is lost: only for the owner, which has no supervisor.
    pub requeue: bool,
}

/// State of a process with its launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Launched {
    /// It waits for a place, with the engine's reason in words.
    Waiting(String),
    /// It runs.
    Running,
    /// It ended, with the reason in words.
    Ended(String),
}

/// A process that a launcher knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchedRole {
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: Launched,
}

/// Starts, lists and stops processes by their names.
pub trait Launcher: fmt::Debug + Send + Sync {
    /// Name of the engine, for messages.
    fn name(&self) -> &'static str;

    /// Whether it starts anything. Otherwise roles join by themselves.
    fn starts(&self) -> bool {
        true
    }

    /// Interval at which a list is cheap enough.
    fn interval(&self) -> Duration {
        Duration::from_secs(5)
    }

    /// The text of what [`Launcher::ensure`] would ask the engine for.
    ///
    /// # Errors
    /// If the process cannot be described, or the engine starts nothing.
    fn preview(&self, spec: &RoleSpec) -> Result<String, LaunchError>;

    /// Starts a process. One of this name that exists already is a success.
    ///
    /// # Errors
    /// If the engine cannot be reached or refuses.
    fn ensure(&self, spec: &RoleSpec) -> Result<(), LaunchError>;

    /// All processes of the run that the engine knows, ended ones as far as it remembers them.
    ///
    /// # Errors
    /// If the engine cannot be reached.
    fn list(&self) -> Result<Vec<LaunchedRole>, LaunchError>;

    /// The last lines of a process's output; empty if there are none.
    ///
    /// # Errors
    /// If the engine cannot be reached.
    fn logs(&self, name: &str, lines: usize) -> Result<String, LaunchError>;

    /// Ends a process: first with a request, then by force. One that is not there has ended.
    ///
    /// # Errors
    /// If the engine cannot be reached or refuses.
    fn stop(&self, name: &str) -> Result<(), LaunchError>;
}

/// Reasons for which a launcher does not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A program is missing or cannot be started.
    #[error("{engine} needs the program {program}: {error}")]
    Program {
        /// Name of the engine.
        engine: &'static str,
        /// The program.
        program: String,
        /// The system's reason.
        error: io::Error,
    },
    /// A call failed.
    #[error("{engine}: {call}: {why}")]
    Call {
        /// Name of the engine.
        engine: &'static str,
        /// The call.
        call: String,
        /// The engine's words.
        why: String,
    },
    /// A setting has a value that is not allowed.
    #[error("{key} is {value:?}; allowed: {allowed}")]
    Setting {
        /// Name of the setting.
        key: &'static str,
        /// The value, at most 100 characters.
        value: String,
        /// The values that are allowed.
        allowed: String,
    },
    /// A file cannot be read or written.
    #[error("{verb} {}: {error}", path.display())]
    File {
        /// Failed operation.
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        error: io::Error,
    },
}

impl LaunchError {
    pub(crate) fn setting(
        key: &'static str,
        value: impl ToString,
        allowed: impl Into<String>,
    ) -> Self {
        Self::Setting {
            key,
            value: value.to_string().chars().take(100).collect(),
            allowed: allowed.into(),
        }
    }

    pub(crate) fn call(engine: &'static str, call: impl Into<String>, why: impl ToString) -> Self {
        Self::Call {
            engine,
            call: call.into(),
            why: why.to_string(),
        }
    }

    pub(crate) fn file(
        verb: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |error| Self::File { verb, path, error }
    }
}

/// A word for a shell: quoted unless it is plain.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_./:=,@%+".contains(&b);
    if !word.is_empty() && word.bytes().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// A command as a line of a shell.
pub(crate) fn shell_line(command: &[String]) -> String {
    let words: Vec<String> = command.iter().map(|word| quoted(word)).collect();
    words.join(" ")
}

/// Maximum bytes of the part of a run's name that people recognize.
const SHOWN_BYTES: usize = 32;

/// The name of a run for engines: up to 32 lower-case letters, digits and hyphens of its own name, and six
/// hexadecimal digits of its folder, so that equal recipes in two folders are two runs.
pub fn run_name(name: &str, folder: &std::path::Path) -> String {
    let mut shown = String::new();
    for c in name.chars() {
        let c = c.to_ascii_lowercase();
        let next = if c.is_ascii_alphanumeric() { c } else { '-' };
        if shown.len() < SHOWN_BYTES && !(next == '-' && (shown.is_empty() || shown.ends_with('-')))
        {
            shown.push(next);
        }
    }
    let shown = shown.trim_end_matches('-');
    // A name of Kubernetes begins with a letter.
    let head = if shown.starts_with(|c: char| c.is_ascii_lowercase()) {
        ""
    } else {
        "r"
    };
    let absolute = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let digest = blake3::hash(absolute.as_os_str().as_encoded_bytes()).to_hex();
    format!("{head}{shown}-{}", &digest[..6])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn words_survive_a_shell() {
        let words = ["a b", "it's", "", "--x=1", "$HOME"];
        let line = shell_line(&words.map(str::to_owned));
        let shown = std::process::Command::new("sh")
            .args(["-c", &format!("printf '%s\\n' {line}")])
            .output()
            .unwrap();
        let text = String::from_utf8(shown.stdout).unwrap();
        assert_eq!(text.lines().collect::<Vec<_>>(), words);
    }

    #[test]
    fn names_of_runs_fit_every_engine() {
        let name = run_name(
            "My run: 7B, λ=0.1 with a name that is long",
            Path::new("/runs/a"),
        );
        assert!(name.len() <= 39, "{name}");
        let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        assert!(name.bytes().all(fits) && !name.contains("--"), "{name}");
        assert_ne!(
            run_name("a", Path::new("/x")),
            run_name("a", Path::new("/y"))
        );
        assert!(run_name("7b", Path::new("/x")).starts_with("r7b-"));
    }
}
