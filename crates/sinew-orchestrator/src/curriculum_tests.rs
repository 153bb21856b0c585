//! Tests of draws by shares: fixed parts, moving parts, and the state in a checkpoint.

use super::*;
use proptest::prelude::*;
use sinew_env::MixtureTasks;
use sinew_env::tiny::TinyTaskset;
use std::sync::Arc;

#[test]
fn what_a_run_knows_of_task_types_survives_a_checkpoint_to_the_bit() {
    let (config, mut c) = (AdaptiveConfig::default(), Curriculum::default());
    for n in 0..400u32 {
        let reward = f64::from(n * n % 97) / 97.0;
        let seen = [
            ("near", n % 3 == 0, reward),
            ("far", n % 7 == 0, 1.0 - reward),
        ];
        c.estimates.update(&config, seen);
        let text = serde_json::to_string(&c).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let back: Curriculum = serde_json::from_value(value).unwrap();
        assert_eq!(back, c, "{text}");
    }
}

#[test]
fn an_episode_alone_is_compared_with_its_task_or_with_all() {
    let mut c = Curriculum::default();
    assert_eq!(c.earlier("a"), None);
    c.reward_alone("a", 1.0);
    c.reward_alone("b", 0.0);
    let mean = |task: &str| c.earlier(task).map(|e| e.mean());
    assert_eq!((mean("a"), mean("b")), (Some(1.0), Some(0.0)));
    assert_eq!(mean("new"), Some(0.5));
    for n in 0..MAX_TASK_KEYS + 5 {
        c.reward_alone(&format!("t{n}"), 0.0);
    }
    assert_eq!(c.alone.len(), MAX_TASK_KEYS);
}

fn request(step: u64, count: usize) -> DrawRequest {
    DrawRequest {
        seed: 3,
        draw_seed: 3,
        step,
        count,
    }
}

fn all_of(taskset: &dyn Taskset, by_type: ByType) -> TaskShares {
    let environment = EnvironmentShare {
        weight: 1.0,
        tasks: 0..taskset.len(Split::Train),
        by_type,
    };
    TaskShares::of(taskset, &[environment]).unwrap()
}

#[test]
fn a_solved_type_is_drawn_less_and_tasks_go_round() {
    let taskset = TinyTaskset::new(0);
    let tasks = all_of(&taskset, ByType::Adaptive);
    let (config, mut c) = (AdaptiveConfig::default(), Curriculum::default());
    assert_eq!(tasks.0.len(), 2);
    let kind = |i: usize| taskset.get(Split::Train, i).unwrap().kind;
    let mut near = Vec::new();
    for step in 1..=40 {
        let mut again = c.clone();
        let drawn = c.draw(&tasks, Some(&config), request(step, 16));
        assert_eq!(drawn, again.draw(&tasks, Some(&config), request(step, 16)));
        near.push(drawn.iter().filter(|i| kind(**i) == "corridor-1").count());
        // Near goals are always reached, far ones every other time.
        let seen: Vec<_> = drawn
            .iter()
            .enumerate()
            .map(|(n, i)| (kind(*i), kind(*i) == "corridor-1" || n % 2 == 0))
            .collect();
        let seen = seen
            .iter()
            .map(|(k, s)| (k.as_str(), *s, f64::from(u8::from(*s))));
        c.estimates.update(&config, seen);
    }
    // Uniform draws would be 160.
    let later: usize = near[20..].iter().sum();
    assert!(later > 0 && later < 80, "{near:?}");
    let shares = c.shares(&config, &tasks);
    assert!(shares["corridor-2"] > 0.75, "{shares:?}");
    let near: Vec<usize> = (0..taskset.len(Split::Train))
        .filter(|i| kind(*i) == "corridor-1")
        .collect();
    let mut fresh = Curriculum::default();
    let all = fresh.draw(&tasks, Some(&config), request(1, 200));
    let all: Vec<usize> = all.into_iter().filter(|i| near.contains(i)).collect();
    let first: BTreeSet<_> = all[..near.len()].iter().collect();
    assert_eq!(first.len(), near.len(), "once each before any twice");
}

