//! Hosts of a provider: what each reports, and a thread that asks them.

use crate::client::api::Api;
use crate::client::choice::{Choice, Offer, Rules};
use crate::status::{LevelOffer, Status};
use sinew_http::{ClientOptions, HttpError, Method, blocking};
use sinew_sandbox::Protection;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time for an answer to a question.
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// Maximum bytes of an answer.
const MAX_ANSWER: u64 = 1 << 20;
/// Questions on their way at the same time.
const QUESTIONS: usize = 16;
/// Longest pause of the thread: the broken requests of others are looked at so often.
const LOOK: Duration = Duration::from_millis(250);
/// Time between two questions to the registry of roles.
const FIND_EVERY: Duration = Duration::from_secs(5);
/// Time after the registry named a host last in which it stays a member, if it answers: an owner that starts
/// again knows no roles until they have registered, while their sandboxes work.
const UNLISTED: Duration = Duration::from_secs(30);
/// Maximum number of hosts; further ones of the registry are left out.
const MAX_HOSTS: usize = 1024;

/// Gives the addresses of the sandbox servers that are there now, or the reason why it cannot.
pub type Finder = Arc<dyn Fn() -> Result<Vec<String>, String> + Send + Sync>;

/// Reason why a host did not report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoReport {
    /// It does not answer now.
    Away(String),
    /// It answers, and will not do.
    Wrong(String),
}

impl NoReport {
    /// The reason, in words.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Away(why) | Self::Wrong(why) => why,
        }
    }
}

/// Request to all hosts.
#[derive(Clone)]
pub(crate) struct Wanted {
    /// Token of an owner, the same one at all hosts.
    pub(crate) token: String,
    /// Level of the sandboxes, by its name.
    pub(crate) level: &'static str,
    /// Name of an image of the hosts; `None`: the root that they have without one.
    pub(crate) image: Option<String>,
}

/// A host.
struct Host {
    api: Api,
    /// Broken requests that were counted already.
    failures: u64,
    /// Protections at the level, by the last report.
    protections: Option<Vec<Protection>>,
    /// Reason why it gets no sandbox.
    why_not: Option<String>,
    /// It was found by the registry, and goes with it.
    found: bool,
    /// Moment at which the registry named it last.
    listed_at: Duration,
}

/// State of all hosts.
struct State {
    choice: Choice,
    hosts: Vec<Host>,
    /// Moment of the next question to the registry.
    find_at: Duration,
    /// Reason why the registry gave no addresses.
    not_found: Option<String>,
    /// The provider was dropped.
    ended: bool,
}

/// Hosts of a provider.
pub(crate) struct Hosts {
    wanted: Wanted,
    finder: Option<Finder>,
    began: Instant,
    state: Mutex<State>,
    /// Wakes the thread.
    wake: Condvar,
}

impl std::fmt::Debug for Hosts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.lock();
        let urls: Vec<&str> = state.hosts.iter().map(|h| h.api.url()).collect();
        f.debug_struct("Hosts")
            .field("urls", &urls)
            .finish_non_exhaustive()
    }
}

impl Hosts {
    /// Hosts by their addresses. Nothing is asked yet.
    ///
    /// # Errors
    /// If an address is none.
    pub(crate) fn new(
        urls: &[String],
        wanted: Wanted,
        finder: Option<Finder>,
    ) -> Result<Self, HttpError> {
        let hosts = Self {
            wanted,
            finder,
            began: Instant::now(),
            state: Mutex::new(State {
                choice: Choice::new(Rules::default()),
                hosts: Vec::new(),
                find_at: Duration::ZERO,
                not_found: None,
                ended: false,
            }),
            wake: Condvar::new(),
        };
        for url in urls {
            hosts.add(url, false)?;
        }
        Ok(hosts)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn add(&self, url: &str, found: bool) -> Result<(), HttpError> {
        let Wanted {
            token,
            level,
            image,
        } = &self.wanted;
        let api = Api::new(url, token, level, image.clone())?;
        let mut state = self.lock();
        state.choice.add(self.now());
        state.hosts.push(Host {
            api,
            failures: 0,
            protections: None,
            why_not: None,
            found,
            listed_at: self.now(),
        });
        Ok(())
    }

    /// The host for the next sandbox, with its place; `None`: none answers and fits now.
    pub(crate) fn choose(&self) -> Option<(usize, Api)> {
        let mut state = self.lock();
        suspect(&mut state, self.now());
        let at = state.choice.choose()?;
        Some((at, state.hosts[at].api.clone()))
    }

    /// The host with this address.
    pub(crate) fn at(&self, url: &str) -> Option<Api> {
        let state = self.lock();
        let host = state.hosts.iter().find(|host| host.api.url() == url);
        host.map(|host| host.api.clone())
    }

    /// A sandbox was not made on a host. `full`: it has no room.
    pub(crate) fn not_made(&self, at: usize, full: bool) {
        let mut state = self.lock();
        state.choice.not_made(at, full);
        suspect(&mut state, self.now());
        drop(state);
        self.wake.notify_all();
    }

    /// Protections that all hosts enforce that have reported; of one that is not enforced everywhere, how it
    /// is at the first host without it.
    pub(crate) fn protections(&self) -> Vec<Protection> {
        let state = self.lock();
        let mut all: Vec<Protection> = Vec::new();
        for host in &state.hosts {
            for own in host.protections.iter().flatten() {
                match all.iter_mut().find(|p| p.name == own.name) {
                    Some(known) if known.enforced && !own.enforced => *known = own.clone(),
                    Some(_) => {}
                    None => all.push(own.clone()),
                }
            }
        }
        all
    }

    /// Reasons why hosts get no sandboxes now, with their addresses, and why the registry names none.
    pub(crate) fn refusals(&self) -> Vec<String> {
        let state = self.lock();
        let reasons = state.hosts.iter().filter_map(|h| {
            let why = h.why_not.as_ref()?;
            Some(format!("{:?}: {why}", h.api.url()))
        });
        let registry = state.not_found.iter();
        reasons
            .chain(registry.map(|why| format!("those of sandbox.owner: {why}")))
            .collect()
    }

    /// Number of hosts that can get sandboxes now.
    pub(crate) fn open(&self) -> usize {
        self.lock().choice.open()
    }

    /// Ends the thread that asks.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.wake.notify_all();
    }

