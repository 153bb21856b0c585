//! One task folder: its files and keys, as an episode needs them.

use crate::compose::Service;
use crate::dockerfile::PlainImage;
use crate::error::{HarborError, SkipReason};
use crate::manifest::{
    AgentKeys, Artifact, EnvironmentKeys, HealthCheck, Manifest, MinReward, NetworkPolicy,
    StepKeys, VerifierKeys,
};
use crate::trajectory::{self, TRAJECTORY_FILE};
use sinew_env::ImageSource;
use sinew_types::Message;
use std::fs;
use std::path::{Path, PathBuf};

/// File with the keys of a task; a folder that has it is a task.
pub const TASK_FILE: &str = "task.toml";

/// Script of a verifier, in `tests`.
pub(crate) const TEST_SCRIPT: &str = "test.sh";

/// Script of a solution, in `solution`.
pub(crate) const SOLVE_SCRIPT: &str = "solve.sh";

/// File with patterns of files that a build leaves out.
const IGNORE_FILE: &str = ".dockerignore";

/// Maximum bytes of a file of keys, an instruction or a Dockerfile.
const MAX_TEXT_BYTES: u64 = 1 << 20;

/// Seconds of a verifier that names none.
const VERIFIER_S: f64 = 600.0;

/// Source of the world of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Base {
    /// Nothing: the task has no `environment`.
    Empty,
    /// Files and variables of a plain Dockerfile, and the container that it describes.
    Plain(PlainImage, ImageSource),
    /// An image, with the part that needs a container.
    Image(ImageSource, String),
}

/// A container of its own for a verifier.
#[derive(Clone, Debug, PartialEq)]
pub struct SeparateVerifier {
    /// Its image.
    pub source: ImageSource,
    /// Its resources, variables and network.
    pub environment: EnvironmentKeys,
    /// The image has the tests.
    pub has_tests: bool,
}

/// The verifier of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Verifier {
    /// Folders whose content is the folder of tests, in order; later files replace earlier ones.
    pub tests: Vec<PathBuf>,
    /// Keys, those of the step before those of the task.
    pub keys: VerifierKeys,
    /// Seconds that it may take.
    pub timeout_s: f64,
    /// Container of its own; `None`: that of the agent.
    pub separate: Option<SeparateVerifier>,
}

/// One instruction with its verifier.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Name; `None`: the task has one instruction.
    pub name: Option<String>,
    /// Text for the agent.
    pub instruction: String,
    /// Seconds of the agent, user, network.
    pub agent: AgentKeys,
    /// Folder whose content is put into the working folder before the agent.
    pub workdir: Option<PathBuf>,
    /// Check before the agent.
    pub healthcheck: Option<HealthCheck>,
    /// Verifier after it.
    pub verifier: Verifier,
    /// Smallest rewards with which the next step begins.
    pub min_reward: Option<MinReward>,
    /// Files to copy out.
    pub artifacts: Vec<Artifact>,
    /// Folder of the solution.
    pub solution: Option<PathBuf>,
}

/// A task that was read.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskFolder {
    /// The folder.
    pub path: PathBuf,
    /// Keys of `task.toml`.
    pub manifest: Manifest,
    /// Source of its world.
    pub base: Base,
    /// Content of `environment` that is put into the working folder, where an image without a build is named.
    pub upload: Option<PathBuf>,
    /// Variables and working folder of the compose file.
    pub service: Service,
    /// Conversation before the first instruction.
    pub prior: Vec<Message>,
    /// Instructions in order, at least one.
    pub steps: Vec<Step>,
    /// Reason why no place can run it.
    pub skip: Option<SkipReason>,
}

impl TaskFolder {
    /// Reads a task.
    ///
    /// # Errors
    /// If a file is missing, or has a wrong form.
    pub fn read(path: &Path) -> Result<Self, HarborError> {
        let root = path.canonicalize().map_err(|e| read_error(path, e))?;
        let files = Files { root: &root };
        let text = files.text(&path.join(TASK_FILE))?;
        let manifest = Manifest::parse(&path.join(TASK_FILE), &text)?;
        let (base, upload, service, compose) = files.base(path, &manifest.environment)?;
        let mut steps = Vec::new();
        for keys in &manifest.steps {
            steps.push(files.step(path, &manifest, Some(keys))?);
        }
        if steps.is_empty() {
            steps.push(files.step(path, &manifest, None)?);
        }
        let prior = files.prior(path, &steps[0])?;
        let skip = compose.or_else(|| unsupported(&manifest, &steps));
        let skip = skip.or(prior.as_ref().err().cloned());
        Ok(Self {
            path: path.into(),
            manifest,
            base,
            upload,
            service,
            prior: prior.unwrap_or_default(),
            steps,
            skip,
        })
    }

