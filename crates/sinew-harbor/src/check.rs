//! Checks of tasks without a model: the solution must pass, and an agent that does nothing must not.

use crate::env::{HarborFactory, folder_of};
use crate::folder::TaskFolder;
use crate::place::Place;
use crate::progress::{Next, Progress};
use crate::stages::{begin, solve, start};
use crate::verify::verify;
use futures::StreamExt;
use serde::Serialize;
use sinew_env::EnvError;
use sinew_types::Task;
use std::collections::BTreeMap;
use std::time::Instant;

/// One episode of a check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckRun {
    /// Reward; `None`: there is none, for the reason in `why`.
    pub reward: Option<f64>,
    /// Further rewards by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub parts: BTreeMap<String, f64>,
    /// The task counts as solved.
    pub success: bool,
    /// Seconds from the start to the score.
    pub seconds: f64,
    /// Reason of a missing reward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// A task that was checked.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskCheck {
    /// Id of the task.
    pub task: String,
    /// Type of the task.
    pub kind: String,
    /// Run of the solution.
    pub oracle: CheckRun,
    /// Run of an agent that does nothing.
    pub null: CheckRun,
}

impl TaskCheck {
    /// Whether the solution passes, and nothing else than it.
    pub fn passed(&self) -> bool {
        self.oracle.success && self.null.reward.is_some() && !self.null.success
    }
}

impl HarborFactory {
    /// Checks tasks, `sessions` at a time. `seen` gets each in the order of the tasks.
    pub async fn check_all(
        &self,
        tasks: &[Task],
        sessions: usize,
        mut seen: impl FnMut(&TaskCheck),
    ) -> Vec<TaskCheck> {
        let checks = tasks.iter().map(|task| self.check(task));
        let mut checks = futures::stream::iter(checks).buffered(sessions.max(1));
        let mut all = Vec::new();
        while let Some(check) = checks.next().await {
            seen(&check);
            all.push(check);
        }
        all
    }

    /// Checks one task.
    async fn check(&self, task: &Task) -> TaskCheck {
        TaskCheck {
            task: task.id.to_string(),
            kind: task.kind.clone(),
            oracle: self.checked(task, true).await,
            null: self.checked(task, false).await,
        }
    }

    /// Plays an episode. Its failure is a missing reward.
    async fn checked(&self, task: &Task, oracle: bool) -> CheckRun {
        let began = Instant::now();
        let played = self.play(task, oracle).await;
        let seconds = began.elapsed().as_secs_f64();
        let missing = |why: String| CheckRun {
            reward: None,
            parts: BTreeMap::new(),
            success: false,
            seconds,
            why: Some(why),
        };
        match played.map(|(progress, notes)| (progress.score(), notes)) {
            Err(e) => missing(e.to_string()),
            Ok((Err(unscored), _)) => missing(unscored.reason),
            Ok((Ok(score), note)) => CheckRun {
                reward: Some(score.value),
                success: score.is_success(),
                seconds,
                why: note.filter(|_| oracle && !score.is_success()),
                parts: score.parts,
            },
        }
    }

    /// The steps of a task, solved or left alone; and how the solution ended.
    async fn play(
        &self,
        task: &Task,
        oracle: bool,
    ) -> Result<(Progress, Option<String>), EnvError> {
        let folder = folder_of(task)?;
        let mut place = start(&self.world, &folder).await?;
        let played = self.steps(&folder, &mut place, oracle).await;
        let ended = place.sandbox.destroy().await;
        let played = played?;
        ended.map_err(|e| EnvError::Sandbox(e.to_string()))?;
        Ok(played)
    }

    async fn steps(
        &self,
        task: &TaskFolder,
        place: &mut Place,
        oracle: bool,
    ) -> Result<(Progress, Option<String>), EnvError> {
        let mut progress = Progress::new(task.steps.len(), task.manifest.strategy);
        let mut note = None;
        for step in &task.steps {
            begin(place, step).await?;
            if oracle {
                let done = solve(&self.world, task, step, place).await?;
                let said = crate::stages::said(&done);
                note = Some(format!("its solution ended with {}: {said}", done.ending));
            }
            let verified = verify(&self.world, task, step, place).await?;
            let least = step.min_reward.as_ref();
            if progress.verified(verified.rewards, least, false) == Next::Over {
                break;
            }
        }
        Ok((progress, note))
    }
}
