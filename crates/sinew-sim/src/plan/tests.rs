use super::*;

fn parse(text: &str) -> Result<Plan, PlanError> {
    Plan::parse(Path::new("plan.toml"), text)
}

fn refused(text: &str) -> String {
    parse(text).map_err(|e| e.to_string()).expect_err(text)
}

#[test]
fn every_preset_is_a_plan_and_its_keys_can_be_changed() {
    for (name, _) in PRESETS {
        let plan = parse(&format!("preset = \"{name}\"\n[run]\nupdates = 33\n")).unwrap();
        assert_eq!(
            (plan.run.updates, plan.name.as_str()),
            (33, "plan"),
            "{name}"
        );
    }
    let plan = parse("preset = \"areal-async\"\n[engines]\nkv_s = 1\n").unwrap();
    assert_eq!(
        (plan.engines.count, plan.engines.kv_s, plan.engines.pass_s),
        (96, 1.0, 0.0035)
    );
}

#[test]
fn unknown_keys_and_wrong_values_are_refused_with_their_line() {
    let text = refused("[engines]\ncount = 4\nspeed = 3\n");
    assert!(text.contains("line 3") && text.contains("speed"), "{text}");
    assert!(refused("[run]\nmode = \"fast\"\n").contains("line 2"));
    for (text, key) in [
        ("[engines]\ncount = 0\n", "engines.count"),
        ("[trainer]\ntokens_per_s = 0\n", "trainer.tokens_per_s"),
        ("[tools]\ncall_s = { values = [] }\n", "tools.call_s"),
        ("[run]\nupdates = 1\n", "run.warm_up"),
        ("preset = \"nothing\"\n", "preset"),
        (
            "[run]\nmode = \"async\"\n[trainer]\ncolocated = true\n",
            "trainer.colocated",
        ),
        (
            "[episode]\nmax_context_tokens = 900000\n",
            "episode.max_context_tokens",
        ),
        ("from_run = \"nowhere\"\n", "nowhere"),
    ] {
        assert!(refused(text).contains(key), "{}", refused(text));
    }
}

#[test]
fn a_plan_is_written_as_it_is_read() {
    let plan = crate::search::random_plan(11);
    let text = toml::to_string(&plan).unwrap();
    assert_eq!(parse(&text).unwrap(), plan);
}
