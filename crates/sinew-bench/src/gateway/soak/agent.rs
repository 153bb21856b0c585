//! Actions of agents against a gateway in a soak, drawn from a seed.
//!
//! Agents fan out, roll back, repeat requests, hang up in the middle of an answer, leave and come back to the
//! next gateway. An agent's actions follow from the seed and its number, so that a failure can be repeated.
//!
//! Each turn draws a number below 100:
//!
//! - 60 to 69: streamed as events
//! - 70 to 75: repeated, as if the first answer had been lost; both have to be the same
//! - 76 to 79: hung up in the middle of a long answer
//! - 80 to 84: from an earlier point of the conversation
//! - 85 to 87: with a list of tools that the earlier turns did not have
//! - 88 to 93: with white space added to the last answer
//! - 94 to 96: with two choices, the last of which is continued
//! - all others: a plain call
//!
//! One visit of ten is abandoned after its turns, one is left for the next gateway, and the others are
//! finished.

use super::super::client::connect;
use crate::BenchError;
use bytes::Bytes;
use futures::future::join_all;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper::{Request, Response};
use serde_json::{Value, json};
use sinew_types::{GenerateRequest, SplitMix64, TokenId};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::task::JoinHandle;

/// Tokens of an answer, and of one that is long enough to be left in the middle.
const TOKENS: u64 = 24;
/// Long enough to hang up in.
const LONG: u64 = 512;
/// Most turns of a visit.
const MAX_TURNS: u64 = 12;

/// Counts of the agents.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    /// Calls that were answered.
    pub(super) turns: u64,
    /// Calls that ran into the deadline.
    pub(super) too_late: u64,
    /// Rollouts that nobody finishes.
    pub(super) abandoned: u64,
    /// Answers that are not what they should be; the first one is logged.
    pub(super) wrong: u64,
}

impl Tally {
    /// Adds the counts of other agents.
    pub(super) fn add(&mut self, other: &Self) {
        self.turns += other.turns;
        self.too_late += other.too_late;
        self.abandoned += other.abandoned;
        self.wrong += other.wrong;
    }

    /// Counts a wrong answer.
    fn wrong(&mut self, what: &str) {
        if self.wrong == 0 {
            tracing::error!(what, "a wrong answer in the soak");
        }
        self.wrong += 1;
    }
}

/// A rollout whose agent comes back to the next gateway.
#[derive(Debug)]
pub(super) struct Left {
    /// Id of the rollout.
    id: String,
    path: String,
    key: String,
    messages: Vec<Value>,
}

/// The agents of one gateway.
#[derive(Debug)]
pub(super) struct Agents {
    pub(super) address: SocketAddr,
    /// Token of the control API.
    pub(super) control: String,
    pub(super) turns: u64,
    /// Seed of all random numbers of these agents.
    pub(super) seed: u64,
    /// Nobody comes back.
    pub(super) last: bool,
}

/// Answer of the engine: some words, or random tokens if many are requested.
pub(super) fn script(request: &GenerateRequest, stop: Option<TokenId>) -> Option<Vec<TokenId>> {
    if u64::from(request.sampling.max_tokens) >= LONG {
        return None;
    }
    let mut random = Random(SplitMix64::new(
        request.sampling.seed ^ request.prompt.len() as u64,
    ));
    let words = ["yes", "no", "look again", "forty-two", "é", "done"];
    let mut text = String::new();
    for _ in 0..=random.below(3) {
        text.push_str(words[random.below(words.len() as u64) as usize]);
        text.push(' ');
    }
    let ids = text.bytes().map(TokenId::from);
    Some(ids.chain(stop).collect())
}

/// Draws of one agent.
struct Random(SplitMix64);

impl Random {
    /// A number from 0 to `end`, without it.
    fn below(&mut self, end: u64) -> u64 {
        self.0.next_u64() % end.max(1)
    }
}

impl Agents {
    /// Runs all turns with `agents` concurrent agents, which continue the rollouts in `left` before they
    /// start new ones. Returns the counts, and the rollouts that the next gateway has to continue.
    pub(super) async fn run(
        &self,
        left: Vec<Left>,
        agents: usize,
    ) -> Result<(Tally, Vec<Left>), BenchError> {
        let left = Mutex::new(left);
        let kept = Mutex::new(Vec::new());
        let budget = AtomicU64::new(self.turns);
        let lanes = (0..agents as u64).map(|lane| self.lane(lane, &left, &kept, &budget));
        let mut tally = Tally::default();
        for done in join_all(lanes).await {
            tally.add(&done?);
        }
        Ok((
            tally,
            kept.into_inner().unwrap_or_else(PoisonError::into_inner),
        ))
    }

