//! `task.toml`: all keys, older spellings, and wrong values with file and key.

use sinew_env::McpServer;
use sinew_harbor::{HarborError, Manifest, MinReward, NetworkPolicy, StepStrategy};
use std::path::Path;

fn parse(text: &str) -> Result<Manifest, HarborError> {
    Manifest::parse(Path::new("tasks/one/task.toml"), text)
}

const ALL: &str = r#"
schema_version = "1.4"
multi_step_reward_strategy = "final"
artifacts = ["/data/out.json", { source = "logs", service = "main", exclude = ["*.tmp"] }]
source = "x"

[task]
name = "org/one"
keywords = ["a"]

[metadata]
category = "csv"
difficulty = "hard"
tags = ["text"]
anything = { deep = [1] }

[agent]
timeout_sec = 60
user = 1000
network_mode = "no-network"

[verifier]
timeout_sec = 30.5
user = "judge"
env = { KEY = "${KEY:-none}" }
environment_mode = "separate"

[verifier.environment]
docker_image = "judge:1"
memory = "2G"

[[verifier.collect]]
command = "dump"
service = "main"
timeout_sec = 5

[environment]
build_timeout_sec = 100
cpus = 1.5
memory_mb = 512
storage_mb = 1024
workdir = "/app"
network_mode = "allowlist"
allowed_hosts = ["PyPI.org.", "*.example.com"]
skills_dir = "/skills"
env = { A = "1" }

[environment.healthcheck]
command = "true"
retries = 7

[[environment.mcp_servers]]
name = "files"
transport = "stdio"
command = "python3"
args = ["/srv/files.py"]

[[environment.mcp_servers]]
name = "web"
url = "http://localhost:1/sse"

[[environment.mcp_servers]]
name = "web"
transport = "http"
url = "http://localhost:1/mcp"
headers = { Authorization = "Bearer ${TOKEN}" }

[solution]
env = { B = "2" }

[[steps]]
name = "first"
min_reward = { reward = 0.5, style = 1 }
artifacts = ["/data/step"]
[steps.agent]
timeout_sec = 5
[steps.verifier]
timeout_sec = 6
[steps.healthcheck]
command = "ready"
"#;

#[test]
fn all_keys_are_read() {
    let all = parse(ALL).unwrap();
    assert!(all.unknown.is_empty(), "{:?}", all.unknown);
    assert_eq!(all.metadata.category.as_deref(), Some("csv"));
    assert_eq!(all.agent.user.as_deref(), Some("1000"));
    assert_eq!(all.agent.network, Some(NetworkPolicy::None));
    assert_eq!(all.strategy, StepStrategy::Final);
    let verifier = &all.verifier;
    assert_eq!(
        (verifier.timeout_s, verifier.separate),
        (Some(30.5), Some(true))
    );
    assert_eq!(verifier.environment.as_ref().unwrap().memory_mb, Some(2048));
    assert_eq!(
        (verifier.collect.len(), verifier.collect[0].service.as_ref()),
        (1, None)
    );
    let environment = &all.environment;
    assert_eq!(
        (environment.cpus, environment.memory_mb),
        (Some(1.5), Some(512))
    );
    let hosts = ["pypi.org", "*.example.com"].map(str::to_owned).to_vec();
    assert_eq!(environment.network, NetworkPolicy::Hosts(hosts));
    let check = environment.healthcheck.as_ref().unwrap();
    assert_eq!(
        (check.retries, check.interval_s, check.timeout_s),
        (7, 5.0, 30.0)
    );
    let servers = &environment.mcp_servers;
    let files = McpServer::Stdio {
        command: "python3".into(),
        args: vec!["/srv/files.py".into()],
    };
    assert_eq!((servers.len(), &servers["files"].server), (2, &files));
    let web = &servers["web"];
    assert_eq!((web.server.transport(), web.headers), ("http", true));
    assert_eq!(all.artifacts.len(), 2);
    let step = &all.steps[0];
    assert_eq!(
        (step.name.as_str(), step.verifier.timeout_s),
        ("first", Some(6.0))
    );
    assert!(matches!(&step.min_reward, Some(MinReward::Each(each)) if each["style"] == 1.0));
}

