//! All algorithms by both trainers: their signals, log-probabilities, gradients and weights.
//!
//! The algorithms come from the list of the crate, so that a new one is compared without a change here.

use crate::bench::{Bench, config, device, weights, wide_params};
use crate::episodes::{Episodes, GROUP};
use crate::trained::{
    Fresh, Job, SEED, Trained, embedded, gap, print_gaps, print_head, weight_gap,
};
use sinew_algo::{
    Advantage, Algorithm, AlgorithmConfig, AlgorithmKind, Column, Columns, Composition,
    ConfigError, KlConfig, KlPlace, Needs, Prepared, RunFacts, Truncated,
};
use sinew_model::{Family, ValueHead};
use sinew_torch::{Checkpointing, CriticOptions};
use sinew_train::{ModelPolicy, Policy, TrainerConfig, score_rows, score_top, score_values};
use sinew_types::{TokenLogprob, TrainRow};

/// Tokens of a micro-batch. The rows of most algorithms fill two, and those of a minibatch one, so that one
/// lane is empty.
const TOKENS: usize = 160;
/// Seeds of the frozen models.
const REFERENCE: u64 = 12;
const TEACHER: u64 = 13;
/// Factor of the critic's learning rate.
const CRITIC_RATE: f32 = 0.5;
/// Bound on losses and norms of gradients, relative.
const RELATIVE: f64 = 1e-5;
/// Largest distance of log-probabilities, values and advantages of rows.
const MAX_SIGNALS: f64 = 1e-5;

/// An algorithm with its options and the number of updates by batch.
struct Case {
    name: String,
    config: AlgorithmConfig,
    minibatches: u32,
}

impl Case {
    fn needs(&self) -> Needs {
        self.config.composition(GROUP).unwrap().needs()
    }

    /// Gives the algorithm the models that it needs.
    fn algorithm(&self) -> Result<Algorithm, ConfigError> {
        let needs = self.needs();
        self.config.resolve(&RunFacts {
            group_size: GROUP,
            reference: needs.reference(),
            teacher: needs.teacher(),
            critic: needs.values,
            max_staleness: 0,
            updates_per_batch: self.minibatches as usize,
        })
    }

    /// Makes rows with the models of both sides, and trains those of the embedded side by both trainers.
    fn compare(&self, torch: &mut Fresh, episodes: &Episodes) {
        let name = &self.name;
        let algorithm = self.algorithm().unwrap();
        let critic = self.needs().values;
        let rows = rows_of(
            &algorithm,
            episodes,
            &mut Models {
                policy: &mut own(critic),
                reference: &mut frozen(REFERENCE),
                teacher: &mut frozen(TEACHER),
            },
        );
        let policy = torch.policy();
        let mut reference = policy.scorer("reference");
        let mut teacher = policy.scorer("teacher");
        let mut models = Models {
            policy,
            reference: &mut reference,
            teacher: &mut teacher,
        };
        let signals = rows_gap(&rows_of(&algorithm, episodes, &mut models), &rows);
        assert!(signals <= MAX_SIGNALS, "{name}: {signals}");
        let mut job = Job::comparable(&rows, algorithm.loss(), TOKENS, &mut own(critic));
        if self.minibatches > 1 {
            job = Job {
                settings: TrainerConfig {
                    minibatches: self.minibatches,
                    ..job.settings
                },
                steps: 2,
                ..job
            };
        }
        let expected = job.train(&mut own(critic));
        assert_moved(name, &expected);
        let gaps = job.train(torch.policy()).gaps(&expected, &job);
        print_gaps(name, &gaps);
        gaps.check(name, RELATIVE);
    }
}

/// The embedded policy, with a critic if it is asked for.
fn own(critic: bool) -> ModelPolicy {
    let policy = embedded();
    if critic {
        return policy.with_critic(head(), CRITIC_RATE);
    }
    policy
}

/// First weights of the critic of both sides.
fn head() -> ValueHead {
    ValueHead::random(config(Family::Llama).d_model, 4)
}

fn frozen(seed: u64) -> ModelPolicy {
    ModelPolicy::frozen(wide_params(seed), 256, device()).unwrap()
}

/// A torch policy with the frozen models, and with a critic if it is asked for.
fn opened(bench: &Bench, critic: bool) -> Fresh {
    let model = bench.wide_model(SEED);
    let policy = bench.open(&model, |setup| {
        let open = &mut setup.open;
        open.max_tokens = TOKENS as u32;
        open.checkpointing = Checkpointing::None;
        open.critic = critic.then(|| CriticOptions {
            head: head().values().to_vec(),
            lr_scale: CRITIC_RATE,
        });
        for (name, seed) in [("reference", REFERENCE), ("teacher", TEACHER)] {
            open.frozen.insert(name.to_owned(), bench.wide_model(seed));
        }
    });
    Fresh::of(bench, &format!("first-critic-{critic}"), policy)
}

