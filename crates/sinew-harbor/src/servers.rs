//! MCP servers of a task: who can use them, and how those with an address run while an agent program does.
//!
//! A program of the task ends with the command that started it. A server with an address is therefore started
//! by the health check of the task, which runs again in the execution of the agent.

use crate::error::SkipReason;
use crate::manifest::{EnvironmentKeys, McpKeys};
use sinew_env::{McpFacts, McpServer};

/// Maximum bytes of all servers as JSON: agents get them as one variable, which Linux limits to 128 KiB.
const MAX_BYTES: usize = 32 << 10;

/// Maximum number of tries of the health check before an agent.
const MAX_TRIES: u64 = 10_000;

/// Runs the health check `$0` at most `$1` times, every `$2` seconds, then becomes the agent.
const WITH_CHECK: &str = "n=0; until /bin/sh -c \"$0\" </dev/null >/dev/null 2>&1; do n=$((n + 1)); \
    if [ \"$n\" -ge \"$1\" ]; then echo 'the health check failed before the agent' >&2; exit 69; fi; \
    sleep \"$2\"; done; shift 2; exec \"$@\"";

/// The first server that a player cannot use.
pub(crate) fn refused(keys: &EnvironmentKeys, player: &McpFacts) -> Option<SkipReason> {
    let mut bytes = 0;
    keys.mcp_servers.iter().find_map(|(name, one)| {
        bytes += name.len() + one.server.to_json().to_string().len();
        let long = format!("the servers of the task have more than {MAX_BYTES} bytes");
        let long = (bytes > MAX_BYTES).then_some(long);
        Some(SkipReason::McpServer {
            server: name.clone(),
            why: fault(name, one, keys, player).or(long)?,
        })
    })
}

/// The reason why a player cannot use a server.
fn fault(
    name: &str,
    one: &McpKeys,
    keys: &EnvironmentKeys,
    McpFacts { player, transports }: &McpFacts,
) -> Option<String> {
    if transports.is_empty() {
        return Some(format!("{player} takes no MCP servers"));
    }
    let transport = one.server.transport();
    if !transports.contains(&transport) {
        let known = transports.join(", ");
        return Some(format!(
            "{player} has no transport {transport}, but {known}"
        ));
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if !name.chars().all(plain) {
        return Some("a name has letters, digits, - and _ only".into());
    }
    if one.headers {
        return Some("headers are not supported".into());
    }
    let (McpServer::Sse { url } | McpServer::Http { url }) = &one.server else {
        return None;
    };
    if !is_inside(url) {
        return Some(format!(
            "{url} is not in the container of the task: http://localhost:PORT is"
        ));
    }
    let unstarted = "environment.healthcheck has to start it: programs end with their command";
    keys.healthcheck.is_none().then(|| unstarted.to_owned())
}

/// Whether an address belongs to the loopback interface.
fn is_inside(url: &str) -> bool {
    let Some(rest) = url.strip_prefix("http://") else {
        return false;
    };
    let place = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let (host, port) = place.split_once(':').unwrap_or((place, "80"));
    ["localhost", "127.0.0.1"].contains(&host) && port.chars().all(|c| c.is_ascii_digit())
}

/// The command of an agent, after the health check of the task where a server has an address.
pub(crate) fn after_check(keys: &EnvironmentKeys, argv: Vec<String>) -> Vec<String> {
    let mut servers = keys.mcp_servers.values();
    let stdio = |one: &McpKeys| matches!(one.server, McpServer::Stdio { .. });
    let (false, Some(check)) = (servers.all(stdio), &keys.healthcheck) else {
        return argv;
    };
    let early = (check.start_period_s / check.interval_s).ceil() as u64;
    let tries = check.retries.saturating_add(early).min(MAX_TRIES);
    let mut words = ["/bin/sh", "-c", WITH_CHECK].map(str::to_owned).to_vec();
    words.push(check.command.clone());
    words.push(tries.to_string());
    words.push(check.interval_s.to_string());
    words.extend(argv);
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::HealthCheck;
    use std::process::{Command, Output};

    /// Runs `/bin/echo` as an agent behind a health check, in a folder.
    fn run(check: &str, folder: &std::path::Path) -> Output {
        let web = McpKeys {
            server: McpServer::Http {
                url: "http://localhost:1".into(),
            },
            headers: false,
        };
        let keys = EnvironmentKeys {
            healthcheck: Some(HealthCheck {
                command: check.into(),
                interval_s: 0.001,
                timeout_s: 1.0,
                start_period_s: 0.0,
                start_interval_s: 1.0,
                retries: 3,
            }),
            mcp_servers: [("web".to_owned(), web)].into(),
            ..EnvironmentKeys::default()
        };
        let argv = after_check(&keys, vec!["/bin/echo".into(), "a  b".into()]);
        let mut command = Command::new(&argv[0]);
        let command = command.args(&argv[1..]).current_dir(folder);
        command.output().unwrap()
    }

    #[test]
    fn the_agent_starts_when_the_health_check_succeeds() {
        let dir = tempfile::tempdir().unwrap();
        let second = "echo noise; [ -e first ] || { touch first; exit 1; }";
        assert_eq!(run(second, dir.path()).stdout, b"a  b\n");
        let never = run("echo >>tries; exit 1", dir.path());
        assert_eq!(never.status.code(), Some(69));
        assert!(never.stdout.is_empty());
        let tries = std::fs::read_to_string(dir.path().join("tries")).unwrap();
        assert_eq!(tries.lines().count(), 3);
    }

    #[test]
    fn only_addresses_of_the_loopback_interface_are_inside() {
        for url in [
            "http://localhost",
            "http://localhost:8000/mcp",
            "http://127.0.0.1:1?a#b",
        ] {
            assert!(is_inside(url), "{url}");
        }
        for url in [
            "https://localhost/",
            "http://localhost.example.com/",
            "http://localhost:80@example.com/",
            "http://a@localhost/",
            "http://server:8000/mcp",
            "localhost",
        ] {
            assert!(!is_inside(url), "{url}");
        }
    }
}
