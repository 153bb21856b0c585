//! Rewards of a verifier: read from its files, compared with thresholds, and combined over steps.

use crate::manifest::{MinReward, StepStrategy};
use sinew_env::{Score, Unscored};
use std::collections::BTreeMap;

/// Name of the main reward.
pub(crate) const MAIN: &str = "reward";

/// Maximum bytes of a file of rewards.
pub(crate) const MAX_REWARD_BYTES: u64 = 64 << 10;

/// Maximum number of named rewards.
const MAX_REWARDS: usize = 256;

/// Named rewards of one verifier.
pub(crate) type Rewards = BTreeMap<String, f64>;

/// Reads the files that a verifier wrote; `None`: it wrote none of that name. JSON comes first.
///
/// # Errors
/// The reason why there is no readable reward.
pub(crate) fn read(json: Option<&[u8]>, text: Option<&[u8]>) -> Result<Rewards, Unscored> {
    match (json, text) {
        (Some(json), _) => of_json(json),
        (None, Some(text)) => of_text(text),
        (None, None) => Err(Unscored::new(
            "the verifier wrote neither reward.txt nor reward.json",
        )),
    }
}

fn of_text(bytes: &[u8]) -> Result<Rewards, Unscored> {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim();
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() => Ok(BTreeMap::from([(MAIN.to_owned(), value)])),
        _ if text.is_empty() => Err(Unscored::new("reward.txt is empty")),
        _ => {
            let shown: String = text.chars().take(40).collect();
            Err(Unscored::new(format!(
                "reward.txt is {shown:?}, not a finite number"
            )))
        }
    }
}

fn of_json(bytes: &[u8]) -> Result<Rewards, Unscored> {
    let value: serde_json::Value = serde_json::from_slice(bytes)
        .map_err(|e| Unscored::new(format!("reward.json is not JSON: {e}")))?;
    let number = |name: &str, value: &serde_json::Value| match value.as_f64() {
        Some(number) if number.is_finite() => Ok(number),
        _ => Err(Unscored::new(format!(
            "reward.json: {name} is not a finite number"
        ))),
    };
    let Some(table) = value.as_object() else {
        return Ok(BTreeMap::from([(MAIN.to_owned(), number(MAIN, &value)?)]));
    };
    if table.len() > MAX_REWARDS {
        return Err(Unscored::new(format!(
            "reward.json has more than {MAX_REWARDS} rewards"
        )));
    }
    let one = |(name, value): (&String, &serde_json::Value)| {
        let name: String = name.chars().take(100).collect();
        let number = number(&name, value)?;
        Ok((name, number))
    };
    let all: Rewards = table.iter().map(one).collect::<Result<_, Unscored>>()?;
    if all.contains_key(MAIN) {
        Ok(all)
    } else {
        let names: Vec<&str> = all.keys().take(5).map(String::as_str).collect();
        Err(Unscored::new(format!(
            "reward.json has no `{MAIN}`; it has: {}",
            names.join(", ")
        )))
    }
}

/// Whether the rewards of a step let the next one begin. A missing reward does not.
pub(crate) fn passes(rewards: &Rewards, least: Option<&MinReward>) -> bool {
    let reaches = |name: &str, least: f64| rewards.get(name).is_some_and(|value| *value >= least);
    match least {
        None => true,
        Some(MinReward::Main(least)) => reaches(MAIN, *least),
        Some(MinReward::Each(all)) => all.iter().all(|(name, least)| reaches(name, *least)),
    }
}

/// The score of an episode, from the rewards of the steps that were verified. In the mean, a reward that a
/// step does not have counts as 0.
///
/// # Errors
/// If no step was verified, or a number is too large for a reward.
pub(crate) fn score(steps: &[Rewards], strategy: StepStrategy) -> Result<Score, Unscored> {
    let Some(last) = steps.last() else {
        return Err(Unscored::new("no step was verified"));
    };
    let mut parts = match strategy {
        StepStrategy::Final => last.clone(),
        StepStrategy::Mean => {
            let mut sums = Rewards::new();
            for (name, value) in steps.iter().flatten() {
                *sums.entry(name.clone()).or_default() += value / steps.len() as f64;
            }
            sums
        }
    };
    let main = parts.remove(MAIN).unwrap_or_default();
    Score::with_parts(main, parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rewards(pairs: &[(&str, f64)]) -> Rewards {
        let pairs = pairs.iter();
        pairs.map(|(name, v)| ((*name).to_owned(), *v)).collect()
    }

    #[test]
    fn rewards_are_read_or_have_a_reason() {
        let text = |text: &str| read(None, Some(text.as_bytes()));
        assert_eq!(text(" 0.5\n").unwrap(), rewards(&[("reward", 0.5)]));
        for (bad, why) in [
            ("", "empty"),
            ("nan", "finite"),
            ("inf", "finite"),
            ("ok", "\"ok\""),
        ] {
            let e = text(bad).unwrap_err();
            assert!(e.reason.contains(why), "{bad}: {e}");
        }
        let json = |text: &str| read(Some(text.as_bytes()), Some(b"1"));
        let both = json(r#"{"reward": 1, "style": 0.25}"#).unwrap();
        assert_eq!(both, rewards(&[("reward", 1.0), ("style", 0.25)]));
        assert_eq!(json("0.75").unwrap(), rewards(&[("reward", 0.75)]));
        for (bad, why) in [
            ("{", "not JSON"),
            ("{\"reward\": \"1\"}", "reward is not"),
            ("{\"style\": 1}", "no `reward`; it has: style"),
            ("[1]", "not a finite"),
            ("{\"reward\": true}", "not a finite"),
        ] {
            let e = json(bad).unwrap_err();
            assert!(e.reason.contains(why), "{bad}: {e}");
        }
        let e = read(None, None).unwrap_err();
        assert!(e.reason.contains("neither"), "{e}");
    }

    #[test]
    fn steps_are_combined_as_the_task_says() {
        let steps = [
            rewards(&[("reward", 1.0), ("style", 1.0)]),
            rewards(&[("reward", 0.0)]),
        ];
        let mean = score(&steps, StepStrategy::Mean).unwrap();
        assert_eq!((mean.value, mean.parts["style"]), (0.5, 0.5));
        let last = score(&steps, StepStrategy::Final).unwrap();
        assert_eq!((last.value, last.parts.len()), (0.0, 0));
        assert!(score(&[], StepStrategy::Mean).is_err());
    }

    #[test]
    fn a_threshold_needs_its_reward() {
        let some = rewards(&[("reward", 0.5), ("style", 0.9)]);
        let each = |pairs: &[(&str, f64)]| MinReward::Each(rewards(pairs));
        assert!(passes(&some, None));
        assert!(passes(&some, Some(&MinReward::Main(0.5))));
        assert!(!passes(&some, Some(&MinReward::Main(0.6))));
        assert!(passes(&some, Some(&each(&[("style", 0.9)]))));
        assert!(!passes(&some, Some(&each(&[("other", -1.0)]))));
    }

    proptest! {
        /// Whatever a verifier writes is a finite reward or a reason.
        #[test]
        fn any_file_is_a_reward_or_a_reason(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            for read in [read(Some(&bytes), None), read(None, Some(&bytes))] {
                match read {
                    Ok(all) => prop_assert!(all[MAIN].is_finite()),
                    Err(e) => prop_assert!(!e.reason.is_empty()),
                }
            }
        }
    }
}
