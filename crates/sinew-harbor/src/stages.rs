//! The stages of an episode that use its place: start, begin of a step, solution.

use crate::dockerfile::{PlainCopy, PlainImage};
use crate::folder::{Base, SOLVE_SCRIPT, Step, TaskFolder};
use crate::manifest::{EnvironmentKeys, HealthCheck, NetworkPolicy};
use crate::place::{Command, Place};
use crate::template::PassedEnv;
use sinew_env::{EnvError, ImageSource, MachineNetwork, MachineSpec, Machines, Sandboxes};
use sinew_sandbox::{Ending, Entry, EntryKind, ExecResult, SandboxError, SandboxSpec, folder};
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Output of one command that is kept, at most.
const OUTPUT_BYTES: u64 = 4 << 20;

/// CPU time of one command in a machine: the wall time and the processors bound it.
const CPU_S: f64 = 1e6;

/// Time of a script of the task that names none.
const SCRIPT: Duration = Duration::from_secs(600);

/// Time of an agent that names none; the recipe bounds it.
const AGENT_S: f64 = 86_400.0;

/// Maximum bytes of one file that a plain Dockerfile copies.
const MAX_COPY_BYTES: u64 = 64 << 20;

/// Maximum bytes that are copied to a base image in place of a build: they count as memory of each machine.
const MAX_SHARED_BYTES: u64 = 8 << 20;

/// Parts that all episodes of a factory share.
pub(crate) struct World {
    /// Sandboxes, and machines at the level `container`.
    pub(crate) sandboxes: Sandboxes,
    /// Variables of the host that tasks may name.
    pub(crate) passed: PassedEnv,
    /// Factor of the tasks' timeouts.
    pub(crate) timeout_factor: f64,
    /// Bytes of artifacts that are kept of an episode.
    pub(crate) artifacts_bytes: u64,
    /// They are kept on the host, and so are the files that a task names.
    pub(crate) keep_artifacts: bool,
}

impl World {
    /// A timeout of a task.
    pub(crate) fn time(&self, seconds: f64) -> Duration {
        Duration::try_from_secs_f64(seconds * self.timeout_factor).unwrap_or(SCRIPT)
    }

    /// Time of a step's agent.
    pub(crate) fn agent_time(&self, step: &Step) -> Duration {
        self.time(step.agent.timeout_s.unwrap_or(AGENT_S))
    }

    /// Fills the templates of variables. Tasks whose variables are not passed are left out before.
    pub(crate) fn variables(
        &self,
        env: &BTreeMap<String, String>,
    ) -> Result<Vec<(String, String)>, EnvError> {
        self.passed
            .fill(env)
            .map_err(|name| failed(format!("the variable {name} is not passed")))
    }
}

/// A failure of the task's own files.
pub(crate) fn failed(message: impl Into<String>) -> EnvError {
    EnvError::Worker(message.into())
}

/// A failure of the place.
pub(crate) fn broken(e: SandboxError) -> EnvError {
    EnvError::Sandbox(e.to_string())
}

/// Starts the place of a task, with its files.
pub(crate) async fn start(world: &World, task: &TaskFolder) -> Result<Place, EnvError> {
    let keys = &task.manifest.environment;
    let mut env: Vec<(String, String)> = task.service.env.clone().into_iter().collect();
    env.extend(world.variables(&keys.env)?);
    let machines = world.sandboxes.machines.as_deref();
    let mut place = match (&task.base, machines) {
        (Base::Plain(_, source) | Base::Image(source, _), Some(machines)) => {
            let user = task.steps.first().and_then(|s| s.agent.user.as_deref());
            let own = Wanted {
                source,
                keys,
                workdir: keys.workdir.clone().or(task.service.workdir.clone()),
                env,
                network: task.network(),
                user,
            };
            match shared(task) {
                None => machine(machines, own).await?,
                Some((image, base)) => {
                    let wanted = Wanted {
                        source: &base,
                        workdir: image.workdir.clone(),
                        env: [image.env.clone(), own.env].concat(),
                        ..own
                    };
                    let mut place = machine(machines, wanted).await?;
                    copy(&mut place, &task.path, image, source).await?;
                    place
                }
            }
        }
        (Base::Image(_, what), None) => {
            return Err(failed(format!(
                "{what} needs sandbox.level = \"container\""
            )));
        }
        (Base::Plain(image, source), None) => {
            let mut place = sandbox(world, [image.env.clone(), env].concat()).await?;
            copy(&mut place, &task.path, image, source).await?;
            place
        }
        (Base::Empty, _) => sandbox(world, env).await?,
    };
    if let Some(folder) = &task.upload {
        let to = place.layout.workdir.clone();
        place.put(folder, &to, false).await.map_err(broken)?;
    }
    if let Some(check) = &keys.healthcheck {
        healthy(&mut place, check).await?;
    }
    Ok(place)
}

