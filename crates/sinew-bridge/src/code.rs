//! The user's code and its interpreter: found on the host, shown inside of sandboxes.
//!
//! The interpreter is run to print its search path, so that a virtual environment, editable installs and
//! `.pth` files work inside as they do outside. Folders that sandboxes show anyway keep their paths. All
//! others stand below `/code`, read-only, because a sandbox has its own folders at `/work` and `/tmp`.
//! Messages of the worker name the paths of the host.
//!
//! Only the interpreter itself runs on the host, with a program of this crate. The user's module is loaded
//! inside.

use crate::error::StartError;
use crate::target::{Module, Target, TargetKind};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sinew_sandbox::{ProcessConfig, ProcessProvider, SandboxProvider};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Folder inside below which folders of the host are shown.
const SHOWN: &str = "/code";
/// Folders that every sandbox of the process level shows at their own place.
pub(crate) const SYSTEM: [&str; 4] = ["/usr", "/bin", "/lib", "/lib64"];
/// Oldest Python that runs the worker's program.
const OLDEST: [u32; 2] = [3, 8];
/// Longest time in which an interpreter must answer.
const ASK_WITHIN: Duration = Duration::from_secs(20);
/// Bytes that an interpreter may answer; the rest is not read.
const MAX_ANSWER: u64 = 1 << 20;
/// Asks an interpreter about itself. It imports nothing of the user's.
const ASK: &str = "import json, sys; print(json.dumps({\
                   'executable': getattr(sys, '_base_executable', sys.executable), \
                   'prefix': sys.base_prefix, 'path': sys.path, 'version': list(sys.version_info[:2])}))";

/// Code of a worker: interpreter, search path, and what is loaded at its start.
#[derive(Clone, Debug)]
pub struct PythonCode {
    /// Path of the interpreter inside.
    pub(crate) python: String,
    /// Entries of `sys.path` inside, before those of the interpreter itself.
    pub(crate) path: Vec<String>,
    /// Folders inside, and the folders of the host that they show.
    pub(crate) places: Vec<(String, String)>,
    /// Classes and functions to load, in the order of the caller's targets.
    pub(crate) loads: Vec<Load>,
    /// Hash of the source files, for traces.
    pub(crate) version: String,
    /// Path of the interpreter on the host, without links: a virtual environment has a link to it.
    interpreter: PathBuf,
    /// Folders of the host, and where they stand inside.
    shows: Vec<(PathBuf, PathBuf)>,
}

/// A class or function as the worker loads it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Load {
    /// Kind of target.
    pub(crate) kind: TargetKind,
    /// Path of the file inside.
    file: Option<String>,
    /// Name of the module, if it is not a file.
    module: Option<String>,
    /// Text of the module, if it is part of this program.
    source: Option<&'static str>,
    /// Name of the class or function in the module.
    name: String,
    /// Attributes of a class to set.
    options: Map<String, Value>,
}

/// Answer of an interpreter to [`ASK`].
#[derive(Deserialize)]
struct Interpreter {
    /// The program, not the link to it in a virtual environment.
    executable: PathBuf,
    /// Folder with the standard library.
    prefix: PathBuf,
    /// `sys.path`, with the packages of a virtual environment.
    path: Vec<PathBuf>,
    /// Major and minor number.
    version: [u32; 2],
}

