//! Registry of the environments that recipes can name.
//!
//! An environment is one file with its documented keys ([`EnvConfig`]), requirements and constructors.
//! [`BUILT_IN`] has one line for each. The documentation, the schema for editors and the checks of a
//! recipe are generated from it.

use crate::machine::Machines;
use crate::port::{EnvError, EnvFactory};
use crate::simulated_user::SimulatedUser;
use crate::taskset::{Taskset, TasksetError};
use crate::{chat, math, tiny};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sinew_sandbox::{SandboxProvider, SandboxSpec};
use sinew_types::{Gives, InputPresence};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use toml::de::ValueDeserializer;

/// The environments of this crate, in the order of the documentation. Crates above it have others.
pub const BUILT_IN: [&EnvKind; 3] = [&chat::KIND, &math::KIND, &tiny::KIND];

/// The environments that a recipe can name. The program assembles this registry and passes it to all readers
/// of recipes.
#[derive(Clone, Copy, Debug)]
pub struct Registry(&'static [&'static EnvKind]);

impl Registry {
    /// Creates a registry of these environments, in the order of the documentation. Names must be unique.
    pub const fn new(kinds: &'static [&'static EnvKind]) -> Self {
        Self(kinds)
    }

    /// All environments.
    pub fn kinds(self) -> impl Iterator<Item = &'static EnvKind> {
        self.0.iter().copied()
    }

    /// The environment with this name.
    pub fn find(self, name: &str) -> Option<&'static EnvKind> {
        self.kinds().find(|kind| kind.name == name)
    }
}

/// Requirements of an environment in addition to a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Sandboxes with a Python interpreter, to run code.
    pub sandbox: bool,
    /// Characters of the environment's texts. The model has a character tokenizer for them and is trained
    /// from scratch. `None`: any pretrained model.
    pub alphabet: Option<&'static str>,
    /// Whether rows of the recipe's `[tasks]` can be its tasks.
    pub rows: bool,
    /// Whether it has no tasks itself, so that the recipe must have rows.
    pub tasks: bool,
    /// Whether it has no score, so that the recipe must have a reward.
    pub reward: bool,
}

/// Whether turns have rewards, by the key `process_reward`.
pub(crate) fn turn_rewards(process_reward: f64) -> InputPresence {
    if process_reward > 0.0 {
        InputPresence::Yes
    } else {
        InputPresence::No("env.process_reward = 0; set it above 0")
    }
}

/// An invalid value of a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("env.{key} = {value}: {reason}")]
pub struct KeyError {
    /// The key, below `env`.
    pub key: &'static str,
    /// The value.
    pub value: String,
    /// Allowed values, or the reason why the key has no effect.
    pub reason: String,
}

/// Sandboxes for environments that run code.
#[derive(Clone)]
pub struct Sandboxes {
    /// Source of sandboxes.
    pub provider: Arc<dyn SandboxProvider>,
    /// Limits and contents of each sandbox.
    pub spec: SandboxSpec,
    /// Images that tasks may name in their column [`IMAGE_COLUMN`], by name. Empty if tasks name none.
    pub images: BTreeMap<String, TaskImage>,
    /// Machines with writable roots, at the level `container`.
    pub machines: Option<Arc<dyn Machines>>,
    /// Simulated user that the code may ask. `None`: the recipe has none.
    pub user: Option<Arc<dyn SimulatedUser>>,
}

/// Facts about the sandboxes of a recipe, on which the choice of tasks may depend.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxFacts {
    /// Limits and contents of each sandbox.
    pub spec: SandboxSpec,
    /// Name of the level.
    pub level: &'static str,
    /// Whether sandboxes reach hosts through the egress proxy.
    pub network: bool,
    /// Whether tasks can have a list of hosts of their own.
    pub host_lists: bool,
    /// Whether an agent program plays, which works in the place of its task and is scored there.
    pub program: bool,
    /// MCP servers that the player can use. It is `None` without a player, and tasks run without servers.
    pub mcp: Option<McpFacts>,
}

/// MCP servers of tasks that a player takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct McpFacts {
    /// Name of the player, for messages.
    pub player: &'static str,
    /// Transports, as [`McpServer::transport`](crate::McpServer::transport) names them.
    pub transports: &'static [&'static str],
}

impl McpFacts {
    /// The built-in loop: a sandbox runs one program at a time, so that no server runs during commands.
    pub const BUILT_IN_LOOP: Self = Self {
        player: "the built-in loop",
        transports: &[],
    };
}

/// Column of a task with the name of its image.
pub const IMAGE_COLUMN: &str = "image";

/// An unpacked image, the root file system of the sandbox of a task that names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskImage {
    /// Folder with the image's files.
    pub root: PathBuf,
    /// Its environment variables.
    pub env: Vec<(String, String)>,
}

impl fmt::Debug for Sandboxes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sandboxes")
            .field("level", &self.provider.level())
            .field("spec", &self.spec)
            .field("images", &self.images.keys())
            .field("machines", &self.machines.is_some())
            .finish()
    }
}

