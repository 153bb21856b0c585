//! QEMU's control channel: one JSON object a line (`docs/interop/qmp-spec.rst` of QEMU).
//!
//! The monitor may have been taken over by its guest: lines are bounded, and answers are awaited
//! for a bounded time.

use serde_json::{Value, json};
use sinew_sandbox::SandboxError;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

/// Maximum bytes of a line.
const MAX_LINE: u64 = 64 << 10;
/// Maximum events between a command and its answer.
const MAX_EVENTS: usize = 256;
/// Maximum time of an answer.
const ANSWER: Duration = Duration::from_secs(60);

/// Reasons for which a command has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QmpError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The monitor's error, or an answer that is missing, late or of another kind.
    #[error("{0}")]
    Answer(String),
}

fn wrong(text: impl Into<String>) -> QmpError {
    QmpError::Answer(text.into())
}

impl From<QmpError> for SandboxError {
    fn from(error: QmpError) -> Self {
        Self::Died(error.to_string())
    }
}

/// Control channel of one monitor. Commands are sent one at a time, each after the answer to the last one.
#[derive(Debug)]
pub(crate) struct Qmp {
    /// Connection to the monitor.
    stream: BufReader<UnixStream>,
    /// True after the greeting and the negotiation of capabilities.
    greeted: bool,
}

impl Qmp {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self {
            stream: BufReader::new(stream),
            greeted: false,
        }
    }

    /// Reads one line as JSON. A longer one than [`MAX_LINE`] is an error.
    async fn line(&mut self) -> Result<Value, QmpError> {
        let mut line = Vec::new();
        let mut bounded = (&mut self.stream).take(MAX_LINE);
        bounded.read_until(b'\n', &mut line).await?;
        match line.last() {
            None => Err(wrong("the monitor is gone")),
            Some(b'\n') => Ok(serde_json::from_slice(&line)?),
            Some(_) => Err(wrong(format!(
                "a line of more than {MAX_LINE} bytes, or cut"
            ))),
        }
    }

    /// One command and what it returns.
    ///
    /// # Errors
    /// The monitor's error, or that it did not answer.
    pub(crate) async fn command(
        &mut self,
        name: &str,
        arguments: Value,
    ) -> Result<Value, QmpError> {
        let answered = tokio::time::timeout(ANSWER, async {
            if !self.greeted {
                let greeting = self.line().await?;
                if greeting.get("QMP").is_none() {
                    return Err(wrong("its greeting is not that of QMP"));
                }
                self.ask("qmp_capabilities", json!({})).await?;
                self.greeted = true;
            }
            self.ask(name, arguments).await
        });
        match answered.await {
            Ok(answer) => answer.map_err(|e| wrong(format!("{name}: {e}"))),
            Err(_) => Err(wrong(format!("{name}: no answer in {ANSWER:?}"))),
        }
    }

    /// Sends a command and waits for its answer. Events before it are dropped.
    async fn ask(&mut self, name: &str, arguments: Value) -> Result<Value, QmpError> {
        let mut text = json!({ "execute": name, "arguments": arguments }).to_string();
        text.push('\n');
        self.stream.get_mut().write_all(text.as_bytes()).await?;
        for _ in 0..MAX_EVENTS {
            let mut answer = self.line().await?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                return Err(wrong(error["desc"].as_str().unwrap_or("an error")));
            }
        }
        Err(wrong(format!("{MAX_EVENTS} events and no answer")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn answered(lines: &'static str) -> Result<Value, QmpError> {
        let (ours, mut theirs) = UnixStream::pair().expect("pair");
        theirs.write_all(lines.as_bytes()).await.expect("write");
        theirs.shutdown().await.expect("shutdown");
        Qmp::new(ours).command("stop", json!({})).await
    }

    #[tokio::test]
    async fn answers_events_and_errors() {
        let well = "{\"QMP\":{}}\n{\"return\":{}}\n{\"event\":\"STOP\"}\n{\"return\":{\"x\":1}}\n";
        assert_eq!(answered(well).await.expect("an answer")["x"], 1);
        let refused = "{\"QMP\":{}}\n{\"return\":{}}\n{\"error\":{\"desc\":\"no\"}}\n";
        assert_eq!(answered(refused).await.unwrap_err().to_string(), "stop: no");
        for broken in ["", "{}\n", "{\"QMP\":{}}\n", "{\"QMP\":{}}\nnonsense\n"] {
            assert!(answered(broken).await.is_err(), "{broken}");
        }
    }

    #[tokio::test]
    async fn a_line_without_end_is_cut() {
        let (ours, mut theirs) = UnixStream::pair().expect("pair");
        let flood =
            tokio::spawn(async move { while theirs.write_all(&[b'x'; 4096]).await.is_ok() {} });
        let mut qmp = Qmp::new(ours);
        let told = qmp.command("stop", json!({})).await;
        assert!(told.is_err_and(|e| e.to_string().contains("more than")));
        drop(qmp);
        flood.await.expect("flood");
    }
}
