//! Checks whether a server keeps the protocol: the cases of `sinew env test`.
//!
//! Each case opens its own episodes and ends them. A case that cannot be tried at this server (no key is set,
//! too many places to fill) is skipped with the reason.

use super::protocol::{
    CallReply, FaultKind, MAX_BODY, OpenRequest, ScoreReply, ServerInfo, Status,
};
use super::remote::{Remote, text};
use crate::error::SetupError;
use futures::future::join_all;
use serde::Serialize;
use serde_json::{Map, Value, json};
use sinew_http::{Answer, HttpError, Method};
use sinew_types::{Task, TaskId};
use std::time::Duration;

/// Servers with more places are not filled.
const MAX_FILLED: usize = 64;
/// Servers with a longer lease are not waited for, in seconds.
const MAX_LEASE_S: f64 = 5.0;
/// Requests of the case in which a client goes away are cut after this time.
const CUT_AFTER: Duration = Duration::from_millis(5);

/// Outcome of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CaseOutcome {
    /// The server keeps this part of the protocol.
    Passed,
    /// It does not.
    Failed,
    /// It cannot be tried at this server.
    Skipped,
}

/// One line of a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConformanceRow {
    /// Name of the case.
    pub case: &'static str,
    pub outcome: CaseOutcome,
    /// Observation, in one line.
    pub why: String,
}

/// Settings of a trial of a server.
#[derive(Clone, Debug)]
pub struct ConformanceOptions {
    /// Address of the server.
    pub url: String,
    /// Key of the server.
    pub key: Option<String>,
    /// Fields of the task of all episodes, in place of those of the server's example, or of a task without
    /// data.
    pub task: Map<String, Value>,
    /// Episodes that a group opens at once, at least 1.
    pub group: usize,
    /// Deadline of one request.
    pub timeout: Duration,
}

/// Reason why a case did not pass.
enum NotPassed {
    Skipped(String),
    Failed(String),
}

type Case<T = String> = Result<T, NotPassed>;

/// The case failed.
fn fail<T>(why: impl Into<String>) -> Case<T> {
    Err(NotPassed::Failed(why.into()))
}

/// The case cannot be tried at this server.
fn skip<T>(why: impl Into<String>) -> Case<T> {
    Err(NotPassed::Skipped(why.into()))
}

/// A request of the case has no answer.
fn unanswered(error: HttpError) -> NotPassed {
    NotPassed::Failed(error.to_string())
}

/// Runs all cases. The report has a row for each; a server that does not describe itself has one row.
///
/// # Errors
/// If the address, the key or the task is invalid.
pub async fn conformance(options: &ConformanceOptions) -> Result<Vec<ConformanceRow>, SetupError> {
    let remote = Remote::new(&options.url, options.key.as_deref(), options.timeout)?;
    let described = remote.json::<ServerInfo>(Method::GET, "/sinew", None).await;
    let wrong = match &described {
        Ok(described) => described.wrong(),
        Err(e) => Some(e.to_string()),
    };
    let mut rows = Vec::new();
    let described = match (described, wrong) {
        (Ok(described), None) => described,
        (_, wrong) => {
            rows.push(row("describe", fail(wrong.unwrap_or_default())));
            return Ok(rows);
        }
    };
    let place = format!("{}: {} tools", described.name, described.tools.len());
    rows.push(row("describe", Ok(place)));
    let mut random = [0; 6];
    getrandom::fill(&mut random).map_err(|e| SetupError::Options(e.to_string()))?;
    let mut example = json!(described.example.clone().unwrap_or_else(empty));
    for (field, value) in &options.task {
        example[field] = value.clone();
    }
    let mut trial = Trial {
        remote,
        task: serde_json::from_value(example)
            .map_err(|e| SetupError::Options(format!("the task: {e}")))?,
        described,
        options,
        prefix: format!("test-{}", random.map(|b| format!("{b:02x}")).concat()),
        next: 0,
    };
    trial.run(&mut rows).await;
    Ok(rows)
}

/// The line of a case in the report.
fn row(case: &'static str, result: Case) -> ConformanceRow {
    let (outcome, why) = match result {
        Ok(why) => (CaseOutcome::Passed, why),
        Err(NotPassed::Skipped(why)) => (CaseOutcome::Skipped, why),
        Err(NotPassed::Failed(why)) => (CaseOutcome::Failed, why),
    };
    ConformanceRow { case, outcome, why }
}

