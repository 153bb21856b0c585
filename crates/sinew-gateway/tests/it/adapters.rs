//! Adapters by name: the control API, rollouts, and clients with the fixed key.

use crate::support::{Answer, CONTROL, Opened, World, answer, world_in, world_with};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use sinew_gateway::{GatewayConfig, Secret};
use sinew_infer::FakeConfig;
use sinew_render::Renderer;
use sinew_types::{GenerateRequest, TokenId};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const API_KEY: &str = "fixed-key";

/// Writes an adapter as PEFT does.
fn write_adapter(dir: &Path) {
    let bytes = [0; 4 * 8];
    let named = [("A", vec![2, 4]), ("B", vec![4, 2])].map(|(part, shape)| {
        let name = format!("base_model.model.model.layers.0.mlp.up_proj.lora_{part}.weight");
        (name, TensorView::new(Dtype::F32, shape, &bytes).unwrap())
    });
    std::fs::create_dir_all(dir).unwrap();
    let path = dir.join("adapter_model.safetensors");
    safetensors::serialize_to_file(named, None, &path).unwrap();
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4});
    std::fs::write(dir.join("adapter_config.json"), config.to_string()).unwrap();
}

/// Configures an engine that answers with the name of the request's adapter, and a fixed key.
fn named(config: &mut GatewayConfig, fake: &mut FakeConfig) {
    config.api_key = Some(Secret::new(API_KEY));
    let stop = sinew_render::byte_renderer().unwrap().stop_ids()[0];
    fake.script = Some(Arc::new(move |request: &GenerateRequest| {
        let adapter = request.adapter.as_ref();
        let text = adapter.map_or("base", |name| name.as_str());
        let ids = text.bytes().map(TokenId::from);
        Some(ids.chain([stop]).collect())
    }));
}

fn unscripted(_: &str) -> Option<String> {
    None
}

/// A gateway with such an engine and the adapters `a` and `b`, in the order of their versions.
struct Served {
    world: World,
    folder: PathBuf,
    _dir: tempfile::TempDir,
}

fn served() -> Served {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("adapter");
    write_adapter(&folder);
    let served = Served {
        world: world_with(unscripted, named),
        folder,
        _dir: dir,
    };
    served.put("a").ok();
    served.put("b").ok();
    served
}

impl Served {
    fn put(&self, name: &str) -> Answer {
        let path = format!("/adapters/{name}");
        let body = json!({"folder": self.folder});
        self.world.control("PUT", &path, &body)
    }
}

fn open(world: &World, spec: &Value) -> Opened {
    let opened = world.control("POST", "/rollouts", spec).ok();
    Opened {
        id: opened["id"].as_str().unwrap().to_owned(),
        base_url: opened["base_url"].as_str().unwrap().to_owned(),
        key: format!("Bearer {}", opened["api_key"].as_str().unwrap()),
    }
}

fn body(model: &str, text: &str) -> Value {
    json!({"model": model, "messages": [{"role": "user", "content": text}]})
}

