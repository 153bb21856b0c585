//! Curricula against vectors that `golden/make_curricula.py` computes from the definitions.

use proptest::prelude::*;
use serde_json::Value;
use sinew_algo::{AdaptiveConfig, Dial, Estimates, Pool, Signal, TurnStages};

fn golden(part: &str) -> Vec<Value> {
    let text = include_str!("../golden/curricula.json");
    let all: Value = serde_json::from_str(text).unwrap();
    all[part].as_array().unwrap().clone()
}

fn numbers(value: &Value) -> Vec<f64> {
    let all = value.as_array().unwrap();
    all.iter().map(|v| v.as_f64().unwrap()).collect()
}

fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (a, b) in found.iter().zip(expected) {
        assert!((a - b).abs() < 1e-12, "{found:?} is not {expected:?}");
    }
}

#[test]
fn turns_grow_by_stages() {
    for case in golden("stages") {
        let rounds: Vec<u32> = serde_json::from_value(case["rounds"].clone()).unwrap();
        let steps: Vec<u64> = serde_json::from_value(case["steps"].clone()).unwrap();
        let stages = TurnStages::new(&rounds, case["every"].as_u64().unwrap()).unwrap();
        let turns: Vec<u32> = steps.iter().map(|s| stages.turns(*s)).collect();
        assert_eq!(serde_json::json!(turns), case["turns"]);
        assert_eq!(stages.turns(u64::MAX), *rounds.last().unwrap());
    }
    assert_eq!(TurnStages::new(&[], 10), None);
    assert_eq!(TurnStages::new(&[3], 0), None);
}

#[test]
fn shares_follow_the_change_of_success_over_two_windows() {
    for case in golden("progress") {
        let config = AdaptiveConfig {
            signal: Signal::Progress,
            window: case["window"].as_u64().unwrap() as usize,
            floor: case["floor"].as_f64().unwrap(),
            ..AdaptiveConfig::default()
        };
        let mut estimates = Estimates::default();
        for kind in ["a", "b", "c"] {
            let seen = numbers(&case["outcomes"][kind]);
            // The steps may have any size.
            for step in seen.chunks(3) {
                estimates.update(&config, step.iter().map(|s| (kind, *s == 1.0, *s)));
            }
        }
        let weights = ["a", "b", "c"].map(|k| estimates.progress(config.window, k));
        close(&weights, &numbers(&case["weights"]));
        close(
            &estimates.probabilities(&config, &["a", "b", "c"]),
            &numbers(&case["shares"]),
        );
        // A resumed run has the same estimates.
        let text = serde_json::to_string(&estimates).unwrap();
        assert_eq!(serde_json::from_str::<Estimates>(&text).unwrap(), estimates);
    }
}

#[test]
fn a_type_that_nothing_is_known_of_is_measured_first() {
    let config = AdaptiveConfig {
        signal: Signal::Progress,
        window: 2,
        floor: 0.0,
        ..AdaptiveConfig::default()
    };
    let mut estimates = Estimates::default();
    assert_eq!(estimates.probabilities(&config, &["a", "b"]), [0.5, 0.5]);
    estimates.update(&config, [("a", true, 1.0); 4]);
    assert_eq!(estimates.probabilities(&config, &["a", "b"]), [0.0, 1.0]);
    // All kinds are drawn uniformly if none has progress.
    estimates.update(&config, [("b", false, 0.0); 4]);
    assert_eq!(estimates.probabilities(&config, &["a", "b"]), [0.5, 0.5]);
    // Lost skills count like learned ones.
    estimates.update(&config, [("a", false, 0.0); 2]);
    assert_eq!(estimates.probabilities(&config, &["a", "b"]), [1.0, 0.0]);
}

#[test]
fn a_dial_moves_with_success() {
    for case in golden("aim") {
        let number = |key: &str| case[key].as_f64().unwrap();
        let config = AdaptiveConfig {
            signal: Signal::Aim,
            gain: number("gain"),
            target: number("target"),
            floor: number("floor"),
            ..AdaptiveConfig::default()
        };
        let levels = case["levels"].as_u64().unwrap() as usize;
        let mut dial = Dial::default();
        for step in case["path"].as_array().unwrap() {
            dial.turn(&config, step["success"].as_f64().unwrap(), levels);
            close(
                &dial.probabilities(&config, levels),
                &numbers(&step["shares"]),
            );
        }
    }
}

