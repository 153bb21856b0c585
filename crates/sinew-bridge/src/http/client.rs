//! Episodes of a server as environments.
//!
//! This side chooses an id for each episode and for each call, so that requests can be repeated. A task of
//! the runtime renews the lease as long as the environment lives. Errors of the model are observations;
//! errors of the server and of the way to it fail the episode ([`EnvError::Worker`]), and a missing score
//! leaves it unscored.

use super::keys::Http;
use super::protocol::{
    AskScore, Call, CallReply, FaultKind, MAX_ID, MAX_TEXT, OpenReply, ScoreReply, ServerInfo,
    Status, cut, observation, specs, wrong_tools,
};
use super::remote::{Remote, RemoteError};
use super::server::{Server, gone, refused, worker};
use crate::counts::{Counts, counted};
use crate::runtime::block_on;
use crate::turn::Turn;
use serde_json::{Value, json};
use sinew_env::{
    Action, CallError, CallNotation, Capabilities, Env, EnvError, EnvFactory, EnvFuture,
    Observation, ResetResult, Score, StepResult, Unscored,
};
use sinew_http::Method;
use sinew_types::{Gives, InputPresence, Message, Outcome, Role, Task, ToolSpec, is_reward};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

/// Maximum characters of an error of the environment.
const MAX_ERROR: usize = 400;
/// Deadline of one renewal of a lease, and of the end of an episode that was dropped.
const SHORT: Duration = Duration::from_secs(10);

/// Factory of episodes of one server.
#[derive(Clone)]
pub struct HttpEnvFactory {
    shared: Arc<Shared>,
}

/// Parts that the environments of a factory share.
struct Shared {
    /// Server whose runtime renews leases and ends dropped episodes.
    server: Server,
    /// Answer to `GET /sinew` at the start.
    described: ServerInfo,
    /// Tools of all episodes, unless one has others.
    tools: Vec<ToolSpec>,
    /// Name for traces.
    name: String,
    /// Begin of the ids of this factory's episodes: two runs at one server must not share an id.
    prefix: String,
    /// Number of the next episode.
    next: AtomicU64,
    /// One permit for each place of the server.
    places: Arc<Semaphore>,
    /// Longest wait for a place.
    wait: Duration,
}

sinew_types::debug_fields!(
    HttpEnvFactory as this,
    name = this.shared.name,
    remote = this.shared.server.remote
);

impl HttpEnvFactory {
    /// Asks the server what it is. It blocks the thread.
    ///
    /// # Errors
    /// If the key is missing, the server does not answer, or its declaration is not allowed.
    pub fn connect(keys: &Http) -> Result<Self, EnvError> {
        let server = Server::new(&keys.url, &keys.key_env, keys.timeout_s)?;
        let asking = server.remote.clone();
        let asked = async move { asking.json(Method::GET, "/sinew", None).await };
        let asked: Result<ServerInfo, _> = block_on(&server.handle, asked).ok_or_else(gone)?;
        let mut described = asked.map_err(worker)?;
        described.version = cut(&described.version, MAX_ID);
        if let Some(why) = described.wrong() {
            return Err(refused("url", &keys.url, format!("GET /sinew: {why}")));
        }
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(worker)?;
        Ok(Self {
            shared: Arc::new(Shared {
                tools: specs(described.tools.clone()),
                name: format!("http:{}", described.name),
                prefix: format!("{:016x}", u64::from_be_bytes(random)),
                next: AtomicU64::new(0),
                places: Arc::new(Semaphore::new(described.max_episodes)),
                wait: Duration::from_secs_f64(keys.wait_s),
                server,
                described,
            }),
        })
    }
}

impl EnvFactory for HttpEnvFactory {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn version(&self) -> &str {
        &self.shared.described.version
    }

    fn tools(&self) -> BTreeMap<String, String> {
        let version = self.version().to_owned();
        let names = self.shared.tools.iter().map(|t| t.name.clone());
        names.map(|name| (name, version.clone())).collect()
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        Ok(Box::new(HttpEnv {
            shared: Arc::clone(&self.shared),
            task: task.clone(),
            place: None,
            ended: false,
            calls: 0,
            last: Vec::new(),
            renewed: None,
            said: AskScore::default(),
            counts: Counts::default(),
        }))
    }