#[test]
fn types_are_drawn_by_their_weights_and_each_must_have_one() {
    let taskset = TinyTaskset::new(0);
    let weights = |near: &[(&str, f64)]| {
        let weights = near.iter().map(|(k, w)| ((*k).to_owned(), *w));
        ByType::Weights(weights.collect())
    };
    let tasks = all_of(
        &taskset,
        weights(&[("corridor-1", 3.0), ("corridor-2", 1.0)]),
    );
    let drawn = Curriculum::default().draw(&tasks, None, request(1, 16));
    let near = drawn
        .iter()
        .filter(|i| taskset.kind(Split::Train, **i).unwrap() == "corridor-1");
    assert_eq!(near.count(), 12);
    for (typed, part) in [
        (vec![("corridor-1", 1.0)], "without the type `corridor-2`"),
        (
            vec![("corridor-1", 1.0), ("corridor-2", 1.0), ("far", 1.0)],
            "unknown type `far`",
        ),
    ] {
        let environment = EnvironmentShare {
            weight: 1.0,
            tasks: 0..taskset.len(Split::Train),
            by_type: weights(&typed),
        };
        let e = TaskShares::of(&taskset, &[environment]).unwrap_err();
        let e = e.to_string();
        assert!(
            e.contains(part) && e.contains("corridor-1, corridor-2"),
            "{e}"
        );
    }
}

/// Tiny tasks whose types have a `:`, as columns of rows may.
struct Colons(TinyTaskset);

impl Taskset for Colons {
    fn name(&self) -> &str {
        "colons"
    }

    fn len(&self, split: Split) -> usize {
        self.0.len(split)
    }

    fn get(&self, split: Split, index: usize) -> Result<sinew_types::Task, TasksetError> {
        self.0.get(split, index)
    }

    fn kind(&self, split: Split, index: usize) -> Result<String, TasksetError> {
        Ok(format!("far:{}", self.0.kind(split, index)?))
    }
}

#[test]
fn a_colon_in_a_type_names_no_environment_outside_of_a_mixture() {
    let taskset = Colons(TinyTaskset::new(0));
    let of = |taskset: &dyn Taskset, kinds: [&str; 2]| {
        let weights = kinds.map(|kind| (kind.to_owned(), 1.0));
        let environment = EnvironmentShare {
            weight: 1.0,
            tasks: 0..taskset.len(Split::Train),
            by_type: ByType::Weights(weights.into()),
        };
        TaskShares::of(taskset, &[environment]).map_err(|e| e.to_string())
    };
    let own = ["far:corridor-1", "far:corridor-2"];
    assert!(of(&taskset, own).is_ok());
    let e = of(&taskset, ["corridor-1", "corridor-2"]).unwrap_err();
    assert!(e.contains("unknown type `corridor-1`"), "{e}");
    let member: Arc<dyn Taskset> = Arc::new(taskset);
    let mixture = MixtureTasks::new(vec![("a".to_owned(), member)]).unwrap();
    assert!(of(&mixture, own).is_ok());
}

/// Two tiny worlds with their shares.
fn mixture(weights: [f64; 2]) -> (MixtureTasks, TaskShares) {
    let member = |name: &str| {
        let tasks: Arc<dyn Taskset> = Arc::new(TinyTaskset::new(0));
        (name.to_owned(), tasks)
    };
    let tasks = MixtureTasks::new(vec![member("a"), member("b")]).unwrap();
    let shares: Vec<EnvironmentShare> = tasks
        .members()
        .into_iter()
        .zip(weights)
        .map(|((_, tasks), weight)| EnvironmentShare {
            weight,
            tasks,
            by_type: ByType::One,
        })
        .collect();
    let shares = TaskShares::of(&tasks, &shares).unwrap();
    (tasks, shares)
}

proptest! {
    /// Draws are a function of seed, step and state; each step has each environment's share, rounded.
    #[test]
    fn environments_are_drawn_by_their_weights(
        weights in prop::array::uniform2(0.01f64..100.0),
        (seed, count) in (any::<u64>(), 1usize..40),
    ) {
        let (tasks, shares) = mixture(weights);
        let len = tasks.len(Split::Train);
        let (mut one, mut other) = (Curriculum::default(), Curriculum::default());
        for step in 1..20 {
            let request = DrawRequest { seed, draw_seed: seed, step, count };
            let drawn = one.draw(&shares, None, request);
            prop_assert_eq!(&drawn, &other.draw(&shares, None, request));
            prop_assert_eq!(drawn.len(), count);
            let first = drawn.iter().filter(|i| **i < len / 2).count() as f64;
            let expected = count as f64 * weights[0] / (weights[0] + weights[1]);
            prop_assert!((first - expected).abs() < 1.0 + 1e-6, "{first} of {expected}");
        }
        prop_assert_eq!(one, other);
    }
}

