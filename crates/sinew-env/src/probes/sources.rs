//! Environment `sources`: a question to a few sources, of which one says the answer, or none.
//!
//! In tasks of type `supported` one source says what is asked. In those of type `unsupported` none does,
//! though one is about the same thing: the right answer is `unknown`, without a source. Both types look
//! alike. To cite an id that is not there is counted as `invented`.
//!
//! The line of the source and that of the answer are read, and every id in the whole text: to name an id that
//! does not exist loses the episode, wherever it stands.

use super::common::{Drawn, Sizes, field, flag, outcome};
use crate::port::{
    Action, CallNotation, Capabilities, Env, EnvError, EnvFactory, EnvFuture, Observation,
    ResetResult, StepResult,
};
use crate::registry::{EnvConfig, EnvKind, KeyError, Needs, Sandboxes};
use crate::rng::Rng;
use crate::taskset::{Taskset, TasksetError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sinew_types::{Given, Gives, Message, Outcome, Role, Task};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;

/// The environment of the registry.
pub const KIND: EnvKind = EnvKind::new::<Sources>(
    "sources",
    "a probe: an answer with its source, or none where no source says it",
    Needs {
        sandbox: false,
        alphabet: None,
        rows: false,
        tasks: false,
        reward: false,
    },
);

/// Why algorithms cannot read more.
const NO_MORE: &str = "an episode is one answer without tools; take an environment with turns, such as \
     env.type = \"search\"";

const GIVES: Gives = Gives::all(Given::No(NO_MORE));

/// Keys of `[env] type = "sources"`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
struct Sources(Sizes);

impl EnvConfig for Sources {
    fn check(&self) -> Result<(), KeyError> {
        self.0.check()
    }

    fn taskset(&self, seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        Ok(self.0.tasks("sources", seed, draw))
    }

    fn factory(&self, _sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        Ok(Arc::new(Factory))
    }

    fn gives(&self) -> Gives {
        GIVES
    }
}

/// What is right.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Key {
    /// The year; `None` where no source says it.
    year: Option<i64>,
    /// The id of the source that says it.
    source: Option<String>,
    /// The ids of all sources.
    ids: Vec<String>,
}

/// Parts of names, which no model knows.
const STARTS: [&str; 12] = [
    "Bel", "Cor", "Dan", "Fal", "Gor", "Hal", "Jor", "Kel", "Lem", "Mar", "Nor", "Pel",
];
const ENDS: [&str; 12] = [
    "ba", "dor", "fen", "gard", "holm", "lin", "mere", "nau", "rik", "stad", "tov", "wick",
];
/// What a place has, and what can be said of it: the source's words, and those of the question.
const THINGS: [&str; 4] = ["bridge", "library", "harbour", "theatre"];
const FACTS: [(&str, &str); 3] = [
    ("was opened", "opened"),
    ("burned down", "burn down"),
    ("was sold to the town", "sold to the town"),
];
/// Sources of a task.
const COUNT: usize = 4;

/// The task of a seed.
fn draw(seed: u64) -> Drawn {
    let mut rng = Rng::labelled(seed, "sources");
    let mut places: Vec<String> = Vec::new();
    while places.len() < COUNT {
        let place = format!("{}{}", rng.pick(&STARTS), rng.pick(&ENDS));
        if !places.contains(&place) {
            places.push(place);
        }
    }
    let (thing, at) = (*rng.pick(&THINGS), rng.below(COUNT));
    let fact = rng.below(FACTS.len());
    let supported = rng.below(2) == 1;
    let mut text = String::from("Sources:\n");
    let mut key = Key {
        year: None,
        source: None,
        ids: Vec::new(),
    };
    let mut taken = BTreeSet::new();
    for (n, place) in places.iter().enumerate() {
        let mut number = rng.range(10, 99);
        while !taken.insert(number) {
            number = rng.range(10, 99);
        }
        let (id, year) = (format!("S{number}"), rng.range(1700, 1989));
        // The source about the place that is asked for says another thing of it, where none has the answer.
        let other = (fact + 1 + rng.below(FACTS.len() - 1)) % FACTS.len();
        let said = if n == at && !supported { other } else { fact };
        let _ = writeln!(
            text,
            "[{id}] The {thing} of {place} {} in {year}.",
            FACTS[said].0
        );
        if n == at && supported {
            (key.year, key.source) = (Some(year), Some(id.clone()));
        }
        key.ids.push(id);
    }
    let asked = format!("the {thing} of {}", places[at]);
    let question = match FACTS[fact].1 {
        verb @ "burn down" => format!("When did {asked} {verb}?"),
        verb => format!("When was {asked} {verb}?"),
    };
    let _ = write!(
        text,
        "\n{question} Answer by these sources alone. End with two lines: `Answer: YEAR`, or `Answer: unknown` if no \
         source says it, and `Source: ID`, or `Source: none`."
    );
    Drawn {
        asked: format!("{asked} {fact}"),
        kind: if supported {
            "supported"
        } else {
            "unsupported"
        },
        prompt: text,
        data: json!(key),
    }
}

