//! A page in a browser context of its own: its site, what it shows, what is done to it.
//!
//! Every request of the page is paused and answered by its site; requests for other addresses are refused.
//! After an action the page may go on: [`Page::settle`] waits for scripts that are due and for a navigation
//! that began.

use super::process::Browser;
use super::protocol::{CallFault, Listener};
use crate::site::{Request, Site, fields, split_query};
use crate::tree::{Item, Tree};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// The origin of every site.
pub(crate) const ORIGIN: &str = "http://site.test";
/// Size of the window.
const WINDOW: (u32, u32) = (800, 600);
/// Requests of a page that wait for its site; further ones are refused.
const MAX_REQUESTS: usize = 256;
/// Bytes of a form at most.
const MAX_FORM: usize = 1 << 20;
/// Rounds of waiting for a page that navigates again and again.
const MAX_ROUNDS: usize = 8;
/// Texts of dialogs that are kept.
const MAX_DIALOGS: usize = 8;

/// The site of an episode, shared by its page and its environment.
pub(crate) type SharedSite = Arc<Mutex<Box<dyn Site>>>;

/// Why something cannot be done on a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PageFault {
    /// An error of the model, in words for it.
    Model(String),
    /// The page or its browser failed.
    Browser(String),
}

impl From<CallFault> for PageFault {
    fn from(fault: CallFault) -> Self {
        Self::Browser(fault.to_string())
    }
}

/// What events said about a page.
#[derive(Clone, Debug, Default)]
struct Progress {
    /// A navigation began and has not ended.
    moving: bool,
    /// It is gone.
    crashed: bool,
    /// Requests for addresses that are not of its site.
    refused: u32,
    /// Kinds and texts of dialogs that came up.
    dialogs: Vec<String>,
}

/// Takes the events of a page.
struct Events {
    /// Where it runs.
    browser: Arc<Browser>,
    /// Id of its DevTools session.
    session: String,
    /// Its main frame.
    frame: String,
    /// What its events said.
    progress: watch::Sender<Progress>,
    /// Paused requests, for the site.
    requests: mpsc::Sender<Value>,
}

impl Events {
    /// Notes a dialog and answers it: yes to those that only inform, else no.
    fn dialog(&self, params: &Value) {
        let kind = params["type"].as_str().unwrap_or_default();
        let text = params["message"].as_str().unwrap_or_default();
        let text: String = text.chars().take(200).collect();
        self.progress.send_modify(|p| {
            if p.dialogs.len() < MAX_DIALOGS {
                p.dialogs.push(format!("{kind} {text:?}"));
            }
        });
        let accept = json!({ "accept": kind == "alert" || kind == "beforeunload" });
        self.browser
            .client
            .post(&self.session, "Page.handleJavaScriptDialog", &accept);
    }

    /// Fails a request and counts it.
    fn refuse(&self, request: &Value) {
        self.progress.send_modify(|p| p.refused += 1);
        let params = json!({ "requestId": request["requestId"], "errorReason": "BlockedByClient" });
        self.browser
            .client
            .post(&self.session, "Fetch.failRequest", &params);
    }
}

impl Listener for Events {
    fn event(&self, method: &str, params: Value) {
        let main = params["frameId"] == self.frame.as_str();
        let moving = |moving| self.progress.send_modify(|p| p.moving = moving);
        match method {
            "Fetch.requestPaused" => {
                let own = params["request"]["url"]
                    .as_str()
                    .is_some_and(|u| path_of(u).is_some());
                if !own {
                    self.refuse(&params);
                } else if let Err(back) = self.requests.try_send(params) {
                    self.refuse(&back.into_inner());
                }
            }
            "Page.frameRequestedNavigation"
            | "Page.frameScheduledNavigation"
            | "Page.frameStartedLoading"
                if main =>
            {
                moving(true);
            }
            "Page.frameStoppedLoading" | "Page.navigatedWithinDocument" if main => moving(false),
            "Page.javascriptDialogOpening" => self.dialog(&params),
            "Inspector.targetCrashed" => self.progress.send_modify(|p| p.crashed = true),
            _ => {}
        }
    }
}

