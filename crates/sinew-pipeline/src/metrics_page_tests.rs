//! Holds `docs/metrics.md` to the records: each key of each is defined there, and no other.

use serde::Deserialize;
use serde::de::value::Error;
use serde::de::{Deserializer, Error as _, Visitor};
use sinew_algo::{Paired, PreferenceReport, RepairReport, TokenCounts};
use sinew_orchestrator::{
    AdmissionRecord, EpisodeStats, EvalRecord, FormatCounts, HeldOutGain, Interval, Percentiles,
    SampleCount, SampleStatus, Spread, StepRecord,
};
use sinew_rollout::{Hop, Hops, ResumedCounts, WaitTimes};
use sinew_train::PhaseSeconds;
use sinew_train::loss::LossMetrics;
use std::collections::{BTreeMap, BTreeSet};

/// Takes the names of a struct's fields, which the page must document, and reads nothing.
struct Names<'a>(&'a mut BTreeSet<&'static str>);

impl<'de> Deserializer<'de> for Names<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("not a struct"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Error> {
        self.0.extend(fields);
        Err(Error::custom("only its names"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

fn names<'de, T: Deserialize<'de>>() -> BTreeSet<&'static str> {
    let mut names = BTreeSet::new();
    assert!(T::deserialize(Names(&mut names)).is_err());
    assert!(!names.is_empty());
    names
}

#[test]
fn the_page_defines_each_key_and_no_other() {
    let spreads = [
        names::<Spread>(),
        names::<Percentiles>(),
        names::<Interval>(),
    ];
    let wanted: BTreeMap<&str, BTreeSet<&str>> = [
        ("A line of `metrics.jsonl`", names::<StepRecord>()),
        (
            "`rollout`, and `stats` of a measurement",
            names::<EpisodeStats>(),
        ),
        (
            "Spreads, percentiles, intervals",
            spreads.into_iter().flatten().collect(),
        ),
        ("`samples`", names::<SampleStatus>()),
        ("Counts with a first cause", names::<SampleCount>()),
        ("`tokens`", names::<TokenCounts>()),
        ("`metrics`", names::<LossMetrics>()),
        ("`preference`", names::<PreferenceReport>()),
        ("`repair`", names::<RepairReport>()),
        ("`formats`", names::<FormatCounts>()),
        ("`train_phases`", names::<PhaseSeconds>()),
        ("`admission`", names::<AdmissionRecord>()),
        ("`waits`", names::<WaitTimes>()),
        ("`resumed`", names::<ResumedCounts>()),
        ("`hops`", names::<Hops>()),
        ("A kind of `hops`", names::<Hop>()),
        ("A line of `evals.jsonl`", names::<EvalRecord>()),
        ("`gain`", names::<HeldOutGain>()),
        ("A gain", names::<Paired>()),
    ]
    .into();
    let page = std::fs::read_to_string("../../docs/metrics.md").unwrap();
    let mut told: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut section = "";
    for line in page.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            section = title;
        }
        if let Some((key, definition)) = line.strip_prefix("| `").and_then(|l| l.split_once("` |"))
        {
            assert!(definition.len() > 5, "{section}: {key} has no definition");
            assert!(
                told.entry(section).or_default().insert(key),
                "{section}: {key} twice"
            );
        }
    }
    assert_eq!(told, wanted);
}
