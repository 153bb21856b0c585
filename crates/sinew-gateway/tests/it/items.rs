//! Items of responses: their order in a stream, and their meaning in a request.

use crate::support::{Opened, World, world};
use serde_json::{Value, json};

const CALL: &str = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 40}}\n</tool_call>";

/// Thinks, speaks, calls twice and speaks again; then repeats the answer.
fn speaks(prompt: &str) -> Option<String> {
    let last = prompt.rsplit("<|im_start|>").nth(1)?;
    Some(match last.strip_prefix("tool\n") {
        Some(result) => format!("it is {}", result.split("<|im_end|>").next()?),
        None => format!("<think>\nA sum.\n</think>\n\nLet me see.\n{CALL}\n{CALL}\nI wait."),
    })
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    json!([{"type": "function", "name": "add", "parameters": parameters}])
}

fn body(input: &Value) -> Value {
    json!({"model": "m", "input": input, "tools": tools()})
}

/// Names and data of a stream's events.
fn streamed(rollout: &Opened, input: &Value) -> Vec<(String, Value)> {
    let mut body = body(input);
    body["stream"] = json!(true);
    let answer = rollout.post("/responses", &body);
    assert_eq!(answer.status, 200, "{answer:?}");
    let event = |text: &str| {
        let (name, data) = text.split_once('\n')?;
        let name = name.strip_prefix("event: response.")?.to_owned();
        Some((
            name,
            serde_json::from_str(data.strip_prefix("data: ")?).unwrap(),
        ))
    };
    answer.text.split("\n\n").filter_map(event).collect()
}

fn user() -> Value {
    json!({"role": "user", "content": "40 + 2?"})
}

fn results(items: &[Value]) -> Vec<Value> {
    let calls = items.iter().filter(|i| i["type"] == "function_call");
    let result = |call: &Value| json!({"type": "function_call_output", "call_id": call["call_id"], "output": "42"});
    calls.map(result).collect()
}

fn joins(world: &World, rollout: &Opened) -> Value {
    world.view(&rollout.id)["stats"]["joins"].clone()
}

#[test]
fn an_item_is_done_before_the_next_one_is_begun() {
    let world = world(speaks);
    let rollout = world.open();
    let events = streamed(&rollout, &json!([user()]));
    let mut open: Option<u64> = None;
    let mut kinds = Vec::new();
    for (name, data) in &events {
        let index = data["output_index"].as_u64();
        match name.as_str() {
            "output_item.added" => {
                assert_eq!(open, None, "{name}: {data}");
                assert_eq!(index, Some(kinds.len() as u64));
                open = index;
                kinds.push(data["item"]["type"].as_str().unwrap().to_owned());
            }
            "output_item.done" => {
                assert_eq!(open, index, "{name}: {data}");
                open = None;
            }
            _ if index.is_some() => assert_eq!(open, index, "{name}: {data}"),
            _ => {}
        }
    }
    let expected = [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ];
    assert_eq!(kinds, expected);
    let whole = &events.last().unwrap().1["response"];
    let listed = whole["output"].as_array().unwrap();
    assert_eq!(
        listed.iter().map(|i| &i["type"]).collect::<Vec<_>>(),
        expected
    );
    let mut ids: Vec<_> = listed.iter().map(|i| i["id"].to_string()).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), expected.len(), "{ids:?}");
}

/// Three ways in which clients put a streamed answer together: in order, with an additional empty message, by
/// name.
#[test]
fn streamed_items_that_come_back_are_the_turn_that_was_sampled() {
    let in_order = |items: &[Value]| -> Vec<Value> { items.to_vec() };
    let with_empty = |items: &[Value]| -> Vec<Value> {
        let mut items = items.to_vec();
        items.push(json!({"role": "assistant", "content": ""}));
        items
    };
    let named = |items: &[Value]| -> Vec<Value> {
        let name = |i: &Value| json!({"type": "item_reference", "id": i["id"]});
        items.iter().map(name).collect()
    };
    type Send = fn(&[Value]) -> Vec<Value>;
    for send in [in_order as Send, with_empty, named] {
        let world = world(speaks);
        let rollout = world.open();
        let events = streamed(&rollout, &json!([user()]));
        let whole = &events.last().unwrap().1["response"];
        let items = whole["output"].as_array().unwrap();
        let mut input = vec![user()];
        input.extend(send(items));
        input.extend(results(items));
        let told = rollout.post("/responses", &body(&json!(input))).ok();
        assert_eq!(told["output"][0]["content"][0]["text"], "it is 42");
        assert_eq!(joins(&world, &rollout), json!({"start": 1, "extend": 1}));
    }
}

#[test]
fn items_are_found_by_name_in_their_rollout_alone() {
    let world = world(speaks);
    let (one, other) = (world.open(), world.open());
    let told = one.post("/responses", &body(&json!([user()]))).ok();
    let items = told["output"].as_array().unwrap();
    let refer = |id: &Value| json!({"type": "item_reference", "id": id});
    let mut input = vec![user()];
    input.extend(items.iter().map(|i| refer(&i["id"])));
    input.extend(results(items));
    let refused = other.post("/responses", &body(&json!(input)));
    assert_eq!(refused.error("code"), "item_not_found", "{refused:?}");
    assert_eq!(refused.error("param"), "input[1].id");
    let next = one.post("/responses", &body(&json!(input))).ok();
    assert_eq!(next["output"][0]["content"][0]["text"], "it is 42");
    assert_eq!(joins(&world, &one), json!({"start": 1, "extend": 1}));
    // Neither is one that was not to be kept, nor one that there never was.
    let mut unkept = body(&json!([user()]));
    unkept["store"] = json!(false);
    let unkept = one.post("/responses", &unkept).ok();
    for id in [
        unkept["output"][0]["id"].clone(),
        json!("msg_x_0"),
        json!("fc"),
        json!(""),
    ] {
        let refused = one.post("/responses", &body(&json!([user(), refer(&id)])));
        assert_eq!(refused.error("code"), "item_not_found", "{id}: {refused:?}");
    }
}