fn said(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

/// A request of a client with the fixed key.
fn plain(world: &World, method: &str, path: &str, body: &Value) -> Answer {
    let key = format!("Bearer {API_KEY}");
    let url = format!("{}{path}", world.url);
    let headers = [("authorization", key.as_str())];
    answer(method, &url, &headers, body.to_string().as_bytes())
}

fn ids(models: &Value) -> Vec<&str> {
    let list = models["data"].as_array().unwrap().iter();
    list.map(|model| model["id"].as_str().unwrap()).collect()
}

#[test]
fn a_rollout_uses_its_adapter_and_no_other() {
    let served = served();
    let world = &served.world;
    let rollout = open(world, &json!({"adapter": "b", "purpose": "try"}));
    for model in ["gpt-x", "b", "policy"] {
        let answer = rollout.post("/chat/completions", &body(model, model)).ok();
        assert_eq!((said(&answer), &answer["model"]), ("b", &json!(model)));
    }
    let other = rollout.post("/chat/completions", &body("a", "x"));
    assert_eq!(
        (other.status, other.error("param").as_str()),
        (400, "model")
    );
    let get = |path: &str| {
        let url = format!("{}{path}", rollout.base_url);
        answer("GET", &url, &[("authorization", &rollout.key)], b"")
    };
    assert_eq!(ids(&get("/models").ok()), ["b"]);
    assert_eq!(get("/models/a").status, 400);
    get("/models/b").ok();
    let live = world.control("GET", "/rollouts", &Value::Null).ok();
    assert_eq!(live["rollouts"][0]["adapter"], "b");
    let view = world.view(&rollout.id);
    assert_eq!(view["trace"]["provenance"]["adapter"], "b");
    world.finish(&rollout.id);
    let trace = world.view(&rollout.id)["trace"].clone();
    assert_eq!(trace["provenance"]["adapter"], "b");
    let nodes = trace["nodes"].as_array().unwrap().iter();
    let spans = nodes.filter_map(|node| node["versions"].as_array());
    let versions: Vec<_> = spans
        .flatten()
        .map(|span| span["version"].clone())
        .collect();
    assert_eq!(versions, [json!(2), json!(2), json!(2)]);
    let base = open(world, &json!({}));
    let answer = base.post("/chat/completions", &body("gpt-x", "x")).ok();
    assert_eq!(said(&answer), "base");
    assert_eq!(base.post("/chat/completions", &body("a", "x")).status, 400);
    let trace = world.view(&base.id)["trace"].clone();
    assert!(trace["provenance"].get("adapter").is_none());
    let unknown = world.control("POST", "/rollouts", &json!({"adapter": "c"}));
    assert_eq!(
        (unknown.status, unknown.error("param").as_str()),
        (400, "adapter")
    );
    assert!(
        unknown.error("message").ends_with("allowed: a, b"),
        "{unknown:?}"
    );
    let name = world.control("POST", "/rollouts", &json!({"adapter": "a/b"}));
    assert!(name.error("message").contains("is not allowed"), "{name:?}");
}

#[test]
fn the_fixed_key_chooses_by_the_name_of_the_model() {
    let served = served();
    let world = &served.world;
    let chat = |model: &str, messages: &Value| {
        let body = json!({"model": model, "messages": messages});
        plain(world, "POST", "/v1/chat/completions", &body)
    };
    let user = |text: &str| json!({"role": "user", "content": text});
    for (model, text) in [("a", "a"), ("policy", "base"), ("b", "b"), ("", "base")] {
        assert_eq!(said(&chat(model, &json!([user("hi")])).ok()), text);
    }
    let models = plain(world, "GET", "/v1/models", &Value::Null).ok();
    assert_eq!(ids(&models), ["policy", "a", "b"]);
    plain(world, "GET", "/v1/models/a", &Value::Null).ok();
    let unknown = chat("gpt-x", &json!([user("hi")]));
    assert_eq!(
        (unknown.status, unknown.error("code").as_str()),
        (404, "model_not_found")
    );
    assert_eq!(
        plain(world, "GET", "/v1/models/c", &Value::Null).status,
        404
    );
    // The same words with another adapter are another conversation.
    let opened = world.gateway.stats().opened;
    let messages = |answer: &str| {
        let turn = json!({"role": "assistant", "content": answer});
        json!([user("hi"), turn, user("more")])
    };
    assert_eq!(said(&chat("a", &messages("a")).ok()), "a");
    assert_eq!(world.gateway.stats().opened, opened);
    assert_eq!(said(&chat("b", &messages("a")).ok()), "b");
    assert_eq!(world.gateway.stats().opened, opened);
    let responses = |model: &str, previous: &Value| {
        let body = json!({"model": model, "input": "go on", "previous_response_id": previous});
        plain(world, "POST", "/v1/responses", &body)
    };
    let first = responses("a", &Value::Null).ok();
    responses("a", &first["id"]).ok();
    for model in ["b", "policy"] {
        let other = responses(model, &first["id"]);
        assert_eq!(
            (other.status, other.error("param").as_str()),
            (400, "model")
        );
    }
}

#[test]
fn adapters_are_replaced_listed_and_dropped() {
    let served = served();
    let world = &served.world;
    let listed = || world.control("GET", "/adapters", &Value::Null).ok();
    let loaded = served.put("a").ok();
    assert_eq!(
        (&loaded["version"], &loaded["rank"]),
        (&json!(3), &json!(2))
    );
    assert_eq!(loaded["folder"], json!(served.folder));
    let names: Vec<_> = (0..2)
        .map(|i| listed()["adapters"][i]["name"].clone())
        .collect();
    assert_eq!(names, [json!("a"), json!("b")]);
    let rollout = open(world, &json!({"adapter": "a"}));
    let ask = || rollout.post("/chat/completions", &body("m", "x"));
    ask().ok();
    world.control("DELETE", "/adapters/a", &Value::Null).ok();
    assert_eq!(listed()["adapters"].as_array().unwrap().len(), 1);
    let gone = ask();
    assert_eq!(
        (gone.status, gone.error("code").as_str()),
        (404, "unknown_adapter")
    );
    assert_eq!(
        world.control("DELETE", "/adapters/a", &Value::Null).status,
        404
    );
    served.put("a").ok();
    ask().ok();
    let put = |name: &str, body: &Value| world.control("PUT", &format!("/adapters/{name}"), body);
    let folder = json!(served.folder);
    for (name, body, part) in [
        ("a%20b", json!({"folder": folder}), "is not allowed"),
        ("policy", json!({"folder": folder}), "choose another"),
        ("c", json!({"folder": "relative"}), "absolute path"),
        ("c", json!({"folder": "/nowhere"}), "/nowhere"),
        ("c", json!({}), "folder"),
        ("c", json!({"folder": folder, "versions": 1}), "versions"),
        ("c", json!({"folder": folder, "version": -1}), "version"),
    ] {
        let refused = put(name, &body);
        assert_eq!(refused.status, 400, "{refused:?}");
        assert!(refused.error("message").contains(part), "{refused:?}");
    }
    let version = put("c", &json!({"folder": folder, "version": 40})).ok();
    assert_eq!(version["version"], 40);
    assert_eq!(plain(world, "GET", "/adapters", &Value::Null).status, 401);
}

/// A form with the files of a folder, and its type.
fn form(folder: &Path) -> (&'static str, Vec<u8>) {
    let mut form = Vec::new();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        let head = format!(
            "--xyz\r\nContent-Disposition: form-data; name=\"files\"; filename=\"{name}\"\r\n\
             Content-Type: application/octet-stream\r\n\r\n"
        );
        form.extend_from_slice(head.as_bytes());
        form.extend(std::fs::read(folder.join(name)).unwrap());
        form.extend_from_slice(b"\r\n");
    }
    form.extend_from_slice(b"--xyz--\r\n");
    ("multipart/form-data; boundary=xyz", form)
}

