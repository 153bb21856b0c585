//! A real Chromium, driven by its own protocol over two pipes. Messages are JSON, a zero byte ends each.

use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Options that keep it quiet, offline and apart from any other.
const OPTIONS: &[&str] = &[
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
];

pub(crate) struct Browser {
    child: Child,
    input: File,
    output: BufReader<File>,
    next: u64,
    session: Option<String>,
    /// Errors of pages: exceptions, console errors, violations of the policy.
    pub(crate) errors: Vec<String>,
    /// Addresses that were asked for.
    pub(crate) requests: Vec<String>,
}

impl Browser {
    pub(crate) fn start(folder: &Path) -> Self {
        let (input, output) = (folder.join("in"), folder.join("out"));
        let made = Command::new("mkfifo")
            .args([&input, &output])
            .status()
            .unwrap();
        assert!(made.success());
        let profile = format!("--user-data-dir={}", folder.join("profile").display());
        let child = Command::new("sh")
            .args([
                "-c",
                "in=$1 out=$2; shift 2; exec chromium \"$@\" 3<\"$in\" 4>\"$out\"",
                "sh",
            ])
            .args([&input, &output])
            .args(OPTIONS)
            .arg(profile)
            .arg("about:blank")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut browser = Self {
            child,
            input: File::options().write(true).open(&input).unwrap(),
            output: BufReader::new(File::open(&output).unwrap()),
            next: 0,
            session: None,
            errors: Vec::new(),
            requests: Vec::new(),
        };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attach);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Sends a command and waits for its result.
    pub(crate) fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut message = json!({ "id": self.next, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.input.write_all(&bytes).unwrap();
        loop {
            let mut bytes = Vec::new();
            let read = self.output.read_until(0, &mut bytes).unwrap();
            assert!(read > 0, "chromium ended; scripts/setup.sh installs it");
            bytes.pop();
            let mut message: Value = serde_json::from_slice(&bytes).unwrap();
            if message["id"] == json!(self.next) {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].take();
            }
            self.event(&message);
        }
    }

    fn event(&mut self, message: &Value) {
        let params = &message["params"];
        match message["method"].as_str().unwrap_or_default() {
            "Runtime.exceptionThrown" => self.errors.push(params["exceptionDetails"].to_string()),
            "Log.entryAdded" if params["entry"]["level"] == "error" => {
                self.errors.push(params["entry"].to_string());
            }
            "Runtime.consoleAPICalled" if params["type"] == "error" => {
                self.errors.push(params.to_string())
            }
            "Network.requestWillBeSent" => {
                let url = params["request"]["url"].as_str().unwrap_or_default();
                self.requests.push(url.to_owned());
            }
            _ => {}
        }
    }

    /// The value of an expression; a promise is waited for.
    pub(crate) fn eval(&mut self, expression: &str) -> Value {
        let params =
            json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let mut result = self.call("Runtime.evaluate", params);
        assert!(
            result["exceptionDetails"].is_null(),
            "{expression}: {result}"
        );
        result["result"]["value"].take()
    }

    /// Waits until an expression is true in the page.
    pub(crate) fn until(&mut self, expression: &str) {
        self.eval(&format!(
            "new Promise((done) => {{ const look = () => ({expression}) ? done(true) : setTimeout(look, 20); look(); }})"
        ));
    }

    pub(crate) fn go(&mut self, url: &str) {
        self.call("Page.navigate", json!({ "url": url }));
    }

    pub(crate) fn size(&mut self, width: u32, height: u32) {
        let params = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.call("Emulation.setDeviceMetricsOverride", params);
    }

    pub(crate) fn dark(&mut self, on: bool) {
        let value = if on { "dark" } else { "light" };
        let features = json!([{ "name": "prefers-color-scheme", "value": value }]);
        self.call(
            "Emulation.setEmulatedMedia",
            json!({ "features": features }),
        );
    }

    pub(crate) fn key(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            let text = if key.len() == 1 && kind == "keyDown" {
                key
            } else {
                ""
            };
            self.call(
                "Input.dispatchKeyEvent",
                json!({ "type": kind, "key": key, "text": text }),
            );
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
