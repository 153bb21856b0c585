//! `[env]`: an environment of the registry with its keys, or a mixture of several.

use crate::mixture::{self, MemberKeys};
use crate::reward::RewardSection;
use crate::rule::Rules;
use crate::{RunPlan, TasksPlan};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::json;
use sinew_env::{EnvConfig, EnvKind, Needs, Registry};
use std::ops::Range;
use std::sync::Arc;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Error, ValueDeserializer};

/// An environment with its keys. As a member of a mixture, it has a name and a weight, and may have its own
/// tasks and reward.
#[derive(Clone, Debug)]
pub struct EnvMember {
    /// Name in a mixture; empty for a single environment.
    pub name: String,
    /// Weight of its draws, above 0.
    pub weight: f64,
    /// Its own rows; `None`: the rows of the recipe, or the environment's own tasks.
    pub tasks: Option<TasksPlan>,
    /// Its own reward; `None`: the reward of the recipe, or the environment's own score.
    pub reward: Option<RewardSection>,
    kind: &'static EnvKind,
    config: Arc<dyn EnvConfig>,
    /// All keys of the environment, with defaults.
    keys: toml::Table,
}

impl PartialEq for EnvMember {
    fn eq(&self, other: &Self) -> bool {
        let own = |m: &Self| {
            (
                m.kind.name,
                m.name.clone(),
                m.tasks.clone(),
                m.reward.clone(),
            )
        };
        own(self) == own(other) && self.weight == other.weight && self.keys == other.keys
    }
}

impl EnvMember {
    /// Value of `type`.
    pub fn kind_name(&self) -> &'static str {
        self.kind.name
    }

    /// Requirements in addition to a model.
    pub fn needs(&self) -> Needs {
        self.kind.needs
    }

    /// Returns the settings from which its tasks and environments are built.
    pub fn config(&self) -> &dyn EnvConfig {
        self.config.as_ref()
    }

    fn alone(kind: &'static EnvKind, config: Arc<dyn EnvConfig>, keys: toml::Table) -> Self {
        Self {
            name: String::new(),
            weight: 1.0,
            tasks: None,
            reward: None,
            kind,
            config,
            keys,
        }
    }

    /// Returns all keys; for a member of a mixture including the keys of the mixture.
    fn table(&self) -> toml::Table {
        let mut table = toml::Table::new();
        if !self.name.is_empty() {
            // TOML can express numbers, text and tables.
            let keys = MemberKeys {
                name: self.name.clone(),
                weight: self.weight,
                tasks: self.tasks.as_ref().map(TasksPlan::keys_without_order),
                reward: self.reward.clone(),
            };
            table = toml::Table::try_from(keys).unwrap_or_default();
        }
        table.insert("type".into(), self.kind.name.into());
        table.extend(self.keys.clone());
        table
    }
}

/// The environment of the episodes, or the environments of a mixture.
#[derive(Clone, Debug)]
pub struct EnvSection {
    members: Vec<EnvMember>,
    mixture: bool,
    registry: Registry,
}

impl PartialEq for EnvSection {
    fn eq(&self, other: &Self) -> bool {
        self.mixture == other.mixture && self.members == other.members
    }
}

impl EnvSection {
    /// Value of `env.type`, or `mixture`.
    pub fn name(&self) -> &'static str {
        match self.members.first() {
            Some(only) if !self.mixture => only.kind_name(),
            _ => "mixture",
        }
    }

    /// Returns the single environment, or those of the mixture in the order of the recipe.
    pub fn members(&self) -> &[EnvMember] {
        &self.members
    }

    /// Whether the recipe lists several environments.
    pub fn is_mixture(&self) -> bool {
        self.mixture
    }

    /// Requirements of all environments together. Rows can be the tasks only if all environments accept them.
    pub fn needs(&self) -> Needs {
        let all = self.members.iter().map(EnvMember::needs);
        let both = |a: Needs, b: Needs| Needs {
            sandbox: a.sandbox || b.sandbox,
            alphabet: a.alphabet.or(b.alphabet),
            rows: a.rows && b.rows,
            tasks: a.tasks || b.tasks,
            reward: a.reward || b.reward,
        };
        all.reduce(both).unwrap_or_default()
    }
}

/// One environment of a run with its tasks and its reward.
#[derive(Clone, Copy, Debug)]
pub struct World<'a> {
    /// The environment.
    pub env: &'a EnvMember,
    /// Rows of its tasks, if it has a source of rows.
    pub tasks: &'a TasksPlan,
    /// Reward that replaces its own score.
    pub reward: Option<&'a RewardSection>,
}

impl RunPlan {
    /// Returns the environments with their tasks and rewards. A single environment uses `[tasks]` and
    /// `reward`; each member of a mixture uses its own.
    pub fn worlds(&self) -> Vec<World<'_>> {
        let members = self.env.members.iter();
        members
            .map(|env| World {
                env,
                tasks: env.tasks.as_ref().unwrap_or(&self.tasks),
                reward: if self.env.mixture {
                    env.reward.as_ref()
                } else {
                    self.reward.as_ref()
                },
            })
            .collect()
    }
}

/// An error and its position in the text.
type Fault = (Range<usize>, String);

impl EnvSection {
    /// Returns the environment `chat`, which only needs tasks and rewards.
    pub(crate) fn chat(registry: Registry) -> Self {
        let (kind, config) = (&sinew_env::chat::KIND, sinew_env::chat::config());
        let chat = EnvMember::alone(kind, config, toml::Table::new());
        Self {
            members: vec![chat],
            mixture: false,
            registry,
        }
    }