/// All algorithms with their defaults, and options that read further columns.
fn configs() -> Vec<Case> {
    let case = |name: &str, config: AlgorithmConfig| Case {
        name: name.to_owned(),
        config,
        minibatches: 1,
    };
    let kl = |place: KlPlace| {
        Some(KlConfig {
            place,
            estimator: None,
            coefficient: 0.05,
        })
    };
    let all = AlgorithmKind::ALL.iter();
    let mut cases: Vec<Case> = all
        .map(|&kind| case(kind.name(), AlgorithmConfig::new(kind)))
        .collect();
    let in_loss = AlgorithmConfig {
        kl: kl(KlPlace::Loss),
        entropy: Some(0.01),
        ..AlgorithmConfig::new(AlgorithmKind::Grpo)
    };
    cases.push(case("grpo, kl and entropy", in_loss));
    let in_reward = AlgorithmConfig {
        kl: kl(KlPlace::Reward),
        ..AlgorithmConfig::new(AlgorithmKind::ReinforcePp)
    };
    cases.push(case("reinforce_pp, kl", in_reward));
    let bootstrap = AlgorithmConfig {
        truncated: Some(Truncated::Bootstrap),
        ..AlgorithmConfig::new(AlgorithmKind::Ppo)
    };
    cases.push(case("ppo, bootstrap", bootstrap));
    cases
}

/// The cases with one update by batch, and with two where the algorithm allows it.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for one in configs() {
        one.algorithm().unwrap();
        let two = Case {
            name: format!("{}, 2 minibatches", one.name),
            config: one.config.clone(),
            minibatches: 2,
        };
        cases.push(one);
        match two.algorithm() {
            Ok(_) => cases.push(two),
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("updates_per_batch"), "{error}");
            }
        }
    }
    cases
}

/// The models that score rows for an algorithm.
struct Models<'a> {
    policy: &'a mut dyn Policy,
    reference: &'a mut dyn Policy,
    teacher: &'a mut dyn Policy,
}

/// The columns that an algorithm needs, as a run's learner computes them.
fn columns(
    algorithm: &Algorithm,
    prepared: &Prepared<'_>,
    known: &Columns,
    models: &mut Models<'_>,
) -> Columns {
    let needs = algorithm.needs();
    let mut columns = known.clone();
    if !needs.columns() {
        return columns;
    }
    let draft = prepared.draft(&columns).unwrap();
    let rows = draft.rows();
    if needs.values {
        let values = score_values(models.policy, &draft.value_rows(), TOKENS).unwrap();
        draft.fill_values(&mut columns, values).unwrap();
    }
    let mut fill = |column: Column, model: &mut dyn Policy| {
        let scores = score_rows(model, rows, TOKENS).unwrap();
        draft.fill(&mut columns, column, &scores).unwrap();
    };
    if needs.prox_logprobs {
        fill(Column::ProxLogprobs, models.policy);
    }
    if needs.ref_logprobs {
        fill(Column::RefLogprobs, models.reference);
    }
    if needs.teacher_logprobs {
        fill(Column::TeacherLogprobs, models.teacher);
    }
    if needs.teacher_top > 0 {
        let k = needs.teacher_top as usize;
        let tops = score_top(models.teacher, rows, TOKENS, k).unwrap();
        draft.fill_top(&mut columns, &tops).unwrap();
    }
    columns
}

/// The rows of an algorithm, with all columns that its loss reads.
fn rows_of(algorithm: &Algorithm, episodes: &Episodes, models: &mut Models<'_>) -> Vec<TrainRow> {
    let prepared = algorithm.prepare(&episodes.groups).unwrap();
    let columns = columns(algorithm, &prepared, &episodes.columns, models);
    let (mut rows, report) = prepared.rows(&columns).unwrap();
    assert!(report.quarantined.is_empty(), "{report:?}");
    assert!(rows.len() > 1, "{report:?}");
    if algorithm.needs().ref_in_loss {
        let scored = score_rows(models.reference, &rows, TOKENS).unwrap();
        for (row, column) in rows.iter_mut().zip(scored) {
            row.ref_logprobs = Some(column);
        }
    }
    rows
}

