//! One episode: a question, pages that are searched and opened, an answer with citations.
//!
//! | tool | what the model sees |
//! |---|---|
//! | `search` | ids, titles and beginnings |
//! | `open` | a part of a page |
//! | `find` | places of a text in a page that is open |
//! | `answer` | nothing: it ends the episode |

use super::corpus::Corpus;
use crate::port::{Action, Capabilities, Env, EnvError, EnvFactory, EnvFuture};
use crate::tools::{Answer, ToolEnv, ToolWorld, arguments, no_such_tool, tool};
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_types::{Given, Gives, Message, Outcome, Role, Task, ToolCall, ToolSpec};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;

/// Names of the tools.
const TOOLS: [&str; 4] = ["search", "open", "find", "answer"];
/// System prompt, unless the task has one.
const RULES: &str = "You answer questions from the pages of a library. Search them, open those that you need, \
     then call answer with the ids of the pages that hold the facts, and no others.";
/// Characters of a page around its match.
const SNIPPET: usize = 100;
/// Places that `find` shows.
const MAX_FOUND: usize = 8;

/// Limits of episodes.
#[derive(Clone, Copy, Debug)]
pub struct SearchSettings {
    /// Calls of tools.
    pub max_calls: u32,
    /// Pages that a search shows.
    pub results: usize,
    /// Characters of a page that are shown at once.
    pub page_chars: usize,
}

/// Factory of `search` episodes over one corpus.
#[derive(Clone, Debug)]
pub struct SearchFactory {
    /// Pages that all episodes share.
    corpus: Arc<Corpus>,
    /// Limits of its episodes.
    settings: SearchSettings,
}

impl SearchFactory {
    /// Questions are about `corpus`.
    pub fn new(corpus: Arc<Corpus>, settings: SearchSettings) -> Self {
        Self { corpus, settings }
    }

    /// Right answers and pages of a task.
    fn key(&self, task: &Task) -> Result<Key, EnvError> {
        let broken = |message: String| EnvError::Task {
            task: task.id.to_string(),
            message,
        };
        let texts = |value: &Value| -> Option<Vec<String>> {
            match value {
                Value::String(one) => Some(vec![one.clone()]),
                Value::Number(one) => Some(vec![one.to_string()]),
                Value::Array(all) => all.iter().map(|v| v.as_str().map(str::to_owned)).collect(),
                _ => None,
            }
        };
        let answers = texts(&task.data["answer"]).filter(|a| !a.is_empty());
        let answers = answers
            .ok_or_else(|| broken("the column answer is no text and no list of texts".into()))?;
        let citations = match &task.data["citations"] {
            Value::Null => None,
            value => {
                let ids = texts(value)
                    .ok_or_else(|| broken("the column citations is no list of ids".into()))?;
                if let Some(id) = ids.iter().find(|id| self.corpus.page(id).is_none()) {
                    return Err(broken(format!("citations: the corpus has no page {id:?}")));
                }
                Some(ids)
            }
        };
        Ok(Key { answers, citations })
    }
}

/// What is right.
#[derive(Clone, Debug)]
struct Key {
    /// Any of them is right.
    answers: Vec<String>,
    /// Pages that hold the facts. `None`: any page that was opened may be cited.
    citations: Option<Vec<String>>,
}

impl EnvFactory for SearchFactory {
    fn name(&self) -> &str {
        "search"
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        let world = SearchWorld {
            factory: self.clone(),
            key: self.key(task)?,
            preamble: task.preamble.clone(),
            question: task.prompt.clone(),
            opened: BTreeSet::new(),
            answer: None,
        };
        Ok(Box::new(ToolEnv::new(world, self.settings.max_calls)))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: true,
            deterministic: true,
            gives: GIVES,
            places: None,
        }
    }

    /// It opens the pages of the task in order. Without them, there is no gold policy.
    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        let key = self.key(task)?;
        let Some(pages) = key.citations else {
            return Ok(None);
        };
        let title = |id: &String| {
            self.corpus
                .page(id)
                .map_or(String::new(), |p| p.title.clone())
        };
        Ok(match (turn / 2, turn % 2) {
            (at, 0) if at < pages.len() => {
                Some(calling("search", json!({ "query": title(&pages[at]) })))
            }
            (at, _) if at < pages.len() => Some(calling("open", json!({ "id": pages[at] }))),
            (at, 0) if at == pages.len() => Some(calling(
                "answer",
                json!({ "text": key.answers[0], "citations": pages }),
            )),
            _ => None,
        })
    }
}

