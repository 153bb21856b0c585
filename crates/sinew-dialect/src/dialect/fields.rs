//! Reads JSON objects field by field: every field is taken by name, and the rest is counted, or refused if
//! the gateway is strict.

use crate::answers::Answers;
use crate::error::ApiError;
use crate::ignored::{Ignored, count_ignored};
use serde_json::{Map, Value};
use sinew_types::{Message, TEMPERATURES, json};
use std::cell::RefCell;
use std::sync::Arc;

/// Most tools of a request: agents with several MCP servers have hundreds.
pub(super) const MAX_TOOLS: usize = 1024;

/// Most bytes of a path of an ignored field; a longer one is cut.
const MAX_PATH_BYTES: usize = 120;

/// Notes that are collected while a body is parsed.
#[derive(Debug)]
pub struct Notes {
    /// Fields without effect are refused.
    strict: bool,
    /// Counts by path, of one request.
    ignored: RefCell<Ignored>,
    /// Answers whose parts a request may name.
    answers: Option<Arc<Answers>>,
}

impl Notes {
    /// `strict`: fields without effect are refused, not counted.
    pub fn new(strict: bool) -> Self {
        Self {
            strict,
            ignored: RefCell::default(),
            answers: None,
        }
    }

    /// Requests may name parts of these answers.
    pub fn with_answers(self, answers: &Arc<Answers>) -> Self {
        Self {
            answers: Some(Arc::clone(answers)),
            ..self
        }
    }

    /// The model's message in an answer of the same rollout.
    pub(crate) fn answer(&self, id: &str) -> Option<Message> {
        self.answers.as_ref()?.said(id)
    }

    /// A field is accepted without effect.
    ///
    /// # Errors
    /// `refusal`, if the gateway is strict.
    pub(crate) fn ignored(
        &self,
        path: &str,
        refusal: impl FnOnce() -> ApiError,
    ) -> Result<(), ApiError> {
        if self.strict {
            return Err(refusal());
        }
        count_ignored(&mut self.ignored.borrow_mut(), &general(path), 1);
        Ok(())
    }

    /// The fields that were accepted without effect.
    pub fn take(&self) -> Ignored {
        self.ignored.take()
    }
}

/// A path without the numbers of its items, as all of them count as one field.
fn general(path: &str) -> String {
    let mut out = String::with_capacity(path.len().min(MAX_PATH_BYTES));
    let mut inside = false;
    for c in path.chars() {
        if out.len() >= MAX_PATH_BYTES {
            out.push('…');
            break;
        }
        inside = inside && c.is_ascii_digit();
        if !inside {
            out.push(c);
        }
        inside = inside || c == '[';
    }
    out
}

/// A name in camel case. An underscore in front stays.
fn camel_case(name: String) -> String {
    if !name.contains('_') {
        return name;
    }
    let mut out = String::with_capacity(name.len());
    let mut upper = false;
    for c in name.chars() {
        if c == '_' && !out.is_empty() {
            upper = true;
        } else if std::mem::take(&mut upper) {
            out.extend(c.to_uppercase());
        } else {
            out.push(c);
        }
    }
    out
}

/// Whether a value asks for nothing: it counts as absent where a field cannot be honoured.
fn asks_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// An object whose fields are taken one by one. A field that is `null` counts as absent.
#[derive(Debug)]
pub struct Fields<'n> {
    /// Fields that were not taken yet.
    map: Map<String, Value>,
    /// Path before the names, with its dot.
    prefix: String,
    notes: &'n Notes,
}

impl<'n> Fields<'n> {
    /// A whole body.
    ///
    /// # Errors
    /// If it is not a JSON object.
    pub fn parse(body: &[u8], notes: &'n Notes) -> Result<Self, ApiError> {
        let value: Value = json::from_slice(body).map_err(|e| {
            ApiError::bad_request("invalid_json", format!("the body is not valid JSON: {e}"))
        })?;
        match value {
            Value::Object(map) => Ok(Self {
                map,
                prefix: String::new(),
                notes,
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
    pub fn of(value: Value, path: &str, notes: &'n Notes) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self {
                map,
                prefix: format!("{path}."),
                notes,
            }),
            other => Err(wrong(path, &other, "an object")),
        }
    }

    /// Renames all fields to camel case. Google's servers read both `topP` and `top_p`.
    #[must_use]
    pub fn in_camel_case(mut self) -> Self {
        let map = std::mem::take(&mut self.map).into_iter();
        self.map = map.map(|(name, value)| (camel_case(name), value)).collect();
        self
    }

    /// Counts of ignored fields.
    pub fn notes(&self) -> &'n Notes {
        self.notes
    }

    /// The object in a field, if there is one.
    ///
    /// # Errors
    /// If its value is not an object.
    pub fn inner(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        let value = self.take(name);
        value
            .map(|v| Self::of(v, &self.path(name), self.notes))
            .transpose()
    }

    /// The object that must be in a field.
    ///
    /// # Errors
    /// If there is none.
    pub fn required_inner(&mut self, name: &str) -> Result<Self, ApiError> {
        self.inner(name)?.ok_or_else(|| self.missing(name))
    }

