//! Kubernetes, by five calls of its REST interface: a job for each role, from templates of the Helm chart.
//!
//! The client is that of every other connection. The crate `kube` with its types would be a hundred crates
//! more for creating, listing and deleting jobs of `batch/v1`, and reading logs.

mod access;
mod manifest;

pub use access::KubernetesAccess;

use super::{LaunchError, Launched, LaunchedRole, Launcher, RoleSpec, files};
use crate::role::{RoleId, RoleKind};
use serde_json::{Map, Value, json};
use sinew_http::blocking::{Client, RequestBuilder};
use sinew_http::{ClientOptions, Method, line};
use std::time::Duration;

const ENGINE: &str = "kubernetes";
/// Times of one call.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum bytes of an answer.
const MAX_ANSWER: u64 = 64 << 20;
/// Folder of the run's secret in every role, and the file with the token.
pub const KUBERNETES_TOKEN_FILE: &str = "/etc/sinew-token/token";
/// File of the recipe in the owner.
pub const KUBERNETES_RECIPE_FILE: &str = "/etc/sinew/recipe.toml";
/// File with the name of the run in the owner: a person who installs the chart chooses it.
pub const KUBERNETES_NAME_FILE: &str = "/etc/sinew/name";

/// Settings of a launcher for Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesOptions {
    /// Name of the run.
    pub run: String,
    /// Namespace; `None`: that of the context or of the pod, or `default`.
    pub namespace: Option<String>,
    /// Image with the program `sinew`.
    pub image: String,
    /// Folder of the runs in every role.
    pub folder: String,
    /// Claim of the volume with this folder; `None`: each role has its own, which ends with it.
    pub claim: Option<String>,
    /// Port of the owner.
    pub port: u16,
}

impl KubernetesOptions {
    /// Values of the templates that all roles share.
    fn values(&self, spec: &RoleSpec) -> Map<String, Value> {
        let runs = match &self.claim {
            Some(claim) => json!({"name": "runs", "persistentVolumeClaim": {"claimName": claim}}),
            None => json!({"name": "runs", "emptyDir": {}}),
        };
        let env = spec
            .env
            .iter()
            .map(|(name, value)| json!({"name": name, "value": value}));
        let mut requests = json!({"cpu": spec.cpus.max(1).to_string()});
        let mut resources = json!({});
        if let Some(memory_mb) = spec.memory_mb {
            requests["memory"] = json!(format!("{memory_mb}Mi"));
            resources["limits"] = json!({"memory": format!("{memory_mb}Mi")});
        }
        if spec.gpus > 0 {
            resources["limits"]["nvidia.com/gpu"] = json!(spec.gpus.to_string());
        }
        resources["requests"] = requests;
        Map::from_iter([
            ("name".to_owned(), json!(self.run)),
            ("image".to_owned(), json!(self.image)),
            ("folder".to_owned(), json!(self.folder)),
            ("port".to_owned(), json!(self.port)),
            ("command".to_owned(), json!(spec.command)),
            ("env".to_owned(), env.collect()),
            ("resources".to_owned(), resources),
            ("runs".to_owned(), runs),
        ])
    }

    /// The manifest of a role's job.
    ///
    /// # Errors
    /// If the template cannot be filled in, which is an error of this program.
    pub fn role(&self, spec: &RoleSpec) -> Result<Value, LaunchError> {
        let kind = RoleId::parse(&spec.name).map(|(_, kind, ..)| kind);
        // Processes in a sandbox have namespaces of their own, which the default profile refuses.
        let seccomp = match kind {
            Some(RoleKind::Sandbox | RoleKind::Rollout) => "Unconfined",
            _ => "RuntimeDefault",
        };
        let mut values = self.values(spec);
        values.insert("job".to_owned(), json!(spec.name));
        values.insert(
            "role".to_owned(),
            json!(kind.map_or("owner", RoleKind::name)),
        );
        values.insert("seccomp".to_owned(), json!(seccomp));
        let made = manifest::manifests(manifest::ROLE_TEMPLATE, &values);
        let made = made.map_err(|why| LaunchError::call(ENGINE, "make a manifest", why))?;
        made.into_iter().next().ok_or_else(|| {
            LaunchError::call(ENGINE, "make a manifest", "the template has no document")
        })
    }

