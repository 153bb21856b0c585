//! A tree of GenAI spans as one trajectory.
//!
//! The sources are the GenAI semantic conventions of OpenTelemetry (1.37 and later, where messages are
//! attributes): `gen_ai.operation.name`, `gen_ai.system_instructions`, `gen_ai.input.messages`,
//! `gen_ai.output.messages` on a span or on its `gen_ai.client.inference.operation.details` event, and
//! `gen_ai.evaluation.result` events for rewards. Facts without a convention are in `sinew.*` attributes; a
//! span with `sinew.output.token_ids` and its companions has exactly the sampled tokens; others have only
//! text.

use crate::reason::Reason;
use crate::schema::{Kind, Pushed, PushedNode, Trajectory};
use crate::span::Span;
use crate::text::Tree;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sinew_render::Renderer;
use sinew_types::{Message, Node, NodeId, Role, TokenId, TokenKind, ToolCall};

/// Operations that call a model.
const CALLS: [&str; 3] = ["chat", "text_completion", "generate_content"];

/// The event that can have attributes in place of the span.
const DETAILS: &str = "gen_ai.client.inference.operation.details";

/// The spans of one trace, as they are kept before they are checked. Stored as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Bundle {
    pub(crate) spans: Vec<Span>,
    /// The kind that they are admitted as if they have only text; left out: the kind of `text_spans`.
    #[serde(default)]
    pub(crate) kind: Option<Kind>,
}

/// The spans of one trace as an item of the pool, in order of their start.
pub(crate) fn item(mut spans: Vec<Span>) -> Pushed {
    spans.sort_by(|a, b| (a.start_ns, &a.span_id).cmp(&(b.start_ns, &b.span_id)));
    let find = |name: &str| {
        let found = spans
            .iter()
            .find_map(|s| attribute(s, name).or(s.resource.get(name)));
        found.and_then(Value::as_str).map(str::to_owned)
    };
    let (tokenizer, model) = (find("sinew.tokenizer"), find("gen_ai.response.model"));
    let source = find("service.name").unwrap_or_default();
    let model = model.or_else(|| find("gen_ai.request.model"));
    let bundle = Bundle { spans, kind: None };
    Pushed {
        raw: serde_json::to_string(&bundle).unwrap_or_default(),
        tokenizer,
        model,
        source,
    }
}

fn wrong(detail: impl Into<String>) -> Reason {
    Reason::Spans {
        detail: detail.into(),
    }
}

/// An attribute of a span, or of its details event.
fn attribute<'a>(span: &'a Span, name: &str) -> Option<&'a Value> {
    let details = span.events.iter().filter(|e| e.name == DETAILS);
    let mut all = std::iter::once(&span.attributes).chain(details.map(|e| &e.attributes));
    all.find_map(|a| a.get(name)).filter(|v| !v.is_null())
}

/// A structured value, or the JSON in a text: exporters differ in which of the two they send.
fn structured(value: &Value) -> Result<Value, Reason> {
    match value {
        Value::String(text) => sinew_types::json::from_str(text)
            .map_err(|e| wrong(format!("messages are no JSON: {e}"))),
        other => Ok(other.clone()),
    }
}

/// A call of a model.
struct Call {
    input: Vec<Message>,
    outputs: Vec<Message>,
    exact: Option<Exact>,
}

/// The exact tokens of a call: its prompt and its output.
struct Exact {
    input: Vec<TokenId>,
    output: Vec<TokenId>,
    logprobs: Option<Vec<Option<f32>>>,
    temperature: Option<f32>,
    version: Option<u64>,
}

