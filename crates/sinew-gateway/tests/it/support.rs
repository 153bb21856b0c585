//! A gateway with a fake engine, and a client for it.

use futures::future::BoxFuture;
use serde_json::{Value, json};
use sinew_gateway::{
    Capacity, CapacityPermit, Gateway, GatewayConfig, GatewayParts, Journal, JournalOptions, Server,
};
use sinew_grammar::{Grammars, GuidedGrammars, Vocabulary};
use sinew_http::blocking::{Client, RequestBuilder};
use sinew_http::{ClientOptions, HttpError, Method};
use sinew_infer::{FakeConfig, FakeEngine, FakeModel, TokenBytes};
use sinew_render::{ChatRenderer, Renderer};
use sinew_store::{MemoryStore, TraceStore};
use sinew_types::{Engine, EpisodeId, GenerateRequest, TokenId};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

pub(crate) const CONTROL: &str = "control-token-of-the-tests";

/// Makes masks for the tokens of the tests' renderer.
pub(crate) fn grammars() -> Arc<dyn Grammars> {
    let renderer = sinew_render::byte_renderer().unwrap();
    let ids = 0..renderer.vocab_size() as TokenId;
    let bytes = |id| renderer.token_bytes(id).map(Vec::into_boxed_slice);
    let vocabulary = Vocabulary {
        tokens: ids.clone().map(bytes).collect(),
        special: ids.filter(|&id| renderer.is_special(id)).collect(),
        end: renderer.stop_ids()[0],
        columns: renderer.vocab_size(),
        source: Vec::new(),
        encode: Arc::new(|text| text.bytes().map(TokenId::from).collect()),
    };
    Arc::new(GuidedGrammars::new(vocabulary).unwrap())
}

/// Answer of the engine to a conversation that ends with these words; nothing else matches.
pub(crate) type Answers = fn(&str) -> Option<String>;

/// Everything up to `<hang>` is sent at once, then nothing more.
pub(crate) struct World {
    pub(crate) gateway: Gateway,
    pub(crate) url: String,
    pub(crate) engine: Arc<FakeEngine>,
    pub(crate) store: Arc<MemoryStore>,
    pub(crate) renderer: Arc<ChatRenderer>,
    server: Option<Server>,
    runtime: tokio::runtime::Runtime,
}

/// A gateway whose engine gives the scripted answers; `change` edits both configurations.
pub(crate) fn world_with(
    answers: Answers,
    change: impl FnOnce(&mut GatewayConfig, &mut FakeConfig),
) -> World {
    world_in(answers, change, None)
}

/// The same with a journal that outlives it.
pub(crate) fn world_in(
    answers: Answers,
    change: impl FnOnce(&mut GatewayConfig, &mut FakeConfig),
    journal: Option<&Path>,
) -> World {
    world_behind(answers, change, journal, None)
}

/// An engine that samples the bytes of `answers` to the text of a prompt.
fn scripted<R: Renderer + 'static>(renderer: Arc<R>, answers: Answers) -> FakeConfig {
    let ids = 0..renderer.vocab_size() as TokenId;
    let bytes = ids.map(|id| renderer.token_bytes(id).unwrap_or_default());
    let bytes = TokenBytes::new(bytes);
    let stop = renderer.stop_ids()[0];
    let vocab = renderer.vocab_size();
    let script = move |request: &GenerateRequest| {
        let prompt = renderer.decode_with_special(&request.prompt);
        let text = answers(&prompt)?;
        let mut ids: Vec<TokenId> = text.bytes().map(TokenId::from).collect();
        ids.push(stop);
        Some(ids)
    };
    FakeConfig {
        model: FakeModel {
            vocab,
            seed: 0,
            end: None,
        },
        token_bytes: Some(bytes),
        script: Some(Arc::new(script)),
        ..FakeConfig::default()
    }
}

