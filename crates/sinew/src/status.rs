//! `sinew status`: the roles of a run that works.

use crate::output;
use crate::owner_args::{OwnerArgs, failed};
use clap::Args;
use sinew_assembly::Failure;
use sinew_control::{RoleKind, RoleView, RolesPage};
use std::fmt::Write;

/// Arguments of `sinew status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    owner: OwnerArgs,
    /// Only roles of this kind: rollout, engine, trainer, sandbox or scorer
    #[arg(long)]
    kind: Option<RoleKind>,
    /// The whole answer as one JSON object: roles, wanted counts, last events
    #[arg(long)]
    json: bool,
}

/// `sinew status`.
///
/// # Errors
/// If the owner cannot be found or does not answer.
pub(crate) fn run(args: &StatusArgs) -> Result<(), Failure> {
    let page = args.owner.client()?.page(args.kind).map_err(failed)?;
    if args.json {
        output::print_json(&serde_json::to_value(&page).map_err(Failure::system)?);
    } else {
        output::print(&text(&page));
    }
    Ok(())
}

fn text(page: &RolesPage) -> String {
    let mut text = format!("run {}, owner {}", page.run, page.fence);
    if let Some(version) = page.wanted_version {
        let _ = write!(text, ", weights {version}");
    }
    text.push_str(if page.stopping { ", stopping\n" } else { "\n" });
    for (kind, count) in &page.wanted {
        let of_kind = |role: &&RoleView| role.registration.kind == *kind;
        let ready = page
            .roles
            .iter()
            .filter(of_kind)
            .filter(|role| is_ready(role))
            .count();
        let _ = writeln!(text, "{kind}: {ready} of {count} ready");
    }
    for role in &page.roles {
        text.push_str(&line(role));
    }
    text
}

fn is_ready(role: &RoleView) -> bool {
    role.state == sinew_control::RoleState::Ready
}

/// A role, and below it why it is not as it should be.
fn line(role: &RoleView) -> String {
    let (given, now) = (&role.registration, &role.heartbeat);
    let version = now
        .version
        .map_or_else(String::new, |v| format!("  weights {v}"));
    let quarantined = if role.quarantined {
        "  quarantined"
    } else {
        ""
    };
    let mut line = format!(
        "  {:<32} {:<15} {:<20} {}/{} busy{version}{quarantined}\n",
        role.id.as_str(),
        role.state.name(),
        given.host,
        now.busy,
        given.capacity,
    );
    if let Some(why) = &role.waits {
        let _ = writeln!(line, "      waits for a place: {why}");
    }
    for why in role.cause.iter().flat_map(|cause| cause.lines()) {
        let _ = writeln!(line, "      {why}");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_control::{ControlLimits, Heartbeat, Registration, Registry};

    #[test]
    fn people_see_counts_states_and_causes() {
        let mut registry = Registry::new("demo-1", 2, ControlLimits::default());
        registry.scale(RoleKind::Engine, 2, false, 0).unwrap();
        let engine = Registration {
            kind: RoleKind::Engine,
            name: "demo-1-engine-0-0".into(),
            host: "gpu-1".into(),
            address: Some("http://gpu-1:8000".into()),
            build: "1".into(),
            capacity: 8,
            preemptible: false,
        };
        let lease = registry.register(&engine, None, 1).unwrap();
        let beat = Heartbeat {
            cause: Some("out of memory\nat layer 3".into()),
            busy: 3,
            ..Heartbeat::default()
        };
        registry.beat(lease.id.as_str(), 2, beat, 2).unwrap();
        let shown = text(&registry.page(None, 3));
        for part in [
            "owner 2",
            "engine: 1 of 2 ready",
            "READY",
            "gpu-1",
            "3/8 busy",
            "PENDING",
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert!(
            shown.contains("      out of memory\n      at layer 3\n"),
            "{shown}"
        );
    }
}