    /// Asks the hosts that are due, once. Returns the reasons of those that did not report.
    pub(crate) fn ask(&self, client: &blocking::Client) -> Vec<(String, NoReport)> {
        self.find();
        let due: Vec<(usize, Api)> = {
            let mut state = self.lock();
            suspect(&mut state, self.now());
            let due = state.choice.due(self.now());
            due.into_iter()
                .map(|at| (at, state.hosts[at].api.clone()))
                .collect()
        };
        let mut refused = Vec::new();
        for some in due.chunks(QUESTIONS) {
            let reports = std::thread::scope(|threads| {
                let asked: Vec<_> = some
                    .iter()
                    .map(|(_, api)| threads.spawn(move || report(client, api.url(), &self.wanted)))
                    .collect();
                let ended = asked.into_iter().map(|thread| {
                    let failed = |_| Err(NoReport::Away("the request failed".into()));
                    thread.join().unwrap_or_else(failed)
                });
                ended.collect::<Vec<_>>()
            });
            for ((at, api), report) in some.iter().zip(reports) {
                if let Err(why) = &report {
                    refused.push((api.url().to_owned(), why.clone()));
                }
                self.reported(*at, report);
            }
        }
        refused
    }

    /// Takes a report of a host, or its absence.
    fn reported(&self, at: usize, report: Result<(Offer, Vec<Protection>), NoReport>) {
        let now = self.now();
        let mut state = self.lock();
        let State { choice, hosts, .. } = &mut *state;
        let host = &mut hosts[at];
        host.failures = host.api.failures();
        match report {
            Ok((offer, protections)) => {
                choice.answered(at, offer, now);
                host.protections = Some(protections);
                if host.why_not.take().is_some() {
                    tracing::info!(url = host.api.url(), "a sandbox server answers again");
                }
            }
            Err(NoReport::Away(why)) => {
                if host.why_not.is_none() {
                    tracing::warn!(url = host.api.url(), %why, "a sandbox server does not answer");
                }
                host.why_not = Some(why);
                if choice.silent(at, now) {
                    host.api.give_up();
                }
            }
            Err(NoReport::Wrong(why)) => {
                host.why_not = Some(why);
                let nothing = Offer {
                    free: 0,
                    limit: 0,
                    fits: false,
                    draining: false,
                    price_per_hour: None,
                };
                choice.answered(at, nothing, now);
            }
        }
    }