    /// The full name of a field.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Whether there is a field with a value other than `null`.
    pub fn has(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(|v| !v.is_null())
    }

    /// A value inside, which stays where it is.
    pub fn at(&self, names: &[&str]) -> Option<&Value> {
        let (first, rest) = names.split_first()?;
        let value = rest
            .iter()
            .try_fold(self.map.get(*first)?, |v, name| v.get(name));
        value.filter(|v| !v.is_null())
    }

    /// The value, if it is an object; another one stays where it is.
    pub fn take_object(&mut self, name: &str) -> Option<Value> {
        let is_object = self.map.get(name).is_some_and(Value::is_object);
        is_object.then(|| self.take(name))?
    }

    /// Any value.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        // The order of what is left does not matter, only its names do.
        self.map.swap_remove(name).filter(|v| !v.is_null())
    }

    /// Bookkeeping, which by its definition changes nothing: not counted.
    pub fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.map.swap_remove(*name);
        }
    }

    /// Drops the remaining fields, which were counted as a whole.
    pub fn take_rest(&mut self) {
        self.map.clear();
    }

    /// A field of one type; `expected` is for the error.
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

    /// Any value, which must be there.
    ///
    /// # Errors
    /// If it is not.
    pub fn required(&mut self, name: &str) -> Result<Value, ApiError> {
        self.take(name).ok_or_else(|| self.missing(name))
    }

    /// An array that must be there.
    ///
    /// # Errors
    /// If it is not, or is another value.
    pub fn required_array(&mut self, name: &str) -> Result<Vec<Value>, ApiError> {
        self.array(name)?.ok_or_else(|| self.missing(name))
    }

    /// A number of tokens, from `min` on.
    ///
    /// # Errors
    /// If it is not a whole number, or too small or too large.
    pub fn count(&mut self, name: &str, min: i64) -> Result<Option<u32>, ApiError> {
        let count = self.integer(name, min, i64::from(u32::MAX))?;
        Ok(count.map(|n| n.max(0) as u32))
    }

    /// Error for a missing field.
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

    /// Returns an object, unchanged.
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

    /// `temperature`, up to `max`. A value below the lowest sampled temperature becomes that temperature; 0
    /// is greedy.
    ///
    /// # Errors
    /// If it is out of range.
    pub fn temperature(&mut self, max: f64) -> Result<Option<f32>, ApiError> {
        let lowest = *TEMPERATURES.start();
        let asked = self.number("temperature", 0.0, max)?;
        Ok(asked.map(|t| if t > 0.0 { t.max(lowest) } else { t }))
    }

    /// The arguments of a call: a text with JSON. A call without any has none, or an empty text.
    ///
    /// # Errors
    /// If the text is not JSON.
    pub fn arguments(&mut self) -> Result<Value, ApiError> {
        let path = self.path("arguments");
        let text = self.required_string("arguments")?;
        if text.trim().is_empty() {
            return Ok(Value::Object(Map::new()));
        }
        json::from_str(&text)
            .map_err(|e| ApiError::invalid(path.as_str(), format!("{path} is not valid JSON: {e}")))
    }

    /// A whole number from `min` to `max`, which may be written with a point.
    pub fn integer(&mut self, name: &str, min: i64, max: i64) -> Result<Option<i64>, ApiError> {
        let expected = format!("a whole number from {min} to {max}");
        self.typed(name, &expected, |v| {
            v.as_i64()
                .or_else(|| whole(v.as_f64()?))
                .filter(|n| (min..=max).contains(n))
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

    /// Items of `tools`, up to a maximum number.
    ///
    /// # Errors
    /// If it is not an array, or too long.
    pub fn tools(&mut self) -> Result<Vec<Value>, ApiError> {
        let tools = self.array("tools")?.unwrap_or_default();
        if tools.len() > MAX_TOOLS {
            let message = format!("{} tools, at most {MAX_TOOLS} are allowed", tools.len());
            return Err(ApiError::invalid("tools", message));
        }
        Ok(tools)
    }

    /// A field that would change what is sampled, and cannot be honoured but with these values.
    ///
    /// # Errors
    /// If it has another one.
    pub fn only(&mut self, name: &str, allowed: &[Value], why: &str) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !allowed.contains(&value) => Err(self.unsupported(name, &value, why)),
            _ => Ok(()),
        }
    }

    /// A number that would change what is sampled, and cannot be honoured but with this value.
    ///
    /// # Errors
    /// If it has another one.
    pub fn only_number(&mut self, name: &str, neutral: f64, why: &str) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if value.as_f64() != Some(neutral) => {
                Err(self.unsupported(name, &value, why))
            }
            _ => Ok(()),
        }
    }

    /// Whether a value counts as absent; a strict gateway takes only `null` for that.
    fn is_absent(&self, value: &Value) -> bool {
        value.is_null() || (!self.notes.strict && asks_nothing(value))
    }

    /// The refusal of a value that cannot be honoured.
    fn unsupported(&self, name: &str, value: &Value, why: &str) -> ApiError {
        let why = format!("{} is not supported: {why}", shown(value));
        ApiError::unsupported(&self.path(name), &why)
    }

    /// Fields that would change what is sampled and cannot be honoured, each with the reason. One
    /// that asks for nothing is accepted.
    ///
    /// # Errors
    /// Naming the first that asks for something.
    pub fn refuse(&mut self, fields: &[(&str, &str)]) -> Result<(), ApiError> {
        for (name, why) in fields {
            let value = self.map.swap_remove(*name).unwrap_or_default();
            if !self.is_absent(&value) {
                return Err(ApiError::unsupported(&self.path(name), why));
            }
        }
        Ok(())
    }

    /// A known field that changes nothing of what is sampled: with a value other than `neutral`,
    /// which it has by default, it is counted.
    ///
    /// # Errors
    /// If it would be counted and the gateway is strict.
    pub fn no_effect(&mut self, name: &str, neutral: &[Value], why: &str) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !self.is_absent(&value) && !neutral.contains(&value) => {
                let path = self.path(name);
                self.notes
                    .ignored(&path, || self.unsupported(name, &value, why))
            }
            _ => Ok(()),
        }
    }

    /// [`Fields::no_effect`] for fields without a default.
    ///
    /// # Errors
    /// Likewise.
    pub fn no_effects(&mut self, fields: &[(&str, &str)]) -> Result<(), ApiError> {
        fields
            .iter()
            .try_for_each(|(name, why)| self.no_effect(name, &[], why))
    }

    /// Counts the remaining fields, which are unknown.
    ///
    /// # Errors
    /// Naming the first, if the gateway is strict.
    pub fn end(self) -> Result<(), ApiError> {
        for (name, value) in &self.map {
            let path = self.path(name);
            // Answers that are sent back have many fields that are null.
            if self.notes.strict || !value.is_null() {
                self.notes
                    .ignored(&path, || ApiError::unknown_field(&path))?;
            }
        }
        Ok(())
    }
}