    /// The part that needs a container; `None`: any sandbox will do.
    pub fn needs_container(&self) -> Option<String> {
        if let Base::Image(_, what) = &self.base {
            return Some(what.clone());
        }
        let user = |step: &Step| step.agent.user.is_some() || step.verifier.keys.user.is_some();
        if self.steps.iter().any(|s| s.verifier.separate.is_some()) {
            return Some("a separate verifier".into());
        }
        let needs = self.steps.iter().any(user);
        needs.then(|| "a user of agent or verifier".to_owned())
    }

    /// Network of the agent.
    pub fn network(&self) -> &NetworkPolicy {
        let own = self.steps.first().and_then(|s| s.agent.network.as_ref());
        let own = own.or(self.manifest.agent.network.as_ref());
        own.unwrap_or(&self.manifest.environment.network)
    }
}

/// The error of a file.
pub(crate) fn read_error(path: &Path, source: std::io::Error) -> HarborError {
    HarborError::Read {
        path: path.into(),
        source,
    }
}

/// Files below the folder of a task.
struct Files<'a> {
    /// The folder, without links.
    root: &'a Path,
}

/// World of a task: base, folder to upload, compose file, reason to skip.
type World = (Base, Option<PathBuf>, Service, Option<SkipReason>);

impl Files<'_> {
    /// Reads a text. Links that lead out of the folder are refused: they would show a file of the user to
    /// the model.
    fn text(&self, path: &Path) -> Result<String, HarborError> {
        let real = path.canonicalize().map_err(|e| read_error(path, e))?;
        if !real.starts_with(self.root) {
            return Err(HarborError::Format {
                path: path.into(),
                reason: "it is a link that leads out of the task; allowed: files of its folder"
                    .into(),
            });
        }
        let bytes = fs::metadata(&real).map_err(|e| read_error(path, e))?.len();
        if bytes > MAX_TEXT_BYTES {
            return Err(HarborError::Format {
                path: path.into(),
                reason: format!("it has {bytes} bytes; allowed: at most {MAX_TEXT_BYTES}"),
            });
        }
        fs::read_to_string(&real).map_err(|e| read_error(path, e))
    }

    /// The world that `environment` describes.
    fn base(&self, path: &Path, keys: &EnvironmentKeys) -> Result<World, HarborError> {
        let folder = path.join("environment");
        let compose = folder.join("docker-compose.yaml");
        let (mut service, mut skip) = (Service::default(), None);
        if compose.is_file() {
            match Service::parse(&compose, &self.text(&compose)?)? {
                Ok(found) => service = found,
                Err(reason) => skip = Some(reason),
            }
        }
        let context = match service.context.as_str() {
            "" | "." => folder.clone(),
            below => folder.join(below),
        };
        let name = match service.dockerfile.as_str() {
            "" => "Dockerfile".to_owned(),
            other => other.to_owned(),
        };
        let dockerfile = context.join(&name);
        let image = keys.docker_image.clone().or(service.image.clone());
        let build = || ImageSource::Build {
            context: context.clone(),
            dockerfile: name.clone(),
        };
        let base = match image {
            Some(image) => Base::Image(
                ImageSource::Named(image.clone()),
                format!("the image {image}"),
            ),
            None if dockerfile.is_file() && compose.is_file() => {
                Base::Image(build(), "docker-compose.yaml".into())
            }
            None if context.join(IGNORE_FILE).is_file() && dockerfile.is_file() => {
                Base::Image(build(), IGNORE_FILE.into())
            }
            None if dockerfile.is_file() => match PlainImage::parse(&self.text(&dockerfile)?) {
                Ok(plain) => Base::Plain(plain, build()),
                Err(line) => Base::Image(build(), format!("the line `{line}` of the Dockerfile")),
            },
            None if compose.is_file() && skip.is_none() => {
                return Err(HarborError::Format {
                    path: compose,
                    reason: "its service has neither an image nor a Dockerfile".into(),
                });
            }
            None => Base::Empty,
        };
        let named = matches!(&base, Base::Image(ImageSource::Named(_), _));
        let upload = named && !dockerfile.is_file() && !compose.is_file() && folder.is_dir();
        Ok((base, upload.then_some(folder), service, skip))
    }

    /// The conversation before the first instruction, from the file next to it.
    fn prior(
        &self,
        path: &Path,
        first: &Step,
    ) -> Result<Result<Vec<Message>, SkipReason>, HarborError> {
        let file = match &first.name {
            Some(name) => path.join("steps").join(name).join(TRAJECTORY_FILE),
            None => path.join(TRAJECTORY_FILE),
        };
        if !file.is_file() {
            return Ok(Ok(Vec::new()));
        }
        trajectory::parse(&file, &self.text(&file)?)
    }

    /// A step, or the whole task.
    fn step(
        &self,
        path: &Path,
        manifest: &Manifest,
        keys: Option<&StepKeys>,
    ) -> Result<Step, HarborError> {
        let own = keys.map(|keys| path.join("steps").join(&keys.name));
        let instruction = own.as_deref().unwrap_or(path).join("instruction.md");
        let instruction = self.text(&instruction)?;
        let own_agent = keys.map(|keys| keys.agent.clone()).unwrap_or_default();
        let agent = AgentKeys {
            timeout_s: own_agent.timeout_s.or(manifest.agent.timeout_s),
            user: own_agent.user.or(manifest.agent.user.clone()),
            network: own_agent.network.or(manifest.agent.network.clone()),
        };
        let folder = |name: &str| {
            let own = own.as_ref().map(|own| own.join(name));
            own.filter(|folder| folder.is_dir())
        };
        let shared = path.join("tests");
        let shared = shared.is_dir().then_some(shared);
        let whole = path.join("solution");
        let whole = whole.is_dir().then_some(whole);
        let mut artifacts = manifest.artifacts.clone();
        artifacts.extend(keys.iter().flat_map(|keys| keys.artifacts.clone()));
        Ok(Step {
            name: keys.map(|keys| keys.name.clone()),
            instruction: without_canary(&instruction).trim().to_owned(),
            agent,
            workdir: folder("workdir"),
            healthcheck: keys.and_then(|keys| keys.healthcheck.clone()),
            verifier: verifier(path, manifest, keys, shared, folder("tests")),
            min_reward: keys.and_then(|keys| keys.min_reward.clone()),
            artifacts,
            solution: folder("solution").or(whole),
        })
    }
}