    /// Parses `[env]` or `[[env]]` of a recipe; `None` if it is missing.
    ///
    /// # Errors
    /// The first error, with its position.
    pub(crate) fn read(root: &DeTable<'_>, registry: Registry) -> Result<Option<Self>, Fault> {
        let Some(env) = root.get("env").cloned() else {
            return Ok(None);
        };
        let span = env.span();
        let (members, mixture) = match env.into_inner() {
            DeValue::Table(keys) => {
                let table = Spanned::new(span, keys);
                (vec![read(table, false, registry)?], false)
            }
            DeValue::Array(tables) => {
                let one = |table: Spanned<DeValue<'_>>| {
                    let span = table.span();
                    match table.into_inner() {
                        DeValue::Table(keys) => read(Spanned::new(span, keys), true, registry),
                        _ => Err((span, "an environment is a table: [[env]]".into())),
                    }
                };
                let members: Result<Vec<_>, _> = tables.into_iter().map(one).collect();
                (members?, true)
            }
            _ => {
                let form = "expected a table, such as env = { type = \"tool_math\" }";
                return Err((span, format!("env: {form}")));
            }
        };
        Ok(Some(Self {
            members,
            mixture,
            registry,
        }))
    }

    /// Returns the environments that the recipe may name.
    pub fn registry(&self) -> Registry {
        self.registry
    }
}

/// Returns the environment with this name, or an error message.
fn named(name: &str, registry: Registry) -> Result<&'static EnvKind, String> {
    registry.find(name).ok_or_else(|| {
        let names: Vec<String> = registry.kinds().map(|k| format!("`{}`", k.name)).collect();
        format!(
            "unknown variant `{name}`, expected one of {}",
            names.join(", ")
        )
    })
}

/// Parses the table of an environment, or returns an error with its position.
fn read(
    table: Spanned<DeTable<'_>>,
    mixture: bool,
    registry: Registry,
) -> Result<EnvMember, Fault> {
    let span = table.span();
    let mut keys = table.into_inner();
    let kind = keys.remove("type");
    let kind = kind.ok_or_else(|| (span.clone(), "missing field `type`".to_owned()))?;
    let name = kind.get_ref().as_str();
    let name = name.ok_or_else(|| (kind.span(), "env.type is not a name".to_owned()))?;
    let named = named(name, registry).map_err(|message| (kind.span(), message))?;
    let mut of_mixture = DeTable::new();
    for key in MemberKeys::NAMES.into_iter().filter(|_| mixture) {
        // Environments with their own tasks may have a key of that name.
        let taken = (key != "tasks" || named.needs.rows).then(|| keys.remove_entry(key));
        of_mixture.extend(taken.flatten());
    }
    let failed = |e: Error| (e.span().unwrap_or(span.clone()), e.message().to_owned());
    let keys = Spanned::new(span.clone(), DeValue::Table(keys));
    let (config, keys) = named.read(keys.into()).map_err(failed)?;
    let alone = EnvMember::alone(named, config, keys);
    if !mixture {
        return Ok(alone);
    }
    let member = Spanned::new(span.clone(), DeValue::Table(of_mixture));
    let member = MemberKeys::deserialize(ValueDeserializer::from(member)).map_err(failed)?;
    Ok(EnvMember {
        tasks: member.plan().map_err(|e| (span.clone(), e.to_string()))?,
        name: member.name,
        weight: member.weight,
        reward: member.reward,
        ..alone
    })
}

/// Skips `env` among the other keys. [`EnvSection::read`] parses it, with positions.
pub(crate) fn passed_over<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<EnvSection>, D::Error> {
    serde::de::IgnoredAny::deserialize(deserializer).map(|_| None)
}

impl Serialize for EnvSection {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.members.first() {
            Some(only) if !self.mixture => only.table().serialize(serializer),
            _ => {
                let tables = self.members.iter().map(EnvMember::table);
                serializer.collect_seq(tables)
            }
        }
    }
}

/// Schema of any registered environment, for editors.
pub(crate) fn schema(generator: &mut SchemaGenerator, registry: Registry) -> Schema {
    let mut schemas = Vec::new();
    for kind in registry.kinds() {
        let mut schema = kind.schema(generator);
        schema.insert("description".into(), kind.summary.into());
        schema.insert("required".into(), json!(["type"]));
        let described = "The environment.";
        let name = json!({ "const": kind.name, "type": "string", "description": described });
        // An environment without keys has no properties.
        let properties = schema.ensure_object().entry("properties");
        if let Some(properties) = properties.or_insert(json!({})).as_object_mut() {
            properties.shift_insert(0, "type".into(), name);
        }
        schemas.push(schema);
    }
    let names: Vec<&str> = registry.kinds().map(|kind| kind.name).collect();
    schemas.push(mixture::schema(generator, &names));
    json_schema!({ "oneOf": schemas })
}

/// Adds the checks that environments make of their keys.
pub(crate) fn rules(env: &EnvSection, rules: &mut Rules) {
    for (i, member) in env.members.iter().enumerate() {
        if let Err(e) = member.config.check() {
            let key = format!("{}.{}", env.key(i), e.key);
            rules.custom(&key, e.value, e.reason, false);
        }
    }
}

impl EnvSection {
    /// Returns the path of a member's table, for messages.
    pub fn key(&self, member: usize) -> String {
        if self.mixture {
            format!("env[{member}]")
        } else {
            "env".to_owned()
        }
    }
}