/// The same with a gate in front of the engine.
pub(crate) fn world_behind(
    answers: Answers,
    change: impl FnOnce(&mut GatewayConfig, &mut FakeConfig),
    journal: Option<&Path>,
    capacity: Option<Arc<dyn Capacity>>,
) -> World {
    let journal = journal
        .map(|directory| Arc::new(Journal::open(directory, JournalOptions::default()).unwrap()));
    let renderer = Arc::new(sinew_render::byte_renderer().unwrap());
    let mut fake = scripted(Arc::clone(&renderer), answers);
    let mut config = GatewayConfig {
        journal,
        ..GatewayConfig::default()
    };
    // Clients that leave do not come back, unless a test sets this.
    config.server.client_grace = Duration::ZERO;
    change(&mut config, &mut fake);
    let start = Instant::now();
    let clock = Box::new(move || start.elapsed().as_secs_f64());
    let engine = Arc::new(FakeEngine::threaded(fake, clock).unwrap());
    let store = Arc::new(MemoryStore::new(1 << 30));
    let gateway = Gateway::new(
        config,
        GatewayParts {
            engine: Arc::clone(&engine) as Arc<dyn Engine>,
            renderer: Arc::clone(&renderer) as Arc<dyn Renderer>,
            store: Some(Arc::clone(&store) as Arc<dyn TraceStore>),
            requests: Arc::new(AtomicU64::new(1)),
            capacity,
            hooks: None,
        },
    );
    gateway.recover().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let address = "127.0.0.1:0".parse().unwrap();
    let server = runtime
        .block_on(Server::start(gateway.clone(), address, CONTROL, None))
        .unwrap();
    World {
        url: format!("http://{}", server.address()),
        gateway,
        engine,
        store,
        renderer,
        server: Some(server),
        runtime,
    }
}

/// Room for as many calls as its semaphore has permits.
pub(crate) struct Narrow {
    pub(crate) room: Arc<Semaphore>,
    pub(crate) waiting: Arc<AtomicUsize>,
}

struct Waits(Arc<AtomicUsize>);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Capacity for Narrow {
    fn acquire<'a>(&'a self, _: &'a EpisodeId, _: &'a [TokenId]) -> BoxFuture<'a, CapacityPermit> {
        Box::pin(async {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            let _waits = Waits(Arc::clone(&self.waiting));
            Box::new(Arc::clone(&self.room).acquire_owned().await.unwrap()) as CapacityPermit
        })
    }
}

pub(crate) fn world(answers: Answers) -> World {
    world_with(answers, |_, _| {})
}

/// Status, headers that tests look at, body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) retry_after: Option<String>,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    /// The body of an answer that must be good.
    pub(crate) fn ok(&self) -> Value {
        assert!((200..300).contains(&self.status), "{self:?}");
        self.json()
    }

    pub(crate) fn error(&self, field: &str) -> String {
        self.json()["error"][field]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }
}

/// A request that waits so long for an answer, and again for each further read of it.
pub(crate) fn request(patience: Duration, method: &str, url: &str) -> RequestBuilder {
    let method = Method::from_bytes(method.as_bytes()).unwrap();
    let client = Client::new(ClientOptions {
        stall: Some(patience),
        keep_alive: false,
        ..ClientOptions::default()
    });
    client.unwrap().request(method, url)
}

/// Status, pause that is asked for, and body of an answer.
type Reply = (u16, Option<String>, Box<dyn Read + Send>);

