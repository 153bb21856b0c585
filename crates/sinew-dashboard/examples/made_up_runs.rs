//! Writes made-up runs into a folder and serves them, for looking at the pages and for measuring their times
//! with a large store.
//!
//! `cargo run --release -p sinew-dashboard --example made_up_runs -- FOLDER [STEPS GROUPS] [--paint]`
//!
//! Groups have 4 episodes. The option `--paint` opens the pages in Chromium instead, and prints a JSON line
//! for each: seconds from the request to the first paint of the first page, and from the choice of a page
//! until it is drawn.

#[path = "../tests/it/chromium.rs"]
#[expect(clippy::unwrap_used, dead_code, reason = "shared with the tests")]
mod chromium;
#[path = "../tests/it/data.rs"]
#[expect(clippy::unwrap_used, reason = "made-up data, for people")]
mod data;

use serde_json::json;
use sinew_dashboard::{Dashboard, NoRenderer, Ports};
use std::path::PathBuf;
use std::sync::Arc;

/// Seconds until a page is to be seen.
const TARGET_S: f64 = 1.0;

fn main() -> std::io::Result<()> {
    let (options, words): (Vec<_>, Vec<_>) =
        std::env::args().skip(1).partition(|w| w.starts_with("--"));
    let mut words = words.into_iter();
    let folder = PathBuf::from(words.next().unwrap_or_else(|| "made-up-runs".into()));
    let mut number = |or: u64| words.next().and_then(|w| w.parse().ok()).unwrap_or(or);
    let (steps, groups) = (number(60), number(4));
    for (name, lift) in [("seed-0", 0.0), ("seed-1", 0.06), ("seed-2", -0.05)] {
        let run = folder.join(name);
        if !run.exists() {
            let groups = if lift == 0.0 { groups } else { 2 };
            data::run(&run, steps, groups, lift);
        }
    }
    let ports = Ports {
        store: Arc::new(data::open_store),
        renderer: Arc::new(|_, _| match sinew_render::byte_renderer() {
            Ok(renderer) => Ok(Arc::new(renderer)),
            Err(e) => Err(NoRenderer(e.to_string())),
        }),
        late: Arc::new(|_| None),
        environments: sinew_env::Registry::new(&sinew_env::BUILT_IN),
    };
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let at = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        let dashboard = Dashboard::bind(at, vec![folder.clone()], ports).await?;
        let url = dashboard.url();
        if options.iter().all(|o| o != "--paint") {
            eprintln!("{url}");
            dashboard.serve().await;
            return Ok(());
        }
        let server = tokio::spawn(dashboard.serve());
        tokio::task::spawn_blocking(move || paint(&url)).await?;
        server.abort();
        Ok(())
    })
}

/// Opens the pages in a fresh browser, and prints how long each took.
fn paint(url: &str) {
    let scratch = std::env::temp_dir().join(format!("paint-{}", std::process::id()));
    let made = std::fs::create_dir_all(&scratch);
    made.unwrap_or_else(|e| panic!("{}: {e}", scratch.display()));
    let mut browser = chromium::Browser::start(&scratch);
    browser.size(1280, 860);
    browser.go(url);
    let ready = |page: &str| format!("document.documentElement?.dataset.ready === '{page}'");
    browser.until(&ready("runs"));
    let first = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000";
    row("first-paint", &browser.eval(first));
    row("runs", &browser.eval("performance.now() / 1000"));
    let run = "?run=seed-0";
    for page in ["curves", "episodes", "timeline", "errors", "live"] {
        browser.eval(&format!(
            "delete document.documentElement.dataset.ready; window.asked = performance.now(); location.hash = '#/{page}{run}'"
        ));
        browser.until(&ready(page));
        row(
            page,
            &browser.eval("(performance.now() - window.asked) / 1000"),
        );
    }
    drop(browser);
    let _ = std::fs::remove_dir_all(scratch);
}

#[expect(clippy::print_stdout, reason = "the rows of a bench")]
fn row(page: &str, seconds: &serde_json::Value) {
    let value = seconds.as_f64().unwrap_or(f64::NAN);
    let row = json!({
        "name": format!("dashboard/{page}"), "value": value, "unit": "s",
        "target": TARGET_S, "met": value <= TARGET_S,
    });
    println!("{row}");
}
