//! Servers that run already, by their addresses in a file: nothing is started and nothing is stopped.
//!
//! ```toml
//! [[role]]
//! kind = "engine"
//! address = "http://10.0.0.7:8000"
//! host = "gpu-1"
//! capacity = 8
//! ```

use super::{LaunchError, LaunchedRole, Launcher, RoleSpec};
use crate::role::{Registration, RoleKind};
use serde::Deserialize;
use std::path::Path;

/// Roles of a file.
const MAX_ROLES: usize = 1024;

/// The servers of a file.
#[derive(Debug)]
pub struct HostsLauncher {
    roles: Vec<Registration>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostsFile {
    #[serde(default)]
    role: Vec<HostRole>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostRole {
    kind: RoleKind,
    address: String,
    host: Option<String>,
    #[serde(default = "one")]
    capacity: u32,
    #[serde(default)]
    preemptible: bool,
}

fn one() -> u32 {
    1
}

impl HostsLauncher {
    /// Reads the file.
    ///
    /// # Errors
    /// If it cannot be read, or is no such file.
    pub fn load(path: &Path) -> Result<Self, LaunchError> {
        let text = std::fs::read_to_string(path).map_err(LaunchError::file("read", path))?;
        Self::parse(&text)
            .map_err(|why| LaunchError::call("hosts", path.display().to_string(), why))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let file: HostsFile = toml::from_str(text).map_err(|e| e.to_string())?;
        if file.role.len() > MAX_ROLES {
            return Err(format!(
                "{} roles; allowed: up to {MAX_ROLES}",
                file.role.len()
            ));
        }
        let roles = file.role.into_iter().map(|role| {
            let url = sinew_http::address(&role.address)
                .map_err(|e| format!("address {:?}: {e}", role.address))?;
            let host = role.host.or_else(|| url.host_str().map(str::to_owned));
            Ok(Registration {
                kind: role.kind,
                // The address is the name: the same one twice is one role.
                name: role.address.clone(),
                host: host.unwrap_or_default(),
                address: Some(role.address),
                build: String::new(),
                capacity: role.capacity,
                preemptible: role.preemptible,
            })
        });
        let roles: Result<Vec<Registration>, String> = roles.collect();
        Ok(Self { roles: roles? })
    }

    /// The servers of the file.
    pub fn roles(&self) -> &[Registration] {
        &self.roles
    }
}

impl Launcher for HostsLauncher {
    fn name(&self) -> &'static str {
        "hosts"
    }

    fn starts(&self) -> bool {
        false
    }

    fn preview(&self, spec: &RoleSpec) -> Result<String, LaunchError> {
        self.ensure(spec).map(|()| String::new())
    }

    fn ensure(&self, spec: &RoleSpec) -> Result<(), LaunchError> {
        let allowed = "\"local\", \"slurm\", \"ray\" or \"kubernetes\" to start roles; with \"hosts\" a person \
                       starts them";
        Err(LaunchError::setting("launch.on", &spec.name, allowed))
    }

    fn list(&self) -> Result<Vec<LaunchedRole>, LaunchError> {
        Ok(Vec::new())
    }

    fn logs(&self, _: &str, _: usize) -> Result<String, LaunchError> {
        Ok(String::new())
    }

    fn stop(&self, _: &str) -> Result<(), LaunchError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_their_hosts() {
        let text = "[[role]]\nkind = \"engine\"\naddress = \"http://10.0.0.7:8000\"\ncapacity = 8\n\
                    [[role]]\nkind = \"sandbox\"\naddress = \"http://box:8070\"\nhost = \"b\"\n";
        let hosts = HostsLauncher::parse(text).unwrap();
        let shown: Vec<_> = hosts
            .roles()
            .iter()
            .map(|r| (r.host.as_str(), r.capacity))
            .collect();
        assert_eq!(shown, [("10.0.0.7", 8), ("b", 1)]);
        for (wrong, word) in [
            ("[[role]]\nkind = \"engine\"\n", "address"),
            ("[[role]]\nkind = \"gpu\"\naddress = \"http://a\"\n", "gpu"),
            (
                "[[role]]\nkind = \"engine\"\naddress = \"ftp://a\"\n",
                "ftp",
            ),
            ("[[rolle]]\n", "rolle"),
        ] {
            let why = HostsLauncher::parse(wrong).unwrap_err();
            assert!(why.contains(word), "{why}");
        }
    }
}
