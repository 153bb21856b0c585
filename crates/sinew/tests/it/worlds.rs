//! Environments that ship with the program: checks, cheats, recipes, and classes that derive from them.

use crate::{root, run_ok, sinew};
use serde_json::Value;
use sinew_assembly::ENVIRONMENTS;
use sinew_recipe::{ChainPlan, Recipe};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

const WORLDS: [&str; 18] = [
    "bargain:Bargain",
    "bargain:ConnectThree",
    "coq:Coq",
    "duo:Propose",
    "duo:Verify",
    "household:Household",
    "memory:Graph",
    "memory:Memory",
    "phone:Phone",
    "physics:Tabletop",
    "probes:Sources",
    "probes:Sycophancy",
    "reflect:Order",
    "repo:Repo",
    "research:Research",
    "retail:Retail",
    "search:Search",
    "survival:Survival",
];

/// Report of `sinew env check`.
fn checked(command: &mut Command) -> Value {
    serde_json::from_str(&run_ok(command)).unwrap()
}

/// Tests that share the worlds, and run at once.
const PARTS: usize = 3;

/// Gold wins, and policies that know nothing do not, in each world of a part.
fn gold_wins(part: usize) {
    let dir = tempfile::tempdir().unwrap();
    for world in WORLDS.into_iter().skip(part).step_by(PARTS) {
        let module = format!("sinew.worlds.{world}");
        // A step of Coq starts three programs.
        let tasks = if world == "coq:Coq" { "4" } else { "20" };
        let mut command = sinew();
        command.current_dir(dir.path());
        let found = checked(command.args(["env", "check", &module, "--tasks", tasks, "--json"]));
        let finding = |name: &str| {
            let mut lines = found["checks"].as_array().unwrap().iter();
            let line = lines.find(|l| l["name"] == name);
            line.unwrap_or_else(|| panic!("{world}: no {name} in {found}"))["finding"].clone()
        };
        let place = found["place"].as_str().unwrap();
        let module = world.split(':').next().unwrap();
        assert!(
            place.starts_with(&format!("sinew/worlds/{module}.py:")),
            "{place}"
        );
        let floors = ["constant", "other_gold", "no_tool", "odd"];
        let others = ["leaks", "gold", "null", "determinism", "snapshots"];
        for name in floors.into_iter().chain(others) {
            assert_eq!(finding(name), "ok", "{world}: {name}: {found}");
        }
    }
}

#[test]
fn gold_wins_the_first_part_of_the_worlds_and_ignorance_does_not() {
    gold_wins(0);
}

#[test]
fn gold_wins_the_second_part_of_the_worlds_and_ignorance_does_not() {
    gold_wins(1);
}

#[test]
fn gold_wins_the_third_part_of_the_worlds_and_ignorance_does_not() {
    gold_wins(2);
}

/// A class that one script wins, whose first observation tells all, and which a word ends.
const LOW: &str = "
from sinew import Env, tool


class Low(Env):
    def start(self, task):
        self.told = []

    @tool
    def say(self, word: str):
        self.told.append(word)
        return str(int(word) if word.isdigit() or word == 'inf' else 0)

    def reward(self, task):
        return {'reward': len(self.told) > 1, 'right': task.word in self.told}

    @staticmethod
    def tasks(split, seed):
        return [{'prompt': f'Say {w}.', 'word': w} for w in ('tea', 'milk', 'rice', 'salt')]

    @staticmethod
    def gold(task):
        return [('say', {'word': task.word}), ('say', {'word': task.word})]
";

#[test]
fn floors_above_a_third_of_gold_and_odd_arguments_are_named() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("low.py"), LOW).unwrap();
    let mut command = sinew();
    command.current_dir(dir.path());
    command.args(["env", "check", "low.py:Low", "--tasks", "4", "--json"]);
    let output = command.output().unwrap();
    // Odd arguments fail episodes: that is an error.
    assert_eq!(output.status.code(), Some(1));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let lines = found["checks"].as_array().unwrap();
    let line = |name: &str| lines.iter().find(|l| l["name"] == name).unwrap();
    for name in ["constant", "other_gold", "blind"] {
        assert_eq!(line(name)["finding"], "warning", "{found}");
        assert_eq!(line(name)["values"]["gold"], 1.0, "{found}");
    }
    assert_eq!(line("no_tool")["finding"], "ok", "{found}");
    assert_eq!(line("odd")["finding"], "error", "{found}");
    let detail = line("odd")["detail"].as_str().unwrap();
    assert!(detail.contains("say({\"word\":\"inf\"})"), "{detail}");
}

#[test]
fn cheats_fail_in_every_world() {
    let tests = root().join("python/tests/worlds.py");
    let source = root().join("python/src").canonicalize().unwrap();
    let mut command = Command::new("python3");
    let said = run_ok(command.env("PYTHONPATH", source).arg(tests));
    assert_eq!(said.lines().last(), Some("ok"), "{said}");
}

#[test]
fn a_class_derives_from_a_world_and_unknown_worlds_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let code = "from sinew.worlds.household import Household\n\n\n\
                class Large(Household):\n    rooms = 5\n    things = 9\n";
    fs::write(dir.path().join("large.py"), code).unwrap();
    let mut command = sinew();
    command.current_dir(dir.path());
    checked(command.args(["env", "check", "large.py:Large", "--tasks", "4", "--json"]));
    let mut command = sinew();
    command.args(["env", "check", "sinew.worlds.moon:Moon"]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("there is no sinew.worlds.moon") && said.contains("sinew.worlds.phone"),
        "{said}"
    );
}

/// Chains of a folder, with their paths.
fn chains(folder: &str) -> Vec<(PathBuf, ChainPlan)> {
    let entries = fs::read_dir(root().join(folder)).unwrap();
    let paths = entries.map(|e| e.unwrap().path()).filter(|p| p.is_file());
    let chain = |path: PathBuf| match Recipe::load(&path, ENVIRONMENTS).unwrap() {
        Recipe::Chain(chain) => (path, chain),
        Recipe::Run(_) => panic!("{}: no chain", path.display()),
    };
    paths.map(chain).collect()
}

#[test]
fn each_world_has_a_recipe_that_can_be_read() {
    let mut named = Vec::new();
    for (path, chain) in chains("recipes/worlds") {
        assert_eq!(chain.stages.len(), 2, "{}", path.display());
        let text = fs::read_to_string(&path).unwrap();
        let is = |world: &&&str| text.contains(&format!("\"sinew.worlds.{world}\""));
        named.push(*WORLDS.iter().find(is).unwrap());
    }
    // Two small worlds that one policy is measured on at once.
    let probes = fs::read_to_string(root().join("recipes/probes.toml")).unwrap();
    for world in ["probes:Sources", "probes:Sycophancy"] {
        assert!(probes.contains(&format!("\"sinew.worlds.{world}\"")));
        named.push(world);
    }
    named.sort_unstable();
    assert_eq!(named, WORLDS);
}

/// `sinew check` plays their gold runs.
#[test]
fn recipes_of_small_worlds_pass_every_check() {
    let dir = tempfile::tempdir().unwrap();
    let folders = ["recipes/worlds/small", "recipes/worlds/words"];
    for (path, _) in folders.into_iter().flat_map(chains) {
        let mut command = sinew();
        let said = run_ok(command.current_dir(dir.path()).arg("check").arg(&path));
        assert!(said.contains("are solved"), "{}: {said}", path.display());
    }
}
