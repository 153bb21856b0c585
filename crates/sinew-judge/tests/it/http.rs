//! Judges at servers: the protocol, and servers that fail in every way.

use crate::support::{config, read_question, sample, serve};
use serde_json::{Value, json};
use sinew_env::{Reward, Score, Unscored};
use sinew_judge::{AnswerFormat, BudgetEnd, Judge, Ledger, Mode, OpenAiChat, OpenAiConfig};
use std::sync::Arc;
use std::time::Duration;

async fn judged(url: &str, timeout: Duration, retries: u32) -> Result<Score, Unscored> {
    let model = OpenAiChat::new(OpenAiConfig {
        url: format!("{url}/v1"),
        key: Some("secret".into()),
        model: "m".into(),
        format: AnswerFormat::JsonSchema,
        timeout,
    });
    let mut config = config(Mode::Each);
    config.retries = retries;
    let model = Arc::new(model.unwrap());
    let judge = Judge::new(config, model, Ledger::in_memory(), BudgetEnd::Unscored);
    judge.score(&sample("x")).await
}

/// A completion with the verdict `met` for both items.
fn completion(body: &Value, met: bool) -> String {
    let said = body["messages"][1]["content"].as_str().unwrap();
    let (id, _) = read_question(said);
    let verdict = json!({"id": id, "item_1": met, "item_2": met}).to_string();
    json!({"choices": [{"message": {"content": verdict}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 7}})
    .to_string()
}

#[tokio::test]
async fn a_server_judges_with_the_key_and_the_schema() {
    let url = serve(|_, seen| {
        let schema = &seen.body["response_format"]["json_schema"]["schema"];
        let good = seen.path == "/v1/chat/completions"
            && seen.authorization == "Bearer secret"
            && schema["required"] == json!(["id", "item_1", "item_2"]);
        (200, completion(&seen.body, good))
    });
    assert_eq!(
        judged(&url, Duration::from_secs(20), 0)
            .await
            .unwrap()
            .value,
        1.0
    );
}

#[tokio::test]
async fn a_server_that_recovers_is_asked_again() {
    let url = serve(|call, seen| match call {
        0 => (503, "busy".into()),
        _ => (200, completion(&seen.body, true)),
    });
    assert!(judged(&url, Duration::from_secs(20), 1).await.is_ok());
}

#[tokio::test]
async fn every_failure_is_a_missing_score_with_its_cause() {
    let limit = Duration::from_secs(20);
    let reason = |r: Result<Score, Unscored>| r.unwrap_err().reason;
    let fails = |status: u16, body: &str| {
        let body = body.to_owned();
        serve(move |_, _| (status, body.clone()))
    };
    let why = reason(judged(&fails(500, "oh"), limit, 0).await);
    assert!(why.contains("status 500: oh"), "{why}");
    let why = reason(judged(&fails(401, "no\u{1b}[31m such key"), limit, 5).await);
    assert!(why.contains("status 401: no [31m such key"), "{why}");
    let why = reason(judged(&fails(200, "<html>"), limit, 0).await);
    assert!(why.contains("no JSON"), "{why}");
    let why = reason(judged(&fails(200, "{}"), limit, 0).await);
    assert!(why.contains("choices[0]"), "{why}");
    let long = format!("\"{}\"", "x".repeat(5 << 20));
    let why = reason(judged(&fails(200, &long), limit, 0).await);
    assert!(why.contains("4 MiB"), "{why}");
    let cut = json!({"choices": [{"message": {"content": "{\"id\""}, "finish_reason": "length"}]});
    let why = reason(judged(&fails(200, &cut.to_string()), limit, 0).await);
    assert!(why.contains("max_tokens = 64"), "{why}");
    let why = reason(judged("http://127.0.0.1:1", limit, 0).await);
    assert!(why.contains("127.0.0.1:1"), "{why}");
    let hangs = serve(|_, _| {
        std::thread::sleep(Duration::from_secs(30));
        (200, String::new())
    });
    let why = reason(judged(&hangs, Duration::from_secs(1), 0).await);
    assert!(why.contains("no answer within 1 s"), "{why}");
}
