//! Rows of the interpreter that runs environments, rewards, browsers and trackers of users.

use super::row::{Mark, Row};
use crate::track::Trackers;
use sinew_bridge::{PythonCode, PythonWorkers, StartError, WorkersConfig};
use std::process::Command;
use std::time::{Duration, Instant};

/// The interpreter of recipes that name none.
const PYTHON: &str = "python3";
/// Time that one program of Python has.
const WITHIN: Duration = Duration::from_secs(30);
/// Python source that environments with web pages share.
const CHROMIUM: &str = include_str!("../../../../python/src/sinew/bridges/chromium.py");
/// Starts Chromium as those environments do. The last line of an error is its reason.
const BROWSER: &str = r#"
import sys
try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sys.exit(f"{sys.executable} has no package playwright")
try:
    check_program(PROGRAM)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=PROGRAM, args=FLAGS, timeout=20000)
        page = browser.new_page()
        page.set_content("<title>42</title>")
        assert page.title() == "42", page.title()
        print(f"Chromium {browser.version} under Playwright opened a page")
        browser.close()
except Exception as error:
    sys.exit(str(error).strip().splitlines()[0])
"#;
/// Clients of trackers of experiments.
const TRACKERS: [&str; 4] = ["clearml", "mlflow", "tensorboard", "wandb"];

/// Starts a worker of the user's interpreter in a sandbox, as environments and rewards in Python have it.
pub(super) fn workers(name: &str) -> Vec<Row> {
    let said = output(Command::new(PYTHON).args([
        "-c",
        "import sys; print(sys.version.split()[0], 'at', sys.executable)",
    ]));
    let hint = "install Python 3.8 or later (Debian: apt-get install python3) and have it in PATH, or name it: env.python, \
                reward.python";
    let python = match said {
        Ok(said) => said,
        Err(e) => return vec![Row::failed(Mark::Fail, name, &e, hint)],
    };
    let search = std::env::var("PATH").unwrap_or_default();
    let begun = Instant::now();
    let started = PythonCode::find(&[], PYTHON, &search).and_then(|code| {
        let config = WorkersConfig {
            workers: 1,
            ..WorkersConfig::new(code.process_provider(2)?)
        };
        PythonWorkers::start(config, code).map(|_| begun.elapsed())
    });
    vec![match started {
        Ok(took) => Row::ok(
            name,
            format!("{python}; a worker started in {} ms", took.as_millis()),
        ),
        Err(e @ StartError::Worker(_)) => Row::failed(
            Mark::Fail,
            name,
            &format!("{python}: {e}"),
            "first see to the row `process`: workers run in sandboxes of that level",
        ),
        Err(e) => Row::failed(Mark::Fail, name, &format!("{python}: {e}"), hint),
    }]
}

/// Opens a page in Chromium, which environments of web pages drive.
pub(super) fn browser(name: &str) -> Vec<Row> {
    let mut command = Command::new(PYTHON);
    command.args(["-c", &format!("{CHROMIUM}{BROWSER}")]);
    vec![match output(&mut command) {
        Ok(said) => Row::ok(name, said),
        Err(e) => {
            let hint = "pip install playwright==1.65.2, and apt-get install --no-install-recommends chromium; docs/web.md";
            Row::failed(Mark::Warn, name, &e, hint)
        }
    }]
}

/// Looks for the clients of all trackers.
pub(super) fn trackers(name: &str) -> Vec<Row> {
    let (mut there, mut absent) = (Vec::new(), None);
    for tracker in TRACKERS {
        match output(&mut Trackers::new(tracker, PYTHON).check()) {
            Ok(_) => there.push(tracker),
            Err(e) => absent = Some(e),
        }
    }
    if !there.is_empty() {
        return vec![Row::ok(
            name,
            format!("clients for --track {}", there.join(",")),
        )];
    }
    let first = absent.unwrap_or_default();
    let hint = first.split_once("hint: ").map(|(_, hint)| hint);
    let hint = hint.unwrap_or("python3 -m pip install wandb, or another of them; docs/track.md");
    let detail = format!("no client for --track: {}", TRACKERS.join(", "));
    vec![Row::new(Mark::Warn, name, detail, hint)]
}

/// The standard output of a program that ends with 0 within [`WITHIN`].
pub(super) fn output(command: &mut Command) -> Result<String, String> {
    crate::bounded::output(command, WITHIN)
}
