//! Reasons why a command ended badly, with their exit codes.
//!
//! Library errors become a [`Failure`] in the command, which can decide whose mistake it is: the same missing
//! file is wrong input if it was typed, and a failure of the system if a run wrote it. Messages are for
//! users, name the key or the option, and end with a hint if there is one.

use crate::levels::LevelError;
use sinew_orchestrator::PipelineError;
use sinew_recipe::RecipeError;
use sinew_runs::chain::ChainError;
use sinew_runs::{RunDirError, RunEnd};
use std::path::Path;

/// Exit codes: 1 the system failed, or a run collapsed or could not learn; 2 the input is wrong;
/// 3 something outside is missing; 130 interrupted; 0 ended by `sinew stop`; or a program's own.
#[derive(Debug)]
pub enum Failure {
    /// A recipe, an argument or a file that the user can put right.
    Input(String),
    /// A recipe that is refused: the text, the key, and the line and column in the file, from 1.
    Recipe(String, Option<String>, Option<(usize, usize)>),
    /// Anything else.
    System(String),
    /// The trainer's processes are gone; the run can continue from its last checkpoint.
    TrainerLost(String),
    /// The request is right, but needs something that is not there yet, which the text names.
    Outside(String),
    /// Ctrl-C or TERM; nothing is lost.
    Interrupt(String),
    /// `sinew stop` ended the run; nothing is lost. An engine would start the owner again after a failure.
    Stopped(String),
    /// A program that was run here ended with this status; the text is empty if it was printed already.
    Program(u8, String),
}

impl Failure {
    /// A mistake in a recipe, an argument or a file. The text names the allowed values and a way out.
    pub fn input(text: impl std::fmt::Display) -> Self {
        Self::Input(text.to_string())
    }

    /// Anything that the user did not cause by what was typed.
    pub fn system(text: impl std::fmt::Display) -> Self {
        Self::System(text.to_string())
    }

    /// The failure as an object, for `--json`; of a refused recipe with `field`, `line` and `column`.
    pub fn json(&self) -> serde_json::Value {
        let mut error = serde_json::json!({ "message": self.text(), "status": self.code() });
        if let Self::Recipe(_, field, at) = self {
            error["field"] = serde_json::json!(field);
            error["line"] = serde_json::json!(at.map(|(line, _)| line));
            error["column"] = serde_json::json!(at.map(|(_, column)| column));
        }
        serde_json::json!({ "error": error })
    }

    /// Something that must be started, installed or downloaded first.
    pub fn outside(text: impl std::fmt::Display) -> Self {
        Self::Outside(text.to_string())
    }

    /// Message of an interrupted `sinew {command}`: the results that are kept, and the command that resumes.
    /// `more` are options that it needs again.
    pub fn how_to_go_on(command: &str, run_dir: &Path, more: &str) -> String {
        let dir = run_dir.display();
        format!(
            "finished episodes and steps are kept\n  hint: go on with `sinew {command} {dir}/recipe.toml --run-dir {dir} --resume{more}`"
        )
    }

    /// An interrupted `sinew {command}`, as [`Failure::how_to_go_on`].
    pub fn interrupt(command: &str, run_dir: &Path, more: &str) -> Self {
        let kept = Self::how_to_go_on(command, run_dir, more);
        Self::Interrupt(format!("interrupted; {kept}"))
    }

    /// Returns an interrupt as an end by `sinew stop`, if that was the reason.
    #[must_use]
    pub fn by_order(self, ordered: bool) -> Self {
        match self {
            Self::Interrupt(text) if ordered => Self::Stopped(text),
            other => other,
        }
    }

    /// A judge's budget that ended `sinew {command}`, with the way to continue.
    pub fn spent(why: &str, command: &str, run_dir: &Path) -> Self {
        let dir = run_dir.display();
        Self::Outside(format!(
            "{why}\n  finished episodes and steps are kept; hint: raise the limit in {dir}/recipe.toml, and go on with `sinew \
             {command} {dir}/recipe.toml --run-dir {dir} --resume --allow-change judge.NAME.KEY`"
        ))
    }

    /// Returns the failure with a prefix that names its subject.
    pub fn of(self, what: &str) -> Self {
        let text = format!("{what}: {}", self.text());
        match self {
            Self::Input(_) => Self::Input(text),
            Self::Outside(_) => Self::Outside(text),
            Self::System(_) => Self::System(text),
            other => other,
        }
    }

    /// End to record in the run's folder.
    pub fn run_end(&self) -> RunEnd<'_> {
        match self {
            Self::Interrupt(why) | Self::Stopped(why) => RunEnd::Interrupted(why),
            _ => RunEnd::Failed(self.text()),
        }
    }

    /// Exit code of the process.
    pub fn code(&self) -> u8 {
        match self {
            Self::System(_) | Self::TrainerLost(_) => 1,
            Self::Input(_) | Self::Recipe(..) => 2,
            Self::Outside(_) => 3,
            Self::Interrupt(_) => 130,
            Self::Stopped(_) => 0,
            Self::Program(code, _) => *code,
        }
    }

    /// The message without the program's name; empty where it was printed already.
    pub fn text(&self) -> &str {
        match self {
            Self::Input(text)
            | Self::Recipe(text, ..)
            | Self::System(text)
            | Self::TrainerLost(text)
            | Self::Outside(text)
            | Self::Interrupt(text)
            | Self::Stopped(text)
            | Self::Program(_, text) => text,
        }
    }
}

impl From<RecipeError> for Failure {
    /// Exit code 2; keeps the key and the place in the file.
    fn from(e: RecipeError) -> Self {
        Self::Recipe(e.to_string(), e.key(), e.at())
    }
}

impl From<PipelineError> for Failure {
    /// The kind of the loop's error is kept.
    fn from(e: PipelineError) -> Self {
        match e {
            PipelineError::Input(text) => Self::Input(text),
            PipelineError::System(text) => Self::System(text),
            PipelineError::TrainerLost(text) => Self::TrainerLost(text),
            PipelineError::Interrupted => Self::Interrupt("interrupted".into()),
        }
    }
}

impl From<LevelError> for Failure {
    /// The kind is kept: a level may be wrong input, missing here, or broken.
    fn from(e: LevelError) -> Self {
        match e {
            LevelError::Input(text) => Self::Input(text),
            LevelError::System(text) => Self::System(text),
            LevelError::Outside(text) => Self::Outside(text),
        }
    }
}

impl From<RunDirError> for Failure {
    /// The user names the folder of a run, so a fault of it is wrong input. Its metrics are not input.
    fn from(e: RunDirError) -> Self {
        match e {
            RunDirError::Metrics(_) => Self::system(e),
            _ => Self::input(e),
        }
    }
}

impl From<ChainError> for Failure {
    /// Maps an error as for a run folder. A stage whose folder has other weights than those with which it
    /// ended is a failure of the system.
    fn from(e: ChainError) -> Self {
        match e {
            ChainError::Weights { .. } => Self::system(e),
            _ => Self::input(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_by_order_is_no_failure_for_an_engine() {
        let interrupt = || Failure::Interrupt("kept".into());
        assert_eq!(interrupt().by_order(false).code(), 130);
        let stopped = interrupt().by_order(true);
        assert_eq!((stopped.code(), stopped.text()), (0, "kept"));
        assert!(matches!(stopped.run_end(), RunEnd::Interrupted(_)));
        assert_eq!(Failure::input("wrong").by_order(true).code(), 2);
    }
}
