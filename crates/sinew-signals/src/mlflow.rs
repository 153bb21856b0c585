//! A run as a run of MLflow: parameters, metrics by step, tags, files at the end.
//!
//! MLflow's REST API, version 2.0 (docs: "REST API" of MLflow). A task holds the run's id and sends one
//! request after another; a server that is down is tried again with the next numbers. A session that goes on
//! with a run goes on with its run of MLflow, which `mlflow.json` in the run's folder names.

use crate::config::MlflowConfig;
use crate::facts::{MAX_FILE, Run};
use crate::files;
use crate::numbers::Numbers;
use crate::params::{allowed, params};
use crate::send::{self, Counts, Queue, Refused, Request};
use reqwest::{Client, Method, Url};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Steps that wait.
const QUEUE: usize = 256;
/// What the server takes in one request: metrics, parameters.
const METRICS: usize = 1000;
const PARAMS: usize = 100;
/// In the folder of the run.
const STATE: &str = "mlflow.json";

/// How a run ended, as MLflow names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Ended {
    /// It has not said that it is done.
    Failed,
    /// It was asked to stop.
    Killed,
    /// It did what it was to do.
    Finished,
}

impl Ended {
    fn name(number: u8) -> &'static str {
        match number {
            n if n == Self::Finished as u8 => "FINISHED",
            n if n == Self::Killed as u8 => "KILLED",
            _ => "FAILED",
        }
    }
}

/// Numbers of a step.
#[derive(Debug)]
struct Step {
    step: u64,
    at_ms: u64,
    numbers: Numbers,
}

/// Where numbers are put.
#[derive(Debug)]
pub(crate) struct Mlflow {
    queue: Queue<Step>,
    ended: Arc<AtomicU8>,
}

impl Mlflow {
    /// Sends on a runtime until it is dropped. The handle ends when all is sent then.
    ///
    /// # Errors
    /// If the client cannot be made.
    pub(crate) fn start(
        config: &MlflowConfig,
        run: &Run,
        now_unix_s: f64,
        runtime: &tokio::runtime::Handle,
    ) -> Result<(Self, JoinHandle<()>), String> {
        let (queue, steps, counts) = Queue::new(QUEUE);
        let ended = Arc::new(AtomicU8::new(Ended::Failed as u8));
        let tracker = Tracker {
            client: send::client()?,
            config: config.clone(),
            run: run.clone(),
            began_ms: ms(now_unix_s),
            last_ms: ms(now_unix_s),
            open: None,
        };
        let task = runtime.spawn(tracker.work(steps, counts, Arc::clone(&ended)));
        Ok((Self { queue, ended }, task))
    }

    /// Puts the numbers of a step into the queue, or loses them.
    pub(crate) fn record(&self, step: u64, numbers: Numbers, now_unix_s: f64) {
        self.queue.put(Step {
            step,
            at_ms: ms(now_unix_s),
            numbers,
        });
    }

    /// Says how the run ends.
    pub(crate) fn ends(&self, ended: Ended) {
        self.ended.store(ended as u8, Ordering::Relaxed);
    }

    /// What became of requests.
    pub(crate) fn counts(&self) -> Arc<Counts> {
        self.queue.counts()
    }
}

/// A run that the server knows.
#[derive(Clone, Debug, PartialEq)]
struct Open {
    id: String,
    /// Where its files are.
    artifacts: String,
}

/// The task's state.
struct Tracker {
    client: Client,
    config: MlflowConfig,
    run: Run,
    began_ms: u64,
    /// Time of the newest numbers.
    last_ms: u64,
    /// `None`: not yet.
    open: Option<Open>,
}

impl Tracker {
    async fn work(
        mut self,
        mut steps: mpsc::Receiver<Step>,
        counts: Arc<Counts>,
        ended: Arc<AtomicU8>,
    ) {
        self.try_open(&counts).await;
        while let Some(step) = steps.recv().await {
            self.last_ms = self.last_ms.max(step.at_ms);
            if self.open.is_none() {
                self.try_open(&counts).await;
            }
            let Some(open) = self.open.clone() else {
                counts.add(false);
                continue;
            };
            for metrics in metrics(&step).chunks(METRICS) {
                let body = json!({ "run_id": open.id, "metrics": metrics });
                self.told("runs/log-batch", &body, &counts).await;
            }
        }
        let Some(open) = self.open.clone() else {
            return;
        };
        for file in self.run.files.clone() {
            let sent = self.file(&open, &file).await;
            if let Err(why) = &sent {
                tracing::warn!(file = %file.display(), why, "a file was not sent to MLflow");
            }
            counts.add(sent.is_ok());
        }
        let status = Ended::name(ended.load(Ordering::Relaxed));
        let body = json!({ "run_id": open.id, "status": status, "end_time": self.last_ms });
        self.told("runs/update", &body, &counts).await;
    }