    fn capabilities(&self) -> Capabilities {
        let counts = counted(!self.shared.tools.is_empty());
        let gives = Gives {
            states: if self.shared.described.states {
                InputPresence::Yes
            } else {
                InputPresence::No(
                    "answer GET /sinew with `states: true`, and turns with `state`, a text that is equal \
                     exactly in equal states",
                )
            },
            turn_rewards: InputPresence::Maybe,
            tool_counts: counts,
            format_penalty: counts,
        };
        Capabilities {
            concurrent: self.shared.described.max_episodes > 1,
            deterministic: false,
            gives,
            places: Some(self.shared.described.max_episodes),
        }
    }

    fn gold(&self, _task: &Task, _turn: usize) -> Result<Option<Action>, EnvError> {
        Ok(None)
    }
}

/// An open episode of the server. Dropping it ends the episode in the background.
struct Place {
    shared: Arc<Shared>,
    /// Id at the server.
    id: String,
    /// Renews the lease, once the episode is open.
    renewal: Option<AbortHandle>,
    /// The server has freed the episode, as its lease ran out or it started again.
    lost: Arc<AtomicBool>,
    /// Kept until the server has ended the episode.
    permit: Option<OwnedSemaphorePermit>,
}

impl Place {
    /// Path of a route of this episode.
    fn path(&self, rest: &str) -> String {
        format!("/episodes/{}{rest}", self.id)
    }

    /// A request to this episode, on the runtime of the factory, so that a caller that stops waiting does not
    /// cut it.
    async fn ask<T>(&self, rest: &str, body: Value) -> Result<T, RemoteError>
    where
        T: serde::de::DeserializeOwned + Send + 'static,
    {
        let (remote, path) = (self.shared.server.remote.clone(), self.path(rest));
        let asked = async move { remote.json(Method::POST, &path, Some(&body)).await };
        flat(self.shared.server.handle.spawn(asked).await)
    }

    /// The error of a request, with the reason if the server has lost the episode.
    fn explained(&self, error: &RemoteError) -> EnvError {
        if error.is_unknown() || self.lost.load(Ordering::Relaxed) {
            worker(format!(
                "the server does not know the episode any more: its lease ran out, or it started again ({error})"
            ))
        } else {
            worker(error)
        }
    }