#[test]
fn adaptive_types_leave_the_shares_of_environments_as_they_are() {
    let (tasks, _) = mixture([3.0, 1.0]);
    let environments: Vec<EnvironmentShare> = tasks
        .members()
        .into_iter()
        .zip([3.0, 1.0])
        .map(|((_, tasks), weight)| EnvironmentShare {
            weight,
            tasks,
            by_type: ByType::Adaptive,
        })
        .collect();
    let shares = TaskShares::of(&tasks, &environments).unwrap();
    let (config, mut c) = (AdaptiveConfig::default(), Curriculum::default());
    for _ in 0..10 {
        let solved = (0..8).map(|_| ("a:corridor-1", true, 1.0));
        let hard = (0..8).map(|n| ("a:corridor-2", n % 2 == 0, f64::from(n % 2)));
        c.update(&config, solved.chain(hard));
    }
    let p = c.shares(&config, &shares);
    assert!(
        (p["a:corridor-1"] + p["a:corridor-2"] - 0.75).abs() < 1e-12,
        "{p:?}"
    );
    assert!(p["a:corridor-2"] > 2.0 * p["a:corridor-1"], "{p:?}");
    assert!(
        (p["b:corridor-1"] - p["b:corridor-2"]).abs() < 1e-12,
        "{p:?}"
    );
}

fn seen(tasks: &dyn Taskset, task: usize, success: bool) -> CurriculumSample {
    CurriculumSample {
        task,
        kind: tasks.kind(Split::Train, task).unwrap(),
        success,
        reward: f64::from(u8::from(success)),
    }
}

fn signal(signal: Signal) -> AdaptiveConfig {
    AdaptiveConfig {
        signal,
        ..AdaptiveConfig::default()
    }
}

/// Writes and reads the curriculum, as a checkpoint does.
fn restored(c: &Curriculum) -> Curriculum {
    let value = serde_json::to_value(c).unwrap();
    serde_json::from_value(value).unwrap()
}

#[test]
fn solved_and_hopeless_tasks_go_to_pools_that_are_drawn_rarely() {
    let taskset = TinyTaskset::new(0);
    let tasks = all_of(&taskset, ByType::Pools);
    let (config, mut c) = (signal(Signal::Pools), Curriculum::default());
    let len = taskset.len(Split::Train);
    // Every task once before one twice, as long as nothing is known.
    let first = c.draw(&tasks, Some(&config), request(1, len));
    assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), len);
    // One of every three tasks is easy, one is hard, and one is neither.
    let learned: Vec<CurriculumSample> = (0..len)
        .flat_map(|task| [task % 3 == 0, task % 3 != 1].map(|s| seen(&taskset, task, s)))
        .collect();
    c.learn(&tasks, &config, &learned);
    let shares = c.shares(&config, &tasks);
    assert_eq!((shares["#0/easy"], shares["#0/hard"]), (0.1, 0.1));
    let mut again = restored(&c);
    assert_eq!(again, c);
    let drawn = c.draw(&tasks, Some(&config), request(2, 100));
    assert_eq!(drawn, again.draw(&tasks, Some(&config), request(2, 100)));
    let of = |rest: usize| drawn.iter().filter(|t| *t % 3 == rest).count();
    assert_eq!((of(0), of(1), of(2)), (10, 10, 80));
    // A task that is solved half of the time now is drawn as others are.
    let easy: Vec<usize> = (0..len).filter(|t| t % 3 == 0).collect();
    let learned: Vec<CurriculumSample> = easy
        .iter()
        .flat_map(|t| [true, false].map(|s| seen(&taskset, *t, s)))
        .collect();
    c.learn(&tasks, &config, &learned);
    assert_eq!(c.shares(&config, &tasks)["#0/easy"], 0.0);
}

#[test]
fn types_are_drawn_by_the_share_of_their_groups_that_are_mixed() {
    let taskset = TinyTaskset::new(0);
    let tasks = all_of(&taskset, ByType::Adaptive);
    let (config, mut c) = (signal(Signal::Mixed), Curriculum::default());
    let near = |task: &usize| taskset.kind(Split::Train, *task).unwrap() == "corridor-1";
    let (near, far): (Vec<usize>, Vec<usize>) = (0..taskset.len(Split::Train)).partition(near);
    // Both types are solved half of the time: each near task in one of two episodes, half of the far ones
    // in both.
    let mixed = near[..4].iter().flat_map(|t| [(*t, true), (*t, false)]);
    let whole = far[..4].iter().flat_map(|t| [(*t, t % 2 == 0); 2]);
    let learned: Vec<CurriculumSample> = mixed
        .chain(whole)
        .map(|(task, success)| seen(&taskset, task, success))
        .collect();
    c.learn(&tasks, &config, &learned);
    // Beta(1 + 4, 1) and Beta(1, 1 + 4), with a floor of 0.2 for both.
    let shares = c.shares(&config, &tasks);
    assert!(
        (shares["corridor-1"] - (0.1 + 0.8 * 5.0 / 6.0)).abs() < 1e-12,
        "{shares:?}"
    );
    assert_eq!(restored(&c), c);
    // One episode is too little evidence.
    c.learn(&tasks, &config, &[seen(&taskset, far[0], true)]);
    let after = c.shares(&config, &tasks);
    assert!(
        after["corridor-1"] < shares["corridor-1"],
        "forgotten a little"
    );
}

