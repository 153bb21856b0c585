//! Structured output in all dialects, with an engine that is held to it.

use crate::support::{Opened, World, grammars, run_client, world, world_with};
use serde_json::{Value, json};
use sinew_types::Trace;

/// The free output of the model; the format masks it.
fn says(prompt: &str) -> Option<String> {
    let asked = prompt.rsplit("<|im_start|>user\n").next()?;
    let words = asked.split("<|im_end|>").next()?;
    if prompt.contains("<|im_start|>tool\n") {
        return Some(PERSON.into());
    }
    Some(match words {
        "who?" => PERSON.into(),
        "call" => {
            "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 40, \"b\": 2}}\n</tool_call>"
                .into()
        }
        _ => "I had rather not.".into(),
    })
}

const PERSON: &str = "{\"name\": \"Ann\", \"age\": 7}";

fn held() -> World {
    world_with(says, |_, fake| fake.grammars = Some(grammars()))
}

fn person() -> Value {
    json!({
        "type": "object", "additionalProperties": false, "required": ["name", "age"],
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"enum": [7, 8]}},
    })
}

fn add(strict: bool) -> Value {
    let parameters = json!({
        "type": "object", "additionalProperties": false, "required": ["a", "b"],
        "properties": {"a": {"enum": [40, 41]}, "b": {"enum": [2, 3]}},
    });
    json!({"type": "function", "function": {
        "name": "add", "strict": strict, "parameters": parameters,
    }})
}

fn body(words: &str, fields: &Value) -> Value {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": words}]});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn schema_format() -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {
        "name": "person", "strict": true, "schema": person(),
    }}})
}

fn is_person(text: &Value) {
    let value: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
    assert!(
        ["Ann", "Bob"].map(Value::from).contains(&value["name"]),
        "{value}"
    );
    assert!([7, 8].map(Value::from).contains(&value["age"]), "{value}");
    assert_eq!(value.as_object().unwrap().len(), 2);
}

fn trace(world: &World, rollout: &Opened) -> Trace {
    serde_json::from_value(world.view(&rollout.id)["trace"].clone()).unwrap()
}

/// Path, body and where the text of the answer is.
fn schema_cases() -> Vec<(&'static str, Value, &'static str)> {
    let user = json!([{"role": "user", "content": "anything"}]);
    let format = json!({"type": "json_schema", "name": "person", "schema": person()});
    let messages = |fields: Value| {
        let mut body = json!({"model": "m", "max_tokens": 200, "messages": user});
        body.as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        body
    };
    let chat = |fields: Value| {
        let text = "/choices/0/message/content";
        ("/chat/completions", body("anything", &fields), text)
    };
    let config = json!({"output_config": {"format": format}});
    let google = |schema: Value| {
        let mut config = json!({"responseMimeType": "application/json"});
        config
            .as_object_mut()
            .unwrap()
            .extend(schema.as_object().unwrap().clone());
        let contents = json!([{"parts": [{"text": "anything"}]}]);
        let body = json!({"contents": contents, "generationConfig": config});
        let text = "/candidates/0/content/parts/0/text";
        ("/v1beta/models/m:generateContent", body, text)
    };
    let mut openapi = person();
    openapi["type"] = json!("OBJECT");
    vec![
        google(json!({"responseJsonSchema": person()})),
        google(json!({"responseSchema": openapi})),
        chat(schema_format()),
        chat(json!({"guided_json": person().to_string()})),
        chat(json!({"structured_outputs": {"json": person()}})),
        (
            "/completions",
            json!({"model": "m", "prompt": "x", "guided_json": person()}),
            "/choices/0/text",
        ),
        (
            "/responses",
            json!({"model": "m", "input": "x", "text": {"format": format}}),
            "/output/0/content/0/text",
        ),
        ("/messages", messages(config), "/content/0/text"),
        (
            "/messages",
            messages(json!({"output_format": format})),
            "/content/0/text",
        ),
    ]
}

