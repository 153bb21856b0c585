//! Actions and observations of a server, from the schemas that it declares.

use super::keys::OpenEnv;
use serde_json::{Map, Value, json};
use sinew_bridge::remote::{MAX_TEXT, cut};
use sinew_env::CallError;
use sinew_types::ToolSpec;

/// Name of the tool whose arguments are an action.
pub(super) const ACT: &str = "act";

/// Conversion of turns into actions, and of observations into texts.
#[derive(Clone, Debug)]
pub(super) struct Form {
    /// The tool for actions.
    pub(super) tool: ToolSpec,
    /// Field of the action that a turn of text fills.
    text_field: Option<String>,
    /// Field of the observation that the model sees.
    observation_field: Option<String>,
}

impl Form {
    /// The form of a server with these schemas (`GET /schema`).
    ///
    /// # Errors
    /// The fault of the schemas, or of a key that names a field that they do not have.
    pub(super) fn of(schemas: &Value, keys: &OpenEnv) -> Result<Self, (&'static str, String)> {
        let wrong = |why: String| ("url", why);
        let Value::Object(mut action) = schemas["action"].clone() else {
            return Err(wrong("GET /schema has no object `action`".into()));
        };
        let mut fields = match action.remove("properties") {
            Some(Value::Object(fields)) => fields,
            _ => Map::new(),
        };
        // Every action has it, and no model has a use for it.
        fields.remove("metadata");
        let names: Vec<String> = fields.keys().cloned().collect();
        let text_field = match (keys.text_field.as_str(), &names[..]) {
            ("", [only]) if fields[only]["type"] == "string" => Some(only.clone()),
            ("", _) => None,
            (name, _) if fields.contains_key(name) => Some(name.to_owned()),
            (name, _) => {
                let why = format!("no field {name:?}; an action has: {}", names.join(", "));
                return Err(("text_field", why));
            }
        };
        let seen = &schemas["observation"]["properties"];
        let name = keys.observation_field.as_str();
        if let (false, Some(known)) = (name.is_empty(), seen.as_object())
            && !known.contains_key(name)
        {
            let names: Vec<&str> = known.keys().map(String::as_str).collect();
            let why = format!(
                "no field {name:?}; an observation has: {}",
                names.join(", ")
            );
            return Err(("observation_field", why));
        }
        action.insert("properties".into(), Value::Object(fields));
        action.insert("type".into(), json!("object"));
        action.remove("additionalProperties");
        Ok(Self {
            tool: ToolSpec {
                name: ACT.into(),
                description: "Does an action in the environment.".into(),
                parameters: Value::Object(action),
            },
            text_field,
            observation_field: (!name.is_empty()).then(|| name.to_owned()),
        })
    }

    /// The action of a turn of text, or the model's error.
    pub(super) fn said(&self, text: &str) -> Result<Value, CallError> {
        match &self.text_field {
            Some(field) => Ok(json!({ field: text })),
            None => Err(CallError::Failed(format!(
                "call the tool {ACT}: text alone is no action here"
            ))),
        }
    }

    /// The text of an observation.
    pub(super) fn seen(&self, observation: &Value) -> String {
        let chosen = match &self.observation_field {
            Some(field) => &observation[field],
            None => observation,
        };
        let text = match chosen {
            Value::String(text) => text.clone(),
            Value::Object(fields) => {
                let shown = fields.iter().filter(|(name, _)| *name != "metadata");
                let shown: Map<String, Value> =
                    shown.map(|(k, v)| (k.clone(), v.clone())).collect();
                Value::Object(shown).to_string()
            }
            other => other.to_string(),
        };
        cut(&text, MAX_TEXT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schemas(fields: Value) -> Value {
        json!({
            "action": {"type": "object", "properties": fields, "additionalProperties": false},
            "observation": {"properties": {"hint": {}, "done": {}}},
        })
    }

    #[test]
    fn the_only_field_of_text_takes_turns_of_text() {
        let keys = OpenEnv::new("http://x");
        let text = json!({"metadata": {"type": "object"}, "message": {"type": "string"}});
        let form = Form::of(&schemas(text), &keys).unwrap();
        assert_eq!(form.said("hi").unwrap(), json!({"message": "hi"}));
        assert_eq!(form.tool.parameters["properties"]["metadata"], Value::Null);
        let form = Form::of(&schemas(json!({"guess": {"type": "integer"}})), &keys).unwrap();
        let why = form.said("17").unwrap_err().to_string();
        assert!(why.contains("call the tool act"));
        assert_eq!(
            form.seen(&json!({"hint": "up", "metadata": {}})),
            "{\"hint\":\"up\"}"
        );
    }

    #[test]
    fn fields_that_the_server_does_not_have_are_refused() {
        let fields = json!({"guess": {"type": "integer"}});
        for (keys, said) in [
            (
                OpenEnv {
                    text_field: "word".into(),
                    ..OpenEnv::new("x")
                },
                "an action has: guess",
            ),
            (
                OpenEnv {
                    observation_field: "text".into(),
                    ..OpenEnv::new("x")
                },
                "an observation has: hint, done",
            ),
        ] {
            let (_, why) = Form::of(&schemas(fields.clone()), &keys).unwrap_err();
            assert!(why.contains(said), "{why}");
        }
        assert!(Form::of(&json!({}), &OpenEnv::new("x")).is_err());
    }
}
