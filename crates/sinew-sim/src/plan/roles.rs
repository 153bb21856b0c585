//! Roles of a cluster: where they run, their price, when they are lost, and the links between their hosts.

use super::check::{count, number, refused};
use super::{Plan, PlanError, PriceStep};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Host of the run's process, and of all roles that a plan does not name.
pub(crate) const OWNER_HOST: &str = "local";
/// Maximum number of roles and links of a plan, and of units of a role.
const MAX_ROLES: usize = 1000;
const MAX_LINKS: usize = 10_000;
const MAX_UNITS: usize = 10_000;

/// Kind of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoleKind {
    /// Runs the turns and tools of episodes.
    Rollout,
    /// Generates tokens.
    Engine,
    /// A node of the trainer; all of them are one gang.
    Trainer,
    /// A host of sandboxes.
    Sandbox,
    /// Scores episodes.
    Scorer,
}

impl RoleKind {
    /// Name in plans.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Rollout => "rollout",
            Self::Engine => "engine",
            Self::Trainer => "trainer",
            Self::Sandbox => "sandbox",
            Self::Scorer => "scorer",
        }
    }
}

/// Capacity that its owner takes back.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preemption {
    /// Mean seconds until a unit is lost; of units that are lost one by one.
    #[serde(default, skip_serializing_if = "is_none")]
    pub mean_s: f64,
    /// Seconds between two losses of many units at once.
    #[serde(default, skip_serializing_if = "is_none")]
    pub every_s: f64,
    /// Share of the units that work which such a loss takes.
    #[serde(default, skip_serializing_if = "is_none")]
    pub share: f64,
    /// Seconds before a loss in which a unit knows of it, and takes nothing new. Default: 30.
    #[serde(default = "default_notice_s")]
    pub notice_s: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_none(number: &f64) -> bool {
    *number == 0.0
}

fn default_notice_s() -> f64 {
    30.0
}

/// `[[role]]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Role {
    /// `rollout`, `engine`, `trainer`, `sandbox` or `scorer`.
    pub kind: RoleKind,
    /// Units of it. Default: 1.
    #[serde(default = "one_unit")]
    pub count: usize,
    /// Host or group of hosts, for links. Default: local.
    #[serde(default = "owner_host")]
    pub host: String,
    /// Work of a unit at once: episodes of a rollout worker, sandboxes of a host, scores of a scorer.
    /// Default: 64; of engines and trainers 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<usize>,
    /// Price of a unit for an hour. Default: 0.
    #[serde(default)]
    pub price_per_hour: f64,
    /// Seconds from the loss of a unit until its successor works. Default: 60.
    #[serde(default = "default_start_s")]
    pub start_s: f64,
    /// Least units, with `[autoscale]`; `count` is their number at the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<usize>,
    /// Most units, with `[autoscale]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<usize>,
    /// Each unit of a rollout worker has an engine. Default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub with_engine: bool,
    /// Losses; left out: units are never lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preemptible: Option<Preemption>,
    /// Prices of a unit for an hour from their times on, after `price_per_hour`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prices: Vec<PriceStep>,
}

fn one_unit() -> usize {
    1
}

fn owner_host() -> String {
    OWNER_HOST.to_owned()
}

fn default_start_s() -> f64 {
    60.0
}

/// `[[link]]` between two hosts, both ways. Hosts without a link between them are next to each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// A host of a role, or `local`.
    pub from: String,
    /// Another one.
    pub to: String,
    /// Milliseconds one way. Default: 0.
    #[serde(default)]
    pub latency_ms: f64,
    /// Megabits a second; left out: not bounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mbit_per_s: Option<f64>,
}

impl Role {
    /// Work of a unit at once.
    pub(crate) fn capacity(&self) -> usize {
        match self.kind {
            RoleKind::Engine | RoleKind::Trainer => 1,
            _ => self.capacity.unwrap_or(64),
        }
    }

    /// Whether each of its units is an engine, or has one.
    pub(crate) fn has_engine(&self) -> bool {
        self.kind == RoleKind::Engine || self.with_engine
    }

