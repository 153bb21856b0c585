//! The documentation page of each algorithm matches its preset.

use sinew_algo::AlgorithmKind;
use sinew_types::EpisodeInput;
use std::collections::BTreeSet;
use std::path::PathBuf;

fn page(kind: AlgorithmKind) -> PathBuf {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/algorithms");
    PathBuf::from(docs).join(format!("{kind}.md"))
}

#[test]
fn pages_show_the_presets_that_run() {
    for &kind in AlgorithmKind::ALL {
        let text = std::fs::read_to_string(page(kind)).unwrap_or_default();
        let preset = toml::to_string(&kind.preset()).unwrap();
        let block = format!("```toml\n{preset}```\n");
        assert!(
            text.contains(&block),
            "{} must show what `type = \"{kind}\"` stands for:\n{block}",
            page(kind).display()
        );
    }
}

/// The table of what algorithms read has a row for each that needs more than tokens and outcomes.
#[test]
fn the_table_of_needs_is_that_of_the_presets() {
    let path = page(AlgorithmKind::Grpo).with_file_name("README.md");
    let text = std::fs::read_to_string(path).unwrap();
    let names = EpisodeInput::ALL.map(EpisodeInput::name).join(" | ");
    let head = format!("| algorithm | {names} | critic | reference | teacher |\n");
    let (_, table) = text.split_once(&head).expect(&head);
    let table: Vec<&str> = table
        .lines()
        .skip(1)
        .take_while(|l| !l.is_empty())
        .collect();
    let row = |kind: &AlgorithmKind| {
        let needs = kind.preset().needs();
        let of_run = [needs.values, needs.reference(), needs.teacher()];
        let of_episodes = EpisodeInput::ALL.map(|i| needs.of_episodes().any(|n| n == i));
        let all: Vec<bool> = of_episodes.into_iter().chain(of_run).collect();
        let cells: Vec<&str> = all.iter().map(|n| if *n { "yes" } else { "" }).collect();
        let row = format!("| `{kind}` | {} |", cells.join(" | "));
        all.contains(&true).then_some(row)
    };
    let rows: Vec<String> = AlgorithmKind::ALL.iter().filter_map(row).collect();
    assert_eq!(table, rows);
}

fn names(folder: &str, extension: &str, except: &[&str]) -> BTreeSet<String> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let entries = std::fs::read_dir(PathBuf::from(root).join(folder)).unwrap();
    let paths = entries.map(|e| e.unwrap().path());
    let named = paths.filter(|p| p.extension().is_some_and(|e| e == extension));
    let stem = |p: PathBuf| p.file_stem().unwrap().to_str().unwrap().to_owned();
    named
        .map(stem)
        .filter(|n| !except.contains(&n.as_str()))
        .collect()
}

#[test]
fn each_algorithm_has_one_file_one_page_one_recipe_and_a_row_of_the_table() {
    let kinds: BTreeSet<String> = AlgorithmKind::ALL.iter().map(|k| k.to_string()).collect();
    let shared = ["mod", "normalize"];
    let files = names("crates/sinew-algo/src/algorithms", "rs", &shared);
    assert_eq!(files, kinds, "crates/sinew-algo/src/algorithms/");
    let pages = names("docs/algorithms", "md", &["README"]);
    assert_eq!(pages, kinds, "docs/algorithms/");
    let recipes = names("recipes/algorithms", "toml", &[]);
    assert_eq!(recipes, kinds, "recipes/algorithms/");
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let table = std::fs::read_to_string(root.join("docs/algorithms/README.md")).unwrap();
    for kind in &kinds {
        let row = format!("| [`{kind}`]({kind}.md) |");
        assert_eq!(table.matches(&row).count(), 1, "README.md: {row}");
        let recipe = root.join(format!("recipes/algorithms/{kind}.toml"));
        let recipe: toml::Table = std::fs::read_to_string(recipe).unwrap().parse().unwrap();
        let algorithm = recipe["algorithm"]["type"].as_str();
        assert_eq!(algorithm, Some(kind.as_str()), "{kind}.toml");
    }
}
