use super::*;
use crate::dialect::{Choice, Delta, TurnEnd, Usage};
use sinew_render::Piece;
use sinew_types::{SampledToken, ToolCall};
use std::sync::Arc;

fn dialect(form: AnswerForm) -> GenerateContent {
    GenerateContent {
        model: "m".into(),
        form,
    }
}

fn read(body: &Value) -> Result<ModelRequest, ApiError> {
    dialect(AnswerForm::Whole).parse(body.to_string().as_bytes(), &Notes::new(false))
}

fn messages(body: &Value) -> Vec<Message> {
    match read(body).unwrap().prompt {
        Prompt::Messages(messages) => messages,
        other => panic!("{other:?}"),
    }
}

fn context(request: ModelRequest) -> AnswerContext {
    AnswerContext {
        id: "r-1".into(),
        created_s: 0,
        request: Arc::new(request),
        renderer: Arc::new(sinew_render::byte_renderer().unwrap()),
        prompt_ids: Vec::new(),
    }
}

fn user(text: &str) -> Value {
    json!({"role": "user", "parts": [{"text": text}]})
}

/// A turn with reasoning and two calls, as the model sampled it.
fn turn() -> Message {
    let call = |id: &str, x: i32| ToolCall {
        id: id.into(),
        name: "f".into(),
        arguments: json!({"x": x}),
    };
    Message {
        reasoning: Some("A sum.".into()),
        tool_calls: vec![call("call_0", 1), call("call_1", 2)],
        ..Message::new(Role::Assistant, "Let me see.")
    }
}

fn response(message: Message) -> ModelResponse {
    ModelResponse {
        choices: vec![Choice {
            text: String::new(),
            end: TurnEnd::ToolCalls,
            tokens: Vec::new(),
            message,
        }],
        prompt: Vec::new(),
        usage: Usage {
            prompt_tokens: 9,
            cached_tokens: 4,
            completion_tokens: 30,
        },
    }
}

#[test]
fn a_path_names_model_form_and_method() {
    let of = |path, query| Call::of(path, query).unwrap();
    let generate = |model: &str, form| {
        Call::Generate(GenerateContent {
            model: model.into(),
            form,
        })
    };
    for (path, query, expected) in [
        ("m:generateContent", None, generate("m", AnswerForm::Whole)),
        (
            "a/b:7b:streamGenerateContent",
            Some("key=k&alt=sse"),
            generate("a/b:7b", AnswerForm::Events),
        ),
        (
            "m:streamGenerateContent",
            Some("alt=json"),
            generate("m", AnswerForm::Array),
        ),
        ("m:countTokens", None, Call::CountTokens),
    ] {
        assert_eq!(of(path, query), expected, "{path}");
    }
    for path in ["m", "m:embedContent", ""] {
        assert_eq!(Call::of(path, None).unwrap_err().status, 404, "{path}");
    }
}