impl PythonCode {
    /// Finds the interpreter and the folders that the targets need. `python` is a path or a name of
    /// `search_path` (folders separated by colons); the packages of its virtual environment are available
    /// inside.
    ///
    /// # Errors
    /// If there is no such interpreter or it is older than Python 3.8.
    pub fn find(targets: &[Target], python: &str, search_path: &str) -> Result<Self, StartError> {
        let asked = ask(&find_program(python, search_path)?)?;
        let mut code = Self::empty(targets);
        let real = asked
            .executable
            .canonicalize()
            .map_err(|e| StartError::Interpreter(format!("{}: {e}", asked.executable.display())))?;
        code.python = text(&real);
        code.interpreter = real;
        code.load(targets)?;
        for entry in asked.path.iter().filter(|p| p.is_dir()) {
            let within = entry.starts_with(&asked.prefix) && asked.prefix != Path::new("/");
            let inside = if within || SYSTEM.iter().any(|s| entry.starts_with(s)) {
                text(entry)
            } else {
                code.show(entry)?
            };
            if !code.path.contains(&inside) {
                code.path.push(inside);
            }
        }
        Ok(code)
    }

    /// Code without an interpreter: only the hash of the targets.
    fn empty(targets: &[Target]) -> Self {
        let mut hash = blake3::Hasher::new();
        for target in targets {
            hash.update(target.as_str().as_bytes());
            hash.update(&target.source());
            if !target.options.is_empty() {
                hash.update(json!(target.options).to_string().as_bytes());
            }
        }
        Self {
            python: String::new(),
            path: Vec::new(),
            places: Vec::new(),
            loads: Vec::new(),
            version: hash.finalize().to_hex()[..12].to_owned(),
            interpreter: PathBuf::new(),
            shows: Vec::new(),
        }
    }

    /// Folders of the host that the sandboxes must show read-only, and where they stand inside. The prefix of
    /// the interpreter is not among them: providers of the process level show it themselves.
    pub fn shows(&self) -> &[(PathBuf, PathBuf)] {
        &self.shows
    }

    /// Sandboxes of the process level that show the folders of the code. `max_live` bounds them: a pool of
    /// workers needs up to twice as many as it has workers, because a worker that ended is replaced before
    /// its sandbox is gone. A smaller bound makes a start wait for that.
    ///
    /// # Errors
    /// If this host cannot isolate processes.
    pub fn process_provider(
        &self,
        max_live: usize,
    ) -> Result<Arc<dyn SandboxProvider>, StartError> {
        let mut config = ProcessConfig::new("");
        config.python.clone_from(&self.interpreter);
        self.provider_of(config, max_live)
    }

    /// Sandboxes for code of a model: they show the interpreter and its standard library, and nothing else.
    pub(crate) fn bare_provider(
        &self,
        max_live: usize,
    ) -> Result<Arc<dyn SandboxProvider>, StartError> {
        let mut config = ProcessConfig::new("");
        config.python.clone_from(&self.interpreter);
        config.max_live = max_live;
        started(config)
    }

    /// Sandboxes that show the folders of the code.
    fn provider_of(
        &self,
        mut config: ProcessConfig,
        max_live: usize,
    ) -> Result<Arc<dyn SandboxProvider>, StartError> {
        config.shows.clone_from(&self.shows);
        config.max_live = max_live;
        config.acquire_timeout = Duration::from_secs(10);
        // Workers are programs with arguments.
        config.zygote = false;
        config.warm_python = false;
        started(config)
    }

    /// Returns the same code for the interpreter of an image. Only the host folders of the modules are in its
    /// search path.
    pub(crate) fn with_python(&self, python: String) -> Self {
        let own = self.loads.iter().filter_map(|load| load.file.as_deref());
        let own: Vec<String> = own
            .filter_map(|file| file.rsplit_once('/').map(|(folder, _)| folder.to_owned()))
            .collect();
        let places = self
            .places
            .iter()
            .filter(|(inside, _)| own.contains(inside));
        let shows = self
            .shows
            .iter()
            .filter(|(_, inside)| own.contains(&text(inside)));
        Self {
            python,
            path: self
                .path
                .iter()
                .filter(|p| own.contains(p))
                .cloned()
                .collect(),
            places: places.cloned().collect(),
            shows: shows.cloned().collect(),
            ..self.clone()
        }
    }

