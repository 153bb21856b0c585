//! Reading JSON objects strictly: every field is taken by name, and what is left is refused.

use super::ToolChoice;
use crate::error::ApiError;
use serde_json::{Map, Value};

/// Most tools of a request.
const MAX_TOOLS: usize = 128;

/// An object whose fields are taken one by one. A field that is `null` counts as absent.
#[derive(Debug)]
pub struct Fields {
    map: Map<String, Value>,
    /// Path before the names, with its dot.
    prefix: String,
}

impl Fields {
    /// A whole body.
    ///
    /// # Errors
    /// If it is no JSON object.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(body).map_err(|e| {
            ApiError::bad_request("invalid_json", format!("the body is not valid JSON: {e}"))
        })?;
        match value {
            Value::Object(map) => Ok(Self {
                map,
                prefix: String::new(),
            }),
            other => Err(ApiError::bad_request(
                "invalid_json",
                format!("the body is {}, expected a JSON object", kind(&other)),
            )),
        }
    }

    /// An object inside another.
    ///
    /// # Errors
    /// If `value` is none.
    pub fn of(value: Value, path: &str) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self {
                map,
                prefix: format!("{path}."),
            }),
            other => Err(wrong(path, &other, "an object")),
        }
    }

    /// The full name of a field.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Whether there is a field with a value other than `null`.
    pub fn has(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(|v| !v.is_null())
    }

    /// Any value.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        // The order of what is left does not matter, only its names do.
        self.map.swap_remove(name).filter(|v| !v.is_null())
    }

    /// A field that may have any value, as it changes nothing.
    pub fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.map.swap_remove(*name);
        }
    }

    fn typed<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let found = read(&value);
        found
            .map(Some)
            .ok_or_else(|| wrong(&self.path(name), &value, expected))
    }

    /// A string.
    pub fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.path(name), &other, "a string")),
        }
    }

    /// A string that must be there.
    pub fn required_string(&mut self, name: &str) -> Result<String, ApiError> {
        self.string(name)?.ok_or_else(|| self.missing(name))
    }

    /// That a field must be there.
    pub fn missing(&self, name: &str) -> ApiError {
        let path = self.path(name);
        ApiError {
            code: "missing_field",
            ..ApiError::invalid(path.as_str(), format!("{path} is missing"))
        }
    }

    /// `true` or `false`.
    pub fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    /// An object, as it is.
    pub fn object(&mut self, name: &str) -> Result<Option<Value>, ApiError> {
        match self.take(name) {
            Some(value) if !value.is_object() => Err(wrong(&self.path(name), &value, "an object")),
            value => Ok(value),
        }
    }

    /// A number from `min` to `max`.
    pub fn number(&mut self, name: &str, min: f64, max: f64) -> Result<Option<f32>, ApiError> {
        let expected = format!("a number from {min} to {max}");
        self.typed(name, &expected, |v| {
            v.as_f64()
                .filter(|n| (min..=max).contains(n))
                .map(|n| n as f32)
        })
    }

    /// A whole number from `min` to `max`.
    pub fn integer(&mut self, name: &str, min: i64, max: i64) -> Result<Option<i64>, ApiError> {
        let expected = format!("a whole number from {min} to {max}");
        self.typed(name, &expected, |v| {
            v.as_i64().filter(|n| (min..=max).contains(n))
        })
    }

    /// An array.
    pub fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong(&self.path(name), &other, "an array")),
        }
    }

    /// What `tools` lists, of which there may be so many.
    ///
    /// # Errors
    /// If it is no array, or too long.
    pub fn tools(&mut self) -> Result<Vec<Value>, ApiError> {
        let tools = self.array("tools")?.unwrap_or_default();
        if tools.len() > MAX_TOOLS {
            let message = format!("{} tools, at most {MAX_TOOLS} are allowed", tools.len());
            return Err(ApiError::invalid("tools", message));
        }
        Ok(tools)
    }

    /// `tool_choice` as OpenAI's dialects write it: a word, or an object in which `named` finds
    /// the tool.
    ///
    /// # Errors
    /// If it is another word, or `named` refuses.
    pub fn tool_choice(
        &mut self,
        named: impl FnOnce(Value) -> Result<String, ApiError>,
    ) -> Result<ToolChoice, ApiError> {
        match self.take("tool_choice") {
            None => Ok(ToolChoice::Auto),
            Some(Value::String(word)) => match word.as_str() {
                "auto" => Ok(ToolChoice::Auto),
                "none" => Ok(ToolChoice::None),
                "required" => Ok(ToolChoice::Required),
                _ => {
                    let expected = "auto, none, required, or an object that names a function";
                    Err(wrong("tool_choice", &Value::String(word), expected))
                }
            },
            Some(value) => named(value).map(ToolChoice::Named),
        }
    }

    /// A field that has one acceptable value.
    pub fn only(&mut self, name: &str, allowed: &[Value], why: &str) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !allowed.contains(&value) => {
                let why = format!("{} is not supported: {why}", shown(&value));
                Err(ApiError::unsupported(&self.path(name), &why))
            }
            _ => Ok(()),
        }
    }

    /// A number that must be 0: what it asks for is not implemented.
    pub fn only_zero(&mut self, name: &str, why: &str) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if value.as_f64() != Some(0.0) => {
                Err(ApiError::unsupported(&self.path(name), why))
            }
            _ => Ok(()),
        }
    }

    /// Known fields that cannot be honoured, each with the reason.
    pub fn refuse(&mut self, fields: &[(&str, &str)]) -> Result<(), ApiError> {
        match fields.iter().find(|(name, _)| self.has(name)) {
            Some((name, why)) => Err(ApiError::unsupported(&self.path(name), why)),
            None => {
                for (name, _) in fields {
                    self.map.swap_remove(*name);
                }
                Ok(())
            }
        }
    }

    /// Nothing may be left.
    ///
    /// # Errors
    /// Naming the first field that nobody took.
    pub fn end(self) -> Result<(), ApiError> {
        match self.map.keys().next() {
            Some(name) => Err(ApiError::unknown_field(&self.path(name))),
            None => Ok(()),
        }
    }
}

/// That a value has the wrong type or is out of range.
pub fn wrong(path: &str, value: &Value, expected: &str) -> ApiError {
    let shown = shown(value);
    ApiError::invalid(path, format!("{path} is {shown}, expected {expected}"))
}

/// A value as it is named in an error.
fn shown(value: &Value) -> String {
    match value {
        Value::Number(n) => n.to_string(),
        Value::Bool(b) => b.to_string(),
        Value::String(s) if s.len() <= 40 => format!("{s:?}"),
        other => kind(other).to_owned(),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
