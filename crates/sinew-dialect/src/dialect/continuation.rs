//! Continues stored answers of the same rollout by a request.

use super::ModelRequest;
use crate::answers::{Answers, Before, ChainError, StoredAnswer};
use crate::error::ApiError;
use crate::prompt::Prompt;
use sinew_types::Message;

/// Link of a request to answers of the same rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continuation {
    /// Prefix of the dialect's ids of answers.
    pub prefix: &'static str,
    /// The answer that it continues (`previous_response_id`).
    pub previous: Option<String>,
    /// The answer to the same messages without the last ones, which were the only ones read.
    pub grown_from: Option<String>,
    /// Store the answer, so that a request can continue it.
    pub keep: bool,
    /// Messages before this one are not stored with the answer.
    pub own_from: usize,
}

impl ModelRequest {
    /// Puts the conversation that the request continues before its messages.
    ///
    /// # Errors
    /// If there is no such answer.
    pub fn restore(&mut self, answers: &Answers) -> Result<(), ApiError> {
        let Some(Continuation {
            previous: Some(previous),
            own_from,
            ..
        }) = &mut self.continuation
        else {
            return Ok(());
        };
        let Prompt::Messages(messages) = &mut self.prompt else {
            return Ok(());
        };
        let before = answers.conversation(previous).map_err(|error| {
            let invalid = ApiError::invalid("previous_response_id", error.to_string());
            match error {
                ChainError::TooLong => invalid,
                ChainError::Unknown(_) => ApiError {
                    code: "previous_response_not_found",
                    ..invalid
                },
            }
        })?;
        let at = *own_from;
        *own_from += before.len();
        messages.splice(at..at, before);
        Ok(())
    }

    /// The answer to store, if the request asks for it: `id` is the call's, `said` the model's
    /// turn.
    pub fn stored_answer(&self, id: &str, said: &Message) -> Option<StoredAnswer> {
        let Prompt::Messages(messages) = &self.prompt else {
            return None;
        };
        let continuation = self.continuation.as_ref().filter(|c| c.keep)?;
        let mut added = messages[continuation.own_from.min(messages.len())..].to_vec();
        added.push(said.clone());
        let before = match (&continuation.previous, &continuation.grown_from) {
            (Some(id), _) => Before::Answer(id.clone()),
            (None, Some(id)) => Before::Question(id.clone()),
            (None, None) => Before::Nothing,
        };
        let id = format!("{}{id}", continuation.prefix);
        Some(StoredAnswer::new(id, before, added))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answers::Answers;
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

    fn keep(answers: &Answers, id: &str, request: &ModelRequest, said: &str) {
        let said = Message::new(Role::Assistant, said);
        let Some(answer) = request.stored_answer(id, &said) else {
            return;
        };
        // A journal would return it in this form.
        let written = serde_json::to_string(&answer).unwrap();
        answers.keep(serde_json::from_str(&written).unwrap());
    }

    fn texts(request: &ModelRequest) -> Vec<String> {
        match &request.prompt {
            Prompt::Messages(messages) => messages.iter().map(|m| m.content.to_string()).collect(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn a_chain_is_put_together_without_old_instructions() {
        let answers = Answers::default();
        keep(&answers, "1", &request(None, &["a", "b"]), "one");
        let mut second = request(Some("resp_1"), &["c"]);
        second.restore(&answers).unwrap();
        assert_eq!(texts(&second), ["instructions", "a", "b", "one", "c"]);
        keep(&answers, "2", &second, "two");
        let mut third = request(Some("resp_2"), &["d"]);
        third.restore(&answers).unwrap();
        let expected = ["instructions", "a", "b", "one", "c", "two", "d"];
        assert_eq!(texts(&third), expected);
        // An answer can be continued twice.
        let mut other = request(Some("resp_1"), &["e"]);
        other.restore(&answers).unwrap();
        assert_eq!(texts(&other), ["instructions", "a", "b", "one", "e"]);
    }

    #[test]
    fn a_request_that_has_grown_keeps_only_what_is_new() {
        let answers = Answers::default();
        keep(&answers, "1", &request(None, &["a"]), "one");
        // "a", what the client made of "one", "b"; only the last two were read.
        let mut grown = request(None, &["One", "b"]);
        if let Some(continuation) = &mut grown.continuation {
            continuation.grown_from = Some("resp_1".into());
        }
        keep(&answers, "2", &grown, "two");
        let mut next = request(Some("resp_2"), &["c"]);
        next.restore(&answers).unwrap();
        assert_eq!(texts(&next), ["instructions", "a", "One", "b", "two", "c"]);
    }

    #[test]
    fn a_full_memory_keeps_no_more() {
        let answers = Answers::default();
        let long = "x".repeat(8 << 20);
        for id in ["1", "2", "3"] {
            keep(&answers, id, &request(None, &[&long]), "");
        }
        assert!(answers.has("resp_1") && answers.has("resp_2"));
        assert!(!answers.has("resp_3"));
    }

    #[test]
    fn what_was_not_kept_is_not_found() {
        let answers = Answers::default();
        let mut unkept = request(None, &["a"]);
        if let Some(continuation) = &mut unkept.continuation {
            continuation.keep = false;
        }
        keep(&answers, "1", &unkept, "one");
        let error = request(Some("resp_1"), &["b"])
            .restore(&answers)
            .unwrap_err();
        assert_eq!(error.code, "previous_response_not_found");
        assert_eq!(error.param.as_deref(), Some("previous_response_id"));
        request(None, &["b"]).restore(&answers).unwrap();
    }
}
