//! Google's `generateContent`.
//!
//! The model and the method are in the path, so a request is read by a [`GenerateContent`] that
//! [`Call::of`] makes from it. Field names may be in camel case or in snake case.
//!
//! ```json
//! {"contents": [{"role": "user", "parts": [{"text": "Hello"}]}],
//!  "generationConfig": {"maxOutputTokens": 8}}
//! ```
//!
//! The answer has one candidate for each of `candidateCount` outputs; `finishReason` is `STOP` or
//! `MAX_TOKENS`. A stream sends the same object with the new parts, as server-sent events with `?alt=sse`,
//! else as the items of one JSON array; its last item has the finish reasons and the usage.
//!
//! Thoughts are parts of an answer only if `includeThoughts` asks for them. The first call of a turn, or the
//! last text of a turn without calls, has them in its `thoughtSignature` too: a client that sends this back,
//! as Google's API demands, sends the turn that was sampled, even if it drops the thoughts themselves.
//!
//! Source: Google's API reference, the types of its Python client, and Gemini CLI.

mod answer;
mod contents;
mod signature;

use super::agent_tools;
use super::fields::{Fields, MAX_TOOLS, Notes, wrong};
use super::format;
use super::openai::MAX_TOP_LOGPROBS;
use super::openapi::json_schema;
use super::{AnswerContext, Dialect, EventWriter, ModelRequest, ModelResponse, ToolChoice};
use crate::error::{ApiError, ErrorKind};
use crate::prompt::Prompt;
use answer::GoogleStream;
use contents::listed;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_types::{Message, Role, ToolSpec};

/// Maximum of `stopSequences`.
const MAX_STOPS: usize = 16;

/// Tools that Google's servers run.
const SERVER_TOOLS: [&str; 9] = [
    "googleSearch",
    "googleSearchRetrieval",
    "googleMaps",
    "codeExecution",
    "urlContext",
    "fileSearch",
    "computerUse",
    "mcpServers",
    "retrieval",
];

/// Form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerForm {
    /// `generateContent`: one object.
    Whole,
    /// `streamGenerateContent?alt=sse`: server-sent events.
    Events,
    /// `streamGenerateContent`: the items of an array.
    Array,
}

/// `POST /v1beta/models/MODEL:generateContent` or `MODEL:streamGenerateContent`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenerateContent {
    /// Model name in the path.
    pub model: String,
    pub form: AnswerForm,
}

/// The request that the end of a path `/v1beta/models/MODEL:METHOD` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    Generate(GenerateContent),
    CountTokens,
}

impl Call {
    /// Reads `MODEL:METHOD` and the query of its URL.
    ///
    /// # Errors
    /// If there is no such method.
    pub fn of(path: &str, query: Option<&str>) -> Result<Self, ApiError> {
        let (model, method) = path.rsplit_once(':').unwrap_or((path, ""));
        let events = query
            .unwrap_or_default()
            .split('&')
            .any(|pair| pair == "alt=sse");
        let form = match method {
            "countTokens" => return Ok(Self::CountTokens),
            "generateContent" => AnswerForm::Whole,
            "streamGenerateContent" if events => AnswerForm::Events,
            "streamGenerateContent" => AnswerForm::Array,
            _ => {
                let why = format!(
                    "there is no method {method:?} of models here: known are generateContent, \
                     streamGenerateContent and countTokens"
                );
                return Err(ApiError::not_found(why));
            }
        };
        let model = model.to_owned();
        Ok(Self::Generate(GenerateContent { model, form }))
    }
}

/// `POST /v1beta/models/MODEL:countTokens`: contents, or a whole request in `generateContentRequest`.
///
/// # Errors
/// Same as for a request.
pub fn parse_count(body: &[u8], strict: bool) -> Result<ModelRequest, ApiError> {
    let notes = Notes::new(strict);
    let mut fields = Fields::parse(body, &notes)?.in_camel_case();
    if let Some(mut request) = inner(&mut fields, "generateContentRequest")? {
        fields.end()?;
        let counted = conversation(&mut request, String::new())?;
        // Limits and settings of the output change nothing of its prompt.
        request.take_rest();
        return Ok(counted);
    }
    let request = conversation(&mut fields, String::new())?;
    fields.ignore(&["generationConfig"]);
    fields.end()?;
    Ok(request)
}

