//! `[[env]]`: the keys of an environment in a mixture, in addition to those of its type.

use crate::reward::RewardSection;
use crate::tasks::{TasksKeys, TasksPlan, tasks_or_source};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Keys of an environment in a mixture, in addition to its own.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemberKeys {
    /// Name in metrics, traces and held-out results: letters, digits, `.`, `_` and `-`. Each has its own.
    pub(crate) name: String,
    /// Its share of the draws is its weight over the sum of all weights, above 0.
    #[serde(default = "one")]
    pub(crate) weight: f64,
    /// Rows of its own, as `[tasks]` without the order of draws; for environments that take rows.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "tasks_or_source"
    )]
    #[schemars(schema_with = "source_or_table")]
    pub(crate) tasks: Option<TasksKeys>,
    /// Reward of its episodes, in place of its own score: as `reward`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reward: Option<RewardSection>,
}

/// A key about the order of draws in an environment of a mixture.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` belongs to [tasks]: it is the order of draws of the whole run")]
pub(crate) struct OrderKeyError(&'static str);

fn one() -> f64 {
    1.0
}

fn source_or_table(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "anyOf": [{ "type": "string" }, { "type": "object" }] })
}

impl MemberKeys {
    /// Names of these keys, which an environment's own keys must not use.
    pub(crate) const NAMES: [&str; 4] = ["name", "weight", "tasks", "reward"];

    /// Returns the plan of the environment's rows. The order of draws belongs to the mixture.
    ///
    /// # Errors
    /// Fails for a key about the order of draws, which belongs to the run.
    pub(crate) fn plan(&self) -> Result<Option<TasksPlan>, OrderKeyError> {
        let Some(tasks) = &self.tasks else {
            return Ok(None);
        };
        match tasks.typed_order() {
            Some(key) => Err(OrderKeyError(key)),
            None => Ok(Some(tasks.clone().resolve())),
        }
    }
}

/// Schema of a list of environments, for editors. Each type has the same keys as in a single `[env]`.
///
/// The schema allows further keys, those of the member's type.
pub(crate) fn schema(generator: &mut SchemaGenerator, names: &[&str]) -> Schema {
    let mut member = MemberKeys::json_schema(generator);
    if let Some(properties) = member.get_mut("properties").and_then(|p| p.as_object_mut()) {
        let kind = json!({ "enum": names, "type": "string", "description": "The environment." });
        properties.insert("type".into(), kind);
    }
    member.insert("required".into(), json!(["name", "type"]));
    member.insert("additionalProperties".into(), json!(true));
    json_schema!({ "type": "array", "items": member, "minItems": 1 })
}
