//! Writes made-up runs into a folder and serves them: to look at the pages, and to measure the first paint
//! with a large store.
//!
//! `cargo run -p sinew-dashboard --example made_up_runs -- FOLDER [STEPS GROUPS]`; groups have 4 episodes.

#[path = "../tests/it/data.rs"]
#[expect(clippy::unwrap_used, reason = "made-up data, for people")]
mod data;

use sinew_dashboard::{Dashboard, Ports};
use std::path::PathBuf;
use std::sync::Arc;

fn main() -> std::io::Result<()> {
    let mut words = std::env::args().skip(1);
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
        renderer: Arc::new(|_| match sinew_render::byte_renderer() {
            Ok(renderer) => Ok(Arc::new(renderer)),
            Err(e) => Err(e.to_string()),
        }),
        late: Arc::new(|_| None),
    };
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let at = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        let dashboard = Dashboard::bind(at, vec![folder], ports).await?;
        eprintln!("{}", dashboard.url());
        dashboard.serve().await
    })
}
