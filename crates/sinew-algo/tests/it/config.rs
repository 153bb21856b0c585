//! What recipes may say, and what is refused.

use crate::support::{FACTS, config};
use sinew_algo::{AlgorithmConfig, AlgorithmKind, ConfigError, RunFacts};

fn refused(toml: &str, facts: RunFacts) -> String {
    config(toml).resolve(&facts).unwrap_err().to_string()
}

#[test]
fn names_are_those_of_recipes() {
    for kind in AlgorithmKind::ALL {
        let parsed = config(&format!("type = '{kind}'"));
        assert_eq!(parsed, AlgorithmConfig::new(kind));
        assert_eq!(kind.preset().kind, kind);
        let json = serde_json::to_string(&kind.preset()).unwrap();
        let back: sinew_algo::Composition = serde_json::from_str(&json).unwrap();
        assert_eq!(back, kind.preset());
    }
}

#[test]
fn unknown_keys_and_names_are_refused() {
    let parse = toml::from_str::<AlgorithmConfig>;
    assert!(parse("type = 'gpro'").is_err());
    let error = parse("type = 'grpo'\nclip_hi = 0.3").unwrap_err();
    assert!(error.to_string().contains("clip_hi"), "{error}");
    assert!(parse("type = 'grpo'\nkl = { coef = 0.1 }").is_err());
}

#[test]
fn a_group_of_one_is_refused_with_the_reason() {
    let facts = RunFacts {
        group_size: 1,
        ..FACTS
    };
    let error = refused("type = 'grpo'", facts);
    assert!(error.contains("group_size is 1"), "{error}");
    assert!(config("type = 'reinforce'").resolve(&facts).is_ok());
}

#[test]
fn kl_needs_a_reference() {
    let error = refused("type = 'grpo'\nkl = { coefficient = 0.1 }", FACTS);
    assert!(error.contains("needs a reference model"), "{error}");
    let in_reward = "type = 'rloo'\nkl = { place = 'reward', coefficient = 0.1 }";
    assert!(refused(in_reward, FACTS).contains("reference"));
    let facts = RunFacts {
        reference: true,
        ..FACTS
    };
    let k1 = "type = 'grpo'\nkl = { estimator = 'k1', coefficient = 0.1 }";
    assert!(refused(k1, facts).contains("expected gradient zero"));
}

#[test]
fn values_out_of_range_are_named() {
    for (toml, field) in [
        ("clip_low = 1.0", "clip_low"),
        ("clip_low = -0.1", "clip_low"),
        ("clip_high = 0.0", "clip_high"),
        ("clip_high = nan", "clip_high"),
        ("dual_clip = 1.0", "dual_clip"),
        ("std_epsilon = 0.0", "std_epsilon"),
        ("keep_top_std = 0.0", "keep_top_std"),
        ("resample = { keep = 4 }", "resample.keep"),
        ("entropy = -1.0", "entropy"),
        (
            "correction = { type = 'truncate', low = 2.0, high = 1.0 }",
            "correction.high",
        ),
        (
            "overlong = { max_tokens = 4, buffer_tokens = 5 }",
            "overlong.buffer_tokens",
        ),
        (
            "aggregation = { type = 'sequence_mean_token_sum_norm', length = 0.0 }",
            "aggregation.length",
        ),
        ("rewards = { scale = 0.0 }", "rewards.scale"),
    ] {
        let typed = config(&format!("type = 'grpo'\n{toml}"));
        match typed.resolve(&FACTS) {
            Err(ConfigError::Range { field: named, .. }) => assert_eq!(named, field),
            other => panic!("{toml}: {other:?}"),
        }
    }
}

#[test]
fn settings_without_effect_are_refused() {
    for toml in [
        "type = 'rloo'\nclip_low = 0.1",
        "type = 'rloo'\nclip_high = 0.1",
        "type = 'rloo'\ndual_clip = 3.0",
        "type = 'dr_grpo'\nstd_epsilon = 1e-4",
        "type = 'reinforce'\nequal_groups = 'drop'",
    ] {
        let error = config(toml).resolve(&FACTS).unwrap_err();
        assert!(
            matches!(error, ConfigError::NoEffect { .. }),
            "{toml}: {error}"
        );
    }
}

#[test]
fn stale_samples_need_a_ratio_or_a_correction() {
    let facts = RunFacts {
        max_staleness: 2,
        ..FACTS
    };
    assert!(refused("type = 'rloo'", facts).contains("uncorrected"));
    let corrected = "type = 'rloo'\ncorrection = { type = 'truncate', low = 0.0, high = 2.0 }";
    assert!(config(corrected).resolve(&facts).is_ok());
    assert!(config("type = 'grpo'").resolve(&facts).is_ok());
}
