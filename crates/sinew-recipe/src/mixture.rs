//! `[[env]]`: the keys of an environment in a mixture, and the rules of the mixture as a whole.
//!
//! A mixture is a list of `[[env]]` tables, each with a name and a weight. [`rules`] checks what no table can
//! know of itself: that names differ, and that one tokenizer can read all worlds.

use crate::env::{EnvMember, EnvSection};
use crate::reward::RewardSection;
use crate::rule::Rules;
use crate::tasks::{TasksKeys, TasksPlan, tasks_or_source};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// What an environment of a mixture has in addition to its own keys.
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

fn one() -> f64 {
    1.0
}

fn source_or_table(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "anyOf": [{ "type": "string" }, { "type": "object" }] })
}

impl MemberKeys {
    /// Names of the keys, which an environment's own keys cannot have.
    pub(crate) const NAMES: [&str; 4] = ["name", "weight", "tasks", "reward"];

    /// The rows of the environment, whose order is that of the mixture.
    ///
    /// # Errors
    /// For a key about the order of draws, which belongs to the run.
    pub(crate) fn plan(&self) -> Result<Option<TasksPlan>, String> {
        let Some(tasks) = &self.tasks else {
            return Ok(None);
        };
        match tasks.typed_order() {
            Some(key) => Err(format!(
                "`{key}` belongs to [tasks]: it is the order of draws of the whole run"
            )),
            None => Ok(Some(tasks.clone().resolve())),
        }
    }

    /// The keys of a member as they are typed.
    pub(crate) fn of(member: &EnvMember) -> Self {
        Self {
            name: member.name.clone(),
            weight: member.weight,
            tasks: member.tasks.as_ref().map(TasksPlan::keys_without_order),
            reward: member.reward.clone(),
        }
    }
}

/// A list of environments, for editors. The keys of each type are those of a single `[env]`.
///
/// A member may have keys that are not listed here, which are those of its type.
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

/// Rules between the environments of a mixture.
///
/// Names must differ, because results are kept by name, and are part of the ids of tasks. Weights need no
/// sum: the share of an environment is its weight over the sum of all.
pub(crate) fn rules(env: &EnvSection, rules: &mut Rules) {
    let members = env.members();
    rules.allowed(
        "env",
        "[]",
        "one environment as [env], or a mixture of [[env]] tables",
        !members.is_empty(),
    );
    for (i, member) in members.iter().enumerate() {
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-');
        let name = &member.name;
        let shown = format!("{name:?}");
        let key = format!("env[{i}].name");
        rules.allowed(
            &key,
            &shown,
            "1 to 60 letters, digits, `.`, `_` and `-`: it begins the ids of tasks",
            !name.is_empty() && name.len() <= 60 && name.chars().all(plain),
        );
        rules.allowed(
            &key,
            &shown,
            "a name that no other [[env]] has: results are kept by name",
            members.iter().filter(|m| m.name == *name).count() == 1,
        );
        rules.allowed(
            &format!("env[{i}].weight"),
            member.weight,
            "a number above 0, up to 1e9: its share of the draws is its weight over the sum of all",
            member.weight > 0.0 && member.weight <= 1e9,
        );
    }
    alphabets(members, rules);
}

/// One policy has one tokenizer, so that it cannot play a world with an alphabet of its own and others.
/// The message names the first environment and the first one that differs from it.
fn alphabets(members: &[EnvMember], rules: &mut Rules) {
    let alphabet = |m: &EnvMember| m.needs().alphabet;
    let Some(first) = members.first() else { return };
    let other = members.iter().find(|m| alphabet(m) != alphabet(first));
    let Some(other) = other else { return };
    rules.allowed(
        "env",
        format!(
            "{:?} of type {:?} beside {:?} of type {:?}",
            first.name,
            first.kind_name(),
            other.name,
            other.kind_name()
        ),
        "environments for one tokenizer: a world with an alphabet of its own needs a model of its own; train \
         it in another run",
        false,
    );
}
