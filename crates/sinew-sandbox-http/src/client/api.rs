//! Requests and answers of the API, and its errors as those of the port.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_http::{Client, ClientOptions, HttpError, Method, RequestBuilder, Response, read};
use sinew_sandbox::{
    Ending, ExecRequest, ExecResult, OutputChunk, OutputStream, Program, Protection, SandboxError,
    SandboxSpec, TerminalInput, TerminalSize, Usage,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// Time without a sign of life after which the server destroys a sandbox. While a sandbox is held, the client
/// renews it three times in this time.
pub const LEASE: Duration = Duration::from_secs(300);

/// Time for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for an answer, in addition to that of an execution.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum bytes of an answer that is not a file: two outputs in Base64, and the text around them.
const MAX_ANSWER: u64 = 256 << 20;

/// The server, and the key for it.
#[derive(Clone)]
pub(crate) struct Api {
    /// HTTP client with the connections that all sandboxes of a provider share.
    client: Client,
    /// Address without a slash at the end.
    url: Arc<str>,
    /// Token of an owner.
    token: Arc<str>,
    /// Name of the level that is requested.
    level: &'static str,
    /// Name of the image that is requested.
    image: Option<String>,
    /// Signs of the host's life that requests saw.
    signs: Arc<Signs>,
}

/// Signs that a host is not there, from the requests to it.
#[derive(Debug, Default)]
struct Signs {
    /// Requests whose connection failed.
    failures: AtomicU64,
    /// Number of times that the host was given up: requests that wait for it end.
    lost: watch::Sender<u64>,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api")
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

/// The body of an error.
#[derive(Deserialize)]
struct Refusal {
    error: Reason,
}

/// Reason why a request was refused.
#[derive(Deserialize)]
struct Reason {
    /// One word, for programs.
    code: String,
    /// A sentence, for users.
    message: String,
}

/// A result, with its output in Base64.
#[derive(Deserialize)]
struct ExecReply {
    ending: Ending,
    stdout: String,
    stderr: String,
    /// Whether output was cut.
    truncated: bool,
    usage: Usage,
    /// Protections in force on the other host.
    protections: Vec<Protection>,
}

impl ExecReply {
    /// The result of the port.
    ///
    /// # Errors
    /// Fails if the output is not Base64.
    fn into_result(self) -> Result<ExecResult, String> {
        Ok(ExecResult {
            ending: self.ending,
            stdout: decoded(&self.stdout)?,
            stderr: decoded(&self.stderr)?,
            truncated: self.truncated,
            usage: self.usage,
            protections: Arc::new(self.protections),
        })
    }
}

/// A line of a streamed execution.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    /// Output in Base64.
    Output { stream: OutputStream, data: String },
    /// The last line.
    Result { result: ExecReply },
    /// The last line of an execution that failed.
    Error { error: Reason },
}

/// Line of a streamed execution.
pub(crate) enum ExecLine {
    /// A piece of output.
    Output(OutputChunk),
    /// The end.
    Ended(Result<ExecResult, SandboxError>),
}

/// Bytes of a text in Base64.
fn decoded(text: &str) -> Result<Vec<u8>, String> {
    STANDARD
        .decode(text)
        .map_err(|e| format!("its output is no Base64: {e}"))
}

impl Api {
    /// The server at `url`, such as `http://10.0.0.7:8081`.
    ///
    /// # Errors
    /// If the address is none.
    pub(crate) fn new(
        url: &str,
        token: &str,
        level: &'static str,
        image: Option<String>,
    ) -> Result<Self, HttpError> {
        if !(url.starts_with("http://") || url.starts_with("https://")) {
            let why = "allowed: http:// or https:// and a host";
            return Err(HttpError::Address(why.to_owned()));
        }
        let client = Client::new(ClientOptions {
            connect: Some(CONNECT_TIMEOUT),
            deadline: Some(ANSWER_TIMEOUT),
            redirects: 10,
            proxy: true,
            ..ClientOptions::default()
        });
        Ok(Self {
            client: client?,
            url: url.trim_end_matches('/').into(),
            token: token.into(),
            level,
            image,
            signs: Arc::default(),
        })
    }

    /// Address of the host.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Number of requests whose connection failed.
    pub(crate) fn failures(&self) -> u64 {
        self.signs.failures.load(Ordering::Relaxed)
    }

    /// Gives the host up: all requests that wait for it end with [`SandboxError::HostLost`].
    pub(crate) fn give_up(&self) {
        self.signs.lost.send_modify(|times| *times += 1);
    }

    /// Waits for an answer, or until the host is given up.
    pub(crate) async fn unless_lost<T>(
        &self,
        answer: impl Future<Output = T>,
    ) -> Result<T, SandboxError> {
        let mut lost = self.signs.lost.subscribe();
        tokio::select! {
            answer = answer => Ok(answer),
            // The sender lives as long as this does.
            _ = lost.changed() => Err(self.host_lost("it does not answer any more")),
        }
    }

    /// A request to a path below `/v1`.
    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client
            .request(method, &format!("{}/v1/{path}", self.url))
            .bearer_auth(&self.token)
    }

    /// A request with a JSON body.
    pub(crate) fn json(&self, method: Method, path: &str, body: &Value) -> RequestBuilder {
        self.request(method, path)
            .header("content-type", "application/json")
            .body(body.to_string())
    }

    /// Sends a request. An answer that is an error becomes one of the port.
    pub(crate) async fn send(&self, request: RequestBuilder) -> Result<Response, SandboxError> {
        let answer = self.unless_lost(request.send()).await?;
        let answer = answer.map_err(|e| self.broken(e.into()))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status();
        let body = self.body(answer, MAX_ANSWER).await?;
        let refusal = serde_json::from_slice::<Refusal>(&body);
        Err(match refusal {
            Ok(refusal) => self.refused(refusal.error),
            Err(_) => self.lost(&format!("it answered {status} without a reason")),
        })
    }

    /// Sends a request, and reads the answer as JSON.
    pub(crate) async fn value(&self, request: RequestBuilder) -> Result<Value, SandboxError> {
        let answer = self.send(request).await?;
        let body = self.body(answer, MAX_ANSWER).await?;
        serde_json::from_slice(&body).map_err(|e| self.lost(&format!("its answer is no JSON: {e}")))
    }

    /// The bytes of an answer.
    ///
    /// # Errors
    /// If the connection ends, or there are more than `max_bytes`.
    pub(crate) async fn body(
        &self,
        answer: Response,
        max_bytes: u64,
    ) -> Result<Vec<u8>, SandboxError> {
        let body = self.unless_lost(read(answer, max_bytes)).await?;
        body.map_err(|e| self.broken(e))
    }

    /// Path for archives of snapshots: below `/v1`, with the level and the image of the sandboxes that start
    /// from them. Names of levels and images consist of letters, digits, `.`, `-` and `_`.
    pub(crate) fn import_path(&self) -> String {
        let image = self.image.as_ref().map(|name| format!("&image={name}"));
        format!(
            "snapshots?level={}{}",
            self.level,
            image.unwrap_or_default()
        )
    }

    /// Creates a sandbox, from a snapshot if there is one.
    pub(crate) async fn create(
        &self,
        spec: &SandboxSpec,
        snapshot: Option<&str>,
    ) -> Result<String, SandboxError> {
        let limits = &spec.limits;
        let env: serde_json::Map<String, Value> = spec
            .env
            .iter()
            .map(|(name, value)| (name.clone(), json!(value)))
            .collect();
        let mut body = json!({
            "level": self.level, "env": env, "strict": spec.strict, "lease_s": LEASE.as_secs_f64(),
            "limits": {
                "cpu_s": limits.cpu_s, "memory_bytes": limits.memory_bytes, "processes": limits.processes,
                "output_bytes": limits.output_bytes, "work_bytes": limits.work_bytes,
                "open_files": limits.open_files,
            },
        });
        if let Some(image) = &self.image {
            body["image"] = json!(image);
        }
        if let Some(snapshot) = snapshot {
            body["snapshot"] = json!(snapshot);
        }
        let made = self.json(Method::POST, "sandboxes", &body);
        self.text(&self.value(made).await?, "id")
    }

    /// A text of an answer.
    pub(crate) fn text(&self, answer: &Value, field: &str) -> Result<String, SandboxError> {
        let text = answer[field].as_str();
        text.map(str::to_owned)
            .ok_or_else(|| self.lost(&format!("its answer has no {field}")))
    }

    /// The request of an execution. Its answer may take the deadline of the execution and the time of any
    /// answer.
    pub(crate) fn exec(
        &self,
        id: &str,
        request: &ExecRequest,
        env: Vec<(String, String)>,
        stream: bool,
        terminal: Option<TerminalSize>,
    ) -> RequestBuilder {
        let env: serde_json::Map<String, Value> =
            env.into_iter().map(|(n, v)| (n, json!(v))).collect();
        let mut body = json!({
            "env": env, "timeout_s": request.deadline.as_secs_f64(), "stream": stream, "binary": true,
        });
        let (field, program) = match &request.program {
            Program::Argv(argv) => ("argv", json!(argv)),
            Program::Python(code) => ("python", json!(code)),
            Program::Shell(script) => ("shell", json!(script)),
        };
        body[field] = program;
        if let Some(size) = terminal {
            body["terminal"] = json!(size);
        }
        if !request.stdin.is_empty() {
            body["stdin_base64"] = json!(STANDARD.encode(&request.stdin));
        }
        self.json(Method::POST, &format!("sandboxes/{id}/exec"), &body)
            .timeout(request.deadline + ANSWER_TIMEOUT)
    }

    /// The request that reports an event at the terminal of a sandbox to the server.
    pub(crate) fn typed(&self, id: &str, input: TerminalInput) -> RequestBuilder {
        let body = match input {
            TerminalInput::Typed(bytes) => json!({ "typed_base64": STANDARD.encode(bytes) }),
            TerminalInput::Resized(size) => json!({ "size": size }),
        };
        self.json(Method::POST, &format!("sandboxes/{id}/terminal"), &body)
    }

    /// The result of an execution that was not streamed.
    pub(crate) fn ran(&self, answer: Value) -> Result<ExecResult, SandboxError> {
        let ran = serde_json::from_value::<ExecReply>(answer).map_err(|e| e.to_string());
        ran.and_then(ExecReply::into_result)
            .map_err(|e| self.lost(&format!("its result: {e}")))
    }

    /// A line of a streamed execution.
    pub(crate) fn line(&self, line: &[u8]) -> Result<ExecLine, SandboxError> {
        let wrong = |e: String| self.lost(&format!("a line of its output: {e}"));
        match serde_json::from_slice(line).map_err(|e| wrong(e.to_string()))? {
            Line::Output { stream, data } => {
                let bytes = decoded(&data).map_err(wrong)?;
                Ok(ExecLine::Output(OutputChunk { stream, bytes }))
            }
            Line::Result { result } => Ok(ExecLine::Ended(result.into_result().map_err(wrong))),
            Line::Error { error } => Ok(ExecLine::Ended(Err(self.refused(error)))),
        }
    }

    /// A server that does not answer as it should.
    pub(crate) fn lost(&self, why: &str) -> SandboxError {
        SandboxError::Died(format!("the sandbox server {}: {why}", self.url))
    }

    /// A host that cannot be reached.
    fn host_lost(&self, why: &str) -> SandboxError {
        SandboxError::HostLost {
            host: self.url.to_string(),
            reason: why.to_owned(),
        }
    }

    /// An error of the connection, or an answer that is too long.
    pub(crate) fn broken(&self, error: HttpError) -> SandboxError {
        match error {
            HttpError::TooLarge(max_bytes) => too_long(max_bytes),
            error => {
                self.signs.failures.fetch_add(1, Ordering::Relaxed);
                self.host_lost(&error.to_string())
            }
        }
    }

    /// A refusal of the server as an error of the port.
    fn refused(&self, reason: Reason) -> SandboxError {
        let Reason { code, message } = reason;
        let message = format!("{message} (from {})", self.url);
        match code.as_str() {
            "not_enforced" => SandboxError::NotEnforced { missing: message },
            "no_room" | "too_many" => SandboxError::NoRoom {
                level: self.level.into(),
                reason: message,
            },
            "unauthorized" | "unavailable" => SandboxError::Unavailable {
                level: self.level.into(),
                reason: message,
            },
            "unsupported" => SandboxError::Unsupported {
                operation: "do this on the other host",
            },
            "request" | "failed" => SandboxError::io("sandbox server", message),
            _ => SandboxError::Died(message),
        }
    }
}

/// A file or an answer that is too long.
pub(crate) fn too_long(max_bytes: u64) -> SandboxError {
    SandboxError::io("read", format!("it has more than {max_bytes} bytes"))
}
