//! The Python environment of the ranks: where it is, and what it has.
//!
//! It is separate from those of engines: their pins of `torch` and `transformers` conflict.

use crate::error::TorchError;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Interval of looking for the end of a program.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Program that reports versions and GPUs as JSON.
const PROBE: &str = include_str!("probe.py");
/// The packages of the ranks.
const REQUIREMENTS: &str = include_str!("../../../python/requirements-torch.txt");

/// Variables that name the place of the Python; each is `None` if it is not set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnvironmentVariables {
    /// `SINEW_TORCH_PYTHON`: the program.
    pub torch_python: Option<PathBuf>,
    /// `SINEW_CACHE`: the folder of this program's caches.
    pub sinew_cache: Option<PathBuf>,
    /// `XDG_CACHE_HOME`: the folder of all programs' caches.
    pub xdg_cache_home: Option<PathBuf>,
    /// `HOME`.
    pub home: Option<PathBuf>,
}

/// The packages of the Python environment with their lowest versions, in the form of `requirements.txt`.
pub fn requirements() -> &'static str {
    REQUIREMENTS
}

/// The environment that `sinew` makes and looks for: `torch` in the folder of its caches.
fn own_python(variables: &EnvironmentVariables) -> Option<PathBuf> {
    let below = |folder: &PathBuf, path: &str| folder.join(path);
    let cache = variables.sinew_cache.clone();
    let cache = cache.or_else(|| Some(below(variables.xdg_cache_home.as_ref()?, "sinew")));
    let cache = cache.or_else(|| Some(below(variables.home.as_ref()?, ".cache/sinew")));
    cache.map(|cache| cache.join("torch/bin/python"))
}

/// Finds the Python of the ranks: `explicit`, else `SINEW_TORCH_PYTHON`, else `torch/bin/python` in the
/// folder of caches.
///
/// # Errors
/// If the program that is named is not there, or none is found. The text says how to make one.
pub fn find_python(
    explicit: Option<&Path>,
    variables: &EnvironmentVariables,
) -> Result<PathBuf, TorchError> {
    let named = explicit.map(|path| (path.to_owned(), "trainer.python"));
    let from_variable = || {
        let path = variables.torch_python.clone()?;
        Some((path, "SINEW_TORCH_PYTHON"))
    };
    if let Some((path, source)) = named.or_else(from_variable) {
        if path.is_file() {
            return Ok(path);
        }
        let text = format!("{source} is {}: there is no such file", path.display());
        return Err(TorchError::Setup(text));
    }
    let own = own_python(variables);
    if let Some(path) = own.as_ref().filter(|path| path.is_file()) {
        return Ok(path.clone());
    }
    let place = own.map_or_else(
        || "~/.cache/sinew/torch/bin/python".to_owned(),
        |path| path.display().to_string(),
    );
    Err(TorchError::Setup(format!(
        "no Python with torch: {place} is not there\n  hint: `sinew setup torch` makes it; trainer.python and \
         SINEW_TORCH_PYTHON name another one"
    )))
}

/// A GPU of the host.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct GpuInfo {
    /// Its name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Bytes of its memory.
    pub bytes: u64,
}

/// The contents of a Python environment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct PythonReport {
    /// Version of the language.
    pub python: String,
    /// Version of each package of [`requirements`]; `None`: it is not installed or cannot be loaded.
    pub packages: BTreeMap<String, Option<String>>,
    /// Version of CUDA that torch was built for; `None`: it computes on CPUs only.
    pub cuda: Option<String>,
    /// GPUs that torch sees.
    pub gpus: Vec<GpuInfo>,
}

impl PythonReport {
    /// Packages that are missing, by name.
    pub fn missing(&self) -> Vec<&str> {
        let missing = self
            .packages
            .iter()
            .filter(|(_, version)| version.is_none());
        missing.map(|(name, _)| name.as_str()).collect()
    }
}

