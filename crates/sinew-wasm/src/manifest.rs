//! Manifest of the compiled interpreters, with their hashes.

use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Major version of wasmtime. Other versions refuse the compiled modules.
const MAJOR: &str = "48";

/// Content of `manifest.json` in the folder of the compiled modules.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Manifest {
    /// Package and version of the compiler.
    pub compiler: String,
    /// Modules by name.
    pub modules: BTreeMap<String, Module>,
}

/// One interpreter.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Module {
    /// Name and version, such as `CPython 3.12`.
    pub title: String,
    /// Package that contains the WebAssembly.
    pub package: String,
    /// SHA-256 of the WebAssembly in hexadecimal digits.
    pub wasm_sha256: String,
    /// SHA-256 of the compiled code in hexadecimal digits.
    pub sha256: String,
}

/// Reason why no modules can be used.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// No modules were compiled for this host.
    #[error(
        "no compiled interpreters in {folder}: {problem}; run scripts/wasm_modules.py {folder}"
    )]
    Missing {
        /// Searched folder.
        folder: String,
        /// Error of the system.
        problem: String,
    },
    /// The hash of a file differs from the manifest.
    #[error(
        "{path} has SHA-256 {found}, the manifest says {expected}: \
         remove the folder and run scripts/wasm_modules.py again"
    )]
    Changed {
        /// Path of the file.
        path: String,
        /// Hash of the file.
        found: String,
        /// Hash in the manifest.
        expected: String,
    },
}

impl Manifest {
    /// Finds the newest set of modules below `folder` and checks their hashes. Returns the manifest and its
    /// folder.
    ///
    /// # Errors
    /// [`ManifestError`] if there are no modules, or a hash is wrong.
    ///
    /// Files are read whole for their hashes, once for a provider and not for each worker.
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
        // The path is later used from another working directory.
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