/// The path of an address of the site; `None`: it is of another origin.
fn path_of(url: &str) -> Option<&str> {
    url.strip_prefix(ORIGIN)
        .filter(|path| path.starts_with('/'))
}

/// A page. [`Page::close`] ends it with its context; a page that is dropped is ended by its pool.
pub(crate) struct Page {
    /// Where it runs.
    browser: Arc<Browser>,
    /// Id of its browser context.
    context: String,
    /// Id of its DevTools session.
    session: String,
    /// What its events said.
    progress: watch::Sender<Progress>,
    /// Paused requests, until a site answers them.
    requests: Option<mpsc::Receiver<Value>>,
    /// Deadline of a call.
    limit: Duration,
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Page")
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}

/// A text of an answer.
fn text(value: &Value, field: &str) -> Result<String, CallFault> {
    let text = value[field].as_str().map(str::to_owned);
    text.ok_or_else(|| CallFault::Refused(format!("the browser's answer has no {field}")))
}

impl Page {
    /// A new, empty page in a new context: no cookies, no storage, no history. Calls end after `limit`.
    pub(super) async fn new(browser: Arc<Browser>, limit: Duration) -> Result<Self, CallFault> {
        let made = browser
            .call(
                "Target.createBrowserContext",
                json!({ "disposeOnDetach": true }),
                limit,
            )
            .await?;
        let context = text(&made, "browserContextId")?;
        let deny = json!({ "behavior": "deny", "browserContextId": context });
        browser
            .call("Browser.setDownloadBehavior", deny, limit)
            .await?;
        let (width, height) = WINDOW;
        let target = json!({
            "url": "about:blank", "browserContextId": context, "width": width, "height": height,
        });
        let target = text(
            &browser.call("Target.createTarget", target, limit).await?,
            "targetId",
        )?;
        let attach = json!({ "targetId": target, "flatten": true });
        let attached = browser.call("Target.attachToTarget", attach, limit).await?;
        let (sender, requests) = mpsc::channel(MAX_REQUESTS);
        let page = Self {
            context,
            session: text(&attached, "sessionId")?,
            progress: watch::Sender::new(Progress::default()),
            requests: Some(requests),
            limit,
            browser: Arc::clone(&browser),
        };
        let events = Events {
            browser,
            session: page.session.clone(),
            // The main frame of a page has the number of its target.
            frame: target,
            progress: page.progress.clone(),
            requests: sender,
        };
        page.browser.client.listen(&page.session, Arc::new(events));
        page.configure(width, height).await?;
        Ok(page)
    }

    /// Turns on events, interception and a window of fixed size.
    async fn configure(&self, width: u32, height: u32) -> Result<(), CallFault> {
        let window =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        let everything = json!({ "patterns": [{ "urlPattern": "*" }] });
        // Workers and frames of other processes, which are not intercepted, wait for a start that never
        // comes.
        let held = json!({ "autoAttach": true, "waitForDebuggerOnStart": true, "flatten": true });
        tokio::try_join!(
            self.call("Page.enable", json!({})),
            self.call("Fetch.enable", everything),
            self.call("Inspector.enable", json!({})),
            self.call("Target.setAutoAttach", held),
            self.call("Emulation.setDeviceMetricsOverride", window),
            self.call(
                "Emulation.setFocusEmulationEnabled",
                json!({ "enabled": true })
            ),
        )?;
        Ok(())
    }

    /// Calls a method of the page's session.
    async fn call(&self, method: &'static str, params: Value) -> Result<Value, CallFault> {
        self.browser
            .client
            .call(Some(&self.session), method, params, self.limit)
            .await
    }

    /// What events said so far.
    fn progress(&self) -> Progress {
        self.progress.borrow().clone()
    }

