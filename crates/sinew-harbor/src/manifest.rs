//! `task.toml`: the typed keys of schema versions 1.0 to 1.4.
//!
//! Keys of newer versions are collected in [`Manifest::unknown`]; a wrong value of a known key is an error.
//! Older spellings (`version`, `memory`, `storage`, `allow_internet`) are read as what they mean.

use crate::error::HarborError;
use crate::keys::Keys;
use sinew_env::McpServer;
use std::collections::BTreeMap;
use std::path::Path;

type Read<T> = Result<T, HarborError>;

/// Newest version whose keys are all known.
const NEWEST: (u32, u32) = (1, 4);

/// Maximum number of patterns of an artifact.
const MAX_PATTERNS: usize = 64;

/// Maximum bytes of one of them.
const MAX_PATTERN_BYTES: usize = 256;

/// Network of a container, as `network_mode` and `allowed_hosts` say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NetworkPolicy {
    /// `no-network`.
    None,
    /// `public`.
    #[default]
    Public,
    /// `allowlist`, with the hosts.
    Hosts(Vec<String>),
}

/// A check that a container is ready.
#[derive(Clone, Debug, PartialEq)]
pub struct HealthCheck {
    /// Command whose exit code 0 means ready.
    pub command: String,
    /// Seconds between checks.
    pub interval_s: f64,
    /// Seconds that one check may take.
    pub timeout_s: f64,
    /// Seconds at the start in which failures do not count.
    pub start_period_s: f64,
    /// Seconds between checks in that time.
    pub start_interval_s: f64,
    /// Failures in a row that end the episode.
    pub retries: u64,
}

/// One of `mcp_servers`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct McpKeys {
    /// The way in which it is started or reached.
    pub server: McpServer,
    /// Requests to it have headers of their own.
    pub headers: bool,
}

/// `[environment]`, or `[verifier.environment]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EnvironmentKeys {
    /// Seconds that a build may take.
    pub build_timeout_s: f64,
    /// Image that exists already.
    pub docker_image: Option<String>,
    /// The system is Windows.
    pub windows: bool,
    /// Processors.
    pub cpus: Option<f64>,
    /// Memory in MiB.
    pub memory_mb: Option<u64>,
    /// Files in MiB.
    pub storage_mb: Option<u64>,
    /// Key of an accelerator that is requested.
    pub accelerator: Option<&'static str>,
    /// Environment variables, some of them templates.
    pub env: BTreeMap<String, String>,
    /// Working folder in place of the image's.
    pub workdir: Option<String>,
    /// Check that it is ready.
    pub healthcheck: Option<HealthCheck>,
    /// Network.
    pub network: NetworkPolicy,
    /// MCP servers of the agent, by name.
    pub mcp_servers: BTreeMap<String, McpKeys>,
    /// Folder with skills inside.
    pub skills_dir: Option<String>,
}

/// A file or folder to copy out of the agent's container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Artifact {
    /// Path inside.
    pub source: String,
    /// Path in the folder of kept files; `None`: that inside, without its first slash.
    pub destination: Option<String>,
    /// Patterns of files below a folder that are left out, as `tar --exclude` reads them.
    pub exclude: Vec<String>,
    /// Service that has it; `None`: the only one.
    pub service: Option<String>,
}

/// A command between the agent and the verifier.
#[derive(Clone, Debug, PartialEq)]
pub struct Collect {
    /// Script for a shell.
    pub command: String,
    /// Service; `None`: the only one.
    pub service: Option<String>,
    /// Seconds that it may take.
    pub timeout_s: f64,
    /// User that it runs as.
    pub user: Option<String>,
}

/// `[verifier]` of a task or a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VerifierKeys {
    /// Seconds that it may take.
    pub timeout_s: Option<f64>,
    /// Environment variables, some of them templates.
    pub env: BTreeMap<String, String>,
    /// User; `None`: root.
    pub user: Option<String>,
    /// It has a container of its own; `None`: not said.
    pub separate: Option<bool>,
    /// Environment of that container.
    pub environment: Option<EnvironmentKeys>,
    /// Network in place of the environment's.
    pub network: Option<NetworkPolicy>,
    /// Commands before it.
    pub collect: Vec<Collect>,
}

/// `[agent]` of a task or a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentKeys {
    /// Seconds that it may take.
    pub timeout_s: Option<f64>,
    /// User; `None`: that of the image.
    pub user: Option<String>,
    /// Network in place of the environment's.
    pub network: Option<NetworkPolicy>,
}

