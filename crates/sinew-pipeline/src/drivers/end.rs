//! The end of a run: its result as a whole, or the reason why it could not continue.

use super::sync::Driver;
use sinew_orchestrator::{Phase, PipelineError, Process, RunEvent, RunOutcome};

impl Driver {
    /// Returns the results of a run that has ended.
    pub(super) fn end(&mut self) -> Result<RunOutcome, PipelineError> {
        let since = self.p.saved.step;
        let rest = self.take_waits();
        self.sums.totals.waits.add(&rest);
        let (waiting, by_draw) = (self.waiting()?, self.overlaps());
        let (samples, torn) =
            self.p
                .store
                .samples(self.sums.samples, (since, by_draw), &waiting)?;
        self.warn_of_loss(torn, None)?;
        self.emit(RunEvent::Phase(Phase::Done))?;
        let verdict = self.sums.course.verdict(Process::Ended, None);
        let mut trouble: Vec<String> = verdict.trouble().into_iter().collect();
        trouble.extend(self.measurements.trouble.take());
        let lost = self.earlier.lost + torn;
        if lost > 0 && !self.p.config.accept_loss {
            trouble.push(format!(
                "{lost} trained episodes are gone from the store\n  hint: --accept-loss ends with 0 all the same"
            ));
        }
        self.emit(RunEvent::Ended {
            process: Process::Ended,
            why: (!trouble.is_empty()).then(|| trouble.join("\n")),
        })?;
        Ok(RunOutcome {
            before: std::mem::take(&mut self.measurements.before),
            after: std::mem::take(&mut self.measurements.after),
            gain: self.measurements.gain.take(),
            examples: std::mem::take(&mut self.measurements.examples),
            samples,
            tokens: std::mem::take(&mut self.sums.tokens),
            wall_s: self.wall_s(),
            totals: std::mem::take(&mut self.sums.totals),
            verdict: Some(verdict),
            trouble,
        })
    }

    /// A run that ends before its time. A resume goes back to its last checkpoint.
    pub(super) fn stopped(&self, why: &str) -> PipelineError {
        let (dir, command) = (self.run_dir().display(), self.p.config.command);
        let go_on = format!(
            "`sinew {command} {dir}/recipe.toml --run-dir {dir} --resume` goes back to step {}: committed steps after it \
             are trained from their stored episodes, failed episodes of other steps run again",
            self.core.saved_step()
        );
        PipelineError::system(if why.contains("\n  hint: ") {
            format!("the run was stopped: {why}; {go_on}")
        } else {
            format!("the run was stopped: {why}\n  hint: when the cause is put right, {go_on}")
        })
    }
}