/// Keys of an environment in a recipe, and its constructors.
pub trait EnvConfig: fmt::Debug + Send + Sync {
    /// The first key whose value is not allowed.
    fn check(&self) -> Result<(), KeyError>;

    /// Creates the taskset. Equal seeds yield equal tasks.
    fn taskset(&self, seed: u64) -> Result<Arc<dyn Taskset>, TasksetError>;

    /// Creates the taskset like [`taskset`](Self::taskset), with limits for user code that generates the
    /// tasks. The limits have no effect on other tasks.
    fn taskset_within(
        &self,
        seed: u64,
        _limits: &SandboxSpec,
    ) -> Result<Arc<dyn Taskset>, TasksetError> {
        self.taskset(seed)
    }

    /// Creates the taskset like [`taskset_within`](Self::taskset_within), without the tasks that these
    /// sandboxes cannot run; [`Taskset::notes`] counts them.
    fn taskset_at(
        &self,
        seed: u64,
        facts: &SandboxFacts,
    ) -> Result<Arc<dyn Taskset>, TasksetError> {
        self.taskset_within(seed, &facts.spec)
    }

    /// Creates the factory. `sandboxes` is `Some` if and only if [`Needs::sandbox`] is set.
    fn factory(&self, sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError>;

    /// Data of the episodes that algorithms can read. A fact that only the code of a class or a server
    /// decides is [`InputPresence::Maybe`] here; its factory may know more
    /// ([`Capabilities::gives`](crate::Capabilities::gives)).
    fn gives(&self) -> Gives;

    /// Whether the sandbox of a task is created from the image that the task names ([`Sandboxes::images`]).
    fn task_images(&self) -> bool {
        false
    }

    /// Whether episodes run in machines ([`Sandboxes::machines`]) at the level `container`.
    fn machines(&self) -> bool {
        false
    }

    /// Host folders that code under the model's influence may read. Solutions must not be stored there.
    fn shows(&self) -> Vec<PathBuf> {
        Vec::new()
    }
}

/// An [`EnvConfig`] that can be deserialized, serialized and described by a schema.
pub trait EnvKeys: EnvConfig + DeserializeOwned + Serialize + JsonSchema + 'static {}

impl<C: EnvConfig + DeserializeOwned + Serialize + JsonSchema + 'static> EnvKeys for C {}

/// A parsed environment section: the constructors, and all keys with their defaults.
pub type ReadConfig = (Arc<dyn EnvConfig>, toml::Table);

type Read = fn(ValueDeserializer<'_>) -> Result<ReadConfig, toml::de::Error>;

/// One environment of the registry.
#[derive(Clone, Copy)]
pub struct EnvKind {
    /// Value of `env.type`.
    pub name: &'static str,
    /// One line for the documentation.
    pub summary: &'static str,
    /// Requirements in addition to a model.
    pub needs: Needs,
    read: Read,
    schema: fn(&mut SchemaGenerator) -> Schema,
}

sinew_types::debug_fields!(EnvKind, name, needs);

impl EnvKind {
    /// Creates an entry for the environment with the keys `C`.
    pub const fn new<C: EnvKeys>(name: &'static str, summary: &'static str, needs: Needs) -> Self {
        Self {
            name,
            summary,
            needs,
            read: read::<C>,
            schema: C::json_schema,
        }
    }

    /// Parses the keys without `type`. Unknown keys and wrong types are errors with their position in the
    /// text.
    pub fn read(&self, keys: ValueDeserializer<'_>) -> Result<ReadConfig, toml::de::Error> {
        (self.read)(keys)
    }

    /// JSON Schema of the keys.
    pub fn schema(&self, generator: &mut SchemaGenerator) -> Schema {
        (self.schema)(generator)
    }
}

/// Parses the keys `C`, and serializes them with their defaults.
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
        for kind in BUILT_IN {
            let (config, _) = kind.read(keys("{}")).unwrap();
            config.check().unwrap();
            let tasks = config.taskset(1);
            assert_eq!(tasks.is_err(), kind.needs.tasks, "{}", kind.name);
            if let Ok(tasks) = tasks {
                assert!(tasks.get(crate::Split::Train, 0).is_ok());
            }
            let schema = kind.schema(&mut SchemaGenerator::default());
            let properties = schema.get("properties").and_then(|p| p.as_object());
            for (key, property) in properties.into_iter().flatten() {
                assert!(property.get("description").is_some(), "{}.{key}", kind.name);
                assert!(property.get("default").is_some(), "{}.{key}", kind.name);
            }
        }
    }

    #[test]
    fn unknown_keys_are_refused_and_wrong_values_named() {
        let kind = &math::KIND;
        let e = kind.read(keys("{ leveles = [1] }")).unwrap_err();
        assert!(e.message().contains("unknown field `leveles`"), "{e}");
        let (config, table) = kind.read(keys("{ process_reward = 0.5 }")).unwrap();
        assert_eq!(table["process_reward"], toml::Value::Float(0.5));
        let e = config.check().unwrap_err();
        assert_eq!((e.key, e.value.as_str()), ("process_reward", "0.5"));
    }
}
