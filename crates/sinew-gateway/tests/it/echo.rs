//! Prompts that are repeated with their log-probabilities, by which evaluation harnesses score given answers.

use crate::support::world;
use serde_json::{Value, json};
use sinew_infer::FakeModel;
use sinew_render::Renderer;
use sinew_types::TokenId;

fn says(_: &str) -> Option<String> {
    Some("cd".into())
}

/// The request of `lm-eval`'s `local-completions` for the log-likelihood of given tokens.
fn request(prompt: &Value, max_tokens: u32) -> Value {
    json!({
        "model": "m", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1,
        "seed": 1234, "echo": true,
    })
}

#[test]
fn a_repeated_prompt_has_the_log_probabilities_of_the_engine() {
    let world = world(says);
    let rollout = world.open();
    let ids: Vec<TokenId> = "ab".bytes().map(TokenId::from).collect();
    let told = rollout
        .post("/completions", &request(&json!([ids]), 1))
        .ok();
    let choice = &told["choices"][0];
    assert_eq!(choice["text"], "abc");
    let scored = &choice["logprobs"];
    assert_eq!(scored["tokens"], json!(["a", "b", "c"]));
    assert_eq!(scored["text_offset"], json!([0, 1, 2]));
    let model = FakeModel {
        vocab: world.renderer.vocab_size(),
        seed: 0,
        end: None,
    };
    // Nothing predicts the first token.
    assert_eq!(scored["token_logprobs"][0], Value::Null);
    assert_eq!(scored["top_logprobs"][0], Value::Null);
    let own = model.logprob(&ids[..1], ids[1]);
    assert_eq!(scored["token_logprobs"][1], json!(own));
    let top: Vec<&Value> = scored["top_logprobs"][1]
        .as_object()
        .unwrap()
        .values()
        .collect();
    assert_eq!(top.len(), 1);
    assert!(
        (top[0].as_f64().unwrap() - 0.4f64.ln()).abs() < 1e-5,
        "{scored}"
    );
    // The same prompt as text is the same.
    let text = rollout.post("/completions", &request(&json!("ab"), 1)).ok();
    assert_eq!(
        text["choices"][0]["logprobs"]["token_logprobs"][1],
        json!(own)
    );
}

#[test]
fn without_an_output_nothing_is_captured() {
    let world = world(says);
    let rollout = world.open();
    let told = rollout.post("/completions", &request(&json!("ab"), 0)).ok();
    let choice = &told["choices"][0];
    assert_eq!(
        (&choice["text"], &choice["finish_reason"]),
        (&json!("ab"), &json!("length"))
    );
    assert_eq!(choice["logprobs"]["tokens"], json!(["a", "b"]));
    assert_eq!(told["usage"]["prompt_tokens"], 2);
    assert_eq!(told["usage"]["completion_tokens"], 0);
    let stats = &world.view(&rollout.id)["stats"];
    assert_eq!(
        (&stats["calls"], &stats["sampled_tokens"]),
        (&json!(1), &json!(0))
    );
    // Log-probabilities are not needed to repeat a prompt.
    let body = json!({"model": "m", "prompt": "ab", "echo": true});
    let plain = rollout.post("/completions", &body).ok();
    assert_eq!(plain["choices"][0]["text"], "abcd");
    assert_eq!(plain["choices"][0]["logprobs"], Value::Null);
    assert_eq!(world.finish(&rollout.id)["sampled_tokens"], 3);
}

#[test]
fn a_control_token_at_the_end_has_an_entry() {
    // Harnesses leave out the last entry, which is the one token that was sampled.
    let world = world(|_| Some(String::new()));
    let rollout = world.open();
    let told = rollout.post("/completions", &request(&json!("ab"), 1)).ok();
    let choice = &told["choices"][0];
    assert_eq!(choice["text"], "ab");
    let values = choice["logprobs"]["token_logprobs"].as_array().unwrap();
    assert_eq!(values.len(), 3, "{choice}");
    assert!(values[1].is_number() && values[2].is_number());
}

#[test]
fn each_choice_begins_with_the_prompt() {
    let world = world(says);
    let rollout = world.open();
    let mut body = request(&json!("ab"), 2);
    body["n"] = json!(2);
    let told = rollout.post("/completions", &body).ok();
    for choice in told["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], "abcd");
        assert_eq!(
            choice["logprobs"]["token_logprobs"]
                .as_array()
                .unwrap()
                .len(),
            4
        );
        assert!(
            choice["logprobs"]["token_logprobs"][1].is_number(),
            "{choice}"
        );
    }
}
