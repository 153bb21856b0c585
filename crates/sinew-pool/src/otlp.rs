//! OpenTelemetry's traces as they come over HTTP: protobuf or JSON, made into plain spans.
//!
//! The messages below are the part of `opentelemetry/proto/trace/v1/trace.proto` and
//! `collector/trace/v1/trace_service.proto` (v1.7) that is read; other fields are skipped, as
//! protobuf and OTLP ask.

use crate::reason::Reason;
use prost::Message;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Most attributes of a span with its events.
const MAX_ATTRIBUTES: usize = 4096;

/// Most bytes of the resources of all spans of a request: each span is kept with its own.
const MAX_RESOURCE_BYTES: usize = 64 << 20;

/// A span, as far as it is read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Span {
    /// 32 hexadecimal digits.
    pub trace_id: String,
    /// 16 hexadecimal digits.
    pub span_id: String,
    /// Empty for a root.
    pub parent_id: String,
    pub name: String,
    pub start_ns: u64,
    pub attributes: Map<String, Value>,
    pub events: Vec<Event>,
    /// Attributes of the resource that sent it.
    pub resource: Map<String, Value>,
}

/// Something that happened within a span.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Event {
    pub name: String,
    pub attributes: Map<String, Value>,
}

impl Span {
    /// Refuses a span whose ids are not OpenTelemetry's, or that is too large.
    pub(crate) fn check(&self) -> Result<(), Reason> {
        let hex = |text: &str, len: usize| {
            text.len() == len && text.bytes().all(|b| b.is_ascii_hexdigit())
        };
        let parent = self.parent_id.is_empty() || hex(&self.parent_id, 16);
        if !(hex(&self.trace_id, 32) && hex(&self.span_id, 16) && parent) {
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

#[derive(Clone, PartialEq, Message)]
struct Export {
    #[prost(message, repeated, tag = "1")]
    resource_spans: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct Resource {
    #[prost(message, repeated, tag = "1")]
    attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct ScopeSpans {
    #[prost(message, repeated, tag = "2")]
    spans: Vec<WireSpan>,
}

#[derive(Clone, PartialEq, Message)]
struct WireSpan {
    #[prost(bytes = "vec", tag = "1")]
    trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    span_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    name: String,
    #[prost(fixed64, tag = "7")]
    start_time_unix_nano: u64,
    #[prost(message, repeated, tag = "9")]
    attributes: Vec<KeyValue>,
    #[prost(message, repeated, tag = "11")]
    events: Vec<WireEvent>,
}

#[derive(Clone, PartialEq, Message)]
struct WireEvent {
    #[prost(string, tag = "2")]
    name: String,
    #[prost(message, repeated, tag = "3")]
    attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(message, optional, tag = "2")]
    value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct AnyValue {
    #[prost(oneof = "Any", tags = "1, 2, 3, 4, 5, 6, 7")]
    value: Option<Any>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Any {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(bool, tag = "2")]
    Bool(bool),
    #[prost(int64, tag = "3")]
    Int(i64),
    #[prost(double, tag = "4")]
    Double(f64),
    #[prost(message, tag = "5")]
    Array(AnyArray),
    #[prost(message, tag = "6")]
    Map(AnyMap),
    #[prost(bytes, tag = "7")]
    Bytes(Vec<u8>),
}

#[derive(Clone, PartialEq, Message)]
struct AnyArray {
    #[prost(message, repeated, tag = "1")]
    values: Vec<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct AnyMap {
    #[prost(message, repeated, tag = "1")]
    values: Vec<KeyValue>,
}

fn plain(value: Option<AnyValue>) -> Value {
    match value.and_then(|v| v.value) {
        None => Value::Null,
        Some(Any::Text(text)) => text.into(),
        Some(Any::Bool(b)) => b.into(),
        Some(Any::Int(i)) => i.into(),
        // What is not finite has no JSON: null, which no reader takes for a number.
        Some(Any::Double(d)) => json!(d),
        Some(Any::Bytes(bytes)) => json!(crate::check::hex(&bytes)),
        Some(Any::Array(array)) => array.values.into_iter().map(|v| plain(Some(v))).collect(),
        Some(Any::Map(map)) => Value::Object(attributes(map.values)),
    }
}

fn attributes(pairs: Vec<KeyValue>) -> Map<String, Value> {
    pairs.into_iter().map(|p| (p.key, plain(p.value))).collect()
}

/// Refuses a resource that would take too much memory as that of so many spans.
fn check_resource(
    resource: &Map<String, Value>,
    spans: usize,
    total: &mut usize,
) -> Result<(), Reason> {
    let bytes = serde_json::to_string(resource).map_or(0, |text| text.len());
    *total = total.saturating_add(bytes.saturating_mul(spans));
    if *total > MAX_RESOURCE_BYTES {
        return Err(Reason::TooLarge {
            field: "attributes of the resource, in each of its spans".into(),
            value: *total as u64,
            limit: MAX_RESOURCE_BYTES as u64,
        });
    }
    Ok(())
}

/// The spans of an `ExportTraceServiceRequest` in protobuf.
///
/// # Errors
/// If the bytes are no such message.
pub fn from_protobuf(bytes: &[u8]) -> Result<Vec<Span>, Reason> {
    let export = Export::decode(bytes).map_err(|e| Reason::Spans {
        detail: format!("not an ExportTraceServiceRequest: {e}"),
    })?;
    let (mut out, mut total) = (Vec::new(), 0);
    for of_resource in export.resource_spans {
        let resource = of_resource.resource.map(|r| attributes(r.attributes));
        let resource = resource.unwrap_or_default();
        let spans = of_resource.scope_spans.iter().map(|s| s.spans.len()).sum();
        check_resource(&resource, spans, &mut total)?;
        for span in of_resource.scope_spans.into_iter().flat_map(|s| s.spans) {
            let hex = crate::check::hex;
            let event = |e: WireEvent| Event {
                name: e.name,
                attributes: attributes(e.attributes),
            };
            out.push(Span {
                trace_id: hex(&span.trace_id),
                span_id: hex(&span.span_id),
                parent_id: hex(&span.parent_span_id),
                name: span.name,
                start_ns: span.start_time_unix_nano,
                attributes: attributes(span.attributes),
                events: span.events.into_iter().map(event).collect(),
                resource: resource.clone(),
            });
        }
    }
    Ok(out)
}

/// The spans of an `ExportTraceServiceRequest` in OTLP's JSON.
///
/// # Errors
/// If the bytes are no such object.
pub fn from_json(bytes: &[u8]) -> Result<Vec<Span>, Reason> {
    let value: Value = serde_json::from_slice(bytes).map_err(|e| Reason::Spans {
        detail: format!("not JSON: {e}"),
    })?;
    let list = |value: &Value, field: &str| -> Vec<Value> {
        value[field].as_array().cloned().unwrap_or_default()
    };
    if !value["resourceSpans"].is_array() {
        let detail = "not an ExportTraceServiceRequest: resourceSpans is missing".into();
        return Err(Reason::Spans { detail });
    }
    let (mut out, mut total) = (Vec::new(), 0);
    for of_resource in list(&value, "resourceSpans") {
        let resource = json_attributes(&of_resource["resource"]["attributes"]);
        for scope in list(&of_resource, "scopeSpans") {
            let spans = list(&scope, "spans");
            check_resource(&resource, spans.len(), &mut total)?;
            for span in spans {
                let text = |field: &str| span[field].as_str().unwrap_or_default().to_owned();
                let event = |e: &Value| Event {
                    name: e["name"].as_str().unwrap_or_default().to_owned(),
                    attributes: json_attributes(&e["attributes"]),
                };
                out.push(Span {
                    trace_id: text("traceId").to_lowercase(),
                    span_id: text("spanId").to_lowercase(),
                    parent_id: text("parentSpanId").to_lowercase(),
                    name: text("name"),
                    start_ns: number(&span["startTimeUnixNano"]).max(0) as u64,
                    attributes: json_attributes(&span["attributes"]),
                    events: list(&span, "events").iter().map(event).collect(),
                    resource: resource.clone(),
                });
            }
        }
    }
    Ok(out)
}

/// A 64-bit number, which OTLP's JSON writes as text or as a number.
fn number(value: &Value) -> i64 {
    let text = value.as_str().and_then(|t| t.parse().ok());
    text.or_else(|| value.as_i64()).unwrap_or(0)
}

fn json_attributes(value: &Value) -> Map<String, Value> {
    let pairs = value.as_array().map(Vec::as_slice).unwrap_or_default();
    let pair = |p: &Value| {
        let key = p["key"].as_str().unwrap_or_default().to_owned();
        (key, json_value(&p["value"]))
    };
    pairs.iter().map(pair).collect()
}

fn json_value(value: &Value) -> Value {
    let Some((kind, inner)) = value.as_object().and_then(|o| o.iter().next()) else {
        return Value::Null;
    };
    match kind.as_str() {
        "stringValue" | "boolValue" | "doubleValue" | "bytesValue" => inner.clone(),
        "intValue" => json!(number(inner)),
        "arrayValue" => {
            let values = inner["values"].as_array().map(Vec::as_slice);
            values.unwrap_or_default().iter().map(json_value).collect()
        }
        "kvlistValue" => Value::Object(json_attributes(&inner["values"])),
        _ => Value::Null,
    }
}

#[derive(Clone, PartialEq, Message)]
struct ExportAnswer {
    #[prost(message, optional, tag = "1")]
    partial_success: Option<PartialSuccess>,
}

#[derive(Clone, PartialEq, Message)]
struct PartialSuccess {
    #[prost(int64, tag = "1")]
    rejected_spans: i64,
    #[prost(string, tag = "2")]
    error_message: String,
}

/// An `ExportTraceServiceResponse` in protobuf, from the JSON form.
pub(crate) fn export_answer(json: &Value) -> Vec<u8> {
    let partial = &json["partialSuccess"];
    let partial_success = partial.is_object().then(|| PartialSuccess {
        rejected_spans: number(&partial["rejectedSpans"]),
        error_message: partial["errorMessage"].as_str().unwrap_or_default().into(),
    });
    ExportAnswer { partial_success }.encode_to_vec()
}
