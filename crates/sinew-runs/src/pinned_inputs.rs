//! `pinned.json` in the folder of a run: the inputs of the run that are not in its folder, as they were when
//! the run began.
//!
//! Recipes name files and other runs, whose content can change before a run is resumed. A session that
//! resumes compares them with the pinned ones, so that no change comes in without a word. Changes that were
//! allowed are kept as well, with the step after which they came.

use crate::run_dir::{Resume, RunDir, RunDirError, write_atomic};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const FILE: &str = "pinned.json";

/// Inputs of a run that must not change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinnedInputs {
    /// Weights of other runs, by `model.weights`, `teacher.weights` and `reference.weights`.
    #[serde(default)]
    pub weights: BTreeMap<String, PinnedWeights>,
    /// BLAKE3 of rows, functions and rubrics, and versions of environments, by name.
    #[serde(default)]
    pub inputs: BTreeMap<String, String>,
    /// Allowed changes since the start, one a line, the oldest first.
    #[serde(default)]
    pub changes: Vec<String>,
}

/// A checkpoint of another run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinnedWeights {
    /// The run, as the recipe in the folder names it.
    pub run: String,
    /// Name of the checkpoint's folder.
    pub checkpoint: String,
    /// BLAKE3 over its files but those of the optimizer: 64 hexadecimal digits.
    pub weights: String,
}

impl PinnedInputs {
    /// Reads the pinned inputs of the run in a folder; `None`: it has not started, or lost the file.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(run_dir: &Path) -> Result<Option<Self>, RunDirError> {
        let path = run_dir.join(FILE);
        let damaged = |message: String| RunDirError::Damaged {
            path: path.clone(),
            message: format!(
                "{message}\n  hint: it keeps which weights, rows and functions the run stands on, so that none \
                 changes unseen; without the file those of now are taken"
            ),
        };
        match std::fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text).map_err(|e| damaged(e.to_string())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(damaged(e.to_string())),
        }
    }

    /// Writes it in place of what was there.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn write(&self, run_dir: &Path) -> Result<(), RunDirError> {
        let io = |source| RunDirError::Io {
            path: run_dir.into(),
            source,
        };
        let text = serde_json::to_string_pretty(self).map_err(|e| io(e.into()))?;
        write_atomic(&run_dir.join(FILE), text.as_bytes()).map_err(io)
    }
}

impl RunDir {
    /// Compares the inputs of a session with those of the sessions before: a line for each change, all of
    /// which were allowed.
    ///
    /// # Errors
    /// All changes that were not allowed, with the options that allow them.
    pub fn check_inputs(
        &self,
        old: &BTreeMap<String, String>,
        new: &BTreeMap<String, String>,
        resume: &Resume,
    ) -> Result<Vec<String>, RunDirError> {
        let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
        let changed = names
            .into_iter()
            .filter(|name| old.get(*name) != new.get(*name));
        let changed: Vec<&String> = changed.collect();
        let line = |name: &&String| {
            let shown = |of: &BTreeMap<String, String>| {
                let value = of.get(*name).map_or("(nothing)", String::as_str);
                value.chars().take(16).collect::<String>()
            };
            format!("{name}: {} became {}", shown(old), shown(new))
        };
        let refused: Vec<&&String> = changed.iter().filter(|n| !resume.allows(n)).collect();
        if refused.is_empty() {
            return Ok(changed.iter().map(line).collect());
        }
        let flags = refused
            .iter()
            .map(|name| format!("--allow-change '{name}'"));
        Err(RunDirError::Inputs {
            path: self.path().into(),
            changes: refused
                .iter()
                .map(|n| format!("    {}\n", line(n)))
                .collect(),
            flags: flags.collect::<Vec<_>>().join(" "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_env::{BUILT_IN, Registry};
    use sinew_recipe::RunPlan;

    #[test]
    fn changes_are_refused_by_name_unless_they_are_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let text = "name = \"t\"\nmodel = \"x\"\nenv = { type = \"tool_math\" }\n";
        let recipe = RunPlan::parse(Path::new("r.toml"), text, Registry::new(&BUILT_IN)).unwrap();
        let run = RunDir::open(dir.path(), &recipe, None).unwrap();
        let table = |all: &[(&str, &str)]| -> BTreeMap<String, String> {
            all.iter()
                .map(|(a, b)| ((*a).into(), (*b).into()))
                .collect()
        };
        let old = table(&[
            ("reward.r.py:f", "1"),
            ("tasks.rows", "2"),
            ("env.version", "3"),
        ]);
        let new = table(&[
            ("tasks.rows", "4"),
            ("env.version", "3"),
            ("judge.a.rubric", "5"),
        ]);
        let allow = |keys: &[&str]| Resume {
            allow_change: keys.iter().map(|k| (*k).to_owned()).collect(),
        };
        assert!(
            run.check_inputs(&old, &old, &allow(&[]))
                .unwrap()
                .is_empty()
        );
        let e = run
            .check_inputs(&old, &new, &allow(&["tasks"]))
            .unwrap_err()
            .to_string();
        for needle in [
            "reward.r.py:f: 1 became (nothing)",
            "judge.a.rubric: (nothing) became 5",
            "--allow-change 'reward.r.py:f'",
        ] {
            assert!(e.contains(needle), "{e}");
        }
        assert!(
            !e.contains("tasks.rows") && !e.contains("env.version"),
            "{e}"
        );
        let all = allow(&["tasks", "reward", "judge.a.rubric"]);
        assert_eq!(run.check_inputs(&old, &new, &all).unwrap().len(), 3);
        let pinned = PinnedInputs {
            inputs: new,
            ..PinnedInputs::default()
        };
        assert_eq!(PinnedInputs::read(dir.path()).unwrap(), None);
        pinned.write(dir.path()).unwrap();
        assert_eq!(PinnedInputs::read(dir.path()).unwrap(), Some(pinned));
        std::fs::write(dir.path().join(FILE), "{").unwrap();
        assert!(matches!(
            PinnedInputs::read(dir.path()),
            Err(RunDirError::Damaged { .. })
        ));
    }
}