/// The trajectory that the spans of one trace describe; and whether its tokens were made here.
/// `text` is the kind for spans without token ids.
///
/// # Errors
/// If no span is a call with contents, a field is malformed, or only text is known and `text` is
/// `None`.
pub(crate) fn trajectory(
    bundle: &Bundle,
    text: Option<Kind>,
    renderer: &dyn Renderer,
    max_tokens: usize,
) -> Result<(Trajectory, bool), Reason> {
    let spans = &bundle.spans;
    let mut calls = Vec::new();
    for span in spans {
        let operation = attribute(span, "gen_ai.operation.name").and_then(Value::as_str);
        let said = attribute(span, "gen_ai.output.messages").is_some()
            || attribute(span, "sinew.output.token_ids").is_some();
        if operation.is_some_and(|o| CALLS.contains(&o)) && said {
            calls.push(call(span)?);
        }
    }
    if calls.is_empty() {
        return Err(wrong(
            "no span is a call of a model with gen_ai.output.messages; instrumentations need to be \
             configured to record contents",
        ));
    }
    let mut out = named(spans)?;
    if calls.iter().all(|c| c.exact.is_some()) {
        out.nodes = Some(exact_nodes(&calls)?);
        out.kind = bundle.kind.or(out.kind);
        return Ok((out, false));
    }
    let Some(kind) = bundle.kind.or(text).filter(|k| *k != Kind::Rl) else {
        return Err(Reason::TextOnly);
    };
    out.kind = Some(kind);
    let mut tree = Tree {
        renderer,
        tools: &[],
        max_tokens,
        nodes: Vec::new(),
    };
    text_nodes(&calls, &mut tree)?;
    out.nodes = Some(tree.nodes.into_iter().map(pushed).collect());
    Ok((out, true))
}

/// A node that was rendered here, in the form of a pushed one.
fn pushed(node: Node) -> PushedNode {
    PushedNode {
        parent: (node.parent != sinew_types::NO_PARENT).then_some(node.parent),
        kind: node.kind,
        tokens: node.tokens,
        logprobs: None,
        temperature: None,
        version: None,
        versions: None,
        turn: Some(node.turn),
        messages: Some(node.messages),
        finish: node.finish,
        process_reward: None,
        state_hash: None,
    }
}

/// Everything about the trajectory but its nodes. Attributes of root spans come first.
fn named(spans: &[Span]) -> Result<Trajectory, Reason> {
    let roots_first = || {
        let (roots, others): (Vec<_>, Vec<_>) = spans.iter().partition(|s| s.parent_id.is_empty());
        roots.into_iter().chain(others)
    };
    let find = |name: &str| roots_first().find_map(|s| attribute(s, name).cloned());
    let text = |name: &str| find(name).and_then(|v| v.as_str().map(str::to_owned));
    let events = roots_first().flat_map(|s| &s.events);
    let evaluation = events
        .filter(|e| e.name == "gen_ai.evaluation.result")
        .find_map(|e| e.attributes.get("gen_ai.evaluation.score.value")?.as_f64());
    let trace = spans
        .first()
        .map(|s| s.trace_id.clone())
        .unwrap_or_default();
    let kind = match text("sinew.kind") {
        None => None,
        Some(kind) => Some(
            serde_json::from_value(kind.clone().into())
                .map_err(|_| wrong(format!("sinew.kind is {kind:?}: allowed: rl, sft, dpo")))?,
        ),
    };
    let size = find("sinew.group_size").and_then(|v| v.as_u64());
    Ok(Trajectory {
        id: Some(text("sinew.id").unwrap_or_else(|| format!("otel-{trace}"))),
        task: text("sinew.task")
            .or_else(|| text("gen_ai.conversation.id"))
            .unwrap_or(trace),
        task_kind: text("sinew.task_kind").or_else(|| text("gen_ai.agent.name")),
        group: text("sinew.group"),
        group_size: size.map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
        kind,
        reward: find("sinew.reward").and_then(|v| v.as_f64()).or(evaluation),
        success: find("sinew.success").and_then(|v| v.as_bool()),
        metrics: None,
        end: None,
        started_unix_s: spans
            .iter()
            .map(|s| s.start_ns as f64 / 1e9)
            .reduce(f64::min),
        nodes: None,
        messages: None,
        tools: None,
    })
}