    /// Sandboxes of the process level whose root is an unpacked image, with the folders of the code.
    pub(crate) fn image_provider(
        &self,
        root: &Path,
        max_live: usize,
    ) -> Result<Arc<dyn SandboxProvider>, StartError> {
        let mut config = ProcessConfig::new("");
        config.image = Some(root.to_path_buf());
        self.provider_of(config, max_live)
    }

    /// Shows the folders of the targets, and puts them at the begin of the search path, as Python does with
    /// the folder of a script.
    fn load(&mut self, targets: &[Target]) -> Result<(), StartError> {
        for target in targets {
            let folder = target.folder().map(|f| self.show(f)).transpose()?;
            let (file, module) = match (&target.module, &folder) {
                (Module::File(file), Some(inside)) => {
                    let name = file.file_name().unwrap_or_default().to_string_lossy();
                    (Some(format!("{inside}/{name}")), None)
                }
                (Module::File(file), None) => (Some(text(file)), None),
                (Module::Named { name, .. } | Module::Builtin { name, .. }, _) => {
                    (None, Some(name.clone()))
                }
            };
            let source = match &target.module {
                Module::Builtin { source, .. } => Some(*source),
                _ => None,
            };
            if let Some(inside) = folder.filter(|inside| !self.path.contains(inside)) {
                self.path.push(inside);
            }
            self.loads.push(Load {
                kind: target.kind,
                file,
                module,
                source,
                name: target.name.clone(),
                options: target.options.clone(),
            });
        }
        Ok(())
    }

    /// Shows a folder of the host, and returns its path inside. A folder is shown once.
    pub(crate) fn show(&mut self, folder: &Path) -> Result<String, StartError> {
        let home = std::env::var_os("HOME").filter(|h| !h.is_empty());
        let home = home.and_then(|h| Path::new(&h).canonicalize().ok());
        let what = match () {
            () if folder == Path::new("/") => "the root folder",
            () if home.is_some_and(|home| home.starts_with(folder)) => {
                "a home folder, with its keys and histories,"
            }
            () => "",
        };
        if !what.is_empty() {
            return Err(StartError::Interpreter(format!(
                "{}: {what} is not shown in a sandbox: put the module into a folder of its own",
                folder.display()
            )));
        }
        let known = self
            .places
            .iter()
            .find(|(_, host)| Path::new(host) == folder);
        if let Some((inside, _)) = known {
            return Ok(inside.clone());
        }
        // Node.js finds packages by the name of the folder.
        let modules = if folder.ends_with("node_modules") {
            "/node_modules"
        } else {
            ""
        };
        let inside = format!("{SHOWN}/{}{modules}", self.places.len());
        self.places.push((inside.clone(), text(folder)));
        self.shows.push((folder.into(), inside.clone().into()));
        Ok(inside)
    }
}

/// Returns a provider of sandboxes, or the reason why this host has none.
fn started(config: ProcessConfig) -> Result<Arc<dyn SandboxProvider>, StartError> {
    let provider = ProcessProvider::start(config);
    let provider = provider.map_err(|e| StartError::Worker(e.to_string()))?;
    Ok(Arc::new(provider))
}

/// Returns the path of a program in the folders of a search path, which colons separate.
pub(crate) fn in_path(name: &str, search_path: &str) -> Option<PathBuf> {
    let folders = search_path.split(':').filter(|folder| !folder.is_empty());
    let mut paths = folders.map(|folder| Path::new(folder).join(name));
    paths.find(|path| path.is_file())
}

/// Returns the path of a program that is given as a path or found in the search path.
fn find_program(name: &str, search_path: &str) -> Result<PathBuf, StartError> {
    let whole = |path: PathBuf| {
        // It is asked in another folder than the current one.
        std::path::absolute(&path)
            .map_err(|e| StartError::Interpreter(format!("{}: {e}", path.display())))
    };
    if name.contains('/') {
        return whole(PathBuf::from(name));
    }
    let missing = || {
        StartError::Interpreter(format!(
            "there is no {name} in PATH; install Python 3.8 or later, or set `python` to a path"
        ))
    };
    whole(in_path(name, search_path).ok_or_else(missing)?)
}

