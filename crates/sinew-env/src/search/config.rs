//! Keys of `search`.

use super::corpus::Corpus;
use super::env::{GIVES, SearchFactory, SearchSettings};
use super::questions::{HOPS, Questions, pages};
use crate::port::{EnvError, EnvFactory};
use crate::registry::{EnvConfig, EnvKind, KeyError, Needs, Sandboxes};
use crate::taskset::{Taskset, TasksetError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_types::Gives;
use std::path::PathBuf;
use std::sync::Arc;

/// The environment of the registry.
pub const KIND: EnvKind = EnvKind::new::<SearchKeys>(
    "search",
    "questions over a local corpus, with citations",
    Needs {
        sandbox: false,
        alphabet: None,
        rows: true,
        tasks: false,
        reward: false,
    },
);

/// Keys of `[env] type = "search"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct SearchKeys {
    /// File of JSON Lines with pages of your own: `id`, `title`, `text`. Rows of `[tasks]` with the columns
    /// `answer` and `citations` are its questions. Empty: generated pages and questions.
    corpus: PathBuf,
    /// Pages that a generated question needs, 1 to 3. Empty: all.
    #[schemars(inner(range(min = 1, max = 3)))]
    hops: Vec<u8>,
    /// Seed of the generated pages.
    corpus_seed: u64,
    /// Number of generated training tasks.
    #[schemars(range(min = 1, max = 1_000_000))]
    train: usize,
    /// Number of generated held-out tasks.
    #[schemars(range(min = 1, max = 1_000_000))]
    held_out: usize,
    /// Calls of tools in an episode; after the last one it is scored as it stands.
    #[schemars(range(min = 1, max = 1000))]
    max_calls: u32,
    /// Pages that a search shows.
    #[schemars(range(min = 1, max = 50))]
    results: usize,
    /// Characters of a page that are shown at once.
    #[schemars(range(min = 100, max = 100_000))]
    page_chars: usize,
}

impl Default for SearchKeys {
    fn default() -> Self {
        Self {
            corpus: PathBuf::new(),
            hops: Vec::new(),
            corpus_seed: 0,
            train: 10_000,
            held_out: 200,
            max_calls: 20,
            results: 5,
            page_chars: 2000,
        }
    }
}

impl SearchKeys {
    /// Whether pages and questions are generated.
    fn is_generated(&self) -> bool {
        self.corpus.as_os_str().is_empty()
    }
}

impl EnvConfig for SearchKeys {
    fn check(&self) -> Result<(), KeyError> {
        let wrong = |key, value: String, reason: &str| {
            let reason = reason.into();
            Err(KeyError { key, value, reason })
        };
        if !self.is_generated() && !self.hops.is_empty() {
            let reason = "has no effect with env.corpus; remove it";
            return wrong("hops", format!("{:?}", self.hops), reason);
        }
        if self.hops.iter().any(|h| !HOPS.contains(h)) {
            return wrong("hops", format!("{:?}", self.hops), "allowed: 1 to 3");
        }
        for (key, value, most) in [
            ("train", self.train, 1_000_000),
            ("held_out", self.held_out, 1_000_000),
            ("max_calls", self.max_calls as usize, 1000),
            ("results", self.results, 50),
        ] {
            if !(1..=most).contains(&value) {
                return wrong(key, value.to_string(), &format!("allowed: 1 to {most}"));
            }
        }
        if !(100..=100_000).contains(&self.page_chars) {
            return wrong(
                "page_chars",
                self.page_chars.to_string(),
                "allowed: 100 to 100000",
            );
        }
        Ok(())
    }

    fn taskset(&self, seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        if !self.is_generated() {
            return Err(TasksetError::Config {
                taskset: "search".into(),
                field: "tasks",
                value: "missing".into(),
                allowed:
                    "rows with the columns answer and citations for env.corpus, such as tasks = \
                          \"questions.jsonl\""
                        .into(),
            });
        }
        let hops = match self.hops.is_empty() {
            true => HOPS.collect(),
            false => self.hops.clone(),
        };
        Ok(Arc::new(Questions::new(
            seed,
            self.corpus_seed,
            hops,
            self.train,
            self.held_out,
        )))
    }

    fn factory(&self, _sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        let corpus = match self.is_generated() {
            true => Corpus::new(pages(self.corpus_seed)),
            false => Corpus::read(&self.corpus),
        };
        let corpus = corpus.map_err(|allowed| EnvError::Config {
            field: "corpus",
            value: format!("{:?}", self.corpus),
            allowed,
        })?;
        let settings = SearchSettings {
            max_calls: self.max_calls,
            results: self.results,
            page_chars: self.page_chars,
        };
        Ok(Arc::new(SearchFactory::new(Arc::new(corpus), settings)))
    }

    fn gives(&self) -> Gives {
        GIVES
    }
}