    /// The manifests of a run, with its owner last. The owner's job has the name of `spec`.
    ///
    /// # Errors
    /// As [`KubernetesOptions::role`].
    pub fn run(
        &self,
        spec: &RoleSpec,
        recipe: &str,
        token: &str,
    ) -> Result<Vec<Value>, LaunchError> {
        let mut values = self.values(spec);
        values.insert("recipe".to_owned(), json!(recipe));
        values.insert("token".to_owned(), json!(token));
        let made = manifest::manifests(manifest::RUN_TEMPLATE, &values);
        let mut made = made.map_err(|why| LaunchError::call(ENGINE, "make manifests", why))?;
        if let Some(owner) = made.last_mut() {
            owner["metadata"]["name"] = json!(spec.name);
        }
        Ok(made)
    }
}

/// Starts roles as jobs of Kubernetes.
#[derive(Debug)]
pub struct KubernetesLauncher {
    http: Client,
    access: KubernetesAccess,
    namespace: String,
    options: KubernetesOptions,
}

impl KubernetesLauncher {
    /// A launcher for a cluster. Nothing is sent.
    ///
    /// # Errors
    /// If the system lacks what a client needs, or the namespace is no name.
    pub fn new(access: KubernetesAccess, options: KubernetesOptions) -> Result<Self, LaunchError> {
        let http = Client::new(ClientOptions {
            connect: Some(CONNECT_TIMEOUT),
            deadline: Some(ANSWER_TIMEOUT),
            body_max: MAX_ANSWER,
            authorities: access.authorities.clone(),
            ..ClientOptions::default()
        });
        let namespace = options
            .namespace
            .clone()
            .or_else(|| access.namespace.clone());
        let namespace = namespace.unwrap_or_else(|| "default".to_owned());
        let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        if namespace.is_empty() || namespace.len() > 63 || !namespace.bytes().all(fits) {
            let allowed = "1 to 63 lower-case letters, digits and hyphens";
            return Err(LaunchError::setting(
                "launch.kubernetes.namespace",
                namespace,
                allowed,
            ));
        }
        Ok(Self {
            http: http.map_err(|e| LaunchError::call(ENGINE, "make a client", e))?,
            access,
            namespace,
            options,
        })
    }

    /// Creates the objects of a run. Those that exist already stay, but for the recipe, which is replaced.
    ///
    /// # Errors
    /// If the cluster cannot be reached or refuses.
    pub fn create_all(&self, manifests: &[Value]) -> Result<(), LaunchError> {
        for manifest in manifests {
            let created = self.create(manifest)?;
            if !created && manifest["kind"] == "ConfigMap" {
                let name = manifest["metadata"]["name"].as_str().unwrap_or_default();
                let path = format!("{}/{name}", self.collection(manifest)?);
                self.ask(self.request(Method::PUT, &path)?, Some(manifest), &[])?;
            }
        }
        Ok(())
    }

    /// The path of all objects of a manifest's kind.
    fn collection(&self, manifest: &Value) -> Result<String, LaunchError> {
        let kind = manifest["kind"].as_str().unwrap_or_default();
        let plural = match kind {
            "Secret" => "secrets",
            "ConfigMap" => "configmaps",
            "ServiceAccount" => "serviceaccounts",
            "Service" => "services",
            "Role" => "roles",
            "RoleBinding" => "rolebindings",
            "NetworkPolicy" => "networkpolicies",
            "Job" => "jobs",
            other => {
                let why = format!("kind {other:?} is not one of a run");
                return Err(LaunchError::call(ENGINE, "create", why));
            }
        };
        let version = manifest["apiVersion"].as_str().unwrap_or_default();
        let root = if version.contains('/') { "apis" } else { "api" };
        Ok(format!(
            "/{root}/{version}/namespaces/{}/{plural}",
            self.namespace
        ))
    }

    /// Creates an object; false: one of its name exists already.
    fn create(&self, manifest: &Value) -> Result<bool, LaunchError> {
        let request = self.request(Method::POST, &self.collection(manifest)?)?;
        let (status, _) = self.ask(request, Some(manifest), &[409])?;
        Ok(status != 409)
    }

    fn request(&self, method: Method, path: &str) -> Result<RequestBuilder, LaunchError> {
        let url = format!("{}{path}", self.access.url);
        Ok(self
            .http
            .request(method, &url)
            .bearer_auth(self.access.token.read()?))
    }