    /// One episode after the other until all turns are taken.
    async fn lane(
        &self,
        lane: u64,
        left: &Mutex<Vec<Left>>,
        kept: &Mutex<Vec<Left>>,
        budget: &AtomicU64,
    ) -> Result<Tally, BenchError> {
        let lock = |list: &Mutex<Vec<Left>>| {
            let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
            list.pop()
        };
        let mut random = Random(SplitMix64::new(
            self.seed.wrapping_mul(1 << 20).wrapping_add(lane),
        ));
        let mut tally = Tally::default();
        loop {
            let wanted = 2 + random.below(MAX_TURNS - 1);
            let take = |n: u64| (n > 0).then(|| n.saturating_sub(wanted));
            let Ok(before) = budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) else {
                return Ok(tally);
            };
            let mut agent = Agent::start(self, lock(left)).await?;
            for _ in 0..wanted.min(before) {
                tally.turns += 1;
                if !agent.act(&mut random, &mut tally).await? {
                    break;
                }
            }
            match random.below(10) {
                0 => tally.abandoned += 1,
                1 if !self.last => {
                    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                    kept.push(agent.leave());
                }
                _ => agent.finish(self, &mut tally).await?,
            }
        }
    }
}

/// One visit of an agent: its connection and its rollout.
struct Agent {
    address: SocketAddr,
    sender: SendRequest<Full<Bytes>>,
    connection: JoinHandle<()>,
    /// Rollout of the agent, in the form that the next gateway needs.
    rollout: Left,
    /// Answers so far.
    said: u64,
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Agent {
    /// Connects, and opens a rollout unless one was left.
    async fn start(agents: &Agents, left: Option<Left>) -> Result<Self, BenchError> {
        let (mut sender, connection) = connect(agents.address).await?;
        let rollout = match left {
            Some(left) => left,
            None => {
                let open = request("/rollouts", &agents.control, "{}".into(), false)?;
                let answer = sender
                    .send_request(open)
                    .await
                    .map_err(BenchError::system)?;
                let (told, _) = whole(answer).await?;
                let told: Value = serde_json::from_slice(&told).map_err(BenchError::system)?;
                let text = |field: &str| told[field].as_str().unwrap_or_default().to_owned();
                let base = text("base_url");
                let path = &base[base.find("/r/").unwrap_or(base.len())..];
                Left {
                    path: format!("{path}/chat/completions"),
                    id: text("id"),
                    key: text("api_key"),
                    messages: Vec::new(),
                }
            }
        };
        Ok(Self {
            address: agents.address,
            sender,
            connection,
            rollout,
            said: 0,
        })
    }

    /// The rollout, for an agent of the next gateway.
    fn leave(&mut self) -> Left {
        Left {
            id: self.rollout.id.clone(),
            path: self.rollout.path.clone(),
            key: self.rollout.key.clone(),
            messages: std::mem::take(&mut self.rollout.messages),
        }
    }

    /// The body of a call: the whole conversation and more fields.
    fn body(&self, more: &[(&str, Value)]) -> String {
        let mut body = json!({
            "model": "fake", "messages": self.rollout.messages, "max_tokens": TOKENS,
        });
        for (name, value) in more {
            body[*name] = value.clone();
        }
        body.to_string()
    }

    /// Sends a call; `again` marks a repeated one.
    async fn send(&mut self, body: String, again: bool) -> Result<Response<Incoming>, BenchError> {
        let request = request(&self.rollout.path, &self.rollout.key, body, again)?;
        self.exchange(request).await
    }

    /// Sends a request over the connection, or over a new one: a server closes a connection after an answer
    /// that it gave before the whole request was there, as to the key of an expired rollout.
    async fn exchange(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, BenchError> {
        if self.sender.ready().await.is_err() {
            (self.sender, self.connection) = connect(self.address).await?;
        }
        let sent = self.sender.send_request(request).await;
        sent.map_err(BenchError::system)
    }

    /// One turn, of whatever kind. Whether there may be another.
    async fn act(&mut self, random: &mut Random, tally: &mut Tally) -> Result<bool, BenchError> {
        let kind = random.below(100);
        let messages = &mut self.rollout.messages;
        let turns = messages.len() / 2;
        match kind {
            // Back to an earlier point.
            80..85 if turns > 1 => messages.truncate(2 * random.below(turns as u64) as usize),
            // Clients change white space in this way.
            88..94 if turns > 0 => {
                let last = &mut messages[2 * turns - 1]["content"];
                *last = json!(format!("{}\n", last.as_str().unwrap_or_default()));
            }
            _ => {}
        }
        self.said += 1;
        let said = format!("Step {}: look again, then say what you see.", self.said);
        self.rollout
            .messages
            .push(json!({"role": "user", "content": said}));
        let told = match kind {
            60..70 => self.streamed(tally).await?,
            70..76 => self.twice(tally).await?,
            76..80 => {
                self.hang_up().await?;
                self.rollout.messages.pop();
                return Ok(true);
            }
            // The same history under other tools.
            85..88 => {
                let function = json!({"name": "look", "parameters": {}});
                let tools = json!([{"type": "function", "function": function}]);
                self.plain(&[("tools", tools)], tally).await?
            }
            94..97 => self.plain(&[("n", json!(2))], tally).await?,
            _ => self.plain(&[], tally).await?,
        };
        match told {
            Some(content) => {
                let said = json!({"role": "assistant", "content": content});
                self.rollout.messages.push(said);
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// The last choice of an answer; `None` if there is none to continue from.
    async fn plain(
        &mut self,
        more: &[(&str, Value)],
        tally: &mut Tally,
    ) -> Result<Option<String>, BenchError> {
        let answer = self.send(self.body(more), false).await?;
        content(answer, tally).await
    }

    /// A call answered by events. `None`: the agent hung up.
    async fn streamed(&mut self, tally: &mut Tally) -> Result<Option<String>, BenchError> {
        let body = self.body(&[("stream", json!(true))]);
        let answer = self.send(body, false).await?;
        let status = answer.status().as_u16();
        if status != 200 {
            return content(answer, tally).await;
        }
        let (told, _) = whole(answer).await?;
        let told = String::from_utf8_lossy(&told);
        if !told.ends_with("data: [DONE]\n\n") {
            // The deadline came while the answer was sent.
            tally.too_late += 1;
            return Ok(None);
        }
        let events = told.split("\n\n").filter_map(|e| e.strip_prefix("data: "));
        let values = events.filter_map(|e| serde_json::from_str::<Value>(e).ok());
        let of = |v: Value| Some(v["choices"][0]["delta"]["content"].as_str()?.to_owned());
        Ok(Some(values.filter_map(of).collect()))
    }

    /// A call whose answer is lost on the way, and asked for again.
    async fn twice(&mut self, tally: &mut Tally) -> Result<Option<String>, BenchError> {
        let body = self.body(&[]);
        let answer = self.send(body.clone(), false).await?;
        let Some(first) = content(answer, tally).await? else {
            return Ok(None);
        };
        let answer = self.send(body, true).await?;
        let again = content(answer, tally).await?;
        // A repetition may run into the deadline as well, or find its rollout expired.
        if again.as_ref().is_some_and(|again| *again != first) {
            tally.wrong(&format!("{first:?} was asked for again and was {again:?}"));
        }
        Ok(again)
    }

    /// Goes away in the middle of an answer.
    async fn hang_up(&mut self) -> Result<(), BenchError> {
        let body = self.body(&[("stream", json!(true)), ("max_tokens", json!(LONG))]);
        let answer = self.send(body, false).await?;
        // The first part, whatever it is.
        let _ = answer.into_body().frame().await;
        self.connection.abort();
        (self.sender, self.connection) = connect(self.address).await?;
        Ok(())
    }

    /// Scores and finishes the rollout.
    async fn finish(&mut self, agents: &Agents, tally: &mut Tally) -> Result<(), BenchError> {
        let path = format!("/rollouts/{}/finish", self.rollout.id);
        let body = json!({"reward": {"reward": 1.0, "success": true}}).to_string();
        let request = request(&path, &agents.control, body, false)?;
        let (told, status) = whole(self.exchange(request).await?).await?;
        // It may have expired before its agent came back.
        if status != 200 && status != 404 {
            let told = String::from_utf8_lossy(&told);
            tally.wrong(&format!("finish: {status}: {told}"));
        }
        Ok(())
    }
}

/// A request with a bearer token.
fn request(
    path: &str,
    key: &str,
    body: String,
    again: bool,
) -> Result<Request<Full<Bytes>>, BenchError> {
    let mut request = Request::post(path)
        .header("host", "127.0.0.1")
        .header("content-type", "application/json")
        .header("authorization", format!("Bearer {key}"));
    if again {
        request = request.header("x-stainless-retry-count", "1");
    }
    request
        .body(Full::new(body.into()))
        .map_err(BenchError::system)
}

/// The whole body of an answer, and its status.
async fn whole(answer: Response<Incoming>) -> Result<(Bytes, u16), BenchError> {
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await;
    Ok((body.map_err(BenchError::system)?.to_bytes(), status))
}

/// Text of the last choice; `None` if the call failed, as some must.
async fn content(
    answer: Response<Incoming>,
    tally: &mut Tally,
) -> Result<Option<String>, BenchError> {
    let (told, status) = whole(answer).await?;
    match status {
        200 => {
            let told: Value = serde_json::from_slice(&told).map_err(BenchError::system)?;
            let choices = told["choices"].as_array().and_then(|c| c.last());
            let said = choices.and_then(|c| c["message"]["content"].as_str());
            Ok(said.map(str::to_owned))
        }
        504 => {
            tally.too_late += 1;
            Ok(None)
        }
        // Its rollout expired before its agent came back, or has had all its turns.
        400 | 401 => Ok(None),
        _ => {
            let told = String::from_utf8_lossy(&told);
            tally.wrong(&format!("{status}: {told}"));
            Ok(None)
        }
    }
}
