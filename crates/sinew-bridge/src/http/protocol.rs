//! Bodies of the protocol of environments over HTTP (docs/environment-protocol.md), and their limits.
//!
//! Both sides are not trusted: the client checks what a server declares and answers, and the server what a
//! client sends. Unknown fields are ignored, so that servers can add some.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sinew_dialect::conversation;
use sinew_types::{Message, Task, ToolSpec};
use std::collections::{BTreeMap, BTreeSet};

/// Version of the protocol.
pub(crate) const PROTOCOL: u64 = 1;
/// Maximum bytes of one body, in both directions.
pub const MAX_BODY: usize = 16 << 20;
/// Maximum characters of one observation or one text of an error. The rest is cut.
pub const MAX_TEXT: usize = 64 << 10;
/// Maximum characters of an id of an episode or a call.
pub(crate) const MAX_ID: usize = 128;
/// Maximum number of tools.
const MAX_TOOLS: usize = 256;
/// Maximum number of episodes at once that a server may declare.
const MAX_EPISODES: usize = 100_000;

/// Answer to `GET /sinew`: what the server is, and how much of it there is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ServerInfo {
    /// Name of the environment.
    pub(crate) name: String,
    /// It changes if equal actions may lead to other observations or rewards.
    #[serde(default)]
    pub(crate) version: String,
    /// [`PROTOCOL`].
    pub(crate) protocol: u64,
    /// Tools that every episode has.
    #[serde(default)]
    pub(crate) tools: Vec<Tool>,
    /// Episodes that may be open at once.
    pub(crate) max_episodes: usize,
    /// Seconds after which an episode without a request is freed.
    pub(crate) lease_s: f64,
    /// Answers have the field `state`.
    #[serde(default)]
    pub(crate) states: bool,
    /// A task to try the server with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) example: Option<Task>,
    /// Number of tasks by split, of a server that has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tasks: Option<BTreeMap<String, usize>>,
}

/// A tool of a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tool {
    /// Name that calls use.
    pub(crate) name: String,
    /// Text for the model.
    #[serde(default)]
    pub(crate) description: String,
    /// JSON Schema of the arguments.
    pub(crate) schema: Value,
}

impl From<&ToolSpec> for Tool {
    fn from(tool: &ToolSpec) -> Self {
        Self {
            name: tool.name.clone(),
            description: tool.description.clone(),
            schema: tool.parameters.clone(),
        }
    }
}

impl ServerInfo {
    /// The fault of a declaration, if there is one.
    pub(crate) fn wrong(&self) -> Option<String> {
        let known = self.protocol == PROTOCOL;
        let lease = self.lease_s.is_finite() && (1.0..=86_400.0).contains(&self.lease_s);
        match () {
            () if !known => Some(format!(
                "protocol is {}: this program speaks version {PROTOCOL}",
                self.protocol
            )),
            () if !(1..=MAX_EPISODES).contains(&self.max_episodes) => Some(format!(
                "max_episodes is {}: allowed: 1 to {MAX_EPISODES}",
                self.max_episodes
            )),
            () if !lease => Some(format!("lease_s is {}: allowed: 1 to 86400", self.lease_s)),
            () if self.name.is_empty() || self.name.chars().count() > MAX_ID => {
                Some(format!("name has no character, or more than {MAX_ID}"))
            }
            () => wrong_tools(&self.tools),
        }
    }
}

/// The fault of a list of tools, if there is one.
pub(crate) fn wrong_tools(tools: &[Tool]) -> Option<String> {
    if tools.len() > MAX_TOOLS {
        return Some(format!(
            "{} tools: at most {MAX_TOOLS} are allowed",
            tools.len()
        ));
    }
    let mut names = BTreeSet::new();
    for tool in tools {
        let name = &tool.name;
        if name.is_empty() || name.chars().count() > MAX_ID {
            return Some(format!(
                "a tool's name has no character, or more than {MAX_ID}"
            ));
        }
        if !names.insert(name) {
            return Some(format!("two tools are called {name:?}"));
        }
        if !tool.schema.is_object() {
            return Some(format!("the schema of the tool {name:?} is no object"));
        }
    }
    None
}

/// Tools of a server as the model sees them.
pub(crate) fn specs(tools: Vec<Tool>) -> Vec<ToolSpec> {
    let spec = |tool: Tool| ToolSpec {
        name: tool.name,
        description: tool.description,
        parameters: tool.schema,
    };
    tools.into_iter().map(spec).collect()
}