/// The largest distance between the signals of rows that are equal otherwise.
fn rows_gap(found: &[TrainRow], expected: &[TrainRow]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let mut largest = 0.0f64;
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.tokens, expected.tokens);
        assert_eq!(found.weights, expected.weights);
        assert_eq!(found.temperatures, expected.temperatures);
        assert_eq!(found.behaviour_logprobs, expected.behaviour_logprobs);
        assert_eq!(found.masks, expected.masks);
        let has_top = |row: &TrainRow| row.teacher_top.is_some();
        assert_eq!(has_top(found), has_top(expected));
        for (found, expected) in signals(found).into_iter().zip(signals(expected)) {
            largest = largest.max(gap(found, expected));
        }
        let tops = |row: &TrainRow| row.teacher_top.clone().unwrap_or_default();
        for (found, expected) in tops(found).iter().zip(&tops(expected)) {
            largest = largest.max(top_gap(found, expected));
        }
    }
    largest
}

/// The columns of a row that models and advantages fill; empty where there is none.
fn signals(row: &TrainRow) -> [&[f32]; 5] {
    [
        &row.advantages,
        row.ref_logprobs.as_deref().unwrap_or_default(),
        row.prox_logprobs.as_deref().unwrap_or_default(),
        row.values.as_deref().unwrap_or_default(),
        row.returns.as_deref().unwrap_or_default(),
    ]
}

/// The largest distance between the log-probabilities of the same tokens. The last ones may be others if they
/// are equally likely.
fn top_gap(found: &[TokenLogprob], expected: &[TokenLogprob]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let Some(last) = expected.last() else {
        return 0.0;
    };
    let apart = |top: &TokenLogprob| {
        let same = expected.iter().find(|other| other.id == top.id);
        gap(&[top.logprob], &[same.unwrap_or(last).logprob])
    };
    found.iter().map(apart).fold(0.0, f64::max)
}

/// Checks that the weights moved by a thousand times the distance that is allowed.
fn assert_moved(name: &str, trained: &Trained) {
    let moved = weight_gap(&weights(&mut embedded()), &trained.weights);
    assert!(moved > 1e-3, "{name}: {moved}");
}

pub(crate) fn all_train_as_the_embedded_ones(bench: &Bench) {
    let episodes = Episodes::sampled(&mut embedded());
    let cases = cases();
    print_head("algorithm");
    for critic in [false, true] {
        let mut torch = opened(bench, critic);
        for case in cases.iter().filter(|case| case.needs().values == critic) {
            case.compare(&mut torch, &episodes);
        }
    }
}

/// Rows of GRPO with a KL term and an entropy bonus, and their algorithm.
pub(crate) struct Batch {
    pub(crate) algorithm: Algorithm,
    pub(crate) rows: Vec<TrainRow>,
}

impl Batch {
    pub(crate) fn new() -> Self {
        let name = "grpo, kl and entropy";
        let configs = configs();
        let case = configs.iter().find(|case| case.name == name).unwrap();
        let algorithm = case.algorithm().unwrap();
        let mut models = Models {
            policy: &mut embedded(),
            reference: &mut frozen(REFERENCE),
            teacher: &mut frozen(TEACHER),
        };
        let episodes = Episodes::sampled(&mut embedded());
        let rows = rows_of(&algorithm, &episodes, &mut models);
        Self { algorithm, rows }
    }
}

/// The inputs that the episodes and models of these tests give to algorithms, by the algorithms that read
/// them.
#[test]
fn the_inputs_of_the_algorithms_are_given() {
    let with = |reads: fn(&Composition) -> bool| -> Vec<&str> {
        let all = AlgorithmKind::ALL.iter();
        let read = all.filter(|kind| reads(&kind.preset()));
        read.map(|kind| kind.name()).collect()
    };
    assert_eq!(with(|c| c.needs().teacher()), ["opd", "opd_top_k"]);
    assert_eq!(with(|c| c.needs().values), ["ppo", "turn_ppo"]);
    let pairs = with(|c| matches!(c.advantage, Advantage::Preference { .. }));
    assert_eq!(pairs, ["dpo"]);
    assert_eq!(with(|c| c.needs().reference()), ["dpo"]);
    // Demonstrations are the successes among the episodes.
    assert_eq!(with(|c| c.filters.only_success), ["sft"]);
    assert_eq!(with(|c| c.needs().states), ["gigpo"]);
    assert_eq!(with(|c| c.needs().turn_rewards), ["process_grpo"]);
    assert_eq!(with(|c| c.needs().tool_counts), ["grpo_roc"]);
    let cases = cases();
    let two = cases.iter().filter(|case| case.minibatches == 2).count();
    assert!(two > AlgorithmKind::ALL.len() / 2, "{two}");
}
