//! Google's dialect of OpenAPI's schemas becomes JSON Schema.

use serde_json::{Map, Value, json};

/// Formats of numbers and of `enum`: JSON Schema has no such formats of texts.
const PLAIN_FORMATS: [&str; 5] = ["enum", "int32", "int64", "float", "double"];

/// Counts that Google writes as texts, as all its integers of 64 bits.
const COUNTS: [&str; 6] = [
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
];

/// Converts a schema: types in lower case, `nullable` as a type, properties in the order of
/// `propertyOrdering`. A schema that is JSON Schema already stays as it is.
pub(super) fn json_schema(value: Value) -> Value {
    let Value::Object(map) = value else {
        return value;
    };
    let mut out = Map::new();
    let (mut nullable, mut order) = (false, None);
    for (name, value) in map {
        match (camel(&name), value) {
            ("type", Value::String(kind)) => {
                let kind = kind.to_lowercase();
                if kind != "type_unspecified" {
                    out.insert("type".into(), json!(kind));
                }
            }
            ("nullable", value) => nullable = value == json!(true),
            ("propertyOrdering", value) => order = Some(value),
            ("format", Value::String(format)) if PLAIN_FORMATS.contains(&format.as_str()) => {}
            ("example", value) => drop(out.insert("examples".into(), json!([value]))),
            ("properties", Value::Object(map)) => {
                let map = map.into_iter();
                let map: Map<_, _> = map.map(|(name, of)| (name, json_schema(of))).collect();
                out.insert("properties".into(), map.into());
            }
            (name @ ("anyOf" | "oneOf" | "allOf" | "prefixItems"), Value::Array(items)) => {
                let items = items.into_iter().map(json_schema);
                out.insert(name.to_owned(), items.collect());
            }
            (name @ ("items" | "additionalProperties"), of) => {
                out.insert(name.to_owned(), json_schema(of));
            }
            (name, Value::String(count)) if COUNTS.contains(&name) => {
                let count = count.parse::<u64>().map_or(json!(count), Value::from);
                out.insert(name.to_owned(), count);
            }
            (name, value) => drop(out.insert(name.to_owned(), value)),
        }
    }
    if let Some(order) = order {
        in_order(&mut out, &order);
    }
    if nullable {
        allow_null(&mut out);
    }
    out.into()
}

/// The name of a keyword in camel case.
fn camel(name: &str) -> &str {
    match name {
        "property_ordering" => "propertyOrdering",
        "any_of" => "anyOf",
        "additional_properties" => "additionalProperties",
        "prefix_items" => "prefixItems",
        "min_items" => "minItems",
        "max_items" => "maxItems",
        "min_length" => "minLength",
        "max_length" => "maxLength",
        "min_properties" => "minProperties",
        "max_properties" => "maxProperties",
        other => other,
    }
}

/// Puts the properties into an order; those that it does not name stay behind.
fn in_order(schema: &mut Map<String, Value>, order: &Value) {
    let Some(Value::Object(properties)) = schema.get_mut("properties") else {
        return;
    };
    let names = order.as_array().into_iter().flatten();
    let mut ordered = Map::new();
    for name in names.filter_map(Value::as_str) {
        if let Some(of) = properties.shift_remove(name) {
            ordered.insert(name.to_owned(), of);
        }
    }
    ordered.append(properties);
    *properties = ordered;
}

/// Also allows null.
fn allow_null(schema: &mut Map<String, Value>) {
    if let Some(Value::Array(values)) = schema.get_mut("enum")
        && !values.contains(&Value::Null)
    {
        values.push(Value::Null);
    }
    match schema.get_mut("type") {
        Some(Value::String(kind)) => {
            let kinds = json!([kind, "null"]);
            schema.insert("type".into(), kinds);
        }
        Some(_) => {}
        None => {
            if let Some(Value::Array(any)) = schema.get_mut("anyOf") {
                any.push(json!({"type": "null"}));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_of_openapi_are_converted_and_others_stay() {
        let given = json!({
            "type": "OBJECT", "propertyOrdering": ["b", "a"], "required": ["a"],
            "properties": {
                "a": {"type": "STRING", "nullable": true, "enum": ["x"], "format": "enum"},
                "b": {"type": "ARRAY", "min_items": "1", "items": {"type": "INTEGER", "format": "int32"}},
                "c": {"any_of": [{"type": "NUMBER"}, {"type": "TYPE_UNSPECIFIED"}], "nullable": true},
                "d": {"type": "STRING", "format": "date-time", "example": "now"},
            },
        });
        let expected = json!({
            "type": "object", "required": ["a"],
            "properties": {
                "b": {"type": "array", "minItems": 1, "items": {"type": "integer"}},
                "a": {"type": ["string", "null"], "enum": ["x", null]},
                "c": {"anyOf": [{"type": "number"}, {}, {"type": "null"}]},
                "d": {"type": "string", "format": "date-time", "examples": ["now"]},
            },
        });
        let converted = json_schema(given);
        assert_eq!(converted, expected);
        // The order of properties is that of the output.
        assert_eq!(converted.to_string(), expected.to_string());
        assert_eq!(json_schema(expected.clone()), expected);
    }
}
