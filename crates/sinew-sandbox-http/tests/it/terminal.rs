//! Refused requests of terminals. Sessions are tested with the client.

use crate::{ANN, BOB, server};
use serde_json::json;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminals_have_one_form_and_one_owner() {
    let server = server(|_| ()).await;
    let id = server.create(json!({})).await;
    let size = json!({ "rows": 24, "columns": 80 });
    for body in [
        json!({ "argv": ["/bin/sh"], "terminal": size }),
        json!({ "python": "1", "terminal": size, "stream": true }),
        json!({ "argv": ["/bin/sh"], "terminal": size, "stream": true, "stdin": "x" }),
        json!({ "terminal": size, "stream": true }),
        json!({ "argv": ["/bin/sh"], "terminal": { "rows": 1 }, "stream": true }),
        json!({ "argv": ["/bin/sh"], "terminal": { "rows": -1, "columns": 1 }, "stream": true }),
    ] {
        let answer = server.exec(&id, body.clone()).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (400, "request"),
            "{body}"
        );
    }
    let path = format!("/v1/sandboxes/{id}/terminal");
    let long = "A".repeat(4 * ((64 << 10) / 3 + 2));
    for (token, body, status) in [
        (ANN, json!({}), 400),
        (ANN, json!({ "typed_base64": "?" }), 400),
        (ANN, json!({ "typed_base64": long }), 400),
        (ANN, json!({ "typed_base64": "", "size": size }), 400),
        // Nothing runs on a terminal, and nothing is there for others.
        (ANN, json!({ "typed_base64": "QQ==" }), 404),
        (BOB, json!({ "typed_base64": "QQ==" }), 404),
    ] {
        let answer = server.ask(token, "POST", &path, body).await;
        assert_eq!(
            (answer.status, answer.code() == "not_found"),
            (status, status == 404)
        );
    }
    // None of it has kept the sandbox from the next program.
    let answer = server.exec(&id, json!({ "shell": "echo ok" })).await;
    assert_eq!(answer.json()["stdout"], "ok\n");
}
