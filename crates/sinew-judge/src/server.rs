//! Reward servers: samples out, scores in, over HTTP.
//!
//! One request has up to `batch` samples that finished at about the same time. Outages are waited for
//! with pauses that double; a wrong answer is not asked for again.

use crate::asking::{JudgeReply, Vote, VoteAction};
use crate::chat::ChatError;
use crate::error::ServerError;
use crate::http::{JsonServer, address};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use sinew_env::{Reward, RewardSample, Score, Unscored};
use sinew_http::HttpError;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};

/// Version of the protocol, in every request.
pub(crate) const PROTOCOL: u64 = 1;
/// Time that a sample waits for others of its request.
const LINGER: Duration = Duration::from_millis(5);
/// Maximum requests at once.
const CONCURRENCY: usize = 8;
/// Further requests after an outage.
const RETRIES: u32 = 3;
/// Maximum bytes of one sample; a longer one is unscored.
const MAX_SAMPLE: usize = 4 << 20;
/// Maximum metrics of one score.
const MAX_PARTS: usize = 64;

/// A reward server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Name in metrics and reports.
    pub name: String,
    /// Address of the scores, such as `http://host:8000/score`.
    pub url: String,
    /// Bearer token.
    pub key: Option<String>,
    /// Maximum samples of a request, at least 1.
    pub batch: usize,
    /// Limit of one request.
    pub timeout: Duration,
}

/// A sample that waits for its request.
struct WaitingSample {
    sample: Value,
    answer: oneshot::Sender<Result<Score, Unscored>>,
}

struct Shared {
    server: JsonServer,
    config: ServerConfig,
    waiting: Mutex<Vec<WaitingSample>>,
    slots: Arc<Semaphore>,
}

/// A reward server as a reward.
#[derive(Clone)]
pub struct RewardServer {
    shared: Arc<Shared>,
}

sinew_types::debug_fields!(RewardServer as this, url = this.shared.config.url);

/// The body of a request with these samples.
pub(crate) fn body(samples: &[Value]) -> String {
    json!({"protocol": PROTOCOL, "samples": samples}).to_string()
}

/// A sample as servers get it.
///
/// # Errors
/// If it is longer than [`MAX_SAMPLE`].
pub(crate) fn sample_json(sample: &RewardSample) -> Result<Value, Unscored> {
    let value = serde_json::to_value(sample).map_err(|e| Unscored::new(e.to_string()))?;
    let bytes = value.to_string().len();
    if bytes <= MAX_SAMPLE {
        Ok(value)
    } else {
        Err(Unscored::new(format!(
            "the sample has {bytes} bytes; at most {MAX_SAMPLE} are sent"
        )))
    }
}

/// The scores of an answer to `count` samples.
///
/// # Errors
/// Fails with the reason why the answer is not valid.
pub(crate) fn read_scores(
    answer: &Value,
    count: usize,
) -> Result<Vec<Result<Score, Unscored>>, ServerError> {
    let Some(scores) = answer.get("scores").and_then(Value::as_array) else {
        let why = "the answer has no list \"scores\"";
        return Err(ServerError::Wrong(why.to_owned()));
    };
    if scores.len() != count {
        let why = format!("{} scores for {count} samples", scores.len());
        return Err(ServerError::Wrong(why));
    }
    Ok(scores.iter().map(read_score).collect())
}

