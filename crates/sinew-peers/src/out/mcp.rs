//! Messages of MCP for one session: the environment's tools, its prompt, and the score.
//!
//! The model sees only the tools. The program around it reads the prompt `task`, and after the last call the
//! resource `sinew://score`, which ends the episode. The tool `say` is a turn of text, such as the answer.

use super::play::{Pick, Play, PlayError};
use serde_json::{Value, json};

/// Versions of the protocol that clients may name. Others get the last one.
const VERSIONS: [&str; 4] = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];
/// Address of the score.
const SCORE: &str = "sinew://score";
/// Name of the tool for turns of text.
const SAY: &str = "say";

/// One session of a client.
pub(super) struct McpSession {
    /// The episode of the session, with its tools and its score.
    play: Play,
    /// The task of its episode.
    pick: Pick,
    /// Messages of the prompt, once the episode has begun.
    messages: Vec<Value>,
    /// System messages of the environment, since prompts of the protocol cannot contain any.
    system: String,
}

/// An error of the protocol: its code and its text.
type Fault = (i64, String);

impl McpSession {
    /// A session without an episode: the first message that needs one begins it.
    pub(super) fn new(play: Play, pick: Pick) -> Self {
        Self {
            play,
            pick,
            messages: Vec::new(),
            system: String::new(),
        }
    }

    /// The answer to a message; `None` for a notification or an answer of the client.
    pub(super) async fn on(&mut self, message: &Value) -> Option<Value> {
        let id = message.get("id").filter(|id| !id.is_null())?.clone();
        let method = message["method"].as_str()?;
        let params = message.get("params").cloned().unwrap_or_else(|| json!({}));
        Some(match self.answer(method, &params).await {
            Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
            Err((code, text)) => fault(&id, code, &text),
        })
    }

    /// The result of a method.
    ///
    /// # Errors
    /// The code of JSON-RPC: -32601 for an unknown method, -32602 for wrong arguments, -32603 if the
    /// environment failed, -32002 for an unknown resource.
    async fn answer(&mut self, method: &str, params: &Value) -> Result<Value, Fault> {
        match method {
            "initialize" => {
                self.open().await?;
                Ok(greeting(params, &self.system))
            }
            "ping" => Ok(json!({})),
            "tools/list" => self.tools().await,
            "tools/call" => self.call(params).await,
            "prompts/list" => Ok(json!({"prompts": [
                {"name": "task", "description": "The task of this session's episode."},
            ]})),
            "prompts/get" => {
                self.open().await?;
                Ok(json!({"messages": self.messages}))
            }
            "resources/list" => Ok(json!({"resources": [{
                "uri": SCORE, "name": "score", "mimeType": "application/json",
                "description": "Ends the episode, and scores it.",
            }]})),
            "resources/templates/list" => Ok(json!({"resourceTemplates": []})),
            "resources/read" => self.score(params).await,
            other => Err((-32601, format!("there is no method {other}"))),
        }
    }

    /// Begins the episode with the first message that needs it.
    async fn open(&mut self) -> Result<(), Fault> {
        if self.play.is_open() || !self.messages.is_empty() {
            return Ok(());
        }
        let begun = self.play.begin(self.pick).await;
        let begun = begun.map_err(|e| (-32603, e.to_string()))?;
        let system = begun
            .messages
            .iter()
            .filter(|m| m.role == sinew_types::Role::System);
        let system: Vec<_> = system.map(|m| m.content.text()).collect();
        self.system = system.join("\n\n");
        // Prompts have no system messages: their text is also a message of the user, for clients that do not
        // read the instructions.
        let said = begun.messages.iter().map(|m| {
            let role = match m.role {
                sinew_types::Role::Assistant => "assistant",
                _ => "user",
            };
            json!({"role": role, "content": {"type": "text", "text": m.content.text()}})
        });
        self.messages = said.collect();
        Ok(())
    }

    /// The tools of the episode, and `say` unless the environment has a tool of that name.
    async fn tools(&mut self) -> Result<Value, Fault> {
        self.open().await?;
        let mut tools: Vec<Value> = self
            .play
            .tools()
            .iter()
            .map(|t| json!({"name": t.name, "description": t.description, "inputSchema": t.parameters}))
            .collect();
        if self.play.tools().iter().all(|t| t.name != SAY) {
            tools.push(json!({
                "name": SAY, "description": "Say something: a message, a move, or the final answer.",
                "inputSchema": {
                    "type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"],
                },
            }));
        }
        Ok(json!({"tools": tools}))
    }

    /// A turn with one call, or of text for `say`. Errors of the model and of the environment are results
    /// with `isError`, so that the model reads them.
    async fn call(&mut self, params: &Value) -> Result<Value, Fault> {
        self.open().await?;
        let Some(name) = params["name"].as_str() else {
            return Err((-32602, "a call has a name".into()));
        };
        let arguments = params.get("arguments").cloned();
        let arguments = arguments
            .filter(|a| !a.is_null())
            .unwrap_or_else(|| json!({}));
        let own = self.play.tools().iter().any(|t| t.name == name);
        let acted = match arguments["text"].as_str() {
            Some(text) if name == SAY && !own => self.play.say(text).await,
            _ if name == SAY && !own => {
                Err(PlayError::Client("say needs the argument text".into()))
            }
            _ => self.play.call(name, arguments).await,
        };
        let (text, error) = match acted {
            Ok(acted) if acted.done => ("The episode is over.".to_owned(), false),
            Ok(acted) => (acted.text, acted.error),
            // The environment's failure ends the episode; the client learns it as the call's result.
            Err(e) => (e.to_string(), true),
        };
        Ok(json!({"content": [{"type": "text", "text": text}], "isError": error}))
    }

    /// Ends the episode, and gives its score as JSON. Read again, it is the same.
    async fn score(&mut self, params: &Value) -> Result<Value, Fault> {
        if params["uri"] != SCORE {
            return Err((-32002, format!("there is no resource {}", params["uri"])));
        }
        self.open().await?;
        let score = self.play.score().await;
        let score = score.map_err(|e| (-32603, e.to_string()))?;
        Ok(json!({"contents": [
            {"uri": SCORE, "mimeType": "application/json", "text": score.to_string()},
        ]}))
    }

    /// Ends the episode.
    pub(super) async fn close(&mut self) {
        self.play.close().await;
    }
}

/// The answer to `initialize`. Clients show its instructions to the model as a part of the system message.
fn greeting(params: &Value, system: &str) -> Value {
    let how = "Read the prompt `task`, call tools, then read the resource sinew://score.";
    let instructions = match system {
        "" => how.to_owned(),
        system => format!("{system}\n\n{how}"),
    };
    let asked = params["protocolVersion"].as_str().unwrap_or_default();
    let last = VERSIONS[VERSIONS.len() - 1];
    let version = VERSIONS.into_iter().find(|v| *v == asked).unwrap_or(last);
    json!({
        "protocolVersion": version,
        "capabilities": {"tools": {}, "prompts": {}, "resources": {}},
        "serverInfo": {"name": "sinew", "version": env!("CARGO_PKG_VERSION")},
        "instructions": instructions,
    })
}

/// An error of the protocol as a response.
pub(super) fn fault(id: &Value, code: i64, text: &str) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": text}})
}
