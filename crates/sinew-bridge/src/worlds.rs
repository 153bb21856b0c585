//! Environments that ship with the program: `sinew.worlds.NAME:Class`, one Python file each.
//!
//! Workers carry their sources, so that nothing has to be installed, and classes of a user can be derived
//! from them.

use std::collections::BTreeMap;

/// Package of the environments.
const PACKAGE: &str = "sinew.worlds";

/// A module of the package with its source.
macro_rules! world {
    ($name:literal) => {
        (
            concat!("sinew.worlds.", $name),
            include_str!(concat!("../../../python/src/sinew/worlds/", $name, ".py")),
        )
    };
}

/// All modules, the package first.
const WORLDS: [(&str, &str); 10] = [
    (
        PACKAGE,
        include_str!("../../../python/src/sinew/worlds/__init__.py"),
    ),
    world!("bargain"),
    world!("household"),
    world!("memory"),
    world!("phone"),
    world!("physics"),
    world!("repo"),
    world!("research"),
    world!("retail"),
    world!("survival"),
];

/// Source of a module that ships with the program.
pub(crate) fn source(module: &str) -> Option<&'static str> {
    WORLDS.iter().find(|w| w.0 == module).map(|w| w.1)
}

/// Sources by module, as a worker imports them.
pub(crate) fn sources() -> BTreeMap<&'static str, &'static str> {
    WORLDS.into_iter().collect()
}

/// Why a module of the package does not exist; `None`: it does, or it belongs to another package.
pub(crate) fn missing(module: &str) -> Option<String> {
    let ours = module == PACKAGE || module.starts_with(&format!("{PACKAGE}."));
    (ours && source(module).is_none()).then(|| {
        let names = WORLDS.iter().skip(1).map(|w| w.0);
        let names = names.collect::<Vec<_>>().join(", ");
        format!("there is no {module}; valid names: {names}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_package_is_there() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python/src/sinew/worlds");
        let files = std::fs::read_dir(folder).unwrap();
        let names = files.filter_map(|f| Some(f.unwrap().path().file_stem()?.to_str()?.to_owned()));
        for name in names.filter(|n| !n.starts_with("__")) {
            assert!(source(&format!("sinew.worlds.{name}")).is_some(), "{name}");
        }
        let none = missing("sinew.worlds.moon").unwrap();
        assert!(none.contains("sinew.worlds.household"), "{none}");
        assert_eq!(missing("my.worlds"), None);
    }
}
