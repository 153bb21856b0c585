//! The environments that recipes can name.
//!
//! An environment is one file: its keys with their documentation ([`EnvConfig`]), what it needs
//! and how it is built. [`ENVIRONMENTS`] has one line for each; the documentation, the schema for
//! editors and the checks of a recipe are made from it.

use crate::port::{EnvError, EnvFactory};
use crate::taskset::{Taskset, TasksetError};
use crate::{math, tiny};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sinew_sandbox::{SandboxProvider, SandboxSpec};
use std::fmt;
use std::sync::Arc;
use toml::de::ValueDeserializer;

/// All environments, in the order of the documentation.
pub static ENVIRONMENTS: [EnvKind; 2] = [math::KIND, tiny::KIND];

/// What an environment needs in addition to a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// It runs code: sandboxes with a Python interpreter.
    pub sandbox: bool,
    /// It speaks these characters alone: models have a character tokenizer of them, and are trained
    /// from scratch. `None`: any pretrained model.
    pub alphabet: Option<&'static str>,
}

/// A value that an environment does not take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("env.{key} = {value}: {reason}")]
pub struct KeyError {
    /// The key, below `env`.
    pub key: &'static str,
    pub value: String,
    /// What is allowed, or why the key has no effect.
    pub reason: String,
}

/// What the host gives to environments that run code.
#[derive(Clone)]
pub struct Sandboxes {
    pub provider: Arc<dyn SandboxProvider>,
    pub spec: SandboxSpec,
}

impl fmt::Debug for Sandboxes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sandboxes")
            .field("level", &self.provider.level())
            .field("spec", &self.spec)
            .finish()
    }
}

/// The keys of an environment as a recipe sets them, and what they build.
pub trait EnvConfig: fmt::Debug + Send + Sync {
    /// The first key whose value is not allowed.
    fn check(&self) -> Result<(), KeyError>;

    /// Its tasks; equal seeds give equal tasks.
    fn taskset(&self, seed: u64) -> Result<Arc<dyn Taskset>, TasksetError>;

    /// Its worlds. `sandboxes` are there exactly if [`Needs::sandbox`] is set.
    fn factory(&self, sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError>;

    /// Reward that one turn can earn before the episode ends; 0: none.
    fn process_reward(&self) -> f64;
}

/// An [`EnvConfig`] that is read from a recipe and written back.
pub trait EnvKeys: EnvConfig + DeserializeOwned + Serialize + JsonSchema + 'static {}

impl<C: EnvConfig + DeserializeOwned + Serialize + JsonSchema + 'static> EnvKeys for C {}

/// An environment as read: what it builds, and all its keys with defaults filled in.
pub type ReadConfig = (Arc<dyn EnvConfig>, toml::Table);

type Read = fn(ValueDeserializer<'_>) -> Result<ReadConfig, toml::de::Error>;

/// One environment of the registry.
#[derive(Clone, Copy)]
pub struct EnvKind {
    /// Value of `env.type`.
    pub name: &'static str,
    /// One line for the documentation.
    pub summary: &'static str,
    pub needs: Needs,
    read: Read,
    schema: fn(&mut SchemaGenerator) -> Schema,
}

impl fmt::Debug for EnvKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EnvKind")
            .field("name", &self.name)
            .field("needs", &self.needs)
            .finish_non_exhaustive()
    }
}

impl EnvKind {
    /// The environment whose keys are `C`.
    pub const fn new<C: EnvKeys>(name: &'static str, summary: &'static str, needs: Needs) -> Self {
        Self {
            name,
            summary,
            needs,
            read: read::<C>,
            schema: C::json_schema,
        }
    }

    /// The environment of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        ENVIRONMENTS.iter().find(|kind| kind.name == name)
    }

    /// Reads its keys; `type` is not among them. Unknown keys and values of other types are errors
    /// with their place in the text.
    pub fn read(&self, keys: ValueDeserializer<'_>) -> Result<ReadConfig, toml::de::Error> {
        (self.read)(keys)
    }

    /// JSON Schema of its keys.
    pub fn schema(&self, generator: &mut SchemaGenerator) -> Schema {
        (self.schema)(generator)
    }
}

fn read<C: EnvKeys>(keys: ValueDeserializer<'_>) -> Result<ReadConfig, toml::de::Error> {
    let config = C::deserialize(keys)?;
    let table = toml::Table::try_from(&config).map_err(serde::de::Error::custom)?;
    Ok((Arc::new(config), table))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> ValueDeserializer<'_> {
        ValueDeserializer::parse(text).unwrap()
    }

    #[test]
    fn every_environment_has_keys_with_documentation_and_defaults() {
        for kind in &ENVIRONMENTS {
            assert!(EnvKind::named(kind.name).is_some_and(|k| k.name == kind.name));
            let (config, _) = kind.read(keys("{}")).unwrap();
            config.check().unwrap();
            assert_eq!(
                config
                    .taskset(1)
                    .unwrap()
                    .get(crate::Split::Train, 0)
                    .is_ok(),
                true
            );
            let schema = kind.schema(&mut SchemaGenerator::default());
            let properties = schema.get("properties").unwrap().as_object().unwrap();
            for (key, property) in properties {
                assert!(property.get("description").is_some(), "{}.{key}", kind.name);
                assert!(property.get("default").is_some(), "{}.{key}", kind.name);
            }
        }
        assert!(EnvKind::named("no such world").is_none());
    }

    #[test]
    fn unknown_keys_are_refused_and_wrong_values_named() {
        let kind = EnvKind::named("tool_math").unwrap();
        let e = kind.read(keys("{ leveles = [1] }")).unwrap_err();
        assert!(e.message().contains("unknown field `leveles`"), "{e}");
        let (config, table) = kind.read(keys("{ process_reward = 0.5 }")).unwrap();
        assert_eq!(table["process_reward"], toml::Value::Float(0.5));
        let e = config.check().unwrap_err();
        assert_eq!((e.key, e.value.as_str()), ("process_reward", "0.5"));
    }
}