    /// Opens the run, and says why if it cannot.
    async fn try_open(&mut self, counts: &Counts) {
        let opened = self.opened(counts).await;
        counts.add(opened.is_ok());
        match opened {
            Ok(open) => self.open = Some(open),
            Err(refused) => self.warn("no run was opened", &refused),
        }
    }

    /// The run of an earlier session, or a new one.
    ///
    /// # Errors
    /// What the server refused.
    async fn opened(&self, counts: &Counts) -> Result<Open, Refused> {
        if let Some(open) = self.earlier().await {
            return Ok(open);
        }
        let experiment = self.experiment().await?;
        let mut tags = self.config.tags.clone();
        tags.insert("mlflow.source.name".into(), "sinew".into());
        tags.insert("mlflow.source.type".into(), "LOCAL".into());
        let pair = |(key, value): (&String, &String)| json!({ "key": key, "value": value });
        let body = json!({
            "experiment_id": experiment,
            "run_name": self.run.name,
            "start_time": self.began_ms,
            "tags": tags.iter().map(pair).collect::<Vec<_>>(),
        });
        let answer = self.call(Method::POST, "runs/create", &body).await?;
        let open = open_of(&answer).ok_or_else(|| unexpected("runs/create"))?;
        let params: Vec<Value> = params(&self.run.recipe).iter().map(pair).collect();
        for params in params.chunks(PARAMS) {
            let body = json!({ "run_id": open.id, "params": params });
            self.told("runs/log-batch", &body, counts).await;
        }
        self.remember(&open);
        Ok(open)
    }

    /// The experiment's id; it is made if there is none.
    async fn experiment(&self) -> Result<String, Refused> {
        let name = &self.config.experiment;
        let path = Url::parse_with_params("http://x/", [("experiment_name", name)])
            .map(|url| url.query().unwrap_or_default().to_owned())
            .unwrap_or_default();
        let path = format!("experiments/get-by-name?{path}");
        let found = self.call(Method::GET, &path, &Value::Null).await;
        let id = |answer: &Value| answer.as_str().map(str::to_owned);
        match found {
            Ok(answer) => id(&answer["experiment"]["experiment_id"]),
            Err(refused) if refused.status == Some(404) => {
                let body = json!({ "name": name });
                let made = self.call(Method::POST, "experiments/create", &body).await?;
                id(&made["experiment_id"])
            }
            Err(refused) => return Err(refused),
        }
        .ok_or_else(|| unexpected("experiments"))
    }

    /// The run that an earlier session opened at this server, running again.
    async fn earlier(&self) -> Option<Open> {
        let text = std::fs::read_to_string(self.run.folder.join(STATE)).ok()?;
        let state: Value = serde_json::from_str(&text).ok()?;
        if state["server"] != json!(send::host(&self.config.url))
            || state["experiment"] != json!(self.config.experiment)
        {
            return None;
        }
        let id = state["run_id"].as_str()?;
        let body = json!({ "run_id": id, "status": "RUNNING" });
        let answer = self.call(Method::POST, "runs/update", &body).await.ok()?;
        let artifacts = answer["run_info"]["artifact_uri"].as_str()?;
        Some(Open {
            id: id.to_owned(),
            artifacts: artifacts.to_owned(),
        })
    }

    /// Keeps the id for a session that goes on.
    fn remember(&self, open: &Open) {
        let state = json!({
            "server": send::host(&self.config.url), "experiment": self.config.experiment, "run_id": open.id,
        });
        let written = files::replace(&self.run.folder.join(STATE), &state.to_string());
        if let Err(error) = written {
            tracing::warn!(%error, "a session that goes on will open another run of MLflow");
        }
    }

