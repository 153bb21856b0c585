//! A pool of browsers. An episode gets a page in a context of its own, which is ended with it.
//!
//! Browsers are started when they are needed, asked whether they are healthy before they get an episode,
//! replaced when they are not, and retired after a number of episodes. Each keeps a few empty pages ready. A
//! context that cannot be ended makes its browser dirty: it is killed, and its other episodes fail.

use super::page::{Page, PageFault};
use super::process::Browser;
use super::protocol::CallFault;
use super::slots::{BrowserId, Place, SlotLimits, Slots};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// Attempts to get a healthy browser for one episode.
const ATTEMPTS: usize = 3;

/// Limits of a pool.
#[derive(Clone, Debug)]
pub(crate) struct PoolConfig {
    /// The browser's program.
    pub(crate) program: PathBuf,
    /// Browsers at once.
    pub(crate) browsers: usize,
    /// Episodes at once in a browser.
    pub(crate) pages: usize,
    /// Episodes after which a browser is retired.
    pub(crate) episodes: u64,
    /// Empty pages that a browser keeps ready.
    pub(crate) warm: usize,
    /// Deadline of one call, and of the start of a browser.
    pub(crate) limit: Duration,
    /// Deadline of waiting for a place.
    pub(crate) wait: Duration,
}

/// A browser that runs. Dropping it kills it, whatever its pages are doing.
struct Running {
    /// Shared with its pages.
    browser: Arc<Browser>,
    /// Pages that no episode has had.
    warm: Vec<Page>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.browser.kill();
    }
}

/// What changes.
struct State {
    /// Who may have which browser.
    slots: Slots,
    /// Browsers that answer.
    running: BTreeMap<BrowserId, Running>,
}

/// Browsers for episodes. Dropping it kills them.
pub(crate) struct Pool {
    /// Limits.
    config: PoolConfig,
    /// Never locked across a wait.
    state: Mutex<State>,
    /// A place was given back, or a browser is ready.
    changed: Notify,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// A page for one episode. Give it back with [`Lease::end`]; one that is dropped costs its browser.
pub(crate) struct Lease {
    /// Where it goes back to.
    pool: Arc<Pool>,
    /// Its browser.
    id: BrowserId,
    /// Until it is ended.
    page: Option<Page>,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease")
            .field("browser", &self.id)
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool without browsers.
    pub(crate) fn new(config: PoolConfig) -> Arc<Self> {
        let slots = Slots::new(SlotLimits {
            browsers: config.browsers,
            pages: config.pages,
            episodes: config.episodes,
        });
        Arc::new(Self {
            config,
            state: Mutex::new(State {
                slots,
                running: BTreeMap::new(),
            }),
            changed: Notify::new(),
        })
    }

    /// The state, whatever a panic left of it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An empty page that no episode has used, in a browser that answers.
    ///
    /// # Errors
    /// If there is no place in time, or no healthy browser after three attempts.
    pub(crate) async fn page(self: &Arc<Self>) -> Result<Lease, String> {
        let mut last = String::new();
        for _ in 0..ATTEMPTS {
            let id = tokio::time::timeout(self.config.wait, self.place()).await;
            let id = id.map_err(|_| {
                let (all, wait) = (self.config.browsers * self.config.pages, self.config.wait.as_secs_f64());
                format!("all {all} pages are in use for {wait} s; raise env.browsers or env.pages_per_browser")
            })??;
            match self.ready(id).await {
                Ok(page) => {
                    let pool = Arc::clone(self);
                    let page = Some(page);
                    return Ok(Lease { pool, id, page });
                }
                Err(fault) => {
                    tracing::warn!(browser = id, %fault, "a browser is not healthy and is replaced");
                    last = fault.to_string();
                    self.kill(id);
                }
            }
        }
        Err(format!(
            "no healthy browser after {ATTEMPTS} attempts: {last}"
        ))
    }