impl Dialect for GenerateContent {
    fn read(&self, body: &[u8], notes: &Notes) -> Result<ModelRequest, ApiError> {
        let mut fields = Fields::parse(body, notes)?.in_camel_case();
        let mut request = conversation(&mut fields, self.model.clone())?;
        request.stream = self.form != AnswerForm::Whole;
        generation(&mut fields, &mut request)?;
        settings(&mut fields)?;
        fields.end()?;
        Ok(request)
    }

    fn repeated(&self) -> Option<&'static str> {
        Some("contents")
    }

    fn response(&self, context: &AnswerContext, response: &ModelResponse) -> Value {
        answer::whole(context, response)
    }

    fn stream(&self, context: AnswerContext) -> Box<dyn EventWriter> {
        Box::new(GoogleStream::new(context, self.form == AnswerForm::Array))
    }

    fn error(&self, error: &ApiError) -> Value {
        error_value(error)
    }
}

/// The object in a field, with its names in camel case.
fn inner<'n>(fields: &mut Fields<'n>, name: &str) -> Result<Option<Fields<'n>>, ApiError> {
    let found = fields.inner(name)?;
    Ok(found.map(Fields::in_camel_case))
}

/// Fields of the model's input.
fn conversation(fields: &mut Fields<'_>, model: String) -> Result<ModelRequest, ApiError> {
    let notes = fields.notes();
    // The path has it.
    fields.ignore(&["model"]);
    let mut messages = Vec::new();
    if let Some(system) = fields.take("systemInstruction") {
        let text = contents::instruction(system, "systemInstruction", notes)?;
        messages.push(Message::new(Role::System, text));
    }
    let head = messages.len();
    messages.extend(contents::messages(fields.required("contents")?, notes)?);
    if messages.len() == head {
        return Err(ApiError::invalid("contents", "contents is empty"));
    }
    if messages.last().is_some_and(|m| m.role == Role::Assistant) {
        return Err(ApiError::unsupported(
            "contents",
            "the last content is the model's: its turn cannot be begun for the model, as those tokens would \
             not be sampled",
        ));
    }
    let mut request = ModelRequest::new(model, Prompt::Messages(messages));
    request.head = head;
    let schemas = tools(fields, &mut request)?;
    tool_config(fields, schemas, &mut request)?;
    Ok(request)
}

/// `tools`: functions are shown to the model, and tools of Google's servers are dropped and counted. Gives
/// the names of the functions with the paths of their schemas.
fn tools(
    fields: &mut Fields<'_>,
    request: &mut ModelRequest,
) -> Result<Vec<(String, String)>, ApiError> {
    let notes = fields.notes();
    let mut schemas = Vec::new();
    let list = fields.take("tools").unwrap_or_else(|| json!([]));
    for (i, value) in listed(list, "tools")?.into_iter().enumerate() {
        let path = format!("tools[{i}]");
        let mut tool = Fields::of(value, &path, notes)?.in_camel_case();
        let at = tool.path("functionDeclarations");
        let functions = tool.take("functionDeclarations");
        let functions = listed(functions.unwrap_or_else(|| json!([])), &at)?;
        for (j, function) in functions.into_iter().enumerate() {
            schemas.push(declaration(
                function,
                &format!("{at}[{j}]"),
                notes,
                request,
            )?);
        }
        for kind in SERVER_TOOLS {
            if tool.take(kind).is_some() {
                agent_tools::dropped(&path, kind, notes)?;
            }
        }
        tool.end()?;
    }
    if request.tools.len() > MAX_TOOLS {
        let why = format!(
            "{} tools, at most {MAX_TOOLS} are allowed",
            request.tools.len()
        );
        return Err(ApiError::invalid("tools", why));
    }
    Ok(schemas)
}

/// One function. Its schema is JSON Schema, or Google's dialect of OpenAPI's.
fn declaration(
    value: Value,
    path: &str,
    notes: &Notes,
    request: &mut ModelRequest,
) -> Result<(String, String), ApiError> {
    let mut tool = Fields::of(value, path, notes)?.in_camel_case();
    let plain = tool.has("parametersJsonSchema");
    let field = if plain {
        "parametersJsonSchema"
    } else {
        "parameters"
    };
    let given = tool.object(field)?;
    let empty = || json!({"type": "object", "properties": {}});
    let spec = ToolSpec {
        name: tool.required_string("name")?,
        description: tool.string("description")?.unwrap_or_default(),
        parameters: match given {
            Some(schema) if plain => schema,
            Some(schema) => json_schema(schema),
            None => empty(),
        },
    };
    let results = "results are not checked";
    tool.no_effects(&[
        ("response", results),
        ("responseJsonSchema", results),
        ("behavior", "the agent decides when it runs a function"),
    ])?;
    let schema = (spec.name.clone(), tool.path(field));
    request.add_spec(spec, false);
    tool.end()?;
    Ok(schema)
}

