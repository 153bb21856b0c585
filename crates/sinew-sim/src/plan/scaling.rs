//! Counts of units that follow their work, and what changes that work and its price.

use super::check::{number, refused};
use super::{Plan, PlanError, Role, RoleKind};
use serde::{Deserialize, Serialize};
use sinew_control::AutoscaleLimits;

/// Maximum number of bursts, and of prices of a role.
const MAX_BURSTS: usize = 10_000;

/// `[autoscale]`, as `[launch.autoscale]` of a recipe: of roles with `min` and `max`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Autoscale {
    /// Waiting work for each unit of capacity above which more units are wanted. Default: 0.5.
    pub queue: f64,
    /// Seconds without work, or with work for fewer units, after which units are ended. Default: 120.
    pub idle_s: f64,
    /// Seconds after a change in which no other one is made. Default: 60.
    pub cooldown_s: f64,
    /// Most that the units of a kind may cost in an hour; left out: any price.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cost_per_hour: Option<f64>,
}

impl Default for Autoscale {
    fn default() -> Self {
        Self {
            queue: 0.5,
            idle_s: 120.0,
            cooldown_s: 60.0,
            max_cost_per_hour: None,
        }
    }
}

/// `[[burst]]`: turns that begin within a time sample more.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Burst {
    /// Virtual seconds since the start.
    pub at_s: f64,
    pub for_s: f64,
    /// Times as many tokens of a turn.
    pub by: f64,
}

/// A price of a role from a moment on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PriceStep {
    /// Virtual seconds since the start.
    pub at_s: f64,
    /// Price of a unit for an hour.
    pub per_hour: f64,
}

impl Role {
    /// Whether the number of its units follows their work.
    pub(crate) fn is_scaled(&self) -> bool {
        self.max.is_some()
    }

    /// Most units at once.
    pub(crate) fn most(&self) -> usize {
        self.max.unwrap_or(self.count)
    }

    /// Places for units: one that leaves has a place, too, while its successor starts.
    pub(crate) fn unit_places(&self) -> usize {
        self.max.map_or(self.count, |max| 2 * max)
    }

    /// Price of a unit for an hour at a time.
    pub(crate) fn price_at(&self, now_s: f64) -> f64 {
        let last = self.prices.iter().rev().find(|step| step.at_s <= now_s);
        last.map_or(self.price_per_hour, |step| step.per_hour)
    }

    /// Refuses bounds and prices that mean nothing.
    pub(super) fn check_scaling(&self, autoscaled: bool) -> Result<(), PlanError> {
        let steps = &self.prices;
        if steps.len() > MAX_BURSTS || steps.windows(2).any(|w| w[0].at_s > w[1].at_s) {
            return refused(
                "role.prices",
                steps.len(),
                "10,000 of them in the order of at_s",
            );
        }
        for step in steps {
            number("role.prices.at_s", step.at_s, false)?;
            number("role.prices.per_hour", step.per_hour, false)?;
        }
        let (Some(min), Some(max)) = (self.min, self.max) else {
            if let Some(one) = self.min.or(self.max) {
                return refused("role.min", one, "min and max together");
            }
            return Ok(());
        };
        if !autoscaled {
            return refused("role.max", max, "nothing without [autoscale]");
        }
        if min > max || !(min..=max).contains(&self.count) || max > 1024 {
            let value = format!("{min} with count = {} and max = {max}", self.count);
            return refused("role.min", value, "min <= count <= max <= 1024");
        }
        match self.kind {
            RoleKind::Engine | RoleKind::Rollout | RoleKind::Sandbox => Ok(()),
            RoleKind::Trainer | RoleKind::Scorer => refused(
                "role.max",
                max,
                "only with kind engine, rollout and sandbox",
            ),
        }
    }
}

impl Plan {
    /// Bounds of a role's autoscaler at a time; `None`: its count is fixed.
    pub(crate) fn limits_of(&self, role: &Role, now_s: f64) -> Option<AutoscaleLimits> {
        let scale = self.autoscale.as_ref()?;
        Some(AutoscaleLimits {
            min: role.min? as u32,
            max: role.max? as u32,
            queue: scale.queue,
            idle_s: scale.idle_s,
            cooldown_ms: (scale.cooldown_s * 1e3) as u64,
            price_per_hour: role.price_at(now_s),
            max_cost_per_hour: scale.max_cost_per_hour,
        })
    }

    /// Whether units come and go by their work, or their prices change.
    pub(crate) fn has_ticks(&self) -> bool {
        self.roles
            .iter()
            .any(|role| role.is_scaled() || !role.prices.is_empty())
    }

    /// Engines that there are at once, at most.
    pub(crate) fn engine_places(&self) -> usize {
        let with = self.roles.iter().filter(|role| role.has_engine());
        let places = with.map(Role::unit_places).reduce(usize::saturating_add);
        places.unwrap_or(self.engines.count)
    }

    /// Times as many tokens that turns sample which begin at a time.
    pub(crate) fn burst_at(&self, now_s: f64) -> f64 {
        let now = |burst: &&Burst| (burst.at_s..burst.at_s + burst.for_s).contains(&now_s);
        self.bursts
            .iter()
            .filter(now)
            .map(|burst| burst.by)
            .product()
    }

