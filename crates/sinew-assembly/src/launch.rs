//! From `[launch]` of a recipe to launchers, the supervisor of an owner, and the start of an owner elsewhere.

use crate::failure::Failure;
use crate::launch_record::keep_record;
use crate::listen::{CA_VARIABLE, host_name};
use sinew_control::{
    AutoscaleLimits, ControlDesk, ControlLimits, ControlPlace, HostsLauncher, KUBERNETES_NAME_FILE,
    KUBERNETES_RECIPE_FILE, KUBERNETES_TOKEN_FILE, KubernetesAccess, KubernetesLauncher,
    KubernetesOptions, LaunchError, Launched, LaunchedRole, Launcher, LocalLauncher, RayLauncher,
    RoleId, RoleKind, RoleSpec, SlurmLauncher, SlurmOptions, Supervisor, SupervisorLimits,
    SupervisorParts, end_this_process, token_in,
};
use sinew_recipe::{
    AutoscaleSection, KubernetesSection, LaunchOn, LaunchPlan, RaySection, RoleSection, RunPlan,
    SlurmSection,
};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Port of an owner that other hosts reach.
const OWNER_PORT: u16 = 8092;
/// Folder of the logs of roles in the run's folder.
const LOGS: &str = "roles";
/// File of the wanted counts in the run's folder.
const WANTED: &str = "wanted.json";
/// File of the token in the run's folder.
const TOKEN: &str = "control-token";

impl From<LaunchError> for Failure {
    fn from(error: LaunchError) -> Self {
        match error {
            LaunchError::Setting { .. } | LaunchError::File { .. } => Self::input(error),
            LaunchError::Program { .. } | LaunchError::Call { .. } => Self::outside(error),
        }
    }
}

/// Sets the engine that starts roles: `local`, `slurm`, `ray`, `ray://HOST:PORT`, `kubernetes`, or a file
/// with addresses. A recipe without roles gets one that runs episodes.
///
/// # Errors
/// If the text is none of these.
pub fn launch_on(plan: &mut RunPlan, on: &str) -> Result<(), Failure> {
    let first = LaunchPlan {
        rollout: Some(RoleSection::default()),
        ..LaunchPlan::default()
    };
    let launch = plan.launch.get_or_insert(first);
    launch.on = match on {
        "local" => LaunchOn::Local,
        "slurm" => LaunchOn::Slurm,
        "ray" => LaunchOn::Ray,
        "kubernetes" => LaunchOn::Kubernetes,
        _ if on.starts_with("ray://") => {
            launch.ray = Some(RaySection {
                url: Some(on.to_owned()),
            });
            LaunchOn::Ray
        }
        _ if on.ends_with(".toml") => {
            launch.hosts = Some(on.to_owned());
            LaunchOn::Hosts
        }
        _ => {
            return Err(Failure::input(format!(
                "--on {on:?}: allowed: local, slurm, ray, ray://HOST:8265, kubernetes, or a file of addresses that \
                 ends in .toml"
            )));
        }
    };
    Ok(())
}

/// The name of a run for engines: on Kubernetes that of its objects there, elsewhere one that follows from
/// the recipe and the folder.
pub fn launched_name(plan: &RunPlan, dir: &Path) -> String {
    let in_cluster = plan
        .launch
        .as_ref()
        .is_some_and(|launch| launch.on == LaunchOn::Kubernetes);
    let given = in_cluster.then(|| std::fs::read_to_string(KUBERNETES_NAME_FILE).ok());
    let given = given.flatten().map(|text| text.trim().to_owned());
    given
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| sinew_control::run_name(&plan.name, dir))
}

/// Limits of a run's registry of roles.
pub fn control_limits(launch: Option<&LaunchPlan>) -> ControlLimits {
    let default = ControlLimits::default();
    ControlLimits {
        drain_ms: launch.map_or(default.drain_ms, |launch| ms(launch.drain_s)),
        ..default
    }
}

