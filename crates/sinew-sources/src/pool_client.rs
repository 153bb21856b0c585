//! A data pool over HTTP, as `sinew serve --pool` answers.

use serde_json::Value;
use sinew_http::blocking::{Client, RequestBuilder, retry};
use sinew_http::{ClientOptions, Failure, Method, Retry, header};
use sinew_orchestrator::PipelineError;
use std::path::Path;
use std::time::Duration;

/// Maximum bytes of an answer of the pool.
const MAX_ANSWER_BYTES: u64 = 1 << 30;

/// Time for a connection, and for an answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// Attempts at a request that may be repeated.
const TRIES: Retry = Retry::doubling(4, Duration::from_millis(200), Duration::from_millis(800));

/// A pool over HTTP.
#[derive(Clone, Debug)]
pub struct PoolClient {
    /// Keeps its connections open between requests.
    client: Client,
    /// Address of the server, without a path.
    url: String,
    /// Bearer token of the consumer.
    token: String,
}

impl PoolClient {
    /// The pool at `url`, with the control token in a file.
    ///
    /// # Errors
    /// If the address is none, or the file cannot be read.
    pub fn new(url: &str, token_file: &Path) -> Result<Self, PipelineError> {
        if !(url.starts_with("http://") || url.starts_with("https://")) {
            return Err(PipelineError::input(format!(
                "the pool's address {url:?}: allowed: one that begins with http:// or https://"
            )));
        }
        let token = std::fs::read_to_string(token_file).map_err(|e| {
            PipelineError::input(format!(
                "token file {}: {e}\n  hint: the file that `sinew serve` got as --control-token-file",
                token_file.display()
            ))
        })?;
        let client = Client::new(ClientOptions {
            connect: Some(CONNECT_TIMEOUT),
            stall: Some(ANSWER_TIMEOUT),
            body_max: MAX_ANSWER_BYTES,
            redirects: 10,
            proxy: true,
            ..ClientOptions::default()
        });
        let failed = |e| PipelineError::system(format!("the pool's client: {e}"));
        Ok(Self {
            client: client.map_err(failed)?,
            url: url.trim_end_matches('/').to_owned(),
            token: token.trim().to_owned(),
        })
    }

    /// One request without retries: status and body, or the reason why there was no answer.
    fn once(&self, method: &str, path: &str, body: &Value) -> Result<(u16, Value), String> {
        let kind = Method::from_bytes(method.as_bytes()).map_err(|e| e.to_string())?;
        let request = self.client.request(kind, &format!("{}{path}", self.url));
        self.send(match method {
            "GET" | "DELETE" => request,
            _ => request
                .header(header::CONTENT_TYPE, "application/json")
                .body(body.to_string()),
        })
    }

    /// The status and the JSON that a request with the token is answered with.
    fn send(&self, request: RequestBuilder) -> Result<(u16, Value), String> {
        let answer = self.client.ask(request.bearer_auth(&self.token));
        let answer = answer.map_err(|e| e.to_string())?;
        let value = serde_json::from_slice(&answer.body).map_err(|e| format!("no JSON: {e}"))?;
        Ok((answer.status.as_u16(), value))
    }

    /// Returns the pool's answer; a request that never arrived is sent again.
    ///
    /// # Errors
    /// Fails if the pool refuses the request or does not answer.
    pub fn call(&self, method: &str, path: &str, body: &Value) -> Result<Value, PipelineError> {
        let what = format!("{method} {}{path}", self.url);
        let attempt = || match self.once(method, path, body) {
            Ok((status, value)) if status < 300 => Ok(value),
            Ok((status, value)) if status < 500 && status != 429 => {
                let message = value["error"]["message"].as_str().unwrap_or_default();
                let text = format!("{what}: {status}: {message}");
                Err(Failure::Lasting(PipelineError::input(text)))
            }
            Ok((status, value)) => Err(Failure::Passing(format!("{status}: {value}"), None)),
            Err(why) => Err(Failure::Passing(why, None)),
        };
        retry(TRIES, Some, attempt).map_err(|failure| match failure {
            Failure::Lasting(error) => error,
            Failure::Passing(why, _) => PipelineError::system(format!(
                "{what}: {why}\n  hint: is `sinew serve --pool` running there?"
            )),
        })
    }
}

impl PoolClient {
    /// Sends the trajectories of a JSON batch.
    ///
    /// # Errors
    /// If the file cannot be read, or the pool refuses it.
    pub fn push(&self, file: &Path) -> Result<Value, PipelineError> {
        let unreadable = |e| PipelineError::input(format!("{}: {e}", file.display()));
        let bytes = std::fs::read(file).map_err(unreadable)?;
        let request = self
            .client
            .request(Method::POST, &format!("{}/pool/trajectories", self.url))
            .header(header::CONTENT_TYPE, "application/json")
            .body(bytes);
        let (status, told) = self.send(request).map_err(|e| {
            PipelineError::system(format!(
                "POST {}/pool/trajectories: {e}\n  hint: is `sinew serve --pool` running there?",
                self.url
            ))
        })?;
        let message = || told["error"]["message"].as_str().unwrap_or_default();
        match status {
            200 => Ok(told),
            429 | 500.. => Err(PipelineError::system(format!("{status}: {}", message()))),
            _ => Err(PipelineError::input(format!(
                "{}: {status}: {}",
                file.display(),
                message()
            ))),
        }
    }
}