/// `toolConfig`. Calls that must come, or are `VALIDATED`, follow their schemas.
fn tool_config(
    fields: &mut Fields<'_>,
    schemas: Vec<(String, String)>,
    request: &mut ModelRequest,
) -> Result<(), ApiError> {
    let Some(mut config) = inner(fields, "toolConfig")? else {
        return Ok(());
    };
    if let Some(mut calling) = inner(&mut config, "functionCallingConfig")? {
        let mode_path = calling.path("mode");
        let mode = calling.string("mode")?.unwrap_or_default().to_uppercase();
        let held = match mode.as_str() {
            "" | "MODE_UNSPECIFIED" | "AUTO" => false,
            "NONE" => {
                request.tool_choice = ToolChoice::None;
                false
            }
            "ANY" => {
                request.tool_choice = ToolChoice::Required;
                true
            }
            "VALIDATED" => true,
            _ => {
                return Err(wrong(
                    &mode_path,
                    &Value::from(mode),
                    "AUTO, ANY, NONE or VALIDATED",
                ));
            }
        };
        if held {
            request.strict_tools = schemas;
            let names = strings(&mut calling, "allowedFunctionNames", MAX_TOOLS)?;
            if !names.is_empty() {
                // The model is shown what it may call, and nothing else.
                request.allow_only(&names);
            }
        }
        let all = "every function may be called in this mode";
        let whole = "calls are given whole";
        calling.no_effects(&[
            ("allowedFunctionNames", all),
            ("streamFunctionCallArguments", whole),
        ])?;
        calling.end()?;
    }
    let servers = "no tool runs at this server";
    config.no_effects(&[("retrievalConfig", servers)])?;
    config.no_effect("includeServerSideToolInvocations", &[json!(false)], servers)?;
    config.end()?;
    request.check_tool_choice().map_err(|refusal| ApiError {
        param: Some("toolConfig.functionCallingConfig".into()),
        ..refusal
    })
}

/// A list of at most `most` texts, none of them empty.
fn strings(fields: &mut Fields<'_>, name: &str, most: usize) -> Result<Vec<String>, ApiError> {
    let path = fields.path(name);
    let list = Value::Array(fields.array(name)?.unwrap_or_default());
    let texts = Vec::<String>::deserialize(&list).ok();
    texts
        .filter(|t| t.len() <= most && t.iter().all(|s| !s.is_empty()))
        .ok_or_else(|| wrong(&path, &list, &format!("up to {most} strings, none empty")))
}

/// `generationConfig`.
fn generation(fields: &mut Fields<'_>, request: &mut ModelRequest) -> Result<(), ApiError> {
    /// Reason for refusing a field of the sampler: trained tokens have one policy.
    const POLICY: &str = "it changes the policy that is sampled";
    let Some(mut config) = inner(fields, "generationConfig")? else {
        return Ok(());
    };
    let sampling = &mut request.sampling;
    sampling.temperature = config.temperature(2.0)?;
    sampling.top_p = config.number("topP", 0.0, 1.0)?;
    sampling.top_k = config.count("topK", 0)?;
    sampling.max_tokens = config.count("maxOutputTokens", 1)?;
    sampling.stop = strings(&mut config, "stopSequences", MAX_STOPS)?;
    let seed = config.integer("seed", i64::MIN, i64::MAX)?;
    sampling.seed = seed.map(|s| s as u64);
    request.n = config.integer("candidateCount", 1, 128)?.unwrap_or(1) as u32;
    config.only_number("presencePenalty", 0.0, POLICY)?;
    config.only_number("frequencyPenalty", 0.0, POLICY)?;
    logprobs(&mut config, request)?;
    thinking(&mut config, request)?;
    format::google(&mut config, request)?;
    modalities(&mut config)?;
    config.refuse(&[
        ("speechConfig", "only text is generated"),
        ("imageConfig", "only text is generated"),
        ("continuationToken", "an answer is never continued"),
    ])?;
    let no = [json!(false)];
    config.no_effect(
        "enableEnhancedCivicAnswers",
        &no,
        "there is one kind of answers",
    )?;
    config.no_effects(&[
        ("mediaResolution", "media are references"),
        ("audioTimestamp", "media are references"),
        ("audioTranscriptionConfig", "media are references"),
        ("routingConfig", "there is one model"),
        ("modelSelectionConfig", "there is one model"),
    ])?;
    config.end()
}