#[test]
fn a_dial_rests_where_half_is_solved() {
    let config = AdaptiveConfig {
        signal: Signal::Aim,
        floor: 0.0,
        gain: 0.25,
        ..AdaptiveConfig::default()
    };
    // A policy that solves level n with probability 1 - n / 8: half of level 4.
    let mut dial = Dial::default();
    for _ in 0..500 {
        let shares = dial.probabilities(&config, 9);
        let success: f64 = shares
            .iter()
            .enumerate()
            .map(|(n, p)| p * (1.0 - n as f64 / 8.0))
            .sum();
        dial.turn(&config, success, 9);
    }
    let shares = dial.probabilities(&config, 9);
    assert!(shares[4] > 0.99, "{shares:?}");
    assert!(dial.aims_at(4, 9) && !dial.aims_at(1, 9));
}

#[test]
fn pools_have_their_shares() {
    for case in golden("pools") {
        let config = AdaptiveConfig {
            signal: Signal::Pools,
            hard_share: case["hard"].as_f64().unwrap(),
            easy_share: case["easy"].as_f64().unwrap(),
            ..AdaptiveConfig::default()
        };
        let sizes: Vec<usize> = serde_json::from_value(case["sizes"].clone()).unwrap();
        let shares = Pool::shares(&config, sizes.try_into().unwrap());
        close(&shares, &numbers(&case["shares"]));
    }
    let config = AdaptiveConfig {
        hard_at: 0.25,
        easy_at: 0.75,
        ..AdaptiveConfig::default()
    };
    let pools =
        [(0, 0), (0, 4), (1, 4), (2, 4), (3, 4), (4, 4)].map(|(s, n)| Pool::of(&config, s, n));
    let names = pools.map(Pool::name);
    assert_eq!(names, ["normal", "hard", "hard", "normal", "easy", "easy"]);
}

#[test]
fn wrong_settings_are_named() {
    let of = |change: fn(&mut AdaptiveConfig)| {
        let mut config = AdaptiveConfig::default();
        change(&mut config);
        config.broken().map(|(name, ..)| name)
    };
    assert_eq!(of(|_| {}), None);
    assert_eq!(of(|c| c.window = 0), Some("window"));
    assert_eq!(of(|c| c.target = 1.0), Some("target"));
    assert_eq!(of(|c| c.gain = f64::NAN), Some("gain"));
    assert_eq!(of(|c| c.hard_share = 0.95), Some("hard_share"));
    assert_eq!(of(|c| c.easy_at = 0.0), Some("easy_at"));
}

proptest! {
    /// Shares are probabilities, whatever was seen.
    #[test]
    fn shares_are_probabilities(
        seen in prop::collection::vec((0usize..4, any::<bool>()), 0..200),
        (window, gain, floor) in (1usize..20, 0.01f64..5.0, 0.0f64..=1.0),
        sizes in prop::array::uniform3(0usize..50),
    ) {
        let kinds = ["a", "b", "c", "d"];
        let config = AdaptiveConfig {
            signal: Signal::Progress, window, gain, floor,
            ..AdaptiveConfig::default()
        };
        let (mut estimates, mut dial) = (Estimates::default(), Dial::default());
        for step in seen.chunks(7) {
            estimates.update(&config, step.iter().map(|(k, s)| (kinds[*k], *s, 0.0)));
            let solved = step.iter().filter(|s| s.1).count();
            dial.turn(&config, solved as f64 / step.len() as f64, 4);
        }
        let pools = Pool::shares(&config, sizes).to_vec();
        let some = sizes.iter().any(|n| *n > 0);
        for shares in [estimates.probabilities(&config, &kinds), dial.probabilities(&config, 4), pools] {
            let sum: f64 = shares.iter().sum();
            prop_assert!(shares.iter().all(|p| (0.0..=1.0 + 1e-9).contains(p)), "{shares:?}");
            prop_assert!((sum - 1.0).abs() < 1e-9 || !some, "{shares:?}");
        }
    }
}