/// What algorithms can read of an episode.
pub(super) const GIVES: Gives = Gives {
    states: Given::Yes,
    turn_rewards: Given::No(
        "questions are scored at the end; take an algorithm without turn rewards",
    ),
    tool_counts: Given::Yes,
    format_penalty: Given::Yes,
};

/// A turn with one call.
fn calling(name: &str, arguments: Value) -> Action {
    let call = ToolCall {
        id: "call-0".into(),
        name: name.into(),
        arguments,
    };
    Action {
        tool_calls: vec![call],
        ..Action::say("")
    }
}

/// Arguments of `search`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Search {
    /// Words.
    query: String,
}

/// Arguments of `open`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Open {
    id: String,
    /// Part of a long page, from 0.
    #[serde(default)]
    part: usize,
}

/// Arguments of `find`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Find {
    id: String,
    text: String,
}

/// Arguments of `answer`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Answered {
    text: String,
    /// Ids of pages that hold the facts.
    citations: Vec<String>,
}

/// A text for comparison: words in lower case, without articles.
fn plain(text: &str) -> String {
    let words = super::index::words(text).filter(|w| !["the", "a", "an"].contains(&w.as_str()));
    words.collect::<Vec<_>>().join(" ")
}

/// A question over the corpus.
struct SearchWorld {
    /// Corpus and limits.
    factory: SearchFactory,
    /// What is right.
    key: Key,
    /// Messages before the question.
    preamble: Vec<Message>,
    /// The question in words.
    question: String,
    /// Pages that were opened.
    opened: BTreeSet<String>,
    /// The answer, once there is one.
    answer: Option<Answered>,
}

impl SearchWorld {
    /// Carries a call out.
    fn act(&mut self, call: &ToolCall) -> Result<String, String> {
        match call.name.as_str() {
            "search" => self.search(&arguments::<Search>(call)?.query),
            "open" => self.open(&arguments(call)?),
            "find" => self.find(&arguments(call)?),
            "answer" => {
                self.answer = Some(arguments(call)?);
                Ok(String::new())
            }
            _ => Err(no_such_tool(call, &TOOLS)),
        }
    }

    /// Ids, titles and beginnings of the best pages.
    fn search(&self, query: &str) -> Result<String, String> {
        let found = self
            .factory
            .corpus
            .search(query, self.factory.settings.results);
        if found.is_empty() {
            return Err("no page has any of these words".into());
        }
        let mut out = String::new();
        for page in found {
            let start: String = page.text.chars().take(SNIPPET).collect();
            let _ = writeln!(out, "{} {:?}: {start}...", page.id, page.title);
        }
        Ok(out)
    }

    /// The page of an id, or an error for the model.
    fn page(&self, id: &str) -> Result<&super::corpus::CorpusPage, String> {
        self.factory
            .corpus
            .page(id)
            .ok_or_else(|| format!("there is no page {id:?}; search shows ids"))
    }

    /// A part of a page, which counts as opened from now on.
    fn open(&mut self, asked: &Open) -> Result<String, String> {
        let size = self.factory.settings.page_chars;
        let page = self.page(&asked.id)?;
        let parts = page.text.chars().count().div_ceil(size).max(1);
        if asked.part >= parts {
            return Err(format!(
                "page {} has the parts 0 to {}",
                asked.id,
                parts - 1
            ));
        }
        let text: String = page
            .text
            .chars()
            .skip(asked.part * size)
            .take(size)
            .collect();
        let place = match parts {
            1 => String::new(),
            _ => format!(" (part {} of 0 to {})", asked.part, parts - 1),
        };
        let shown = format!("{}{place}\n{text}", page.title);
        self.opened.insert(asked.id.clone());
        Ok(shown)
    }

