//! Counts that follow the work: the autoscaler of a run, in virtual time, under losses, bursts and prices.

use sinew_sim::{Plan, Report, RoleScaling, compare_sizes, replay, simulate};
use std::path::Path;

/// Engines for about 84 requests at a time: six have room for them.
const FLEET: &str = "seed = 5\n\
    [run]\nmode = \"async\"\nmax_staleness = 3\nupdates = 100000\nwarm_up = 1\nmax_s = 1200\n\
    [rollout]\ngroups_per_update = 16\ngroup_size = 4\nin_flight = 96\nretries = 8\n\
    [episode]\nturns = 3\nprompt_tokens = 100\nturn_tokens = 100\nobservation_tokens = 20\n\
    max_context_tokens = 8000\n\
    [engines]\npass_s = 0.02\nrow_s = 0.001\nmax_running = 16\nkv_tokens = 200000\n\
    [trainer]\nfixed_s = 0.1\ntokens_per_s = 1000000\n\
    [weights]\ntransfer_s = 0\nload_s = 0.1\n";

fn fleet(call_s: &str, scale: &str, engines: &str) -> Plan {
    let text = format!(
        "{FLEET}[tools]\nboot_s = 0\ncall_s = {call_s}\nsandboxes = 96\n[autoscale]\n{scale}\
         [[role]]\nkind = \"engine\"\nstart_s = 20\nprice_per_hour = 1\n{engines}"
    );
    Plan::parse(Path::new("fleet.toml"), &text).unwrap()
}

fn run(plan: &Plan) -> Report {
    simulate(plan, false).unwrap_or_else(|violation| panic!("{violation}"))
}

fn scaling(report: &Report) -> RoleScaling {
    report.roles[0].scaling.unwrap()
}

const SCALE: &str = "queue = 0.2\nidle_s = 60\ncooldown_s = 30\n";

#[test]
fn a_third_of_the_engines_preempted_every_two_minutes_leaves_nine_tenths_of_the_capacity() {
    let bounds = "count = 6\nmin = 3\nmax = 10\n";
    let losses = "preemptible = { every_s = 120, share = 0.34, notice_s = 10 }\n";
    let plan = fleet("0.5", SCALE, &format!("{bounds}{losses}"));
    let report = run(&plan);
    assert!(report.roles[0].losses >= 9, "{:?}", report.roles);
    let rows = compare_sizes(&plan, &report).unwrap();
    let [scaled, calm, first, most] = &rows[..] else {
        panic!("{rows:?}");
    };
    assert!(scaled.of_capacity >= 0.9, "{rows:?}");
    assert!(scaled.reversals <= 2 && scaled.changes <= 6, "{rows:?}");
    assert!(
        (calm.of_capacity - 1.0).abs() < 1e-9 && calm.reversals <= 1,
        "{rows:?}"
    );
    // Successors of fixed counts start at the loss and not at the notice.
    assert!(scaled.of_capacity > first.of_capacity, "{rows:?}");
    assert!(scaled.per_hour < most.per_hour, "{rows:?}");
    assert!(
        scaled.trained_tokens_per_unit > most.trained_tokens_per_unit,
        "{rows:?}"
    );
}

/// With embedded engines each worker has one, and a lost worker's episodes begin again after their leases.
#[test]
fn a_third_of_the_workers_with_their_engines_preempted_leaves_nine_tenths_of_the_capacity() {
    let text = FLEET.replacen("in_flight = 96\n", "", 1);
    let text = format!(
        "{text}[tools]\nboot_s = 0\ncall_s = 0.5\nsandboxes = 160\n[autoscale]\n{SCALE}\
         [[role]]\nkind = \"rollout\"\nwith_engine = true\ncapacity = 16\ncount = 6\nmin = 3\nmax = 10\n\
         start_s = 20\nprice_per_hour = 1\n\
         preemptible = {{ every_s = 120, share = 0.34, notice_s = 10 }}\n"
    );
    let plan = Plan::parse(Path::new("workers.toml"), &text).unwrap();
    let report = run(&plan);
    assert!(report.roles[0].losses >= 18, "{:?}", report.roles);
    let rows = compare_sizes(&plan, &report).unwrap();
    assert!(rows[0].of_capacity >= 0.9, "{rows:?}");
    assert!(rows[0].reversals <= 2, "{rows:?}");
    // Work waits for all ten: they are started, and stay.
    assert_eq!(
        (scaling(&report).most, scaling(&report).last),
        (10, 10),
        "{rows:?}"
    );
}

#[test]
fn counts_follow_bursts_and_do_not_swing_in_between() {
    let bounds = "count = 2\nmin = 1\nmax = 8\n";
    let calls = "{ uniform = [2, 18] }";
    let calm = scaling(&run(&fleet(calls, SCALE, bounds)));
    // All episodes begin at once; after that the work is even.
    assert!(calm.reversals <= 1 && calm.last <= 4, "{calm:?}");
    let burst = "[[burst]]\nat_s = 500\nfor_s = 300\nby = 16\n";
    let burst = scaling(&run(&fleet(calls, SCALE, &format!("{bounds}{burst}"))));
    assert!(
        burst.most > calm.last && burst.last <= calm.last + 1,
        "{burst:?} {calm:?}"
    );
    assert!(burst.reversals <= calm.reversals + 3, "{burst:?} {calm:?}");
    assert!((burst.least as f64) < burst.mean && burst.mean < burst.most as f64);
}

