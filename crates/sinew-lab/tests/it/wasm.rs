//! The wasm level.

use crate::{assert_held, program, root};
use sinew_lab::sandbox::leaks;
use sinew_lab::{attack, sandbox};
use sinew_sandbox::{ProcessConfig, ProcessProvider};
use sinew_wasm::{WasmConfig, WasmProvider};
use std::sync::Arc;

fn provider() -> WasmProvider {
    let modules = root().join(".cache/wasm").canonicalize();
    let modules = modules.expect("no interpreters in .cache/wasm: run scripts/setup.sh");
    let config = WasmConfig::new(modules, program());
    let mut below = ProcessConfig::new("");
    below.shows = config.shows().unwrap();
    let below = ProcessProvider::start(below).unwrap();
    WasmProvider::new(Arc::new(below), config).unwrap()
}

#[tokio::test]
async fn every_attack_is_held() {
    let provider = provider();
    let mut rows = Vec::new();
    attack::wasm::run(&provider, "", &mut |row| rows.push(row))
        .await
        .unwrap();
    assert_held(&rows, 38);
}

#[tokio::test]
async fn the_bench_measures_every_row() {
    let provider = provider();
    let mut rows = Vec::new();
    sandbox::wasm::run(&provider, 2, &mut |row| rows.push(row))
        .await
        .unwrap();
    assert!(rows.len() >= 4, "{rows:#?}");
    let measured = |r: &sandbox::BenchRow| r.value > 0.0 && r.ratio.is_some_and(f64::is_finite);
    assert!(rows.iter().all(measured), "{rows:#?}");
}

#[tokio::test]
async fn nothing_is_left_of_many() {
    let report = leaks::run(&provider(), 100).await.unwrap();
    assert!(report.left.is_empty(), "{report:?}");
}