/// Makes episodes.
struct Factory;

/// Parses the `data` of a task.
fn read(task: &Task) -> Result<Key, EnvError> {
    serde_json::from_value(task.data.clone()).map_err(|e| EnvError::Task {
        task: task.id.to_string(),
        message: format!("data is no key of sources: {e}"),
    })
}

impl EnvFactory for Factory {
    fn name(&self) -> &str {
        "sources"
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        Ok(Box::new(Question {
            prompt: task.prompt.clone(),
            key: read(task)?,
            said: None,
        }))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: true,
            deterministic: true,
            gives: GIVES,
            places: None,
        }
    }

    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        let key = read(task)?;
        let year = key
            .year
            .map_or_else(|| "unknown".to_owned(), |y| y.to_string());
        let source = key.source.unwrap_or_else(|| "none".to_owned());
        Ok((turn == 0).then(|| Action::say(format!("Answer: {year}\nSource: {source}"))))
    }
}

/// One episode.
struct Question {
    /// Until it is read.
    prompt: String,
    /// What is right.
    key: Key,
    /// The answer of the model, once it is there.
    said: Option<String>,
}

impl Question {
    /// The score: answer, source and ids must all be right.
    fn outcome(&self) -> Outcome {
        let said = self.said.as_deref().unwrap_or_default();
        let answer = field(said, "Answer").unwrap_or_default().to_lowercase();
        let source = field(said, "Source").unwrap_or_default();
        let year = self
            .key
            .year
            .map_or_else(|| "unknown".to_owned(), |y| y.to_string());
        let right = answer == year;
        let cited = source.trim_matches(['[', ']']);
        let cited_right = cited == self.key.source.as_deref().unwrap_or("none");
        // Every id of the text counts, in the line of the source or elsewhere.
        let words = said.split(|c: char| !c.is_ascii_alphanumeric());
        let ids: BTreeSet<&str> = words.filter(is_id).collect();
        let invented = ids
            .iter()
            .filter(|id| !self.key.ids.iter().any(|k| k == *id));
        let invented = invented.count();
        let made_up = self.key.year.is_none() && !answer.is_empty() && !right;
        outcome(
            right && cited_right && invented == 0,
            [
                ("answer_right", flag(right)),
                ("source_right", flag(cited_right)),
                ("invented", invented as f64),
                ("made_up", flag(made_up)),
            ],
        )
    }
}

/// Whether a word looks like the id of a source.
fn is_id(word: &&str) -> bool {
    let digits = word.strip_prefix('S').unwrap_or_default();
    !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
}

impl Env for Question {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        let prompt = self.prompt.clone();
        Box::pin(async move {
            Ok(ResetResult {
                messages: vec![Message::new(Role::User, prompt)],
                tools: Vec::new(),
                calls: CallNotation::default(),
                state_hash: None,
            })
        })
    }

    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        Box::pin(async move {
            if self.said.is_some() {
                return Err(EnvError::Order("step after the end"));
            }
            self.said = Some(action.answer());
            Ok(StepResult {
                observation: None,
                process_reward: 0.0,
                done: true,
                outcome: Some(self.outcome()),
                state_hash: None,
            })
        })
    }

    fn format_observation(&self, observation: &Observation) -> Vec<Message> {
        vec![Message::new(Role::User, observation.content.clone())]
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        Box::pin(async move { Ok(self.outcome()) })
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async move { Ok(()) })
    }
}
