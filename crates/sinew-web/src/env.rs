//! Episodes on web pages: the tools of the model, and the factory.

use crate::browser::{Lease, PageFault, Pool, PoolConfig, SharedSite};
use crate::keys::{GIVES, Web};
use crate::miniwob;
use crate::plan::{self, Step};
use crate::runtime::{OwnRuntime, block_on};
use crate::shop;
use crate::tree::Tree;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_env::tools::{Answer, ToolEnv, ToolWorld, arguments, no_such_tool, tool};
use sinew_env::{Action, Capabilities, Env, EnvError, EnvFactory, EnvFuture, hash64};
use sinew_types::{Content, Message, Outcome, Role, Task, TaskId, ToolCall, ToolSpec};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;

/// Changes if equal actions may lead elsewhere.
const VERSION: &str = "1";
/// Names of the tools.
const TOOLS: [&str; 7] = ["click", "type", "select", "scroll", "back", "open", "done"];
/// System prompt.
const RULES: &str = "You use a web browser by calling tools. Elements have numbers, such as [3]; they are those \
     of the page that you saw last. Call one tool at a time.";

/// The tools as the model sees them.
fn tools() -> Vec<ToolSpec> {
    let element = json!({ "type": "integer", "description": "number of the element" });
    let text = json!({ "type": "string" });
    let enter = json!({ "type": "boolean", "description": "press Enter after it" });
    vec![
        tool(
            "click",
            "Click an element.",
            json!({ "element": element }),
            &["element"],
        ),
        tool(
            "type",
            "Put a text into a field, in place of what is there.",
            json!({ "element": element, "text": text, "enter": enter }),
            &["element", "text"],
        ),
        tool(
            "select",
            "Choose an option of a list.",
            json!({ "element": element, "option": text }),
            &["element", "option"],
        ),
        tool(
            "scroll",
            "Scroll the page.",
            json!({ "direction": { "enum": ["up", "down"] } }),
            &["direction"],
        ),
        tool("back", "Go back to the page before.", json!({}), &[]),
        tool(
            "open",
            "Open a path of this site.",
            json!({ "path": text }),
            &["path"],
        ),
        tool("done", "End the task.", json!({}), &[]),
    ]
}

/// What a model asks for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Click {
    /// Number of an element.
    element: i64,
}

/// Arguments of `type`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Type {
    /// Number of an element.
    element: i64,
    /// What is typed.
    text: String,
    /// Press Enter after it.
    #[serde(default)]
    enter: bool,
}

/// Arguments of `select`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Select {
    /// Number of an element.
    element: i64,
    /// Text of an option.
    option: String,
}

/// Arguments of `scroll`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Scroll {
    /// Where to.
    direction: Direction,
}

/// Where a page scrolls to.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Direction {
    Up,
    Down,
}

/// Arguments of `open`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Open {
    /// A path of the site.
    path: String,
}

/// No arguments.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// Settings of every episode.
#[derive(Clone, Debug)]
struct Settings {
    /// Time for a page's scripts after an action.
    settle: Duration,
    /// Characters of a page that are shown.
    max_chars: usize,
    /// Calls of an episode.
    max_calls: u32,
    /// Folder for screenshots; empty: none.
    screenshots: PathBuf,
    /// Folder of MiniWoB++.
    pages: PathBuf,
}

/// What the episodes of a factory share.
struct Shared {
    /// Settings of every episode.
    settings: Settings,
    /// Browsers of the episodes.
    pool: Arc<Pool>,
    /// For gold policies, which play in a browser of their own: an episode must not wait for its own place.
    gold_pool: Arc<Pool>,
    /// Actions of the gold policy for the last task that was asked for.
    gold: Mutex<Option<(TaskId, u64, Vec<Action>)>>,
    /// Episodes at once.
    places: usize,
    /// Where browsers are driven.
    runtime: OwnRuntime,
}

/// Factory of episodes in Chromium. Browsers start with the first episode, and end with the factory.
#[derive(Clone)]
pub struct WebFactory {
    /// Pool, settings and runtime.
    shared: Arc<Shared>,
}

impl std::fmt::Debug for WebFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WebFactory")
            .field("pool", &self.shared.pool)
            .finish_non_exhaustive()
    }
}

fn failed(why: impl std::fmt::Display) -> EnvError {
    EnvError::Worker(why.to_string())
}