/// Asks a Python for the versions of its packages and for its GPUs. Loading torch takes seconds.
///
/// # Errors
/// If it cannot be started, fails, or does not answer within `limit`.
pub fn probe(python: &Path, limit: Duration) -> Result<PythonReport, TorchError> {
    let failed = |why: String| TorchError::Setup(format!("{}: {why}", python.display()));
    // Files instead of pipes: a program that writes much is not held up.
    let temporary = || tempfile::tempfile().map_err(|e| failed(e.to_string()));
    let (mut output, mut errors) = (temporary()?, temporary()?);
    let copy = |file: &File| file.try_clone().map_err(|e| failed(e.to_string()));
    let mut child = Command::new(python)
        .args(["-c", PROBE])
        .env("PYTHONSAFEPATH", "1")
        .stdin(Stdio::null())
        .stdout(copy(&output)?)
        .stderr(copy(&errors)?)
        .spawn()
        .map_err(|e| failed(e.to_string()))?;
    let end = Instant::now() + limit;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < end => std::thread::sleep(LOOK_EVERY),
            other => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed(match other {
                    Err(e) => e.to_string(),
                    Ok(_) => format!("no answer within {} s", limit.as_secs()),
                }));
            }
        }
    };
    if !status.success() {
        let text = text(&mut errors);
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        return Err(failed(format!("{status}: {}", last.unwrap_or_default())));
    }
    report(&text(&mut output)).map_err(failed)
}

/// The report in the last line of an output: packages may print before it.
fn report(output: &str) -> Result<PythonReport, String> {
    let last = output.lines().rev().find(|line| !line.trim().is_empty());
    serde_json::from_str(last.unwrap_or_default()).map_err(|e| format!("no report: {e}"))
}

/// All text of a file; empty if it cannot be read.
fn text(file: &mut File) -> String {
    let mut bytes = Vec::new();
    let start = file.seek(SeekFrom::Start(0));
    let _ = start.and_then(|_| file.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
    }

    #[test]
    fn the_first_named_place_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let variables = EnvironmentVariables {
            torch_python: None,
            sinew_cache: None,
            xdg_cache_home: Some(path("xdg")),
            home: Some(path("home")),
        };
        let error = find_python(None, &variables).unwrap_err().to_string();
        assert!(
            error.contains("xdg/sinew/torch/bin/python is not there"),
            "{error}"
        );
        assert!(error.contains("`sinew setup torch`"), "{error}");
        touch(&path("xdg/sinew/torch/bin/python"));
        let found = find_python(None, &variables).unwrap();
        assert_eq!(found, path("xdg/sinew/torch/bin/python"));
        let cache = EnvironmentVariables {
            sinew_cache: Some(path("own")),
            ..variables.clone()
        };
        assert!(find_python(None, &cache).is_err());
        let named = EnvironmentVariables {
            torch_python: Some(path("python")),
            ..cache
        };
        let error = find_python(None, &named).unwrap_err().to_string();
        assert!(error.contains("SINEW_TORCH_PYTHON is"), "{error}");
        touch(&path("python"));
        assert_eq!(find_python(None, &named).unwrap(), path("python"));
        touch(&path("other"));
        let explicit = find_python(Some(&path("other")), &named).unwrap();
        assert_eq!(explicit, path("other"));
    }

    #[test]
    fn a_report_is_the_last_line() {
        let line = r#"{"python": "3.12.1", "packages": {"torch": "2.9.0", "peft": null}, "cuda": null, "gpus": []}"#;
        let report = report(&format!("a warning\n{line}\n")).unwrap();
        assert_eq!(report.missing(), ["peft"]);
        assert!(super::report("nothing").is_err());
    }

    #[test]
    fn a_python_that_fails_or_hangs_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let script = |text: &str| {
            let path = dir.path().join("python");
            crate::testing::program(&path, text);
            path
        };
        let python = script("echo broken >&2; exit 3");
        let error = probe(&python, Duration::from_secs(30)).unwrap_err();
        assert!(
            error.to_string().contains("exit status: 3: broken"),
            "{error}"
        );
        let python = script("exec sleep 100");
        let error = probe(&python, Duration::from_millis(200)).unwrap_err();
        assert!(error.to_string().contains("no answer within"), "{error}");
    }
}
