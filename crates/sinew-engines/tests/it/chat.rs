//! Servers that only chat: messages out of ids, answers into ids, counts of tokens.

use crate::support::{config, remote, submit};
use serde_json::{Value, json};
use sinew_engines::{
    ChatBackend, ChatCodec, ChatContext, ChatReply, ChatUsage, RemoteEngine, ServerConfig,
};
use sinew_types::{
    Engine, EngineError, Fidelity, FinishReason, GenerateRequest, Message, RequestId, Role,
    SamplingParams, TokenId, ToolCall, ToolSpec,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Id that ends a turn.
const STOP: TokenId = 256;

/// A user's message of bytes; answers are text, then names of calls.
struct Bytes;

impl ChatCodec for Bytes {
    fn read(&self, ids: &[TokenId]) -> Result<ChatContext, EngineError> {
        let bytes: Vec<u8> = ids.iter().map(|id| *id as u8).collect();
        let text = String::from_utf8(bytes).map_err(|e| EngineError::Failed(e.to_string()))?;
        let mut called = Message::new(Role::Assistant, "");
        called.tool_calls.push(ToolCall {
            id: "call-1".into(),
            name: "add".into(),
            arguments: json!({"a": 1}),
        });
        let mut result = Message::new(Role::Tool, "1");
        result.tool_call_id = Some("call-1".into());
        Ok(ChatContext {
            messages: vec![Message::new(Role::User, text), called, result],
            tools: vec![ToolSpec {
                name: "add".into(),
                description: "Adds.".into(),
                parameters: json!({"type": "object"}),
            }],
        })
    }

    fn write(&self, reply: &ChatReply) -> Vec<TokenId> {
        let calls = reply
            .calls
            .iter()
            .map(|c| format!("[{} {}]", c.name, c.arguments));
        let text = reply.content.clone() + &calls.collect::<String>();
        text.bytes().map(TokenId::from).collect()
    }
}

type Answer = dyn Fn(usize, &Value) -> (u16, Value) + Send + Sync;

/// A server that answers chats by a function of the request's number and body.
fn server(answer: Box<Answer>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let shared = Arc::new((answer, Mutex::new(0)));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let shared = Arc::clone(&shared);
            // A connection that is tried and left needs no answer.
            std::thread::spawn(move || stream.ok().and_then(|s| one(s, &shared.0, &shared.1)));
        }
    });
    url
}

fn one(mut stream: TcpStream, answer: &Answer, count: &Mutex<usize>) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? <= 2 {
            break;
        }
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
        head += &line;
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let (status, said) = if head.starts_with("POST /v1/chat/completions") {
        let mut count = count.lock().unwrap();
        *count += 1;
        answer(*count - 1, &serde_json::from_slice(&body).ok()?)
    } else if head.starts_with("GET /v1/models") {
        (200, json!({"data": [{"id": "first"}]}))
    } else {
        (404, json!({}))
    };
    let said = said.to_string();
    write!(
        stream,
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{said}",
        said.len()
    )
    .ok()
}

/// An answer with counts of tokens.
fn said(message: Value, finish: &str) -> (u16, Value) {
    let choice = json!({"index": 0, "message": message, "finish_reason": finish});
    let usage = json!({"prompt_tokens": 20, "completion_tokens": 3});
    (200, json!({"choices": [choice], "usage": usage}))
}

type Counts = Arc<Mutex<Vec<ChatUsage>>>;

fn engine(url: String, model: Option<&str>) -> (RemoteEngine, Counts) {
    let counts = Counts::default();
    let kept = Arc::clone(&counts);
    let server = ServerConfig {
        model: model.map(str::to_owned),
        vocab: Some(257),
        ..ServerConfig::new(url)
    };
    let count = Arc::new(move |usage| kept.lock().unwrap().push(usage));
    let backend = ChatBackend::new(server, Arc::new(Bytes), 64, count).unwrap();
    (remote(vec![Arc::new(backend)], config()), counts)
}

fn request(id: u64, max_tokens: u32) -> GenerateRequest {
    let sampling = SamplingParams {
        max_tokens,
        temperature: 0.5,
        top_p: 0.75,
        stop_ids: vec![STOP],
        seed: id,
        ..SamplingParams::default()
    };
    let prompt: Vec<TokenId> = b"hello".iter().map(|b| TokenId::from(*b)).collect();
    GenerateRequest::new(RequestId(id), prompt, sampling)
}

