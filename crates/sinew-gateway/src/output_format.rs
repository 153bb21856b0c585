//! Constraints on an output: the format that a request asks for, and its strict tools in the model's notation
//! of calls.
//!
//! | the request has | the engine draws from masks | held to |
//! |---|---|---|
//! | a format, no tools | either | the format; an engine without masks may refuse |
//! | strict tools | yes | calls of the tools, in the model's own way to write them |
//! | strict tools | no | nothing: `strict` is counted as a field without effect |
//! | a format and tools | yes | a call or an answer of the format |
//! | a required call | yes | a call |

use sinew_dialect::format::{ANY_OBJECT, FormatAsk};
use sinew_dialect::{ApiError, ModelRequest, Prompt, ToolChoice, count_ignored};
use sinew_render::{ToolCallFormat, call_marks, forced_opening};
use sinew_types::{Format, Grammar, ToolGrammar, ToolNeed, ToolTag};
use std::sync::Arc;

/// Returns the constraint on the output of a request. `calls` is the model's notation of calls; `None` if
/// calls are not allowed. `holds` means that the engine supports masks. Clients set `strict` for tools by
/// default, so without masks it is ignored. A requested format is passed to the engine even without masks,
/// and the engine may refuse it; a required call replaces the format.
///
/// # Errors
/// If a format and tools cannot be combined.
pub(crate) fn resolve(
    request: &mut ModelRequest,
    calls: Option<&ToolCallFormat>,
    holds: bool,
) -> Result<Option<FormatAsk>, ApiError> {
    let asked = request.format.clone();
    if !matches!(request.prompt, Prompt::Messages(_)) || calls.is_none() {
        return Ok(asked);
    }
    let must = matches!(
        request.tool_choice,
        ToolChoice::Required | ToolChoice::Named(_)
    );
    let mut strict = !request.strict_tools.is_empty();
    if strict && !holds {
        strict = false;
        not_strict(request);
    }
    let answer = match asked.as_ref().filter(|_| !must) {
        Some(ask) => Some(answer_schema(ask)?),
        None => None,
    };
    // A call that must come is held to the way of calls, if that can be; else its beginning is given.
    if answer.is_none() && !strict && !(must && holds) {
        return Ok(None);
    }
    let Some(grammar) = calls.and_then(|c| grammar(request, c, must, answer)) else {
        return unheld(request, asked.filter(|_| !must));
    };
    let strict_tools = request.strict_tools.iter();
    let schemas: Vec<&str> = strict_tools.map(|(_, path)| path.as_str()).collect();
    let path = match asked.filter(|_| !must) {
        Some(ask) if schemas.is_empty() => ask.path,
        Some(ask) => format!("{}, {}", ask.path, schemas.join(", ")),
        None if schemas.is_empty() => "tool_choice".to_owned(),
        None => schemas.join(", "),
    };
    let format = Format::new(Grammar::Tools(grammar));
    format
        .validate()
        .map_err(|e| ApiError::invalid(path.as_str(), format!("{path}: {e}")))?;
    Ok(Some(FormatAsk {
        format: Arc::new(format),
        path,
    }))
}

/// Returns the schema of an answer that is allowed in place of a call.
fn answer_schema(ask: &FormatAsk) -> Result<String, ApiError> {
    match &ask.format.grammar {
        Grammar::JsonSchema { schema } => Ok(schema.clone()),
        Grammar::JsonObject => Ok(ANY_OBJECT.to_owned()),
        other => {
            let why = format!(
                "{} cannot be had with tools, only JSON can: leave the tools out, or set tool_choice to none",
                other.name()
            );
            Err(ApiError::unsupported(&ask.path, &why))
        }
    }
}

/// Handles a model whose calls cannot be constrained by schemas: strict tools are ignored. A JSON answer
/// format is refused, since it would make calls impossible.
fn unheld(
    request: &mut ModelRequest,
    asked: Option<FormatAsk>,
) -> Result<Option<FormatAsk>, ApiError> {
    if let Some(ask) = asked {
        let why =
            "this model's way to write calls cannot be told from the format: leave the tools out";
        return Err(ApiError::unsupported(&ask.path, why));
    }
    if !request.strict_tools.is_empty() {
        not_strict(request);
    }
    Ok(None)
}

/// Counts `strict` as a field without effect; answers that repeat the tools show this.
fn not_strict(request: &mut ModelRequest) {
    request.strict_tools.clear();
    count_ignored(&mut request.ignored, "tools[].strict", 1);
}

/// Returns the grammar of all tools that may be called; strict tools are constrained by their schemas.
fn grammar(
    request: &ModelRequest,
    calls: &ToolCallFormat,
    must: bool,
    answer: Option<String>,
) -> Option<ToolGrammar> {
    let (trigger, end) = call_marks(calls)?;
    let wanted = |name: &str| match &request.tool_choice {
        ToolChoice::Named(only) => only == name,
        _ => true,
    };
    let mut tags = Vec::new();
    for tool in request.tools.iter().filter(|t| wanted(&t.name)) {
        let schema = if request.is_strict(&tool.name) {
            tool.parameters.to_string()
        } else {
            ANY_OBJECT.to_owned()
        };
        tags.push(ToolTag {
            begin: forced_opening(calls, Some(&tool.name))?,
            schema,
            end: end.clone(),
        });
    }
    let need = if must || answer.is_some() {
        ToolNeed::Required
    } else {
        ToolNeed::Auto
    };
    Some(ToolGrammar {
        trigger,
        calls: tags,
        need,
        parallel: request.parallel_tool_calls,
        answer,
    })
}
