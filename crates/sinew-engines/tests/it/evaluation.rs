//! Servers that return only text: good for scores, never for training.

use crate::mock::{END, Kind, MODEL, Mock, OneTensor, VOCAB, text_of};
use crate::support::{config, remote, request, server, submit, try_submit};
use sinew_engines::{OpenaiBackend, RemoteEngine, TextCodec};
use sinew_types::{Engine, EngineError, Fidelity, FinishReason, PolicyVersion, TokenId};
use std::sync::Arc;

struct Words;

impl TextCodec for Words {
    fn decode(&self, ids: &[TokenId]) -> String {
        ids.iter().map(|id| text_of(*id)).collect()
    }

    fn encode(&self, text: &str) -> Vec<TokenId> {
        let words = text.split_whitespace();
        words.map(|w| u32::from_str_radix(w, 16).unwrap()).collect()
    }
}

fn engine(mock: &Mock, codec: bool) -> RemoteEngine {
    let codec = codec.then(|| Arc::new(Words) as Arc<dyn TextCodec>);
    let backend = OpenaiBackend::new(server(mock), codec).unwrap();
    remote(vec![Arc::new(backend)], config())
}

/// A prompt after which the model answers.
fn prompt() -> Vec<u32> {
    let talks = |prompt: &Vec<u32>| MODEL.logprob(prompt, END) < -0.1;
    (20..VOCAB as u32)
        .map(|id| vec![5, 6, id])
        .find(talks)
        .unwrap()
}

#[test]
fn it_says_that_it_is_for_evaluation_and_takes_no_weights() {
    let mock = Mock::start(Kind::Openai);
    let engine = engine(&mock, true);
    let Fidelity::Evaluation { why } = engine.fidelity() else {
        panic!("it must not be trained on");
    };
    assert!(why.contains("token ids"), "{why}");
    let error = engine.load_weights(PolicyVersion(1), Arc::new(OneTensor([1.0])));
    assert!(matches!(error, Err(EngineError::Weights(why)) if why.contains("evaluation")));
}

#[test]
fn text_is_made_into_ids_and_the_end_is_added() {
    let mock = Mock::start(Kind::Openai);
    let engine = engine(&mock, true);
    let mut stops = 0;
    for id in 0..8 {
        let outcome = submit(&engine, request(id, &[5, 6, id as u32 + 20], 12)).outcome();
        match outcome.reason() {
            FinishReason::StopId { id } => {
                stops += 1;
                assert_eq!((*id, outcome.ids().last()), (END, Some(&END)));
            }
            FinishReason::Length => assert_eq!(outcome.tokens.len(), 12),
            other => panic!("{other:?}"),
        }
    }
    assert!(stops > 0, "some stop early");
    assert!(
        mock.state
            .seen
            .lock()
            .unwrap()
            .iter()
            .all(|b| b["prompt"].is_string())
    );
}

#[test]
fn ids_that_a_server_tells_are_used() {
    let mock = Mock::start(Kind::OpenaiWithIds);
    let engine = engine(&mock, false);
    let outcome = submit(&engine, request(1, &prompt(), 6)).outcome();
    let mut prefix = prompt();
    for token in outcome.tokens.iter().filter(|t| t.id != END) {
        assert!((token.logprob - MODEL.logprob(&prefix, token.id)).abs() < 1e-4);
        prefix.push(token.id);
    }
    assert!(prefix.len() > 3);
}

#[test]
fn a_server_without_ids_needs_a_tokenizer() {
    let mock = Mock::start(Kind::Openai);
    let engine = engine(&mock, false);
    let error = submit(&engine, request(1, &prompt(), 6)).outcome().error();
    assert!(error.contains("tokenizer"), "{error}");
}

#[test]
fn what_the_protocol_lacks_is_refused_by_name() {
    let mock = Mock::start(Kind::Openai);
    let engine = engine(&mock, true);
    let mut request = request(1, &[5], 2);
    request.sampling.top_k = 5;
    let error = try_submit(&engine, request).err().unwrap();
    assert!(error.to_string().contains("top_k"), "{error}");
}
