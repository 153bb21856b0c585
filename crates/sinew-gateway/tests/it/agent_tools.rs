//! Tools that agents declare in addition to functions: those that they run are functions in the prompt and
//! come back in their own items, those of servers are dropped and counted, and histories of both are read.

use crate::support::{Opened, World, world, world_with};
use serde_json::{Value, json};

/// Calls the tool that the first message of the user names, with its arguments; then repeats the result.
fn calls(prompt: &str) -> Option<String> {
    let last = prompt.rsplit("<|im_start|>").nth(1)?;
    let asked = prompt.split("CALL ").nth(1)?.split(" END").next()?;
    let (name, arguments) = asked.split_once(' ')?;
    let answered = last.starts_with("tool\n") || last.starts_with("system\n");
    Some(if answered {
        "done".into()
    } else {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    })
}

fn joins(world: &World, rollout: &Opened) -> Value {
    world.view(&rollout.id)["stats"]["joins"].clone()
}

/// The prompt of the last call, as the model was given it.
fn prompt(world: &World, rollout: &Opened) -> String {
    let view = world.view(&rollout.id);
    let nodes = view["trace"]["nodes"].as_array().unwrap();
    let ids = nodes.iter().flat_map(|n| n["tokens"].as_array().unwrap());
    let ids: Vec<u32> = ids.map(|id| id.as_u64().unwrap() as u32).collect();
    sinew_render::Renderer::decode_with_special(world.renderer.as_ref(), &ids)
}

fn wide() -> World {
    world_with(calls, |config, fake| {
        config.session.max_context_tokens = 1 << 16;
        fake.context = 1 << 16;
    })
}

/// Data of a stream's events by name.
fn events(text: &str) -> Vec<(String, Value)> {
    let event = |text: &str| {
        let (name, data) = text.split_once('\n')?;
        let data = serde_json::from_str(data.strip_prefix("data: ")?).unwrap();
        Some((name.strip_prefix("event: ")?.to_owned(), data))
    };
    text.split("\n\n").filter_map(event).collect()
}