/// Smallest rewards with which the next step begins.
#[derive(Clone, Debug, PartialEq)]
pub enum MinReward {
    /// Number for `reward`.
    Main(f64),
    /// By name.
    Each(BTreeMap<String, f64>),
}

/// One of `[[steps]]`.
#[derive(Clone, Debug, PartialEq)]
pub struct StepKeys {
    /// Name of its folder below `steps`.
    pub name: String,
    /// Its agent.
    pub agent: AgentKeys,
    /// Its verifier.
    pub verifier: VerifierKeys,
    /// Smallest rewards with which the next step begins.
    pub min_reward: Option<MinReward>,
    /// Check before its agent.
    pub healthcheck: Option<HealthCheck>,
    /// Further files to copy out.
    pub artifacts: Vec<Artifact>,
}

/// The reward of several steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StepStrategy {
    /// Mean over the steps that were verified.
    #[default]
    Mean,
    /// That of the last step that was verified.
    Final,
}

/// `[metadata]`, as far as it says what kind of task it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// `difficulty`.
    pub difficulty: Option<String>,
    /// `category`.
    pub category: Option<String>,
    /// `tags`.
    pub tags: Vec<String>,
}

/// All keys of `task.toml`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manifest {
    /// Kind of task.
    pub metadata: Metadata,
    /// The agent.
    pub agent: AgentKeys,
    /// The verifier.
    pub verifier: VerifierKeys,
    /// The container.
    pub environment: EnvironmentKeys,
    /// Environment variables of the solution, some of them templates.
    pub solution_env: BTreeMap<String, String>,
    /// The reward of several steps.
    pub strategy: StepStrategy,
    /// Steps; empty: the task has one instruction.
    pub steps: Vec<StepKeys>,
    /// Files to copy out of the agent's container.
    pub artifacts: Vec<Artifact>,
    /// Paths of keys that are not known.
    pub unknown: Vec<String>,
}

impl Manifest {
    /// Parses the text of a file.
    ///
    /// # Errors
    /// The first wrong value, with file and key.
    pub fn parse(file: &Path, text: &str) -> Result<Self, HarborError> {
        let mut root = Keys::parse(file, text)?;
        let mut unknown = Vec::new();
        version(&mut root)?;
        package(&mut root, &mut unknown)?;
        let metadata = metadata(&mut root)?;
        let agent = match root.table("agent")? {
            Some(keys) => agent(keys, &mut unknown)?,
            None => AgentKeys::default(),
        };
        let verifier = match root.table("verifier")? {
            Some(keys) => verifier(keys, &mut unknown)?,
            None => VerifierKeys::default(),
        };
        let environment = root.table("environment")?;
        let empty = || root.below("environment", toml::Table::new());
        let environment = self::environment(environment.unwrap_or_else(empty), &mut unknown)?;
        let mut solution_env = BTreeMap::new();
        if let Some(mut keys) = root.table("solution")? {
            solution_env = keys.variables("env")?;
            keys.rest(&mut unknown);
        }
        let strategies = [("mean", StepStrategy::Mean), ("final", StepStrategy::Final)];
        let strategy = root.word("multi_step_reward_strategy", &strategies)?;
        let steps = steps(&mut root, &mut unknown)?;
        let artifacts = artifacts(&mut root, &mut unknown)?;
        root.any("source");
        root.rest(&mut unknown);
        Ok(Self {
            metadata,
            agent,
            verifier,
            environment,
            solution_env,
            strategy: strategy.unwrap_or_default(),
            steps,
            artifacts,
            unknown,
        })
    }
}

/// The version: a newer minor version is read, as far as its keys are known.
fn version(root: &mut Keys) -> Read<()> {
    let old = root.text("version")?;
    let text = root.text("schema_version")?.or(old);
    let Some(text) = text else {
        return Ok(());
    };
    let mut parts = text.split('.').map(str::parse::<u32>);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(_))) if major == NEWEST.0 => Ok(()),
        _ => {
            let allowed = format!("1.0 to {}.{}, or a later 1.x", NEWEST.0, NEWEST.1);
            Err(root.wrong("schema_version", format!("{text:?}"), &allowed))
        }
    }
}

/// `[task]`, which describes the package; nothing of it changes an episode.
fn package(root: &mut Keys, unknown: &mut Vec<String>) -> Read<()> {
    let Some(mut keys) = root.table("task")? else {
        return Ok(());
    };
    for key in ["name", "version", "description", "authors", "keywords"] {
        keys.any(key);
    }
    keys.rest(unknown);
    Ok(())
}

