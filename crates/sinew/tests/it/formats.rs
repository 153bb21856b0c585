//! Output formats from the recipe to the gradient: tokens sampled under one are trained under it.

use crate::resume::done;
use crate::{sinew, small_tiny, with_changes};
use std::path::{Path, PathBuf};

fn recipe(dir: &Path, format: &str) -> PathBuf {
    let format = format!("[rollout.format]\n{format}\n\n[algorithm]");
    let changes = [
        ("steps = 60", "steps = 3"),
        ("episodes_per_task = 16", "episodes_per_task = 1"),
        (
            "type = \"grpo\"",
            "type = \"grpo\"\nkl = { coefficient = 0.01 }",
        ),
        ("[algorithm]", format.as_str()),
    ];
    let path = dir.join("recipe.toml");
    std::fs::write(&path, with_changes(small_tiny(), &changes)).unwrap();
    path
}

#[test]
fn what_is_sampled_under_a_format_is_trained_under_it() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(
        dir.path(),
        r#"grammar = { type = "choice", texts = ["l", "r"] }"#,
    );
    let run = dir.path().join("run");
    done(&recipe, &run, &[]);
    let steps = crate::steps(&run);
    assert_eq!(steps.len(), 3);
    for step in &steps {
        let formats = &step["formats"];
        // Each answer is one letter with a choice, and the end without one.
        assert!(formats["masked"].as_u64().unwrap() > 0, "{formats}");
        assert_eq!(formats["masked"], formats["forced"]);
        assert_eq!(formats["rejected"], 0);
        assert_eq!(step["tokens"]["sampled"], formats["masked"]);
        // The engine's log-probabilities are the trainer's, before any update.
        assert_eq!(step["logprob_gap_max"], 0.0);
        let ratios = &step["metrics"];
        assert_eq!(
            (&ratios["ratio_min"], &ratios["ratio_max"]),
            (&1.0.into(), &1.0.into())
        );
        // The entropy is that of two letters, not of the whole alphabet.
        let entropy = ratios["entropy"].as_f64().unwrap();
        assert!(entropy <= std::f64::consts::LN_2 + 1e-6, "{entropy}");
    }
    // The reference is masked as well: the same weights are at no distance.
    let distance = steps[0]["metrics"]["kl_reference"].as_f64().unwrap();
    assert!(distance.abs() < 1e-9, "{distance}");
}

#[test]
fn a_format_that_cannot_be_held_to_is_refused_before_anything_is_sampled() {
    let dir = tempfile::tempdir().unwrap();
    for (format, word) in [
        (r#"grammar = { type = "regex", pattern = "(" }"#, "regex"),
        (
            r#"grammar = { type = "choice", texts = [] }"#,
            "at least one text",
        ),
        (r#"grammar = { type = "poem" }"#, "poem"),
        (
            "whitespace = \"wide\"\ngrammar = { type = \"json_object\" }",
            "wide",
        ),
    ] {
        let recipe = recipe(dir.path(), format);
        let run = dir.path().join("run");
        let mut command = sinew();
        command.arg("train").arg(&recipe).arg("--run-dir");
        let output = command.arg(&run).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{format}");
        assert!(said.contains(word), "{said}");
    }
}