/// The image that a plain task shares with others, so that its own is neither built nor kept: the base, to
/// which its files are copied. `None`: the base is not known, or the files are large.
fn shared(task: &TaskFolder) -> Option<(&PlainImage, ImageSource)> {
    let Base::Plain(image, ImageSource::Build { context, .. }) = &task.base else {
        return None;
    };
    let base = ImageSource::Named(image.base.clone()?);
    let workdir = image.workdir.as_ref()?;
    let named = task.manifest.environment.workdir.as_ref();
    if named.is_some_and(|folder| folder != workdir) {
        return None;
    }
    let mut left = MAX_SHARED_BYTES;
    for copied in &image.copies {
        let path = context.join(&copied.from);
        let bytes = match path.metadata() {
            Ok(meta) if meta.is_file() => meta.len(),
            _ => bytes_below(&folder::read_folder(&path, left).ok()?),
        };
        left = left.checked_sub(bytes)?;
    }
    Some((image, base))
}

/// Bytes of files.
pub(crate) fn bytes_below(entries: &[Entry]) -> u64 {
    let one = |entry: &Entry| match &entry.kind {
        EntryKind::File(bytes) => bytes.len() as u64,
        _ => 0,
    };
    entries.iter().map(one).sum()
}

/// A machine to start.
pub(crate) struct Wanted<'a> {
    pub(crate) source: &'a ImageSource,
    pub(crate) keys: &'a EnvironmentKeys,
    pub(crate) workdir: Option<String>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) network: &'a NetworkPolicy,
    /// Owner of the folders of logs; `None`: the user of the image.
    pub(crate) user: Option<&'a str>,
}

/// Makes an image, and starts a machine of it with folders for logs.
pub(crate) async fn machine(
    machines: &dyn Machines,
    wanted: Wanted<'_>,
) -> Result<Place, EnvError> {
    let keys = wanted.keys;
    let within = Duration::try_from_secs_f64(keys.build_timeout_s).unwrap_or(SCRIPT);
    let image = machines
        .image(wanted.source, within)
        .await
        .map_err(broken)?;
    let bytes = |mb: Option<u64>| mb.map(|mb| mb.saturating_mul(1 << 20));
    let of_image = match image.workdir.as_str() {
        "" => "/".to_owned(),
        folder => folder.to_owned(),
    };
    let image_user = (!image.user.is_empty()).then(|| image.user.clone());
    let root = image.root.clone();
    let owner = wanted.user.map(str::to_owned);
    let owner = owner.or_else(|| image_user.clone());
    let workdir = wanted.workdir.clone().unwrap_or(of_image);
    let spec = MachineSpec {
        image,
        env: wanted.env,
        workdir: Some(workdir.clone()),
        cpus: keys.cpus,
        memory_bytes: bytes(keys.memory_mb),
        storage_bytes: bytes(keys.storage_mb),
        cpu_s: CPU_S,
        output_bytes: OUTPUT_BYTES,
        network: match wanted.network {
            NetworkPolicy::None => MachineNetwork::Loopback,
            NetworkPolicy::Public => MachineNetwork::Recipe,
            NetworkPolicy::Hosts(hosts) => MachineNetwork::Hosts(hosts.clone()),
        },
    };
    let sandbox = machines.start(&spec).await.map_err(broken)?;
    let mut place = Place::machine(sandbox, workdir.clone(), image_user);
    // Builders name a working folder, and leave it to the start of a container to make it.
    if is_missing(&root, &workdir) {
        let made = place.put_entries(&[], &workdir, false).await;
        made.map_err(broken)?;
    }
    for name in ["agent", "artifacts", "verifier"] {
        let path = format!("{}/{name}", place.layout.logs);
        let owner = owner.as_deref();
        place.empty(&path, owner).await.map_err(broken)?;
    }
    Ok(place)
}

