//! OpenTelemetry's traces in OTLP over HTTP, protobuf or JSON, made into plain spans.
//!
//! Unknown fields are skipped, as protobuf and OTLP ask. JSON is read by hand: the reader of the messages
//! would refuse a whole request for one wrong field.

use crate::hex::hex;
use crate::reason::Reason;
pub use crate::span::{Event, Span};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span;
use prost::Message;
use serde_json::{Map, Value, json};

/// Maximum bytes of the resources of all spans of a request: each span is stored with its own.
const MAX_RESOURCE_BYTES: usize = 64 << 20;

/// A value of protobuf as JSON; bytes become hexadecimal digits.
fn plain(value: Option<AnyValue>) -> Value {
    match value.and_then(|v| v.value) {
        // An index into a table of strings is of profiles, which are not read.
        None | Some(Any::StringValueStrindex(_)) => Value::Null,
        Some(Any::StringValue(text)) => text.into(),
        Some(Any::BoolValue(b)) => b.into(),
        Some(Any::IntValue(i)) => i.into(),
        // JSON has no number that is not finite: null, which no reader takes for a number.
        Some(Any::DoubleValue(d)) => json!(d),
        Some(Any::BytesValue(bytes)) => json!(hex(&bytes)),
        Some(Any::ArrayValue(array)) => array.values.into_iter().map(|v| plain(Some(v))).collect(),
        Some(Any::KvlistValue(map)) => Value::Object(attributes(map.values)),
    }
}

/// Key-value pairs as an object; of equal keys the last one stays.
fn attributes(pairs: Vec<KeyValue>) -> Map<String, Value> {
    pairs.into_iter().map(|p| (p.key, plain(p.value))).collect()
}

/// Refuses a resource that would take too much memory if each of its spans had a copy.
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
/// If the bytes are not such a message.
pub fn from_protobuf(bytes: &[u8]) -> Result<Vec<Span>, Reason> {
    let export = ExportTraceServiceRequest::decode(bytes).map_err(|e| Reason::Spans {
        detail: format!("not an ExportTraceServiceRequest: {e}"),
    })?;
    let (mut out, mut total) = (Vec::new(), 0);
    for of_resource in export.resource_spans {
        let resource = of_resource.resource.map(|r| attributes(r.attributes));
        let resource = resource.unwrap_or_default();
        let spans = of_resource.scope_spans.iter().map(|s| s.spans.len()).sum();
        check_resource(&resource, spans, &mut total)?;
        for span in of_resource.scope_spans.into_iter().flat_map(|s| s.spans) {
            let event = |e: span::Event| Event {
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
/// If the bytes are not such an object.
pub fn from_json(bytes: &[u8]) -> Result<Vec<Span>, Reason> {
    let value: Value = sinew_types::json::from_slice(bytes).map_err(|e| Reason::Spans {
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

/// A value of OTLP's JSON as plain JSON.
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

/// An `ExportTraceServiceResponse` in protobuf, from the JSON form.
pub(crate) fn export_answer(json: &Value) -> Vec<u8> {
    let partial = &json["partialSuccess"];
    let partial_success = partial.is_object().then(|| ExportTracePartialSuccess {
        rejected_spans: number(&partial["rejectedSpans"]),
        error_message: partial["errorMessage"].as_str().unwrap_or_default().into(),
    });
    ExportTraceServiceResponse { partial_success }.encode_to_vec()
}
