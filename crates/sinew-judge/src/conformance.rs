//! Whether a reward server keeps the protocol: requests that its author can run before a training run does.
//!
//! | check | request | expected |
//! |---|---|---|
//! | `one sample` | one sample | a score, or an abstention |
//! | `no samples` | an empty list | an empty list |
//! | `order` | samples forwards and backwards | the same scores |
//! | `long output` | 48,000 bytes of odd characters | a score, or an abstention |
//! | `at once` | the same sample 16 times at once | equal scores |
//! | `wrong input` | no JSON, no list, a later protocol, a broken sample | 4xx, and a score afterwards |
//! | `key` | a wrong key, where the recipe has one | 401 |

use crate::chat::ChatError;
use crate::error::ServerError;
use crate::http::{JsonServer, address};
use crate::server::{PROTOCOL, ServerConfig, body, read_scores, sample_json};
use futures::future::join_all;
use serde::Serialize;
use serde_json::{Value, json};
use sinew_env::{RewardSample, Score, Unscored};
use sinew_types::{Message, Role, Task};

/// Requests at once in the check of that name.
const AT_ONCE: usize = 16;

/// One check of a server.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ServerFinding {
    /// Name of the check.
    pub check: &'static str,
    /// Whether the server passes.
    pub ok: bool,
    /// Observation that decided the check.
    pub detail: String,
}

/// The requests of one server.
struct Probe<'a> {
    server: JsonServer,
    config: &'a ServerConfig,
}

type Scores = Vec<Result<Score, Unscored>>;

impl Probe<'_> {
    /// Scores of samples in one request.
    async fn scores(&self, samples: &[Value]) -> Result<Scores, ServerError> {
        let answer = self.server.post(body(samples), self.config.timeout).await;
        read_scores(&answer?, samples.len())
    }

    /// Whether a body that is not a request is refused with a status of 4xx.
    async fn refuses(&self, body: String) -> Result<String, ServerError> {
        match self.server.post(body.clone(), self.config.timeout).await {
            Err(ChatError::Lasting(why)) if why.contains(": status 4") => Ok(why),
            Err(e) => Err(wrong(format!("{body}: {e}; a status of 4xx is expected"))),
            Ok(_) => Err(wrong(format!(
                "{body}: it was answered; a status of 4xx is expected"
            ))),
        }
    }

    /// Scores belong to their samples, whatever other samples the request has.
    async fn order(&self, samples: &[Value]) -> Result<String, ServerError> {
        let forth = self.scores(samples).await?;
        let turned: Vec<Value> = samples.iter().rev().cloned().collect();
        let mut back = self.scores(&turned).await?;
        back.reverse();
        if value_of(&forth) == value_of(&back) {
            Ok(format!("{} samples, forwards and backwards", samples.len()))
        } else {
            Err(wrong("the scores depend on the order of the samples"))
        }
    }

    /// Wrong requests are refused, and harm no later one.
    async fn wrong_input(&self, sample: &Value) -> Result<String, ServerError> {
        self.refuses("{".to_owned()).await?;
        self.refuses(json!({"protocol": PROTOCOL}).to_string())
            .await?;
        let later = json!({"protocol": PROTOCOL + 1, "samples": []}).to_string();
        self.refuses(later).await?;
        self.refuses(body(&[json!({"task": 3})])).await?;
        let after = self.scores(std::slice::from_ref(sample)).await;
        after.map_err(|e| wrong(format!("after wrong input it fails: {e}")))?;
        Ok("no JSON, no samples, a later protocol and a broken sample are refused".to_owned())
    }

    /// Equal samples get equal scores, also at the same time.
    async fn at_once(&self, sample: &Value) -> Result<String, ServerError> {
        let one = [sample.clone()];
        let alone = self.scores(&one).await?;
        let all = join_all((0..AT_ONCE).map(|_| self.scores(&one))).await;
        for scores in all {
            if value_of(&scores?) != value_of(&alone) {
                return Err(wrong("equal samples get different scores"));
            }
        }
        Ok(format!("{AT_ONCE} requests"))
    }

    /// A wrong key is refused.
    async fn key(&self, sample: &Value) -> Result<String, ServerError> {
        let other = JsonServer::new(address(&self.config.url)?, Some("wrong"))?;
        let one = body(std::slice::from_ref(sample));
        match other.post(one, self.config.timeout).await {
            Err(ChatError::Lasting(why)) if why.contains(": status 401") => Ok(why),
            Err(e) => Err(wrong(format!("a wrong key: {e}; status 401 is expected"))),
            Ok(_) => Err(wrong("a wrong key is answered; status 401 is expected")),
        }
    }
}

fn wrong(why: impl Into<String>) -> ServerError {
    ServerError::Wrong(why.into())
}

/// Takes only the values: equal samples need not have equal reasons.
fn value_of(scores: &Scores) -> Vec<Option<f64>> {
    scores
        .iter()
        .map(|s| s.as_ref().ok().map(|s| s.value))
        .collect()
}

/// Samples of tasks, answered as by a weak model.
pub fn samples_of(tasks: &[Task]) -> Vec<RewardSample> {
    let said = ["1", "I do not know.", "", "42"].into_iter().cycle();
    let sample = |(task, output): (&Task, &str)| {
        let mut messages = task.preamble.clone();
        messages.push(Message::new(Role::User, task.prompt.clone()));
        messages.push(Message::new(Role::Assistant, output.to_owned()));
        RewardSample {
            messages,
            ..RewardSample::new(task.clone(), output)
        }
    };
    tasks.iter().zip(said).map(sample).collect()
}

/// Checks the server of `config` with `samples` of the recipe, at least one.
///
/// # Errors
/// If nothing can be asked: the address cannot be one, or there is no sample.
pub async fn check_server(
    config: &ServerConfig,
    samples: &[RewardSample],
) -> Result<Vec<ServerFinding>, ServerError> {
    let server = JsonServer::new(address(&config.url)?, config.key.as_deref())?;
    let sent = samples
        .iter()
        .map(sample_json)
        .collect::<Result<Vec<_>, _>>();
    let sent = sent.map_err(|e| wrong(e.reason))?;
    let first = samples
        .first()
        .ok_or_else(|| wrong("there is no sample to send"))?;
    let mut odd = first.clone();
    odd.output = "\u{0}\u{202e}\"\\ \u{1f600}".repeat(4000);
    let odd = sample_json(&odd).map_err(|e| wrong(e.reason))?;
    let probe = Probe { server, config };
    let alone = probe
        .scores(&sent[..1])
        .await
        .map(|scores| match &scores[0] {
            Ok(score) => format!("{}", score.value),
            Err(unscored) => format!("unscored: {unscored}"),
        });
    let mut findings = vec![finding("one sample", alone)];
    let empty = probe.scores(&[]).await.map(|_| "no scores".to_owned());
    findings.push(finding("no samples", empty));
    findings.push(finding("order", probe.order(&sent).await));
    let long = probe.scores(&[odd]).await;
    let long = long.map(|_| "48,000 bytes of odd characters".to_owned());
    findings.push(finding("long output", long));
    findings.push(finding("at once", probe.at_once(&sent[0]).await));
    findings.push(finding("wrong input", probe.wrong_input(&sent[0]).await));
    if config.key.is_some() {
        findings.push(finding("key", probe.key(&sent[0]).await));
    }
    Ok(findings)
}

fn finding(check: &'static str, result: Result<String, ServerError>) -> ServerFinding {
    let ok = result.is_ok();
    let detail = result.unwrap_or_else(|e| e.to_string());
    ServerFinding { check, ok, detail }
}
