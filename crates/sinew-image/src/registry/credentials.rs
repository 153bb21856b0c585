//! Users and passwords of registries.

use crate::ImageError;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::PathBuf;

/// Maximum bytes of a file with credentials.
const MAX_FILE: u64 = 1 << 20;
/// Key of Docker's hub in Docker's configuration.
const HUB: &str = "https://index.docker.io/v1/";

/// Sources of users and passwords of registries.
#[derive(Clone, Default)]
pub struct Credentials {
    /// Words `HOST=USER:PASSWORD`, separated by white space. They come first.
    pub words: Option<String>,
    /// Docker's `config.json`: its key `auths`. A missing file has none.
    pub docker: Option<PathBuf>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials")
            .field("words", &self.words.is_some())
            .field("docker", &self.docker)
            .finish()
    }
}

/// User and password.
pub(crate) type Login = (String, String);

/// Docker's configuration.
#[derive(Default, Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, DockerAuth>,
}

/// Credentials of a registry there.
#[derive(Deserialize)]
struct DockerAuth {
    /// `USER:PASSWORD` in Base64. Missing where a helper program keeps it.
    auth: Option<String>,
}

impl Credentials {
    /// The credentials for a host, with its port where the image's name has one.
    ///
    /// # Errors
    /// [`ImageError::Document`] if words or file cannot be read. It does not show them.
    pub(crate) fn login(&self, host: &str) -> Result<Option<Login>, ImageError> {
        let broken = |document: &str, reason: &str| ImageError::Document {
            document: document.into(),
            reason: reason.into(),
        };
        for word in self.words.as_deref().unwrap_or_default().split_whitespace() {
            let wrong = || {
                broken(
                    "credentials of registries",
                    "allowed: HOST=USER:PASSWORD ...",
                )
            };
            let (of, login) = word.split_once('=').ok_or_else(wrong)?;
            let (user, password) = login.split_once(':').ok_or_else(wrong)?;
            if of == host {
                return Ok(Some((user.into(), password.into())));
            }
        }
        let Some(path) = &self.docker else {
            return Ok(None);
        };
        let name = path.display().to_string();
        let file = match std::fs::File::open(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(|e| broken(&name, &e.to_string()))?,
        };
        let mut bytes = Vec::new();
        let read = file.take(MAX_FILE).read_to_end(&mut bytes);
        read.map_err(|e| broken(&name, &e.to_string()))?;
        let config: DockerConfig = serde_json::from_slice(&bytes)
            .map_err(|_| broken(&name, "is no configuration of Docker"))?;
        let keys = [host.to_owned(), format!("https://{host}")];
        let hub = (host == "docker.io").then(|| HUB.to_owned());
        let auth = keys
            .iter()
            .chain(&hub)
            .find_map(|k| config.auths.get(k)?.auth.clone());
        let Some(auth) = auth.filter(|a| !a.is_empty()) else {
            return Ok(None);
        };
        let wrong = || broken(&name, "auths: an entry is no USER:PASSWORD in Base64");
        let text = STANDARD.decode(auth).map_err(|_| wrong())?;
        let text = String::from_utf8(text).map_err(|_| wrong())?;
        let (user, password) = text.split_once(':').ok_or_else(wrong)?;
        Ok(Some((user.into(), password.into())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_gets_its_own_credentials_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let docker = folder.path().join("config.json");
        let auth = STANDARD.encode("docker:p:w");
        let text = serde_json::json!({"auths": {"ghcr.io": {"auth": auth}, HUB: {"auth": auth}, "helped.io": {}}});
        std::fs::write(&docker, text.to_string()).unwrap();
        let credentials = Credentials {
            words: Some("box.lan:5000=ann:secret\nother.io=bob:x".into()),
            docker: Some(docker.clone()),
        };
        let login = |host: &str| {
            credentials
                .login(host)
                .unwrap()
                .map(|(u, p)| format!("{u} {p}"))
        };
        assert_eq!(login("box.lan:5000").as_deref(), Some("ann secret"));
        assert_eq!(login("ghcr.io").as_deref(), Some("docker p:w"));
        assert_eq!(login("docker.io").as_deref(), Some("docker p:w"));
        for host in ["box.lan", "helped.io", "evil.io", ""] {
            assert_eq!(login(host), None, "{host}");
        }
        assert!(!format!("{credentials:?}").contains("secret"));
        std::fs::write(&docker, "{secret").unwrap();
        let error = credentials.login("ghcr.io").unwrap_err().to_string();
        assert!(
            error.contains("config.json") && !error.contains("secret"),
            "{error}"
        );
        let words = Credentials {
            words: Some("secret".into()),
            docker: None,
        };
        let error = words.login("ghcr.io").unwrap_err().to_string();
        assert!(
            error.contains("HOST=USER:PASSWORD") && !error.contains("secret"),
            "{error}"
        );
    }
}
