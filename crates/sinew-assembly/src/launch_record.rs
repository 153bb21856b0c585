//! The record of a run whose owner an engine starts: by it a command finds the jobs of the run while no owner
//! answers, such as one that still waits for a place.

use crate::environments::ENVIRONMENTS;
use crate::failure::Failure;
use crate::launch::launcher;
use serde::{Deserialize, Serialize};
use sinew_control::{Launched, LaunchedRole, Launcher, RoleId};
use sinew_recipe::RunPlan;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Appended to the name of a run's folder: the record is next to it, as the folder may be in a cluster only.
const SUFFIX: &str = ".launch.json";

/// Facts by which the engine knows the run.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LaunchRecord {
    /// Name of the run for the engine.
    run: String,
    /// Folder of the run as its owner sees it.
    folder: PathBuf,
    /// The recipe, as TOML.
    recipe: String,
}

/// A job that was ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedJob {
    /// Its name.
    pub name: String,
    /// It waited for a place, so that nothing of it ran.
    pub waited: bool,
}

/// The record of a run with this folder.
fn record_of(dir: &Path) -> PathBuf {
    let mut name = dir.file_name().unwrap_or_default().to_owned();
    name.push(SUFFIX);
    dir.with_file_name(name)
}

/// Keeps what finds the jobs of a run again. `dir` is its folder on this host, `folder` that of its owner.
///
/// # Errors
/// If the record cannot be written.
pub(crate) fn keep_record(
    plan: &RunPlan,
    dir: &Path,
    folder: &Path,
    run: &str,
) -> Result<(), Failure> {
    let record = LaunchRecord {
        run: run.to_owned(),
        folder: folder.to_owned(),
        recipe: toml::to_string(plan).map_err(Failure::system)?,
    };
    let path = record_of(dir);
    let failed = |e: std::io::Error| Failure::input(format!("{}: {e}", path.display()));
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    let text = serde_json::to_vec(&record).map_err(Failure::system)?;
    std::fs::write(&path, text).map_err(failed)
}

/// Ends all jobs of the run with this folder through the engine that was asked to start its owner; `None` if
/// none was. Jobs that wait leave the engine's queue, those that run get its request to end first.
///
/// # Errors
/// If the record cannot be read, or the engine cannot be reached or refuses.
pub fn end_jobs(dir: &Path) -> Result<Option<Vec<EndedJob>>, Failure> {
    let path = record_of(dir);
    let wrong = |e: &dyn std::fmt::Display| Failure::input(format!("{}: {e}", path.display()));
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(wrong(&e)),
    };
    let record: LaunchRecord = serde_json::from_str(&text).map_err(|e| wrong(&e))?;
    let plan = RunPlan::parse(&path, &record.recipe, ENVIRONMENTS)?;
    let launch = plan.launch.as_ref();
    let launch = launch.ok_or_else(|| wrong(&"its recipe has no [launch]"))?;
    end_all(launcher(launch, &record.run, &record.folder)?.as_ref()).map(Some)
}

/// Ends all jobs: first the owner, which would start its roles again.
fn end_all(launcher: &dyn Launcher) -> Result<Vec<EndedJob>, Failure> {
    let is_live = |job: &LaunchedRole| !matches!(job.state, Launched::Ended(_));
    let mut jobs: Vec<LaunchedRole> = launcher.list()?.into_iter().filter(is_live).collect();
    jobs.sort_by_key(|job| RoleId::parse(&job.name).is_some());
    let mut ended = Vec::new();
    for job in jobs {
        launcher.stop(&job.name)?;
        ended.push(EndedJob {
            waited: job.state == Launched::Waiting,
            name: job.name,
        });
    }
    Ok(ended)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_control::{LaunchError, RoleSpec};
    use std::sync::Mutex;

    /// An engine with a fixed list, which refuses to end one job.
    #[derive(Debug, Default)]
    struct Engine {
        jobs: Vec<LaunchedRole>,
        refuses: Option<&'static str>,
        stopped: Mutex<Vec<String>>,
    }

    impl Launcher for Engine {
        fn name(&self) -> &'static str {
            "test"
        }

        fn preview(&self, _: &RoleSpec) -> Result<String, LaunchError> {
            Ok(String::new())
        }

        fn ensure(&self, _: &RoleSpec) -> Result<(), LaunchError> {
            Ok(())
        }

        fn list(&self) -> Result<Vec<LaunchedRole>, LaunchError> {
            Ok(self.jobs.clone())
        }

        fn logs(&self, _: &str, _: usize) -> Result<String, LaunchError> {
            Ok(String::new())
        }

        fn stop(&self, name: &str) -> Result<(), LaunchError> {
            if self.refuses == Some(name) {
                return Err(LaunchError::Call {
                    engine: "test",
                    call: "stop".into(),
                    why: "not yours".into(),
                });
            }
            self.stopped.lock().unwrap().push(name.to_owned());
            Ok(())
        }
    }

    fn job(name: &str, state: Launched) -> LaunchedRole {
        LaunchedRole {
            name: name.into(),
            state,
        }
    }

    #[test]
    fn the_owner_ends_first_and_ended_jobs_are_left() {
        let engine = Engine {
            jobs: vec![
                job("demo-1-rollout-0-0", Launched::Running),
                job("demo-1-owner-0-0", Launched::Ended("lost".into())),
                job("demo-1-owner-0-1", Launched::Waiting),
            ],
            ..Engine::default()
        };
        let ended = end_all(&engine).unwrap();
        let shown: Vec<(&str, bool)> = ended.iter().map(|j| (j.name.as_str(), j.waited)).collect();
        let expected = [("demo-1-owner-0-1", true), ("demo-1-rollout-0-0", false)];
        assert_eq!(shown, expected);
        let stopped = engine.stopped.into_inner().unwrap();
        assert_eq!(stopped, ["demo-1-owner-0-1", "demo-1-rollout-0-0"]);
    }

    #[test]
    fn a_refusal_of_the_engine_is_reported() {
        let engine = Engine {
            jobs: vec![job("demo-1-owner-0-1", Launched::Waiting)],
            refuses: Some("demo-1-owner-0-1"),
            ..Engine::default()
        };
        let refused = end_all(&engine).unwrap_err();
        assert!(refused.text().contains("not yours"), "{}", refused.text());
    }

    #[test]
    fn a_run_is_found_by_its_record_only() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("runs/a.b");
        assert_eq!(end_jobs(&run).unwrap(), None);
        let text = "name = \"demo\"\nmodel = { type = \"scratch\", d_model = 64, layers = 2, heads = 4, \
                    kv_heads = 2, d_ff = 128 }\nenv = { type = \"tiny\" }\nalgorithm = { type = \"grpo\" }\n\
                    [launch]\n";
        let plan = RunPlan::parse(Path::new("demo.toml"), text, ENVIRONMENTS).unwrap();
        keep_record(&plan, &run, &run, "demo-1").unwrap();
        assert!(dir.path().join("runs/a.b.launch.json").is_file() && !run.exists());
        // Child processes belong to the run's own process.
        assert_eq!(end_jobs(&run).unwrap(), Some(Vec::new()));
        std::fs::write(record_of(&run), "{\"run\": 3}").unwrap();
        let wrong = end_jobs(&run).unwrap_err();
        assert!(wrong.text().contains("a.b.launch.json"), "{}", wrong.text());
    }
}
