//! A run as an offline session of ClearML, which `Task.import_offline_session(FOLDER)` sends to a server.
//!
//! A folder `offline-ID` with `task.json`, the task as `Task.export_task` gives it, and `metrics.jsonl`,
//! where a line is a list of requests of `events.add_batch`. As clearml 2.1 reads them. Each session is a
//! task of its own.

use crate::config::ClearmlConfig;
use crate::facts::Run;
use crate::files;
use crate::params::params;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Section of parameters that have none.
const SECTION: &str = "General";

/// An offline session at work.
#[derive(Debug)]
pub(crate) struct Clearml {
    file: File,
    id: String,
}

impl Clearml {
    /// Begins a session in a folder of `folder`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn start(
        config: &ClearmlConfig,
        run: &Run,
        folder: &Path,
        now_unix_s: f64,
    ) -> std::io::Result<Self> {
        let id = format!("offline-{}", &run.session(now_unix_s)[..32]);
        let own = folder.join(&id);
        std::fs::create_dir_all(&own)?;
        let recipe = serde_json::to_string_pretty(&run.recipe)?;
        let task = json!({
            "id": id,
            "name": run.name,
            "project_name": config.project,
            "type": "training",
            "tags": config.tags,
            "hyperparams": sections(&run.recipe),
            "configuration": { "recipe": { "name": "recipe", "type": "json", "value": recipe } },
            "execution": { "artifacts": [] },
            "script": {},
            "offline_folder": own,
            "offline_output_models": [],
        });
        // A session without its task cannot be read at all: it is there first, and whole.
        files::replace(&own.join("task.json"), &task.to_string())?;
        let file = File::create_new(own.join("metrics.jsonl"))?;
        Ok(Self { file, id })
    }

    /// Adds the numbers of a step.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(crate) fn row(
        &mut self,
        step: u64,
        numbers: &[(String, f64)],
        now_unix_s: f64,
    ) -> std::io::Result<()> {
        let event = |(name, value): &(String, f64)| {
            // The part before the slash is a plot, the rest a line in it.
            let (metric, variant) = name.split_once('/').unwrap_or((name, name));
            json!({
                "type": "training_stats_scalar", "task": self.id, "iter": step, "metric": metric, "variant": variant,
                "value": value, "timestamp": (now_unix_s * 1000.0) as u64,
            })
        };
        let mut line = Value::Array(numbers.iter().map(event).collect()).to_string();
        line.push('\n');
        self.file.write_all(line.as_bytes())
    }
}

/// Parameters by section: that is the first part of the way to a value.
fn sections(recipe: &Value) -> Value {
    let mut sections = Map::new();
    for (way, value) in params(recipe) {
        let (section, name) = way.split_once('.').unwrap_or((SECTION, &way));
        let param = json!({ "section": section, "name": name, "value": value, "type": "" });
        let of = sections.entry(section).or_insert_with(|| json!({}));
        of[name] = param;
    }
    Value::Object(sections)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_sections() {
        let recipe = json!({ "seed": 7, "train": { "steps": 3, "mode": "sync" } });
        let sections = sections(&recipe);
        let value = |section: &str, name: &str| sections[section][name]["value"].clone();
        assert_eq!(value(SECTION, "seed"), "7");
        assert_eq!(
            (value("train", "steps"), value("train", "mode")),
            ("3".into(), "sync".into())
        );
    }
}
