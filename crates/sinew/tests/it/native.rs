//! Environments of `recipes/environments` through `sinew env check`.

use super::{root, sinew};
use serde_json::Value;
use sinew_assembly::ENVIRONMENTS;
use sinew_recipe::Recipe;
use std::fs;

/// Recipes below `recipes/environments`.
fn recipes() -> Vec<String> {
    let entries = fs::read_dir(root().join("recipes/environments")).unwrap();
    let mut paths: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
        .iter()
        .map(|p| p.to_string_lossy().into_owned())
        .collect()
}

#[test]
fn each_environment_of_the_first_half_has_a_recipe_and_holds_its_checks() {
    hold_checks(0);
}

#[test]
fn each_environment_of_the_second_half_has_a_recipe_and_holds_its_checks() {
    hold_checks(1);
}

/// Checks every second recipe, from the one at `first`.
fn hold_checks(first: usize) {
    for recipe in recipes().into_iter().skip(first).step_by(2) {
        let Recipe::Chain(chain) = Recipe::load(recipe.as_ref(), ENVIRONMENTS).unwrap() else {
            panic!("{recipe}: no chain");
        };
        assert_eq!(chain.stages.len(), 2, "{recipe}");
        let output = sinew()
            .current_dir(root())
            .args(["env", "check", &recipe, "--tasks", "2", "--json"])
            .output()
            .unwrap();
        let report: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("{recipe}: {}", String::from_utf8_lossy(&output.stderr)));
        assert!(output.status.success(), "{recipe}: {report}");
        let check = |name: &str| {
            let checks = report["checks"].as_array().unwrap();
            checks.iter().find(|c| c["name"] == name).unwrap().clone()
        };
        assert!(
            check("gold")["values"]["turns"].as_u64().unwrap() >= 2,
            "{recipe}: {report}"
        );
        for policy in ["null", "random"] {
            assert_eq!(
                check(policy)["values"]["successes"],
                0,
                "{recipe}: {report}"
            );
        }
        assert_eq!(check("determinism")["finding"], "ok", "{recipe}: {report}");
        assert!(!report["tools"].as_array().unwrap().is_empty());
    }
}
