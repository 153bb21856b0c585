//! Rewards by name: their notation, their values, and unscored samples.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "it/code.rs"]
mod code;
#[path = "it/code_tests.rs"]
mod code_tests;

use futures::executor::block_on;
use futures::future::BoxFuture;
use proptest::prelude::*;
use serde_json::{Value, json};
use sinew_env::{GroupReward, Reward, RewardSample, Score, Unscored, with_group};
use sinew_reward::{Argument, GroupSum, RewardSpec, RewardSum, Term, named};
use sinew_types::{Outcome, Task, TaskId};
use std::sync::Arc;

fn sample(output: &str, data: Value) -> RewardSample {
    let task = Task {
        id: TaskId::new("own/train/0"),
        kind: "own".into(),
        prompt: "q".into(),
        data,
        ..Task::default()
    };
    RewardSample::new(task, output)
}

fn score(reward: &str, output: &str, data: Value) -> Result<Score, Unscored> {
    block_on(named(reward).unwrap().score(&sample(output, data)))
}

fn value(reward: &str, output: &str, data: Value) -> f64 {
    score(reward, output, data).unwrap().value
}

#[test]
fn answers_are_compared() {
    let schema = json!({"type": "object", "required": ["city"]});
    let cases = [
        ("exact(answer)", " 42\n", json!({"answer": "42"}), 1.0),
        ("exact(answer)", "42", json!({"answer": 42}), 1.0),
        ("exact(answer)", "42.", json!({"answer": "42"}), 0.0),
        (
            "contains(answer)",
            "it is Paris",
            json!({"answer": "Paris"}),
            1.0,
        ),
        (
            "number(answer)",
            "so 1,200 in all",
            json!({"answer": 1200}),
            1.0,
        ),
        ("number(answer)", "2.1", json!({"answer": "2.14"}), 0.0),
        (
            "number(answer, tolerance = 0.02)",
            "2.1",
            json!({"answer": 2.14}),
            1.0,
        ),
        ("number(answer)", "none", json!({"answer": 0}), 0.0),
        (
            "choice(answer)",
            "The answer is (b)? No: B",
            json!({"answer": "b"}),
            1.0,
        ),
        (r#"regex("^\d+$")"#, "123", json!({}), 1.0),
        ("regex(pattern)", "abc", json!({"pattern": "^b"}), 0.0),
        (
            "json_schema(schema)",
            "```json\n{\"city\": 1}\n```",
            json!({"schema": schema}),
            1.0,
        ),
        ("json_schema(schema)", "{}", json!({"schema": schema}), 0.0),
        ("json_schema(schema)", "no", json!({"schema": schema}), 0.0),
        ("citations(ids)", "x [1] y [3]", json!({"ids": [1, 2]}), 0.5),
        ("length(max = 4)", "1234", json!({}), 0.0),
        ("length(max = 4)", "123456", json!({}), -0.5),
        ("length(max = 4)", &"1".repeat(50), json!({}), -1.0),
        ("repetition(n = 1)", "a a a a", json!({}), -0.75),
    ];
    for (reward, output, data, expected) in cases {
        assert_eq!(
            value(reward, output, data),
            expected,
            "{reward} of {output:?}"
        );
    }
}

#[test]
fn numbers_are_compared_by_value_whatever_their_notation() {
    for (output, answer, right) in [
        ("it is \u{2212}7", json!(-7), true),
        ("it is \u{2212}7", json!(7), false),
        ("1234568", json!(1_234_567), false),
        ("$1{,}234$", json!(1234), true),
        ("1\u{2009}234", json!(1234), true),
        ("\u{ff14}\u{ff12}", json!(42), true),
        ("so 42", json!("6 * 7 = 42\n#### 42"), true),
    ] {
        let got = value("number(answer)", output, json!({ "answer": answer }));
        assert_eq!(got == 1.0, right, "{output} against {answer}");
    }
}

#[test]
fn thoughts_are_no_answer_and_a_thought_that_is_cut_has_none() {
    let thought = "<think>\nmaybe 7, or B\n</think>\n\n";
    for (reward, output, expected) in [
        ("exact(answer)", format!("{thought}42"), 1.0),
        ("number(answer)", format!("{thought}42"), 1.0),
        ("number(answer)", "<think>\nit is 42".into(), 0.0),
        ("contains(answer)", "<think>\nit is 42".into(), 0.0),
        ("contains(answer)", "<think>42</think>7".into(), 0.0),
    ] {
        let got = value(reward, &output, json!({"answer": 42}));
        assert_eq!(got, expected, "{reward} of {output}");
    }
    // The prompt of a thinking template opens the thought, so the turn has only its end.
    let opened = "maybe\n</think>\n<answer>42</answer>";
    let got = value(r#"format("think", "answer")"#, opened, json!({}));
    assert_eq!(got, 1.0);
    let schema = json!({"type": "object", "required": ["city"]});
    let output = format!("{thought}{{\"city\": 1}}");
    let got = value("json_schema(schema)", &output, json!({"schema": schema}));
    assert_eq!(got, 1.0);
}

#[test]
fn an_answer_with_two_readings_is_unscored_where_one_is_right() {
    for (reward, output, answer) in [
        ("number(answer)", "1.234", json!(1234)),
        ("choice(answer)", "A or B", json!("B")),
    ] {
        let unclear = score(reward, output, json!({ "answer": answer })).unwrap_err();
        assert!(unclear.reason.starts_with("could not tell"), "{unclear}");
    }
    for (reward, output, answer) in [
        ("number(answer)", "1.234", json!(99)),
        ("choice(answer)", "A or B", json!("C")),
        (
            "choice(answer)",
            "B. A is wrong because it is small.",
            json!("A"),
        ),
    ] {
        let got = value(reward, output, json!({ "answer": answer }));
        assert_eq!(got, 0.0, "{reward} of {output}");
    }
}

#[test]
fn repetition_counts_in_languages_without_blanks() {
    let repeated = value("repetition(n = 2)", &"我们来看看".repeat(8), json!({}));
    let plain = value("repetition(n = 2)", "我们来看看这道题目怎么做", json!({}));
    assert!(repeated < -0.5 && plain > -0.2, "{repeated} {plain}");
}

#[test]
fn a_task_that_cannot_be_compared_is_unscored() {
    let cases = [
        (
            "exact(answer)",
            json!({"reply": 1}),
            "no column answer; columns: reply",
        ),
        ("exact(answer)", json!({"answer": null}), "no column answer"),
        (
            "exact(answer)",
            json!({"answer": [1]}),
            "allowed: text or a number",
        ),
        (
            "number(answer)",
            json!({"answer": "many"}),
            "allowed: a number",
        ),
        (
            "choice(answer)",
            json!({"answer": "maybe"}),
            "allowed: one letter",
        ),
        ("regex(answer)", json!({"answer": "("}), "regex parse error"),
        (
            "json_schema(answer)",
            json!({"answer": {"type": 1}}),
            "allowed: a JSON Schema",
        ),
        (
            "citations(answer)",
            json!({"answer": []}),
            "allowed: a list of ids",
        ),
    ];
    for (reward, data, expected) in cases {
        let e = score(reward, "x", data).unwrap_err();
        assert!(e.reason.contains(expected), "{reward}: {e}");
    }
}

#[test]
fn rewards_that_do_not_exist_are_refused() {
    let cases = [
        ("exct(answer)", "allowed: exact(COLUMN)"),
        ("exact", "name a task column, such as exact(answer)"),
        ("exact(\"answer\")", "without quotes"),
        ("exact(answer, question)", "2 arguments"),
        (
            "exact(answer, tolerance = 1)",
            "`tolerance` is no argument of exact",
        ),
        ("number(answer, tolerance = -1)", "a number from 0 on"),
        (
            "number(answer, tolerance = 1, tolerance = 2)",
            "given twice",
        ),
        ("length", "set max"),
        ("length(5)", "set max"),
        ("regex(\"(\")", "regex parse error"),
        ("regex(\"a", "has no end"),
        ("exact(answer", "expected `,` or `)`"),
        ("exact(answer) x", "column 15: expected the end"),
        ("", "column 1: expected a name"),
        ("number(answer, tolerance = 1e999)", "finite"),
    ];
    for (reward, expected) in cases {
        let e = named(reward).map(|_| ()).unwrap_err();
        assert!(e.to_string().contains(expected), "{reward}: {e}");
    }
}

#[test]
fn a_sum_has_parts_and_no_score_without_all_of_them() {
    let term = |name: &str, reward: &str, weight| Term {
        name: name.into(),
        reward: named(reward).unwrap(),
        weight,
        clip: None,
    };
    let mut terms = vec![
        term("exact", "exact(answer)", 1.0),
        term("length", "length(max = 2)", 0.5),
        term("reply", "exact(reply)", 0.0),
    ];
    let sum = |terms: &[Term], output: &str| {
        let sum = RewardSum::new(terms.to_vec());
        block_on(sum.score(&sample(output, json!({"answer": "abc"}))))
    };
    let score = sum(&terms, "abc").unwrap();
    assert_eq!(score.value, 1.0 - 0.25);
    assert_eq!(
        (score.parts["reward/exact"], score.parts["reward/length"]),
        (1.0, -0.5)
    );
    assert_eq!(score.parts["unscored/reply"], 1.0);
    // A penalty does not judge success, and neither does a measurement.
    assert!(score.is_success());
    assert!(!sum(&terms, "abcd").unwrap().is_success());
    assert!(!score.parts.contains_key("reward/length/success"));
    terms[1].clip = Some([0.0, 1.0]);
    assert_eq!(sum(&terms, "abc").unwrap().value, 1.0);
    terms[2].weight = 0.1;
    let e = sum(&terms, "abc").unwrap_err();
    assert!(e.reason.starts_with("reply: the task has no column"), "{e}");
}

#[test]
fn penalties_alone_say_nothing_about_success() {
    let terms = vec![Term {
        name: "length".into(),
        reward: named("length(max = 4)").unwrap(),
        weight: 1.0,
        clip: None,
    }];
    let sum = RewardSum::new(terms);
    let success = |own: Option<f64>| {
        let mut sample = sample("abc", json!({}));
        sample
            .metrics
            .extend(own.map(|s| ("env/success".to_owned(), s)));
        block_on(sum.score(&sample)).unwrap().is_success()
    };
    // A sample is a success only if the environment reports one.
    assert_eq!(
        [None, Some(0.0), Some(1.0)].map(success),
        [false, false, true]
    );
}

/// One value for each member; it fails on `?`.
struct Values(Vec<f64>);

impl GroupReward for Values {
    fn name(&self) -> &str {
        "values"
    }

    fn score_group<'a>(
        &'a self,
        samples: &'a [RewardSample],
    ) -> BoxFuture<'a, Vec<Result<Score, Unscored>>> {
        let of = |(v, s): (&f64, &RewardSample)| match s.output.as_str() {
            "?" => Err(Unscored::new("no idea")),
            _ => Score::new(*v),
        };
        Box::pin(std::future::ready(
            self.0.iter().zip(samples).map(of).collect(),
        ))
    }
}

