//! `sinew scale`: how many roles of a kind a run has.

use crate::output;
use crate::owner_args::{OwnerArgs, failed};
use clap::Args;
use sinew_assembly::Failure;
use sinew_control::{Registration, RoleKind, ScalePlan};

/// Arguments of `sinew scale`.
#[derive(Debug, Args)]
pub(crate) struct ScaleArgs {
    #[command(flatten)]
    owner: OwnerArgs,
    /// Wanted counts, such as rollout=8: absolute, so that the same call again changes nothing
    #[arg(value_name = "KIND=COUNT", required_unless_present = "add")]
    counts: Vec<String>,
    /// A server that runs already, such as engine=http://10.0.0.7:8000; may be given several times
    #[arg(long, value_name = "KIND=URL")]
    add: Vec<String>,
    /// Show what would start and drain, and change nothing
    #[arg(long, conflicts_with = "add")]
    dry_run: bool,
    /// One JSON object for each count and each added server
    #[arg(long)]
    json: bool,
}

/// `sinew scale`.
///
/// # Errors
/// If an argument is none, or the owner cannot be found or refuses.
pub(crate) fn run(args: &ScaleArgs) -> Result<(), Failure> {
    let counts: Vec<(RoleKind, u32)> = args
        .counts
        .iter()
        .map(|text| count(text))
        .collect::<Result<_, _>>()?;
    let servers: Vec<Registration> = args
        .add
        .iter()
        .map(|text| server(text))
        .collect::<Result<_, _>>()?;
    let client = args.owner.client()?;
    for registration in &servers {
        let id = client.add(registration).map_err(failed)?;
        if args.json {
            output::print_json(&serde_json::json!({ "added": id }));
        } else {
            output::print(&format!("{id} is added\n"));
        }
    }
    for (kind, count) in counts {
        let plan = client.scale(kind, count, args.dry_run).map_err(failed)?;
        if args.json {
            output::print_json(&serde_json::to_value(&plan).map_err(Failure::system)?);
        } else {
            output::print(&text(&plan));
        }
    }
    Ok(())
}

fn text(plan: &ScalePlan) -> String {
    let ScalePlan {
        kind,
        before,
        count,
        ..
    } = plan;
    let mut text = format!("{kind}: {before} -> {count}");
    if plan.is_met() {
        text.push_str(", which is met");
    }
    text.push('\n');
    let (starts, drains) = match () {
        () if plan.dry_run => ("would start", "would drain"),
        () => ("starts", "drains"),
    };
    for (word, ids) in [(starts, &plan.start), (drains, &plan.drain)] {
        for id in ids {
            text.push_str(&format!("  {word} {id}\n"));
        }
    }
    text
}

/// A kind and the text after it.
fn pair(text: &str) -> Result<(RoleKind, &str), Failure> {
    let wrong = || Failure::input(format!("{text:?}: allowed: KIND=COUNT, such as rollout=8"));
    let (kind, rest) = text.split_once('=').ok_or_else(wrong)?;
    Ok((kind.parse().map_err(Failure::input)?, rest))
}

fn count(text: &str) -> Result<(RoleKind, u32), Failure> {
    let (kind, number) = pair(text)?;
    let number = number
        .parse()
        .map_err(|_| Failure::input(format!("{text:?}: allowed: a whole number after {kind}=")))?;
    Ok((kind, number))
}

fn server(text: &str) -> Result<Registration, Failure> {
    let (kind, url) = pair(text)?;
    let host = url.split("://").nth(1).unwrap_or_default();
    let host = host.split(['/', ':']).next().unwrap_or_default();
    if host.is_empty() {
        return Err(Failure::input(format!(
            "{text:?}: allowed: {kind}=http://HOST:PORT"
        )));
    }
    Ok(Registration {
        kind,
        name: url.to_owned(),
        host: host.to_owned(),
        address: Some(url.to_owned()),
        build: String::new(),
        capacity: 1,
        preemptible: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_name_a_kind_and_a_count_or_a_server() {
        assert_eq!(count("rollout=8").unwrap(), (RoleKind::Rollout, 8));
        for wrong in ["rollout", "rollouts=8", "rollout=-1", "rollout=many"] {
            assert!(count(wrong).is_err(), "{wrong}");
        }
        let added = server("engine=http://10.0.0.7:8000").unwrap();
        assert_eq!(
            (added.host.as_str(), added.kind),
            ("10.0.0.7", RoleKind::Engine)
        );
        assert!(server("engine=10.0.0.7").is_err());
    }
}
