//! The microvm level, under an emulated processor.

use crate::{assert_held, root};
use sinew_lab::attack;
use sinew_lab::sandbox::leaks;
use sinew_microvm::{Accel, MicrovmConfig, MicrovmProvider};

fn provider() -> MicrovmProvider {
    let mut config = MicrovmConfig::new(root().join(".cache/microvm"));
    config.accel = Some(Accel::Tcg);
    MicrovmProvider::start(config).expect("run scripts/setup.sh: it installs QEMU and an image")
}

#[tokio::test]
async fn attacks_that_only_machines_have() {
    let provider = provider();
    let mut rows = Vec::new();
    // Halts and frames that never end are left out: it takes ten seconds to tell each from a slow guest.
    for filter in [
        "48 ",
        "80 panic of",
        "80 reboot",
        "81 ",
        "82 ",
        "83 frame of",
        "83 output",
        "84 ",
    ] {
        attack::microvm::run_own(&provider, filter, &mut |row| rows.push(row))
            .await
            .unwrap();
    }
    assert_held(&rows, 9);
}

#[tokio::test]
async fn nothing_is_left_of_many() {
    let report = leaks::run(&provider(), 5).await.unwrap();
    assert!(report.left.is_empty(), "{report:?}");
}