#[test]
fn a_group_adds_its_rewards_to_those_of_its_members() {
    let outputs = ["abc", "?", "x"];
    let samples = outputs.map(|o| sample(o, json!({"answer": "abc"})));
    let term = |name: &str, values: &[f64], weight| Term {
        name: name.into(),
        reward: Arc::new(Values(values.to_vec())) as Arc<dyn GroupReward>,
        weight,
        clip: Some([0.0, 2.0]),
    };
    let single = RewardSum::new(vec![Term {
        name: "exact".into(),
        reward: named("exact(answer)").unwrap(),
        weight: 1.0,
        clip: None,
    }])
    .before_group();
    let whole = |group: &GroupSum| -> Vec<Outcome> {
        let scores = block_on(group.score_group(&samples));
        let own = samples.iter().map(|s| block_on(single.score(s)).unwrap());
        let own = own.map(Score::into_outcome);
        own.zip(scores)
            .map(|(own, s)| with_group(&own, s))
            .collect()
    };
    let measured = term("seen", &[7.0, 7.0, 7.0], 0.0);
    let outcomes = whole(&GroupSum::new(vec![
        term("rank", &[3.0, 3.0, 0.5], 0.5),
        measured,
    ]));
    assert_eq!((outcomes[0].reward, outcomes[0].success), (2.0, true));
    assert_eq!((outcomes[2].reward, outcomes[2].success), (0.25, false));
    assert_eq!(outcomes[0].metrics["reward/rank"], 3.0);
    assert_eq!(outcomes[2].metrics["reward/exact"], 0.0);
    let reason = outcomes[1].unscored_reason.as_deref();
    assert_eq!(
        (outcomes[1].unscored, reason),
        (true, Some("rank: no idea"))
    );
    // A wrong number of scores is the score of no one.
    let short = whole(&GroupSum::new(vec![term("rank", &[1.0], 1.0)]));
    for outcome in short {
        let reason = outcome.unscored_reason.unwrap_or_default();
        assert!(reason.contains("1 scores for a group of 3"), "{reason}");
    }
}