    /// The plan with a fixed number of units of each role: as at the start, or the most.
    #[must_use]
    pub(crate) fn fixed(&self, most: bool) -> Self {
        let mut plan = self.clone();
        plan.autoscale = None;
        for role in &mut plan.roles {
            if most {
                role.count = role.most();
            }
            (role.min, role.max) = (None, None);
        }
        plan.apply_roles();
        plan
    }

    /// The plan with counts that follow the work. One that has no bounds gets them for its engines, or for
    /// its rollout workers: one unit to twice as many as at the start.
    ///
    /// # Errors
    /// If there is no such role.
    pub fn autoscaled(mut self) -> Result<Self, PlanError> {
        if !self.roles.iter().any(Role::is_scaled) {
            let of = |kind| self.roles.iter().position(|role| role.kind == kind);
            let Some(first) = of(RoleKind::Engine).or(of(RoleKind::Rollout)) else {
                let why = "only with a [[role]] of kind engine or rollout";
                return refused("autoscale", "{ ... }", why);
            };
            let role = &mut self.roles[first];
            (role.min, role.max) = (Some(1), Some(2 * role.count));
        }
        self.autoscale.get_or_insert_default();
        self.checked()
    }

    pub(super) fn check_scaling(&self) -> Result<(), PlanError> {
        if let Some(scale) = &self.autoscale {
            number("autoscale.queue", scale.queue, true)?;
            number("autoscale.idle_s", scale.idle_s, false)?;
            number("autoscale.cooldown_s", scale.cooldown_s, false)?;
            let cost = scale.max_cost_per_hour.unwrap_or(1.0);
            number("autoscale.max_cost_per_hour", cost, true)?;
            if !self.roles.iter().any(Role::is_scaled) {
                let why = "only with a [[role]] that has min and max";
                return refused("autoscale", "{ ... }", why);
            }
        }
        for kind in [RoleKind::Engine, RoleKind::Rollout, RoleKind::Sandbox] {
            let scaled = self.roles_of(kind).filter(|role| role.is_scaled()).count();
            if scaled > 1 {
                let value = format!("{scaled} roles of kind {}", kind.name());
                return refused("role.max", value, "one role of a kind with min and max");
            }
        }
        if self.bursts.len() > MAX_BURSTS {
            return refused("burst", self.bursts.len(), "10,000 of them");
        }
        for burst in &self.bursts {
            number("burst.at_s", burst.at_s, false)?;
            number("burst.for_s", burst.for_s, true)?;
            number("burst.by", burst.by, true)?;
        }
        self.roles
            .iter()
            .try_for_each(|role| role.check_scaling(self.autoscale.is_some()))
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
    fn prices_and_bursts_hold_from_their_times() {
        let plan = parse(
            "[autoscale]\n[[role]]\nkind = \"engine\"\ncount = 2\nmin = 1\nmax = 3\nprice_per_hour = 1\n\
             prices = [{ at_s = 10, per_hour = 4 }, { at_s = 20, per_hour = 2 }]\n\
             [[burst]]\nat_s = 5\nfor_s = 10\nby = 3\n[[burst]]\nat_s = 10\nfor_s = 10\nby = 2\n",
        );
        let plan = plan.unwrap();
        let role = &plan.roles[0];
        assert_eq!(
            [0.0, 10.0, 25.0].map(|at| role.price_at(at)),
            [1.0, 4.0, 2.0]
        );
        assert_eq!(
            [0.0, 5.0, 12.0, 15.0].map(|at| plan.burst_at(at)),
            [1.0, 3.0, 6.0, 2.0]
        );
        assert_eq!((plan.engines.count, plan.engine_places()), (2, 6));
        let limits = plan.limits_of(role, 12.0).unwrap();
        assert_eq!((limits.min, limits.max, limits.price_per_hour), (1, 3, 4.0));
        let most = plan.fixed(true);
        assert_eq!((most.engines.count, most.engine_places()), (3, 3));
        assert!(most.check().is_ok() && most.autoscale.is_none());
    }

    #[test]
    fn bounds_that_mean_nothing_are_refused() {
        let role = "[[role]]\nkind = \"engine\"\n";
        for (text, said) in [
            (format!("{role}min = 1\nmax = 2\n"), "without [autoscale]"),
            (format!("[autoscale]\n{role}max = 2\n"), "together"),
            ("[autoscale]\n".to_owned(), "min and max"),
            (
                format!("[autoscale]\n{role}count = 3\nmin = 1\nmax = 2\n"),
                "count",
            ),
            (
                "[autoscale]\n[[role]]\nkind = \"trainer\"\nmin = 1\nmax = 2\n".to_owned(),
                "role.max",
            ),
            (
                format!("[autoscale]\n{role}min = 1\nmax = 2\n{role}min = 1\nmax = 2\n"),
                "one role",
            ),
            (
                "[[burst]]\nat_s = 1\nfor_s = 0\nby = 2\n".to_owned(),
                "burst.for_s",
            ),
            (
                format!(
                    "{role}prices = [{{ at_s = 9, per_hour = 1 }}, {{ at_s = 1, per_hour = 1 }}]\n"
                ),
                "role.prices",
            ),
            (
                format!("{role}preemptible = {{ every_s = 60, share = 2 }}\n"),
                "share",
            ),
            (
                format!("{role}preemptible = {{ mean_s = 9, every_s = 60, share = 0.5 }}\n"),
                "mean_s",
            ),
            (format!("{role}with_engine = true\n"), "with_engine"),
        ] {
            let error = parse(&text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
