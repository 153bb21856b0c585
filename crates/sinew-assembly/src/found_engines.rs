//! Engines of the run's registry as the engine of a rollout worker.

use crate::failure::Failure;
use crate::owner::BUILD;
use crate::servers;
use clap::ValueEnum;
use sinew_control::{OwnerClient, RoleKind, RoleState, RoleView};
use sinew_engines::{EngineAddress, EngineSeats, KnownWeights, RemoteEngine};
use sinew_recipe::RunPlan;
use sinew_types::WeightsId;
use sinew_workers::{
    DeskClient, DirectoryError, EngineDirectory, EngineFinder, FinderParts, first_mark,
};
use std::sync::Arc;
use std::time::Duration;

/// Engines that a worker asks at the same time.
const SEATS: usize = 64;
/// Seconds between two looks at an engine.
const PROBE_S: f64 = 0.5;

/// Engines that a rollout worker samples with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum WorkerEngines {
    // Those of the registry if the recipe has `[launch.engine]`, else its own.
    #[default]
    Auto,
    // An engine in the worker's process.
    Own,
    // Engines of the registry: processes of `sinew worker --role engine`.
    Roles,
}

impl WorkerEngines {
    /// Whether a worker of this recipe samples with engines of the registry.
    ///
    /// # Errors
    /// If it was asked to and cannot.
    pub(crate) fn are_roles(self, recipe: &RunPlan) -> Result<bool, Failure> {
        let launched = recipe.launch.as_ref().is_some_and(|l| l.engine.is_some());
        match (self, recipe.engine_roles()) {
            (Self::Own, _) | (Self::Auto, Err(_)) => Ok(false),
            (Self::Auto, Ok(())) => Ok(launched),
            (Self::Roles, Ok(())) => Ok(true),
            (Self::Roles, Err(why)) => Err(Failure::input(format!("--engines roles: {why}"))),
        }
    }
}

/// Engines of the registry behind one router, and what finds them.
pub(crate) struct FoundEngines {
    pub(crate) engine: Arc<RemoteEngine>,
    pub(crate) finder: EngineFinder,
}

/// Looks for engines from now on. `None`: the worker was asked to end before there were weights.
///
/// # Errors
/// If the owner refuses, or the system gives no thread.
pub(crate) fn find(
    owner: &Arc<DeskClient>,
    token: &str,
    recipe: &RunPlan,
    patience: Duration,
    stop: &dyn Fn() -> bool,
) -> Result<Option<FoundEngines>, Failure> {
    let Some(mark) = first_mark(owner, patience, stop).map_err(Failure::outside)? else {
        return Ok(None);
    };
    let first: WeightsId = mark.id.parse().map_err(Failure::outside)?;
    let known = KnownWeights::default();
    known.announce(first, mark.manifest.clone());
    let seats = EngineSeats::new(SEATS, known.clone(), token);
    let formats = recipe.engine.formats.map(servers::format_mode);
    let mut config = servers::config(first, formats);
    // Each engine follows the owner by itself.
    config.router.follow = true;
    config.router.max_running = recipe.engine.max_num_seqs;
    config.probe_interval_s = PROBE_S;
    let engine = RemoteEngine::new(seats.backends(), None, config);
    let engine = engine.map_err(|e| Failure::system(format!("engine: {e}")))?;
    let registry = OwnerClient::new(owner.url(), token).map_err(Failure::input)?;
    let finder = EngineFinder::start(FinderParts {
        owner: Arc::clone(owner),
        directory: Box::new(Registry(registry)),
        seats,
        known,
        seen: mark.manifest,
    });
    Ok(Some(FoundEngines {
        engine: Arc::new(engine),
        finder: finder.map_err(Failure::system)?,
    }))
}

/// The registry of the owner.
struct Registry(OwnerClient);

impl EngineDirectory for Registry {
    fn engines(&mut self) -> Result<Vec<EngineAddress>, DirectoryError> {
        let page = self.0.page(Some(RoleKind::Engine));
        let page = page.map_err(|e| DirectoryError(e.to_string()))?;
        let roles = page.roles.into_iter();
        Ok(roles.filter_map(|role| address_of(&role)).collect())
    }
}

/// The address of an engine that may be asked. One that is not ready only because it loads weights counts:
/// each of its answers names the weights that it is of. Servers of other programs have another protocol.
fn address_of(role: &RoleView) -> Option<EngineAddress> {
    let works = matches!(role.state, RoleState::Ready | RoleState::WeightSyncing);
    let usable = works && !role.quarantined && role.registration.build == BUILD;
    let url = role.registration.address.clone().filter(|_| usable)?;
    Some(EngineAddress {
        id: role.id.to_string(),
        url,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environments::ENVIRONMENTS;
    use sinew_control::{Heartbeat, Registration, RoleId};
    use sinew_recipe::EngineType;
    use std::path::Path;

    fn role(state: RoleState) -> RoleView {
        RoleView {
            id: RoleId::new("r", RoleKind::Engine, 0, 0),
            registration: Registration {
                kind: RoleKind::Engine,
                name: String::new(),
                host: "h".into(),
                address: Some("http://h:1".into()),
                build: BUILD.into(),
                capacity: 1,
                preemptible: false,
            },
            state,
            heartbeat: Heartbeat::default(),
            last_seen_ms: 0,
            cause: None,
            quarantined: false,
            waits: None,
        }
    }

    #[test]
    fn engines_that_drain_are_quarantined_or_of_another_program_are_not_asked() {
        for state in [RoleState::Ready, RoleState::WeightSyncing] {
            assert_eq!(address_of(&role(state)).unwrap().url, "http://h:1");
        }
        for state in [
            RoleState::Pending,
            RoleState::Creating,
            RoleState::HealthChecking,
            RoleState::Draining,
            RoleState::Removed,
        ] {
            assert_eq!(address_of(&role(state)), None, "{state}");
        }
        let mut wrong = role(RoleState::Ready);
        wrong.quarantined = true;
        assert_eq!(address_of(&wrong), None);
        let mut other = role(RoleState::Ready);
        other.registration.build = String::new();
        assert_eq!(address_of(&other), None);
    }

    #[test]
    fn the_recipe_and_the_option_decide_on_the_engines() {
        let plan = |more: &str| {
            let text = format!(
                "name = \"demo\"\nmodel = {{ type = \"scratch\", d_model = 64, layers = 2, heads = 4, kv_heads = 2, \
                 d_ff = 128 }}\nenv = {{ type = \"tiny\" }}\nalgorithm = {{ type = \"grpo\" }}\n{more}"
            );
            RunPlan::parse(Path::new("demo.toml"), &text, ENVIRONMENTS).unwrap()
        };
        let (plain, with) = (
            plan(""),
            plan("[launch]\n[launch.rollout]\n[launch.engine]\n"),
        );
        let roles = |engines: WorkerEngines, plan: &RunPlan| engines.are_roles(plan).unwrap();
        assert!(!roles(WorkerEngines::Auto, &plain) && roles(WorkerEngines::Auto, &with));
        assert!(roles(WorkerEngines::Roles, &plain) && !roles(WorkerEngines::Own, &with));
        let mut servers = plan("");
        servers.engine.kind = EngineType::Vllm;
        assert!(!roles(WorkerEngines::Auto, &servers));
        let refused = WorkerEngines::Roles.are_roles(&servers).unwrap_err();
        assert!(refused.text().contains("--engines roles") && refused.text().contains("vllm"));
    }
}
