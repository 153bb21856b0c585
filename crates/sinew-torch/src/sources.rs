//! The Python sources of the server, which this crate carries.

/// Name of the package under which the ranks import it.
pub(crate) const PACKAGE: &str = "sinew_torch";

/// A file of the package with its text.
macro_rules! source {
    ($name:literal) => {
        (
            $name,
            include_str!(concat!("../../../python/src/sinew/torch/", $name)),
        )
    };
}

/// All files of the package, by name.
pub(crate) const FILES: &[(&str, &str)] = &[
    source!("__init__.py"),
    source!("__main__.py"),
    source!("checkpoint.py"),
    source!("commands.py"),
    source!("errors.py"),
    source!("head.py"),
    source!("lanes.py"),
    source!("member.py"),
    source!("models.py"),
    source!("names.py"),
    source!("optimizer.py"),
    source!("policy.py"),
    source!("ranks.py"),
    source!("requests.py"),
    source!("routing.py"),
    source!("server.py"),
    source!("tree.py"),
    source!("writer.py"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    #[test]
    fn every_file_of_the_package_is_carried() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/src/sinew/torch");
        let entries = std::fs::read_dir(folder).unwrap();
        let found: BTreeSet<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".py"))
            .collect();
        let carried: BTreeSet<String> = FILES.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(found, carried);
    }

    #[test]
    fn imports_are_relative() {
        for (name, text) in FILES {
            assert!(
                !text.contains("from sinew.") && !text.contains("import sinew"),
                "{name} imports by an absolute name, and the package has two"
            );
        }
    }
}