#[test]
fn contents_become_messages() {
    let body = json!({
        "systemInstruction": {"parts": [{"text": "Be"}, {"text": "brief."}]},
        "contents": [
            {"parts": [{"text": "a"}, {"text": "b"}]},
            {"role": "model", "parts": [{"text": "why", "thought": true}, {"text": "I "}]},
            {"role": "model", "parts": [{"text": "see."}, {"functionCall": {"name": "f", "args": {"x": 1}}}]},
            {"role": "user", "parts": [
                {"function_response": {"name": "f", "response": {"output": "4"}}},
                {"functionResponse": {"id": "f__c1", "name": "f", "response": {"error": "no"}}},
                {"text": "go on"},
            ]},
        ],
    });
    let said = messages(&body);
    let roles: Vec<Role> = said.iter().map(|m| m.role).collect();
    use Role::{Assistant, System, Tool, User};
    assert_eq!(roles, [System, User, Assistant, Tool, Tool, User]);
    assert_eq!(said[0].content.text(), "Be\nbrief.");
    assert_eq!(said[1].content.text(), "a\nb");
    assert_eq!(said[2].content.text(), "I see.");
    assert_eq!(said[2].reasoning.as_deref(), Some("why"));
    assert_eq!(said[2].tool_calls[0].id, "f");
    assert_eq!(said[3].tool_call_id.as_deref(), Some("f"));
    assert_eq!(said[3].content.text(), "4");
    assert_eq!(said[4].tool_call_id.as_deref(), Some("c1"));
    assert_eq!(said[4].content.text(), "Error: no");
    assert_eq!(read(&body).unwrap().head, 1);
    let server = json!({"contents": [
        user("x"),
        {"role": "model", "parts": [
            {"executableCode": {"language": "PYTHON", "code": "1"}},
            {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1\n"}},
            {"text": "One."},
        ]},
        user("y"),
    ]});
    let said = messages(&server);
    let roles: Vec<Role> = said.iter().map(|m| m.role).collect();
    assert_eq!(roles, [User, Assistant, Tool, Assistant, User]);
}

#[test]
fn what_was_answered_is_read_as_what_was_sampled() {
    for shown in [false, true] {
        let body = json!({
            "contents": [user("x")],
            "generationConfig": {"thinkingConfig": {"includeThoughts": shown}},
        });
        let context = context(read(&body).unwrap());
        let answer = dialect(AnswerForm::Whole).response(&context, &response(turn()));
        let content = answer["candidates"][0]["content"].clone();
        assert_eq!(
            content["parts"][0]["thought"] == json!(true),
            shown,
            "{answer}"
        );
        let mut dropped = content.clone();
        let parts = dropped["parts"].as_array_mut().unwrap();
        parts.retain(|part| part["thought"] != json!(true));
        for content in [content, dropped] {
            let said = messages(&json!({"contents": [user("x"), content, user("y")]}));
            assert_eq!(said[1], turn(), "{content}");
        }
    }
}

#[test]
fn golden_answer() {
    let context = context(read(&json!({"contents": [user("x")]})).unwrap());
    let answer = dialect(AnswerForm::Whole).response(&context, &response(turn()));
    let signature = signature::write("A sum.");
    assert_eq!(
        answer,
        json!({
            "candidates": [{
                "content": {"role": "model", "parts": [
                    {"text": "Let me see."},
                    {"functionCall": {"id": "call_0", "name": "f", "args": {"x": 1}},
                     "thoughtSignature": signature},
                    {"functionCall": {"id": "call_1", "name": "f", "args": {"x": 2}}},
                ]},
                "index": 0,
                "finishReason": "STOP",
            }],
            "modelVersion": "m",
            "responseId": "r-1",
            "usageMetadata": {
                "promptTokenCount": 9, "candidatesTokenCount": 24, "totalTokenCount": 39,
                "thoughtsTokenCount": 6, "cachedContentTokenCount": 4,
            },
        })
    );
}

/// The deltas of the turn, one piece in each.
fn deltas() -> Vec<Delta> {
    let said = turn();
    let pieces = [
        Piece::Reasoning("A ".into()),
        Piece::Reasoning("sum.".into()),
        Piece::Text("Let me ".into()),
        Piece::Text("see.".into()),
    ];
    let calls = said.tool_calls.into_iter().map(Piece::Call);
    let mut deltas: Vec<Delta> = pieces
        .into_iter()
        .chain(calls)
        .map(|piece| Delta {
            pieces: vec![piece],
            ..Delta::default()
        })
        .collect();
    deltas.push(Delta {
        end: Some(TurnEnd::ToolCalls),
        ..Delta::default()
    });
    deltas
}

/// The stream of the turn, with a ping after each item if `pings`.
fn streamed(form: AnswerForm, pings: bool) -> String {
    let context = context(read(&json!({"contents": [user("x")]})).unwrap());
    let mut writer = dialect(form).stream(context);
    let mut out = writer.begin();
    for delta in deltas() {
        out.push_str(&writer.delta(&delta));
        if pings {
            out.push_str(&writer.ping());
        }
    }
    out + &writer.end(&response(turn()))
}

/// The objects of a stream of events.
fn events(text: &str) -> Vec<Value> {
    text.split("\n\n")
        .filter(|event| !event.is_empty())
        .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
        .collect()
}

#[test]
fn golden_stream() {
    let text = streamed(AnswerForm::Events, false);
    let said = events(&text);
    // Reasoning that was not asked for is only in the signature.
    assert_eq!(said.len(), 5, "{text}");
    assert_eq!(
        said[0],
        json!({
            "candidates": [{"content": {"role": "model", "parts": [{"text": "Let me "}]}, "index": 0}],
            "modelVersion": "m", "responseId": "r-1",
        })
    );
    let part = |event: &Value| event["candidates"][0]["content"]["parts"][0].clone();
    assert_eq!(
        part(&said[2])["thoughtSignature"],
        signature::write("A sum.")
    );
    assert_eq!(part(&said[3]).get("thoughtSignature"), None);
    let last = &said[4]["candidates"][0];
    assert_eq!(last["finishReason"], "STOP");
    assert_eq!(said[4]["usageMetadata"]["candidatesTokenCount"], 24);
    // Without `alt=sse` the same objects are the items of one array.
    for pings in [false, true] {
        let array = streamed(AnswerForm::Array, pings);
        let array: Vec<Value> = serde_json::from_str(&array).unwrap();
        assert_eq!(array, said);
    }
}

/// A client keeps each chunk apart, and sends all of them back.
#[test]
fn chunks_that_come_back_are_the_sampled_turn() {
    for pings in [false, true] {
        let text = streamed(AnswerForm::Events, pings);
        let mut contents = vec![user("x")];
        let content = |event: &Value| event["candidates"][0]["content"].clone();
        contents.extend(events(&text).iter().map(content));
        contents.push(user("y"));
        let said = messages(&json!({"contents": contents}));
        assert_eq!((said.len(), &said[1]), (3, &turn()), "{text}");
    }
}

#[test]
fn a_failed_stream_ends_with_an_error_that_clients_see() {
    let error = ApiError::deadline("too late");
    for (form, begun) in [
        (AnswerForm::Events, false),
        (AnswerForm::Array, false),
        (AnswerForm::Array, true),
    ] {
        let context = context(read(&json!({"contents": [user("x")]})).unwrap());
        let mut writer = dialect(form).stream(context);
        let mut out = String::new();
        if begun {
            out.push_str(&writer.delta(&deltas()[2]));
        }
        out.push_str(&writer.error(&error));
        let value: Value = serde_json::from_str(&out).unwrap();
        let last = match &value {
            Value::Array(items) => items[items.len() - 1].clone(),
            object => object.clone(),
        };
        assert_eq!(last["error"]["code"], 504, "{out}");
        assert_eq!(last["error"]["status"], "DEADLINE_EXCEEDED");
        assert!(last.to_string().starts_with("{\"error\":"), "{last}");
    }
}

#[test]
fn settings_are_read() {
    let body = json!({
        "contents": [user("x")],
        "tools": [{"functionDeclarations": [
            {"name": "f", "description": "adds", "parameters": {"type": "OBJECT", "properties": {
                "x": {"type": "INTEGER"}}}},
            {"name": "g", "parametersJsonSchema": {"type": "object"}},
        ]}, {"googleSearch": {}}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generation_config": {
            "temperature": 0.5, "top_p": 0.9, "topK": 40.0, "maxOutputTokens": 7, "seed": 3,
            "stopSequences": ["a"], "candidateCount": 2, "responseLogprobs": true, "logprobs": 2,
            "responseMimeType": "application/json", "responseSchema": {"type": "STRING"},
            "thinkingConfig": {"thinkingBudget": -1, "thinkingLevel": "low"},
        },
        "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        "labels": {"a": "b"},
    });
    let request = read(&body).unwrap();
    let sampling = &request.sampling;
    assert_eq!(sampling.temperature, Some(0.5));
    assert_eq!(sampling.top_p, Some(0.9));
    assert_eq!(sampling.top_k, Some(40));
    assert_eq!(sampling.max_tokens, Some(7));
    assert_eq!(sampling.seed, Some(3));
    assert_eq!(sampling.stop, ["a"]);
    assert_eq!((request.n, request.logprobs), (2, Some(2)));
    assert_eq!(request.tool_choice, ToolChoice::Required);
    let tools: Vec<&str> = request.tools.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(tools, ["f"]);
    assert_eq!(
        request.tools[0].parameters["properties"]["x"]["type"],
        "integer"
    );
    let schema = "tools[0].functionDeclarations[0].parameters".to_owned();
    assert_eq!(request.strict_tools, [("f".to_owned(), schema)]);
    let format = request.format.unwrap();
    assert_eq!(format.path, "generationConfig.responseSchema");
    let ignored: Vec<&str> = request.ignored.keys().map(String::as_str).collect();
    assert_eq!(
        ignored,
        [
            "generationConfig.thinkingConfig.thinkingLevel",
            "safetySettings",
            "tools[].type=googleSearch",
        ]
    );
}

/// Requests that are wrong, and the field that is named.
fn wrong_requests() -> Vec<(Value, &'static str)> {
    let with = |field: &str, value: Value| {
        let mut body = json!({"contents": [user("x")]});
        body[field] = value;
        body
    };
    let config = |value: Value| with("generationConfig", value);
    vec![
        (json!({}), "contents"),
        (with("contents", json!([])), "contents"),
        (with("contents", json!("x")), "contents"),
        (
            with(
                "contents",
                json!([user("x"), {"role": "model", "parts": [{"text": "y"}]}]),
            ),
            "contents",
        ),
        (
            with("contents", json!([{"role": "system", "parts": []}])),
            "contents[0].role",
        ),
        (
            with("contents", json!([{"parts": [{"x": 1}]}])),
            "contents[0].parts[0]",
        ),
        (with("cachedContent", json!("c")), "cachedContent"),
        (
            config(json!({"temperature": 3})),
            "generationConfig.temperature",
        ),
        (
            config(json!({"maxOutputTokens": 0})),
            "generationConfig.maxOutputTokens",
        ),
        (
            config(json!({"presencePenalty": 1})),
            "generationConfig.presencePenalty",
        ),
        (config(json!({"logprobs": 2})), "generationConfig.logprobs"),
        (
            config(json!({"responseModalities": ["IMAGE"]})),
            "generationConfig.responseModalities[0]",
        ),
        (
            config(json!({"responseMimeType": "text/html"})),
            "generationConfig.responseMimeType",
        ),
        (
            config(json!({"stopSequences": [""]})),
            "generationConfig.stopSequences",
        ),
        (
            with(
                "toolConfig",
                json!({"functionCallingConfig": {"mode": "SOMETIMES"}}),
            ),
            "toolConfig.functionCallingConfig.mode",
        ),
        (
            with(
                "toolConfig",
                json!({"functionCallingConfig": {"mode": "ANY"}}),
            ),
            "toolConfig.functionCallingConfig",
        ),
    ]
}

#[test]
fn wrong_requests_are_refused_by_name() {
    for (body, param) in wrong_requests() {
        let error = read(&body).unwrap_err();
        assert_eq!(
            (error.status, error.param.as_deref()),
            (400, Some(param)),
            "{body}: {error}"
        );
        let value = error_value(&error);
        assert_eq!(value["error"]["status"], "INVALID_ARGUMENT");
        assert_eq!(
            value["error"]["details"][1]["fieldViolations"][0]["field"],
            param
        );
    }
}

#[test]
fn log_probabilities_have_ids_and_alternatives() {
    let request = read(&json!({
        "contents": [user("x")], "generationConfig": {"responseLogprobs": true},
    }));
    let context = context(request.unwrap());
    let mut answer = response(Message::new(Role::Assistant, "a"));
    answer.choices[0].tokens = vec![SampledToken {
        id: 97,
        logprob: -0.5,
        version: sinew_types::PolicyVersion(1),
        top: Vec::new(),
        choice: None,
    }];
    let value = dialect(AnswerForm::Whole).response(&context, &answer);
    let candidate = &value["candidates"][0];
    assert_eq!(candidate["avgLogprobs"], -0.5);
    assert_eq!(
        candidate["logprobsResult"]["chosenCandidates"],
        json!([{"token": "a", "tokenId": 97, "logProbability": -0.5}])
    );
}

#[test]
fn tokens_are_counted_for_contents_and_for_whole_requests() {
    let contents = json!([user("x")]);
    for body in [
        json!({"contents": contents}),
        json!({"generateContentRequest": {"model": "models/m", "contents": contents,
               "generationConfig": {"temperature": 1}}}),
    ] {
        let request = parse_count(body.to_string().as_bytes(), true).unwrap();
        assert!(
            matches!(request.prompt, Prompt::Messages(m) if m.len() == 1),
            "{body}"
        );
    }
}
