//! Which compiled interpreters there are, and that they are what was compiled.

use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Major version of the crate that runs what was compiled; others refuse it.
const MAJOR: &str = "48";

/// `manifest.json` beside the compiled modules.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Manifest {
    /// Package and version of the compiler.
    pub compiler: String,
    /// By the name that programs use.
    pub modules: BTreeMap<String, Module>,
}

/// One interpreter.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Module {
    /// Such as `CPython 3.12`.
    pub title: String,
    /// Where it comes from.
    pub package: String,
    /// SHA-256 of the WebAssembly.
    pub wasm_sha256: String,
    /// SHA-256 of the compiled code.
    pub sha256: String,
}

/// Why there are no modules to run.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// None were compiled for this machine.
    #[error(
        "no compiled interpreters in {folder}: {problem}; run scripts/wasm_modules.py {folder}"
    )]
    Missing {
        /// Folder that was looked into.
        folder: String,
        /// What the system said.
        problem: String,
    },
    /// A file is not what the manifest says.
    #[error(
        "{path} has SHA-256 {found}, the manifest says {expected}: remove the folder and run scripts/wasm_modules.py again"
    )]
    Changed {
        /// The file.
        path: String,
        /// Its hash.
        found: String,
        /// The hash that was written when it was compiled.
        expected: String,
    },
}

impl Manifest {
    /// Finds the newest set of modules below `folder`, and checks the hash of each.
    ///
    /// # Errors
    /// [`ManifestError`].
    pub fn load(folder: &Path) -> Result<(Self, PathBuf), ManifestError> {
        let missing = |problem: String| ManifestError::Missing {
            folder: folder.display().to_string(),
            problem,
        };
        let entries = std::fs::read_dir(folder).map_err(|e| missing(e.to_string()))?;
        let sets = entries.flatten().filter_map(|entry| {
            let path = entry.path().join("manifest.json");
            let made = path.metadata().and_then(|m| m.modified()).ok()?;
            Some((made, path))
        });
        let (_, path) = sets
            .max()
            .ok_or_else(|| missing("no manifest.json below it".into()))?;
        let text = std::fs::read(&path).map_err(|e| missing(e.to_string()))?;
        let manifest: Self = serde_json::from_slice(&text)
            .map_err(|e| missing(format!("{}: {e}", path.display())))?;
        let version = manifest.compiler.split("==").nth(1).unwrap_or_default();
        if version.split('.').next() != Some(MAJOR) {
            return Err(missing(format!(
                "{} compiled them, {MAJOR} runs them",
                manifest.compiler
            )));
        }
        // Whoever shows it to a sandbox stands elsewhere.
        let folder = path.parent().unwrap_or(folder);
        let folder = folder.canonicalize().map_err(|e| missing(e.to_string()))?;
        for (name, module) in &manifest.modules {
            let path = folder.join(format!("{name}.cwasm"));
            let bytes =
                std::fs::read(&path).map_err(|e| missing(format!("{}: {e}", path.display())))?;
            let found: String = Sha256::digest(&bytes)
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect();
            if found != module.sha256 {
                return Err(ManifestError::Changed {
                    path: path.display().to_string(),
                    found,
                    expected: module.sha256.clone(),
                });
            }
        }
        Ok((manifest, folder))
    }
}