#[test]
fn every_dialect_holds_the_output_to_a_schema() {
    let world = held();
    for (path, body, text) in schema_cases() {
        let rollout = world.open();
        let told = rollout.post(path, &body).ok();
        is_person(
            told.pointer(text)
                .unwrap_or_else(|| panic!("{path}: {told}")),
        );
        if path == "/responses" {
            assert_eq!(
                told["text"]["format"], body["text"]["format"],
                "as it was asked for"
            );
        }
        // The trace records the format of the output, and the tokens without a choice.
        let trace = trace(&world, &rollout);
        trace.validate().unwrap();
        let node = trace.nodes.last().unwrap();
        let format = node.format.as_ref().unwrap_or_else(|| panic!("{path}"));
        assert!(format.masked());
        assert!((0..node.tokens.len()).any(|i| format.forced(i)), "{path}");
        world.finish(&rollout.id);
    }
    assert_eq!(world.gateway.stats().unproven, 0);
}

#[test]
fn other_languages_are_held_to() {
    let world = held();
    let rollout = world.open();
    let text = |fields: Value| {
        let told = rollout
            .post("/chat/completions", &body("anything", &fields))
            .ok();
        told["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let digits = text(json!({"guided_regex": "[0-9]{3}"}));
    assert!(
        digits.len() == 3 && digits.bytes().all(|b| b.is_ascii_digit()),
        "{digits}"
    );
    let chosen = text(json!({"structured_outputs": {"choice": ["yes", "no"]}}));
    assert!(["yes", "no"].contains(&chosen.as_str()), "{chosen}");
    let said = text(json!({"guided_grammar": "start: \"a\" | \"b\" \"c\""}));
    assert!(["a", "bc"].contains(&said.as_str()), "{said}");
    let who = body("who?", &json!({"response_format": {"type": "json_object"}}));
    let told = rollout.post("/chat/completions", &who).ok();
    assert_eq!(told["choices"][0]["message"]["content"], PERSON);
    let free = rollout
        .post("/chat/completions", &body("anything", &json!({})))
        .ok();
    assert_eq!(
        free["choices"][0]["message"]["content"],
        "I had rather not."
    );
    let last = trace(&world, &rollout).nodes.pop().unwrap();
    assert!(last.format.is_none());
}

#[test]
fn strict_tools_follow_their_schemas() {
    let world = held();
    let rollout = world.open();
    let calls = |fields: Value, words: &str| {
        let told = rollout
            .post("/chat/completions", &body(words, &fields))
            .ok();
        let calls = told["choices"][0]["message"]["tool_calls"].clone();
        calls.as_array().cloned().unwrap_or_default()
    };
    let checked = |call: &Value| {
        let arguments = call["function"]["arguments"].as_str().unwrap();
        let value: Value = serde_json::from_str(arguments).unwrap();
        assert!([40, 41].map(Value::from).contains(&value["a"]), "{value}");
    };
    // The model may call or not; a call follows the schema.
    let called = calls(json!({"tools": [add(true)]}), "call");
    assert_eq!(called.len(), 1);
    checked(&called[0]);
    assert!(calls(json!({"tools": [add(true)]}), "anything").is_empty());
    // It must call, and its own words are not a call.
    for choice in [
        json!("required"),
        json!({"type": "function", "function": {"name": "add"}}),
    ] {
        let fields = json!({
            "tools": [add(true)], "tool_choice": choice, "parallel_tool_calls": false,
        });
        let called = calls(fields, "anything");
        assert_eq!(called.len(), 1, "{choice}");
        checked(&called[0]);
    }
    // One that must come is a call even of a tool that is not strict.
    let fields = json!({
        "tools": [add(false)], "tool_choice": "required", "parallel_tool_calls": false,
    });
    let called = calls(fields, "call");
    assert_eq!(called[0]["function"]["name"], "add");
    assert_eq!(called[0]["function"]["arguments"], "{\"a\":40,\"b\":2}");
    let seen = trace(&world, &rollout);
    let formats = seen.nodes.iter().filter(|n| n.format.is_some()).count();
    assert_eq!(formats, 5);
}

#[test]
fn tools_come_before_an_answer_of_a_format() {
    let world = held();
    let rollout = world.open();
    let mut fields = schema_format();
    fields["tools"] = json!([add(false)]);
    let first = body("call", &fields);
    let told = rollout.post("/chat/completions", &first).ok();
    let message = &told["choices"][0]["message"];
    let call = &message["tool_calls"][0];
    assert_eq!(call["function"]["name"], "add", "{told}");
    let mut second = first.clone();
    let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "42"});
    second["messages"] = json!([first["messages"][0], message, result]);
    let told = rollout.post("/chat/completions", &second).ok();
    assert_eq!(told["choices"][0]["message"]["content"], PERSON, "{told}");
    let joins = world.view(&rollout.id)["stats"]["joins"].clone();
    assert_eq!(joins, json!({"start": 1, "extend": 1}));
    // Neither a call nor JSON is not to be had.
    let told = rollout
        .post("/chat/completions", &body("anything", &fields))
        .ok();
    let message = &told["choices"][0]["message"];
    assert!(message["content"] != "I had rather not.", "{told}");
}

