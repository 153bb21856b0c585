//! `[env]`: an environment of the registry, and its keys.

use crate::rule::Rules;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::json;
use sinew_env::{ENVIRONMENTS, EnvConfig, EnvKind, Needs};
use std::ops::Range;
use std::sync::Arc;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

/// Which world the episodes run in.
#[derive(Clone, Debug)]
pub struct EnvSection {
    kind: &'static EnvKind,
    config: Arc<dyn EnvConfig>,
    /// All keys of the environment, defaults included.
    keys: toml::Table,
}

impl PartialEq for EnvSection {
    fn eq(&self, other: &Self) -> bool {
        self.kind.name == other.kind.name && self.keys == other.keys
    }
}

impl EnvSection {
    /// Value of `env.type`.
    pub fn name(&self) -> &'static str {
        self.kind.name
    }

    pub fn needs(&self) -> Needs {
        self.kind.needs
    }

    /// What builds its tasks and worlds.
    pub fn config(&self) -> &dyn EnvConfig {
        self.config.as_ref()
    }

    fn read(kind: &'static EnvKind, keys: ValueDeserializer<'_>) -> Result<Self, toml::de::Error> {
        let (config, keys) = kind.read(keys)?;
        Ok(Self { kind, config, keys })
    }
}

/// All environments that a recipe can name: those of `sinew-env`, then those of crates above it.
fn kinds() -> impl Iterator<Item = &'static EnvKind> {
    use sinew_bridge::{HTTP_KIND, KIND, MCP_KIND};
    ENVIRONMENTS.iter().chain([&KIND, &HTTP_KIND, &MCP_KIND])
}

/// `chat`, which needs nothing but tasks and rewards.
impl Default for EnvSection {
    fn default() -> Self {
        Self {
            kind: &sinew_env::chat::KIND,
            config: sinew_env::chat::config(),
            keys: toml::Table::new(),
        }
    }
}

/// The environment of a name, or what is wrong with the name.
fn named(name: &str) -> Result<&'static EnvKind, String> {
    kinds().find(|kind| kind.name == name).ok_or_else(|| {
        let names: Vec<String> = kinds().map(|k| format!("`{}`", k.name)).collect();
        format!(
            "unknown variant `{name}`, expected one of {}",
            names.join(", ")
        )
    })
}

/// What is wrong with `[env]` in a recipe's keys, at its place. A table with `type` is buffered
/// when the whole recipe is read, and places are lost there.
pub(crate) fn problem(root: &DeTable<'_>) -> Option<(Range<usize>, String)> {
    let env = root.get("env")?.clone();
    let span = env.span();
    let DeValue::Table(mut keys) = env.into_inner() else {
        return None;
    };
    let kind = keys.remove("type")?;
    let kind = match named(kind.get_ref().as_str()?) {
        Ok(kind) => kind,
        Err(message) => return Some((kind.span(), message)),
    };
    let keys = Spanned::new(span.clone(), DeValue::Table(keys));
    let error = EnvSection::read(kind, keys.into()).err()?;
    Some((error.span().unwrap_or(span), error.message().to_owned()))
}

impl<'de> Deserialize<'de> for EnvSection {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut keys = toml::Table::deserialize(deserializer)?;
        let kind = keys.remove("type");
        let kind = kind.ok_or_else(|| D::Error::missing_field("type"))?;
        let kind = kind
            .as_str()
            .ok_or_else(|| D::Error::custom("env.type is not a name"))?;
        let kind = named(kind).map_err(D::Error::custom)?;
        let text = toml::Value::Table(keys).to_string();
        let read = ValueDeserializer::parse(&text).and_then(|keys| Self::read(kind, keys));
        read.map_err(|e| D::Error::custom(e.message()))
    }
}

impl Serialize for EnvSection {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut table = toml::Table::new();
        table.insert("type".into(), self.kind.name.into());
        table.extend(self.keys.clone());
        table.serialize(serializer)
    }
}

/// One of the registered environments, for editors.
pub(crate) fn schema(generator: &mut SchemaGenerator) -> Schema {
    let mut schemas = Vec::new();
    for kind in kinds() {
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
    json_schema!({ "oneOf": schemas })
}

/// What an environment says of its keys.
pub(crate) fn rules(env: &EnvSection, rules: &mut Rules) {
    if let Err(e) = env.config.check() {
        rules.custom(&format!("env.{}", e.key), e.value, e.reason, false);
    }
}