/// One tool of the Responses API: its declaration, what the model calls, the item of the call without ids,
/// and its output.
struct Row {
    tool: Value,
    called: (&'static str, Value),
    item: Value,
    output: Value,
}

fn rows() -> Vec<Row> {
    let object = json!({"type": "object", "properties": {"target": {"type": "string"}}});
    let function = json!({"type": "function", "name": "close", "parameters": object});
    vec![
        Row {
            tool: json!({"type": "custom", "name": "apply_patch", "description": "Edits files.",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"}}),
            called: ("apply_patch", json!({"input": "*** Begin Patch"})),
            item: json!({"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch"}),
            output: json!({"type": "custom_tool_call_output", "output": "Success"}),
        },
        Row {
            tool: json!({"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [function]}),
            called: ("agents__close", json!({"target": "a"})),
            item: json!({"type": "function_call", "name": "close", "namespace": "agents",
                "arguments": "{\"target\":\"a\"}"}),
            output: json!({"type": "function_call_output", "output": "closed"}),
        },
        Row {
            tool: json!({"type": "local_shell"}),
            called: ("local_shell", json!({"command": ["ls", "-l"]})),
            item: json!({"type": "local_shell_call",
                "action": {"type": "exec", "command": ["ls", "-l"], "env": {}}}),
            output: json!({"type": "local_shell_call_output", "output": "a.txt"}),
        },
        Row {
            tool: json!({"type": "shell", "environment": {"type": "local"}}),
            called: ("shell", json!({"commands": ["ls"]})),
            item: json!({"type": "shell_call", "action": {"commands": ["ls"]}}),
            output: json!({"type": "shell_call_output", "output": [
                {"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 2}}]}),
        },
        Row {
            tool: json!({"type": "apply_patch"}),
            called: ("apply_patch", json!({"type": "delete_file", "path": "a"})),
            item: json!({"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}}),
            output: json!({"type": "apply_patch_call_output", "status": "completed"}),
        },
        Row {
            tool: json!({"type": "computer"}),
            called: (
                "computer",
                json!({"actions": [{"type": "click", "x": 1, "y": 2}]}),
            ),
            item: json!({"type": "computer_call", "actions": [{"type": "click", "x": 1, "y": 2}],
                "pending_safety_checks": []}),
            output: json!({"type": "computer_call_output", "output": {"type": "computer_screenshot",
                "image_url": "data:image/png;base64,AAAA"}}),
        },
        Row {
            tool: json!({"type": "computer_use_preview", "display_width": 800, "display_height": 600,
                "environment": "browser"}),
            called: ("computer_use_preview", json!({"type": "wait"})),
            item: json!({"type": "computer_call", "action": {"type": "wait"}, "pending_safety_checks": []}),
            output: json!({"type": "computer_call_output", "output": {"type": "computer_screenshot",
                "file_id": "f"}}),
        },
        Row {
            tool: json!({"type": "tool_search", "execution": "client", "description": "Finds tools."}),
            called: ("tool_search", json!({"query": "mail"})),
            item: json!({"type": "tool_search_call", "execution": "client", "arguments": {"query": "mail"}}),
            output: json!({"type": "tool_search_output", "execution": "client", "tools": [
                {"type": "function", "name": "send_mail", "defer_loading": true, "parameters": {"type": "object"}}]}),
        },
    ]
}

/// An item without what is different in each answer.
fn bare(item: &Value) -> Value {
    let mut item = item.clone();
    for name in ["id", "call_id", "status"] {
        item.as_object_mut().unwrap().shift_remove(name);
    }
    item
}

#[test]
fn tools_of_agents_come_back_in_their_own_items() {
    for row in rows() {
        let world = wide();
        for stream in [false, true] {
            let rollout = world.open();
            let (name, arguments) = &row.called;
            let ask = json!({"role": "user", "content": format!("CALL {name} {arguments} END")});
            let body = |input: &Value| {
                json!({"model": "m", "input": input, "tools": [row.tool, {"type": "web_search"}],
                    "stream": stream, "store": false})
            };
            let output = |answer: &crate::support::Answer| {
                if stream {
                    let (kind, last) = events(&answer.text).pop().unwrap();
                    assert_eq!(kind, "response.completed", "{name}: {}", answer.text);
                    last["response"]["output"].clone()
                } else {
                    answer.ok()["output"].clone()
                }
            };
            let first = rollout.post("/responses", &body(&json!([ask])));
            let items = output(&first);
            let call = &items[0];
            assert_eq!(bare(call), row.item, "{name}");
            assert!(
                call["call_id"].as_str().unwrap().starts_with("call_"),
                "{call}"
            );
            // Its result, and the call as the client got it.
            let mut result = row.output.clone();
            let id = if result["type"] == "local_shell_call_output" {
                "id"
            } else {
                "call_id"
            };
            result[id] = call["call_id"].clone();
            let second = rollout.post("/responses", &body(&json!([ask, call, result])));
            let said = output(&second);
            assert_eq!(said[0]["content"][0]["text"], "done", "{name}: {said}");
            let expected = json!({"start": 1, "extend": 1});
            assert_eq!(joins(&world, &rollout), expected, "{name}");
            let shown = prompt(&world, &rollout);
            assert!(shown.contains(&format!("\"name\": \"{name}\"")), "{shown}");
            assert!(!shown.contains("web_search"), "{shown}");
            let ignored = &world.finish(&rollout.id)["ignored_fields"];
            assert_eq!(ignored["tools[].type=web_search"], 2, "{ignored}");
        }
    }
}

#[test]
fn text_of_custom_tools_is_streamed_under_its_own_name() {
    let world = wide();
    let rollout = world.open();
    let body = json!({"model": "m", "stream": true, "input": "CALL patch {\"input\": \"x\"} END",
        "tools": [{"type": "custom", "name": "patch"}]});
    let answer = rollout.post("/responses", &body);
    let events = events(&answer.text);
    let of = |kind: &str| {
        events
            .iter()
            .find(|(name, _)| name == kind)
            .map(|(_, data)| data.clone())
    };
    assert_eq!(
        of("response.output_item.added").unwrap()["item"]["input"],
        ""
    );
    assert_eq!(
        of("response.custom_tool_call_input.delta").unwrap()["delta"],
        "x"
    );
    assert_eq!(
        of("response.custom_tool_call_input.done").unwrap()["input"],
        "x"
    );
    assert_eq!(of("response.function_call_arguments.delta"), None);
}

#[test]
fn chat_completions_have_custom_tools_and_allowed_ones() {
    let world = wide();
    let rollout = world.open();
    let tools = json!([
        {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}},
        {"type": "function", "function": {"name": "other"}},
    ]);
    let ask = json!({"role": "user", "content": "CALL patch {\"input\": \"x\"} END"});
    let body = |messages: Value| json!({"model": "m", "messages": messages, "tools": tools});
    let said = rollout.post("/chat/completions", &body(json!([ask]))).ok();
    let message = &said["choices"][0]["message"];
    let call = &message["tool_calls"][0];
    assert_eq!(
        (&call["type"], &call["custom"]),
        (&json!("custom"), &json!({"name": "patch", "input": "x"}))
    );
    let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "ok"});
    rollout
        .post("/chat/completions", &body(json!([ask, message, result])))
        .ok();
    assert_eq!(joins(&world, &rollout), json!({"start": 1, "extend": 1}));
    // The model is shown what it may call.
    let rollout = world.open();
    let mut body = body(json!([ask]));
    body["tool_choice"] = json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto",
        "tools": [{"type": "custom", "custom": {"name": "patch"}}]}});
    rollout.post("/chat/completions", &body).ok();
    let shown = prompt(&world, &rollout);
    assert!(
        shown.contains("\"patch\"") && !shown.contains("\"other\""),
        "{shown}"
    );
    body["tool_choice"]["allowed_tools"]["mode"] = json!("never");
    let refused = rollout.post("/chat/completions", &body);
    assert_eq!(refused.status, 400);
    assert!(
        refused
            .error("message")
            .contains("tool_choice.allowed_tools.mode"),
        "{refused:?}"
    );
}

#[test]
fn the_responses_api_names_allowed_and_chosen_tools_by_type() {
    let world = wide();
    let rollout = world.open();
    let mut body = json!({"model": "m", "input": "CALL shell {\"commands\": []} END",
        "tools": [{"type": "shell"}, {"type": "local_shell"}, {"type": "image_generation"}],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}]}});
    rollout.post("/responses", &body).ok();
    let shown = prompt(&world, &rollout);
    assert!(
        shown.contains("\"shell\"") && !shown.contains("local_shell"),
        "{shown}"
    );
    body["tool_choice"] = json!({"type": "local_shell"});
    rollout.post("/responses", &body).ok();
    // A tool that no agent runs cannot be called.
    body["tool_choice"] = json!({"type": "image_generation"});
    let refused = rollout.post("/responses", &body);
    assert_eq!(refused.status, 400);
    assert!(
        refused.error("message").contains("image_generation"),
        "{refused:?}"
    );
}

#[test]
fn a_strict_gateway_refuses_tools_of_servers_by_their_type() {
    let world = world_with(calls, |config, _| config.strict_fields = true);
    let rollout = world.open();
    let tool = json!({"type": "web_search_20250305", "name": "web_search"});
    let body = json!({"model": "m", "max_tokens": 9, "tools": [tool], "messages": [{"role": "user", "content": "x"}]});
    let refused = rollout.post("/messages", &body);
    assert_eq!(refused.status, 400);
    assert!(
        refused.error("message").contains("web_search_20250305"),
        "{refused:?}"
    );
}

/// A conversation of Anthropic's API in two calls; the second has the result of the first one's call.
fn two_turns(
    world: &World,
    tools: &Value,
    called: (&str, &Value),
    more: &[Value],
) -> (Value, Opened) {
    let rollout = world.open();
    let ask = json!({"role": "user", "content": format!("CALL {} {} END", called.0, called.1)});
    let mut messages = vec![ask];
    let body = |messages: &[Value]| json!({"model": "m", "max_tokens": 999, "tools": tools, "messages": messages});
    let first = rollout.post("/messages", &body(&messages)).ok();
    let block = first["content"][0].clone();
    assert_eq!(block["type"], "tool_use", "{first}");
    messages.push(json!({"role": "assistant", "content": first["content"]}));
    let result = json!({"type": "tool_result", "tool_use_id": block["id"], "content": "ok"});
    messages.push(json!({"role": "user", "content": [result]}));
    messages.extend_from_slice(more);
    let second = rollout.post("/messages", &body(&messages)).ok();
    assert_eq!(second["content"][0]["text"], "done", "{second}");
    assert_eq!(
        joins(world, &rollout),
        json!({"start": 1, "extend": 1}),
        "{}",
        called.0
    );
    (block, rollout)
}

#[test]
fn anthropics_own_tools_are_functions_of_their_names() {
    let world = wide();
    let tools = json!([
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "computer_20251124", "name": "computer", "display_width_px": 10, "display_height_px": 20},
        {"type": "browser_toolset_20260801", "configs": {"zoom": {"enabled": false}}},
        {"type": "web_fetch_20250910", "name": "web_fetch"},
    ]);
    for (name, arguments) in [
        ("bash", json!({"command": "ls"})),
        (
            "str_replace_based_edit_tool",
            json!({"command": "view", "path": "/a"}),
        ),
        ("memory", json!({"command": "view", "path": "/memories"})),
        ("computer", json!({"action": "screenshot"})),
    ] {
        let (block, rollout) = two_turns(&world, &tools, (name, &arguments), &[]);
        assert_eq!(
            (&block["name"], &block["input"]),
            (&json!(name), &arguments)
        );
        let shown = prompt(&world, &rollout);
        assert!(
            shown.contains("10 x 20 pixels") && !shown.contains("web_fetch"),
            "{shown}"
        );
        assert!(!shown.contains("\"zoom\", \"find\""), "{shown}");
    }
    // A member of a set has its own name.
    let arguments = json!({"action": "navigate", "url": "http://a"});
    let (block, _) = two_turns(&world, &tools, ("browser", &arguments), &[]);
    assert_eq!(
        (&block["name"], &block["toolset_name"], &block["input"]),
        (
            &json!("navigate"),
            &json!("browser"),
            &json!({"url": "http://a"})
        )
    );
}

#[test]
fn instructions_come_in_the_middle_and_bring_tools() {
    let world = wide();
    let tools = json!([
        {"name": "f", "input_schema": {"type": "object"}},
        {"name": "later", "description": "Comes later.", "input_schema": {"type": "object"}, "defer_loading": true},
    ]);
    let system = json!({"role": "system", "content": [
        {"type": "text", "text": "Be brief."},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition":
            {"name": "inline", "input_schema": {"type": "object"}}}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
    ]});
    let (_, rollout) = two_turns(&world, &tools, ("f", &json!({})), &[system]);
    let shown = prompt(&world, &rollout);
    let head = shown.split("CALL").next().unwrap();
    assert!(!head.contains("later"), "{head}");
    assert!(shown.contains("<|im_start|>system\nBe brief."), "{shown}");
    for text in ["Comes later.", "\"inline\"", "The tool f cannot be called"] {
        assert!(shown.contains(text), "{text}: {shown}");
    }
}

