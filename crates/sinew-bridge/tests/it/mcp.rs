//! Tools of MCP servers: a server without packages, and one of the official Python SDK.

use crate::support::{call, calls, folder, task};
use serde_json::{Value, json};
use sinew_bridge::{Mcp, McpEnvFactory, McpServer};
use sinew_env::{Action, CallError, Env, EnvConfig, EnvFactory};
use sinew_types::{FailureKind, Role};
use std::path::Path;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};

/// A server of MCP over standard input and output, as short as it can be. Its tools come in two pages.
const SERVER: &str = r#"
import json, os, sys, time

OBJECT = {"type": "object"}
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
NAMES = ["add", "note", "fail", "wrong", "hang", "die", "flood", "garbage", "peek"]
notes = []

def text(said, error=False):
    return {"content": [{"type": "text", "text": said}], "isError": error}

def use(name, a):
    if name == "add":
        return text("%g" % (a["a"] + a["b"]))
    if name == "note":
        notes.append(a)
        return text("%d notes" % len(notes))
    if name == "fail":
        return text("no luck", True)
    if name == "hang":
        time.sleep(600)
    if name == "die":
        sys.stderr.write("out of ideas\n")
        os._exit(3)
    if name == "flood":
        return text("x" * (1 << 20))
    if name == "garbage":
        sys.stdout.write("this is no JSON\n")
        return {"content": [{"type": "image", "data": "", "mimeType": "image/png"}]}
    if name == "peek":
        return text(str(os.path.exists("/etc/shadow") and os.access("/etc/shadow", os.R_OK)))
    raise ValueError("no tool " + name)