/// Input and output of a call.
fn call(span: &Span) -> Result<Call, Reason> {
    let messages = |name: &str| -> Result<Vec<Message>, Reason> {
        let Some(value) = attribute(span, name) else {
            return Ok(Vec::new());
        };
        let value = structured(value)?;
        let list = value
            .as_array()
            .ok_or_else(|| wrong(format!("{name} is no list")))?;
        let mut out = Vec::new();
        for message in list {
            read_message(message, &mut out)?;
        }
        Ok(out)
    };
    let mut input = Vec::new();
    if let Some(system) = attribute(span, "gen_ai.system_instructions") {
        let parts = Map::from_iter([
            ("role".to_owned(), "system".into()),
            ("parts".to_owned(), structured(system)?),
        ]);
        read_message(&Value::Object(parts), &mut input)?;
    }
    input.extend(messages("gen_ai.input.messages")?);
    let outputs = messages("gen_ai.output.messages")?;
    if let Some(other) = outputs.iter().find(|m| m.role != Role::Assistant) {
        return Err(wrong(format!(
            "an output message has role {:?}",
            other.role
        )));
    }
    Ok(Call {
        input,
        outputs,
        exact: exact(span)?,
    })
}

/// The exact tokens of a call; `None` without both lists of ids.
fn exact(span: &Span) -> Result<Option<Exact>, Reason> {
    fn list<T: serde::de::DeserializeOwned>(span: &Span, name: &str) -> Result<Option<T>, Reason> {
        let value = attribute(span, name).map(structured).transpose()?;
        value
            .map(|v| serde_json::from_value(v).map_err(|e| wrong(format!("{name}: {e}"))))
            .transpose()
    }
    let input: Option<Vec<TokenId>> = list(span, "sinew.input.token_ids")?;
    let output: Option<Vec<TokenId>> = list(span, "sinew.output.token_ids")?;
    let (Some(input), Some(output)) = (input, output) else {
        return Ok(None);
    };
    Ok(Some(Exact {
        input,
        output,
        logprobs: list(span, "sinew.output.logprobs")?,
        temperature: temperature(span)?,
        version: attribute(span, "sinew.policy_version").and_then(Value::as_u64),
    }))
}

/// The temperature of a call's log-probabilities: `sinew.output.temperature`. The requested one
/// (`gen_ai.request.temperature`) is not used: many servers report log-probabilities at 1 at any
/// temperature.
fn temperature(span: &Span) -> Result<Option<f32>, Reason> {
    let Some(value) = attribute(span, "sinew.output.temperature") else {
        return Ok(None);
    };
    let number = value.as_f64().or_else(|| value.as_str()?.parse().ok());
    let wrong = || {
        wrong(format!(
            "sinew.output.temperature is {value}, expected a number"
        ))
    };
    number.map(|t| Some(t as f32)).ok_or_else(wrong)
}

/// Adds a message of the conventions, and a separate message for each tool response in it.
fn read_message(value: &Value, out: &mut Vec<Message>) -> Result<(), Reason> {
    let role: Role = serde_json::from_value(value["role"].clone())
        .map_err(|_| wrong(format!("a message has role {}", value["role"])))?;
    let parts = value["parts"]
        .as_array()
        .ok_or_else(|| wrong("a message has no parts"))?;
    let mut message = Message::new(role, "");
    let mut responded = false;
    for part in parts {
        let text = |field: &str| part[field].as_str().unwrap_or_default();
        match text("type") {
            "text" => message.content.push_text(text("content")),
            "reasoning" => message
                .reasoning
                .get_or_insert_default()
                .push_str(text("content")),
            "tool_call" => message.tool_calls.push(ToolCall {
                id: text("id").into(),
                name: text("name").into(),
                arguments: match &part["arguments"] {
                    Value::String(json) => structured(&Value::String(json.clone()))?,
                    other => other.clone(),
                },
            }),
            "tool_call_response" => {
                let response = match &part["response"] {
                    Value::Null => &part["result"],
                    response => response,
                };
                let content = response.as_str().map(str::to_owned);
                out.push(Message {
                    tool_call_id: part["id"].as_str().map(str::to_owned),
                    ..Message::new(Role::Tool, content.unwrap_or_else(|| response.to_string()))
                });
                responded = true;
            }
            other => return Err(wrong(format!("a part of a message is {other:?}, not text"))),
        }
    }
    let says = !message.content.is_empty()
        || message.reasoning.is_some()
        || !message.tool_calls.is_empty();
    if says || !responded {
        out.push(message);
    }
    Ok(())
}