/// The verifier of a step: keys of the step count before those of the task.
fn verifier(
    path: &Path,
    manifest: &Manifest,
    keys: Option<&StepKeys>,
    shared: Option<PathBuf>,
    own: Option<PathBuf>,
) -> Verifier {
    let task = &manifest.verifier;
    let step = keys.map(|keys| keys.verifier.clone()).unwrap_or_default();
    let mut env = task.env.clone();
    env.extend(step.env.clone());
    let both = VerifierKeys {
        timeout_s: step.timeout_s.or(task.timeout_s),
        env,
        user: step.user.or(task.user.clone()),
        separate: step.separate.or(task.separate),
        environment: step.environment.or(task.environment.clone()),
        network: step.network.or(task.network.clone()),
        collect: task.collect.iter().chain(&step.collect).cloned().collect(),
    };
    let separate = both.separate == Some(true);
    Verifier {
        separate: separate.then(|| separate_verifier(path, manifest, &both, own.as_deref())),
        timeout_s: both.timeout_s.unwrap_or(VERIFIER_S),
        keys: both,
        tests: shared.into_iter().chain(own).collect(),
    }
}

/// The container of a verifier: its own image, or a build of `tests`, else that of the agent.
fn separate_verifier(
    path: &Path,
    manifest: &Manifest,
    keys: &VerifierKeys,
    own: Option<&Path>,
) -> SeparateVerifier {
    let environment = keys.environment.clone();
    let environment = environment.unwrap_or_else(|| manifest.environment.clone());
    let named = keys
        .environment
        .as_ref()
        .and_then(|e| e.docker_image.clone());
    let tests = path.join("tests");
    let mut built = own.into_iter().chain([tests.as_path()]);
    let built = built.find(|folder| folder.join("Dockerfile").is_file());
    let build = |folder: &Path| ImageSource::Build {
        context: folder.into(),
        dockerfile: "Dockerfile".into(),
    };
    let (source, has_tests) = match (named, built) {
        (Some(image), _) => (ImageSource::Named(image), true),
        (None, Some(folder)) => (build(folder), true),
        (None, None) => match &manifest.environment.docker_image {
            Some(image) => (ImageSource::Named(image.clone()), false),
            None => (build(&path.join("environment")), false),
        },
    };
    SeparateVerifier {
        source,
        environment,
        has_tests,
    }
}