#[test]
fn what_cannot_be_held_to_is_refused_by_its_path() {
    let world = held();
    let rollout = world.open();
    let refused = json!({"type": "object", "properties": {"a": {"not": {"type": "string"}}}});
    let format = json!({"type": "json_schema", "name": "x", "schema": refused});
    let mut tool = add(true);
    tool["function"]["parameters"] = refused.clone();
    let chat = |fields: Value| ("/chat/completions", body("x", &fields));
    let user = json!([{"role": "user", "content": "x"}]);
    for ((path, body), param) in [
        (
            chat(json!({"response_format": {"type": "json_schema", "json_schema": format}})),
            "response_format.json_schema.schema",
        ),
        (chat(json!({"guided_json": refused})), "guided_json"),
        (chat(json!({"guided_regex": "("})), "guided_regex"),
        (
            chat(json!({"tools": [tool]})),
            "tools[0].function.parameters",
        ),
        (
            (
                "/responses",
                json!({"model": "m", "input": "x", "text": {"format": format}}),
            ),
            "text.format.schema",
        ),
        (
            (
                "/messages",
                json!({
                    "model": "m", "max_tokens": 9, "messages": user,
                    "output_config": {"format": format},
                }),
            ),
            "output_config.format.schema",
        ),
    ] {
        let told = rollout.post(path, &body);
        assert_eq!(told.status, 400, "{body}: {told:?}");
        assert!(told.error("message").contains(param), "{param}: {told:?}");
        assert!(
            path == "/messages" || told.error("param") == param,
            "{told:?}"
        );
    }
    assert_eq!(world.finish(&rollout.id)["sampled_tokens"], 0);
}

#[test]
fn an_engine_without_masks_refuses_formats() {
    let world = world(says);
    let rollout = world.open();
    let told = rollout.post("/chat/completions", &body("x", &schema_format()));
    assert_eq!(told.status, 400, "{told:?}");
    assert_eq!(told.error("param"), "response_format.json_schema.schema");
    assert_eq!(told.error("code"), "invalid_format");
    // Clients declare tools as strict by default: that has no effect, and is counted.
    let fields = json!({"tools": [add(true)]});
    let told = rollout
        .post("/chat/completions", &body("call", &fields))
        .ok();
    let call = &told["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(call["function"]["name"], "add");
    let ignored = &world.view(&rollout.id)["trace"]["ignored"];
    assert_eq!(*ignored, json!({"tools[].strict": 1}));
}

#[test]
fn parsed_objects_come_out_of_the_providers_clients() {
    let world = held();
    run_client("structured_client.py", &world.open());
}