    /// Status and body of an answer. Statuses other than success and `expected` are errors.
    fn ask(
        &self,
        request: RequestBuilder,
        body: Option<&Value>,
        expected: &[u16],
    ) -> Result<(u16, Vec<u8>), LaunchError> {
        let request = match body {
            Some(body) => request
                .header(sinew_http::header::CONTENT_TYPE, "application/json")
                .body(body.to_string()),
            None => request,
        };
        let failed = |why: String| LaunchError::call(ENGINE, self.access.url.clone(), why);
        let answer = self.http.ask(request).map_err(|e| failed(e.to_string()))?;
        let status = answer.status.as_u16();
        if answer.status.is_success() || expected.contains(&status) {
            return Ok((status, answer.body));
        }
        let said: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        let why = match said["message"].as_str() {
            Some(text) => line(text.as_bytes(), 400),
            None => line(&answer.body, 200),
        };
        Err(failed(format!("status {status}: {why}")))
    }

    fn get(&self, path: &str) -> Result<Value, LaunchError> {
        let (_, body) = self.ask(self.request(Method::GET, path)?, None, &[])?;
        let read = serde_json::from_slice(&body);
        read.map_err(|e| LaunchError::call(ENGINE, path, e))
    }

    fn jobs(&self) -> String {
        format!("/apis/batch/v1/namespaces/{}/jobs", self.namespace)
    }
}

/// State of a job by its status.
fn job_state(job: &Value) -> Launched {
    let status = &job["status"];
    let conditions = status["conditions"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let ended = conditions.iter().find(|condition| {
        let kind = condition["type"].as_str().unwrap_or_default();
        condition["status"] == "True" && matches!(kind, "Complete" | "Failed")
    });
    if let Some(condition) = ended {
        let word = |key: &str| condition[key].as_str().unwrap_or_default();
        let (kind, reason, message) = (word("type"), word("reason"), word("message"));
        return Launched::Ended(format!("kubernetes: {kind} ({reason}): {message}"));
    }
    // `ready` is newer than the API of this client needs; `active` also counts pods that wait for a node.
    match status["active"].as_u64() {
        Some(1..) => Launched::Running,
        _ => Launched::Waiting("kubernetes: the job has no pod yet".to_owned()),
    }
}

impl Launcher for KubernetesLauncher {
    fn name(&self) -> &'static str {
        ENGINE
    }

    fn preview(&self, spec: &RoleSpec) -> Result<String, LaunchError> {
        Ok(format!("{:#}", self.options.role(spec)?))
    }

    fn ensure(&self, spec: &RoleSpec) -> Result<(), LaunchError> {
        self.create(&self.options.role(spec)?).map(drop)
    }

    fn list(&self) -> Result<Vec<LaunchedRole>, LaunchError> {
        let path = format!(
            "{}?labelSelector=sinew/run%3D{}",
            self.jobs(),
            self.options.run
        );
        let list = self.get(&path)?;
        let items = list["items"].as_array().map_or(&[][..], Vec::as_slice);
        let role = |job: &Value| {
            Some(LaunchedRole {
                name: job["metadata"]["name"].as_str()?.to_owned(),
                state: job_state(job),
            })
        };
        Ok(items.iter().filter_map(role).collect())
    }

    fn logs(&self, name: &str, lines: usize) -> Result<String, LaunchError> {
        let pods = format!("/api/v1/namespaces/{}/pods", self.namespace);
        let list = self.get(&format!("{pods}?labelSelector=job-name%3D{name}"))?;
        let Some(pod) = list["items"][0]["metadata"]["name"].as_str() else {
            return Ok(String::new());
        };
        let path = format!("{pods}/{pod}/log?tailLines={lines}");
        // A container that has not started has no log yet.
        let (status, body) = self.ask(self.request(Method::GET, &path)?, None, &[400, 404])?;
        let text = String::from_utf8_lossy(&body);
        Ok(if status == 200 {
            files::last_lines(&text, lines)
        } else {
            String::new()
        })
    }

    fn stop(&self, name: &str) -> Result<(), LaunchError> {
        let path = format!("{}/{name}", self.jobs());
        let body = json!({"propagationPolicy": "Background"});
        let request = self.request(Method::DELETE, &path)?;
        self.ask(request, Some(&body), &[404, 409]).map(drop)
    }
}

#[cfg(test)]
mod tests;