#[test]
fn a_price_that_rises_ends_units_at_once_and_the_bound_of_the_rent_holds() {
    let scale = format!("{SCALE}max_cost_per_hour = 10\n");
    let engines = "count = 6\nmin = 1\nmax = 8\nprices = [{ at_s = 400, per_hour = 3 }]\n";
    let report = run(&fleet("0.5", &scale, engines));
    let counts = scaling(&report);
    assert_eq!((counts.least, counts.last), (3, 3), "{counts:?}");
    let per_hour = report.roles[0].per_hour;
    assert!((4.0..=10.0).contains(&per_hour), "{per_hour}");
    assert!((report.cost.per_hour - per_hour).abs() < 1e-9);
}

/// Engines, workers and sandbox hosts that come and go break no invariant, also when the run's process is
/// killed.
#[test]
fn counts_that_change_break_no_invariant() {
    let mut changes = 0;
    for seed in 0..8 {
        let text = format!(
            "seed = {seed}\n[run]\nmode = \"async\"\nupdates = 12\nwarm_up = 1\ncheckpoint_every = 2\n\
             [rollout]\ngroups_per_update = 4\ngroup_size = 4\nretries = 8\n\
             [episode]\nturns = 3\nprompt_tokens = 100\nturn_tokens = 50\nobservation_tokens = 20\n\
             max_context_tokens = 4000\n[tools]\ncall_s = 1\n\
             [engines]\npass_s = 0.05\nmax_running = 4\nkv_tokens = 20000\n\
             [autoscale]\nqueue = 0.1\nidle_s = 10\ncooldown_s = 5\n\
             [[role]]\nkind = \"engine\"\ncount = 2\nmin = 1\nmax = 4\nstart_s = 5\n\
             preemptible = {{ mean_s = 40, notice_s = 3 }}\n\
             [[role]]\nkind = \"rollout\"\ncount = 2\nmin = 1\nmax = 4\ncapacity = 8\nstart_s = 5\n\
             preemptible = {{ every_s = 30, share = 0.5, notice_s = 3 }}\n\
             [[role]]\nkind = \"sandbox\"\ncount = 2\nmin = 1\nmax = 4\ncapacity = 8\nstart_s = 5\n\
             [[burst]]\nat_s = 20\nfor_s = 30\nby = 4\n\
             [[fault]]\nat_s = 35\nkind = \"kill\"\nfor_s = 8\n"
        );
        let plan = Plan::parse(Path::new("small.toml"), &text).unwrap();
        assert_eq!(replay(&plan, None, None), None, "seed {seed}");
        let report = simulate(&plan, true).unwrap_or_else(|violation| panic!("{violation}"));
        assert!(report.updates >= 12 && report.sessions == 2, "seed {seed}");
        let scaled = report.roles.iter().filter_map(|role| role.scaling);
        changes += scaled.map(|s| s.changes).sum::<u64>();
    }
    assert!(changes > 8, "{changes}");
}

/// Workers that have an engine each lose both at once; hops make steps longer.
#[test]
fn hops_and_workers_with_engines_take_their_time() {
    let plan = |hops: &str, preemptible: &str| {
        let text = format!(
            "seed = 3\n[run]\nupdates = 8\n[rollout]\ngroups_per_update = 4\ngroup_size = 4\nretries = 8\n\
             [episode]\nturns = 2\nprompt_tokens = 50\nturn_tokens = 20\nobservation_tokens = 10\n\
             max_context_tokens = 1000\n[tools]\nboot_s = 0\ncall_s = 0.1\n{hops}\
             [[role]]\nkind = \"rollout\"\ncount = 2\ncapacity = 8\nwith_engine = true\nstart_s = 5\n{preemptible}"
        );
        Plan::parse(Path::new("workers.toml"), &text).unwrap()
    };
    let (plain, lossy) = (
        plan("", ""),
        plan("", "preemptible = { mean_s = 20, notice_s = 2 }\n"),
    );
    assert_eq!(plain.engines.count, 2);
    let near = run(&plain);
    let hops = "[hops]\nput_s = 0.1\nlease_s = 0.2\nack_s = 0.1\ntake_s = 0.05\nweights_s = 1\n";
    let far = run(&plan(hops, ""));
    // Each step: tickets, weights, and sixteen traces one after the other.
    let more = far.tail.step_s.mean - near.tail.step_s.mean;
    assert!((1.5..4.0).contains(&more), "{more}");
    let report = simulate(&lossy, true).unwrap_or_else(|violation| panic!("{violation}"));
    assert_eq!(report.updates, 8);
}