/// The address on which an owner listens for its roles.
///
/// # Errors
/// If `launch.listen` is no address.
pub fn control_address(launch: &LaunchPlan) -> Result<SocketAddr, Failure> {
    match &launch.listen {
        Some(text) => text.parse().map_err(|_| {
            Failure::input(format!(
                "launch.listen is {text:?}; allowed: IP:PORT, such as 0.0.0.0:{OWNER_PORT}"
            ))
        }),
        None if launch.on == LaunchOn::Local => Ok(([127, 0, 0, 1], 0).into()),
        None => Ok(([0, 0, 0, 0], OWNER_PORT).into()),
    }
}

/// The address at which roles reach an owner that listens on `address`.
pub fn owner_url(launch: &LaunchPlan, run: &str, address: SocketAddr, scheme: &str) -> String {
    if let Some(url) = &launch.owner_url {
        return url.clone();
    }
    if launch.on == LaunchOn::Kubernetes {
        return format!("{scheme}://{run}-owner:{}", address.port());
    }
    if !address.ip().is_unspecified() {
        return format!("{scheme}://{address}");
    }
    let host = host_name().unwrap_or_else(|| "localhost".to_owned());
    format!("{scheme}://{host}:{}", address.port())
}

/// The file with the token of a run, which is made if it is missing, and the token.
///
/// # Errors
/// If it can be neither read nor made.
pub fn control_token(
    launch: Option<&LaunchPlan>,
    dir: &Path,
) -> Result<(PathBuf, String), Failure> {
    let given = launch
        .and_then(|launch| launch.token_file.as_ref())
        .map(PathBuf::from);
    let in_cluster = launch.is_some_and(|launch| launch.on == LaunchOn::Kubernetes);
    let secret = in_cluster.then(|| PathBuf::from(KUBERNETES_TOKEN_FILE));
    let path = given.or(secret).unwrap_or_else(|| dir.join(TOKEN));
    let text = token_in(&path).map_err(Failure::input)?;
    Ok((std::path::absolute(&path).unwrap_or(path), text))
}

fn ms(seconds: f64) -> u64 {
    // The rules of a recipe bound it to a year.
    (seconds * 1000.0) as u64
}

/// The launcher of a recipe. `run` is the name of the run, `dir` its folder.
///
/// # Errors
/// If a setting is missing or wrong, or the way to the engine is.
pub fn launcher(launch: &LaunchPlan, run: &str, dir: &Path) -> Result<Box<dyn Launcher>, Failure> {
    let logs = dir.join(LOGS);
    let logs = std::path::absolute(&logs).unwrap_or(logs);
    Ok(match launch.on {
        LaunchOn::Local => Box::new(LocalLauncher::new(&logs)),
        LaunchOn::Hosts => Box::new(hosts(launch)?),
        LaunchOn::Slurm => {
            let SlurmSection { options, template } = launch.slurm.clone().unwrap_or_default();
            Box::new(SlurmLauncher::new(SlurmOptions {
                run: run.to_owned(),
                logs,
                template: template.map(PathBuf::from),
                options,
                programs: None,
            })?)
        }
        LaunchOn::Ray => {
            let url = launch.ray.as_ref().and_then(|ray| ray.url.as_deref());
            Box::new(RayLauncher::new(url.unwrap_or_default(), run)?)
        }
        LaunchOn::Kubernetes => Box::new(kubernetes(launch, run)?),
    })
}

fn hosts(launch: &LaunchPlan) -> Result<HostsLauncher, Failure> {
    let file = launch.hosts.as_deref().unwrap_or_default();
    Ok(HostsLauncher::load(Path::new(file))?)
}

fn kubernetes_options(launch: &LaunchPlan, run: &str) -> Result<KubernetesOptions, Failure> {
    let KubernetesSection {
        image,
        namespace,
        folder,
        claim,
        ..
    } = launch.kubernetes.clone().unwrap_or_default();
    let image = image.ok_or_else(|| {
        Failure::input("launch.kubernetes.image is missing: the image with the program sinew")
    })?;
    Ok(KubernetesOptions {
        run: run.to_owned(),
        namespace,
        image,
        folder,
        claim,
        port: control_address(launch)?.port(),
    })
}

