//! The graph of crates, as the table of ARCHITECTURE.md has it.

use super::source::{self, Kind};
use super::{crates, fail_if_any, files, manifest, name};
use crate::root;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

type Graph = BTreeMap<String, BTreeSet<String>>;

/// Crates of this workspace in one table of a manifest.
fn edges(manifest: &toml::Table, table: &str) -> BTreeSet<String> {
    let table = manifest.get(table).and_then(|d| d.as_table());
    let names = table.into_iter().flat_map(|d| d.keys());
    names.filter(|k| k.starts_with("sinew")).cloned().collect()
}

fn manifest_graph() -> Graph {
    let dependencies = |dir: &Path| edges(&manifest(dir), "dependencies");
    crates()
        .iter()
        .map(|dir| (name(dir), dependencies(dir)))
        .collect()
}

/// The table of ARCHITECTURE.md: rows `| layer | `crate` | one line | uses |`, with the layers.
fn documented() -> (Graph, Vec<(String, String)>) {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (mut graph, mut layers) = (Graph::new(), Vec::new());
    for line in text.lines().filter(|l| l.starts_with('|')) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let Some(krate) = cells.get(2).and_then(|c| c.strip_prefix('`')) else {
            continue;
        };
        let Some(krate) = krate.strip_suffix('`').filter(|k| k.starts_with("sinew")) else {
            continue;
        };
        let uses = cells[4]
            .split(',')
            .map(str::trim)
            .filter(|u| !u.is_empty() && *u != "-")
            .map(|u| format!("sinew-{u}"))
            .collect();
        graph.insert(krate.to_string(), uses);
        layers.push((krate.to_string(), cells[1].to_string()));
    }
    (graph, layers)
}

#[test]
fn the_crate_graph_is_the_one_in_architecture_md() {
    let (real, (documented, _)) = (manifest_graph(), documented());
    let names = |g: &Graph| g.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&real), names(&documented), "crates and table rows");
    let mut problems = Vec::new();
    for (krate, uses) in &real {
        let extra: Vec<_> = uses.difference(&documented[krate]).collect();
        let gone: Vec<_> = documented[krate].difference(uses).collect();
        if !(extra.is_empty() && gone.is_empty()) {
            problems.push(format!(
                "{krate}: not in the table {extra:?}, only in the table {gone:?}"
            ));
        }
    }
    fail_if_any(&problems, "edges");
}

#[test]
fn no_crate_depends_on_a_higher_layer_or_on_test_ware() {
    let (graph, layers) = documented();
    let layer: BTreeMap<_, _> = layers.into_iter().collect();
    let mut problems = Vec::new();
    for (krate, uses) in &graph {
        for used in uses {
            let (own, other) = (&layer[krate], &layer[used]);
            if other > own {
                problems.push(format!("{krate} (layer {own}) uses {used} (layer {other})"));
            }
        }
    }
    fail_if_any(&problems, "arrows upwards");
}

#[test]
fn every_declared_edge_is_used() {
    let mut problems = Vec::new();
    for dir in crates() {
        let manifest = manifest(&dir);
        let folders: [(&str, &[&str]); 2] = [
            ("dependencies", &["src"]),
            ("dev-dependencies", &["src", "tests", "benches", "examples"]),
        ];
        for (table, folders) in folders {
            let mut sources = Vec::new();
            folders
                .iter()
                .for_each(|f| files(&dir.join(f), "rs", &mut sources));
            for used in edges(&manifest, table) {
                let ident = used.replace('-', "_");
                let code = |path: &std::path::PathBuf| {
                    let lines = source::lines(path);
                    lines
                        .iter()
                        .any(|l| l.kind == Kind::Code && l.code.contains(&ident))
                };
                if !sources.iter().any(code) {
                    problems.push(format!("{}: {used} in [{table}]", name(&dir)));
                }
            }
        }
    }
    fail_if_any(&problems, "declared and not used");
}

#[test]
fn pure_crates_use_no_runtime_clock_environment_or_network() {
    let pure = [
        "answer", "types", "render", "grammar", "algo", "tensor", "model", "infer", "train",
    ];
    let mut problems = Vec::new();
    for krate in pure {
        let dir = root().join(format!("crates/sinew-{krate}"));
        let table = manifest(&dir);
        let dependencies = table.get("dependencies").and_then(|d| d.as_table());
        let runtime = dependencies.and_then(|d| d.get("tokio"));
        // An optional one is of a feature that downloads.
        let optional =
            |d: &toml::Value| d.get("optional").is_some_and(|o| o.as_bool() == Some(true));
        if runtime.is_some_and(|d| !optional(d)) {
            problems.push(format!("sinew-{krate} uses an async runtime"));
        }
        let mut sources = Vec::new();
        files(&dir.join("src"), "rs", &mut sources);
        for path in sources {
            for (i, line) in source::lines(&path).iter().enumerate() {
                for banned in ["Instant::now", "SystemTime::now", "env::var", "TcpStream"] {
                    if !line.test && line.code.contains(banned) {
                        problems.push(format!("{}:{}: {banned}", path.display(), i + 1));
                    }
                }
            }
        }
    }
    fail_if_any(&problems, "pure crates");
}