/// `responseLogprobs` and `logprobs`.
fn logprobs(config: &mut Fields<'_>, request: &mut ModelRequest) -> Result<(), ApiError> {
    let wanted = config.bool("responseLogprobs")?.unwrap_or(false);
    let path = config.path("logprobs");
    let top = config.integer("logprobs", 0, MAX_TOP_LOGPROBS)?;
    if top.is_some_and(|n| n > 0) && !wanted {
        let why = format!("{path} needs responseLogprobs: true");
        return Err(ApiError::invalid(path, why));
    }
    request.logprobs = wanted.then_some(top.unwrap_or(0) as u8);
    Ok(())
}

/// `thinkingConfig`. The model decides how much it reasons; `maxOutputTokens` bounds reasoning and answer.
fn thinking(config: &mut Fields<'_>, request: &mut ModelRequest) -> Result<(), ApiError> {
    let Some(mut thinking) = inner(config, "thinkingConfig")? else {
        return Ok(());
    };
    let shown = thinking.bool("includeThoughts")?.unwrap_or(false);
    request.echo = json!({"thoughts": shown});
    thinking.ignore(&["thinkingBudget"]);
    thinking.no_effects(&[("thinkingLevel", "the model has no such setting")])?;
    thinking.end()
}

/// `responseModalities`: text.
fn modalities(config: &mut Fields<'_>) -> Result<(), ApiError> {
    let path = config.path("responseModalities");
    for (i, value) in config
        .array("responseModalities")?
        .unwrap_or_default()
        .iter()
        .enumerate()
    {
        if !value
            .as_str()
            .is_some_and(|v| v.eq_ignore_ascii_case("text"))
        {
            let why = "only text is generated";
            return Err(ApiError::unsupported(&format!("{path}[{i}]"), why));
        }
    }
    Ok(())
}

/// Settings that have no effect here, and those that cannot be honoured.
fn settings(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    // Bookkeeping of a hosted service: by its definition it does not change the answer.
    fields.ignore(&["labels"]);
    let usual = ["", "standard", "SERVICE_TIER_UNSPECIFIED", "STANDARD"].map(Value::from);
    fields.no_effect("serviceTier", &usual, "there is one tier: leave it out")?;
    fields.no_effect("store", &[json!(false)], "nothing is stored for retrieval")?;
    fields.no_effects(&[("safetySettings", "no filter runs here")])?;
    fields.refuse(&[(
        "cachedContent",
        "contents are not stored here: send the whole conversation",
    )])
}

/// Google's error object.
pub fn error_value(error: &ApiError) -> Value {
    let status = match error.kind {
        _ if error.status == 409 => "ABORTED",
        ErrorKind::InvalidRequest => "INVALID_ARGUMENT",
        ErrorKind::Authentication => "UNAUTHENTICATED",
        ErrorKind::Permission => "PERMISSION_DENIED",
        ErrorKind::NotFound => "NOT_FOUND",
        ErrorKind::RateLimit => "RESOURCE_EXHAUSTED",
        ErrorKind::Overloaded => "UNAVAILABLE",
        ErrorKind::Server if error.status == 504 => "DEADLINE_EXCEEDED",
        ErrorKind::Server => "INTERNAL",
    };
    let kind = |name: &str| format!("type.googleapis.com/google.rpc.{name}");
    let mut details = vec![json!({
        "@type": kind("ErrorInfo"), "reason": error.code.to_uppercase(), "domain": "sinew",
    })];
    if let Some(param) = &error.param {
        let violation = json!({"field": param, "description": error.message});
        details.push(json!({"@type": kind("BadRequest"), "fieldViolations": [violation]}));
    }
    if let Some(seconds) = error.retry_after_s {
        let delay = format!("{seconds}s");
        details.push(json!({"@type": kind("RetryInfo"), "retryDelay": delay}));
    }
    json!({"error": {
        "code": error.status, "message": error.message, "status": status, "details": details,
    }})
}

/// The object that describes a model, in the list of models and alone.
pub fn model_value(name: &str, context: u32) -> Value {
    // Counts of the API have 32 bits with a sign.
    let limit = context.min(i32::MAX as u32);
    json!({
        "name": format!("models/{name}"),
        "version": "1",
        "displayName": name,
        "inputTokenLimit": limit,
        "outputTokenLimit": limit,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    })
}

#[cfg(test)]
mod tests;
