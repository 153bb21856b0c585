//! `sinew stop`: a run ends in order: commit, checkpoint, then its roles.

use crate::output;
use crate::owner_args::{OwnerArgs, failed};
use clap::Args;
use sinew_assembly::Failure;
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
/// If the owner cannot be found, or still answers after the time.
pub(crate) fn run(args: &StopArgs) -> Result<(), Failure> {
    let client = args.owner.client()?;
    match client.stop() {
        Ok(()) => {}
        // A run's folder names its last owner.
        Err(ControlError::Unreachable { .. }) if !args.owner.is_address() => {
            output::print("no owner answers: the run has ended\n");
            return Ok(());
        }
        Err(error) => return Err(failed(error)),
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