fn kubernetes(launch: &LaunchPlan, run: &str) -> Result<KubernetesLauncher, Failure> {
    let options = kubernetes_options(launch, run)?;
    let section = launch.kubernetes.as_ref();
    let kubeconfig = section
        .and_then(|k| k.kubeconfig.as_ref())
        .map(PathBuf::from);
    let access = KubernetesAccess::found(kubeconfig.as_deref())?;
    Ok(KubernetesLauncher::new(access, options)?)
}

/// The program that an engine starts: this one where hosts share its file, else by its name.
fn program(launch: &LaunchPlan) -> String {
    let own = || {
        std::env::current_exe()
            .ok()
            .map(|path| path.display().to_string())
    };
    let shared = matches!(launch.on, LaunchOn::Local | LaunchOn::Slurm);
    shared
        .then(own)
        .flatten()
        .unwrap_or_else(|| "sinew".to_owned())
}

/// The working directory of roles: paths of a recipe are relative to it.
fn folder(launch: &LaunchPlan) -> Option<PathBuf> {
    let own = launch.on != LaunchOn::Kubernetes;
    own.then(|| std::env::current_dir().ok()).flatten()
}

/// Starts the supervisor of an owner: the counts of the recipe become wanted, those of an earlier owner go
/// first. Not on a thread of a runtime. `place` is the owner's, and is written to the run's folder. `ordered`
/// is set before the run is stopped by order.
///
/// # Errors
/// If a setting is missing or wrong, or a file of the run's folder cannot be written.
pub fn supervise(
    launch: &LaunchPlan,
    run: &str,
    dir: &Path,
    desk: &Arc<ControlDesk>,
    place: &ControlPlace,
    ordered: &Arc<AtomicBool>,
) -> Result<Supervisor, Failure> {
    let launcher = launcher(launch, run, dir)?;
    place.write(dir).map_err(Failure::system)?;
    let counts: Vec<(RoleKind, u32)> = roles(launch)
        .into_iter()
        .map(|(kind, role)| (kind, role.count))
        .collect();
    desk.keep_wanted(dir.join(WANTED), &counts)
        .map_err(Failure::input)?;
    if launch.on == LaunchOn::Hosts {
        for registration in hosts(launch)?.roles() {
            desk.add_outside(registration).map_err(Failure::input)?;
        }
    }
    let (own, place, ordered) = (launch.clone(), place.clone(), Arc::clone(ordered));
    let parts = SupervisorParts {
        desk: Arc::clone(desk),
        launcher,
        spec: Box::new(move |id, kind| worker(&own, id, kind, &place)),
        limits: SupervisorLimits {
            starts: launch.restarts,
            window_ms: ms(launch.restart_window_s),
            ..SupervisorLimits::default()
        },
        autoscale: autoscaled(launch),
        on_stop: Box::new(move || {
            ordered.store(true, Ordering::Release);
            end_this_process();
        }),
    };
    Supervisor::start(parts).map_err(Failure::system)
}

/// The kinds that a recipe has tables for.
fn roles(launch: &LaunchPlan) -> Vec<(RoleKind, &RoleSection)> {
    let named = launch.roles().into_iter();
    named
        .filter_map(|(name, role)| Some((name.parse().ok()?, role)))
        .collect()
}

fn autoscaled(launch: &LaunchPlan) -> Vec<(RoleKind, AutoscaleLimits)> {
    let Some(scale) = &launch.autoscale else {
        return Vec::new();
    };
    let AutoscaleSection {
        queue,
        idle_s,
        cooldown_s,
        max_cost_per_hour,
    } = *scale;
    let limits = |(kind, role): (RoleKind, &RoleSection)| {
        let limits = AutoscaleLimits {
            min: role.min?,
            max: role.max?,
            queue,
            idle_s,
            cooldown_ms: ms(cooldown_s),
            price_per_hour: role.price_per_hour,
            max_cost_per_hour,
        };
        Some((kind, limits))
    };
    roles(launch).into_iter().filter_map(limits).collect()
}

