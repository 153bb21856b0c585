//! Policies with several lanes.

use super::*;

/// A policy that computes several micro-batches at once gives the update of one that computes each by itself.
#[test]
fn waves_change_nothing_but_rounding() {
    let spec = truncated();
    for minibatches in [1, 2] {
        let config = TrainerConfig {
            minibatches,
            ..TrainerConfig::new(8, 0.05)
        };
        for lanes in [2, 3, 64] {
            let mut wide = trainer(config);
            wide.policy.lanes = lanes;
            wide.keep_logprobs();
            let rows = batch(wide.policy());
            let report = wide.step(&rows, &spec).unwrap();
            check_logprobs(&rows, &report, minibatches == 1);
            let mut plain = trainer(config);
            let alone = plain.step(&rows, &spec).unwrap();
            assert!((report.loss - alone.loss).abs() < 1e-6, "{report:?}");
            assert!((report.grad_norm - alone.grad_norm).abs() < 1e-5);
            assert!(report.micro_batches >= alone.micro_batches);
            assert_near(&wide, &plain);
        }
    }
}
