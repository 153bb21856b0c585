//! The end of an agent, as the last part of its output tells it.

use serde_json::Value;

/// The form of an agent's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// The answer, and nothing else.
    Text,
    /// One JSON object, or lines of which some are one.
    Json(Fields),
}

/// The fields of JSON output that matter. Each is a pointer (RFC 6901) with the value that it must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fields {
    /// Marks of the object that has the answer; the last one counts.
    pub(crate) marks: &'static [(&'static str, &'static str)],
    /// The answer in it.
    pub(crate) answer: &'static str,
    /// Marks of an end by a limit of the agent's own.
    pub(crate) cut: Option<(&'static str, &'static str)>,
    /// Places of the reason why an agent failed, in any object.
    pub(crate) faults: &'static [&'static str],
}

/// The end of an agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentEnd {
    /// Its last words; `None`: it said none, or failed.
    pub answer: Option<String>,
    /// Whether a limit of its own ended it.
    pub cut: bool,
    /// The reason why it failed, in its own words.
    pub fault: Option<String>,
}

impl Output {
    /// Reads the end of what an agent printed; its beginning may be missing.
    pub(crate) fn end(&self, printed: &str) -> AgentEnd {
        let Self::Json(fields) = self else {
            let text = printed.trim();
            return AgentEnd {
                answer: (!text.is_empty()).then(|| text.to_owned()),
                ..AgentEnd::default()
            };
        };
        let objects = objects(printed);
        let last = objects.iter().rev().find(|object| {
            let mut marks = fields.marks.iter();
            marks.all(|mark| has(object, mark))
        });
        let text = |object: &Value, place: &&str| {
            let found = object.pointer(place)?.as_str()?.trim();
            (!found.is_empty()).then(|| found.to_owned())
        };
        let answer = last.and_then(|object| text(object, &fields.answer));
        let fault = objects.iter().rev().find_map(|object| {
            let mut places = fields.faults.iter();
            places.find_map(|place| text(object, place))
        });
        let cut = fields.cut.as_ref();
        AgentEnd {
            cut: cut.is_some_and(|mark| objects.iter().any(|object| has(object, mark))),
            fault: fault.filter(|_| answer.is_none()),
            answer,
        }
    }
}

/// Whether a place of an object has a value, which is compared as text.
fn has(object: &Value, (place, expected): &(&str, &str)) -> bool {
    match object.pointer(place) {
        Some(Value::String(text)) => text == expected,
        Some(other) => format!("{other}") == *expected,
        None => false,
    }
}

/// The JSON objects of an output: all of it is one, or some of its lines are. A cut line is none.
fn objects(printed: &str) -> Vec<Value> {
    // Text before an object may be a warning.
    let start = printed.find('{').unwrap_or(printed.len());
    if let Ok(whole) = serde_json::from_str(&printed[start..]) {
        return vec![whole];
    }
    let lines = printed.lines().map(str::trim);
    let lines = lines.filter(|line| line.starts_with('{'));
    lines
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}