    /// Requests that were refused because they were not for the site.
    pub(crate) fn refused(&self) -> u32 {
        self.progress().refused
    }

    /// Answers the requests of the page from now on, and loads the first page of the site. Once.
    pub(crate) async fn serve(&mut self, site: SharedSite) -> Result<(), PageFault> {
        let Some(requests) = self.requests.take() else {
            return Err(PageFault::Browser("the page has a site".into()));
        };
        let start = lock(&site).start();
        tokio::spawn(answer(
            Arc::clone(&self.browser),
            self.session.clone(),
            requests,
            site,
        ));
        self.open(&start).await
    }

    /// Loads a path of the site.
    pub(crate) async fn open(&self, path: &str) -> Result<(), PageFault> {
        let url = format!("{ORIGIN}{path}");
        if path_of(&url).is_none() {
            return Err(PageFault::Model(format!(
                "open takes a path of this site, such as \"/\", not {path:?}"
            )));
        }
        // The answer may come before the event which says that it loads.
        let moving = |moving| self.progress.send_modify(|p| p.moving = moving);
        moving(true);
        let loaded = self.call("Page.navigate", json!({ "url": url })).await?;
        if loaded["errorText"].is_string() || loaded["loaderId"].is_null() {
            // Nothing loads: an error, or a place within the page.
            moving(false);
        }
        if let Some(error) = loaded["errorText"].as_str() {
            return Err(PageFault::Model(format!(
                "{path} cannot be loaded: {error}"
            )));
        }
        Ok(())
    }

    /// Waits until scripts that are due have run and no navigation is under way.
    pub(crate) async fn settle(&self, pause: Duration) -> Result<(), PageFault> {
        let wait = format!(
            "new Promise(done => setTimeout(done, {}))",
            pause.as_millis()
        );
        let mut progress = self.progress.subscribe();
        for _ in 0..MAX_ROUNDS {
            let still = |p: &Progress| !p.moving || p.crashed;
            let waiting = tokio::time::timeout(self.limit, progress.wait_for(still));
            if waiting.await.is_err() {
                return Err(PageFault::Browser(
                    "the page did not finish loading in time".into(),
                ));
            }
            let waited = self.evaluate(&wait).await;
            if self.progress().crashed {
                return Err(PageFault::Browser("the page crashed".into()));
            }
            match waited {
                Err(CallFault::Refused(_)) => {}
                Err(fault) => return Err(fault.into()),
                Ok(_) if self.progress().moving => {}
                Ok(_) => return Ok(()),
            }
        }
        Err(PageFault::Browser(
            "the page navigates again and again".into(),
        ))
    }

    /// The value of an expression, awaited.
    pub(crate) async fn evaluate(&self, expression: &str) -> Result<Value, CallFault> {
        let params =
            json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.call("Runtime.evaluate", params).await?;
        match answer["exceptionDetails"]["exception"]["description"].as_str() {
            Some(error) => Err(CallFault::Refused(error.chars().take(300).collect())),
            None => Ok(answer["result"]["value"].clone()),
        }
    }

    /// What the page shows now, and texts of dialogs that came up.
    pub(crate) async fn look(&self) -> Result<(Tree, Vec<String>), PageFault> {
        let (tree, snapshot, place) = tokio::try_join!(
            self.call("Accessibility.getFullAXTree", json!({})),
            self.call(
                "DOMSnapshot.captureSnapshot",
                json!({ "computedStyles": [] })
            ),
            self.evaluate("location.pathname + location.search"),
        )?;
        let read = Tree::read(&tree, &snapshot, f64::from(WINDOW.1));
        let mut tree = read.map_err(|e| PageFault::Browser(format!("accessibility tree: {e}")))?;
        tree.url = place.as_str().unwrap_or_default().to_owned();
        let mut dialogs = Vec::new();
        self.progress
            .send_modify(|p| dialogs = std::mem::take(&mut p.dialogs));
        Ok((tree, dialogs))
    }

