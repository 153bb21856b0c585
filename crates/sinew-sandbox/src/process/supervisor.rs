//! Keeps a spawner running: a dead one is started again, at most a few times in a while, so that a fault that
//! kills each one does not take the host's time for ever.
//!
//! A thread waits for the end of each spawner. Sandboxes and snapshots of one that died are lost;
//! callers that want a new sandbox wait for the next spawner, or get the reason why there is none.

use super::client::{Client, unavailable};
use crate::port::SandboxError;
use sinew_jail::protocol::Config;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::Child;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Starts after a death within [`WINDOW`]; then it waits until the oldest is longer ago.
const MAX_STARTS: usize = 8;
const WINDOW: Duration = Duration::from_secs(60);
/// Pause before the start after one that failed.
const FAILED_PAUSE: Duration = Duration::from_secs(1);

/// State of the spawner.
#[derive(Clone, Debug)]
enum State {
    Running(Arc<Client>),
    /// The last one died, the next one is being started.
    Starting,
    /// There is none for now, and why.
    Down(String),
}

#[derive(Debug)]
struct Shared {
    program: PathBuf,
    config: Config,
    state: watch::Sender<State>,
    /// The last one that ran, dead or alive.
    last: Mutex<Arc<Client>>,
    stopped: Mutex<bool>,
    stop: Condvar,
}

/// A spawner that is started again when it dies. Dropping it ends the spawner.
#[derive(Debug)]
pub(super) struct Supervisor {
    shared: Arc<Shared>,
    state: watch::Receiver<State>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Supervisor {
    /// Starts the first one.
    pub(super) fn start(program: PathBuf, config: Config) -> Result<Self, SandboxError> {
        let (client, child) = Client::start(&program, &config, 0)?;
        let (sender, state) = watch::channel(State::Running(Arc::clone(&client)));
        let shared = Arc::new(Shared {
            program,
            config,
            state: sender,
            last: Mutex::new(Arc::clone(&client)),
            stopped: Mutex::new(false),
            stop: Condvar::new(),
        });
        let kept = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("sinew-sandbox".into())
            .spawn(move || kept.keep_running(client, child))
            .map_err(|e| SandboxError::io("start a thread", e))?;
        Ok(Self { shared, state })
    }

    /// The spawner that runs; waits while one is being started.
    pub(super) async fn client(&self) -> Result<Arc<Client>, SandboxError> {
        let mut state = self.state.clone();
        let settled = |state: &State| match state {
            // Its death is noticed a moment after it.
            State::Running(client) => !client.is_dead(),
            State::Starting => false,
            State::Down(_) => true,
        };
        match state.wait_for(settled).await.as_deref() {
            Ok(State::Running(client)) => Ok(Arc::clone(client)),
            Ok(State::Down(why)) => Err(unavailable(why.clone())),
            Ok(State::Starting) | Err(_) => Err(super::client::gone()),
        }
    }

    /// The one that runs, else the last that did.
    pub(super) fn last(&self) -> Arc<Client> {
        Arc::clone(&lock(&self.shared.last))
    }

    /// Whether one runs now, else why not.
    pub(super) fn health(&self) -> Result<(), SandboxError> {
        match &*self.state.borrow() {
            State::Running(client) if !client.is_dead() => Ok(()),
            State::Running(_) | State::Starting => {
                let again = "the process that starts sandboxes died and is being started again";
                Err(unavailable(again))
            }
            State::Down(why) => Err(unavailable(why.clone())),
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        *lock(&self.shared.stopped) = true;
        self.shared.stop.notify_all();
        self.last().stop();
    }
}

impl Shared {
    fn keep_running(&self, mut client: Arc<Client>, mut child: Child) {
        let (mut starts, mut epoch) = (VecDeque::new(), 0);
        loop {
            client.read_replies(child);
            drop(client);
            if *lock(&self.stopped) {
                return;
            }
            epoch += 1;
            match self.next(&mut starts, epoch) {
                Some(next) => (client, child) = next,
                None => return,
            }
        }
    }

    /// The next one that runs; `None` if none is wanted any more.
    fn next(&self, starts: &mut VecDeque<Instant>, epoch: u64) -> Option<(Arc<Client>, Child)> {
        self.state.send_replace(State::Starting);
        loop {
            while starts.front().is_some_and(|s| s.elapsed() >= WINDOW) {
                starts.pop_front();
            }
            if starts.len() >= MAX_STARTS
                && let Some(oldest) = starts.front()
            {
                let wait = WINDOW.saturating_sub(oldest.elapsed());
                self.state.send_replace(State::Down(format!(
                    "the process that starts sandboxes died {MAX_STARTS} times within {} s; it is \
                     started again in {} s",
                    WINDOW.as_secs(),
                    wait.as_secs() + 1
                )));
                if self.stopped_within(wait) {
                    return None;
                }
                self.state.send_replace(State::Starting);
                continue;
            }
            starts.push_back(Instant::now());
            match Client::start(&self.program, &self.config, epoch) {
                Ok((client, child)) => {
                    *lock(&self.last) = Arc::clone(&client);
                    if *lock(&self.stopped) {
                        // It was stopped before this one was there.
                        client.stop();
                    }
                    self.state.send_replace(State::Running(Arc::clone(&client)));
                    return Some((client, child));
                }
                Err(why) => {
                    self.state.send_replace(State::Down(format!(
                        "the process that starts sandboxes died and could not be started again: \
                         {why}; this is tried again"
                    )));
                    if self.stopped_within(FAILED_PAUSE) {
                        return None;
                    }
                }
            }
        }
    }

    /// Waits so long, or until it is stopped; whether it was.
    fn stopped_within(&self, wait: Duration) -> bool {
        let waited = self
            .stop
            .wait_timeout_while(lock(&self.stopped), wait, |stopped| !*stopped);
        waited.map_or(true, |(stopped, _)| *stopped)
    }
}
