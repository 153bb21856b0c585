//! A page of MiniWoB++ as a site: files of a folder, and the page's own reward.

use super::families::Family;
use crate::plan::Step;
use crate::site::{Request, Response, Site};
use serde_json::Value;
use sinew_env::EnvError;
use sinew_types::{Outcome, Task};
use std::path::{Component, Path, PathBuf};

/// Bytes of a file of a page at most.
const MAX_FILE: u64 = 8 << 20;

/// Starts the problem of a seed: without the cover, the clock and the display of rewards, which are not part
/// of it. The largest delay of a timer stands for no end. Without animations of jQuery, a page is what it is
/// whenever it is looked at.
const BEGIN: &str = "(() => { Math.seedrandom(String(SEED)); core.EPISODE_MAX_TIME = 2147483647; \
    if (window.jQuery) jQuery.fx.off = true; \
    core.startEpisodeReal(); \
    for (const id of ['reward-display', 'click-canvas', 'sync-task-cover']) { \
        const node = document.getElementById(id); if (node) node.style.visibility = 'hidden'; } \
    document.getElementById('query').style.visibility = 'hidden'; \
    return core.getUtterance(); })()";

/// One page with its problem.
#[derive(Debug)]
struct Miniwob {
    /// Folder with `miniwob/NAME.html`.
    root: PathBuf,
    /// Which page.
    family: &'static Family,
    /// Seed of the page's random numbers.
    seed: u64,
    /// The task in words, as the page has them.
    words: String,
    /// Raw reward of the page, once it ended its episode.
    raw: Option<f64>,
}

/// The site of a task.
///
/// # Errors
/// If the data is not that of a task of MiniWoB++.
pub(crate) fn site(task: &Task, root: &Path) -> Result<Box<dyn Site>, EnvError> {
    let family = task.data["family"].as_str().unwrap_or_default();
    let family = Family::named(family).ok_or_else(|| EnvError::Task {
        task: task.id.to_string(),
        message: format!(
            "data.family = {family:?} is no family of MiniWoB++ pages that is known here"
        ),
    })?;
    Ok(Box::new(Miniwob {
        root: root.to_owned(),
        family,
        seed: task.seed,
        words: String::new(),
        raw: None,
    }))
}

impl Miniwob {
    /// The file of a path below the folder; `None`: there is none, or the path leaves the folder.
    fn file(&self, path: &str) -> Option<Vec<u8>> {
        let relative = Path::new(path.trim_start_matches('/'));
        let inside = relative
            .components()
            .all(|c| matches!(c, Component::Normal(_)));
        let full = self.root.join(relative);
        let small = full
            .metadata()
            .is_ok_and(|m| m.is_file() && m.len() <= MAX_FILE);
        (inside && small).then(|| std::fs::read(full).ok())?
    }
}

/// Media type by the ending of a name.
fn media_type(path: &str) -> &'static str {
    match path.rsplit('.').next() {
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("png") => "image/png",
        Some("gif") => "image/gif",
        Some("svg") => "image/svg+xml",
        _ => "application/octet-stream",
    }
}

impl Site for Miniwob {
    fn start(&self) -> String {
        format!("/miniwob/{}.html", self.family.name)
    }

    fn prepare(&self) -> Option<String> {
        Some(BEGIN.replace("SEED", &self.seed.to_string()))
    }

    fn begun(&mut self, prepared: &Value) -> Result<String, String> {
        let words = prepared.as_str().filter(|w| !w.is_empty());
        let words = words.ok_or_else(|| {
            format!(
                "{} did not start: env.pages = {}",
                self.start(),
                self.root.display()
            )
        })?;
        self.words = words.to_owned();
        Ok(self.words.clone())
    }

    fn respond(&mut self, request: &Request) -> Response {
        match self.file(&request.path).filter(|_| request.method == "GET") {
            Some(content) => Response::file(media_type(&request.path), 200, content),
            None => Response::file("text/plain", 404, Vec::new()),
        }
    }

    fn probe(&self) -> Option<&'static str> {
        Some("[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]")
    }

    /// The first reward counts: a page that ended offers the next problem.
    fn probed(&mut self, value: &Value) -> bool {
        if self.raw.is_none() && value[0] == true {
            self.raw = Some(value[1].as_f64().unwrap_or(0.0));
        }
        self.raw.is_some()
    }

    fn outcome(&self, _done: bool) -> Outcome {
        let success = self.raw.is_some_and(|r| r >= 1.0);
        let reward = f64::from(u8::from(success));
        Outcome {
            reward,
            success,
            metrics: [("raw_reward".to_owned(), self.raw.unwrap_or(0.0))].into(),
            ..Outcome::default()
        }
    }

    fn gold(&self) -> Option<Vec<Step>> {
        self.family.gold(&self.words)
    }
}