/// A number without a fraction, as an integer.
fn whole(number: f64) -> Option<i64> {
    // Larger floats do not represent every whole number.
    let exact = number.fract() == 0.0 && number.abs() <= 9e15;
    exact.then_some(number as i64)
}

/// Error for a value of the wrong type or out of range.
pub fn wrong(path: &str, value: &Value, expected: &str) -> ApiError {
    let shown = shown(value);
    ApiError::invalid(path, format!("{path} is {shown}, expected {expected}"))
}

/// Formats a value for an error message.
fn shown(value: &Value) -> String {
    match value {
        Value::Number(n) => n.to_string(),
        Value::Bool(b) => b.to_string(),
        Value::String(s) if s.len() <= 40 => format!("{s:?}"),
        other => kind(other).to_owned(),
    }
}

/// The JSON type of a value, for errors.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ignored::{MAX_IGNORED, MORE_IGNORED};
    use serde_json::json;

    fn read(body: &Value, strict: bool) -> Result<Ignored, ApiError> {
        let notes = Notes::new(strict);
        let fields = Fields::parse(body.to_string().as_bytes(), &notes)?;
        fields.end()?;
        Ok(notes.take())
    }

    #[test]
    fn items_of_a_list_count_as_one_field() {
        for (path, expected) in [
            ("messages[0].x", "messages[].x"),
            ("messages[12].content[3].y", "messages[].content[].y"),
            ("a1.b2", "a1.b2"),
            ("a[b1]", "a[b1]"),
        ] {
            assert_eq!(general(path), expected);
        }
    }

    #[test]
    fn names_in_snake_case_are_those_in_camel_case() {
        let notes = Notes::new(true);
        let body = json!({"top_p": 1, "maxOutputTokens": 2, "_private_name": 3, "a_b_c": 4});
        let mut fields = Fields::of(body, "x", &notes).unwrap().in_camel_case();
        for (name, value) in [
            ("topP", 1),
            ("maxOutputTokens", 2),
            ("_privateName", 3),
            ("aBC", 4),
        ] {
            assert_eq!(fields.take(name), Some(json!(value)), "{name}");
        }
        fields.end().unwrap();
    }

    #[test]
    fn unknown_fields_are_counted_within_bounds() {
        let mut body = json!({"gone": null});
        for i in 0..MAX_IGNORED + 10 {
            body[format!("field {i}")] = json!(1);
        }
        let ignored = read(&body, false).unwrap();
        assert_eq!(ignored.len(), MAX_IGNORED + 1);
        assert_eq!(ignored[MORE_IGNORED], 10);
        assert_eq!(ignored.values().sum::<u64>(), MAX_IGNORED as u64 + 10);
        let long = read(&json!({"é".repeat(5000): 1}), false).unwrap();
        assert!(long.keys().all(|path| path.len() < 2 * MAX_PATH_BYTES));
    }

    #[test]
    fn a_strict_gateway_refuses_what_it_does_not_know() {
        for value in [json!(1), json!(null)] {
            let error = read(&json!({"mood": value}), true).unwrap_err();
            assert_eq!(error.code, "unknown_field");
            assert_eq!(error.param.as_deref(), Some("mood"));
        }
    }
}