#[test]
fn pools_of_too_many_tasks_are_refused() {
    let taskset = TinyTaskset::new(0);
    let environment = EnvironmentShare {
        weight: 1.0,
        tasks: 0..MAX_TASK_KEYS + 1,
        by_type: ByType::Pools,
    };
    let e = TaskShares::of(&taskset, &[environment])
        .unwrap_err()
        .to_string();
    assert!(e.contains("at most 10000 training tasks"), "{e}");
}

#[test]
fn a_dial_looks_for_the_level_that_is_solved_half_of_the_time() {
    let taskset = TinyTaskset::new(0);
    let tasks = all_of(&taskset, ByType::Adaptive);
    let (config, mut c) = (signal(Signal::Aim), Curriculum::default());
    let shares = c.shares(&config, &tasks);
    assert!((shares["corridor-1"] - 0.9).abs() < 1e-12, "{shares:?}");
    let near = (0..taskset.len(Split::Train))
        .filter(|t| taskset.kind(Split::Train, *t).unwrap() == "corridor-1");
    let near: Vec<usize> = near.collect();
    for step in 1..=4 {
        let mut again = restored(&c);
        let drawn = c.draw(&tasks, Some(&config), request(step, 16));
        assert_eq!(drawn, again.draw(&tasks, Some(&config), request(step, 16)));
        let solved: Vec<CurriculumSample> = drawn
            .iter()
            .map(|t| seen(&taskset, *t, near.contains(t)))
            .collect();
        c.learn(&tasks, &config, &solved);
    }
    // Near goals are always reached and far ones never: both are drawn.
    let shares = c.shares(&config, &tasks);
    assert!(
        shares["corridor-1"] > 0.2 && shares["corridor-2"] > 0.2,
        "{shares:?}"
    );
}

#[test]
fn levels_are_ordered_by_the_numbers_in_their_names() {
    let mut names = ["level-10", "level-9", "b", "level-9-hard", "a", "level-009"];
    names.sort_by_cached_key(|n| natural(n));
    assert_eq!(
        names,
        ["a", "b", "level-9", "level-009", "level-9-hard", "level-10"]
    );
}

#[test]
fn shares_across_environments_follow_the_signal_times_the_weights() {
    let (tasks, _) = mixture([3.0, 1.0]);
    let environments: Vec<EnvironmentShare> = tasks
        .members()
        .into_iter()
        .zip([3.0, 1.0])
        .map(|((_, tasks), weight)| EnvironmentShare {
            weight,
            tasks,
            by_type: ByType::Adaptive,
        })
        .collect();
    let shares = TaskShares::of(&tasks, &environments).unwrap();
    let config = AdaptiveConfig {
        across: true,
        window: 2,
        floor: 0.0,
        ..signal(Signal::Progress)
    };
    let mut c = Curriculum::default();
    let p = c.shares(&config, &shares);
    assert!((p["a:corridor-1"] - 0.375).abs() < 1e-12, "{p:?}");
    // One type of the second environment makes progress, one of the first makes half of that, no other one.
    let outcomes = [
        ("a:corridor-1", [true, false, true, true]),
        ("a:corridor-2", [false; 4]),
        ("b:corridor-1", [false, false, true, true]),
        ("b:corridor-2", [true; 4]),
    ];
    for (kind, outcomes) in outcomes {
        c.update(&config, outcomes.map(|s| (kind, s, 0.0)));
    }
    let p = c.shares(&config, &shares);
    // Progress 1/2 with weight 3/4, and 1 with weight 1/4.
    assert!((p["a:corridor-1"] - 0.6).abs() < 1e-12, "{p:?}");
    assert!((p["b:corridor-1"] - 0.4).abs() < 1e-12, "{p:?}");
    assert_eq!((p["a:corridor-2"], p["b:corridor-2"]), (0.0, 0.0));
}

#[test]
fn what_is_usual_survives_a_checkpoint_and_is_absent_without_need() {
    assert_eq!(
        serde_json::to_value(Curriculum::default())
            .unwrap()
            .as_object()
            .unwrap()
            .len(),
        2
    );
    let mut c = Curriculum::default();
    let spec = sinew_rollout::EpisodeSpec {
        episode: sinew_types::EpisodeId::new("e"),
        group: sinew_types::GroupId::new("g"),
        task: TinyTaskset::new(0).get(Split::Train, 0).unwrap(),
        draw: 0,
        purpose: "train".into(),
        seed: 0,
    };
    let info = sinew_rollout::RunInfo::default();
    let trace = spec.empty_trace(&info, &sinew_types::SamplingParams::default());
    c.saw(vec![Sighting::of(&trace)]);
    assert_eq!(restored(&c), c);
    assert!(!c.sightings().is_empty());
}
