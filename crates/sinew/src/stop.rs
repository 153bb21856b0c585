//! `sinew stop`: a run ends in order: commit, checkpoint, then its roles. Jobs of a run whose owner does not
//! answer, such as one that waits for a place, end through the engine that was asked to start them.

use crate::output;
use crate::owner_args::{OwnerArgs, failed};
use clap::Args;
use sinew_assembly::{EndedJob, Failure};
use sinew_control::ControlError;
use std::time::{Duration, Instant};

/// Interval of looks whether the owner still answers.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Arguments of `sinew stop`.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    #[command(flatten)]
    owner: OwnerArgs,
    /// Seconds to wait for the end; 0: none
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(..=86_400))]
    wait_s: u64,
}

/// `sinew stop`. A run that has ended is a success.
///
/// # Errors
/// If neither owner nor jobs can be found, an engine refuses, or the owner still answers after the time.
pub(crate) fn run(args: &StopArgs) -> Result<(), Failure> {
    let client = match args.owner.client() {
        Ok(client) => client,
        // An owner that has not begun yet left nothing in the folder.
        Err(failure) => {
            let jobs = args.owner.folder().map(sinew_assembly::end_jobs);
            let jobs = jobs.transpose()?.flatten();
            return jobs.map_or(Err(failure), |jobs| {
                output::print(&ended(&jobs));
                Ok(())
            });
        }
    };
    match (client.stop(), args.owner.folder()) {
        (Ok(()), _) => {}
        // A run's folder names its last owner.
        (Err(ControlError::Unreachable { .. }), Some(folder)) => {
            let jobs = sinew_assembly::end_jobs(folder)?;
            output::print(&ended(&jobs.unwrap_or_default()));
            return Ok(());
        }
        (Err(error), _) => return Err(failed(error)),
    }
    output::print("the run ends: commit, checkpoint, then its roles\n");
    let end = Instant::now() + Duration::from_secs(args.wait_s);
    while Instant::now() < end {
        if matches!(client.page(None), Err(ControlError::Unreachable { .. })) {
            output::print("it has ended\n");
            return Ok(());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    if args.wait_s == 0 {
        return Ok(());
    }
    Err(Failure::outside(format!(
        "the owner still works after {} s\n  hint: `sinew status` shows its roles; call this again",
        args.wait_s
    )))
}

/// The jobs that were ended in place of an owner that does not answer.
fn ended(jobs: &[EndedJob]) -> String {
    if jobs.is_empty() {
        return "no owner answers, and no job of the run waits or runs: it has ended\n".to_owned();
    }
    let line = |job: &EndedJob| {
        let state = if job.waited {
            "waited, and is cancelled"
        } else {
            "ran without an answer, and is asked to end"
        };
        format!("{} {state}\n", job.name)
    };
    jobs.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_that_waited_are_told_from_those_that_ran() {
        let job = |name: &str, waited| EndedJob {
            name: name.into(),
            waited,
        };
        let shown = ended(&[job("a-owner-0-0", true), job("a-rollout-0-0", false)]);
        assert!(shown.contains("a-owner-0-0 waited"), "{shown}");
        assert!(shown.contains("a-rollout-0-0 ran"), "{shown}");
        assert!(ended(&[]).contains("it has ended"));
    }
}
