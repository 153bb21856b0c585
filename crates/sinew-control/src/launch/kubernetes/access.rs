//! The way to a cluster: from inside a pod, or by a kubeconfig with a token.

use crate::launch::LaunchError;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use sinew_http::Authorities;
use std::fmt;
use std::path::{Path, PathBuf};

/// Files of a pod's service account.
const POD_FILES: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The way to a cluster.
#[derive(Clone)]
pub struct KubernetesAccess {
    /// Address of its API server.
    pub(crate) url: String,
    pub(crate) token: TokenSource,
    pub(crate) authorities: Option<Authorities>,
    /// Namespace of the context or of the pod.
    pub(crate) namespace: Option<String>,
}

impl fmt::Debug for KubernetesAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KubernetesAccess")
            .field("url", &self.url)
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// Origin of the token.
#[derive(Clone)]
pub(crate) enum TokenSource {
    Text(String),
    /// A file, read for each call: the cluster replaces its content.
    File(PathBuf),
}

impl TokenSource {
    pub(crate) fn read(&self) -> Result<String, LaunchError> {
        match self {
            Self::Text(text) => Ok(text.clone()),
            Self::File(path) => {
                let text = std::fs::read_to_string(path);
                let text = text.map_err(LaunchError::file("read", path))?;
                Ok(text.trim().to_owned())
            }
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Kubeconfig {
    current_context: Option<String>,
    #[serde(default)]
    contexts: Vec<Named<ContextEntry>>,
    #[serde(default)]
    clusters: Vec<Named<ClusterEntry>>,
    #[serde(default)]
    users: Vec<Named<UserEntry>>,
}

#[derive(Debug, Deserialize)]
struct Named<T> {
    name: String,
    #[serde(alias = "context", alias = "cluster", alias = "user")]
    entry: T,
}

#[derive(Debug, Deserialize)]
struct ContextEntry {
    cluster: String,
    user: String,
    namespace: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct ClusterEntry {
    server: String,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
}

#[derive(Deserialize)]
struct UserEntry {
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
}

impl fmt::Debug for UserEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UserEntry")
    }
}

impl KubernetesAccess {
    /// An API server with a token and the authorities that signed its certificate.
    pub fn new(url: &str, token: &str, authorities: Option<Authorities>) -> Self {
        Self {
            url: url.trim_end_matches('/').to_owned(),
            token: TokenSource::Text(token.to_owned()),
            authorities,
            namespace: None,
        }
    }

    /// The cluster that this process runs in, or that of a kubeconfig.
    ///
    /// # Errors
    /// If there is neither, or the file has no current context with a token.
    pub fn found(kubeconfig: Option<&Path>) -> Result<Self, LaunchError> {
        let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let pod = variable("KUBERNETES_SERVICE_HOST");
        // The owner in a pod has the recipe of the host that launched it, and not its files.
        if let Some(path) = kubeconfig.filter(|path| pod.is_none() || path.exists()) {
            return Self::from_file(path);
        }
        if let Some(host) = pod {
            let port = variable("KUBERNETES_SERVICE_PORT").unwrap_or_else(|| "443".to_owned());
            return Self::in_pod(&host, &port);
        }
        let home = || variable("HOME").map(|home| PathBuf::from(home).join(".kube/config"));
        let path = variable("KUBECONFIG").map(PathBuf::from).or_else(home);
        let missing = || {
            let allowed = "a kubeconfig in KUBECONFIG or ~/.kube/config, or a pod of the cluster";
            LaunchError::setting("kubeconfig", "missing", allowed)
        };
        Self::from_file(&path.ok_or_else(missing)?)
    }

    fn in_pod(host: &str, port: &str) -> Result<Self, LaunchError> {
        let folder = Path::new(POD_FILES);
        let authority = folder.join("ca.crt");
        let authorities = Authorities::from_file(&authority)
            .map_err(|e| LaunchError::call("kubernetes", "read the authority of the cluster", e))?;
        let namespace = std::fs::read_to_string(folder.join("namespace")).ok();
        // An IPv6 address needs brackets in a URL.
        let host = if host.contains(':') {
            format!("[{host}]")
        } else {
            host.to_owned()
        };
        Ok(Self {
            url: format!("https://{host}:{port}"),
            token: TokenSource::File(folder.join("token")),
            authorities: Some(authorities),
            namespace: namespace.map(|text| text.trim().to_owned()),
        })
    }

    fn from_file(path: &Path) -> Result<Self, LaunchError> {
        let text = std::fs::read_to_string(path).map_err(LaunchError::file("read", path))?;
        let wrong = |why: String| LaunchError::call("kubernetes", path.display().to_string(), why);
        let folder = path.parent().unwrap_or(Path::new("."));
        Self::parse(&text, folder).map_err(wrong)
    }

    /// The current context of a kubeconfig whose files are relative to `folder`.
    fn parse(text: &str, folder: &Path) -> Result<Self, String> {
        let config: Kubeconfig = serde_saphyr::from_str(text).map_err(|e| e.to_string())?;
        let current = config
            .current_context
            .ok_or("there is no current-context")?;
        let context = find(config.contexts, &current).ok_or("the current context is missing")?;
        let cluster = find(config.clusters, &context.cluster);
        let cluster = cluster.ok_or("the cluster of the current context is missing")?;
        let user = find(config.users, &context.user);
        let token = user.and_then(|user| {
            let text = user.token.map(TokenSource::Text);
            let file = user
                .token_file
                .map(|file| TokenSource::File(folder.join(file)));
            text.or(file)
        });
        let token = token.ok_or(
            "the user of the current context has no token\n  hint: `kubectl create token ACCOUNT` makes one, \
             `kubectl config set-credentials USER --token=TOKEN` sets it",
        )?;
        let pem = match (
            cluster.certificate_authority_data,
            cluster.certificate_authority,
        ) {
            (Some(data), _) => Some(STANDARD.decode(data.trim()).map_err(|e| e.to_string())?),
            (None, Some(file)) => {
                let file = folder.join(file);
                let pem = std::fs::read(&file);
                Some(pem.map_err(|e| format!("{}: {e}", file.display()))?)
            }
            (None, None) => None,
        };
        let authorities = pem.map(|pem| Authorities::from_pem(&pem)).transpose();
        Ok(Self {
            url: cluster.server.trim_end_matches('/').to_owned(),
            token,
            authorities: authorities.map_err(|e| e.to_string())?,
            namespace: context.namespace,
        })
    }
}

fn find<T>(entries: Vec<Named<T>>, name: &str) -> Option<T> {
    let found = entries.into_iter().find(|entry| entry.name == name);
    found.map(|entry| entry.entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n- name: c\n  context: {cluster: k, user: u, namespace: n}\n\
        clusters:\n- name: k\n  cluster: {server: 'http://127.0.0.1:1/'}\nusers:\n- name: u\n  user: USER\n";

    #[test]
    fn the_current_context_of_a_kubeconfig_is_used() {
        let text = CONFIG.replace("USER", "{token: secret}");
        let access = KubernetesAccess::parse(&text, Path::new("/")).unwrap();
        assert_eq!(access.url, "http://127.0.0.1:1");
        assert_eq!(access.namespace.as_deref(), Some("n"));
        assert_eq!(access.token.read().unwrap(), "secret");
        assert!(!format!("{access:?}").contains("secret"));
    }

    #[test]
    fn a_user_without_a_token_is_refused_with_a_way_out() {
        let text = CONFIG.replace("USER", "{client-certificate-data: AAAA}");
        let why = KubernetesAccess::parse(&text, Path::new("/")).unwrap_err();
        assert!(why.contains("kubectl create token"), "{why}");
        let other = CONFIG.replace("current-context: c", "current-context: d");
        assert!(KubernetesAccess::parse(&other, Path::new("/")).is_err());
    }
}
