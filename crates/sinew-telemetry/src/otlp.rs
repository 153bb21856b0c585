//! Common parts of traces and logs of OpenTelemetry: the resource, and attributes. Pure.

use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value};
use opentelemetry_proto::tonic::resource::v1::Resource;

/// The speaker: the service of the configuration, and the run.
pub(crate) fn resource(service: &str, run: &str) -> Resource {
    Resource {
        attributes: vec![text("service.name", service), text("sinew.run", run)],
        ..Resource::default()
    }
}

/// The program with its version.
pub(crate) fn scope() -> InstrumentationScope {
    InstrumentationScope {
        name: "sinew".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        ..InstrumentationScope::default()
    }
}

/// An attribute that is text.
pub(crate) fn text(key: &str, value: &str) -> KeyValue {
    attribute(key, any_value::Value::StringValue(value.to_owned()))
}

/// An attribute that is a whole number.
pub(crate) fn int(key: &str, value: i64) -> KeyValue {
    attribute(key, any_value::Value::IntValue(value))
}

/// An attribute that is a number.
pub(crate) fn float(key: &str, value: f64) -> KeyValue {
    attribute(key, any_value::Value::DoubleValue(value))
}

/// An attribute that is true or false.
pub(crate) fn boolean(key: &str, value: bool) -> KeyValue {
    attribute(key, any_value::Value::BoolValue(value))
}

/// A text by itself.
pub(crate) fn body(value: &str) -> AnyValue {
    AnyValue {
        value: Some(any_value::Value::StringValue(value.to_owned())),
    }
}

fn attribute(key: &str, value: any_value::Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}
