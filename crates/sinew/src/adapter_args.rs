//! `--adapter NAME=DIR` of `sinew serve` and `sinew eval`.

use sinew_assembly::AdapterFolder;
use sinew_types::AdapterName;
use std::path::PathBuf;
use std::str::FromStr;

/// A folder with an adapter in PEFT's layout, and the name that it gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AdapterArg {
    pub(crate) name: AdapterName,
    pub(crate) folder: PathBuf,
}

impl AdapterArg {
    pub(crate) fn folder(&self) -> AdapterFolder<'_> {
        AdapterFolder {
            name: &self.name,
            path: &self.folder,
        }
    }
}

impl std::fmt::Display for AdapterArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}={}", self.name, self.folder.display())
    }
}

impl FromStr for AdapterArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text
            .split_once('=')
            .filter(|(_, folder)| !folder.is_empty());
        let (name, folder) = parts.ok_or("allowed: NAME=DIR, such as math=runs/math/adapter")?;
        Ok(Self {
            name: AdapterName::new(name).map_err(|e| e.to_string())?,
            folder: folder.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_and_a_folder_are_needed() {
        let parsed: AdapterArg = "a:1=some=dir/x".parse().unwrap();
        assert_eq!(parsed.name.as_str(), "a:1");
        assert_eq!(parsed.folder, PathBuf::from("some=dir/x"));
        assert_eq!(parsed.to_string(), "a:1=some=dir/x");
        for (text, part) in [
            ("a", "NAME=DIR"),
            ("a=", "NAME=DIR"),
            ("a/b=c", "not allowed"),
        ] {
            let error = text.parse::<AdapterArg>().unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