/// The program of a name, in PATH unless it has a slash.
fn program(name: &str) -> Result<PathBuf, EnvError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = match name.contains('/') {
        true => Some(PathBuf::from(name)).filter(|p| p.is_file()),
        false => std::env::split_paths(&path)
            .map(|dir| dir.join(name))
            .find(|p| p.is_file()),
    };
    found.ok_or_else(|| EnvError::Config {
        field: "browser",
        value: format!("{name:?}"),
        allowed:
            "a program that is there; Debian: apt-get install --no-install-recommends chromium"
                .into(),
    })
}

impl WebFactory {
    /// Prepares a pool of browsers. None is started yet.
    ///
    /// # Errors
    /// [`EnvError::Config`] if the browser or the pages are missing.
    pub fn start(keys: &Web) -> Result<Self, EnvError> {
        let program = program(&keys.browser)?;
        if keys.tasks == crate::WebTasks::Miniwob && !keys.pages.join("core/core.js").is_file() {
            return Err(EnvError::Config {
                field: "pages",
                value: format!("{:?}", keys.pages),
                allowed: "the folder `miniwob/html` of the package: pip download --no-deps miniwob==1.1.0, \
                          then unzip it"
                    .into(),
            });
        }
        if !keys.screenshots.as_os_str().is_empty() {
            std::fs::create_dir_all(&keys.screenshots).map_err(|e| EnvError::Config {
                field: "screenshots",
                value: format!("{:?}", keys.screenshots),
                allowed: format!("a folder that can be written: {e}"),
            })?;
        }
        let limit = Duration::from_secs_f64(keys.timeout_s);
        let pool = |browsers, pages, warm| {
            Pool::new(PoolConfig {
                program: program.clone(),
                browsers,
                pages,
                episodes: keys.episodes_per_browser,
                warm,
                limit,
                wait: limit * 10,
            })
        };
        Ok(Self {
            shared: Arc::new(Shared {
                settings: Settings {
                    settle: Duration::from_millis(keys.settle_ms),
                    max_chars: keys.max_chars,
                    max_calls: keys.max_calls,
                    screenshots: keys.screenshots.clone(),
                    pages: keys.pages.clone(),
                },
                pool: pool(keys.browsers, keys.pages_per_browser, keys.warm_pages),
                gold_pool: pool(1, 1, 0),
                gold: Mutex::new(None),
                places: keys.browsers * keys.pages_per_browser,
                runtime: OwnRuntime::start().map_err(failed)?,
            }),
        })
    }

    /// An episode of a task that has not begun.
    fn session(&self, task: &Task, pool: &Arc<Pool>) -> Result<Session, EnvError> {
        let site = match task.data["site"].as_str() {
            Some("shop") => shop::site(task)?,
            Some("miniwob") => miniwob::site(task, &self.shared.settings.pages)?,
            other => {
                return Err(EnvError::Task {
                    task: task.id.to_string(),
                    message: format!("data.site = {other:?}; allowed: shop, miniwob"),
                });
            }
        };
        Ok(Session {
            pool: Arc::clone(pool),
            settings: self.shared.settings.clone(),
            site: Arc::new(Mutex::new(site)),
            lease: None,
            tree: Tree::default(),
            done: false,
            over: false,
            refused: 0,
        })
    }
}

impl EnvFactory for WebFactory {
    fn name(&self) -> &str {
        "web"
    }

    fn version(&self) -> &str {
        VERSION
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        let session = self.session(task, &self.shared.pool)?;
        let world = WebWorld {
            shared: Arc::clone(&self.shared),
            site: Arc::clone(&session.site),
            session: Arc::new(tokio::sync::Mutex::new(session)),
            seen: Seen::default(),
        };
        Ok(Box::new(ToolEnv::new(
            world,
            self.shared.settings.max_calls,
        )))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: self.shared.places > 1,
            deterministic: true,
            gives: GIVES,
            places: Some(self.shared.places),
        }
    }

    /// It plays the task once, in a browser of its own, and blocks the thread meanwhile.
    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        let mut known = lock(&self.shared.gold);
        let is_known =
            |(id, seed, _): &(TaskId, u64, Vec<Action>)| *id == task.id && *seed == task.seed;
        if !known.as_ref().is_some_and(is_known) {
            let session = self.session(task, &self.shared.gold_pool)?;
            let played = block_on(self.shared.runtime.handle(), session.gold());
            let actions = played.ok_or_else(|| failed("the runtime of the browsers is gone"))??;
            *known = Some((task.id.clone(), task.seed, actions));
        }
        Ok(known
            .as_ref()
            .and_then(|(_, _, actions)| actions.get(turn).cloned()))
    }
}

