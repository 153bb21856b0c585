//! The keys of `openenv` in a recipe.

use crate::keys::{solved_at, timeout_s, wait_s};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_types::{Gives, InputPresence};

/// Data of the episodes that algorithms can read.
pub(super) const GIVES: Gives = Gives {
    states: InputPresence::No(
        "OpenEnv has no text of a whole state; take a class of yours, with env.type = \"python\"",
    ),
    turn_rewards: InputPresence::No(
        "the rewards of OpenEnv are added to the score; take a class of yours, with env.type = \"python\"",
    ),
    tool_counts: InputPresence::Yes,
    format_penalty: InputPresence::Yes,
};

/// Keys of `[env] type = "openenv"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OpenEnv {
    /// Address of the server, such as `http://127.0.0.1:8000`.
    pub url: String,
    /// Name of the environment variable with the server's key, sent as `Authorization: Bearer`. Empty: no
    /// key.
    #[serde(default)]
    pub key_env: String,
    /// Text of the system message.
    #[serde(default)]
    pub system: String,
    /// Text before the first observation, of tasks without rows.
    #[serde(default)]
    pub prompt: String,
    /// Field of the action that a turn of text fills. Empty: the only field of the action's schema, if that
    /// is a text; else a turn of text is an error of the model.
    #[serde(default)]
    pub text_field: String,
    /// Field of the observation that the model sees. Empty: all of it, as JSON.
    #[serde(default)]
    pub observation_field: String,
    /// Columns of the task that `reset` sends with the seed.
    #[serde(default)]
    pub reset_columns: Vec<String>,
    /// Score of an episode: the sum of its rewards, or the last one.
    #[serde(default)]
    pub score: RewardOf,
    /// Score from which on a task is solved.
    #[serde(default = "crate::keys::solved_at")]
    pub solved_at: f64,
    /// Sessions at once. Servers take one unless they are started for more.
    #[serde(default = "default_sessions")]
    #[schemars(range(min = 1, max = 4096))]
    pub sessions: usize,
    /// Training tasks: seeds, of a recipe without rows.
    #[serde(default = "default_train")]
    #[schemars(range(min = 1))]
    pub train: usize,
    /// Held-out tasks: other seeds.
    #[serde(default = "default_held_out")]
    #[schemars(range(min = 1))]
    pub held_out: usize,
    /// Deadline of one message, in seconds.
    #[serde(default = "crate::keys::timeout_s")]
    #[schemars(range(min = 0.01, max = 86_400.0))]
    pub timeout_s: f64,
    /// Longest wait of an episode for a session of a full server, in seconds.
    #[serde(default = "crate::keys::wait_s")]
    #[schemars(range(min = 0.01, max = 86_400.0))]
    pub wait_s: f64,
}

/// The rewards of an episode that are its score.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RewardOf {
    /// All, added.
    #[default]
    Sum,
    /// That of the last action.
    Last,
}

/// Sessions at once. A server that was started for fewer makes episodes wait.
fn default_sessions() -> usize {
    16
}

/// Seeds for training.
fn default_train() -> usize {
    1000
}

/// Seeds that are held out.
fn default_held_out() -> usize {
    100
}

impl OpenEnv {
    /// The keys of a server with their defaults.
    pub fn new(url: &str) -> Self {
        Self {
            url: url.into(),
            key_env: String::new(),
            system: String::new(),
            prompt: String::new(),
            text_field: String::new(),
            observation_field: String::new(),
            reset_columns: Vec::new(),
            score: RewardOf::default(),
            solved_at: solved_at(),
            sessions: default_sessions(),
            train: default_train(),
            held_out: default_held_out(),
            timeout_s: timeout_s(),
            wait_s: wait_s(),
        }
    }
}
