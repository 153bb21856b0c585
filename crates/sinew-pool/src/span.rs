//! Spans of OpenTelemetry, as far as the pool reads them. They are kept as JSON until the root of their trace
//! arrives.

use crate::reason::Reason;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Maximum number of attributes, counted over a span, its resource and its events.
const MAX_ATTRIBUTES: usize = 4096;

/// The fields of a span that the pool uses.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Span {
    /// 32 hexadecimal digits.
    pub trace_id: String,
    /// 16 hexadecimal digits.
    pub span_id: String,
    /// Empty for a root.
    pub parent_id: String,
    /// Name of the operation.
    pub name: String,
    /// Nanoseconds since 1970.
    pub start_ns: u64,
    /// Attributes as plain JSON.
    pub attributes: Map<String, Value>,
    /// Events within the span.
    pub events: Vec<Event>,
    /// Attributes of the resource that sent it.
    pub resource: Map<String, Value>,
}

/// Something that happened within a span.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Event {
    /// Name of the event.
    pub name: String,
    /// Attributes as plain JSON.
    pub attributes: Map<String, Value>,
}

impl Span {
    /// Refuses a span with ids that are not OpenTelemetry's, or with too many attributes.
    pub(crate) fn check(&self) -> Result<(), Reason> {
        let digits = |text: &str, len: usize| {
            text.len() == len && text.bytes().all(|b| b.is_ascii_hexdigit())
        };
        let parent = self.parent_id.is_empty() || digits(&self.parent_id, 16);
        if !(digits(&self.trace_id, 32) && digits(&self.span_id, 16) && parent) {
            let detail = format!(
                "span {:?} of trace {:?}: ids are 16 and 32 hexadecimal digits",
                self.span_id, self.trace_id
            );
            return Err(Reason::Spans { detail });
        }
        let events = self.events.iter().map(|e| e.attributes.len() + 1);
        let count = self.attributes.len() + self.resource.len() + events.sum::<usize>();
        if count > MAX_ATTRIBUTES {
            return Err(Reason::TooLarge {
                field: format!("attributes of span {}", self.span_id),
                value: count as u64,
                limit: MAX_ATTRIBUTES as u64,
            });
        }
        Ok(())
    }
}
