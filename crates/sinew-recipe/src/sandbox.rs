//! `[sandbox]`: where the agent's code runs.

use crate::reward::RewardSection;
use crate::rule::Rules;
use crate::section::{choice, section};
use crate::urls::{Urls, is_http};
use crate::{EnvMember, HarnessLevel, RunPlan};
use sinew_egress::EgressConfig;
use std::collections::BTreeMap;
use std::path::PathBuf;

choice! {
    /// Isolation of code from the host.
    Level {
        /// A process with namespaces, seccomp and limits.
        Process = "process",
        /// Python on WebAssembly.
        Wasm = "wasm",
        /// A container of crun, runc, Docker or Podman.
        Container = "container",
        /// A virtual machine.
        Microvm = "microvm",
    }
}

choice! {
    /// The engine that starts containers.
    ContainerEngine {
        /// The first that works: crun, runc, Docker, Podman.
        Auto = "auto",
        Crun = "crun",
        Runc = "runc",
        Docker = "docker",
        Podman = "podman",
    }
}

section! {
    /// The place where the agent's code runs.
    SandboxKeys => SandboxPlan, "sandbox" {
        /// Isolation of code from the host.
        level: Level = Level::Process;
        /// Refuse to run if a protection cannot be enforced on this host.
        strict: bool = false;
        /// Address of a sandbox server (`sinew serve --sandbox-only`) on which the sandboxes run, at the
        /// level `level` of that server, or of several, at most 1,024: each sandbox goes to the one with the
        /// most room for its price; left out: they run on this host.
        server: Urls;
        /// Owner of a run (`sinew train --control`) whose registered sandbox servers are used as well as
        /// `server`; they come and go.
        owner: String;
        /// Environment variable with the token for `owner`.
        owner_key_env: String = "SINEW_CONTROL_TOKEN".into();
        /// Environment variable with the token for `server` and for those that `owner` has: the same one at
        /// all of them.
        server_key_env: String = "SINEW_SANDBOX_TOKEN".into();
        /// Memory of a sandbox, in MiB.
        memory_mb: u64 = 256, in 32 to 65_536;
        /// Bytes of files in the work folder and in `/tmp` together, in MiB, and the longest file or piece
        /// of shared memory. They count as memory, too.
        work_mb: u64 = 16, in 1 to 65_536;
        /// Processes and threads of a sandbox.
        processes: u64 = 16, in 1 to 4096;
        /// Open files of one process.
        open_files: u64 = 1024, in 16 to 65_536;
        /// CPU time of one program, in seconds.
        cpu_s: f64 = 4.0;
        /// Maximum number of sandboxes at a time.
        max_sandboxes: usize = 64, in 1 to 16_384;
        /// Root of sandboxes, for `process` and `container`: an image of a registry
        /// (`registry:HOST/NAME:TAG`, or `@sha256:DIGEST`), a build of `sinew sandbox image build`
        /// (`built:TAG`), an image of a local engine (`local:NAME`), an OCI layout, a tar file of one or of
        /// `docker save` (`:TAG` after it where it holds several), or a folder that is a root
        /// already; for `container` also a tar file of a root, or an image that Docker or Podman
        /// has. With `server`: the name of one of its images. Left out: the system folders of the host.
        image: String;
        /// Images that rows of `[tasks]` may name in their column `image`, by name, for `env.type =
        /// "python"`: the worker of such an episode runs in that image. Each is named as `image` is. At
        /// most 512.
        images: BTreeMap<String, String> = BTreeMap::new();
        /// Folder in which images are pulled and unpacked, once each; for `process` and `container`.
        image_cache: String = ".cache/images".into();
        /// Folders of this host that sandboxes see at `/volumes/NAME`, read-only, by their names; for
        /// `process` and `container`. Without sockets and pipes, and none of the host's own.
        volumes: BTreeMap<String, PathBuf> = BTreeMap::new();
        /// Folder of compiled interpreters, for `wasm`.
        wasm_modules: String = ".cache/wasm".into();
        /// The engine that starts containers, for `container`.
        container_engine: ContainerEngine = ContainerEngine::Auto;
        /// Socket of the API of Docker or Podman if it is not at the usual place, for `container`.
        container_socket: String;
        /// Maximum number of processors that one container uses, 0.01 to 1024, for `container`; left
        /// out: not bounded.
        cpus: f64;
        /// Folder of kernels and roots, for `microvm`.
        microvm_images: String = ".cache/microvm".into();
        /// Folder for a log of each sandbox's requests to the network.
        egress_audit: String;
        /// Rules of the egress proxy; left out: no network.
        egress: EgressConfig;
    }
}

/// Names of a level on the command line: a level, or what runs it.
pub const LEVEL_NAMES: &str = "process, wasm, container, crun, runc, docker, podman, microvm";