def answer(method, p):
    if method == "initialize":
        info = {"name": "test", "version": "1"}
        return {"protocolVersion": p["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        at = int(p.get("cursor") or 0)
        page = [{"name": n, "description": "Does %s." % n, "inputSchema": NUMBERS if n == "add" else OBJECT}
                for n in NAMES[at:at + 5]]
        return dict({"tools": page}, **({"nextCursor": "5"} if at == 0 else {}))
    if method == "tools/call":
        return use(p["name"], p.get("arguments") or {})
    raise ValueError("no method " + method)

for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    reply = {"jsonrpc": "2.0", "id": message["id"]}
    try:
        reply["result"] = answer(message["method"], message.get("params") or {})
    except Exception as e:
        reply["error"] = {"code": -32603, "message": "%s: %s" % (type(e).__name__, e)}
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
"#;

fn command(python: &str, file: &Path) -> McpServer {
    McpServer {
        command: vec![python.into(), file.to_string_lossy().into_owned()],
        ..McpServer::default()
    }
}

fn started(source: &str, startup_timeout_s: f64) -> Result<(McpEnvFactory, TempDir), String> {
    let dir = folder();
    let file = dir.path().join("server.py");
    std::fs::write(&file, source).unwrap();
    let keys = Mcp {
        timeout_s: 3.0,
        startup_timeout_s,
        sessions: 2,
        ..Mcp::new(vec![command("python3", &file)])
    };
    let factory = McpEnvFactory::start(&keys, None).map_err(|e| e.to_string())?;
    Ok((factory, dir))
}

/// Observation of one call, and whether it is an error; or the failure of the episode.
async fn ask(env: &mut dyn Env, tool: &str, arguments: Value) -> Result<(String, bool), String> {
    match env.step(calls(vec![call("a", tool, arguments)])).await {
        Ok(step) => {
            let observation = step.observation.unwrap();
            Ok((
                observation.content.text().into_owned(),
                observation.is_error,
            ))
        }
        Err(e) => {
            assert_eq!(e.failure_kind(), FailureKind::Environment);
            Err(e.to_string())
        }
    }
}

#[tokio::test]
async fn tools_of_a_server_are_those_of_the_episode() {
    let (factory, _dir) = started(SERVER, 60.0).unwrap();
    let mut env = factory.create(&task(json!({}))).unwrap();
    let reset = env.reset().await.unwrap();
    assert_eq!(reset.messages.last().unwrap().content.text(), "Buy tea.");
    assert_eq!(reset.tools.len(), 9);
    assert_eq!(reset.tools[0].parameters["required"], json!(["a", "b"]));
    let turn = calls(vec![
        call("x", "add", json!({"a": 2, "b": 3})),
        call("y", "fly", json!({})),
        call("z", "note", json!({"text": "tea"})),
    ]);
    let observation = env.step(turn).await.unwrap().observation.unwrap();
    let messages = env.format_observation(&observation);
    let said: Vec<_> = messages
        .iter()
        .map(|m| (m.tool_call_id.as_deref().unwrap(), m.content.text()))
        .collect();
    assert_eq!(said[0], ("x", "5".into()));
    assert!(
        said[1].0 == "y"
            && said[1]
                .1
                .contains("there is no tool fly; the tools are: add")
    );
    assert_eq!(said[2], ("z", "1 notes".into()));
    // An episode has a separate process.
    let mut other = factory.create(&task(json!({}))).unwrap();
    other.reset().await.unwrap();
    assert_eq!(
        ask(other.as_mut(), "note", json!({})).await.unwrap().0,
        "1 notes"
    );
    assert_eq!(
        ask(other.as_mut(), "peek", json!({})).await.unwrap().0,
        "False"
    );
    let mut third = factory.create(&task(json!({}))).unwrap();
    other.close().await.unwrap();
    third.reset().await.unwrap();
    third.close().await.unwrap();
    let step = env.step(Action::say("Done.")).await.unwrap();
    let outcome = step.outcome.unwrap();
    assert!(step.done && outcome.unscored);
    assert_eq!(
        (
            outcome.metrics["tool_calls"],
            outcome.metrics["tool_errors"]
        ),
        (3.0, 1.0)
    );
    env.close().await.unwrap();
}

#[tokio::test]
async fn errors_are_observations_and_a_server_that_ends_fails_the_episode() {
    let (factory, _dir) = started(SERVER, 60.0).unwrap();
    let mut env = factory.create(&task(json!({}))).unwrap();
    env.reset().await.unwrap();
    for (tool, arguments, said, error) in [
        ("fail", json!({}), "Error: no luck", true),
        ("add", json!({"a": 1}), "Error: KeyError: 'b'", true),
        (
            "add",
            json!([1, 2]),
            "Error: the arguments are no object",
            true,
        ),
        ("garbage", json!({}), "[image]", false),
        ("flood", json!({}), "more bytes]", false),
    ] {
        let (text, is_error) = ask(env.as_mut(), tool, arguments).await.unwrap();
        assert!(text.contains(said) && is_error == error, "{tool}: {text}");
        assert!(text.len() < 70_000, "{tool}");
    }
    let broken = Action {
        call_error: Some(CallError::Unclosed),
        ..Action::say("<tool_call>")
    };
    let observation = env.step(broken).await.unwrap().observation.unwrap();
    assert_eq!(env.format_observation(&observation)[0].role, Role::User);
    let error = ask(env.as_mut(), "die", json!({})).await.unwrap_err();
    assert!(
        error.contains("exited 3") && error.contains("out of ideas"),
        "{error}"
    );
    env.close().await.unwrap();
    let mut next = factory.create(&task(json!({}))).unwrap();
    next.reset().await.unwrap();
    let (text, is_error) = ask(next.as_mut(), "hang", json!({})).await.unwrap();
    assert!(is_error && text.contains("took longer than 3 s"), "{text}");
    next.close().await.unwrap();
}

#[test]
fn servers_that_cannot_work_are_refused_at_the_start() {
    let endless = "import sys\nfor line in sys.stdin:\n    print('[]')\n";
    for (source, seconds, said) in [
        ("import no_such_package", 60.0, "ModuleNotFoundError"),
        ("print('hello')\n", 60.0, "exited 0"),
        (endless, 3.0, "did not answer within 3 s"),
    ] {
        let error = started(source, seconds).unwrap_err();
        assert!(error.contains(said), "{source}: {error}");
    }
    let dir = folder();
    let file = dir.path().join("server.py");
    std::fs::write(&file, SERVER).unwrap();
    let twice = Mcp::new(vec![command("python3", &file), command("python3", &file)]);
    let error = McpEnvFactory::start(&twice, None).unwrap_err().to_string();
    assert!(
        error.contains("two tools of the servers have this name"),
        "{error}"
    );
}

#[test]
fn keys_of_mcp_are_checked() {
    for (keys, said) in [
        (json!({"servers": []}), "0 servers"),
        (json!({"servers": [{}]}), "needed: a command or a url"),
        (
            json!({"servers": [{"command": ["x"], "url": "http://x"}]}),
            "not both",
        ),
        (json!({"servers": [{"url": "x"}]}), "server 1"),
        (
            json!({"servers": [{"command": ["x"], "key_env": "K"}]}),
            "has no effect",
        ),
        (
            json!({"servers": [{"command": ["x"]}], "sessions": 0}),
            "1 to 4096",
        ),
    ] {
        let keys: Mcp = serde_json::from_value(keys).unwrap();
        let error = keys.check().unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

/// A server of the official SDK, which is installed for the agents of the tests: over standard input and
/// output in a sandbox, and over HTTP.
#[tokio::test]
async fn servers_of_the_official_sdk_work() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let python = root.join(".cache/venv/bin/python3");
    let dir = folder();
    let file = dir.path().join("server.py");
    let source = "import sys\nfrom mcp.server import MCPServer\nserver = MCPServer('shop')\n\n\
        @server.tool()\ndef price(item: str) -> int:\n    \"Price of an item.\"\n    \
        return {'tea': 6}[item]\n\n\
        if len(sys.argv) > 1:\n    import socket, uvicorn\n    \
        at = socket.create_server(('127.0.0.1', 0))\n    print(at.getsockname()[1], flush=True)\n    \
        app = uvicorn.Config(server.streamable_http_app(), log_level='warning')\n    \
        uvicorn.Server(app).run(sockets=[at])\nelse:\n    server.run('stdio')\n";
    std::fs::write(&file, source).unwrap();
    let mut outside = tokio::process::Command::new(&python)
        .args([file.to_str().unwrap(), "http"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut told = BufReader::new(outside.stdout.take().unwrap()).lines();
    let port = told.next_line().await.unwrap().expect("it has a port");
    let url = format!("http://127.0.0.1:{port}/mcp");
    let at = McpServer {
        url,
        ..McpServer::default()
    };
    for server in [command(python.to_str().unwrap(), &file), at] {
        let keys = Mcp::new(vec![server]);
        let starting = tokio::task::spawn_blocking(move || McpEnvFactory::start(&keys, None));
        let factory = starting.await.unwrap().unwrap();
        let mut env = factory.create(&task(json!({}))).unwrap();
        let reset = env.reset().await.unwrap();
        assert_eq!(reset.tools[0].description, "Price of an item.");
        let (text, _) = ask(env.as_mut(), "price", json!({"item": "tea"}))
            .await
            .unwrap();
        assert_eq!(text, "6");
        let (text, is_error) = ask(env.as_mut(), "price", json!({"item": "x"}))
            .await
            .unwrap();
        assert!(is_error, "{text}");
        env.close().await.unwrap();
    }
    outside.kill().await.unwrap();
}

/// A server that npm installed, as `scripts/setup.sh` does.
fn of_npm(name: &str, arguments: &[&str]) -> Mcp {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let script = format!(
        ".cache/mcp-servers/node_modules/@modelcontextprotocol/server-{name}/dist/index.js"
    );
    let script = root.join(script);
    assert!(script.is_file(), "run scripts/setup.sh");
    let mut command = vec!["node".to_owned(), script.to_string_lossy().into_owned()];
    command.extend(arguments.iter().map(|a| (*a).to_owned()));
    Mcp {
        sessions: 1,
        ..Mcp::new(vec![McpServer {
            command,
            // The variable keeps the server from writing next to its code, which is read-only.
            env: [(
                "MEMORY_FILE_PATH".to_owned(),
                "/tmp/memory.jsonl".to_owned(),
            )]
            .into(),
            ..McpServer::default()
        }])
    }
}

/// An episode with the tools of such a server.
async fn begun(keys: Mcp) -> (Box<dyn Env>, Vec<String>) {
    let started = tokio::task::spawn_blocking(move || McpEnvFactory::start(&keys, None));
    let factory = started.await.unwrap().unwrap();
    let mut env = factory.create(&task(json!({}))).unwrap();
    let tools = env.reset().await.unwrap().tools;
    (env, tools.into_iter().map(|t| t.name).collect())
}

#[tokio::test]
async fn servers_of_npm_start_and_answer() {
    let (mut env, tools) = begun(of_npm("everything", &[])).await;
    assert!(tools.contains(&"echo".to_owned()), "{tools:?}");
    let said = ask(env.as_mut(), "echo", json!({"message": "tea"})).await;
    assert_eq!(said.unwrap(), ("Echo: tea".into(), false));
    env.close().await.unwrap();

    let (mut env, _) = begun(of_npm("filesystem", &["/tmp"])).await;
    let file = json!({"path": "/tmp/note.txt", "content": "milk"});
    let (said, error) = ask(env.as_mut(), "write_file", file).await.unwrap();
    assert!(!error, "{said}");
    let (said, _) = ask(
        env.as_mut(),
        "read_text_file",
        json!({"path": "/tmp/note.txt"}),
    )
    .await
    .unwrap();
    assert!(said.contains("milk"), "{said}");
    let (said, error) = ask(
        env.as_mut(),
        "read_text_file",
        json!({"path": "/etc/passwd"}),
    )
    .await
    .unwrap();
    assert!(error, "{said}");
    env.close().await.unwrap();

    let (mut env, _) = begun(of_npm("memory", &[])).await;
    let entities = json!({"entities": [{"name": "Ada", "entityType": "person", "observations": ["likes tea"]}]});
    let (said, error) = ask(env.as_mut(), "create_entities", entities)
        .await
        .unwrap();
    assert!(!error, "{said}");
    let (said, _) = ask(env.as_mut(), "search_nodes", json!({"query": "tea"}))
        .await
        .unwrap();
    assert!(said.contains("Ada"), "{said}");
    env.close().await.unwrap();
}