#[test]
fn older_spellings_mean_the_same() {
    let old = "version = \"1.0\"\n[environment]\nmemory = \"512M\"\nstorage = \"1G\"\nallow_internet = false\n";
    let old = parse(old).unwrap();
    assert_eq!(old.environment.memory_mb, Some(512));
    assert_eq!(old.environment.storage_mb, Some(1024));
    assert_eq!(old.environment.network, NetworkPolicy::None);
    let none = parse("").unwrap();
    assert_eq!(none.environment.network, NetworkPolicy::Public);
    assert_eq!(none.environment.build_timeout_s, 600.0);
}

#[test]
fn keys_of_newer_versions_are_collected() {
    let text = "schema_version = \"1.9\"\nnew = 1\n[environment]\nturbo = true\n[verifier.environment]\nfast = 1\n";
    let mut unknown = parse(text).unwrap().unknown;
    unknown.sort();
    assert_eq!(
        unknown,
        ["environment.turbo", "new", "verifier.environment.fast"]
    );
}

#[test]
fn a_wrong_value_is_named_with_its_file_and_key() {
    for (text, key) in [
        ("schema_version = \"2.0\"", "schema_version"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec"),
        ("[agent]\ntimeout_sec = \"soon\"", "agent.timeout_sec"),
        ("[environment]\ncpus = nan", "environment.cpus"),
        ("[environment]\nmemory_mb = 1.5", "environment.memory_mb"),
        ("[environment]\nmemory = \"much\"", "environment.memory"),
        ("[environment]\nos = \"plan9\"", "environment.os"),
        ("[environment]\nworkdir = \"app\"", "environment.workdir"),
        ("[environment]\nenv = { A = 1 }", "environment.env.A"),
        (
            "[environment]\nnetwork_mode = \"some\"",
            "environment.network_mode",
        ),
        (
            "[environment]\nallowed_hosts = [\"a\"]",
            "environment.allowed_hosts",
        ),
        (
            "[environment]\nnetwork_mode = \"allowlist\"\nallowed_hosts = [\"http://a b\"]",
            "environment.allowed_hosts",
        ),
        (
            "[environment.healthcheck]\nretries = 1",
            "environment.healthcheck.command",
        ),
        (
            "[verifier]\nenvironment_mode = \"shared\"\n[verifier.environment]\ncpus = 1",
            "verifier.environment_mode",
        ),
        (
            "[[verifier.collect]]\nservice = \"db\"",
            "verifier.collect[0].command",
        ),
        ("artifacts = [\"../etc\"]", "artifacts"),
        ("artifacts = [1]", "artifacts"),
        (
            "[[artifacts]]\nsource = \"/a\"\ndestination = \"../b\"",
            "artifacts[0].destination",
        ),
        (
            "[[artifacts]]\nsource = \"/a\"\ndestination = \"manifest.json\"",
            "artifacts[0].destination",
        ),
        (
            "[[artifacts]]\nsource = \"/a\"\nexclude = \"*.o\"",
            "artifacts[0].exclude",
        ),
        ("[[steps]]\nname = \"../x\"", "steps[0].name"),
        (
            "[[steps]]\nname = \"a\"\n[[steps]]\nname = \"A\"",
            "steps[1].name",
        ),
        (
            "[[steps]]\nname = \"a\"\nmin_reward = \"all\"",
            "steps[0].min_reward",
        ),
        ("steps = 3", "steps"),
    ] {
        let e = parse(text).unwrap_err();
        let HarborError::Key { key: found, .. } = &e else {
            panic!("{text}: {e}");
        };
        assert_eq!(found, key, "{text}");
        assert!(e.to_string().starts_with("tasks/one/task.toml: "), "{e}");
    }
    let e = parse("[agent]\n\nx = \n").unwrap_err().to_string();
    assert!(e.contains("line 3"), "{e}");
}

#[test]
fn a_server_lacks_what_its_transport_needs() {
    for (rest, key) in [
        ("", "url"),
        ("transport = \"stdio\"\nurl = \"x\"", "command"),
        ("transport = \"pipe\"", "transport"),
        ("transport = \"sse\"\nurl = \"x\"\nargs = 1", "args"),
    ] {
        let text = format!("[[environment.mcp_servers]]\nname = \"a\"\n{rest}\n");
        let HarborError::Key { key: found, .. } = parse(&text).unwrap_err() else {
            panic!("{text}");
        };
        assert_eq!(found, format!("environment.mcp_servers[0].{key}"));
    }
}
