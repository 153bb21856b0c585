//! Samples, models that answer by a function, and a small HTTP server.

use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use sinew_env::RewardSample;
use sinew_judge::{
    ChatAnswer, ChatError, ChatModel, ChatRequest, Item, JudgeConfig, Limits, Mode, Rubric, Usage,
    View,
};
use sinew_types::{Message, Role, Task, TaskId};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An answer to `prompt`.
pub(crate) fn sample(output: &str) -> RewardSample {
    let task = Task {
        id: TaskId::new("t"),
        kind: "k".into(),
        prompt: "Say it.".into(),
        data: json!({"answer": "it"}),
        ..Task::default()
    };
    RewardSample {
        messages: vec![
            Message::new(Role::User, "Say it.".to_owned()),
            Message::new(Role::Assistant, output.to_owned()),
        ],
        ..RewardSample::new(task, output)
    }
}

/// Two items of weights 1 and 3.
pub(crate) fn config(mode: Mode) -> JudgeConfig {
    let item = |text: &str, weight| Item {
        text: text.into(),
        weight,
    };
    JudgeConfig {
        name: "judge.quality".into(),
        rubric: Rubric::new(vec![item("good", 1.0), item("short", 3.0)]).unwrap(),
        view: View::Last,
        columns: Vec::new(),
        mode,
        votes: 1,
        retries: 2,
        temperature: 0.0,
        max_tokens: 64,
        reasons: false,
        concurrency: 4,
        cache: true,
        limits: Limits::default(),
    }
}

/// Id of a judge's question, and its data.
pub(crate) fn asked(request: &ChatRequest) -> (String, Value) {
    read_question(&request.messages.last().unwrap().content.text())
}

/// Same as [`asked`], from the text of the last message.
pub(crate) fn read_question(text: &str) -> (String, Value) {
    let (_, rest) = text.split_once("BEGIN DATA ").unwrap();
    let (id, rest) = rest.split_once('\n').unwrap();
    let (data, _) = rest.split_once("\nEND DATA").unwrap();
    (id.to_owned(), serde_json::from_str(data).unwrap())
}

type Answer = dyn Fn(usize, &ChatRequest) -> Result<String, ChatError> + Send + Sync;

/// A model that answers by a function of the call's number and the question.
pub(crate) struct Scripted {
    answer: Box<Answer>,
    calls: AtomicUsize,
}

impl Scripted {
    pub(crate) fn new(
        answer: impl Fn(usize, &ChatRequest) -> Result<String, ChatError> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            answer: Box::new(answer),
            calls: AtomicUsize::new(0),
        })
    }

    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }
}

impl ChatModel for Scripted {
    fn identity(&self) -> String {
        "scripted".into()
    }

    fn ask<'a>(&'a self, request: &'a ChatRequest) -> BoxFuture<'a, Result<ChatAnswer, ChatError>> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        async move {
            tokio::task::yield_now().await;
            (self.answer)(call, request).map(|text| ChatAnswer {
                text,
                cut: false,
                usage: Some(Usage {
                    input: 10,
                    output: 2,
                }),
            })
        }
        .boxed()
    }
}

/// A request as a server sees it.
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) authorization: String,
    pub(crate) body: Value,
}

/// Answers each request on a separate thread with a status and a body. Returns the address; the server lives
/// as long as the process.
pub(crate) fn serve(
    answer: impl Fn(usize, &Seen) -> (u16, String) + Send + Sync + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let shared = Arc::new((answer, AtomicUsize::new(0)));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, shared) = (stream.unwrap(), Arc::clone(&shared));
            std::thread::spawn(move || one(stream, &shared.0, &shared.1));
        }
    });
    url
}

fn one(
    mut stream: TcpStream,
    answer: &(impl Fn(usize, &Seen) -> (u16, String) + Send + Sync),
    calls: &AtomicUsize,
) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) <= 2 {
            break;
        }
        head.push(line.trim().to_owned());
    }
    let header = |name: &str| {
        let line = head.iter().find(|l| l.to_lowercase().starts_with(name));
        line.map_or(String::new(), |l| l[name.len()..].trim().to_owned())
    };
    let mut body = vec![0; header("content-length:").parse().unwrap_or(0)];
    reader.read_exact(&mut body).unwrap();
    let seen = Seen {
        path: head[0].split(' ').nth(1).unwrap().to_owned(),
        authorization: header("authorization:"),
        body: serde_json::from_slice(&body).unwrap_or_default(),
    };
    let (status, text) = answer(calls.fetch_add(1, Ordering::SeqCst), &seen);
    // A client that went away needs no answer.
    let _ = write!(
        stream,
        "HTTP/1.1 {status} Status\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
        text.len()
    );
}
