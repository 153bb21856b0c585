//! Scores of finished rollouts that come later, over HTTP.

use crate::support::{answer, world_with};
use serde_json::json;
use sinew_store::{Score, TraceStore};
use sinew_types::EpisodeId;

fn echo(said: &str) -> Option<String> {
    (!said.is_empty()).then(|| "yes".to_owned())
}

#[test]
fn a_finished_rollout_is_scored_later_and_an_open_one_is_not() {
    let world = world_with(echo, |_, _| {});
    let spec = json!({"external": "ticket 7"});
    let opened = world.control("POST", "/rollouts", &spec).ok();
    let id = opened["id"].as_str().unwrap().to_owned();
    let path = format!("/rollouts/{id}/rewards/thumbs");
    let value = json!({"value": 1, "at": 3.0});
    let early = world.control("PUT", &path, &value);
    assert_eq!(early.status, 409);
    let url = format!("{}/chat/completions", opened["base_url"].as_str().unwrap());
    let key = format!("Bearer {}", opened["api_key"].as_str().unwrap());
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).to_string();
    answer("POST", &url, &[("authorization", &key)], body.as_bytes()).ok();
    assert_eq!(
        world.finish(&id)["reward"],
        json!(null),
        "no score is not 0"
    );
    let put = || world.control("PUT", &path, &value).ok();
    assert_eq!(put(), json!({"id": id, "name": "thumbs", "new": true}));
    assert_eq!(put()["new"], false);
    let scores = world.store.scores(&EpisodeId::new(&id)).unwrap();
    assert_eq!((scores.len(), scores[0].source.as_str()), (1, "api"));
    assert_eq!(scores[0].score, Score::Value(1.0));
    // An episode is found by its outside name, but only with the control token.
    assert_eq!(
        world.store.named("ticket 7", 2).unwrap(),
        [EpisodeId::new(&id)]
    );
    let key = [("authorization", key.as_str())];
    let refused = answer("PUT", &format!("{}{path}", world.url), &key, b"{}");
    assert_eq!(refused.status, 401);
    for (path, body, status) in [
        (path.clone(), json!({"value": "1"}), 400),
        (path.clone(), json!({"value": 1, "name": "other"}), 400),
        (
            "/rollouts/nobody/rewards/thumbs".to_owned(),
            json!({"value": 1}),
            404,
        ),
    ] {
        assert_eq!(world.control("PUT", &path, &body).status, status, "{body}");
    }
    let rows = [
        "{\"external_id\": \"ticket 7\", \"name\": \"solved\", \"value\": null, \"reason\": \"left\"}",
        "{\"episode\": \"nobody\", \"name\": \"solved\", \"value\": 1}",
    ];
    let token = format!("Bearer {}", crate::support::CONTROL);
    let url = format!("{}/rollouts/rewards", world.url);
    let token = [("authorization", token.as_str())];
    let many = answer("POST", &url, &token, rows.join("\n").as_bytes());
    assert_eq!(many.status, 422);
    let told = many.json();
    assert_eq!((&told["new"], &told["refused"]), (&json!(1), &json!(1)));
    assert_eq!(told["bad"][0]["line"], 2);
    assert_eq!(
        answer("POST", &url, &token, rows[0].as_bytes()).ok()["known"],
        1
    );
}