/// Body of `POST /episodes`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct OpenRequest {
    /// Id of the episode, chosen by the client. The same id opens nothing new.
    pub(crate) episode: String,
    /// All of the task, its columns as `data`.
    pub(crate) task: Task,
}

/// Answer to `POST /episodes`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct OpenReply {
    /// All messages of the prompt, in the chat-completions protocol. Left out: those of the task.
    #[serde(
        default,
        deserialize_with = "conversation::deserialize_some",
        skip_serializing_if = "Option::is_none"
    )]
    pub(crate) messages: Option<Vec<Message>>,
    /// Tools of this episode in place of those of `GET /sinew`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tools: Option<Vec<Tool>>,
    /// Text that is equal exactly in equal states.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) state: Option<String>,
}

/// Body of `POST /episodes/{id}/calls/{call_id}`: a call of a tool, or a turn of text without calls.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Call {
    /// Name of the tool. Left out in a turn of text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tool: Option<String>,
    /// Arguments as the model wrote them, unchecked.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub(crate) args: Value,
    /// Text of a turn without calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) text: Option<String>,
}

/// Answer to a call.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct CallReply {
    /// The observation: a text unchanged, other values as JSON.
    #[serde(default)]
    pub(crate) content: Value,
    /// The episode has ended. Later calls of the turn are not sent.
    #[serde(default)]
    pub(crate) done: bool,
    /// Reward of this call.
    #[serde(default)]
    pub(crate) reward: f64,
    /// Error of the model or of the environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<Fault>,
    /// State after the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) state: Option<String>,
    /// New context of the model, which replaces the earlier one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) renewed: Option<Vec<Message>>,
}

/// Cause of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FaultKind {
    /// The model's: the text is its observation.
    Tool,
    /// The environment's: the episode fails.
    Infra,
}

/// An error in an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Fault {
    pub(crate) kind: FaultKind,
    #[serde(default)]
    pub(crate) text: String,
}

/// Body of an answer with a status of 400 or more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Refusal {
    pub(crate) error: Fault,
}

/// Body of `POST /episodes/{id}/score`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct AskScore {
    #[serde(default)]
    pub(crate) messages: Vec<Message>,
    #[serde(default)]
    pub(crate) output: String,
}

/// Whether an episode has a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    Scored,
    Unscored,
}

/// Answer to a request for a score.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ScoreReply {
    /// `reward` is the score; `success` and other names are measurements.
    #[serde(default)]
    pub(crate) rewards: BTreeMap<String, Option<f64>>,
    /// Whether `rewards.reward` is a score.
    pub(crate) status: Status,
    /// Reason why there is no score.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// A text up to a number of characters.
pub fn cut(text: &str, max: usize) -> String {
    match text.char_indices().nth(max) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}... [{} more bytes]", &text[..end], text.len() - end),
    }
}

/// Observation of an answer.
pub(crate) fn observation(content: &Value) -> String {
    match content {
        Value::String(text) => cut(text, MAX_TEXT),
        Value::Null => String::new(),
        other => cut(&other.to_string(), MAX_TEXT),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn declarations_are_checked() {
        let tool = json!({"name": "add", "schema": {"type": "object"}});
        let good = json!({"name": "shop", "protocol": 1, "max_episodes": 4, "lease_s": 30, "tools": [tool]});
        let wrong = |change: &dyn Fn(&mut Value)| {
            let mut value = good.clone();
            change(&mut value);
            serde_json::from_value::<ServerInfo>(value).unwrap().wrong()
        };
        assert_eq!(wrong(&|_| ()), None);
        for (field, value, said) in [
            ("protocol", json!(2), "speaks version 1"),
            ("max_episodes", json!(0), "max_episodes is 0"),
            ("lease_s", json!(0.1), "lease_s is 0.1"),
            ("name", json!(""), "name has no character"),
            ("tools", json!([tool, tool]), "two tools are called \"add\""),
            ("tools", json!([{"name": "x", "schema": 7}]), "is no object"),
        ] {
            let found = wrong(&|v| v[field] = value.clone()).unwrap();
            assert!(found.contains(said), "{found}");
        }
    }

    proptest! {
        #[test]
        fn texts_are_cut_at_characters(text in "\\PC{0,40}", max in 0usize..50) {
            let short = cut(&text, max);
            let kept: String = text.chars().take(max).collect();
            prop_assert!(short.starts_with(&kept));
            prop_assert_eq!(short == text, text.chars().count() <= max);
        }
    }
}