#[test]
fn a_search_shows_what_it_found() {
    let world = wide();
    let tools = json!([
        {"name": "ToolSearch", "input_schema": {"type": "object"}},
        {"name": "mail", "description": "Sends.", "input_schema": {"type": "object"}, "defer_loading": true},
    ]);
    let rollout = world.open();
    let mut messages =
        vec![json!({"role": "user", "content": "CALL ToolSearch {\"query\": \"mail\"} END"})];
    let body = |messages: &[Value]| json!({"model": "m", "max_tokens": 999, "tools": tools, "messages": messages});
    let first = rollout.post("/messages", &body(&messages)).ok();
    messages.push(json!({"role": "assistant", "content": first["content"]}));
    messages.push(json!({"role": "user", "content": [{"type": "tool_result",
        "tool_use_id": first["content"][0]["id"], "content": [{"type": "tool_reference", "tool_name": "mail"}]}]}));
    rollout.post("/messages", &body(&messages)).ok();
    assert_eq!(joins(&world, &rollout), json!({"start": 1, "extend": 1}));
    let shown = prompt(&world, &rollout);
    assert_eq!(shown.matches("Sends.").count(), 1, "{shown}");
    assert!(shown.find("Sends.") > shown.find("CALL"), "{shown}");
}

#[test]
fn what_other_servers_ran_is_read_as_calls_with_results() {
    let world = wide();
    let rollout = world.open();
    let assistant = json!({"role": "assistant", "content": [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [
            {"type": "web_search_result", "title": "Found", "url": "http://a", "encrypted_content": "zzz"}]},
        {"type": "text", "text": "It is there."},
    ]});
    let messages = json!([{"role": "user", "content": "CALL f {} END"}, assistant, {"role": "user", "content": "Go on."}]);
    let body = json!({"model": "m", "max_tokens": 99, "messages": messages});
    rollout.post("/messages", &body).ok();
    let shown = prompt(&world, &rollout);
    for text in ["\"web_search\"", "Found", "It is there."] {
        assert!(shown.contains(text), "{text}: {shown}");
    }
    assert!(!shown.contains("zzz"), "{shown}");
    // The same in responses.
    let rollout = world.open();
    let input = json!([{"role": "user", "content": "CALL f {} END"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "mcp_call", "id": "m", "server_label": "mail", "name": "read", "arguments": "{}", "output": "Hello"},
        {"type": "compaction", "id": "c", "encrypted_content": "zzz"},
        {"role": "user", "content": "Go on."}]);
    rollout
        .post("/responses", &json!({"model": "m", "input": input}))
        .ok();
    let shown = prompt(&world, &rollout);
    for text in ["\"web_search\"", "\"mail__read\"", "Hello"] {
        assert!(shown.contains(text), "{text}: {shown}");
    }
    let ignored = &world.finish(&rollout.id)["ignored_fields"];
    assert_eq!(ignored["input[].type=compaction"], 1, "{ignored}");
}