proptest! {
    #[test]
    fn notation_is_read_back(
        name in "[a-z_][a-z_0-9]{0,8}",
        column in "[a-z_][a-z_0-9]{0,8}",
        text in "[^\\\\]{0,12}",
        number in -1e6f64..1e6,
    ) {
        let quoted = text.replace('"', "\\\"");
        let spec = RewardSpec::parse(&format!("{name}( {column},\"{quoted}\" , k={number})")).unwrap();
        prop_assert_eq!(spec.name, name);
        prop_assert_eq!(spec.positional, vec![Argument::Column(column), Argument::Text(text)]);
        prop_assert_eq!(spec.named, vec![("k".to_owned(), Argument::Number(number))]);
    }

    #[test]
    fn no_text_makes_a_reward_panic_or_leave_its_range(output in any::<String>(), spec in any::<String>()) {
        let _ = RewardSpec::parse(&spec);
        let data = json!({"answer": "1", "ids": ["1"], "schema": {"type": "object"}});
        for reward in ["exact(answer)", "number(answer)", "choice(answer)", "citations(ids)",
                       "json_schema(schema)", "length(max = 3)", "repetition(n = 2)"] {
            match score(reward, &output, data.clone()) {
                Ok(score) => prop_assert!((-1.0..=1.0).contains(&score.value), "{} {}", reward, score.value),
                // `1` is not an option letter.
                Err(e) => prop_assert!(reward.starts_with("choice"), "{}", e),
            }
        }
    }
}