/// The process of a role.
fn worker(launch: &LaunchPlan, id: &RoleId, kind: RoleKind, place: &ControlPlace) -> RoleSpec {
    let given = roles(launch).into_iter().find(|(own, _)| *own == kind);
    let role = given.map(|(_, role)| role.clone()).unwrap_or_default();
    let token_file = match launch.on {
        LaunchOn::Kubernetes => KUBERNETES_TOKEN_FILE.to_owned(),
        _ => place.token_file.display().to_string(),
    };
    let mut command = vec![program(launch), "worker".to_owned()];
    for (option, value) in [
        ("--role", kind.name()),
        ("--owner", &place.url),
        ("--token-file", &token_file),
        ("--name", id.as_str()),
    ] {
        command.extend([option.to_owned(), value.to_owned()]);
    }
    if kind == RoleKind::Engine {
        command.extend(listens(launch, place));
    }
    if role.preemptible {
        command.push("--preemptible".to_owned());
    }
    if launch.on == LaunchOn::Local {
        command.push("--stop-on-eof".to_owned());
    }
    spec(
        launch,
        id.to_string(),
        command,
        &role,
        place.ca_file.as_deref(),
    )
}

/// The listener of a role that others ask: on a free port, with a certificate of the run's authority where
/// other hosts reach it and the run has one.
fn listens(launch: &LaunchPlan, place: &ControlPlace) -> Vec<String> {
    let at = |address: &str| vec!["--listen".to_owned(), address.to_owned()];
    if launch.on == LaunchOn::Local {
        return at("127.0.0.1:0");
    }
    let mut words = at("0.0.0.0:0");
    let authority = place.ca_file.as_deref().and_then(Path::parent);
    if let Some(folder) = authority {
        words.extend(["--tls-own".to_owned(), folder.display().to_string()]);
    } else if place.url.starts_with("http:") {
        // The run's own listener has no TLS either.
        words.push("--insecure-plain-http".to_owned());
    }
    words
}

fn spec(
    launch: &LaunchPlan,
    name: String,
    command: Vec<String>,
    role: &RoleSection,
    ca_file: Option<&Path>,
) -> RoleSpec {
    let log = std::env::var("SINEW_LOG")
        .ok()
        .map(|filter| ("SINEW_LOG".to_owned(), filter));
    let ca = ca_file.map(|file| (CA_VARIABLE.to_owned(), file.display().to_string()));
    RoleSpec {
        name,
        command,
        env: log.into_iter().chain(ca).collect(),
        folder: folder(launch),
        cpus: role.cpus,
        gpus: role.gpus,
        memory_mb: role.memory_mb,
        requeue: false,
    }
}

/// An owner that an engine starts.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnerLaunch {
    /// Its job.
    pub spec: RoleSpec,
    /// Objects of Kubernetes that go before it and with it, without their token; empty elsewhere.
    pub manifests: Vec<serde_json::Value>,
    /// The text of what the engine is asked for.
    pub shown: String,
    /// True: a job of the run runs already, and nothing was started.
    pub runs: bool,
}

/// The next job of an owner, or the one that runs.
fn next_owner(run: &str, launched: &[LaunchedRole]) -> (String, bool) {
    let prefix = format!("{run}-owner-0-");
    let number = |role: &LaunchedRole| role.name.strip_prefix(&prefix)?.parse::<u32>().ok();
    let runs =
        |role: &&LaunchedRole| number(role).is_some() && !matches!(role.state, Launched::Ended(_));
    if let Some(role) = launched.iter().find(runs) {
        return (role.name.clone(), true);
    }
    let next = launched
        .iter()
        .filter_map(number)
        .max()
        .map_or(0, |last| last + 1);
    (format!("{prefix}{next}"), false)
}

