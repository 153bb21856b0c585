//! Names of classes and functions: `my_env.py:MyEnv` or `package.module:MyEnv`.

use crate::error::StartError;
use crate::worlds;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Role of a class or function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TargetKind {
    /// A class of environments.
    Env,
    /// A reward function.
    Reward,
    /// A function that returns rows of tasks, or a list of them.
    Tasks,
}

/// Location of a [`Target`]'s code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Module {
    /// A file of the host. Its folder is on the search path.
    File(PathBuf),
    /// A module, in a folder of the host or among the packages of the interpreter.
    Named {
        name: String,
        folder: Option<PathBuf>,
    },
    /// Source text of this program.
    Builtin { name: String, source: &'static str },
}

/// A class or a function of a user's module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub(crate) module: Module,
    /// Name in the module. Dots lead into classes.
    pub(crate) name: String,
    pub(crate) kind: TargetKind,
    /// The text that was parsed.
    pub(crate) text: String,
    /// Attributes of the class that the recipe sets.
    pub(crate) options: Map<String, Value>,
}

impl Target {
    /// Parses `file.py:Name` or `module:Name`. Paths are relative to `base`; a module is searched in `base`
    /// first, then among the installed packages.
    ///
    /// # Errors
    /// [`StartError::Target`] if the text has another form or the file does not exist.
    pub fn parse(text: &str, kind: TargetKind, base: &Path) -> Result<Self, StartError> {
        let wrong = |reason: String| StartError::Target {
            value: text.into(),
            reason,
        };
        let example = match kind {
            TargetKind::Env => "my_env.py:MyEnv",
            TargetKind::Reward => "my_rewards.py:score",
            TargetKind::Tasks => "my_tasks.py:rows",
        };
        let form = || wrong(format!("expected a file and a name, as in {example}"));
        let (module, name) = text.rsplit_once(':').ok_or_else(form)?;
        if module.is_empty() || !name.split('.').all(is_identifier) {
            return Err(form());
        }
        let module = match module.ends_with(".py") || module.contains('/') {
            true => Module::File(file(base, module).map_err(wrong)?),
            false if worlds::missing(module).is_some() => {
                return Err(wrong(worlds::missing(module).unwrap_or_default()));
            }
            false if module.split('.').all(is_identifier) => Module::Named {
                name: module.into(),
                folder: holds(base, module).then(|| base.to_path_buf()),
            },
            false => return Err(form()),
        };
        Ok(Self {
            module,
            name: name.into(),
            kind,
            text: text.into(),
            options: Map::new(),
        })
    }

    /// The reward function `function` of a module that is part of this program.
    pub fn builtin(module: &str, source: &'static str, function: &str) -> Self {
        Self {
            module: Module::Builtin {
                name: module.into(),
                source,
            },
            name: function.into(),
            kind: TargetKind::Reward,
            text: format!("{module}:{function}"),
            options: Map::new(),
        }
    }

    /// The class with attributes that are set before it is used.
    #[must_use]
    pub fn with_options(mut self, options: Map<String, Value>) -> Self {
        self.options = options;
        self
    }

    /// The name as it was given.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Folder of the host that the code needs, if it is not an installed package.
    pub(crate) fn folder(&self) -> Option<&Path> {
        match &self.module {
            Module::File(file) => file.parent(),
            Module::Named { folder, .. } => folder.as_deref(),
            Module::Builtin { .. } => None,
        }
    }

    /// Content of the module's file, for its version. Empty for packages.
    pub(crate) fn source(&self) -> Vec<u8> {
        let file = match &self.module {
            Module::Builtin { source, .. } => return source.as_bytes().to_vec(),
            Module::Named { name, .. } if let Some(source) = worlds::source(name) => {
                return source.as_bytes().to_vec();
            }
            Module::File(file) => Some(file.clone()),
            Module::Named { name, folder } => folder
                .as_ref()
                .and_then(|folder| candidates(folder, name).into_iter().find(|f| f.is_file())),
        };
        file.and_then(|f| std::fs::read(f).ok()).unwrap_or_default()
    }
}

/// The absolute path of a file that exists.
fn file(base: &Path, path: &str) -> Result<PathBuf, String> {
    let path = base.join(path);
    match path.canonicalize() {
        Ok(file) if file.is_file() => Ok(file),
        Ok(_) => Err(format!("{} is no file", path.display())),
        Err(e) => Err(format!(
            "{}: {e}; paths are relative to {}",
            path.display(),
            base.display()
        )),
    }
}

fn candidates(folder: &Path, module: &str) -> [PathBuf; 2] {
    let path = folder.join(module.replace('.', "/"));
    [path.with_extension("py"), path.join("__init__.py")]
}

fn holds(folder: &Path, module: &str) -> bool {
    candidates(folder, module).iter().any(|f| f.is_file())
}

fn is_identifier(text: &str) -> bool {
    let mut characters = text.chars();
    characters
        .next()
        .is_some_and(|c| c.is_alphabetic() || c == '_')
        && characters.all(|c| c.is_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, base: &Path) -> Result<Target, String> {
        Target::parse(text, TargetKind::Env, base).map_err(|e| e.to_string())
    }

    #[test]
    fn files_and_modules_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("my_env.py"), "x = 1").unwrap();
        let base = dir.path().canonicalize().unwrap();
        let file = parse("my_env.py:MyEnv", &base).unwrap();
        assert_eq!(file.module, Module::File(base.join("my_env.py")));
        assert_eq!(
            (file.name.as_str(), file.source()),
            ("MyEnv", b"x = 1".to_vec())
        );
        let module = parse("my_env:Outer.Inner", &base).unwrap();
        assert_eq!(
            (module.folder(), module.source()),
            (Some(base.as_path()), b"x = 1".to_vec())
        );
        let installed = parse("reasoning_gym.env:Env", &base).unwrap();
        assert_eq!(installed.folder(), None);
    }

    #[test]
    fn errors_say_what_is_allowed() {
        let base = Path::new("/no/such");
        for text in [
            "my_env.py",
            ":MyEnv",
            "my_env.py:",
            "my-env:MyEnv",
            "a.py:b c",
        ] {
            let error = parse(text, base).unwrap_err();
            assert!(error.contains("my_env.py:MyEnv"), "{error}");
        }
        let error = parse("gone.py:MyEnv", base).unwrap_err();
        assert!(error.contains("/no/such/gone.py"), "{error}");
    }
}