/// The value, whatever a panic left of it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A page, its site and what was seen of it last.
struct Session {
    /// Browsers of the episodes.
    pool: Arc<Pool>,
    /// Settings of every episode.
    settings: Settings,
    /// What answers the page.
    site: SharedSite,
    /// Its page, while it has one.
    lease: Option<Lease>,
    /// The page as it was seen last.
    tree: Tree,
    /// The model said that it is done.
    done: bool,
    /// The page ended the episode.
    over: bool,
    /// Requests that were not for the site.
    refused: u32,
}

impl Session {
    /// Takes a page, loads the site and looks at it. Returns the task in words and the page.
    async fn begin(&mut self) -> Result<(String, String), EnvError> {
        if self.lease.is_some() {
            return Err(EnvError::Order("reset twice: an environment is used once"));
        }
        let lease = self.pool.page().await.map_err(failed)?;
        self.lease
            .insert(lease)
            .page()?
            .serve(Arc::clone(&self.site))
            .await?;
        self.settle().await?;
        let prepare = lock(&self.site).prepare();
        let prepared = match prepare {
            None => Value::Null,
            Some(script) => {
                let value = self.page()?.evaluate(&script).await.map_err(failed)?;
                self.settle().await?;
                value
            }
        };
        let words = lock(&self.site).begun(&prepared).map_err(failed)?;
        let shown = self.look().await?;
        Ok((words, shown))
    }

    /// The page, or that there is none.
    fn page(&mut self) -> Result<&mut crate::browser::Page, PageFault> {
        match &mut self.lease {
            Some(lease) => lease.page(),
            None => Err(PageFault::Browser("the episode has no page".into())),
        }
    }

    /// Waits until the page rests.
    async fn settle(&mut self) -> Result<(), PageFault> {
        let settle = self.settings.settle;
        self.page()?.settle(settle).await
    }

    /// Reads the page, and saves a screenshot of it where a folder for them is set.
    async fn look(&mut self) -> Result<String, EnvError> {
        let (tree, dialogs) = self.page()?.look().await?;
        let mut shown = tree.show(self.settings.max_chars);
        self.tree = tree;
        self.refused = self.page()?.refused();
        for dialog in dialogs {
            shown.push_str(&format!("\n(the page showed a dialog: {dialog})"));
        }
        if !self.settings.screenshots.as_os_str().is_empty() {
            let image = self.page()?.screenshot().await?;
            let hash = blake3::hash(&image).to_hex().to_string();
            let file = self.settings.screenshots.join(format!("{hash}.png"));
            let written = tokio::task::spawn_blocking(move || {
                let wrong = |e| failed(format!("env.screenshots: {}: {e}", file.display()));
                std::fs::write(&file, image).map_err(wrong)
            });
            written.await.map_err(failed)??;
            shown.push_str(&format!("\nscreenshot blake3:{hash}"));
        }
        Ok(shown)
    }

    /// Carries a call out. Returns the page after it.
    async fn call(&mut self, call: &ToolCall) -> Result<Answer, EnvError> {
        let acted = match self.act(call).await {
            Err(PageFault::Model(why)) => return Ok(Err(why)),
            acted => acted,
        };
        acted?;
        if self.done {
            return Ok(Ok(Content::new()));
        }
        match self.settle().await {
            Err(PageFault::Model(why)) => return Ok(Err(why)),
            settled => settled?,
        }
        let probe = lock(&self.site).probe();
        if let Some(probe) = probe {
            let value = self.page()?.evaluate(probe).await.map_err(failed)?;
            self.over = lock(&self.site).probed(&value);
        }
        if self.over {
            return Ok(Ok(Content::new()));
        }
        Ok(Ok(self.look().await?.into()))
    }

    /// Does what a call asks for.
    async fn act(&mut self, call: &ToolCall) -> Result<(), PageFault> {
        let model = PageFault::Model;
        match call.name.as_str() {
            "click" => {
                let Click { element } = arguments(call).map_err(model)?;
                let item = self.tree.element(element).map_err(model)?.clone();
                self.page()?.click(&item).await
            }
            "type" => {
                let Type {
                    element,
                    text,
                    enter,
                } = arguments(call).map_err(model)?;
                let item = self.tree.element(element).map_err(model)?.clone();
                self.page()?.write(&item, &text, enter).await
            }
            "select" => {
                let Select { element, option } = arguments(call).map_err(model)?;
                let item = self.tree.element(element).map_err(model)?.clone();
                self.page()?.choose(&item, &option).await
            }
            "scroll" => {
                let Scroll { direction } = arguments(call).map_err(model)?;
                self.page()?
                    .scroll(matches!(direction, Direction::Down))
                    .await
            }
            "back" => {
                let Nothing {} = arguments(call).map_err(model)?;
                self.page()?.back().await
            }
            "open" => {
                let Open { path } = arguments(call).map_err(model)?;
                self.page()?.open(&path).await
            }
            "done" => {
                let Nothing {} = arguments(call).map_err(model)?;
                self.done = true;
                Ok(())
            }
            _ => Err(PageFault::Model(no_such_tool(call, &TOOLS))),
        }
    }

