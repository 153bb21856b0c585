//! The process level.

use crate::assert_held;
use sinew_lab::attack;
use sinew_sandbox::{Pool, PoolConfig, ProcessConfig, ProcessProvider, SandboxProvider};
use std::collections::BTreeSet;

fn provider(change: impl FnOnce(&mut ProcessConfig)) -> ProcessProvider {
    let mut config = ProcessConfig::new(&std::env::var("PATH").unwrap());
    change(&mut config);
    ProcessProvider::start(config).unwrap()
}

async fn attacked(provider: &dyn SandboxProvider, filter: &str, least: usize) {
    let mut rows = Vec::new();
    attack::run(provider, filter, &mut |row| rows.push(row))
        .await
        .unwrap();
    assert_held(&rows, least);
    if filter.is_empty() {
        let number = |case: &str| case.split(' ').next()?.parse::<u32>().ok();
        let numbers: BTreeSet<u32> = rows.iter().filter_map(|r| number(&r.case)).collect();
        assert_eq!(numbers, (1..=84).collect(), "a case of the list has no row");
    }
}

#[tokio::test]
async fn the_suite_holds_for_forks_of_the_zygote() {
    let provider = provider(|_| ());
    assert_eq!(provider.degradations(), [""; 0]);
    attacked(&provider, "", 66).await;
}

#[tokio::test]
async fn the_suite_holds_for_programs_of_their_own() {
    let provider = provider(|config| config.zygote = false);
    let slower = "each Python program starts an interpreter: the zygote is turned off";
    assert_eq!(provider.degradations(), [slower]);
    attacked(&provider, "", 64).await;
}

#[tokio::test]
async fn the_suite_holds_for_sandboxes_of_a_pool() {
    let steady = PoolConfig {
        floor: 3,
        ceiling: 3,
        ..PoolConfig::default()
    };
    let pool = Pool::new(std::sync::Arc::new(provider(|_| ())), steady).unwrap();
    // State that is kept between sandboxes: what a pool could get wrong.
    attacked(&pool, "6", 7).await;
}