/// Runs [`ASK`], in `/` and without input.
///
/// # Errors
/// [`StartError::Interpreter`] with the last line of its error, or its version if that is too old.
fn ask(python: &Path) -> Result<Interpreter, StartError> {
    let failed = |why: String| StartError::Interpreter(format!("{}: {why}", python.display()));
    let mut command = Command::new(python);
    command
        .args(["-B", "-c", ASK])
        .stdin(Stdio::null())
        .current_dir("/");
    let output = output_within(command, ASK_WITHIN).map_err(failed)?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        let last = error.lines().last().map(str::to_owned);
        // A killed process has no message.
        return Err(failed(
            last.unwrap_or_else(|| format!("it ended: {}", output.status)),
        ));
    }
    let asked: Interpreter = serde_json::from_slice(&output.stdout)
        .map_err(|e| failed(format!("is no Python interpreter: {e}")))?;
    if asked.version < OLDEST {
        let [major, minor] = asked.version;
        return Err(failed(format!(
            "Python {major}.{minor}; needed: 3.8 or later"
        )));
    }
    Ok(asked)
}

/// Output of a program that ends within `limit`; it is killed after that. Blocks the thread: it runs while a
/// run is put together, before anything asynchronous begins.
fn output_within(mut command: Command, limit: Duration) -> Result<Output, String> {
    let spawned = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = spawned.map_err(|e| e.to_string())?;
    // Its output is read meanwhile, up to a limit, so that a full pipe does not stop it.
    let out = child.stdout.take().map(read_in_background);
    let err = child.stderr.take().map(read_in_background);
    let give_up = Instant::now() + limit;
    let status = loop {
        match child.try_wait().map_err(|e| e.to_string())? {
            Some(status) => break status,
            None if Instant::now() < give_up => std::thread::sleep(Duration::from_millis(5)),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                let seconds = limit.as_secs_f64();
                return Err(format!("it did not answer in {seconds} s"));
            }
        }
    };
    // A process that it left behind may hold the pipes open.
    let read = |pipe: Option<mpsc::Receiver<Vec<u8>>>| {
        let pipe = pipe.and_then(|p| p.recv_timeout(Duration::from_secs(10)).ok());
        pipe.unwrap_or_default()
    };
    Ok(Output {
        status,
        stdout: read(out),
        stderr: read(err),
    })
}

/// Reads at most [`MAX_ANSWER`] bytes in a separate thread.
fn read_in_background(from: impl Read + Send + 'static) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.take(MAX_ANSWER).read_to_end(&mut bytes);
        let _ = sender.send(bytes);
    });
    receiver
}

/// A path as a text for JSON. Bytes that are not UTF-8 are replaced.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interpreter_that_is_killed_is_reported_with_its_signal() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let python = dir.path().join("python");
        std::fs::write(&python, "#!/bin/sh\nkill -9 $$\n").unwrap();
        std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
        let told = ask(&python).err().unwrap().to_string();
        assert!(told.contains("it ended: signal: 9"), "{told}");
    }

    #[test]
    fn an_interpreter_that_hangs_or_talks_without_end_is_given_up() {
        let shell = |script: &str, limit_ms: u64| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", script]);
            output_within(command, Duration::from_millis(limit_ms))
        };
        let hangs = shell("sleep 60", 300).unwrap_err();
        assert!(hangs.contains("did not answer in 0.3 s"), "{hangs}");
        let talks = shell("while true; do echo yes; done", 300);
        assert!(talks.is_err() || talks.is_ok_and(|o| o.stdout.len() as u64 <= MAX_ANSWER));
        assert_eq!(shell("echo ok", 60_000).unwrap().stdout, b"ok\n");
    }
}