/// The longest of `known` paths that `input` begins with: its node and its length.
fn longest<T: PartialEq>(known: &[(NodeId, Vec<T>)], input: &[T]) -> Option<(NodeId, usize)> {
    let fits = known.iter().filter(|(_, path)| input.starts_with(path));
    let found = fits.max_by_key(|(_, path)| path.len());
    found.map(|(node, path)| (*node, path.len()))
}

/// Builds the nodes token by token: the prompt of a call continues an earlier output, or is a root.
fn exact_nodes(calls: &[Call]) -> Result<Vec<PushedNode>, Reason> {
    let mut nodes: Vec<PushedNode> = Vec::new();
    let mut roots: Vec<(NodeId, Vec<TokenId>)> = Vec::new();
    let mut said: Vec<(NodeId, Vec<TokenId>)> = Vec::new();
    for Call { exact, .. } in calls {
        let Some(exact) = exact else { continue };
        let node = |parent, kind, tokens: &[TokenId]| PushedNode {
            parent,
            kind,
            tokens: tokens.to_vec(),
            logprobs: None,
            temperature: None,
            version: None,
            versions: None,
            turn: None,
            messages: None,
            finish: None,
            process_reward: None,
            state_hash: None,
        };
        let parent = match longest(&said, &exact.input) {
            Some((parent, len)) if len == exact.input.len() => parent,
            Some((parent, len)) => {
                let rest = &exact.input[len..];
                nodes.push(node(Some(parent), TokenKind::Observation, rest));
                (nodes.len() - 1) as NodeId
            }
            None => match roots.iter().find(|(_, root)| *root == exact.input) {
                Some((root, _)) => *root,
                None => {
                    nodes.push(node(None, TokenKind::Prompt, &exact.input));
                    let root = (nodes.len() - 1) as NodeId;
                    roots.push((root, exact.input.clone()));
                    root
                }
            },
        };
        let mut sampled = node(Some(parent), TokenKind::Sampled, &exact.output);
        sampled.logprobs = exact.logprobs.clone();
        sampled.temperature = exact.temperature;
        sampled.version = exact.version;
        nodes.push(sampled);
        let path = [&exact.input[..], &exact.output].concat();
        said.push(((nodes.len() - 1) as NodeId, path));
    }
    Ok(nodes)
}

/// Builds the nodes message by message, rendered here. A call continues an earlier one if its input
/// begins with that call's whole conversation and adds no turn of the model.
fn text_nodes(calls: &[Call], tree: &mut Tree<'_>) -> Result<(), Reason> {
    let mut roots: Vec<(NodeId, Vec<Message>)> = Vec::new();
    let mut said: Vec<(NodeId, Vec<Message>)> = Vec::new();
    for call in calls {
        let after = longest(&said, &call.input).filter(|(_, len)| {
            let new = &call.input[*len..];
            !new.is_empty() && new.iter().all(|m| m.role != Role::Assistant)
        });
        let parent = match after {
            Some((parent, len)) => tree.observe(parent, &call.input[len..])?,
            None => match roots.iter().find(|(_, root)| *root == call.input) {
                Some((root, _)) => *root,
                None => {
                    let root = tree.prompt(&call.input)?;
                    roots.push((root, call.input.clone()));
                    root
                }
            },
        };
        for output in &call.outputs {
            let path = [&call.input[..], std::slice::from_ref(output)].concat();
            let node = tree.say(parent, &path)?;
            said.push((node, path));
        }
    }
    Ok(())
}