    /// Asks the registry of roles, if its time has come. Hosts that it has no longer are soon no members;
    /// where it does not answer, nothing changes.
    fn find(&self) {
        let Some(finder) = &self.finder else { return };
        let now = self.now();
        {
            let mut state = self.lock();
            if state.find_at > now {
                return;
            }
            state.find_at = now + FIND_EVERY;
        }
        let mut urls = match finder() {
            Ok(urls) => {
                self.lock().not_found = None;
                urls
            }
            Err(why) => {
                let before = self.lock().not_found.replace(why.clone());
                if before.is_none() {
                    tracing::warn!(%why, "the registry of sandbox servers does not answer");
                }
                return;
            }
        };
        urls.truncate(MAX_HOSTS);
        let place = |url: &str| url.trim_end_matches('/').to_owned();
        let mut urls: Vec<String> = urls.iter().map(|url| place(url)).collect();
        {
            let mut state = self.lock();
            let State { choice, hosts, .. } = &mut *state;
            for (at, host) in hosts.iter_mut().enumerate() {
                if urls.iter().any(|url| url == host.api.url()) {
                    host.listed_at = now;
                }
                if host.found {
                    let listed = now.saturating_sub(host.listed_at) < UNLISTED;
                    choice.set_member(at, listed, now);
                }
                urls.retain(|url| url != host.api.url());
            }
            urls.truncate(MAX_HOSTS.saturating_sub(hosts.len()));
        }
        for url in urls {
            // An address that is none is the registry's mistake, and of one host only.
            drop(self.add(&url, true));
        }
    }

    /// Asks hosts when they are due, until the provider is dropped.
    pub(crate) fn watch(&self, client: &blocking::Client) {
        loop {
            let mut state = self.lock();
            suspect(&mut state, self.now());
            let next = state.choice.next_question();
            let next = match self.finder {
                Some(_) => Some(next.map_or(state.find_at, |at| at.min(state.find_at))),
                None => next,
            };
            let pause = next.map_or(LOOK, |at| at.saturating_sub(self.now()).min(LOOK));
            if !pause.is_zero() && !state.ended {
                let waited = self.wake.wait_timeout(state, pause);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.ended {
                return;
            }
            drop(state);
            self.ask(client);
        }
    }
}

/// Puts hosts aside whose requests broke since the last look.
fn suspect(state: &mut State, now: Duration) {
    for (at, host) in state.hosts.iter_mut().enumerate() {
        let failures = host.api.failures();
        if failures != host.failures {
            host.failures = failures;
            state.choice.suspect(at, now);
            tracing::warn!(
                url = host.api.url(),
                "a request to a sandbox server broke: it is asked at once"
            );
        }
    }
}

/// The client of the thread that asks.
///
/// # Errors
/// If the system lacks what a client needs.
pub(crate) fn questions() -> Result<blocking::Client, HttpError> {
    blocking::Client::new(ClientOptions {
        connect: Some(ANSWER_TIME),
        stall: Some(ANSWER_TIME),
        deadline: Some(ANSWER_TIME),
        body_max: MAX_ANSWER,
        redirects: 10,
        proxy: true,
        ..ClientOptions::default()
    })
}

/// Asks a host for its state. Blocks.
fn report(
    client: &blocking::Client,
    url: &str,
    wanted: &Wanted,
) -> Result<(Offer, Vec<Protection>), NoReport> {
    let hint = "\n  hint: is `sinew serve --sandbox-only` running there?";
    let request = client.request(Method::GET, &format!("{url}/v1/status"));
    let answer = client.ask(request.bearer_auth(&wanted.token));
    let answer = answer.map_err(|e| NoReport::Away(format!("{e}{hint}")))?;
    let status = answer.status;
    if status.as_u16() == 401 {
        let why = "it refuses the token; set the variable that sandbox.server_key_env names";
        return Err(NoReport::Wrong(why.into()));
    }
    let wrong = |why: String| {
        // A server that starts or ends, or what stands in front of it.
        if status.is_server_error() {
            NoReport::Away(why)
        } else {
            NoReport::Wrong(why)
        }
    };
    let state: Status = serde_json::from_slice(&answer.body).map_err(|_| {
        wrong(format!(
            "it answered {status}, but not as a sandbox server{hint}"
        ))
    })?;
    let price = state.price_per_hour.filter(|p| p.is_finite() && *p > 0.0);
    let offer = Offer {
        free: state.free,
        limit: state.limit,
        fits: true,
        draining: state.draining,
        price_per_hour: price,
    };
    let level = fitting(state, wanted).map_err(NoReport::Wrong)?;
    Ok((offer, level.protections))
}

/// The host's offer of the level that is wanted.
///
/// # Errors
/// Fails with the host's levels or images, if it lacks this one.
fn fitting(state: Status, wanted: &Wanted) -> Result<LevelOffer, String> {
    if let Some(name) = &wanted.image
        && !state.images.contains(name)
    {
        let allowed = if state.images.is_empty() {
            "nothing, it offers none (--named-image)".into()
        } else {
            state.images.join(", ")
        };
        return Err(format!(
            "it has no image {name:?}; allowed for sandbox.image: {allowed}"
        ));
    }
    let level = wanted.level;
    let names: Vec<&str> = state.levels.iter().map(|o| o.level.as_str()).collect();
    let names = names.join(", ");
    let offer = state.levels.into_iter().find(|o| o.level == level);
    offer.ok_or_else(|| format!("it has no level {level:?}; allowed for sandbox.level: {names}"))
}
