//! Alerts by mail, at a real SMTP server.

use crate::{Server, demo, emit, ended, start, step};
use serde_json::Value;
use sinew_orchestrator::{Bus, RunEvent};
use sinew_telemetry::{Signals, SignalsConfig};
use std::sync::Arc;

/// A server that wants a password, answers "later" once, and prints the received mails as JSON.
const SMTP: &str = "
import asyncio, email, email.policy, json, sys
from aiosmtpd.smtp import AuthResult, SMTP
later = [True]
class Handler:
    async def handle_DATA(self, server, session, envelope):
        if later.pop() if later else False:
            return '451 later'
        m = email.message_from_bytes(envelope.content, policy=email.policy.default)
        print(json.dumps({
            'from': envelope.mail_from, 'to': envelope.rcpt_tos, 'subject': m['subject'], 'type': m.get_content_type(),
            'text': m.get_content(), 'user': session.auth_data.login.decode(),
        }), flush=True)
        return '250 OK'
def known(server, session, envelope, mechanism, data):
    return AuthResult(success=data.password.decode() == sys.argv[1], auth_data=data)
async def serve():
    made = lambda: SMTP(Handler(), authenticator=known, auth_required=True, auth_require_tls=False)
    server = await asyncio.get_running_loop().create_server(made, '127.0.0.1', 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(serve())
";

#[test]
fn a_person_gets_a_mail_after_a_server_that_said_later() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    // A variable that every process has stands for the password.
    let server = Server::start(SMTP, &[&std::env::var("PATH").unwrap()]);
    let bus = Bus::default();
    let config = format!(
        "[alerts]\ndisk_free_below_gb = 0.0\nmemory_above = 0.0\n[alerts.mail]\nserver = \"localhost:{}\"\n\
         tls = \"never\"\nfrom = \"Sinew <sinew@example.org>\"\nto = [\"a@example.org\", \"b@example.org\"]\n\
         user = \"runs\"\npassword_env = \"PATH\"",
        server.port
    );
    let signals = start(&config, dir.path(), &bus, &runtime);
    for n in 1..=6 {
        emit(&bus, RunEvent::Step(Arc::new(step(n, 0.5, 0.001))));
    }
    emit(&bus, ended());
    drop(signals);
    let mail: Value = serde_json::from_str(&server.said()).unwrap();
    assert_eq!(mail["from"], "sinew@example.org");
    assert_eq!(
        mail["to"],
        serde_json::json!(["a@example.org", "b@example.org"])
    );
    assert_eq!(
        (&mail["user"], &mail["type"]),
        (&"runs".into(), &"text/plain".into())
    );
    assert_eq!(mail["subject"], "sinew demo: collapse");
    let text = mail["text"].as_str().unwrap();
    assert!(
        text.contains("entropy is 0.0010 nats") && text.contains("threshold: 0.02"),
        "{text}"
    );
    let folder = format!("folder: {}", dir.path().display());
    assert!(text.contains(&folder), "{text}");
}

#[test]
fn a_password_that_is_not_there_and_an_address_that_is_none_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for (to, variable, named) in [
        (
            "b@example.org",
            "SINEW_NOT_SET",
            "alerts.mail.password_env = \"SINEW_NOT_SET\"",
        ),
        ("nobody", "PATH", "alerts.mail.to = \"nobody\""),
    ] {
        let config = format!(
            "[alerts.mail]\nserver = \"mail.example.org\"\nfrom = \"a@example.org\"\nto = [\"{to}\"]\nuser = \"u\"\n\
             password_env = \"{variable}\""
        );
        let config = SignalsConfig::parse("s.toml".as_ref(), &config).unwrap();
        let run = demo(dir.path());
        let error = Signals::start(&config, &run, &Bus::default(), runtime.handle());
        let error = error.unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}