/// One score: a number, null, or an object with `reward`, and `reason` or `parts`.
fn read_score(score: &Value) -> Result<Score, Unscored> {
    match score {
        Value::Null => Err(Unscored::new("the server abstained")),
        Value::Number(_) => Score::new(score.as_f64().unwrap_or(f64::NAN)),
        Value::Object(fields) => {
            let known = |key: &&String| !matches!(key.as_str(), "reward" | "reason" | "parts");
            if let Some(key) = fields.keys().find(known) {
                let key: String = key.chars().take(40).collect();
                return Err(Unscored::new(format!(
                    "a score has the unknown field {key:?}"
                )));
            }
            let reason = fields.get("reason").and_then(Value::as_str);
            match fields.get("reward") {
                Some(Value::Number(value)) => {
                    let parts = read_parts(fields.get("parts"))?;
                    Score::with_parts(value.as_f64().unwrap_or(f64::NAN), parts)
                }
                Some(Value::Null) => Err(Unscored::new(match reason {
                    Some(reason) => format!("the server abstained: {}", plain(reason)),
                    None => "the server abstained".to_owned(),
                })),
                _ => Err(Unscored::new("a score has no \"reward\", a number or null")),
            }
        }
        _ => Err(Unscored::new(
            "a score is neither a number, null nor an object",
        )),
    }
}

/// Words of a server without control characters.
fn plain(text: &str) -> String {
    text.chars().take(200).filter(|c| !c.is_control()).collect()
}

/// Metrics of a score.
fn read_parts(parts: Option<&Value>) -> Result<BTreeMap<String, f64>, Unscored> {
    let wrong = || {
        Unscored::new(format!(
            "\"parts\" are no object of up to {MAX_PARTS} numbers"
        ))
    };
    let Some(parts) = parts else {
        return Ok(BTreeMap::new());
    };
    let parts = parts
        .as_object()
        .filter(|p| p.len() <= MAX_PARTS)
        .ok_or_else(wrong)?;
    let part = |(name, value): (&String, &Value)| {
        let value = value
            .as_f64()
            .filter(|_| name.len() <= 64 && name.as_str() == plain(name));
        Some((name.clone(), value?))
    };
    parts
        .iter()
        .map(part)
        .collect::<Option<_>>()
        .ok_or_else(wrong)
}

impl RewardServer {
    /// Creates a client. Nothing is sent.
    ///
    /// # Errors
    /// If the address or the key cannot be one.
    pub fn new(config: ServerConfig) -> Result<Self, HttpError> {
        let server = JsonServer::new(address(&config.url)?, config.key.as_deref())?;
        Ok(Self {
            shared: Arc::new(Shared {
                server,
                config,
                waiting: Mutex::default(),
                slots: Arc::new(Semaphore::new(CONCURRENCY)),
            }),
        })
    }

    /// Adds the sample to the request that is being built, and waits for its score.
    async fn ask(&self, sample: &RewardSample) -> Result<Score, Unscored> {
        let sample = sample_json(sample)?;
        let (answer, score) = oneshot::channel();
        let first = {
            let mut waiting = self.shared.waiting();
            waiting.push(WaitingSample { sample, answer });
            waiting.len() == 1
        };
        if first {
            // The request runs as a separate task, because the episode that came first may be cancelled.
            tokio::spawn(Arc::clone(&self.shared).send());
        }
        let score = score.await;
        score.unwrap_or_else(|_| Err(Unscored::new("the request was not sent: the run ends")))
    }
}

impl Shared {
    /// A lock that a panic elsewhere does not take away: the list is valid at every step.
    fn waiting(&self) -> MutexGuard<'_, Vec<WaitingSample>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends all that waits, and what comes meanwhile.
    async fn send(self: Arc<Self>) {
        tokio::time::sleep(LINGER).await;
        while let Ok(slot) = Arc::clone(&self.slots).acquire_owned().await {
            let batch: Vec<WaitingSample> = {
                let mut waiting = self.waiting();
                let count = waiting.len().min(self.config.batch.max(1));
                waiting.drain(..count).collect()
            };
            if batch.is_empty() {
                return;
            }
            let shared = Arc::clone(&self);
            tokio::spawn(async move {
                shared.exchange(batch).await;
                drop(slot);
            });
        }
    }