    fn check(&self) -> Result<(), PlanError> {
        if self.with_engine && self.kind != RoleKind::Rollout {
            return refused("role.with_engine", true, "false unless kind is rollout");
        }
        count("role.count", self.count, MAX_UNITS)?;
        count("role.capacity", self.capacity(), 1_000_000)?;
        number("role.price_per_hour", self.price_per_hour, false)?;
        number("role.start_s", self.start_s, false)?;
        if self.host.is_empty() {
            return refused("role.host", "\"\"", "the name of a host");
        }
        let one = matches!(self.kind, RoleKind::Engine | RoleKind::Trainer);
        if let (true, Some(capacity)) = (one, self.capacity) {
            let kind = self.kind.name();
            return refused(
                "role.capacity",
                capacity,
                &format!("nothing with kind {kind}"),
            );
        }
        let Some(losses) = self.preemptible else {
            return Ok(());
        };
        let waves = losses.every_s > 0.0;
        number("role.preemptible.mean_s", losses.mean_s, !waves)?;
        if waves && losses.mean_s > 0.0 {
            let why = "nothing with every_s and share";
            return refused("role.preemptible.mean_s", losses.mean_s, why);
        }
        number("role.preemptible.every_s", losses.every_s, false)?;
        if waves != (losses.share > 0.0) || !(0.0..=1.0).contains(&losses.share) {
            let why = "above 0, at most 1, together with every_s";
            return refused("role.preemptible.share", losses.share, why);
        }
        number("role.preemptible.notice_s", losses.notice_s, false)?;
        if self.kind == RoleKind::Scorer {
            return refused(
                "role.preemptible",
                "{ ... }",
                "nothing with kind scorer, whose losses are the fault scorer_crash",
            );
        }
        Ok(())
    }
}

impl Plan {
    /// Roles of a kind.
    pub(crate) fn roles_of(&self, kind: RoleKind) -> impl Iterator<Item = &Role> {
        self.roles.iter().filter(move |r| r.kind == kind)
    }

    /// Work of all units of a kind at once; `None` without a role of it.
    fn capacity_of(&self, kind: RoleKind) -> Option<usize> {
        let each = |r: &Role| r.most().saturating_mul(r.capacity());
        let all = self.roles_of(kind).map(each);
        all.reduce(usize::saturating_add)
    }

    /// Sets the sizes that follow from roles.
    pub(crate) fn apply_roles(&mut self) {
        let engines = self.roles.iter().filter(|r| r.has_engine());
        let engines = engines.map(|r| r.count).reduce(usize::saturating_add);
        if let Some(count) = engines {
            self.engines.count = count;
        }
        if let Some(episodes) = self.capacity_of(RoleKind::Rollout) {
            self.rollout.in_flight = episodes;
        }
        if let Some(places) = self.capacity_of(RoleKind::Sandbox) {
            self.tools.sandboxes = places;
        }
        if let Some(scores) = self.capacity_of(RoleKind::Scorer) {
            self.scoring.scorers = scores;
        }
    }

    /// Adds units to the first role of a kind, if there is one.
    pub(crate) fn add_units(&mut self, kind: RoleKind, units: usize) {
        if let Some(role) = self.roles.iter_mut().find(|r| r.kind == kind) {
            role.count += units;
        }
        self.apply_roles();
    }

    /// Refuses sizes and prices that roles decide: `typed` is the plan's own text.
    pub(crate) fn check_typed(&self, typed: &toml::Table) -> Result<(), PlanError> {
        for (table, key, kind) in [
            ("engines", "count", RoleKind::Engine),
            ("rollout", "in_flight", RoleKind::Rollout),
            ("tools", "sandboxes", RoleKind::Sandbox),
            ("scoring", "scorers", RoleKind::Scorer),
            ("prices", "engine_device_hour", RoleKind::Engine),
            ("prices", "trainer_device_hour", RoleKind::Trainer),
            ("prices", "sandbox_hour", RoleKind::Sandbox),
        ] {
            let value = typed.get(table).and_then(|t| t.get(key));
            let decided = match kind {
                RoleKind::Engine => self.roles.iter().any(Role::has_engine),
                _ => self.roles_of(kind).next().is_some(),
            };
            if let (Some(value), true) = (value, decided) {
                let why = format!(
                    "nothing with a [[role]] of kind {}, which decides it",
                    kind.name()
                );
                return refused(&format!("{table}.{key}"), value, &why);
            }
        }
        Ok(())
    }