    /// Ends the episode. An unknown id of the server means that it has ended already.
    async fn end(shared: Arc<Shared>, id: String, limit: Duration) -> Result<(), RemoteError> {
        let path = format!("/episodes/{id}");
        match shared
            .server
            .remote
            .within(Method::DELETE, &path, None, limit)
            .await
        {
            Err(e) if !e.is_unknown() => Err(e),
            _ => Ok(()),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(renewal) = self.renewal.take() {
            renewal.abort();
        }
        if let Some(permit) = self.permit.take() {
            let (shared, id) = (Arc::clone(&self.shared), self.id.clone());
            self.shared.server.handle.spawn(async move {
                // No one waits for it: the lease frees the episode otherwise.
                let _ = Self::end(shared, id, SHORT).await;
                drop(permit);
            });
        }
    }
}

/// The value of a request that ran on the runtime.
fn flat<T>(
    joined: Result<Result<T, RemoteError>, tokio::task::JoinError>,
) -> Result<T, RemoteError> {
    joined.unwrap_or_else(|_| {
        Err(RemoteError::Protocol {
            what: "the client".into(),
            why: "its runtime is gone".into(),
        })
    })
}

/// Renews a lease three times within its length. It ends when the server has lost the episode, which it notes
/// in `lost`. Any other error is left to the next renewal, of which two more fit into the lease.
async fn renew(remote: Remote, id: String, lease_s: f64, lost: Arc<AtomicBool>) {
    let path = format!("/episodes/{id}/lease");
    loop {
        tokio::time::sleep(Duration::from_secs_f64(lease_s / 3.0)).await;
        let limit = SHORT.min(Duration::from_secs_f64(lease_s));
        match remote.within(Method::POST, &path, None, limit).await {
            Err(e) if e.is_unknown() => {
                lost.store(true, Ordering::Relaxed);
                return;
            }
            Err(e) => tracing::debug!(error = %e, "a lease was not renewed"),
            Ok(_) => {}
        }
    }
}

/// One episode.
struct HttpEnv {
    shared: Arc<Shared>,
    task: Task,
    /// The episode of the server, from `reset` to `close`.
    place: Option<Place>,
    /// The server ended the episode.
    ended: bool,
    /// Number of calls so far, for their ids.
    calls: u64,
    /// New context of the model, if the last turn replaced the earlier one.
    renewed: Option<Vec<Message>>,
    /// Messages of the last observation: one for each call, with its id.
    last: Vec<Message>,
    /// Request for the score.
    said: AskScore,
    counts: Counts,
}

/// Hash of the text of a state.
fn state_hash(state: Option<&str>) -> Option<u64> {
    let bytes = *blake3::hash(state?.as_bytes()).as_bytes();
    let [a, b, c, d, e, f, g, h, ..] = bytes;
    Some(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
}

impl HttpEnv {
    /// Waits for a place, and opens an episode with a new id.
    ///
    /// # Errors
    /// [`EnvError::Order`] if it was opened before; otherwise the worker's error, also if no place of the
    /// server was free within `wait_s`.
    async fn open(&mut self) -> Result<ResetResult, EnvError> {
        if self.place.is_some() || self.ended {
            return Err(EnvError::Order("reset twice: an environment is used once"));
        }
        let shared = Arc::clone(&self.shared);
        let free = Arc::clone(&shared.places).acquire_owned();
        let free = tokio::time::timeout(shared.wait, free);
        let waited = shared.server.handle.spawn(free).await;
        let Ok(Ok(Ok(permit))) = waited else {
            return Err(worker(format!(
                "no place of the server's {} was free within {} s; raise its capacity or env.wait_s",
                shared.described.max_episodes,
                shared.wait.as_secs_f64()
            )));
        };
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        let id = format!("{}-{number}", shared.prefix);
        // Dropping the place ends the episode, also one whose answer was lost.
        let mut place = Place {
            renewal: None,
            shared: Arc::clone(&shared),
            id: id.clone(),
            lost: Arc::default(),
            permit: Some(permit),
        };
        let body = json!({"episode": id, "task": self.task});
        let (remote, path) = (shared.server.remote.clone(), "/episodes");
        let asked = async move { remote.json(Method::POST, path, Some(&body)).await };
        let opened: OpenReply = flat(shared.server.handle.spawn(asked).await).map_err(worker)?;
        let (lease_s, lost) = (shared.described.lease_s, Arc::clone(&place.lost));
        let renewed = renew(shared.server.remote.clone(), id, lease_s, lost);
        place.renewal = Some(shared.server.handle.spawn(renewed).abort_handle());
        self.place = Some(place);
        self.started(opened)
    }

    /// The begin of the episode, from the answer of the server and its task. An episode without messages
    /// begins with the task's preamble and prompt; one without tools has those of the server.
    fn started(&mut self, opened: OpenReply) -> Result<ResetResult, EnvError> {
        if let Some(why) = opened.tools.as_deref().and_then(wrong_tools) {
            return Err(worker(format!("POST /episodes: {why}")));
        }
        let messages = opened.messages.unwrap_or_else(|| {
            let mut messages = self.task.preamble.clone();
            messages.push(Message::new(Role::User, self.task.prompt.clone()));
            messages
        });
        if messages.is_empty() {
            return Err(worker("POST /episodes: the list of messages is empty"));
        }
        self.said.messages.clone_from(&messages);
        Ok(ResetResult {
            messages,
            tools: opened
                .tools
                .map_or_else(|| self.shared.tools.clone(), specs),
            calls: CallNotation::Template,
            state_hash: state_hash(opened.state.as_deref()),
        })
    }

    /// One call with a separate id.
    ///
    /// A fault of the tool is a result that the model reads. A fault of the server itself, or a reward that
    /// is not finite, fails the episode.
    async fn call(&mut self, call: &Call) -> Result<CallReply, EnvError> {
        let Some(place) = &self.place else {
            return Err(EnvError::Order("step before reset or after the end"));
        };
        self.calls += 1;
        let asked = place
            .ask(&format!("/calls/c{}", self.calls), json!(call))
            .await;
        let called: CallReply = asked.map_err(|e| place.explained(&e))?;
        if let Some(fault) = called.error.as_ref().filter(|f| f.kind == FaultKind::Infra) {
            return Err(worker(cut(&fault.text, MAX_ERROR)));
        }
        if !is_reward(called.reward) {
            return Err(worker("the reward of a call is beyond 1e30"));
        }
        Ok(called)
    }

    /// Sends the calls of a turn in order, until one ends the episode.
    async fn act(&mut self, action: Action) -> Result<StepResult, EnvError> {
        if self.ended {
            return Err(EnvError::Order("step before reset or after the end"));
        }
        let answer = action.answer();
        self.said.messages.push(action.parted());
        self.said.output.clone_from(&answer);
        let (mut turn, mut state) = (Turn::default(), None);
        self.renewed = None;
        for call in &action.tool_calls {
            let request = Call {
                tool: Some(call.name.clone()),
                args: call.arguments.clone(),
                text: None,
            };
            let mut called = self.call(&request).await?;
            let renewed = called.renewed.take();
            let result = taken(called, &mut turn, &mut state);
            self.renew(renewed, &result);
            turn.called(call, result);
            if turn.done {
                break;
            }
        }
        turn.notation(&action);
        if action.tool_calls.is_empty() && action.call_error.is_none() {
            let request = Call {
                text: Some(answer),
                ..Call::default()
            };
            let mut called = self.call(&request).await?;
            let renewed = called.renewed.take();
            let result = taken(called, &mut turn, &mut state);
            self.renew(renewed, &result);
            turn.said(result);
        }
        self.counts.turn(&action, turn.errors);
        self.said.messages.extend_from_slice(&turn.messages);
        let mut step = turn.step(state_hash(state.as_deref()));
        if turn.done {
            self.ended = true;
            step = StepResult {
                observation: None,
                done: true,
                outcome: Some(self.outcome().await?),
                state_hash: None,
                ..step
            };
        }
        self.last = turn.messages;
        Ok(step)
    }

    /// Takes a context that begins anew; later calls of the turn add to it what they answered.
    fn renew(&mut self, renewed: Option<Vec<Message>>, result: &Result<String, CallError>) {
        match (renewed, &mut self.renewed) {
            (Some(messages), kept) => *kept = Some(messages),
            (None, Some(kept)) => {
                let text = match result {
                    Ok(seen) => seen.clone(),
                    Err(why) => format!("Error: {why}"),
                };
                kept.push(Message::new(Role::User, text));
            }
            (None, None) => {}
        }
    }

    /// The score by the server. A missing score leaves the episode unscored, with the reason.
    async fn outcome(&self) -> Result<Outcome, EnvError> {
        let Some(place) = &self.place else {
            return Err(EnvError::Order("score before reset or after the end"));
        };
        let scored = match place.ask("/score", json!(self.said)).await {
            Ok(scored) => score(scored),
            Err(e) => Err(Unscored::new(place.explained(&e).to_string())),
        };
        let mut outcome = scored.map_or_else(Unscored::into_outcome, Score::into_outcome);
        if !self.shared.tools.is_empty() {
            self.counts.add_to(&mut outcome);
        }
        Ok(outcome)
    }
}

/// Takes the answer to one call into the turn. The result is the observation, or an error of the model.
fn taken(
    called: CallReply,
    turn: &mut Turn,
    state: &mut Option<String>,
) -> Result<String, CallError> {
    turn.reward += called.reward;
    turn.done |= called.done;
    *state = called.state.or(state.take());
    match called.error {
        Some(fault) => Err(CallError::Failed(cut(&fault.text, MAX_TEXT))),
        None => Ok(observation(&called.content)),
    }
}

/// The score of an answer. `null` and a missing `reward` are not a score.
fn score(scored: ScoreReply) -> Result<Score, Unscored> {
    let reason = |why: &str| Unscored::new(scored.reason.clone().unwrap_or_else(|| why.into()));
    if scored.status == Status::Unscored {
        return Err(reason("the server gave no score and no reason"));
    }
    let Some(Some(value)) = scored.rewards.get("reward") else {
        return Err(reason("the server's answer has no number as `reward`"));
    };
    let parts = scored.rewards.iter().filter(|(name, _)| *name != "reward");
    let parts = parts.filter_map(|(name, value)| Some((cut(name, 100), (*value)?)));
    Score::with_parts(*value, parts.take(100).collect())
}

impl Env for HttpEnv {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        Box::pin(self.open())
    }

    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        Box::pin(self.act(action))
    }

    /// One message for each call of the last turn. `observation` is the last one.
    fn format_observation(&self, _observation: &Observation) -> Vec<Message> {
        self.last.clone()
    }

    fn renewed(&self) -> Option<Vec<Message>> {
        self.renewed.clone()
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        Box::pin(self.outcome())
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async move {
            let Some(mut place) = self.place.take() else {
                return Ok(());
            };
            self.ended = true;
            let permit = place.permit.take();
            let (shared, id) = (Arc::clone(&place.shared), place.id.clone());
            let limit = shared.server.remote.timeout;
            let ended = Place::end(shared, id, limit);
            let ended = self.shared.server.handle.spawn(ended).await;
            drop(permit);
            flat(ended).map_err(worker)
        })
    }
}
