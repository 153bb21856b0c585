//! Each algorithm has a page that says what runs.

use sinew_algo::AlgorithmKind;
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