fn text(ids: &[TokenId]) -> String {
    ids.iter().map(|id| char::from(*id as u8)).collect()
}

#[test]
fn messages_tools_and_limits_are_sent_and_tokens_counted() {
    let url = server(Box::new(|_, body| {
        assert_eq!(body["model"], "named");
        assert_eq!(
            body["messages"][0],
            json!({"role": "user", "content": "hello"})
        );
        let call = &body["messages"][1]["tool_calls"][0];
        assert_eq!(
            (&call["id"], &call["type"]),
            (&json!("call-1"), &json!("function"))
        );
        assert_eq!(call["function"]["arguments"], "{\"a\":1}");
        assert_eq!(body["messages"][2]["tool_call_id"], "call-1");
        assert_eq!(body["tools"][0]["function"]["name"], "add");
        assert_eq!(
            (&body["max_tokens"], &body["top_p"]),
            (&json!(64), &json!(0.75))
        );
        let call =
            json!({"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}});
        said(json!({"content": null, "tool_calls": [call]}), "tool_calls")
    }));
    let (engine, counts) = engine(url, Some("named"));
    assert!(matches!(engine.fidelity(), Fidelity::Evaluation { .. }));
    let outcome = submit(&engine, request(1, 1000)).outcome();
    let ids = outcome.ids();
    assert_eq!(outcome.reason(), &FinishReason::StopId { id: STOP });
    assert_eq!(
        (text(&ids[..ids.len() - 1]).as_str(), ids.last()),
        ("[add {}]", Some(&STOP))
    );
    let usage = ChatUsage {
        prompt: 20,
        sampled: 3,
        is_counted: true,
    };
    assert_eq!(*counts.lock().unwrap(), [usage]);
}

#[test]
fn answers_are_cut_by_the_server_the_context_or_the_room() {
    let url = server(Box::new(|number, body| match number {
        0 => said(json!({"content": "seven"}), "length"),
        1 => {
            let error = json!({"code": "context_length_exceeded", "message": "too long"});
            (400, json!({"error": error}))
        }
        _ => {
            assert_eq!(body["model"], "first");
            (
                200,
                json!({"choices": [{"message": {"content": "eleven"}, "finish_reason": "stop"}]}),
            )
        }
    }));
    let (engine, counts) = engine(url, None);
    let cut = submit(&engine, request(1, 1000)).outcome();
    // The server's limit is not that of the request.
    assert_eq!(
        (text(&cut.ids()).as_str(), cut.reason()),
        ("seven", &FinishReason::ContextFull)
    );
    let full = submit(&engine, request(2, 1000)).outcome();
    assert_eq!(
        (full.ids().len(), full.reason()),
        (0, &FinishReason::ContextFull)
    );
    let room = submit(&engine, request(3, 4)).outcome();
    assert_eq!(
        (text(&room.ids()).as_str(), room.reason()),
        ("elev", &FinishReason::Length)
    );
    let counts = counts.lock().unwrap();
    assert_eq!(counts.len(), 2);
    // A server without counts: bytes of the question and of the answer.
    assert!(!counts[1].is_counted && counts[1].prompt > 100 && counts[1].sampled == 6);
}

#[test]
fn the_newer_name_of_the_limit_is_learned_once() {
    let url = server(Box::new(|number, body| {
        if body.get("max_tokens").is_some() {
            assert_eq!(number, 0);
            let message =
                "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.";
            return (400, json!({"error": {"message": message}}));
        }
        assert_eq!(body["max_completion_tokens"], 64);
        said(json!({"content": "yes"}), "stop")
    }));
    let (engine, _) = engine(url, None);
    for id in 1..3 {
        let outcome = submit(&engine, request(id, 1000)).outcome();
        assert_eq!(outcome.ids().len(), 4);
    }
}

#[test]
fn a_refused_request_fails_with_the_words_of_the_server() {
    let url = server(Box::new(|_, _| {
        (400, json!({"error": {"message": "no such model"}}))
    }));
    let (engine, counts) = engine(url, None);
    let error = submit(&engine, request(1, 10)).outcome().error();
    assert!(error.contains("no such model"), "{error}");
    assert!(counts.lock().unwrap().is_empty());
}