#[test]
fn uploads_outlive_the_gateway() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, kept) = (dir.path().join("adapter"), dir.path().join("kept"));
    write_adapter(&folder);
    let journal = dir.path().join("journal");
    let start = || {
        let change = |config: &mut GatewayConfig, fake: &mut FakeConfig| {
            named(config, fake);
            config.adapter_dir = Some(kept.clone());
            config.server.max_adapter_bytes = 4096;
        };
        world_in(unscripted, change, Some(&journal))
    };
    let upload = |world: &World, (kind, form): (&str, Vec<u8>)| {
        let key = format!("Bearer {CONTROL}");
        let headers = [("authorization", key.as_str()), ("content-type", kind)];
        answer("PUT", &format!("{}/adapters/a", world.url), &headers, &form)
    };
    let before = start();
    let loaded = upload(&before, form(&folder)).ok();
    assert_eq!(loaded["version"], 1);
    assert_eq!(loaded["folder"], json!(kept.join("a/v1")));
    let refused = upload(&before, ("multipart/form-data", Vec::new()));
    assert_eq!(
        (refused.status, refused.error("code").as_str()),
        (400, "invalid_form")
    );
    let large = dir.path().join("large");
    write_adapter(&large);
    std::fs::write(large.join("adapter_model.safetensors"), [0; 5000]).unwrap();
    let refused = upload(&before, form(&large));
    assert_eq!(refused.error("code"), "adapter_refused");
    assert!(
        refused.error("message").contains("allowed are 4096"),
        "{refused:?}"
    );
    let rollout = open(&before, &json!({"adapter": "a"}));
    rollout.post("/chat/completions", &body("m", "x")).ok();
    drop(before);
    let after = start();
    let url = format!("{}/r/{}/v1/chat/completions", after.url, rollout.id);
    let ask = || {
        let headers = [("authorization", rollout.key.as_str())];
        answer(
            "POST",
            &url,
            &headers,
            body("m", "y").to_string().as_bytes(),
        )
    };
    // Journal and engine are separate: the engine has no adapter until it is loaded.
    assert_eq!(ask().error("code"), "unknown_adapter");
    assert_eq!(after.gateway.adapters().restore().unwrap(), 1);
    assert_eq!(said(&ask().ok()), "a");
}