    /// The window as PNG.
    pub(crate) async fn screenshot(&self) -> Result<Vec<u8>, PageFault> {
        let shot = self
            .call("Page.captureScreenshot", json!({ "format": "png" }))
            .await?;
        let bytes = STANDARD.decode(shot["data"].as_str().unwrap_or_default());
        bytes.map_err(|e| PageFault::Browser(format!("screenshot: {e}")))
    }

    /// Clicks into the middle of an element, as a mouse does: what lies over it gets the click.
    pub(crate) async fn click(&self, item: &Item) -> Result<(), PageFault> {
        let hidden = |_| PageFault::Model("the element is not visible".into());
        let id = json!({ "backendNodeId": item.backend });
        self.node("DOM.scrollIntoViewIfNeeded", id.clone())
            .await
            .map_err(hidden)?;
        let quads = self.node("DOM.getContentQuads", id).await.map_err(hidden)?;
        let corners: Vec<f64> = quads["quads"][0]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_f64)
            .collect();
        let &[x1, y1, _, _, x2, y2, _, _] = corners.as_slice() else {
            return Err(hidden(String::new()));
        };
        let mouse = |kind: &str, clicks: u8| {
            json!({
                "type": kind, "x": (x1 + x2) / 2.0, "y": (y1 + y2) / 2.0,
                "button": if clicks == 0 { "none" } else { "left" }, "clickCount": clicks,
            })
        };
        const MOUSE: &str = "Input.dispatchMouseEvent";
        tokio::try_join!(
            self.call(MOUSE, mouse("mouseMoved", 0)),
            self.call(MOUSE, mouse("mousePressed", 1)),
            self.call(MOUSE, mouse("mouseReleased", 1)),
        )?;
        Ok(())
    }

    /// A call on an element, which may have gone since it was seen.
    async fn node(&self, method: &'static str, params: Value) -> Result<Value, String> {
        let called = self.call(method, params).await;
        called.map_err(|fault| fault.to_string())
    }

    /// Puts a text into a field in place of what it had; `enter` presses the key after it.
    pub(crate) async fn write(
        &self,
        item: &Item,
        text: &str,
        enter: bool,
    ) -> Result<(), PageFault> {
        if !["textbox", "searchbox", "combobox", "spinbutton"].contains(&item.role.as_str()) {
            return Err(PageFault::Model(format!(
                "type needs a field; this is a {}",
                item.role
            )));
        }
        let focus = self
            .node("DOM.focus", json!({ "backendNodeId": item.backend }))
            .await;
        focus.map_err(|_| PageFault::Model("the field takes no text".into()))?;
        const KEY: &str = "Input.dispatchKeyEvent";
        self.call(
            KEY,
            json!({ "type": "rawKeyDown", "commands": ["selectAll"] }),
        )
        .await?;
        match text {
            "" => self.key("Backspace", 8, "").await?,
            text => {
                self.call("Input.insertText", json!({ "text": text }))
                    .await?;
            }
        }
        match enter {
            true => self.key("Enter", 13, "\r").await,
            false => Ok(()),
        }
    }

    /// Presses a key and lets it go.
    async fn key(&self, key: &str, code: u8, text: &str) -> Result<(), PageFault> {
        let event = |kind: &str| {
            let mut event = json!({
                "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code,
            });
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = text.into();
            }
            event
        };
        const KEY: &str = "Input.dispatchKeyEvent";
        tokio::try_join!(
            self.call(KEY, event("keyDown")),
            self.call(KEY, event("keyUp"))
        )?;
        Ok(())
    }

    /// Chooses an option of a list by its text.
    pub(crate) async fn choose(&self, item: &Item, option: &str) -> Result<(), PageFault> {
        const CHOOSE: &str = "function(name) { \
            if (this.tagName !== 'SELECT') return false; \
            const found = [...this.options].find(o => o.text.trim() === name); \
            if (!found || found.disabled) return false; \
            this.focus(); this.value = found.value; found.selected = true; \
            this.dispatchEvent(new Event('input', { bubbles: true })); \
            this.dispatchEvent(new Event('change', { bubbles: true })); return true; }";
        let unknown = || {
            PageFault::Model(match item.options.is_empty() {
                true => format!("select needs a list; this is a {}", item.role),
                false => format!(
                    "the list has no option {option:?}; it has: {}",
                    item.options.join(" | ")
                ),
            })
        };
        let node = self
            .node("DOM.resolveNode", json!({ "backendNodeId": item.backend }))
            .await;
        let node = node.map_err(|_| unknown())?;
        let params = json!({
            "functionDeclaration": CHOOSE, "objectId": node["object"]["objectId"],
            "arguments": [{ "value": option }], "returnByValue": true,
        });
        let chosen = self.call("Runtime.callFunctionOn", params).await?;
        match chosen["result"]["value"].as_bool() {
            Some(true) => Ok(()),
            _ => Err(unknown()),
        }
    }

    /// Scrolls by most of the window.
    pub(crate) async fn scroll(&self, down: bool) -> Result<(), PageFault> {
        let by = if down { 500 } else { -500 };
        self.evaluate(&format!(
            "window.scrollBy({{ top: {by}, behavior: 'instant' }})"
        ))
        .await?;
        Ok(())
    }

    /// One page back in the history of the site.
    pub(crate) async fn back(&self) -> Result<(), PageFault> {
        let history = self.call("Page.getNavigationHistory", json!({})).await?;
        let at = history["currentIndex"].as_u64().unwrap_or(0) as usize;
        let entry = at.checked_sub(1).map(|before| &history["entries"][before]);
        let own = entry.filter(|e| e["url"].as_str().is_some_and(|u| path_of(u).is_some()));
        let Some(entry) = own else {
            return Err(PageFault::Model("there is no page to go back to".into()));
        };
        self.progress.send_modify(|p| p.moving = true);
        self.call(
            "Page.navigateToHistoryEntry",
            json!({ "entryId": entry["id"] }),
        )
        .await?;
        Ok(())
    }

    /// Ends the page and all that its context holds. An error means that the browser is not clean.
    pub(super) async fn close(self) -> Result<(), CallFault> {
        self.browser.client.forget(&self.session);
        let context = json!({ "browserContextId": self.context });
        self.browser
            .call("Target.disposeBrowserContext", context, self.limit)
            .await?;
        Ok(())
    }
}

