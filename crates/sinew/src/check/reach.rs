//! Checks that outside servers of a run take connections: servers that generate, a pool of trajectories.
//! Nothing is sent: a server that is still loading its model counts as there.

use sinew_assembly::Failure;
use sinew_recipe::{DataSection, EngineType, RunPlan};
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Time that one address has to take a connection.
const WITHIN: Duration = Duration::from_secs(5);

/// Addresses of the recipe's engine; each of them must take a connection. A Tinker service must have the
/// model.
pub(super) fn engine(recipe: &RunPlan) -> Result<String, Failure> {
    let kind = recipe.engine.kind;
    if kind == EngineType::Tinker {
        return sinew_assembly::check_service(recipe);
    }
    sinew_assembly::check_trained(recipe)?;
    for url in recipe.engine.urls() {
        reach("engine.url", url, &format!("start the {kind} server there"))?;
    }
    let text = format!(
        "{kind}: takes connections at {}",
        recipe.engine.urls().join(", ")
    );
    let guarded = !matches!(kind, EngineType::Vllm | EngineType::Sglang);
    let open = recipe.engine.urls().iter().find_map(|url| public(url));
    Ok(match open.filter(|_| !guarded) {
        Some(at) => format!(
            "{text}\n      warning: {at} is on a public network, and the routes of {kind} for weights and pauses answer \
             whoever reaches them, with or without a key: start it with --host on a private network"
        ),
        None => text,
    })
}

/// The first address of a URL that is neither this machine's nor of a private network.
fn public(url: &str) -> Option<IpAddr> {
    let found = authority(url).to_socket_addrs().ok()?;
    found
        .map(|at| at.ip())
        .find(|ip| !is_private(ip.to_canonical()))
}

/// Whether only this machine or a private network reaches an address.
fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let [first, second, ..] = v4.octets();
            let shared = first == 100 && (64..128).contains(&second);
            v4.is_loopback() || v4.is_private() || v4.is_link_local() || shared
        }
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unique_local() || v6.is_unicast_link_local(),
    }
}

/// The servers of the recipe's rewards, and of those of each environment of a mixture.
pub(super) fn rewards(recipe: &RunPlan) -> Result<(), Failure> {
    for (name, judge) in &recipe.judges {
        if let Some(url) = &judge.url {
            reach(&format!("judge.{name}.url"), url, "start the server there")?;
        }
    }
    let rewards = recipe.worlds().into_iter().filter_map(|w| w.reward);
    for server in rewards.flat_map(|r| r.servers()) {
        reach("reward", server.url, "start the reward server there")?;
    }
    Ok(())
}

/// The address of the recipe's pool or queue, where it has one.
pub(super) fn pool(recipe: &RunPlan) -> Result<(), Failure> {
    match &recipe.data {
        Some(DataSection::Pool { url, .. }) => {
            reach("data.url", url, "start `sinew serve --pool` there")
        }
        Some(DataSection::Queue {
            queue,
            token_file: Some(_),
            ..
        }) if !sinew_types::is_database(queue) => {
            reach("data.queue", queue, "start `sinew queue serve` there")
        }
        _ => Ok(()),
    }
}

/// Connects to the host and port of a URL. Each address of the name is tried in turn.
///
/// # Errors
/// The last problem, as something that is missing outside, with `hint`.
pub(crate) fn reach(key: &str, url: &str, hint: &str) -> Result<(), Failure> {
    let failed = |why: &dyn std::fmt::Display| {
        Failure::outside(format!(
            "{key} = {url:?} is not reachable: {why}\n  hint: {hint}"
        ))
    };
    let address = authority(url);
    let found = address.to_socket_addrs().map_err(|e| failed(&e))?;
    let mut problem = "the name has no address".to_owned();
    for at in found {
        match TcpStream::connect_timeout(&at, WITHIN) {
            Ok(_) => return Ok(()),
            Err(e) => problem = e.to_string(),
        }
    }
    Err(failed(&problem))
}

/// `host:port` of a URL, with the scheme's port where none is typed. Credentials before `@` are left out.
fn authority(url: &str) -> String {
    let (port, rest) = match url.split_once("://") {
        Some(("https", rest)) => (443, rest),
        Some((_, rest)) => (80, rest),
        None => (80, url),
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let host = rest[..end].rsplit('@').next().unwrap_or_default();
    let after_address = host.rsplit(']').next().unwrap_or(host);
    if after_address.contains(':') {
        host.to_owned()
    } else {
        format!("{host}:{port}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_the_schemes_unless_typed() {
        for (url, expected) in [
            ("http://a", "a:80"),
            ("https://a/v1", "a:443"),
            ("http://a:8000/v1?x=1:2", "a:8000"),
            ("http://[::1]", "[::1]:80"),
            ("http://[::1]:9/", "[::1]:9"),
            ("http://user:word@a", "a:80"),
        ] {
            assert_eq!(authority(url), expected, "{url}");
        }
    }

    #[test]
    fn public_addresses_are_told_apart() {
        for url in [
            "http://127.0.0.1:80",
            "http://10.1.2.3",
            "http://[::1]",
            "http://[fd00::1]:8",
            "http://100.64.1.1",
        ] {
            assert_eq!(public(url), None, "{url}");
        }
        for url in [
            "http://8.8.8.8",
            "http://[2600::1]:80/v1",
            "http://[::ffff:8.8.8.8]",
            "http://100.128.0.1",
        ] {
            assert!(public(url).is_some(), "{url}");
        }
    }

    #[test]
    fn an_address_without_a_server_is_named() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        reach("engine.url", &url, "start it").unwrap();
        drop(listener);
        let e = reach("engine.url", &url, "start it").unwrap_err();
        assert_eq!(e.code(), 3);
        assert!(
            e.text().contains(&url) && e.text().contains("start it"),
            "{}",
            e.text()
        );
    }
}
