//! Environments that ship with the program: `sinew.worlds.NAME:Class`, and those of other projects' packages:
//! `sinew.bridges.NAME:Class`, one Python file each.
//!
//! Workers carry their sources, so that nothing has to be installed, and classes of a user can be derived
//! from them.

use std::collections::BTreeMap;

/// The packages.
const PACKAGES: [&str; 2] = ["sinew.worlds", "sinew.bridges"];

/// A module of a package with its source.
macro_rules! module {
    ($package:literal) => {
        (
            concat!("sinew.", $package),
            include_str!(concat!(
                "../../../python/src/sinew/",
                $package,
                "/__init__.py"
            )),
        )
    };
    ($package:literal, $name:literal) => {
        (
            concat!("sinew.", $package, ".", $name),
            include_str!(concat!(
                "../../../python/src/sinew/",
                $package,
                "/",
                $name,
                ".py"
            )),
        )
    };
}

/// All modules with their sources.
const MODULES: [(&str, &str); 36] = [
    module!("worlds"),
    module!("worlds", "bargain"),
    module!("worlds", "coq"),
    module!("worlds", "duo"),
    module!("worlds", "household"),
    module!("worlds", "memory"),
    module!("worlds", "miniwob"),
    module!("worlds", "phone"),
    module!("worlds", "physics"),
    module!("worlds", "probes"),
    module!("worlds", "reflect"),
    module!("worlds", "repo"),
    module!("worlds", "research"),
    module!("worlds", "retail"),
    module!("worlds", "search"),
    module!("worlds", "shop"),
    module!("worlds", "small"),
    module!("worlds", "survival"),
    module!("worlds", "web"),
    module!("bridges"),
    module!("bridges", "arena"),
    module!("bridges", "bfcl"),
    module!("bridges", "browsergym"),
    module!("bridges", "chromium"),
    module!("bridges", "crafter"),
    module!("bridges", "gym"),
    module!("bridges", "human_eval"),
    module!("bridges", "ifeval"),
    module!("bridges", "push"),
    module!("bridges", "reasoning"),
    module!("bridges", "science"),
    module!("bridges", "spiel"),
    module!("bridges", "swe"),
    module!("bridges", "tau2"),
    module!("bridges", "textworld"),
    module!("bridges", "verifiers"),
];

/// Source of a module that ships with the program.
pub(crate) fn source(module: &str) -> Option<&'static str> {
    MODULES.iter().find(|w| w.0 == module).map(|w| w.1)
}

/// Sources by module, as a worker imports them.
pub(crate) fn sources() -> BTreeMap<&'static str, &'static str> {
    MODULES.into_iter().collect()
}

/// Reason why a module of the packages does not exist; `None`: it does, or it belongs to another package.
pub(crate) fn missing(module: &str) -> Option<String> {
    let package = PACKAGES
        .into_iter()
        .find(|p| module == *p || module.starts_with(&format!("{p}.")))?;
    source(module).is_none().then(|| {
        let names = MODULES.iter().map(|w| w.0);
        let own = names.filter(|n| n.starts_with(package) && *n != package);
        let names = own.collect::<Vec<_>>().join(", ");
        format!("there is no {module}; valid names: {names}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_packages_is_there() {
        for package in ["worlds", "bridges"] {
            let folder = format!(
                "{}/../../python/src/sinew/{package}",
                env!("CARGO_MANIFEST_DIR")
            );
            let files = std::fs::read_dir(folder)
                .unwrap()
                .map(|f| f.unwrap().path());
            for file in files.filter(|f| f.extension().is_some_and(|e| e == "py")) {
                let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
                let module = match name.as_str() {
                    "__init__" => format!("sinew.{package}"),
                    name => format!("sinew.{package}.{name}"),
                };
                assert!(source(&module).is_some(), "{module}");
            }
        }
        let none = missing("sinew.worlds.moon").unwrap();
        assert!(none.contains("sinew.worlds.household"), "{none}");
        let none = missing("sinew.bridges.moon").unwrap();
        assert!(
            none.contains("sinew.bridges.gym") && !none.contains("household"),
            "{none}"
        );
        assert_eq!(missing("my.worlds"), None);
    }
}