impl SandboxPlan {
    /// Addresses of the sandbox servers that are given.
    pub fn servers(&self) -> &[String] {
        self.server.as_ref().map_or(&[], Urls::all)
    }

    /// Whether sandboxes run on other hosts.
    pub fn is_elsewhere(&self) -> bool {
        self.server.is_some() || self.owner.is_some()
    }

    /// Returns the default settings for a level of the command line, given by its name or by its engine.
    pub fn at(name: &str) -> Option<Self> {
        let mut plan = Self::default();
        let container = |engine| (Level::Container, engine);
        let level = |level| (level, ContainerEngine::Auto);
        (plan.level, plan.container_engine) = match name {
            "process" => level(Level::Process),
            "wasm" => level(Level::Wasm),
            "container" => level(Level::Container),
            "crun" => container(ContainerEngine::Crun),
            "runc" => container(ContainerEngine::Runc),
            "docker" => container(ContainerEngine::Docker),
            "podman" => container(ContainerEngine::Podman),
            "microvm" => level(Level::Microvm),
            _ => return None,
        };
        Some(plan)
    }
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let s = &plan.sandbox;
    s.ranges(rules);
    rules.seconds("sandbox.cpu_s", s.cpu_s);
    rules.custom(
        "sandbox.cpus",
        s.cpus.unwrap_or_default(),
        "allowed: 0.01 to 1024",
        s.cpus.is_none_or(|n| (0.01..=1024.0).contains(&n)),
    );
    let rewards = plan.worlds().into_iter().filter_map(|w| w.reward);
    let runs = |r: &RewardSection| r.has_python() || r.has_code();
    let scored = rewards.into_iter().any(runs);
    let program = plan.harness.program().is_some();
    let used = plan.env.needs().sandbox || program || scored;
    let env = plan.env.name();
    let reason = format!("has no effect: env.type = \"{env}\" runs no code; remove it");
    rules.unused("sandbox", reason, used);
    images(plan, rules);
    python(plan, rules);
    server(plan, rules);
    levels(plan, rules);
    egress(plan, rules);
}

/// Maximum number of sandbox servers.
const MAX_SERVERS: usize = 1024;
/// Maximum number of task images.
const MAX_IMAGES: usize = 512;
/// Maximum number of characters in the name of an image.
const MAX_IMAGE_NAME: usize = 128;

/// Adds the rules for task images.
fn images(plan: &RunPlan, rules: &mut Rules) {
    let images = &plan.sandbox.images;
    let members = plan.env.members();
    rules.unused(
        "sandbox.images",
        "has an effect with env.type = \"python\" only; remove it",
        members.iter().any(|m| m.config().task_images()),
    );
    rules.allowed(
        "sandbox.images",
        format!("{} images", images.len()),
        &format!("at most {MAX_IMAGES}"),
        images.len() <= MAX_IMAGES,
    );
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:".contains(c);
    for (name, image) in images {
        let fits = (1..=MAX_IMAGE_NAME).contains(&name.len()) && name.chars().all(plain);
        let allowed = format!("names of 1 to {MAX_IMAGE_NAME} of a-z, A-Z, 0-9, -, _, ., / and :");
        rules.allowed("sandbox.images", format!("{name:?}"), &allowed, fits);
        let reason = format!("image {name:?} is empty; allowed: what sandbox.image may be");
        rules.custom("sandbox.images", "\"\"", reason, !image.is_empty());
    }
}

/// Refuses settings that workers of Python environments do not support.
fn python(plan: &RunPlan, rules: &mut Rules) {
    let mut kinds = plan.env.members().iter().map(EnvMember::kind_name);
    let python = kinds.clone().any(|kind| kind == "python");
    if !python {
        return;
    }
    let alone = kinds.all(|kind| kind == "python");
    let level = plan.sandbox.level;
    rules.custom(
        "sandbox.level",
        level.name(),
        "env.type = \"python\" runs at level \"process\"; at another one, start `sinew env serve MODULE` in a container or \
         a machine of yours, and set env.type = \"http\"",
        level == Level::Process,
    );
    if plan.harness.is_built_in() && alone {
        for (key, why) in [
            ("sandbox.cpu_s", "env.timeout_s bounds each call"),
            (
                "sandbox.image",
                "env.python names the interpreter; images of tasks are sandbox.images",
            ),
            ("sandbox.volumes", "workers see no volumes"),
            ("sandbox.egress", "workers have no network"),
        ] {
            let reason = format!("has no effect with env.type = \"python\": {why}; remove it");
            rules.unused(key, reason, false);
        }
    }
}