/// Starts an owner on the engine of its recipe, or says what would be started. `recipe` is the file, `typed`
/// are further options of `sinew train`.
///
/// # Errors
/// If the engine cannot be reached or refuses, or a setting is missing.
pub fn launch_owner(
    plan: &RunPlan,
    recipe: &Path,
    dir: &Path,
    typed: &[String],
    dry_run: bool,
) -> Result<OwnerLaunch, Failure> {
    let launch = plan.launch.as_ref().ok_or_else(|| {
        Failure::input(
            "the recipe has no [launch]\n  hint: --on names the engine that starts the roles",
        )
    })?;
    let (here, in_cluster) = (dir, launch.on == LaunchOn::Kubernetes);
    let dir = match (&launch.kubernetes, in_cluster) {
        (Some(section), true) => Path::new(&section.folder).join(&plan.name),
        _ => std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned()),
    };
    let run = launched_name(plan, &dir);
    let known = match (dry_run, in_cluster) {
        (true, _) => Vec::new(),
        (false, true) => kubernetes(launch, &run)?.list()?,
        (false, false) => launcher(launch, &run, &dir)?.list()?,
    };
    let (name, runs) = next_owner(&run, &known);
    let mut command = owner_command(launch, recipe, &dir, &run);
    command.extend(typed.iter().cloned());
    let needs = launch.owner.clone().unwrap_or_default();
    let spec = RoleSpec {
        requeue: true,
        ..spec(launch, name, command, &needs, None)
    };
    let mut manifests = Vec::new();
    if in_cluster {
        let text = std::fs::read_to_string(recipe)
            .map_err(|e| Failure::input(format!("{}: {e}", recipe.display())))?;
        manifests = kubernetes_options(launch, &run)?.run(&spec, &text, "")?;
    }
    let shown = if in_cluster {
        let list = serde_json::json!({"apiVersion": "v1", "kind": "List", "items": manifests});
        format!("{list:#}")
    } else {
        launcher(launch, &run, &dir)?.preview(&spec)?
    };
    if !dry_run {
        // Before the start: a job without a record could not be found while it waits.
        keep_record(plan, here, &dir, &run)?;
    }
    if !dry_run && !runs {
        start_owner(launch, &run, &dir, &spec, &manifests)?;
    }
    Ok(OwnerLaunch {
        spec,
        manifests,
        shown,
        runs,
    })
}

/// The command of an owner, without further options of `sinew train`.
fn owner_command(launch: &LaunchPlan, recipe: &Path, dir: &Path, run: &str) -> Vec<String> {
    let in_cluster = launch.on == LaunchOn::Kubernetes;
    let file = if in_cluster {
        PathBuf::from(KUBERNETES_RECIPE_FILE)
    } else {
        recipe.to_owned()
    };
    let file = std::path::absolute(&file).unwrap_or(file);
    let mut command = vec![
        program(launch),
        "train".to_owned(),
        file.display().to_string(),
        "--run-dir".to_owned(),
        dir.display().to_string(),
        "--resume".to_owned(),
        "--on".to_owned(),
        typed_engine(launch),
    ];
    let shared = launch
        .kubernetes
        .as_ref()
        .is_some_and(|k| k.claim.is_some());
    command.extend(match (in_cluster, shared) {
        // Roles find the authority of the run in its folder.
        (true, true) => vec!["--tls-host".to_owned(), format!("{run}-owner")],
        // They have no common folder; the network policy says who reaches the owner.
        (true, false) => vec!["--insecure-plain-http".to_owned()],
        (false, _) => Vec::new(),
    });
    command
}

/// The value of `--on` that stands for the engine of a recipe.
fn typed_engine(launch: &LaunchPlan) -> String {
    let ray = launch.ray.as_ref().and_then(|ray| ray.url.clone());
    match launch.on {
        LaunchOn::Ray => ray.unwrap_or_else(|| launch.on.name().to_owned()),
        LaunchOn::Hosts => launch.hosts.clone().unwrap_or_default(),
        other => other.name().to_owned(),
    }
}

fn start_owner(
    launch: &LaunchPlan,
    run: &str,
    dir: &Path,
    spec: &RoleSpec,
    manifests: &[serde_json::Value],
) -> Result<(), Failure> {
    if manifests.is_empty() {
        return Ok(launcher(launch, run, dir)?.ensure(spec)?);
    }
    // The folder of the run is in the cluster: the token stays here for `sinew status`.
    let token = token_in(&kubernetes_token_file(run)).map_err(Failure::input)?;
    let mut manifests = manifests.to_vec();
    for secret in manifests
        .iter_mut()
        .filter(|object| object["kind"] == "Secret")
    {
        secret["stringData"]["token"] = token.clone().into();
    }
    Ok(kubernetes(launch, run)?.create_all(&manifests)?)
}

/// The file on this host with the token of a run in a cluster.
pub fn kubernetes_token_file(run: &str) -> PathBuf {
    PathBuf::from(format!("{run}.token"))
}

#[cfg(test)]
mod tests;