#[test]
fn thinking_blocks_are_signed() {
    let world = world(|_| Some("<think>\nhm\n</think>\n\nyes".into()));
    let rollout = world.open();
    let mut body =
        json!({"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "x"}]});
    let said = rollout.post("/messages", &body).ok();
    let signature = said["content"][0]["signature"].as_str().unwrap();
    assert!(!signature.is_empty(), "{said}");
    body["stream"] = json!(true);
    let streamed = rollout.post("/messages", &body);
    let deltas = events(&streamed.text);
    let signed = deltas
        .iter()
        .find(|(_, data)| data["delta"]["type"] == "signature_delta");
    assert_eq!(signed.unwrap().1["delta"]["signature"], signature);
}

#[test]
fn files_and_images_leave_a_note_and_end_no_agent() {
    let world = world(|prompt| {
        Some(
            if prompt.contains("image: this model") {
                "seen"
            } else {
                "not"
            }
            .into(),
        )
    });
    let rollout = world.open();
    let png = json!({"type": "base64", "media_type": "image/png", "data": "AAAA"});
    let pdf = json!({"type": "base64", "media_type": "application/pdf", "data": "AAAA"});
    let content = json!([{"type": "image", "source": png}, {"type": "document", "title": "a.pdf", "source": pdf},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "plain words"}}]);
    let body =
        json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}]});
    let said = rollout.post("/messages", &body).ok();
    assert_eq!(said["content"][0]["text"], "seen");
    let shown = prompt(&world, &rollout);
    assert!(
        shown.contains("[file a.pdf: ") && shown.contains("plain words"),
        "{shown}"
    );
    let ignored = &world.finish(&rollout.id)["ignored_fields"];
    assert_eq!(
        ignored["messages[].content[] of type image"], 1,
        "{ignored}"
    );
    assert_eq!(ignored["messages[].content[].source.data"], 1, "{ignored}");
}