/// The first part of a task that no place supports.
fn unsupported(manifest: &Manifest, steps: &[Step]) -> Option<SkipReason> {
    let environment = &manifest.environment;
    let verifiers = steps.iter().map(|s| &s.verifier);
    let others = verifiers.filter_map(|v| v.separate.as_ref());
    for keys in others.map(|v| &v.environment).chain([environment]) {
        if keys.windows {
            return Some(SkipReason::Windows);
        }
        if let Some(key) = keys.accelerator {
            return Some(SkipReason::Accelerator { key });
        }
        if let Some(reason) = host_range(&keys.network) {
            return Some(reason);
        }
    }
    let of_steps = steps
        .iter()
        .flat_map(|s| [&s.agent.network, &s.verifier.keys.network]);
    if let Some(reason) = of_steps.flatten().find_map(host_range) {
        return Some(reason);
    }
    let mut networks = steps
        .iter()
        .map(|s| s.agent.network.as_ref().unwrap_or(&environment.network));
    let first = networks.next();
    if networks.any(|network| Some(network) != first) {
        return Some(SkipReason::StepNetworks);
    }
    steps.iter().find_map(|step| of_step(environment, step))
}

/// The first entry of a list of hosts that is a range of addresses.
fn host_range(network: &NetworkPolicy) -> Option<SkipReason> {
    let NetworkPolicy::Hosts(hosts) = network else {
        return None;
    };
    let host = hosts.iter().find(|host| host.contains(['/', ':']))?;
    Some(SkipReason::HostRange { host: host.clone() })
}

/// The first part of a step that no place supports.
fn of_step(environment: &EnvironmentKeys, step: &Step) -> Option<SkipReason> {
    let other = |key, service: &Option<String>| {
        let service = service.clone()?;
        Some(SkipReason::OtherService { key, service })
    };
    let collect = &step.verifier.keys.collect;
    let collect = collect
        .iter()
        .find_map(|c| other("verifier.collect", &c.service));
    let artifacts = step.artifacts.iter();
    let artifact = || {
        artifacts
            .clone()
            .find_map(|a| other("artifacts", &a.service))
    };
    if let Some(reason) = collect.or_else(artifact) {
        return Some(reason);
    }
    let verifier = &step.verifier;
    let script = |folder: &PathBuf| folder.join(TEST_SCRIPT).is_file();
    let has_tests = verifier.separate.as_ref().is_some_and(|s| s.has_tests);
    if !has_tests && !verifier.tests.iter().any(script) {
        let script = format!("tests/{TEST_SCRIPT}");
        return Some(SkipReason::NoVerifier { script });
    }
    let agent = step.agent.network.as_ref().unwrap_or(&environment.network);
    let wider = match (&verifier.keys.network, agent) {
        (None | Some(NetworkPolicy::None), _) | (_, NetworkPolicy::Public) => false,
        (Some(own), agent) => own != agent,
    };
    (wider && verifier.separate.is_none()).then_some(SkipReason::VerifierNetwork)
}

/// An instruction without the lines at its head that mark data of benchmarks.
fn without_canary(text: &str) -> &str {
    let mut rest = text;
    loop {
        let (line, after) = rest.split_once('\n').unwrap_or((rest, ""));
        let marked = line.trim().to_ascii_lowercase();
        let comment = marked.starts_with('#') || marked.starts_with("<!--");
        if !(comment && marked.contains("canary")) {
            return rest;
        }
        rest = after;
    }
}