    /// Refuses roles and links that mean nothing.
    pub(crate) fn check_roles(&self) -> Result<(), PlanError> {
        if self.roles.len() > MAX_ROLES || self.links.len() > MAX_LINKS {
            let (roles, links) = (self.roles.len(), self.links.len());
            let value = format!("{roles} roles, {links} links");
            return refused("role", value, "1,000 roles and 10,000 links");
        }
        self.roles.iter().try_for_each(Role::check)?;
        let mut hosts: BTreeSet<&str> = self.roles.iter().map(|r| r.host.as_str()).collect();
        hosts.insert(OWNER_HOST);
        let mut seen = BTreeSet::new();
        for link in &self.links {
            for (key, host) in [("link.from", &link.from), ("link.to", &link.to)] {
                if !hosts.contains(host.as_str()) {
                    let known: Vec<&str> = hosts.iter().copied().collect();
                    return refused(key, format!("{host:?}"), &known.join(", "));
                }
            }
            let pair = (
                link.from.as_str().min(&link.to),
                link.from.as_str().max(&link.to),
            );
            if link.from == link.to || !seen.insert(pair) {
                let value = format!("{:?} to {:?}", link.from, link.to);
                return refused("link", value, "each pair of two hosts once");
            }
            number("link.latency_ms", link.latency_ms, false)?;
            number("link.mbit_per_s", link.mbit_per_s.unwrap_or(1.0), true)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn parse(text: &str) -> Result<Plan, PlanError> {
        Plan::parse(Path::new("plan.toml"), text)
    }

    #[test]
    fn roles_decide_sizes() {
        let plan = parse(
            "[[role]]\nkind = \"engine\"\ncount = 3\n[[role]]\nkind = \"engine\"\ncount = 2\nhost = \"b\"\n\
             [[role]]\nkind = \"sandbox\"\ncount = 4\ncapacity = 8\n[[role]]\nkind = \"rollout\"\ncapacity = 16\n",
        );
        let plan = plan.unwrap();
        assert_eq!(plan.engines.count, 5);
        assert_eq!((plan.tools.sandboxes, plan.rollout.in_flight), (32, 16));
        assert_eq!(plan.scoring.scorers, Plan::default().scoring.scorers);
    }

    #[test]
    fn what_means_nothing_is_refused() {
        for (text, said) in [
            ("[[role]]\nkind = \"driver\"\n", "driver"),
            (
                "[[role]]\nkind = \"engine\"\ncapacity = 4\n",
                "role.capacity",
            ),
            (
                "[[role]]\nkind = \"engine\"\n[engines]\ncount = 4\n",
                "engines.count",
            ),
            (
                "[[role]]\nkind = \"sandbox\"\n[prices]\nsandbox_hour = 4\n",
                "prices.sandbox_hour",
            ),
            (
                "[[role]]\nkind = \"scorer\"\npreemptible = { mean_s = 9 }\n",
                "scorer_crash",
            ),
            (
                "[[role]]\nkind = \"engine\"\npreemptible = { mean_s = 0 }\n",
                "mean_s",
            ),
            ("[[link]]\nfrom = \"local\"\nto = \"moon\"\n", "link.to"),
            ("[[link]]\nfrom = \"local\"\nto = \"local\"\n", "two hosts"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
        let pair =
            "[[link]]\nfrom = \"local\"\nto = \"b\"\n[[link]]\nfrom = \"b\"\nto = \"local\"\n";
        let error = parse(&format!(
            "[[role]]\nkind = \"engine\"\nhost = \"b\"\n{pair}"
        ));
        assert!(error.unwrap_err().to_string().contains("once"));
    }
}