    /// Places of a text in a page that is open.
    fn find(&self, asked: &Find) -> Result<String, String> {
        let page = self.page(&asked.id)?;
        if !self.opened.contains(&asked.id) {
            return Err(format!("open page {} first", asked.id));
        }
        let letters: Vec<char> = page.text.chars().collect();
        let lower = |c: &char| c.to_lowercase().next().unwrap_or(*c);
        let text: Vec<char> = letters.iter().map(lower).collect();
        let wanted: Vec<char> = asked.text.chars().map(|c| lower(&c)).collect();
        if wanted.is_empty() {
            return Err("text is empty".into());
        }
        let places = text
            .windows(wanted.len())
            .enumerate()
            .filter(|(_, w)| *w == wanted.as_slice());
        let mut out = String::new();
        for (at, _) in places.take(MAX_FOUND) {
            let from = at.saturating_sub(SNIPPET);
            let to = (at + wanted.len() + SNIPPET).min(letters.len());
            let _ = writeln!(
                out,
                "...{}...",
                letters[from..to].iter().collect::<String>()
            );
        }
        match out.is_empty() {
            true => Err(format!("page {} does not say {:?}", asked.id, asked.text)),
            false => Ok(out),
        }
    }
}

impl ToolWorld for SearchWorld {
    fn start(&mut self) -> EnvFuture<'_, (Vec<Message>, Vec<ToolSpec>)> {
        let text = json!({ "type": "string" });
        let ids = json!({ "type": "array", "items": { "type": "string" } });
        let tools = vec![
            tool(
                "search",
                "Search the pages for words.",
                json!({ "query": text }),
                &["query"],
            ),
            tool(
                "open",
                "Open a page.",
                json!({ "id": text, "part": { "type": "integer" } }),
                &["id"],
            ),
            tool(
                "find",
                "Find a text in an open page.",
                json!({ "id": text, "text": text }),
                &["id", "text"],
            ),
            tool(
                "answer",
                "Answer the question.",
                json!({ "text": text, "citations": ids }),
                &["text", "citations"],
            ),
        ];
        let mut messages = std::mem::take(&mut self.preamble);
        if messages.is_empty() {
            messages.push(Message::new(Role::System, RULES));
        }
        messages.push(Message::new(Role::User, self.question.clone()));
        Box::pin(std::future::ready(Ok((messages, tools))))
    }

    fn call<'a>(&'a mut self, call: &'a ToolCall) -> EnvFuture<'a, Answer> {
        let answer = self.act(call).map(Into::into);
        Box::pin(std::future::ready(Ok(answer)))
    }

    fn ended(&self) -> bool {
        self.answer.is_some()
    }

    /// Reward 1 for the right answer with the right citations: pages that were opened, and exactly those of
    /// the task where it names some.
    fn outcome(&self) -> Outcome {
        let flag = |b: bool| f64::from(u8::from(b));
        let answer = self.answer.as_ref();
        let right = answer.is_some_and(|a| {
            let said = plain(&a.text);
            !said.is_empty() && self.key.answers.iter().any(|k| plain(k) == said)
        });
        let cited: BTreeSet<&String> = answer.into_iter().flat_map(|a| &a.citations).collect();
        let unopened = cited
            .iter()
            .filter(|id| !self.opened.contains(**id))
            .count();
        let expected = self
            .key
            .citations
            .as_ref()
            .map(|ids| ids.iter().collect::<BTreeSet<_>>());
        let cited_right = match &expected {
            Some(ids) => *ids == cited,
            None => !cited.is_empty(),
        };
        let success = right && cited_right && unopened == 0;
        Outcome {
            reward: flag(success),
            success,
            metrics: [
                ("answer_right", flag(right)),
                ("citations_right", flag(cited_right && unopened == 0)),
                ("cited_unopened", unopened as f64),
                ("opened", self.opened.len() as f64),
            ]
            .map(|(name, value)| (name.to_owned(), value))
            .into(),
            answer: answer.map(|a| a.text.clone()),
            ..Outcome::default()
        }
    }
}