    /// Sends a file to the run, if the server keeps files itself.
    ///
    /// # Errors
    /// Why it was not sent.
    async fn file(&self, open: &Open, file: &PathBuf) -> Result<(), String> {
        let length = std::fs::metadata(file).map_err(|e| e.to_string())?.len();
        if length > MAX_FILE {
            return Err(format!("it has {length} bytes, allowed: {MAX_FILE}"));
        }
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let place = open
            .artifacts
            .strip_prefix("mlflow-artifacts:")
            .ok_or_else(|| {
                let place = &open.artifacts;
                format!("the server does not keep files itself: it names {place}")
            })?;
        // `mlflow-artifacts:/0/ID/artifacts`, or with a host after two slashes.
        let place = match place.strip_prefix("//") {
            Some(hosted) => hosted.split_once('/').map_or("", |(_, path)| path),
            None => place.trim_start_matches('/'),
        };
        let request = Request {
            method: Method::PUT,
            url: format!(
                "{}/api/2.0/mlflow-artifacts/artifacts/{place}/{name}",
                self.base()
            ),
            content_type: "application/octet-stream",
            headers: self.config.headers.clone(),
            body: std::fs::read(file).map_err(|e| e.to_string())?,
        };
        let sent = send::tries(&self.client, &request).await;
        sent.map(|_| ()).map_err(|refused| refused.why)
    }

    /// Calls and counts; a refusal is a warning.
    async fn told(&self, path: &str, body: &Value, counts: &Counts) {
        let told = self.call(Method::POST, path, body).await;
        counts.add(told.is_ok());
        if let Err(refused) = told {
            self.warn(path, &refused);
        }
    }

    /// Calls a method of the API.
    ///
    /// # Errors
    /// What the server refused, or an answer that is no JSON.
    async fn call(&self, method: Method, path: &str, body: &Value) -> Result<Value, Refused> {
        let body = match body {
            Value::Null => Vec::new(),
            body => body.to_string().into_bytes(),
        };
        let request = Request {
            method,
            url: format!("{}/api/2.0/mlflow/{path}", self.base()),
            content_type: "application/json",
            headers: self.config.headers.clone(),
            body,
        };
        let answer = send::tries(&self.client, &request).await?;
        serde_json::from_slice(&answer).map_err(|_| unexpected(path))
    }

    fn base(&self) -> &str {
        self.config.url.trim_end_matches('/')
    }

    fn warn(&self, what: &str, refused: &Refused) {
        tracing::warn!(
            host = send::host(&self.config.url),
            what,
            why = refused.why,
            "MLflow did not take it"
        );
    }
}

fn unexpected(path: &str) -> Refused {
    Refused {
        why: format!("{path}: the answer is not that of MLflow"),
        status: None,
    }
}

fn ms(unix_s: f64) -> u64 {
    (unix_s.max(0.0) * 1000.0) as u64
}

fn open_of(answer: &Value) -> Option<Open> {
    let info = &answer["run"]["info"];
    Some(Open {
        id: info["run_id"].as_str()?.to_owned(),
        artifacts: info["artifact_uri"].as_str()?.to_owned(),
    })
}

/// The name of a metric: the part before the first slash groups plots, further slashes become points. Where
/// the server keeps files, a name cannot be both a metric and the folder of others.
fn plotted(name: &str) -> String {
    let name = match name.split_once('/') {
        Some((group, rest)) => format!("{group}/{}", rest.replace('/', ".")),
        None => name.to_owned(),
    };
    allowed(&name)
}

/// Metrics of a step as the API wants them.
fn metrics(step: &Step) -> Vec<Value> {
    let metric = |(name, value): &(String, f64)| {
        json!({
            "key": plotted(name), "value": value, "timestamp": step.at_ms, "step": step.step,
        })
    };
    step.numbers.iter().map(metric).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_not_the_folder_of_others_and_ends_have_their_words() {
        assert_eq!(plotted("rollout/reward"), "rollout/reward");
        assert_eq!(plotted("rollout/reward/a[b]"), "rollout/reward.a_b_");
        assert_eq!(plotted("step"), "step");
        let ends = [Ended::Failed, Ended::Killed, Ended::Finished];
        assert_eq!(
            ends.map(|e| Ended::name(e as u8)),
            ["FAILED", "KILLED", "FINISHED"]
        );
    }
}