/// A task without data, for servers that give no example.
fn empty() -> Task {
    Task {
        id: TaskId::new("conformance"),
        kind: "test".into(),
        prompt: "A test of the protocol.".into(),
        data: json!({}),
        ..Task::default()
    }
}

/// A server that is tried.
struct Trial<'a> {
    /// Server with the key of the options.
    remote: Remote,
    /// The server's description.
    described: ServerInfo,
    /// Task of all episodes.
    task: Task,
    options: &'a ConformanceOptions,
    /// Begin of all ids of this trial.
    prefix: String,
    /// Number of ids so far.
    next: u32,
}

impl Trial<'_> {
    /// All cases in order. A case that fails does not end the report.
    async fn run(&mut self, rows: &mut Vec<ConformanceRow>) {
        rows.push(row("wrong_key", self.wrong_key().await));
        rows.push(row("repeated_open", self.repeated_open().await));
        rows.push(row("group_at_once", self.group_at_once().await));
        rows.push(row("repeated_call", self.repeated_call().await));
        rows.push(row("calls_at_once", self.calls_at_once().await));
        rows.push(row("client_goes_away", self.client_goes_away().await));
        rows.push(row("unknown_tool", self.unknown_tool().await));
        rows.push(row("unknown_episode", self.unknown_episode().await));
        rows.push(row("bad_body", self.bad_body().await));
        rows.push(row("large_body", self.large_body().await));
        rows.push(row("score", self.score().await));
        rows.push(row("late_delete", self.late_delete().await));
        rows.push(row("capacity", self.capacity().await));
        rows.push(row("lease", self.lease().await));
    }

    /// An id that no other case and no other test has.
    fn id(&mut self) -> String {
        self.next += 1;
        format!("{}-{}", self.prefix, self.next)
    }

    /// One request within the deadline, which must have an answer, whatever its status.
    async fn ask(&self, method: Method, path: &str, body: &Value) -> Case<Answer> {
        let sent = (!body.is_null()).then(|| body.to_string().into_bytes());
        let asked = self.remote.once(method.clone(), path, sent);
        match tokio::time::timeout(self.options.timeout, asked).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(e)) => fail(format!("{method} {path}: {e}")),
            Err(_) => {
                let seconds = self.options.timeout.as_secs_f64();
                fail(format!("{method} {path}: no answer within {seconds} s"))
            }
        }
    }

    /// Opens an episode of the trial's task. A refusal fails the case.
    async fn open(&self, id: &str) -> Case<Answer> {
        let open = OpenRequest {
            episode: id.to_owned(),
            task: self.task.clone(),
        };
        let answer = self.ask(Method::POST, "/episodes", &json!(open)).await?;
        if answer.status.is_success() {
            Ok(answer)
        } else {
            fail(format!(
                "POST /episodes: {}: {}",
                answer.status,
                text(&answer)
            ))
        }
    }

    /// Ends an episode. The status is that of the server: a case decides which it needs.
    async fn close(&self, id: &str) -> Case<Answer> {
        self.ask(Method::DELETE, &format!("/episodes/{id}"), &Value::Null)
            .await
    }

    /// A call that every server must answer with 200: one of a tool that it does not have.
    async fn call(&self, id: &str, call: &str) -> Case<Answer> {
        let path = format!("/episodes/{id}/calls/{call}");
        let body = json!({"tool": "no_such_tool", "args": {}});
        self.ask(Method::POST, &path, &body).await
    }

    /// Checks that the server reveals nothing about itself to a client without its key.
    async fn wrong_key(&mut self) -> Case {
        if self.options.key.is_none() {
            return skip("no key is given; name its variable with --key-env");
        }
        for key in [None, Some("wrong")] {
            let other = Remote::new(&self.options.url, key, self.options.timeout);
            let other = other.map_err(unanswered)?;
            let answer = other.once(Method::GET, "/sinew", None).await;
            let answer = answer.map_err(unanswered)?;
            if answer.status.as_u16() != 401 {
                return fail(format!("{key:?} as key: {}, expected 401", answer.status));
            }
        }
        Ok("401 without a key and with a wrong one".into())
    }

    /// A client that lost the answer asks again: it must not get a second episode.
    async fn repeated_open(&mut self) -> Case {
        let id = self.id();
        let (first, second) = (self.open(&id).await?, self.open(&id).await?);
        self.close(&id).await?;
        if first.body == second.body {
            Ok("the same id gives the same answer".into())
        } else {
            fail("the same id was answered in two ways")
        }
    }

    /// The episodes of a group run at once. Servers with one session for all break here.
    async fn group_at_once(&mut self) -> Case {
        let count = self.options.group.clamp(1, self.described.max_episodes);
        let ids: Vec<String> = (0..count).map(|_| self.id()).collect();
        let this = &*self;
        let played = ids.iter().map(|id| async move {
            this.open(id).await?;
            let called = this.call(id, "c1").await?;
            this.close(id).await?;
            if called.status.is_success() {
                Ok(())
            } else {
                fail(format!("a call: {}: {}", called.status, text(&called)))
            }
        });
        join_all(played)
            .await
            .into_iter()
            .collect::<Result<Vec<()>, _>>()?;
        if count < self.options.group {
            Ok(format!("{count} episodes, all that it has places for"))
        } else {
            Ok(format!("{count} episodes at once"))
        }
    }

    /// A client that lost the answer to a call asks again: the call must not run twice.
    async fn repeated_call(&mut self) -> Case {
        let id = self.id();
        self.open(&id).await?;
        let (first, second) = (self.call(&id, "c1").await?, self.call(&id, "c1").await?);
        self.close(&id).await?;
        if first.status.is_success() && first.body == second.body {
            Ok("the same call id gives the stored answer".into())
        } else {
            fail(format!(
                "{}: {}, then {}: {}",
                first.status,
                text(&first),
                second.status,
                text(&second)
            ))
        }
    }

    /// A repeat can come while the first request still runs.
    async fn calls_at_once(&mut self) -> Case {
        let id = self.id();
        self.open(&id).await?;
        let calls = join_all((0..4).map(|_| self.call(&id, "c1"))).await;
        self.close(&id).await?;
        let answers = calls.into_iter().collect::<Result<Vec<_>, _>>()?;
        if answers
            .windows(2)
            .all(|a| a[0].body == a[1].body && a[0].status.is_success())
        {
            Ok("four requests with one call id at once: one answer".into())
        } else {
            fail("four requests with one call id at once were answered in different ways")
        }
    }

    /// A call continues without its client, and its answer is kept.
    async fn client_goes_away(&mut self) -> Case {
        let id = self.id();
        self.open(&id).await?;
        let _ = tokio::time::timeout(CUT_AFTER, self.call(&id, "c1")).await;
        let (second, third) = (self.call(&id, "c1").await?, self.call(&id, "c1").await?);
        self.close(&id).await?;
        if second.status.is_success() && second.body == third.body {
            Ok("a repeat after a cut request is answered".into())
        } else {
            fail(format!("a repeat after a cut request: {}", second.status))
        }
    }

    /// Models call tools that do not exist: they must be able to read so.
    async fn unknown_tool(&mut self) -> Case {
        let id = self.id();
        self.open(&id).await?;
        let answer = self.call(&id, "c1").await?;
        self.close(&id).await?;
        let called = serde_json::from_slice::<CallReply>(&answer.body);
        match called.ok().and_then(|c| c.error) {
            Some(fault) if fault.kind == FaultKind::Tool => {
                Ok("an error of the model, with a text".into())
            }
            _ => fail(format!(
                "{}: expected 200 with error.kind = \"tool\": {}",
                answer.status,
                text(&answer)
            )),
        }
    }

    /// An id that was never opened must not begin an episode.
    async fn unknown_episode(&mut self) -> Case {
        let id = self.id();
        let score = json!({"messages": [], "output": ""});
        for (path, body) in [
            (format!("/episodes/{id}/calls/c1"), json!({"text": "x"})),
            (format!("/episodes/{id}/score"), score),
            (format!("/episodes/{id}/lease"), Value::Null),
        ] {
            let answer = self.ask(Method::POST, &path, &body).await?;
            if answer.status.as_u16() != 404 {
                return fail(format!("POST {path}: {}, expected 404", answer.status));
            }
        }
        Ok("404".into())
    }

    /// Bodies that are not JSON, or not those of the protocol.
    async fn bad_body(&mut self) -> Case {
        for body in ["", "{", "[]", "{\"episode\": 7}"] {
            let sent = Some(body.as_bytes().to_vec());
            let answer = self.remote.once(Method::POST, "/episodes", sent).await;
            let status = answer.map_err(unanswered)?.status;
            if !status.is_client_error() {
                return fail(format!(
                    "POST /episodes with {body:?}: {status}, expected 400"
                ));
            }
        }
        Ok("refused with 400 to 499".into())
    }

    /// A body above the limit must not be read into memory.
    async fn large_body(&mut self) -> Case {
        let sent = Some(vec![b' '; MAX_BODY + 1]);
        // A server may close the connection instead of reading all of it.
        let status = match self.remote.once(Method::POST, "/episodes", sent).await {
            Ok(answer) if !answer.status.is_client_error() => {
                return fail(format!("more than 16 MiB: {}, expected 413", answer.status));
            }
            Ok(answer) => answer.status.to_string(),
            Err(_) => "the connection is closed".into(),
        };
        self.ask(Method::GET, "/sinew", &Value::Null).await?;
        Ok(format!("more than 16 MiB: {status}"))
    }

    /// A score is a number, or missing with a reason. Null without a reason hides the cause.
    async fn score(&mut self) -> Case {
        let id = self.id();
        self.open(&id).await?;
        let path = format!("/episodes/{id}/score");
        let body = json!({"messages": [{"role": "user", "content": "x"}], "output": ""});
        let answer = self.ask(Method::POST, &path, &body).await?;
        self.close(&id).await?;
        let scored: ScoreReply = match serde_json::from_slice(&answer.body) {
            Ok(scored) if answer.status.is_success() => scored,
            _ => return fail(format!("{}: {}", answer.status, text(&answer))),
        };
        let value = scored.rewards.get("reward").copied().flatten();
        match (scored.status, value, scored.reason) {
            (Status::Scored, Some(value), _) => Ok(format!("scored: {value}")),
            (Status::Unscored, None, Some(reason)) => Ok(format!("unscored: {reason}")),
            (Status::Scored, None, _) => fail("scored, without a number as rewards.reward"),
            (Status::Unscored, Some(_), _) => fail("unscored, with a number as rewards.reward"),
            (Status::Unscored, None, None) => fail("unscored, without a reason"),
        }
    }

    /// An end that comes twice, and a call that comes after it.
    async fn late_delete(&mut self) -> Case {
        let id = self.id();
        self.open(&id).await?;
        let (first, second) = (self.close(&id).await?, self.close(&id).await?);
        let gone = self.call(&id, "c1").await?;
        let again = [200, 204, 404, 410].contains(&second.status.as_u16());
        if first.status.is_success() && again && gone.status.as_u16() == 404 {
            Ok(format!(
                "{}, again {}, a call after it 404",
                first.status, second.status
            ))
        } else {
            fail(format!(
                "{}, again {} (expected 204 or 404), a call after it {} (expected 404)",
                first.status, second.status, gone.status
            ))
        }
    }

    /// A full server reports that, and does not open one more.
    async fn capacity(&mut self) -> Case {
        let places = self.described.max_episodes;
        if places > MAX_FILLED {
            return skip(format!(
                "{places} places: more than {MAX_FILLED} are not filled"
            ));
        }
        let ids: Vec<String> = (0..places).map(|_| self.id()).collect();
        let mut opened = Ok(());
        for id in &ids {
            opened = opened.and(self.open(id).await.map(|_| ()));
        }
        let open = OpenRequest {
            episode: self.id(),
            task: self.task.clone(),
        };
        let over = self.ask(Method::POST, "/episodes", &json!(open)).await;
        for id in ids.iter().chain([&open.episode]) {
            self.close(id).await?;
        }
        opened?;
        match over?.status.as_u16() {
            status @ (429 | 503) => Ok(format!("{places} places, then {status}")),
            status => fail(format!("{places} places are full: {status}, expected 503")),
        }
    }

    /// A lease is renewed by its route, and frees what no one renews.
    async fn lease(&mut self) -> Case {
        let (id, lease_s) = (self.id(), self.described.lease_s);
        self.open(&id).await?;
        let renewed = format!("/episodes/{id}/lease");
        let answer = self.ask(Method::POST, &renewed, &Value::Null).await?;
        if !answer.status.is_success() {
            return fail(format!("POST {renewed}: {}", answer.status));
        }
        if lease_s > MAX_LEASE_S {
            self.close(&id).await?;
            return Ok(format!("renewed; its end after {lease_s} s is not awaited"));
        }
        tokio::time::sleep(Duration::from_secs_f64(2.5 * lease_s)).await;
        let answer = self.ask(Method::POST, &renewed, &Value::Null).await?;
        match answer.status.as_u16() {
            404 => Ok(format!(
                "renewed; freed after {lease_s} s without a request"
            )),
            status => fail(format!(
                "{status} long after the lease of {lease_s} s, expected 404"
            )),
        }
    }
}