    /// Gives the page back.
    async fn end(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.end().await;
        }
    }

    /// Plays the gold policy and returns its actions; none if the site has no gold policy.
    async fn gold(mut self) -> Result<Vec<Action>, EnvError> {
        let played = self.play_gold().await;
        self.end().await;
        played
    }

    /// Plays step by step, and keeps the actions.
    async fn play_gold(&mut self) -> Result<Vec<Action>, EnvError> {
        self.begin().await?;
        let steps: Vec<Step> = lock(&self.site).gold().unwrap_or_default();
        let mut actions = Vec::new();
        for step in steps {
            loop {
                let (action, is_step) = plan::resolve(&step, &self.tree).map_err(failed)?;
                for call in &action.tool_calls {
                    self.call(call).await?.map_err(failed)?;
                }
                actions.push(action);
                if is_step {
                    break;
                }
                if actions.len() > self.settings.max_calls as usize {
                    return Err(failed("the gold policy takes more than env.max_calls"));
                }
            }
        }
        Ok(actions)
    }
}

impl From<PageFault> for EnvError {
    fn from(fault: PageFault) -> Self {
        match fault {
            PageFault::Model(why) | PageFault::Browser(why) => Self::Worker(why),
        }
    }
}

/// What is known of an episode between its calls.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// The episode is over.
    ended: bool,
    /// The model said so.
    done: bool,
    /// Hash of site and page.
    state: Option<u64>,
    /// Requests of the page that were not for its site.
    refused: u32,
}

/// One episode. Its session lives on the runtime of the factory, so that a call whose caller stops waiting
/// leaves a page that can be ended.
struct WebWorld {
    /// Pool, settings and runtime.
    shared: Arc<Shared>,
    /// What answers the page.
    site: SharedSite,
    /// Its page, on the runtime.
    session: Arc<tokio::sync::Mutex<Session>>,
    /// What is known between calls.
    seen: Seen,
}

impl WebWorld {
    /// The runtime of the browsers.
    fn handle(&self) -> &Handle {
        self.shared.runtime.handle()
    }

    /// Hash of what the site keeps and the page shows.
    fn note(&mut self, session: &Session) {
        let site = lock(&session.site).state();
        let mut tree = session.tree.clone();
        // Chromium numbers the elements of all its pages.
        tree.items.iter_mut().for_each(|item| item.backend = 0);
        let page = format!("{site:?}{tree:?}");
        self.seen = Seen {
            ended: session.done || session.over,
            done: session.done,
            state: site.map(|_| hash64(page.as_bytes())),
            refused: session.refused,
        };
    }
}

impl ToolWorld for WebWorld {
    fn start(&mut self) -> EnvFuture<'_, (Vec<Message>, Vec<ToolSpec>)> {
        Box::pin(async move {
            let session = Arc::clone(&self.session);
            let begun = self
                .handle()
                .spawn(async move { session.lock().await.begin().await });
            let (words, page) = begun.await.map_err(failed)??;
            let session = Arc::clone(&self.session);
            self.note(&*session.lock().await);
            let task = Message::new(Role::User, format!("{words}\n\n{page}"));
            Ok((vec![Message::new(Role::System, RULES), task], tools()))
        })
    }

    fn call<'a>(&'a mut self, call: &'a ToolCall) -> EnvFuture<'a, Answer> {
        Box::pin(async move {
            let (session, asked) = (Arc::clone(&self.session), call.clone());
            let called = self
                .handle()
                .spawn(async move { session.lock().await.call(&asked).await });
            let answer = called.await.map_err(failed)??;
            let session = Arc::clone(&self.session);
            self.note(&*session.lock().await);
            Ok(answer)
        })
    }

    fn ended(&self) -> bool {
        self.seen.ended
    }

    fn state(&self) -> Option<u64> {
        self.seen.state
    }

    fn outcome(&self) -> Outcome {
        let mut outcome = lock(&self.site).outcome(self.seen.done);
        let refused = f64::from(self.seen.refused);
        outcome.metrics.insert("requests_refused".into(), refused);
        outcome
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async move {
            let session = Arc::clone(&self.session);
            let ended = self
                .handle()
                .spawn(async move { session.lock().await.end().await });
            ended.await.map_err(failed)
        })
    }
}
