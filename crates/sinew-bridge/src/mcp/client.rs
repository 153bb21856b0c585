//! One session with an MCP server, by `rmcp`. Lines, pages of tools, results and waits are bounded.

use super::server::{McpTarget, Process};
use crate::error::McpError;
use crate::http::{client as http_client, cut};
use rmcp::model::{CallToolRequestParams, CallToolResult, ContentBlock, PaginatedRequestParams};
use rmcp::service::{RunningService, ServiceError};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;
use rmcp::{RoleClient, serve_client};
use serde_json::Value;
use sinew_types::{ToolCall, ToolSpec};
use std::time::Duration;

/// Maximum characters of one observation. The rest is cut.
const MAX_TEXT: usize = 64 << 10;
/// Maximum number of tools of one server.
const MAX_TOOLS: usize = 256;
/// Maximum pages of tools.
const MAX_PAGES: usize = 64;

/// A session. Dropping it ends it, and the process of a command.
pub(crate) struct Session {
    service: RunningService<RoleClient, ()>,
    /// `None` of a server at an address.
    process: Option<Process>,
    shown: String,
}

/// Reasons why a call has no result.
pub(crate) enum CallFault {
    /// The model's error, or one of the tool: an observation.
    Tool(String),
    /// The server is gone or breaks the protocol: the episode fails.
    Server(McpError),
}

impl Session {
    /// Starts or reaches a server, and greets it.
    pub(crate) async fn open(server: &McpTarget) -> Result<Self, McpError> {
        let shown = server.shown().to_owned();
        let failed = |reason: String| McpError::Start {
            server: server.shown().to_owned(),
            reason,
        };
        let (started, process) = match server {
            McpTarget::Command(command) => {
                let (stream, mut process) = command.start().await?;
                match serve_client((), stream.into_split()).await {
                    Ok(service) => (service, Some(process)),
                    // The end of the process tells more than the end of its connection.
                    Err(e) => {
                        let why = process.ending().await;
                        return Err(failed(why.unwrap_or_else(|| e.to_string())));
                    }
                }
            }
            McpTarget::Url { url, key } => {
                let client = http_client()
                    .map_err(|e| failed(e.to_string()))?
                    .into_inner();
                let mut config = StreamableHttpClientTransportConfig::with_uri(url.as_str());
                // A session that the server forgot must not begin again without its state.
                config.reinit_on_expired_session = false;
                config.auth_header.clone_from(key);
                let transport = StreamableHttpClientTransport::with_client(client, config);
                let service = serve_client((), transport).await;
                (service.map_err(|e| failed(e.to_string()))?, None)
            }
        };
        Ok(Self {
            service: started,
            process,
            shown,
        })
    }

    /// Tools of the server.
    pub(crate) async fn tools(&self) -> Result<Vec<ToolSpec>, McpError> {
        let (mut tools, mut cursor) = (Vec::new(), None);
        for _ in 0..MAX_PAGES {
            let page = PaginatedRequestParams::default().with_cursor(cursor);
            let page = self.service.list_tools(Some(page)).await;
            let page = page.map_err(|e| self.failed(&e))?;
            for tool in page.tools {
                let spec = ToolSpec {
                    name: tool.name.into_owned(),
                    description: tool.description.unwrap_or_default().into_owned(),
                    parameters: Value::Object((*tool.input_schema).clone()),
                };
                if spec.name.is_empty() || spec.name.len() > 128 || tools.len() >= MAX_TOOLS {
                    let why =
                        format!("more than {MAX_TOOLS} tools, or a name that is empty or too long");
                    return Err(self.failed(&why));
                }
                tools.push(spec);
            }
            cursor = page.next_cursor;
            if cursor.is_none() {
                return Ok(tools);
            }
        }
        Err(self.failed(&format!("more than {MAX_PAGES} pages of tools")))
    }

    fn failed(&self, reason: &dyn std::fmt::Display) -> McpError {
        McpError::Server {
            server: self.shown.clone(),
            reason: reason.to_string(),
        }
    }

    /// Calls a tool. A call that takes longer than `timeout` is cancelled.
    pub(crate) async fn call(
        &mut self,
        call: &ToolCall,
        timeout: Duration,
    ) -> Result<String, CallFault> {
        let Value::Object(arguments) = &call.arguments else {
            return Err(CallFault::Tool("the arguments are no object".into()));
        };
        let request =
            CallToolRequestParams::new(call.name.clone()).with_arguments(arguments.clone());
        // Dropping the future cancels the request.
        let called = tokio::time::timeout(timeout, self.service.call_tool(request)).await;
        match called {
            Err(_) => Err(CallFault::Tool(format!(
                "the call took longer than {} s",
                timeout.as_secs_f64()
            ))),
            Ok(Ok(result)) if result.is_error == Some(true) => Err(CallFault::Tool(text(&result))),
            Ok(Ok(result)) => Ok(text(&result)),
            Ok(Err(ServiceError::McpError(e))) => Err(CallFault::Tool(cut(&e.message, MAX_TEXT))),
            Ok(Err(e)) => {
                let ending = match &mut self.process {
                    Some(process) => process.ending().await,
                    None => None,
                };
                let why = ending.map_or_else(|| e.to_string(), |why| format!("it ended: {why}"));
                Err(CallFault::Server(self.failed(&why)))
            }
        }
    }

    /// Ends the session.
    pub(crate) async fn close(self) {
        // The process and its sandbox end with this value, however the server takes the farewell.
        let _ = tokio::time::timeout(Duration::from_secs(2), self.service.cancel()).await;
    }
}

/// Text of a result. Parts that are not text are named by their kind.
fn text(result: &CallToolResult) -> String {
    let mut parts = Vec::new();
    for block in &result.content {
        parts.push(match block {
            ContentBlock::Text(text) => text.text.clone(),
            ContentBlock::Image(_) => "[image]".into(),
            ContentBlock::Audio(_) => "[audio]".into(),
            _ => "[resource]".into(),
        });
    }
    if let (true, Some(value)) = (parts.is_empty(), &result.structured_content) {
        parts.push(value.to_string());
    }
    cut(&parts.join("\n"), MAX_TEXT)
}
