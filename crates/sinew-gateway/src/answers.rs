//! Answers that a later request of the same rollout may continue (`previous_response_id`).
//!
//! Each keeps what it added to the one before it, so that a long conversation is kept once.

use crate::dialect::{Continuation, ModelRequest};
use crate::error::ApiError;
use crate::session::{Prompt, message_bytes};
use serde::{Deserialize, Serialize};
use sinew_types::Message;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Most answers that a rollout keeps.
const MAX_KEPT: usize = 4096;

/// Most messages of a continued conversation.
const MAX_MESSAGES: usize = 65_536;

/// Most bytes of messages that a rollout keeps.
const MAX_BYTES: u64 = 16 << 20;

/// What came before an answer's own messages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Before {
    Nothing,
    /// An answer and all before it.
    Answer(String),
    /// What that answer was given, without what the model said.
    Question(String),
}

/// An answer that may be gone on from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Answer {
    id: String,
    before: Before,
    /// New messages of the request, and what the model said.
    added: Vec<Message>,
}

impl Answer {
    /// What to keep of a call, if it is to be kept: `id` is the call's, `said` the model's turn.
    pub(crate) fn of(id: &str, request: &ModelRequest, said: &Message) -> Option<Self> {
        let Prompt::Messages(messages) = &request.prompt else {
            return None;
        };
        let continuation = request.continuation.as_ref().filter(|c| c.keep)?;
        let mut added = messages[continuation.own_from.min(messages.len())..].to_vec();
        added.push(said.clone());
        let before = match (&continuation.previous, &continuation.grown_from) {
            (Some(id), _) => Before::Answer(id.clone()),
            (None, Some(id)) => Before::Question(id.clone()),
            (None, None) => Before::Nothing,
        };
        Some(Self {
            id: format!("{}{id}", continuation.prefix),
            before,
            added,
        })
    }
}

#[derive(Debug, Default)]
struct Answers {
    by_id: HashMap<String, Answer>,
    bytes: u64,
}

/// The answers of one rollout, by id.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    answers: Mutex<Answers>,
}