    /// One request, repeated after outages, and its answers.
    async fn exchange(&self, batch: Vec<WaitingSample>) {
        let (samples, answers): (Vec<Value>, Vec<_>) =
            batch.into_iter().map(|w| (w.sample, w.answer)).unzip();
        let body = body(&samples);
        let mut asking = Vote::new(RETRIES);
        let mut next = asking.first();
        let scores = loop {
            match next {
                VoteAction::Done(scores) => break Ok(scores),
                VoteAction::Failed(why) => break Err(Unscored::new(why)),
                VoteAction::Ask { pause, .. } => {
                    tokio::time::sleep(pause).await;
                    next = asking.on(self.once(&body, samples.len()).await);
                }
            }
        };
        match scores {
            // A receiver that is gone belongs to a cancelled episode.
            Ok(scores) => answers
                .into_iter()
                .zip(scores)
                .for_each(|(a, s)| drop(a.send(s))),
            Err(why) => answers
                .into_iter()
                .for_each(|a| drop(a.send(Err(why.clone())))),
        }
    }

    /// One request: outages may pass, a wrong answer stays wrong.
    async fn once(&self, body: &str, count: usize) -> JudgeReply<Vec<Result<Score, Unscored>>> {
        match self.server.post(body.to_owned(), self.config.timeout).await {
            Err(ChatError::Passing(why) | ChatError::Unheard(why)) => JudgeReply::Passing(why),
            Err(ChatError::Lasting(why)) => JudgeReply::Lasting(why),
            Ok(answer) => match read_scores(&answer, count) {
                Ok(scores) => JudgeReply::Verdict(scores),
                Err(why) => JudgeReply::Lasting(format!("{}: {why}", self.server.host())),
            },
        }
    }
}

impl Reward for RewardServer {
    fn name(&self) -> &str {
        &self.shared.config.name
    }

    fn score<'a>(&'a self, sample: &'a RewardSample) -> BoxFuture<'a, Result<Score, Unscored>> {
        self.ask(sample).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_numbers_abstentions_or_objects() {
        let read = |score: Value| read_score(&score).map_err(|e| e.reason);
        assert_eq!(read(json!(0.5)).unwrap().value, 0.5);
        let full = read(json!({"reward": -1, "parts": {"style": 0.25}, "reason": "x"})).unwrap();
        assert_eq!((full.value, full.parts["style"]), (-1.0, 0.25));
        assert_eq!(read(json!(null)).unwrap_err(), "the server abstained");
        let why = read(json!({"reward": null, "reason": "no\u{7} idea"})).unwrap_err();
        assert_eq!(why, "the server abstained: no idea");
        for (wrong, expected) in [
            (json!("1"), "neither"),
            (json!(true), "neither"),
            (json!([1]), "neither"),
            (json!({}), "no \"reward\""),
            (json!({"reward": "1"}), "no \"reward\""),
            (json!({"rewards": 1}), "unknown field \"rewards\""),
            (json!({"reward": 1, "parts": [1]}), "no object"),
            (json!({"reward": 1, "parts": {"a": "b"}}), "no object"),
            (json!({"reward": 1, "parts": {"a\nb": 1}}), "no object"),
        ] {
            let why = read(wrong.clone()).unwrap_err();
            assert!(why.contains(expected), "{wrong}: {why}");
        }
        let many: serde_json::Map<String, Value> =
            (0..65).map(|i| (i.to_string(), json!(i))).collect();
        assert!(read(json!({"reward": 1, "parts": many})).is_err());
    }

    #[test]
    fn the_number_of_scores_is_checked() {
        let answer = json!({"scores": [1, null, 0]});
        assert_eq!(read_scores(&answer, 3).unwrap().len(), 3);
        assert_eq!(
            read_scores(&answer, 4).unwrap_err().to_string(),
            "3 scores for 4 samples"
        );
        assert_eq!(
            read_scores(&json!({"scores": [0]}), 2)
                .unwrap_err()
                .to_string(),
            "1 scores for 2 samples"
        );
        let why = read_scores(&json!([1]), 1).unwrap_err().to_string();
        assert!(why.contains("no list"));
    }
}