/// One request on a separate connection.
pub(crate) fn send(
    method: &str,
    url: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Result<Reply, HttpError> {
    let mut request = request(Duration::from_secs(60), method, url);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = request.body(body.to_vec()).send()?;
    let retry = response.headers().get("retry-after");
    let retry = retry.map(|v| v.to_str().unwrap().to_owned());
    Ok((response.status().as_u16(), retry, Box::new(response)))
}

pub(crate) fn answer(method: &str, url: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    let (status, retry_after, mut reader) = send(method, url, headers, body).unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    Answer {
        status,
        retry_after,
        text,
    }
}

impl World {
    pub(crate) fn control(&self, method: &str, path: &str, body: &Value) -> Answer {
        let key = format!("Bearer {CONTROL}");
        let url = format!("{}{path}", self.url);
        let body = body.to_string();
        answer(
            method,
            &url,
            &[("authorization", key.as_str())],
            body.as_bytes(),
        )
    }

    pub(crate) fn open(&self) -> Opened {
        let raw = self.control("POST", "/rollouts", &json!({})).ok();
        Opened {
            id: raw["id"].as_str().unwrap().to_owned(),
            base_url: raw["base_url"].as_str().unwrap().to_owned(),
            key: format!("Bearer {}", raw["api_key"].as_str().unwrap()),
        }
    }

    pub(crate) fn view(&self, id: &str) -> Value {
        self.control("GET", &format!("/rollouts/{id}"), &json!({}))
            .ok()
    }

    pub(crate) fn finish(&self, id: &str) -> Value {
        let path = format!("/rollouts/{id}/finish");
        self.control("POST", &path, &json!({})).ok()
    }

    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Waits until something holds; fails after a minute.
    pub(crate) fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !holds() {
            assert!(Instant::now() < deadline, "never: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends for good, and reports it for a minute.
    pub(crate) fn end(&mut self) {
        if let Some(server) = self.server.take() {
            self.runtime.spawn(server.end(Duration::from_secs(60)));
        }
    }

    /// Stops the gateway, and returns the number of calls that had to be cut.
    pub(crate) fn stop(&mut self) -> usize {
        let server = self.server.take();
        server.map_or(0, |server| self.runtime.block_on(server.stop()))
    }
}

/// A rollout as its agent sees it.
pub(crate) struct Opened {
    pub(crate) id: String,
    pub(crate) base_url: String,
    pub(crate) key: String,
}

impl Opened {
    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_with(path, body, &[])
    }

    pub(crate) fn post_with(&self, path: &str, body: &Value, more: &[(&str, &str)]) -> Answer {
        let url = format!("{}{path}", self.base_url);
        let mut headers = vec![("authorization", self.key.as_str())];
        headers.extend_from_slice(more);
        answer("POST", &url, &headers, body.to_string().as_bytes())
    }

    /// A call whose client leaves when the connection is dropped.
    pub(crate) fn ask(&self, body: &Value) -> TcpStream {
        let address = self.base_url.strip_prefix("http://").unwrap();
        let (address, path) = address.split_at(address.find('/').unwrap());
        let text = body.to_string();
        let mut client = TcpStream::connect(address).unwrap();
        let request = format!(
            "POST {path}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: {}\r\n\
             content-length: {}\r\n\r\n{text}",
            self.key,
            text.len()
        );
        client.write_all(request.as_bytes()).unwrap();
        client
    }

    pub(crate) fn chat(&self, messages: &Value) -> Value {
        let body = json!({"model": "m", "messages": messages});
        self.post("/chat/completions", &body).ok()
    }
}

/// The Python of the tests, with the clients of all providers.
pub(crate) fn python() -> PathBuf {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/venv/bin/python3");
    let shown = python.display();
    assert!(python.exists(), "{shown} is missing: run scripts/setup.sh");
    python
}

/// A Python program that finds a rollout at the variables of each provider's clients.
pub(crate) fn client(program: &Path, rollout: &Opened) -> Command {
    let origin = rollout.base_url.trim_end_matches("/v1");
    let key = rollout.key.trim_start_matches("Bearer ");
    let mut command = Command::new(python());
    command
        .arg(program)
        .env("OPENAI_BASE_URL", &rollout.base_url)
        .env("OPENAI_API_KEY", key)
        .env("ANTHROPIC_BASE_URL", origin)
        .env("ANTHROPIC_API_KEY", key)
        .env("GOOGLE_GEMINI_BASE_URL", origin)
        .env("GEMINI_API_KEY", key)
        .env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Runs a Python program of this folder as a client of a rollout; it must succeed.
pub(crate) fn run_client(program: &str, rollout: &Opened) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it");
    let done = client(&folder.join(program), rollout).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let output = format!("{}\n{}", text(&done.stdout), text(&done.stderr));
    assert!(done.status.success(), "{output}");
}

/// The JSON of a stream's events; the last one must be `[DONE]`.
pub(crate) fn events(text: &str) -> Vec<Value> {
    let mut data: Vec<&str> = text
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "))
        .collect();
    assert_eq!(data.pop(), Some("[DONE]"), "{text}");
    data.into_iter()
        .map(|event| serde_json::from_str(event).unwrap())
        .collect()
}