/// Refuses keys that a sandbox server decides, and features that cannot run on another host.
fn server(plan: &RunPlan, rules: &mut Rules) {
    let s = &plan.sandbox;
    let reason = "has no effect without sandbox.owner; remove it";
    rules.unused("sandbox.owner_key_env", reason, s.owner.is_some());
    if !s.is_elsewhere() {
        let reason = "has no effect without sandbox.server; remove it";
        rules.unused("sandbox.server_key_env", reason, false);
        return;
    }
    if let Some(owner) = &s.owner {
        let allowed = "http:// or https:// and a host";
        rules.allowed("sandbox.owner", owner, allowed, is_http(owner));
    }
    if let Some(urls) = &s.server {
        servers(urls.all(), rules);
    }
    let url = format!("{:?}", s.servers());
    let reason = "agent programs need the network of this host; remove it";
    rules.custom("sandbox.server", &url, reason, plan.harness.is_built_in());
    let python = plan.env.members().iter().all(|m| m.kind_name() == "python");
    let mut rewards = plan.worlds().into_iter().filter_map(|w| w.reward);
    let reason = "has no effect: Python environments run on this host; remove it";
    let has_effect = !python || rewards.any(RewardSection::has_code);
    rules.unused("sandbox.server", reason, has_effect);
    rules.unused("sandbox.owner", reason, has_effect);
    for key in [
        "image_cache",
        "volumes",
        "wasm_modules",
        "container_engine",
        "container_socket",
        "cpus",
        "microvm_images",
        "egress",
        "egress_audit",
    ] {
        let reason = "has no effect with sandbox.server: the server decides; remove it";
        rules.unused(&format!("sandbox.{key}"), reason, false);
    }
}

/// Refuses addresses that are none, or are there twice.
fn servers(urls: &[String], rules: &mut Rules) {
    let count = urls.len();
    rules.allowed(
        "sandbox.server",
        format!("{count} addresses"),
        &format!("1 to {MAX_SERVERS}"),
        (1..=MAX_SERVERS).contains(&count),
    );
    for (at, url) in urls.iter().enumerate() {
        rules.allowed(
            "sandbox.server",
            url,
            "http:// or https:// and a host",
            is_http(url),
        );
        let place = |url: &str| url.trim_end_matches('/').to_owned();
        let is_new = !urls[..at].iter().any(|other| place(other) == place(url));
        rules.allowed("sandbox.server", url, "each address once", is_new);
    }
}

/// Refuses keys of a level at which neither tools nor agent programs run.
fn levels(plan: &RunPlan, rules: &mut Rules) {
    let s = &plan.sandbox;
    let program = plan.harness.program();
    let outside = program.is_some_and(|c| c.level == HarnessLevel::Container);
    let rooted = matches!(s.level, Level::Process | Level::Container);
    let container = s.level == Level::Container || outside;
    let wasm = s.level == Level::Wasm;
    let microvm = s.level == Level::Microvm;
    for (key, has_effect, levels) in [
        ("sandbox.image", rooted, "process or container"),
        (
            "sandbox.image_cache",
            rooted || outside,
            "process or container",
        ),
        ("sandbox.volumes", rooted, "process or container"),
        ("sandbox.wasm_modules", wasm, "wasm"),
        ("sandbox.container_engine", container, "container"),
        ("sandbox.container_socket", container, "container"),
        ("sandbox.cpus", container, "container"),
        ("sandbox.microvm_images", microvm, "microvm"),
    ] {
        let reason = format!("has an effect at level {levels} only; remove it");
        rules.unused(key, reason, has_effect);
    }
}

fn egress(plan: &RunPlan, rules: &mut Rules) {
    let s = &plan.sandbox;
    let Some(egress) = &s.egress else {
        let reason = "has no effect without [sandbox.egress]; remove it";
        rules.unused("sandbox.egress_audit", reason, false);
        return;
    };
    let reason = "needs sandbox.level = \"process\" or \"container\": the others have no network";
    let has_network = matches!(s.level, Level::Process | Level::Container);
    rules.custom("sandbox.egress", "{ ... }", reason, has_network);
    use sinew_egress::Mode;
    let allowed = "live, record, cache; `sinew replay` replays what was recorded, and so does `sinew serve \
         --sandbox-only --egress FILE`";
    rules.allowed(
        "sandbox.egress.mode",
        format!("{:?}", egress.mode),
        allowed,
        egress.mode != Mode::Replay,
    );
    let mut egress = egress.clone();
    if egress.mode == Mode::Record {
        rules.custom(
            "sandbox.egress.folder",
            "a folder",
            "a run with mode = \"record\" keeps its recordings in network/ of its own folder; \
             remove it",
            egress.folder.is_none(),
        );
        let reason =
            "needs harness.type = \"built_in\": episodes of agent programs are not replayed";
        let built_in = plan.harness.is_built_in();
        rules.custom("sandbox.egress.mode", "\"record\"", reason, built_in);
        egress.folder = Some("network".into());
    }
    // Whether the variables of credentials are set is found out where they are needed.
    if let Err(e) = egress.policy(&|_| Some("0123456789abcdef".into())) {
        rules.custom("sandbox.egress", "{ ... }", e.to_string(), false);
    }
}
