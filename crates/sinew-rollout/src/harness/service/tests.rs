use super::*;
use proptest::prelude::*;
use serde_json::json;

fn task() -> Task {
    Task {
        id: sinew_types::TaskId::new("t1"),
        kind: "sum".into(),
        prompt: "1 + 1?".into(),
        data: json!({"question": "one {and} one", "n": 3}),
        ..Task::default()
    }
}

fn body(value: Value) -> Result<Value, ProgramError> {
    let Value::Object(map) = value else {
        panic!("no object");
    };
    filled(&map, &task()).map(Value::Object)
}

#[test]
fn the_values_of_a_task_stand_where_their_names_were() {
    let asked = json!({"text": "{question} ({n})", "list": ["{id}", 1, {"deep": "{{{kind}}}"}], "p": "{prompt}"});
    let expected =
        json!({"text": "one {and} one (3)", "list": ["t1", 1, {"deep": "{sum}"}], "p": "1 + 1?"});
    assert_eq!(body(asked).unwrap(), expected);
    for (bad, needle) in [
        ("{answr}", "question"),
        ("a { b", "single"),
        ("a } b", "single"),
    ] {
        let e = body(json!({ "x": bad })).unwrap_err().to_string();
        assert!(
            e.contains("harness.body") && e.contains(needle),
            "{bad}: {e}"
        );
    }
}

#[test]
fn the_answer_is_a_field_or_everything() {
    let nested = r#"{"result": {"items": ["a", {"text": "yes"}]}, "n": 4, "none": null}"#;
    let answer = Answer::read(nested);
    assert_eq!(answer.output(Some("result.items.1.text")).unwrap(), "yes");
    assert_eq!(answer.output(Some("n")).unwrap(), "4");
    assert_eq!(answer.output(None).unwrap(), nested);
    for path in ["result.text", "none", "result.items.7"] {
        assert!(
            answer
                .output(Some(path))
                .unwrap_err()
                .to_string()
                .contains("harness.output")
        );
    }
    assert_eq!(Answer::read("plain").output(None).unwrap(), "plain");
    assert_eq!(
        Answer::read("\"a string\"").output(None).unwrap(),
        "a string"
    );
    assert!(Answer::read("plain").output(Some("x")).is_err());
}

proptest! {
    /// A text that is written with its braces doubled comes out as it was.
    #[test]
    fn doubled_braces_are_braces(text in "[a-z{}\" ]{0,20}") {
        let doubled = text.replace('{', "{{").replace('}', "}}");
        prop_assert_eq!(fill_text(&doubled, &task()).unwrap(), text);
    }

    /// Filling in a template ends with a text or a reason, whatever the recipe contains.
    #[test]
    fn no_template_panics(text in "\\PC{0,30}") {
        let _ = fill_text(&text, &task());
    }
}