/// Whether an image has no such path. Links are not followed: a path with one counts as there.
fn is_missing(root: &Path, path: &str) -> bool {
    let mut at = root.to_path_buf();
    for part in Path::new(path).components() {
        let Component::Normal(name) = part else {
            continue;
        };
        at.push(name);
        match at.symlink_metadata() {
            Ok(meta) if meta.is_symlink() => return false,
            Ok(_) => {}
            Err(e) => return e.kind() == std::io::ErrorKind::NotFound,
        }
    }
    false
}

/// A sandbox of the recipe's level.
async fn sandbox(world: &World, env: Vec<(String, String)>) -> Result<Place, EnvError> {
    let mut spec: SandboxSpec = world.sandboxes.spec.clone();
    spec.env.extend(env);
    spec.limits.output_bytes = OUTPUT_BYTES;
    let provider = &world.sandboxes.provider;
    let sandbox = provider.acquire(&spec).await.map_err(broken)?;
    Place::sandbox(sandbox).await.map_err(broken)
}

/// Carries out the copies of a plain Dockerfile.
async fn copy(
    place: &mut Place,
    task: &Path,
    image: &PlainImage,
    source: &ImageSource,
) -> Result<(), EnvError> {
    let ImageSource::Build { context, .. } = source else {
        return Ok(());
    };
    let real = |path: &Path| {
        let failed = |e: std::io::Error| failed(format!("COPY {}: {e}", path.display()));
        path.canonicalize().map_err(failed)
    };
    let root = real(task)?;
    for PlainCopy { from, to, into } in &image.copies {
        let path = real(&context.join(from))?;
        if !path.starts_with(&root) {
            let shown = from.display();
            return Err(failed(format!("COPY {shown} leads out of the task")));
        }
        // Without a separator at its end, which an empty `to` would leave.
        let target: PathBuf = Path::new(&place.layout.workdir)
            .join(to)
            .components()
            .collect();
        if path.is_dir() {
            let target = target.to_string_lossy().into_owned();
            place.put(&path, &target, false).await.map_err(broken)?;
            continue;
        }
        let name = from.file_name().unwrap_or_default();
        let target = if *into { target.join(name) } else { target };
        let entry = file_entry(&path, target.file_name().unwrap_or_default())?;
        let parent = target.parent().unwrap_or(Path::new("/"));
        let parent = parent.to_string_lossy().into_owned();
        let entries = [entry];
        place
            .put_entries(&entries, &parent, false)
            .await
            .map_err(broken)?;
    }
    Ok(())
}

/// A file of the host as an entry.
fn file_entry(path: &Path, name: &std::ffi::OsStr) -> Result<Entry, EnvError> {
    use std::os::unix::fs::PermissionsExt;
    let wrong = |why: &dyn std::fmt::Display| failed(format!("COPY {}: {why}", path.display()));
    let meta = std::fs::metadata(path).map_err(|e| wrong(&e))?;
    if meta.len() > MAX_COPY_BYTES {
        return Err(wrong(&format!("more than {MAX_COPY_BYTES} bytes")));
    }
    Ok(Entry {
        path: name.into(),
        mode: meta.permissions().mode() & 0o777,
        kind: EntryKind::File(std::fs::read(path).map_err(|e| wrong(&e))?),
    })
}

/// Waits until a check succeeds. Failures at the start do not count for as long as the check says.
///
/// # Errors
/// If it fails as often in a row as the check says.
pub(crate) async fn healthy(place: &mut Place, check: &HealthCheck) -> Result<(), EnvError> {
    let seconds = |s: f64| Duration::try_from_secs_f64(s).unwrap_or(SCRIPT);
    let grace = Instant::now() + seconds(check.start_period_s);
    let mut failures = 0;
    loop {
        let early = Instant::now() < grace;
        let command = Command::shell(check.command.clone(), seconds(check.timeout_s));
        let done = place.run(command).await.map_err(broken)?;
        if done.ending == (Ending::Exited { code: 0 }) {
            return Ok(());
        }
        failures += u64::from(!early);
        if failures >= check.retries {
            let why = said(&done);
            return Err(failed(format!(
                "the health check failed {failures} times ({}): {why}",
                done.ending
            )));
        }
        sleep(seconds(if early {
            check.start_interval_s
        } else {
            check.interval_s
        }))
        .await;
    }
}

