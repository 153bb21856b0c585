use super::*;
use proptest::prelude::*;

fn config(max_running: usize, max_starting: usize) -> AdmissionConfig {
    AdmissionConfig {
        max_starting,
        pressure: None,
        ..AdmissionConfig::new(max_running, 10)
    }
}

fn status(kv_tokens: usize) -> EngineStatus {
    EngineStatus {
        kv_tokens_total: kv_tokens,
        kv_tokens_free: kv_tokens,
        ..EngineStatus::default()
    }
}

/// A core in front of an engine with `kv_tokens`, and `count` episodes that have asked to begin.
fn asked(
    config: AdmissionConfig,
    kv_tokens: usize,
    count: usize,
) -> (AdmissionCore, Vec<EpisodeKey>) {
    let mut core = AdmissionCore::new(config);
    core.read(&status(kv_tokens), 0.0);
    let keys = (0..count).map(|_| core.ask().0).collect();
    (core, keys)
}

/// `len` tokens that nobody else has.
fn own(key: EpisodeKey, len: usize) -> Vec<TokenId> {
    vec![key.0 as TokenId; len]
}

/// A turn of an episode that is granted at once.
fn generates(core: &mut AdmissionCore, key: EpisodeKey, len: usize, now_s: f64) -> Ticket {
    let ticket = core.ask_turn(key, &own(key, len), now_s);
    assert_eq!(core.decide(now_s), [ticket]);
    ticket
}

#[test]
fn starting_is_bounded_apart_from_running() {
    let (mut core, keys) = asked(config(4, 2), 0, 6);
    assert_eq!(core.decide(0.0).len(), 2);
    assert_eq!(core.decide(0.0).len(), 0);
    let turn = core.ask_turn(keys[0], &[1], 0.0);
    let granted = core.decide(0.0);
    assert!(granted.contains(&turn));
    assert_eq!(
        granted.len(),
        2,
        "its turn, and the next start: {granted:?}"
    );
    core.ended(keys[1]);
    assert_eq!(core.decide(0.0).len(), 1);
    for key in &keys[2..4] {
        core.ask_turn(*key, &[1], 0.0);
    }
    assert_eq!(core.decide(0.0).len(), 3);
    let r = core.reading();
    assert_eq!((r.new, r.starting, r.generating, r.started), (1, 1, 3, 5));
    core.ended(keys[0]);
    assert_eq!(core.decide(0.0).len(), 1);
}

#[test]
fn a_turn_waits_for_capacity_instead_of_evicting_and_goes_on_when_there_is_some() {
    let (mut core, keys) = asked(config(4, 4), 100, 2);
    core.decide(0.0);
    let first = generates(&mut core, keys[0], 60, 0.0);
    let second = core.ask_turn(keys[1], &own(keys[1], 30), 0.0);
    assert_eq!(core.decide(1.0), []);
    let r = core.reading();
    assert_eq!((r.waiting_turns, r.paused, r.held_tokens), (1, 1, 74));
    // An episode in its tool keeps its KV capacity for a while, if the engine has other work; here it has
    // none.
    core.turn_ended(keys[0], first, 2.0);
    assert_eq!(core.decide(2.0), [second]);
    let r = core.reading();
    assert_eq!((r.pauses, r.waited_turns, r.waited_s), (1, 1, 2.0));
    // The paused one comes back to a full engine and waits in turn.
    let third = core.ask_turn(keys[0], &own(keys[0], 62), 3.0);
    assert_eq!(core.decide(3.0), []);
    core.ended(keys[1]);
    assert_eq!(core.decide(4.0), [third]);
}

#[test]
fn who_is_in_a_tool_for_long_gives_way_the_smallest_first() {
    let (mut core, keys) = asked(config(8, 8), 240, 4);
    core.decide(0.0);
    let small = generates(&mut core, keys[0], 20, 0.0);
    let large = generates(&mut core, keys[1], 60, 0.0);
    generates(&mut core, keys[2], 60, 0.0);
    core.turn_ended(keys[0], small, 0.0);
    core.turn_ended(keys[1], large, 0.0);
    let waits = core.ask_turn(keys[3], &own(keys[3], 40), 0.5);
    assert_eq!(core.decide(1.0), [], "190 of 240 held, 58 more asked for");
    assert_eq!(core.decide(2.0), [waits]);
    let r = core.reading();
    assert_eq!((r.pauses, r.acting, r.paused), (1, 1, 1));
    assert!(matches!(core.episodes[&keys[0]], Phase::Paused));
}