    /// Takes a place, and starts a browser where there is room for one.
    async fn place(self: &Arc<Self>) -> Result<BrowserId, String> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Whatever changes from here on is seen.
            changed.as_mut().enable();
            let place = self.state().slots.place();
            match place {
                Place::In(id) => return Ok(id),
                Place::Wait => changed.await,
                Place::Start(id) => {
                    let started = Browser::start(&self.config.program, self.config.limit).await;
                    let mut state = self.state();
                    match started {
                        Ok(browser) => {
                            tracing::debug!(
                                browser = id,
                                process = browser.process_id(),
                                "a browser started"
                            );
                            let browser = Arc::new(browser);
                            let warm = Vec::new();
                            state.running.insert(id, Running { browser, warm });
                            state.slots.started(id);
                        }
                        Err(why) => {
                            state.slots.gone(id);
                            self.changed.notify_waiters();
                            return Err(why);
                        }
                    }
                    drop(state);
                    self.changed.notify_waiters();
                }
            }
        }
    }

    /// A page of a browser: one that is ready, else a new one. It checks the browser's health in any case.
    async fn ready(self: &Arc<Self>, id: BrowserId) -> Result<Page, CallFault> {
        let (browser, warm) = {
            let mut state = self.state();
            let running = state.running.get_mut(&id).ok_or(CallFault::Gone)?;
            (Arc::clone(&running.browser), running.warm.pop())
        };
        let page = match warm {
            Some(page) => {
                browser.answers(self.config.limit).await?;
                page
            }
            None => Page::new(Arc::clone(&browser), self.config.limit).await?,
        };
        if self.config.warm > 0 {
            tokio::spawn(warm_up(Arc::downgrade(self), id, browser));
        }
        Ok(page)
    }

    /// Keeps an empty page for a later episode, or returns it.
    fn keep(&self, id: BrowserId, page: Page) -> Option<Page> {
        let mut state = self.state();
        match state.running.get_mut(&id) {
            Some(running) if running.warm.len() < self.config.warm => {
                running.warm.push(page);
                None
            }
            _ => Some(page),
        }
    }

    /// Ends a browser with all that it runs.
    fn kill(&self, id: BrowserId) {
        let mut state = self.state();
        state.slots.gone(id);
        let killed = state.running.remove(&id);
        drop(state);
        drop(killed);
        self.changed.notify_waiters();
    }

    /// Frees a place; ends the browser where it was the last of a retired one.
    fn give_back(&self, id: BrowserId) {
        let mut state = self.state();
        let over = state.slots.given_back(id);
        let retired = over.then(|| state.running.remove(&id));
        drop(state);
        drop(retired);
        self.changed.notify_waiters();
    }
}

/// Makes one page that waits for an episode, unless there are enough.
async fn warm_up(pool: std::sync::Weak<Pool>, id: BrowserId, browser: Arc<Browser>) {
    let Some(strong) = pool.upgrade() else {
        return;
    };
    let (limit, warm) = (strong.config.limit, strong.config.warm);
    let enough = strong
        .state()
        .running
        .get(&id)
        .is_none_or(|r| r.warm.len() >= warm);
    drop(strong);
    if enough {
        return;
    }
    let Ok(page) = Page::new(browser, limit).await else {
        return;
    };
    let Some(strong) = pool.upgrade() else {
        return;
    };
    if let Some(page) = strong.keep(id, page) {
        let _ = page.close().await;
    }
}

impl Lease {
    /// The page.
    ///
    /// # Errors
    /// If it was given back.
    pub(crate) fn page(&mut self) -> Result<&mut Page, PageFault> {
        self.page
            .as_mut()
            .ok_or_else(|| PageFault::Browser("the page was given back".into()))
    }

    /// The first process of its browser.
    #[cfg(test)]
    pub(super) fn process(&self) -> Option<u32> {
        let state = self.pool.state();
        state
            .running
            .get(&self.id)
            .and_then(|r| r.browser.process_id())
    }

    /// Ends the page with its context and gives its place back.
    pub(crate) async fn end(mut self) {
        let Some(page) = self.page.take() else {
            return;
        };
        match page.close().await {
            Ok(()) => self.pool.give_back(self.id),
            Err(fault) => {
                tracing::warn!(browser = self.id, %fault, "a page could not be ended; its browser is killed");
                self.pool.kill(self.id);
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.page.take().is_some() {
            self.pool.kill(self.id);
        }
    }
}