/// The site, whatever a panic left of it.
fn lock(site: &SharedSite) -> MutexGuard<'_, Box<dyn Site>> {
    site.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers the requests of a page until it is closed.
async fn answer(
    browser: Arc<Browser>,
    session: String,
    mut requests: mpsc::Receiver<Value>,
    site: SharedSite,
) {
    while let Some(paused) = requests.recv().await {
        let request = request(&paused["request"]);
        let response = lock(&site).respond(&request);
        let headers: Vec<Value> = response
            .headers
            .iter()
            .map(|(name, value)| json!({ "name": name, "value": value }))
            .collect();
        let params = json!({
            "requestId": paused["requestId"], "responseCode": response.status,
            "responseHeaders": headers, "body": STANDARD.encode(&response.body),
        });
        browser
            .client
            .post(&session, "Fetch.fulfillRequest", &params);
    }
}

/// A paused request as the site reads it.
fn request(paused: &Value) -> Request {
    let url = paused["url"].as_str().unwrap_or_default();
    let (path, query) = split_query(path_of(url).unwrap_or_default());
    let form = paused["postData"]
        .as_str()
        .filter(|f| f.len() <= MAX_FORM)
        .unwrap_or_default();
    let cookie = ["Cookie", "cookie"]
        .into_iter()
        .find_map(|n| paused["headers"][n].as_str());
    Request {
        method: paused["method"].as_str().unwrap_or_default().into(),
        path,
        query,
        form: fields(form),
        cookie: cookie.unwrap_or_default().into(),
    }
}