/// The last line that a command wrote, for messages.
pub(crate) fn said(done: &ExecResult) -> String {
    let last = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let line = text.lines().rfind(|line| !line.trim().is_empty());
        line.map(|line| line.chars().take(300).collect::<String>())
    };
    let line = last(&done.stderr).or_else(|| last(&done.stdout));
    line.unwrap_or_else(|| "no output".into())
}

/// Puts the files of a step into the working folder, runs its setup, and waits until it is ready.
pub(crate) async fn begin(place: &mut Place, step: &Step) -> Result<(), EnvError> {
    let workdir = place.layout.workdir.clone();
    if let Some(folder) = &step.workdir {
        place.put(folder, &workdir, false).await.map_err(broken)?;
        if folder.join("setup.sh").is_file() {
            let script = format!("{workdir}/setup.sh");
            let command = Command {
                argv: vec!["/bin/sh".into(), script],
                deadline: SCRIPT,
                ..Command::default()
            };
            let done = place.run(command).await.map_err(broken)?;
            if done.ending != (Ending::Exited { code: 0 }) {
                let (ending, why) = (done.ending, said(&done));
                return Err(failed(format!("setup.sh of the step: {ending}: {why}")));
            }
        }
    }
    match &step.healthcheck {
        Some(check) => healthy(place, check).await,
        None => Ok(()),
    }
}

/// Words that run a script: the interpreter of its first line, or a shell.
pub(crate) fn interpreter(script: &Path) -> Vec<String> {
    let text = std::fs::read(script).unwrap_or_default();
    let first = text.split(|b| *b == b'\n').next().unwrap_or_default();
    let first = String::from_utf8_lossy(first).into_owned();
    let named = first.strip_prefix("#!").map(str::trim).unwrap_or_default();
    let words: Vec<String> = named.splitn(2, ' ').map(|w| w.trim().to_owned()).collect();
    if named.is_empty() {
        vec!["/bin/sh".into()]
    } else {
        words
    }
}

/// Runs the solution of a step as its agent. Its files are removed afterwards.
///
/// # Errors
/// If there is none, or the place fails. A solution that fails is an ending.
pub(crate) async fn solve(
    world: &World,
    task: &TaskFolder,
    step: &Step,
    place: &mut Place,
) -> Result<ExecResult, EnvError> {
    let Some(folder) = &step.solution else {
        return Err(failed("the task has no folder `solution`"));
    };
    let script = folder.join(SOLVE_SCRIPT);
    if !script.is_file() {
        return Err(failed(format!("the task has no solution/{SOLVE_SCRIPT}")));
    }
    let to = place.layout.solution.clone();
    place.put(folder, &to, true).await.map_err(broken)?;
    let mut argv = interpreter(&script);
    argv.push(format!("{to}/{SOLVE_SCRIPT}"));
    let mut env = vec![("DEBIAN_FRONTEND".to_owned(), "noninteractive".to_owned())];
    env.extend(world.variables(&task.manifest.solution_env)?);
    let command = Command {
        argv,
        env,
        user: step.agent.user.clone(),
        deadline: world.agent_time(step),
    };
    let done = place.run(command).await.map_err(broken)?;
    place.remove(&to).await.map_err(broken)?;
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_working_folder_is_made_only_where_no_link_leads() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("run/app")).unwrap();
        std::os::unix::fs::symlink("run", dir.path().join("var")).unwrap();
        for (path, missing) in [
            ("/", false),
            ("/run/app", false),
            ("/run/other", true),
            ("/app/below", true),
            ("/var/other", false),
        ] {
            assert_eq!(is_missing(dir.path(), path), missing, "{path}");
        }
    }
}
