//! Options of recipes, valid and invalid.

use crate::support::{FACTS, config};
use sinew_algo::{AlgorithmConfig, AlgorithmKind, ConfigError, RunFacts};

fn refused(toml: &str, facts: RunFacts) -> String {
    config(toml).resolve(&facts).unwrap_err().to_string()
}

#[test]
fn names_are_those_of_recipes() {
    for &kind in AlgorithmKind::ALL {
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
    let parse = |text: &str| toml::from_str::<AlgorithmConfig>(text);
    assert!(parse("type = 'gpro'").is_err());
    let error = parse("type = 'grpo'\nclip_hi = 0.3").unwrap_err();
    assert!(error.to_string().contains("clip_hi"), "{error}");
    for nested in [
        "kl = { coef = 0.1 }",
        "aggregation = { type = 'token_mean', length = 3.0 }",
        "process = { type = 'sum', weight = 1.0 }",
        "scale = { type = 'one', epsilon = 1.0 }",
        "surrogate = { type = 'cispo', low = 1.0, high = 4.0, dual = 3.0 }",
        "rewards = { offset = 1.0 }",
        "advantage = { type = 'group', baseline = 'mean', scale = { type = 'one', epsilon = 1.0 } }",
    ] {
        assert!(
            parse(&format!("type = 'grpo'\n{nested}")).is_err(),
            "{nested}"
        );
    }
    let error = parse("type = 'grpo'\naggregation = { type = 'token_sum', length = 3.0 }");
    let error = error.unwrap_err().to_string();
    assert!(error.contains("unknown key `length`"), "{error}");
}

#[test]
fn groups_of_one_are_refused_with_the_reason() {
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
        (
            "correction = { type = 'mask', low = 1.5, high = 2.0 }",
            "correction.low",
        ),
        (
            "correction = { type = 'truncate', low = 0.0, high = 0.9 }",
            "correction.high",
        ),
        (
            "correction = { type = 'sequence_mask', high = 0.5 }",
            "correction.high",
        ),
        (
            "correction = { type = 'reject', metric = 'ratio', level = 'token', upper = 0.9 }",
            "correction.upper",
        ),
        (
            "surrogate = { type = 'trust_region', limit = 1.0, penalty = 0.0 }",
            "surrogate.limit",
        ),
    ] {
        let typed = config(&format!("type = 'grpo'\n{toml}"));
        match typed.resolve(&FACTS) {
            Err(ConfigError::Range { field: named, .. }) => assert_eq!(named, field),
            other => panic!("{toml}: {other:?}"),
        }
    }
}

