//! Ray, by the REST interface of its jobs alone: one job for each role, and no Python of ours.
//!
//! Ray answers a repeated submission id with status 500, and not with a status of its own; so a refused
//! submission is a success if a job of this id is there. Ray does not restart a job whose host is lost.

use super::{LaunchError, Launched, LaunchedRole, Launcher, RoleSpec, files, quoted, shell_line};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sinew_http::blocking::{Client, RequestBuilder};
use sinew_http::{Answer, ClientOptions, Method, line};
use std::time::Duration;

const ENGINE: &str = "ray";
/// Times of one call.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum bytes of an answer: a list has all jobs of the cluster.
const MAX_ANSWER: u64 = 64 << 20;

/// Starts roles as jobs of Ray.
#[derive(Debug)]
pub struct RayLauncher {
    http: Client,
    url: String,
    run: String,
}

/// A job in a list.
#[derive(Debug, Deserialize)]
struct Job {
    submission_id: Option<String>,
    status: String,
    message: Option<String>,
}

impl Job {
    fn state(&self) -> Launched {
        let message = self.message.as_deref().unwrap_or_default();
        // The end of the log is read apart, without a traceback before it.
        let (message, _) = message
            .split_once(", last available logs")
            .unwrap_or((message, ""));
        let message = line(message.as_bytes(), 400);
        match self.status.as_str() {
            "PENDING" => Launched::Waiting(format!("ray: PENDING: {message}")),
            "RUNNING" => Launched::Running,
            other => Launched::Ended(format!("ray: {other}: {message}")),
        }
    }
}

impl RayLauncher {
    /// The head at `ray://HOST:PORT`, or by its HTTP address: port 8265 unless it was changed. `run` is the
    /// name with which the names of the run's jobs begin. Nothing is sent.
    ///
    /// # Errors
    /// If the address is none.
    pub fn new(address: &str, run: &str) -> Result<Self, LaunchError> {
        let url = match address.strip_prefix("ray://") {
            Some(rest) => format!("http://{rest}"),
            None => address.to_owned(),
        };
        let allowed = "ray://HOST:8265, or the http:// address of the dashboard of the head";
        let parsed = sinew_http::address(&url);
        parsed.map_err(|_| LaunchError::setting("launch.ray.url", address, allowed))?;
        let http = Client::new(ClientOptions {
            connect: Some(CONNECT_TIMEOUT),
            deadline: Some(ANSWER_TIMEOUT),
            body_max: MAX_ANSWER,
            ..ClientOptions::default()
        });
        Ok(Self {
            http: http.map_err(|e| LaunchError::call(ENGINE, address, e))?,
            url: url.trim_end_matches('/').to_owned(),
            run: run.to_owned(),
        })
    }

    /// The body of a submission.
    pub fn submission(spec: &RoleSpec) -> Value {
        let variables = spec
            .env
            .iter()
            .map(|(name, value)| (name.clone(), json!(value)));
        let variables: Map<String, Value> = variables.collect();
        let folder = spec
            .folder
            .as_ref()
            .map(|folder| folder.display().to_string());
        let enter = folder.map_or_else(String::new, |folder| format!("cd {} && ", quoted(&folder)));
        let mut body = json!({
            "submission_id": spec.name,
            "entrypoint": format!("{enter}exec {}", shell_line(&spec.command)),
            "entrypoint_num_cpus": spec.cpus,
            "entrypoint_num_gpus": spec.gpus,
            "runtime_env": { "env_vars": variables },
        });
        if let Some(memory_mb) = spec.memory_mb {
            body["entrypoint_memory"] = json!(memory_mb << 20);
        }
        body
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http
            .request(method, &format!("{}/api/jobs/{path}", self.url))
    }

    fn ask(&self, call: &str, request: RequestBuilder) -> Result<Answer, LaunchError> {
        let failed = |e| LaunchError::call(ENGINE, format!("{call} at {}", self.url), e);
        self.http.ask(request).map_err(failed)
    }

    /// The answer of a call that must succeed.
    fn read<T: serde::de::DeserializeOwned>(
        &self,
        call: &str,
        request: RequestBuilder,
    ) -> Result<T, LaunchError> {
        let answer = self.ask(call, request)?;
        let body = answer
            .success(400)
            .map_err(|e| LaunchError::call(ENGINE, call, e))?;
        serde_json::from_slice(&body).map_err(|e| LaunchError::call(ENGINE, call, e))
    }

    fn exists(&self, name: &str) -> Result<bool, LaunchError> {
        let answer = self.ask("look for a job", self.request(Method::GET, name))?;
        Ok(answer.status.is_success())
    }
}

impl Launcher for RayLauncher {
    fn name(&self) -> &'static str {
        ENGINE
    }

    fn preview(&self, spec: &RoleSpec) -> Result<String, LaunchError> {
        Ok(format!("{:#}", Self::submission(spec)))
    }

    fn ensure(&self, spec: &RoleSpec) -> Result<(), LaunchError> {
        let body = Self::submission(spec).to_string();
        let request = self.request(Method::POST, "").body(body);
        let request = request.header(sinew_http::header::CONTENT_TYPE, "application/json");
        let answer = self.ask("submit a job", request)?;
        if answer.status.is_success() || self.exists(&spec.name)? {
            return Ok(());
        }
        let (status, why) = (answer.status.as_u16(), line(&answer.body, 400));
        Err(LaunchError::call(
            ENGINE,
            "submit a job",
            format!("status {status}: {why}"),
        ))
    }

    fn list(&self) -> Result<Vec<LaunchedRole>, LaunchError> {
        let jobs: Vec<Job> = self.read("list jobs", self.request(Method::GET, ""))?;
        let own = jobs.into_iter().filter_map(|job| {
            let name = job.submission_id.clone()?;
            let rest = name.strip_prefix(&self.run)?;
            rest.starts_with('-').then(|| LaunchedRole {
                state: job.state(),
                name: name.clone(),
            })
        });
        Ok(own.collect())
    }

    fn logs(&self, name: &str, lines: usize) -> Result<String, LaunchError> {
        #[derive(Deserialize)]
        struct Logs {
            logs: String,
        }
        if !self.exists(name)? {
            return Ok(String::new());
        }
        let request = self.request(Method::GET, &format!("{name}/logs"));
        let logs: Logs = self.read("read a log", request)?;
        Ok(files::last_lines(&logs.logs, lines))
    }

    fn stop(&self, name: &str) -> Result<(), LaunchError> {
        let request = self.request(Method::POST, &format!("{name}/stop"));
        let answer = self.ask("stop a job", request)?;
        if answer.status.is_success() || !self.exists(name)? {
            return Ok(());
        }
        let why = line(&answer.body, 400);
        Err(LaunchError::call(ENGINE, "stop a job", why))
    }
}