/// `[metadata]` may have any keys.
fn metadata(root: &mut Keys) -> Read<Metadata> {
    let Some(mut keys) = root.table("metadata")? else {
        return Ok(Metadata::default());
    };
    Ok(Metadata {
        difficulty: keys.text("difficulty")?,
        category: keys.text("category")?,
        tags: keys.texts("tags")?.unwrap_or_default(),
    })
}

fn agent(mut keys: Keys, unknown: &mut Vec<String>) -> Read<AgentKeys> {
    let agent = AgentKeys {
        timeout_s: keys.seconds("timeout_sec")?,
        user: keys.user("user")?,
        network: network(&mut keys)?,
    };
    keys.rest(unknown);
    Ok(agent)
}

/// `network_mode` and `allowed_hosts`; `None` if neither is there.
fn network(keys: &mut Keys) -> Read<Option<NetworkPolicy>> {
    #[derive(Clone, Copy, PartialEq)]
    enum Mode {
        None,
        Public,
        Hosts,
    }
    let modes = [
        ("no-network", Mode::None),
        ("public", Mode::Public),
        ("allowlist", Mode::Hosts),
    ];
    let mode = keys.word("network_mode", &modes)?;
    let hosts = keys.texts("allowed_hosts")?;
    if let Some(hosts) = &hosts
        && mode != Some(Mode::Hosts)
    {
        let allowed = "missing where network_mode is not \"allowlist\"";
        return Err(keys.wrong("allowed_hosts", format!("{hosts:?}"), allowed));
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || ".-*:/".contains(c);
    let mut named = Vec::new();
    for host in hosts.unwrap_or_default() {
        let host = host.trim().trim_end_matches('.').to_ascii_lowercase();
        let star = host.strip_prefix("*.").unwrap_or(&host);
        let named_well = host.chars().all(plain) && !host.contains("://");
        if star.is_empty() || star.contains('*') || !named_well {
            let allowed = "names of hosts, *.NAME, addresses and ranges, without scheme and port";
            return Err(keys.wrong("allowed_hosts", format!("{host:?}"), allowed));
        }
        named.push(host);
    }
    Ok(mode.map(|mode| match mode {
        Mode::None => NetworkPolicy::None,
        Mode::Public => NetworkPolicy::Public,
        Mode::Hosts => NetworkPolicy::Hosts(named),
    }))
}

/// A size in MiB: the present key, else an older one with a unit.
fn size(keys: &mut Keys, key: &str, old: &str) -> Read<Option<u64>> {
    let new = keys.count(key)?;
    let Some(text) = keys.text(old)? else {
        return Ok(new);
    };
    let (number, unit) = text.trim().split_at(text.trim().len().saturating_sub(1));
    let factor = match unit.to_ascii_uppercase().as_str() {
        "G" => 1024.0,
        "M" => 1.0,
        "K" => 1.0 / 1024.0,
        _ => 0.0,
    };
    match number.parse::<f64>() {
        Ok(value) if factor > 0.0 && (0.0..1e9).contains(&value) => {
            Ok(new.or(Some((value * factor) as u64)))
        }
        _ => Err(keys.wrong(old, format!("{text:?}"), "a number with K, M or G")),
    }
}

fn environment(mut keys: Keys, unknown: &mut Vec<String>) -> Read<EnvironmentKeys> {
    let mut network = network(&mut keys)?;
    if let Some(internet) = keys.flag("allow_internet")? {
        let old = if internet {
            NetworkPolicy::Public
        } else {
            NetworkPolicy::None
        };
        network = network.or(Some(old));
    }
    let accelerators = [
        ("gpus", keys.count("gpus")?.is_some_and(|n| n > 0)),
        ("tpu", keys.any("tpu").is_some()),
    ];
    keys.any("gpu_types");
    let workdir = keys.text("workdir")?;
    if let Some(folder) = workdir.as_ref().filter(|f| !f.starts_with('/')) {
        return Err(keys.wrong(
            "workdir",
            format!("{folder:?}"),
            "a path that begins with /",
        ));
    }
    let environment = EnvironmentKeys {
        build_timeout_s: keys.seconds("build_timeout_sec")?.unwrap_or(600.0),
        docker_image: keys.text("docker_image")?.filter(|image| !image.is_empty()),
        windows: keys
            .word("os", &[("linux", false), ("windows", true)])?
            .unwrap_or(false),
        cpus: keys.positive("cpus")?,
        memory_mb: size(&mut keys, "memory_mb", "memory")?.filter(|&mb| mb > 0),
        storage_mb: size(&mut keys, "storage_mb", "storage")?.filter(|&mb| mb > 0),
        accelerator: accelerators
            .into_iter()
            .find(|(_, set)| *set)
            .map(|(key, _)| key),
        env: keys.variables("env")?,
        workdir,
        healthcheck: health_check(&mut keys, unknown)?,
        network: network.unwrap_or_default(),
        mcp_servers: mcp_servers(&mut keys, unknown)?,
        skills_dir: keys.text("skills_dir")?,
    };
    keys.rest(unknown);
    Ok(environment)
}

/// `mcp_servers`. A later one replaces an earlier one of its name.
fn mcp_servers(keys: &mut Keys, unknown: &mut Vec<String>) -> Read<BTreeMap<String, McpKeys>> {
    #[derive(Clone, Copy)]
    enum Transport {
        Stdio,
        Sse,
        Http,
    }
    let transports = [
        ("stdio", Transport::Stdio),
        ("sse", Transport::Sse),
        ("streamable-http", Transport::Http),
        ("http", Transport::Http),
    ];
    let mut all = BTreeMap::new();
    for mut keys in keys.tables("mcp_servers")? {
        let name = keys.required("name")?;
        let transport = keys.word("transport", &transports)?;
        let args = keys.texts("args")?.unwrap_or_default();
        let server = match transport.unwrap_or(Transport::Sse) {
            Transport::Stdio => McpServer::Stdio {
                command: keys.required("command")?,
                args,
            },
            Transport::Sse => McpServer::Sse {
                url: keys.required("url")?,
            },
            Transport::Http => McpServer::Http {
                url: keys.required("url")?,
            },
        };
        let headers = !keys.variables("headers")?.is_empty();
        // Those of the other transports have no effect.
        keys.any("command");
        keys.any("url");
        keys.rest(unknown);
        all.insert(name, McpKeys { server, headers });
    }
    Ok(all)
}

fn health_check(keys: &mut Keys, unknown: &mut Vec<String>) -> Read<Option<HealthCheck>> {
    let Some(mut keys) = keys.table("healthcheck")? else {
        return Ok(None);
    };
    let check = HealthCheck {
        command: keys.required("command")?,
        interval_s: keys.seconds("interval_sec")?.unwrap_or(5.0),
        timeout_s: keys.seconds("timeout_sec")?.unwrap_or(30.0),
        start_period_s: keys
            .number("start_period_sec")?
            .unwrap_or(0.0)
            .min(86_400.0),
        start_interval_s: keys.seconds("start_interval_sec")?.unwrap_or(5.0),
        retries: keys.count("retries")?.unwrap_or(3).clamp(1, 10_000),
    };
    keys.rest(unknown);
    Ok(Some(check))
}

fn verifier(mut keys: Keys, unknown: &mut Vec<String>) -> Read<VerifierKeys> {
    let modes = [("shared", false), ("separate", true)];
    let separate = keys.word("environment_mode", &modes)?;
    let environment = match keys.table("environment")? {
        None => None,
        Some(_) if separate == Some(false) => {
            let allowed = "\"separate\" with [verifier.environment]";
            return Err(keys.wrong("environment_mode", "\"shared\"", allowed));
        }
        Some(keys) => Some(environment(keys, unknown)?),
    };
    let mut collect = Vec::new();
    for mut hook in keys.tables("collect")? {
        collect.push(Collect {
            command: hook.required("command")?,
            service: hook.text("service")?.filter(|s| s != "main"),
            timeout_s: hook.seconds("timeout_sec")?.unwrap_or(60.0),
            user: hook.user("user")?,
        });
        hook.rest(unknown);
    }
    let verifier = VerifierKeys {
        timeout_s: keys.seconds("timeout_sec")?,
        env: keys.variables("env")?,
        user: keys.user("user")?,
        separate: separate.or(environment.as_ref().map(|_| true)),
        environment,
        network: network(&mut keys)?,
        collect,
    };
    keys.rest(unknown);
    Ok(verifier)
}

/// `artifacts`: paths, or tables with a path.
fn artifacts(keys: &mut Keys, unknown: &mut Vec<String>) -> Read<Vec<Artifact>> {
    let list = match keys.any("artifacts") {
        None => return Ok(Vec::new()),
        Some(toml::Value::Array(list)) => list,
        Some(other) => return Err(keys.wrong("artifacts", other, "a list of paths or tables")),
    };
    let mut all = Vec::new();
    for (at, value) in list.into_iter().enumerate() {
        let artifact = match value {
            toml::Value::String(source) => Artifact {
                source,
                ..Artifact::default()
            },
            toml::Value::Table(table) => {
                artifact(keys.below(&format!("artifacts[{at}]"), table), unknown)?
            }
            other => return Err(keys.wrong("artifacts", other, "a list of paths or tables")),
        };
        if artifact.source.is_empty() || artifact.source.split('/').any(|part| part == "..") {
            let allowed = "a path without ..";
            return Err(keys.wrong("artifacts", format!("{:?}", artifact.source), allowed));
        }
        all.push(artifact);
    }
    Ok(all)
}

/// One table of `artifacts`.
fn artifact(mut keys: Keys, unknown: &mut Vec<String>) -> Read<Artifact> {
    let artifact = Artifact {
        source: keys.required("source")?,
        destination: keys.text("destination")?.filter(|to| !to.is_empty()),
        exclude: keys.texts("exclude")?.unwrap_or_default(),
        service: keys.text("service")?.filter(|s| s != "main"),
    };
    if let Some(to) = &artifact.destination {
        let mut parts = to
            .split('/')
            .filter(|part| !part.is_empty() && *part != ".");
        let leads_out =
            to.starts_with('/') || to.contains('\\') || to.split('/').any(|p| p == "..");
        let names = parts.next().is_some() && to.trim_end_matches('/') != "manifest.json";
        if leads_out || !names {
            let allowed = "a relative path without .. and \\, other than manifest.json";
            return Err(keys.wrong("destination", format!("{to:?}"), allowed));
        }
    }
    let count = artifact.exclude.len();
    let long = |pattern: &String| pattern.len() > MAX_PATTERN_BYTES;
    if count > MAX_PATTERNS || artifact.exclude.iter().any(long) {
        let allowed = format!("at most {MAX_PATTERNS} patterns of {MAX_PATTERN_BYTES} bytes");
        return Err(keys.wrong("exclude", format!("{count} patterns"), &allowed));
    }
    keys.rest(unknown);
    Ok(artifact)
}

fn steps(root: &mut Keys, unknown: &mut Vec<String>) -> Read<Vec<StepKeys>> {
    let mut steps: Vec<StepKeys> = Vec::new();
    for mut keys in root.tables("steps")? {
        let name = keys.required("name")?;
        let plain = |c: char| c.is_alphanumeric() || "-_. ".contains(c);
        let folder = !name.starts_with('.') && name.chars().all(plain);
        if !folder || steps.iter().any(|s| s.name.eq_ignore_ascii_case(&name)) {
            let allowed = "the name of a folder, which no other step has";
            return Err(keys.wrong("name", format!("{name:?}"), allowed));
        }
        let step = StepKeys {
            name,
            agent: match keys.table("agent")? {
                Some(keys) => agent(keys, unknown)?,
                None => AgentKeys::default(),
            },
            verifier: match keys.table("verifier")? {
                Some(keys) => verifier(keys, unknown)?,
                None => VerifierKeys::default(),
            },
            min_reward: min_reward(&mut keys)?,
            healthcheck: health_check(&mut keys, unknown)?,
            artifacts: artifacts(&mut keys, unknown)?,
        };
        keys.rest(unknown);
        steps.push(step);
    }
    Ok(steps)
}

/// `min_reward`: a number, or numbers by name. They may be below 0.
fn min_reward(keys: &mut Keys) -> Read<Option<MinReward>> {
    let number = |value: &toml::Value| match value {
        toml::Value::Integer(n) => Some(*n as f64),
        toml::Value::Float(n) if n.is_finite() => Some(*n),
        _ => None,
    };
    let allowed = "a number, or a table of numbers";
    match keys.any("min_reward") {
        None => Ok(None),
        Some(toml::Value::Table(table)) => {
            let mut each = BTreeMap::new();
            for (name, value) in table {
                let least = number(&value);
                let least = least.ok_or_else(|| keys.wrong("min_reward", value, allowed))?;
                each.insert(name, least);
            }
            Ok(Some(MinReward::Each(each)))
        }
        Some(value) => match number(&value) {
            Some(least) => Ok(Some(MinReward::Main(least))),
            None => Err(keys.wrong("min_reward", value, allowed)),
        },
    }
}
