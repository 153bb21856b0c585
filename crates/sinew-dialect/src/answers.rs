//! Answers that a later request of the same rollout may continue (`previous_response_id`).
//!
//! Each holds the messages that it added to the one before it, so that a long conversation is stored once.

use crate::prompt::message_bytes;
use serde::{Deserialize, Serialize};
use sinew_types::Message;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum answers that a rollout stores.
const MAX_ANSWERS: usize = 4096;

/// Maximum messages of a continued conversation.
const MAX_MESSAGES: usize = 65_536;

/// Maximum bytes of messages that a rollout stores.
const MAX_BYTES: u64 = 16 << 20;

/// Conversation before an answer's own messages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Before {
    /// The conversation begins with this request.
    Nothing,
    /// An answer and all before it.
    Answer(String),
    /// The input of that answer, without its output.
    Question(String),
}

/// An answer that a later request may continue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredAnswer {
    /// Id as the client has it, with the dialect's prefix.
    id: String,
    /// The link to the part of the conversation that is stored elsewhere.
    before: Before,
    /// New messages of the request, and the model's answer.
    added: Vec<Message>,
}

impl StoredAnswer {
    /// The answer `id`, which added these messages to `before`.
    pub fn new(id: String, before: Before, added: Vec<Message>) -> Self {
        Self { id, before, added }
    }
}

/// Reasons why a conversation cannot be put together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    #[error(
        "no response {0:?} in this rollout: it was made with store: false, in another rollout, or \
         after {MAX_ANSWERS} responses or {MAX_BYTES} bytes of them"
    )]
    /// An id that is not stored, or a link of its chain that is not.
    Unknown(String),
    /// More messages than any model's context is worth.
    #[error("the conversation has more than {MAX_MESSAGES} messages")]
    TooLong,
}

#[derive(Debug, Default)]
struct AnswerRecord {
    /// Answers by id, at most [`MAX_ANSWERS`].
    by_id: HashMap<String, StoredAnswer>,
    /// Bytes of all stored messages, by [`message_bytes`].
    bytes: u64,
}

/// The answers of one rollout, by id.
#[derive(Debug, Default)]
pub struct Answers {
    stored: Mutex<AnswerRecord>,
}

impl Answers {
    fn stored(&self) -> MutexGuard<'_, AnswerRecord> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is an answer under this id.
    pub fn has(&self, id: &str) -> bool {
        self.stored().by_id.contains_key(id)
    }

    /// The model's message in an answer.
    pub fn said(&self, id: &str) -> Option<Message> {
        self.stored().by_id.get(id)?.added.last().cloned()
    }

    /// The messages of the conversation that ends with the answer `id`, oldest first.
    ///
    /// # Errors
    /// If an answer of it is not stored, or there are too many messages.
    pub fn conversation(&self, id: &str) -> Result<Vec<Message>, ChainError> {
        let stored = self.stored();
        let mut parts = Vec::new();
        let mut count = 0;
        let mut next = Some((id, true));
        while let Some((id, with_answer)) = next {
            let unknown = || ChainError::Unknown(id.to_owned());
            let answer = stored.by_id.get(id).ok_or_else(unknown)?;
            let added = answer.added.len() - usize::from(!with_answer);
            count += added;
            if count > MAX_MESSAGES {
                return Err(ChainError::TooLong);
            }
            parts.push(&answer.added[..added]);
            next = match &answer.before {
                Before::Nothing => None,
                Before::Answer(id) => Some((id, true)),
                Before::Question(id) => Some((id, false)),
            };
        }
        Ok(parts.into_iter().rev().flatten().cloned().collect())
    }

    /// Stores an answer under its id, before its client sees the id.
    pub fn keep(&self, answer: StoredAnswer) {
        let bytes: u64 = answer.added.iter().map(message_bytes).sum();
        let mut stored = self.stored();
        // A full memory takes no more: stored conversations stay whole.
        if stored.by_id.len() < MAX_ANSWERS && stored.bytes + bytes <= MAX_BYTES {
            stored.bytes += bytes;
            stored.by_id.insert(answer.id.clone(), answer);
        }
    }
}