#[test]
fn growth_of_one_that_goes_on_pauses_others_that_act_before_it_waits_itself() {
    let (mut core, keys) = asked(config(8, 8), 100, 2);
    core.decide(0.0);
    let turns = [30, 40].iter().zip(&keys);
    let turns: Vec<Ticket> = turns
        .map(|(&len, key)| generates(&mut core, *key, len, 0.0))
        .collect();
    core.turn_ended(keys[0], turns[0], 0.0);
    core.turn_ended(keys[1], turns[1], 0.0);
    generates(&mut core, keys[1], 60, 0.1);
    assert!(matches!(core.episodes[&keys[0]], Phase::Paused));
    assert_eq!(core.reading().held_tokens, 74);
}

#[test]
fn a_context_larger_than_the_capacity_runs_alone_and_the_oldest_is_forced_at_last() {
    let mut limits = config(8, 8);
    limits.force_after_s = 50.0;
    let (mut core, keys) = asked(limits, 100, 3);
    core.decide(0.0);
    let first = generates(&mut core, keys[0], 500, 0.0);
    let waits = core.ask_turn(keys[1], &own(keys[1], 90), 1.0);
    let smaller = core.ask_turn(keys[2], &own(keys[2], 10), 2.0);
    assert_eq!(core.decide(50.0), []);
    assert_eq!(core.decide(51.0), [waits]);
    assert_eq!(core.reading().forced_turns, 1);
    core.turn_ended(keys[0], first, 51.5);
    core.ended(keys[0]);
    core.ended(keys[1]);
    assert_eq!(core.decide(51.5), [smaller]);
}

#[test]
fn calls_of_one_episode_overlap_and_one_that_gives_up_holds_nothing() {
    let (mut core, keys) = asked(config(8, 8), 100, 2);
    core.decide(0.0);
    let one = generates(&mut core, keys[0], 40, 0.0);
    let two = generates(&mut core, keys[0], 48, 0.0);
    assert_eq!(
        core.reading().held_tokens,
        48 + 16 + 20,
        "two blocks are shared"
    );
    core.turn_ended(keys[0], one, 0.0);
    assert_eq!(core.reading().generating, 1);
    let gone = core.ask_turn(keys[1], &own(keys[1], 90), 0.0);
    assert_eq!(core.decide(0.0), []);
    core.turn_ended(keys[1], gone, 0.0);
    assert_eq!(core.reading().waiting_turns, 0);
    core.turn_ended(keys[0], two, 0.0);
    assert_eq!(core.reading().acting, 1);
    core.ended(keys[0]);
    assert_eq!(core.reading().held_tokens, 0);
}

#[test]
fn pressure_pauses_those_that_act_and_stops_new_ones() {
    let mut limits = config(4, 4);
    limits.pressure = Some(PressureConfig::default());
    let (mut core, keys) = asked(limits, 1000, 6);
    core.decide(0.0);
    for key in &keys[..4] {
        let turn = generates(&mut core, *key, 50, 0.0);
        core.turn_ended(*key, turn, 0.0);
    }
    let preempted = EngineStatus {
        preemptions: 1,
        ..status(1000)
    };
    core.read(&preempted, 5.0);
    assert_eq!(core.decide(5.0), []);
    let r = core.reading();
    assert_eq!((r.limit, r.acting, r.paused, r.cuts), (3, 3, 1, 1));
}

/// An episode of the simulation.
struct Sim {
    key: EpisodeKey,
    waits: Option<Ticket>,
    turn: Option<Ticket>,
    begun: bool,
    context: usize,
    turns_left: u32,
}

struct World {
    core: AdmissionCore,
    sims: Vec<Sim>,
    limits: AdmissionConfig,
    kv_tokens: usize,
    now_s: f64,
}