impl Kept {
    fn answers(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is an answer under this id.
    pub(crate) fn has(&self, id: &str) -> bool {
        self.answers().by_id.contains_key(id)
    }

    /// What the model said in an answer.
    pub(crate) fn said(&self, id: &str) -> Option<Message> {
        self.answers().by_id.get(id)?.added.last().cloned()
    }

    /// Puts the conversation that a request continues before its messages.
    ///
    /// # Errors
    /// If there is no such answer.
    pub(crate) fn restore(&self, request: &mut ModelRequest) -> Result<(), ApiError> {
        let Some(Continuation {
            previous: Some(previous),
            own_from,
            ..
        }) = &mut request.continuation
        else {
            return Ok(());
        };
        let Prompt::Messages(messages) = &mut request.prompt else {
            return Ok(());
        };
        let answers = self.answers();
        let mut parts = Vec::new();
        let mut count = 0;
        let mut next = Some((previous.as_str(), true));
        while let Some((id, with_answer)) = next {
            let answer = answers.by_id.get(id).ok_or_else(|| ApiError {
                code: "previous_response_not_found",
                ..ApiError::invalid(
                    "previous_response_id",
                    format!(
                        "no response {id:?} in this rollout: it was made with store: false, in \
                         another rollout, or after {MAX_KEPT} responses or {MAX_BYTES} bytes of \
                         them"
                    ),
                )
            })?;
            let said = answer.added.len() - usize::from(!with_answer);
            count += said;
            if count > MAX_MESSAGES {
                return Err(ApiError::invalid(
                    "previous_response_id",
                    format!("the conversation has more than {MAX_MESSAGES} messages"),
                ));
            }
            parts.push(&answer.added[..said]);
            next = match &answer.before {
                Before::Nothing => None,
                Before::Answer(id) => Some((id, true)),
                Before::Question(id) => Some((id, false)),
            };
        }
        let carried: Vec<Message> = parts.into_iter().rev().flatten().cloned().collect();
        let at = *own_from;
        *own_from += carried.len();
        messages.splice(at..at, carried);
        Ok(())
    }

    /// Keeps an answer under its id, before anyone is told of it.
    pub(crate) fn keep(&self, answer: Answer) {
        let bytes: u64 = answer.added.iter().map(message_bytes).sum();
        let mut answers = self.answers();
        // A full memory keeps no more: what is kept stays whole.
        if answers.by_id.len() < MAX_KEPT && answers.bytes + bytes <= MAX_BYTES {
            answers.bytes += bytes;
            answers.by_id.insert(answer.id.clone(), answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::Role;

    fn request(previous: Option<&str>, texts: &[&str]) -> ModelRequest {
        let mut messages = vec![Message::new(Role::System, "instructions")];
        messages.extend(texts.iter().map(|t| Message::new(Role::User, *t)));
        let mut request = ModelRequest::new("m", Prompt::Messages(messages));
        request.continuation = Some(Continuation {
            prefix: "resp_",
            previous: previous.map(str::to_owned),
            grown_from: None,
            keep: true,
            own_from: 1,
        });
        request
    }

    fn keep(kept: &Kept, id: &str, request: &ModelRequest, said: &str) {
        let said = Message::new(Role::Assistant, said);
        let Some(answer) = Answer::of(id, request, &said) else {
            return;
        };
        // As it comes back from a journal.
        let written = serde_json::to_string(&answer).unwrap();
        kept.keep(serde_json::from_str(&written).unwrap());
    }

    fn texts(request: &ModelRequest) -> Vec<String> {
        match &request.prompt {
            Prompt::Messages(messages) => messages.iter().map(|m| m.content.to_string()).collect(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn a_chain_is_put_together_without_old_instructions() {
        let kept = Kept::default();
        keep(&kept, "1", &request(None, &["a", "b"]), "one");
        let mut second = request(Some("resp_1"), &["c"]);
        kept.restore(&mut second).unwrap();
        assert_eq!(texts(&second), ["instructions", "a", "b", "one", "c"]);
        keep(&kept, "2", &second, "two");
        let mut third = request(Some("resp_2"), &["d"]);
        kept.restore(&mut third).unwrap();
        let expected = ["instructions", "a", "b", "one", "c", "two", "d"];
        assert_eq!(texts(&third), expected);
        // An answer can be continued twice.
        let mut other = request(Some("resp_1"), &["e"]);
        kept.restore(&mut other).unwrap();
        assert_eq!(texts(&other), ["instructions", "a", "b", "one", "e"]);
    }

    #[test]
    fn a_request_that_has_grown_keeps_only_what_is_new() {
        let kept = Kept::default();
        keep(&kept, "1", &request(None, &["a"]), "one");
        // "a", what the client made of "one", "b"; only the last two were read.
        let mut grown = request(None, &["One", "b"]);
        if let Some(continuation) = &mut grown.continuation {
            continuation.grown_from = Some("resp_1".into());
        }
        keep(&kept, "2", &grown, "two");
        let mut next = request(Some("resp_2"), &["c"]);
        kept.restore(&mut next).unwrap();
        assert_eq!(texts(&next), ["instructions", "a", "One", "b", "two", "c"]);
    }

    #[test]
    fn a_full_memory_keeps_no_more() {
        let kept = Kept::default();
        let long = "x".repeat(MAX_BYTES as usize / 2);
        for id in ["1", "2", "3"] {
            keep(&kept, id, &request(None, &[&long]), "");
        }
        assert!(kept.has("resp_1") && kept.has("resp_2"));
        assert!(!kept.has("resp_3"));
    }

    #[test]
    fn what_was_not_kept_is_not_found() {
        let kept = Kept::default();
        let mut unkept = request(None, &["a"]);
        if let Some(continuation) = &mut unkept.continuation {
            continuation.keep = false;
        }
        keep(&kept, "1", &unkept, "one");
        let error = kept
            .restore(&mut request(Some("resp_1"), &["b"]))
            .unwrap_err();
        assert_eq!(error.code, "previous_response_not_found");
        assert_eq!(error.param.as_deref(), Some("previous_response_id"));
        kept.restore(&mut request(None, &["b"])).unwrap();
    }
}