/// Equal rewards have no deviation. Division by only epsilon would give advantages of a million.
#[test]
fn deviation_scales_need_a_baseline() {
    for toml in [
        "type = 'reinforce'\nscale = { type = 'group_std', epsilon = 1e-6 }",
        "type = 'reinforce'\nscale = { type = 'environment_std', epsilon = 1e-6 }",
    ] {
        let error = config(toml).resolve(&FACTS).unwrap_err().to_string();
        assert!(error.contains("equal rewards"), "{toml}: {error}");
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
        "type = 'grpo'\nrefill = 2",
        "type = 'dapo'\nequal_groups = 'zero'\nrefill = 2",
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

/// A correction covers the difference between sampler and first update, not later updates.
#[test]
fn several_updates_need_a_ratio() {
    let facts = RunFacts {
        updates_per_batch: 2,
        ..FACTS
    };
    for kind in ["rloo", "reinforce"] {
        for correction in [
            "",
            "correction = { type = 'truncate', low = 0.0, high = 2.0 }",
        ] {
            let error = refused(&format!("type = '{kind}'\n{correction}"), facts);
            assert!(error.contains("minibatches"), "{error}");
        }
    }
    assert!(config("type = 'grpo'").resolve(&facts).is_ok());
}

#[test]
fn parts_compose() {
    let facts = RunFacts {
        critic: true,
        reference: true,
        ..FACTS
    };
    for toml in [
        "type = 'starpo_s'\nadvantage = { type = 'gae', gamma = 1.0, lambda = 0.95 }",
        "type = 'ppo'\nsurrogate = { type = 'soft', tau_pos = 1.0, tau_neg = 1.05 }\ntau_pos = 2.0",
    ] {
        let algorithm = config(toml).resolve(&facts).unwrap();
        assert!(algorithm.needs().values && algorithm.loss().value.is_some());
    }
    let gspo_rloo = "type = 'gspo'\nscale = { type = 'one' }\n\
        kl = { coefficient = 0.1, estimator = 'k2' }\n\
        correction = { type = 'truncate', low = 0.0, high = 2.0 }";
    let facts = RunFacts {
        critic: false,
        ..facts
    };
    let algorithm = config(gspo_rloo).resolve(&facts).unwrap();
    assert!(algorithm.needs().ref_in_loss && !algorithm.needs().ref_logprobs);
}

#[test]
fn impossible_combinations_are_refused_with_the_reason() {
    let reference = RunFacts {
        reference: true,
        ..FACTS
    };
    for (toml, facts, reason) in [
        ("type = 'opd'\ndistill = 0.0", reference, "trains nothing"),
        (
            "type = 'sft'\ndistill = 1.0",
            reference,
            "fixed by its loss",
        ),
        (
            "type = 'sft'\ncorrection = { type = 'mask', low = 0.5, high = 2.0 }",
            FACTS,
            "no sampling policy",
        ),
        (
            "type = 'grpo'\nsurrogate = { type = 'cross_entropy' }",
            FACTS,
            "only with it",
        ),
        (
            "type = 'reinforce_pp'\nprocess = { type = 'separate', weight = 1.0 }",
            FACTS,
            "group advantages alone",
        ),
        (
            "type = 'gigpo'\nkl = { place = 'reward', coefficient = 0.1 }",
            reference,
            "no place for a KL term",
        ),
        (
            "type = 'rloo'\nkl = { place = 'reward', estimator = 'k3', coefficient = 0.1 }",
            reference,
            "k1 alone",
        ),
        (
            "type = 'cispo'\ndialect = 'relax'",
            FACTS,
            "unbounded weight",
        ),
        (
            "type = 'dpo'",
            RunFacts {
                updates_per_batch: 2,
                ..reference
            },
            "exact for one optimizer step",
        ),
        (
            "type = 'grpo_roc'",
            RunFacts {
                group_size: 2,
                ..FACTS
            },
            "resample.keep is 1",
        ),
    ] {
        let error = refused(toml, facts);
        assert!(error.contains(reason), "{toml}: {error}");
    }
}

#[test]
fn models_are_required_if_and_only_if_used() {
    let critic = RunFacts {
        critic: true,
        ..FACTS
    };
    let teacher = RunFacts {
        teacher: true,
        ..FACTS
    };
    for (toml, facts, reason) in [
        ("type = 'ppo'", FACTS, "needs a critic"),
        ("type = 'grpo'", critic, "does not read a critic"),
        (
            "type = 'grpo'\ntruncated = 'bootstrap'",
            FACTS,
            "asks a critic what would have come",
        ),
        ("type = 'opd'", FACTS, "learns from a teacher"),
        ("type = 'opd_top_k'", FACTS, "learns from a teacher"),
        (
            "type = 'grpo'\nteacher_kl = {}",
            FACTS,
            "learns from a teacher",
        ),
        ("type = 'grpo'", teacher, "asks no teacher"),
        (
            "type = 'opd'\nteacher_kl = { top_k = 0 }",
            teacher,
            "teacher_kl.top_k",
        ),
        ("type = 'dpo'", FACTS, "margin is relative"),
    ] {
        let error = refused(toml, facts);
        assert!(error.contains(reason), "{toml}: {error}");
    }
}

#[test]
fn dialects_without_a_difference_are_refused() {
    let resolved = |toml: &str| {
        config(toml)
            .resolve(&FACTS)
            .map(|a| a.composition().clone())
    };
    let mut known = 0;
    for &kind in AlgorithmKind::ALL {
        for dialect in sinew_algo::Dialect::ALL {
            let mut changed = kind.preset();
            match dialect.apply(kind, &mut changed) {
                Ok(()) => known += 1,
                Err(_) => assert_eq!(changed, kind.preset()),
            }
        }
    }
    assert!(known > 15, "{known}");
    let verl = resolved("type = 'grpo'\ndialect = 'verl'\nclip_high = 0.28").unwrap();
    let expected = sinew_types::Surrogate::Clip {
        low: 0.2,
        high: 0.28,
        dual: Some(3.0),
    };
    assert_eq!(verl.loss.surrogate, expected);
    // TRL's number is the cap itself.
    let trl = resolved("type = 'cispo'\ndialect = 'trl'\nclip_high = 5.0").unwrap();
    let ours = resolved("type = 'cispo'\nclip_high = 4.0").unwrap();
    assert_eq!(trl.loss, ours.loss);
    let cap_below_one = resolved("type = 'cispo'\ndialect = 'trl'\nclip_high = 0.28");
    assert!(cap_below_one.is_err());
    assert!(resolved("type = 'rloo'\ndialect = 'verl'").is_err());
}

/// Dialects include corrections that are on by default in these systems.
#[test]
fn dialects_include_default_corrections() {
    use sinew_types::{Aggregation, Correction, Surrogate};
    let resolved = |toml: &str| config(toml).resolve(&FACTS).unwrap().composition().clone();
    let trl = resolved("type = 'grpo'\ndialect = 'trl'");
    assert_eq!(trl.loss.correction, Correction::SequenceMask { high: 3.0 });
    assert_eq!(trl.aggregation, Aggregation::TokenMean);
    let off = resolved("type = 'grpo'\ndialect = 'trl'\ncorrection = { type = 'none' }");
    assert_eq!(off.loss.correction, Correction::None);
    let prime = resolved("type = 'grpo'\ndialect = 'prime_rl'");
    let region = Surrogate::TrustRegion {
        limit: 0.2,
        penalty: 1e-3,
    };
    assert_eq!(prime.loss.surrogate, region);
    assert_eq!(prime.loss.correction, Correction::None);
    assert_eq!(prime.filters.equal_groups, sinew_algo::EqualGroups::Drop);
}

/// A correction counts with its factor; otherwise the surrogate's own ratio counts.
#[test]
fn losses_that_limit_the_ratio_are_listed() {
    let reject = |metric: &str, level: &str| {
        format!("type = 'reject', metric = '{metric}', level = '{level}', upper = 5.0")
    };
    for (correction, bound) in [
        ("type = 'none'".to_owned(), None),
        (
            "type = 'truncate', low = 0.0, high = 2.0".to_owned(),
            Some(2.0),
        ),
        ("type = 'mask', low = 0.5, high = 2.0".to_owned(), Some(2.0)),
        ("type = 'sequence_mask', high = 3.0".to_owned(), Some(3.0)),
        (reject("ratio", "token"), Some(5.0)),
        (reject("kl_k3", "token"), Some(10f64.sqrt().exp())),
        (reject("kl_k1", "token"), None),
        (reject("ratio", "sequence"), None),
    ] {
        // A correction that bounds nothing is not saved by a surrogate that would.
        for clip in ["", "dual_clip = 3.0\n"] {
            let typed = config(&format!(
                "type = 'grpo'\n{clip}correction = {{ {correction} }}"
            ));
            let found = typed.resolve(&FACTS).unwrap().loss().ratio_bound();
            let own = (correction == "type = 'none'" && !clip.is_empty()).then_some(3.0);
            assert_eq!(found, bound.or(own), "{clip}{correction}");
        }
    }
}

#[test]
fn presets_with_a_bound_of_the_ratio_are_listed() {
    let bounded: Vec<&str> = AlgorithmKind::ALL
        .iter()
        .filter(|kind| kind.preset().loss.ratio_bound().is_some())
        .map(|kind| kind.name())
        .collect();
    assert_eq!(bounded, ["sapo", "cispo", "decoupled_ppo"]);
    let verl = config("type = 'grpo'\ndialect = 'verl'");
    assert_eq!(
        verl.resolve(&FACTS).unwrap().loss().ratio_bound(),
        Some(3.0)
    );
}