impl World {
    fn settle(&mut self) {
        for ticket in self.core.decide(self.now_s) {
            let sim = self.sims.iter_mut().find(|s| s.waits == Some(ticket));
            let sim = sim.expect("whoever is let go on waited, once");
            sim.waits = None;
            if sim.begun {
                sim.turn = Some(ticket);
            }
            sim.begun = true;
        }
        let r = self.core.reading();
        assert!(r.starting <= self.limits.max_starting, "{r:?}");
        let begun = r.starting + r.generating + r.acting + r.paused;
        assert!(begun <= self.limits.max_running, "{r:?}");
        let over = r.held_tokens > self.kv_tokens;
        assert!(!over || r.generating + r.acting == 1, "{r:?}");
        let active = r.starting + r.generating + r.acting;
        assert!(active <= r.limit || r.acting == 0, "{r:?}");
        assert_eq!(r.new + begun, self.sims.len(), "{r:?}");
    }

    fn end(&mut self, index: usize) {
        let sim = self.sims.swap_remove(index);
        for ticket in sim.turn.iter().chain(&sim.waits) {
            self.core.turn_ended(sim.key, *ticket, self.now_s);
        }
        self.core.ended(sim.key);
    }

    /// The next thing that happens to an episode by itself; whether anything can.
    fn step(&mut self, index: usize, growth: usize) -> bool {
        let now_s = self.now_s;
        let sim = &mut self.sims[index];
        if sim.waits.is_some() {
            return false;
        }
        if let Some(ticket) = sim.turn.take() {
            self.core.turn_ended(sim.key, ticket, now_s);
        } else if sim.turns_left == 0 {
            self.end(index);
        } else {
            sim.turns_left -= 1;
            sim.context += growth;
            let context = own(sim.key, sim.context);
            sim.waits = Some(self.core.ask_turn(sim.key, &context, now_s));
        }
        true
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whatever happens in whatever order: no bound is passed, everybody gets to the end without
    /// waiting being cut short, and nothing is held when all are gone.
    #[test]
    fn bounds_hold_nobody_starves_and_everything_is_given_back(
        (max_running, max_starting) in (1usize..6, 1usize..4),
        kv_tokens in 40usize..400,
        pressure in any::<bool>(),
        turns in prop::collection::vec(0u32..4, 1..12),
        events in prop::collection::vec((0u8..8, 0usize..12, 1usize..90), 0..120),
    ) {
        let mut limits = config(max_running, max_starting);
        limits.force_after_s = f64::INFINITY;
        limits.pressure = pressure.then(PressureConfig::default);
        let mut core = AdmissionCore::new(limits.clone());
        core.read(&status(kv_tokens), 0.0);
        let sims = turns.iter().map(|&turns_left| {
            let (key, ticket) = core.ask();
            Sim { key, waits: Some(ticket), turn: None, begun: false, context: 20, turns_left }
        });
        let sims = sims.collect();
        let mut world = World { core, sims, limits, kv_tokens, now_s: 0.0 };
        world.settle();
        let mut preemptions = 0;
        for (kind, index, size) in events {
            let count = world.sims.len();
            if count == 0 {
                break;
            }
            match kind {
                0 => world.now_s += 0.7,
                1 => {
                    preemptions += (size % 2) as u64;
                    let kv_tokens_free = kv_tokens / (1 + size % 9);
                    let used = EngineStatus { preemptions, kv_tokens_free, ..status(kv_tokens) };
                    world.core.read(&used, world.now_s);
                }
                2 if size < 15 => world.end(index % count),
                _ => { world.step(index % count, size); }
            }
            world.settle();
        }
        // The rest runs by itself: each round somebody must get further.
        while !world.sims.is_empty() {
            world.now_s += 3.0;
            world.settle();
            let before = world.sims.len();
            let moved = (0..before).rev().filter(|&i| i < world.sims.len() && world.step(i, 3)).count();
            world.settle();
            prop_assert!(moved > 0, "stuck: {:?}", world.core.reading());
        }
        let r = world.core.reading();
        prop_assert_eq!((r.new, r.starting, r.generating, r.acting, r.paused), (0, 0, 0, 0, 0));
        prop_assert_eq!((r.held_tokens, r.waiting_turns), (0, 0));
        prop_assert_eq!((world.core.turns_by_size.len(), world.core.acting_by_size.len()), (0, 0));
    }
}
