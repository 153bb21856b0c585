//! The end of the jobs of a run whose owner does not answer, such as one that still waits for a place.

use crate::failure::Failure;
use crate::launch::launcher;
use crate::launch_record::read_record;
use sinew_control::{Launched, LaunchedRole, Launcher, RoleId};
use std::path::Path;

/// A job that was ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedJob {
    /// Its name.
    pub name: String,
    /// It waited for a place, so that nothing of it ran.
    pub waited: bool,
}

/// Ends all jobs of the run with this folder through the engine that was asked to start its owner; `None` if
/// none was. Jobs that wait leave the engine's queue, those that run get its request to end first.
///
/// # Errors
/// If the record cannot be read, or the engine cannot be reached or refuses.
pub fn end_jobs(dir: &Path) -> Result<Option<Vec<EndedJob>>, Failure> {
    let Some(known) = read_record(dir)? else {
        return Ok(None);
    };
    let launch = known.plan.launch.as_ref();
    let launch = launch.ok_or_else(|| Failure::input("the recipe of the run has no [launch]"))?;
    end_all(launcher(launch, &known.run, &known.folder)?.as_ref()).map(Some)
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
            waited: matches!(job.state, Launched::Waiting(_)),
            name: job.name,
        });
    }
    Ok(ended)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environments::ENVIRONMENTS;
    use crate::launch_record::keep_record;
    use sinew_control::{LaunchError, RoleSpec};
    use sinew_recipe::RunPlan;
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
                job("demo-1-owner-0-1", Launched::Waiting("resources".into())),
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
            jobs: vec![job(
                "demo-1-owner-0-1",
                Launched::Waiting("resources".into()),
            )],
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
        let record = dir.path().join("runs/a.b.launch.json");
        std::fs::write(record, "{\"run\": 3}").unwrap();
        let wrong = end_jobs(&run).unwrap_err();
        assert!(wrong.text().contains("a.b.launch.json"), "{}", wrong.text());
    }
}
