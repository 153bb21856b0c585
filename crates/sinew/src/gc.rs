//! `sinew gc`: removes stored episodes that are not needed any more.
//!
//! A resume goes back to a checkpoint and trains the steps after it again, from the store. So only people
//! need the episodes of steps before the oldest kept checkpoint. No other file of a run is ever removed. Of a
//! store in a database whose payloads are elsewhere, the objects go that no episode refers to any more.

use crate::output;
use clap::Args;
use serde_json::json;
use sinew_assembly::{Expiry, Failure};
use sinew_store::SweepReport;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// Arguments of `sinew gc`.
#[derive(Debug, Args)]
pub(crate) struct GcArgs {
    /// Folder of the run or collection
    run_dir: PathBuf,
    /// Episodes that ended longer ago than this: a number with s, m, h, d or w, such as 7d
    #[arg(long, value_name = "AGE", value_parser = age)]
    older_than: Option<f64>,
    /// Episodes that policy versions below this one sampled
    #[arg(long, value_name = "N")]
    below_version: Option<u64>,
    /// Episodes of environments that have another version in this recipe now
    #[arg(long, value_name = "RECIPE")]
    env_changed: Option<PathBuf>,
    /// Objects that no episode of a store in a database refers to go when they are older than this
    #[arg(long, value_name = "AGE", default_value = "1d", value_parser = age)]
    objects_older_than: f64,
    /// Count what would be removed, list the objects, and remove nothing
    #[arg(long)]
    dry_run: bool,
    /// Go on without stored episodes that cannot be read any more
    #[arg(long)]
    accept_loss: bool,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Seconds of an age.
pub(crate) fn age(text: &str) -> Result<f64, String> {
    let allowed = || "allowed: a number with s, m, h, d or w, such as 36h or 7d".to_owned();
    let unit = text.char_indices().last().ok_or_else(allowed)?;
    let seconds = match unit.1 {
        's' => 1.0,
        'm' => 60.0,
        'h' => 3600.0,
        'd' => 86_400.0,
        'w' => 604_800.0,
        _ => return Err(allowed()),
    };
    let number = text[..unit.0].parse::<f64>().ok();
    let number = number.filter(|n| n.is_finite() && (0.0..=1e6).contains(n));
    number.map(|n| n * seconds).ok_or_else(allowed)
}

/// Now, less so many seconds, in seconds since 1970.
pub(crate) fn ago(seconds: f64) -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs_f64() - seconds
}

/// Removes what the options name and nothing needs any more; without options what a run trained. Held-out
/// episodes stay: a resumed run compares with them.
///
/// # Errors
/// If a process holds the store, or the run has no checkpoint, as those that do not train.
pub(crate) fn run(args: &GcArgs) -> Result<(), Failure> {
    let expiry = Expiry {
        ended_before: args.older_than.map(ago),
        below_version: args.below_version,
        env_changed: args
            .env_changed
            .as_deref()
            .map(sinew_assembly::versions)
            .transpose()?,
    };
    let objects_before = ago(args.objects_older_than);
    let removed = sinew_assembly::expire(
        &args.run_dir,
        &expiry,
        objects_before,
        args.dry_run,
        args.accept_loss,
    )?;
    let (step, report, objects) = (removed.through_step, removed.report, &removed.objects);
    if args.json {
        output::print_json(&json!({
            "through_step": step, "episodes": report.episodes, "bytes": report.bytes,
            "needed": removed.needed, "dry_run": args.dry_run, "objects": objects,
        }));
        return Ok(());
    }
    let what = match (expiry == Expiry::default(), step) {
        (true, Some(step)) => format!("trained episodes of steps 1 to {step}"),
        _ => "episodes".to_owned(),
    };
    let (count, mib) = (report.episodes, report.bytes as f64 / f64::from(1 << 20));
    let mut text = if args.dry_run {
        format!("{count} {what} would be removed")
    } else {
        format!("{count} {what} removed, {mib:.1} MiB freed")
    };
    if removed.needed > 0 {
        let needed = removed.needed;
        text += &format!("; {needed} more are kept, since going on with --resume may need them");
    }
    output::print(&(text + "\n" + &swept(objects, args.dry_run)));
    Ok(())
}

/// The end of objects that no episode refers to; empty without any. A dry run names them.
fn swept(objects: &SweepReport, dry_run: bool) -> String {
    let (count, mib) = (objects.objects, objects.bytes as f64 / f64::from(1 << 20));
    if count == 0 {
        return String::new();
    }
    if !dry_run {
        return format!("{count} objects that no episode refers to deleted, {mib:.1} MiB freed\n");
    }
    let mut text =
        format!("{count} objects that no episode refers to would be deleted, {mib:.1} MiB:\n");
    for name in &objects.names {
        text += &format!("  {name}\n");
    }
    let more = count.saturating_sub(objects.names.len() as u64);
    if more > 0 {
        text += &format!("  ... and {more} more\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dry_run_names_objects_and_counts_the_rest() {
        assert_eq!(swept(&SweepReport::default(), true), "");
        let mut objects = SweepReport::default();
        for n in 0..1_002 {
            objects.add(format!("s/0/ab/{n}"), 1 << 20);
        }
        assert!(!swept(&objects, false).contains("s/0"));
        let listed = swept(&objects, true);
        assert!(listed.starts_with("1002 objects"), "{listed}");
        assert!(listed.contains("  s/0/ab/999\n") && listed.ends_with("and 2 more\n"));
    }

    #[test]
    fn ages_have_a_unit() {
        assert_eq!(age("7d"), Ok(604_800.0));
        assert_eq!(age("0s"), Ok(0.0));
        assert_eq!(age("1.5h"), Ok(5400.0));
        for wrong in ["", "d", "7", "-1d", "7 days", "nand", "1e9w", "7ü"] {
            assert!(age(wrong).is_err(), "{wrong}");
        }
    }
}
