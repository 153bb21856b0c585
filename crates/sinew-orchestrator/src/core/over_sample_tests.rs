//! Steps that begin more groups than they train.

use super::over_sample::STOPPED;
use super::*;
use std::collections::BTreeSet;

const TASKS: usize = 3;
const MORE: usize = 1;
const SIZE: usize = 2;

fn core(state: CoreState) -> PipelineCore {
    let plain = CoreConfig::plain(8, TASKS, SIZE, 5);
    let config = CoreConfig {
        checkpoint_every: 100,
        over_sample: MORE,
        retries: 1,
        train_tasks: 24,
        held_out_tasks: 0,
        ..plain
    };
    PipelineCore::new(Arc::new(config), state)
}

fn ended(draw: &Draw, failed: bool) -> Event {
    Event::EpisodeEnded(EpisodeResult {
        episode: draw.episode.clone(),
        failed,
        stored: false,
        outcome: Some(("k".into(), true, 1.0)),
        waits_for_group: false,
        changed: None,
    })
}

/// The draws of the step that a command begins.
fn begun(commands: &[Command]) -> Vec<Draw> {
    let starts = commands.iter().filter_map(|c| match c {
        Command::Start { draws, .. } => Some(draws.clone()),
        _ => None,
    });
    starts.flatten().collect()
}

/// Trains the step whose groups are scored by these commands; gives its commit, and what follows.
fn train(core: &mut PipelineCore, commands: &[Command]) -> (UpdateCommit, Vec<Command>) {
    let groups = commands.iter().find_map(|c| match c {
        Command::Score { groups, .. } => Some(groups.concat()),
        _ => None,
    });
    let trained = groups.expect("enough groups are complete");
    core.on(
        Event::RowsReady {
            rows: trained.len(),
            trained,
            dropped: BTreeMap::new(),
            sightings: Vec::new(),
        },
        0.0,
    );
    core.on(Event::UpdateDone(Box::default()), 0.0);
    let next = core.on(Event::WeightsLive { version: 1 }, 0.0);
    let commit = next.iter().find_map(|c| match c {
        Command::Commit(commit) => Some(commit.clone()),
        _ => None,
    });
    (commit.expect("a step is committed"), next)
}

/// Whichever group takes longest: its episodes are stopped and named with the reason, its task is run in a
/// step that stops nothing, and after that every task was trained once.
#[test]
fn what_is_stopped_is_put_off_until_it_fills_a_step() {
    for slowest in 0..=TASKS {
        let mut core = core(CoreState::default());
        core.on(Event::Begin, 0.0);
        let mut commands = core.on(Event::EvaluationDone, 0.0);
        let (mut seeds, mut trained) = (BTreeSet::new(), Vec::new());
        for step in 0..8 {
            let draws = begun(&commands);
            let puts_off = step % 4 != 3;
            assert_eq!(draws.len(), SIZE * (TASKS + usize::from(puts_off) * MORE));
            seeds.extend(draws.iter().map(|d| (d.seed, d.episode.clone())));
            let late = &draws[slowest * SIZE % draws.len()].group;
            let (slow, quick): (Vec<_>, Vec<_>) = draws.iter().partition(|d| d.group == *late);
            let mut last = Vec::new();
            for draw in quick.iter().chain(slow.iter().filter(|_| !puts_off)) {
                last = core.on(ended(draw, false), 0.0);
            }
            let open: Vec<EpisodeId> = slow.iter().map(|d| d.episode.clone()).collect();
            let abandon = Command::Abandon { episodes: open };
            assert_eq!(last.contains(&abandon), puts_off);
            let (commit, next) = train(&mut core, &last);
            assert_eq!(commit.trained.len(), SIZE * TASKS);
            let stopped = commit.dropped.values().filter(|why| *why == STOPPED);
            assert_eq!(stopped.count(), SIZE * usize::from(puts_off) * MORE);
            let named = draws.iter().filter(|d| commit.trained.contains(&d.episode));
            trained.extend(named.map(|d| d.task));
            commands = next;
        }
        trained.sort_unstable();
        let each: Vec<usize> = (0..24).flat_map(|task| [task; SIZE]).collect();
        assert_eq!(trained, each);
        assert_eq!(seeds.len(), SIZE * (6 * (TASKS + MORE) + 2 * TASKS));
    }
}

/// A group that the system failed ends soon: it must not take the place of a group with a signal.
#[test]
fn a_group_that_failed_as_a_whole_is_not_enough() {
    let mut core = core(CoreState::default());
    core.on(Event::Begin, 0.0);
    let draws = begun(&core.on(Event::EvaluationDone, 0.0));
    for draw in &draws[..SIZE] {
        let again = begun(&core.on(ended(draw, true), 0.0));
        core.on(ended(&again[0], true), 0.0);
    }
    let mut last = Vec::new();
    for draw in &draws[SIZE..TASKS * SIZE] {
        last = core.on(ended(draw, false), 0.0);
    }
    assert_eq!(last, []);
    for draw in &draws[TASKS * SIZE..] {
        last = core.on(ended(draw, false), 0.0);
    }
    // All have ended: nothing is left to be stopped, and one group is not trained.
    let failed = &draws[0].group;
    match &last[..] {
        [Command::Score { groups, .. }] => {
            assert_eq!(groups.len(), TASKS);
            let names = groups.iter().flatten().map(EpisodeId::as_str);
            assert!(!names.into_iter().any(|e| e.starts_with(failed.as_str())));
        }
        other => panic!("{other:?}"),
    }
}
