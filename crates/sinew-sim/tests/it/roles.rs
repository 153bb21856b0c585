//! Clusters of roles: spot losses, links and prices, with the real cores.

use sinew_sim::{Plan, Report, Role, RoleKind, replay, simulate};
use std::fmt::Write;
use std::path::Path;

/// A small cluster, with the losses of its kinds: mean seconds, 0 for none.
fn cluster(seed: u64, [engine, rollout, sandbox, trainer]: [f64; 4]) -> Plan {
    let mut text = format!(
        "seed = {seed}\n[run]\nmode = \"async\"\nupdates = 6\nwarm_up = 1\ncheckpoint_every = 2\n\
         [rollout]\ngroups_per_update = 4\ngroup_size = 4\nretries = 8\n\
         [episode]\nturns = 3\nprompt_tokens = 100\nturn_tokens = 50\nobservation_tokens = 20\n\
         max_context_tokens = 2000\n[tools]\ncall_s = 1\n[engines]\npass_s = 0.05\nmax_running = 16\n\
         kv_tokens = 20000\n"
    );
    for (kind, count, capacity, mean_s) in [
        ("engine", 3, "", engine),
        ("rollout", 3, "capacity = 16\n", rollout),
        ("sandbox", 4, "capacity = 12\n", sandbox),
        ("trainer", 2, "", trainer),
    ] {
        let _ = write!(
            text,
            "[[role]]\nkind = \"{kind}\"\ncount = {count}\nhost = \"{kind}s\"\n{capacity}\
             price_per_hour = 2\nstart_s = 5\n"
        );
        if mean_s > 0.0 {
            let _ = writeln!(text, "preemptible = {{ mean_s = {mean_s}, notice_s = 3 }}");
        }
    }
    Plan::parse(Path::new("cluster.toml"), &text).unwrap()
}

fn run(plan: &Plan) -> Report {
    simulate(plan, true).unwrap_or_else(|violation| panic!("{violation}"))
}

fn losses(report: &Report, kind: RoleKind) -> u64 {
    let of = report.roles.iter().filter(|r| r.kind == kind);
    of.map(|r| r.losses).sum()
}

#[test]
fn losses_of_every_kind_break_no_invariant() {
    let kinds = [
        RoleKind::Engine,
        RoleKind::Rollout,
        RoleKind::Sandbox,
        RoleKind::Trainer,
    ];
    let mut lost = [0; 4];
    for seed in 0..12 {
        let plan = cluster(seed, [25.0, 30.0, 30.0, 40.0]);
        assert_eq!(replay(&plan, None, None), None, "seed {seed}");
        let report = run(&plan);
        assert_eq!(report.updates, 6, "seed {seed}");
        for (sum, kind) in lost.iter_mut().zip(kinds) {
            *sum += losses(&report, kind);
        }
    }
    assert!(lost.iter().all(|n| *n > 5), "{lost:?}");
}

#[test]
fn a_kill_of_the_process_among_losses_loses_nothing() {
    for seed in 0..6 {
        let mut plan = cluster(seed, [25.0, 30.0, 30.0, 40.0]);
        let kill = "[[fault]]\nat_s = 15\nkind = \"kill\"\nfor_s = 8\n";
        let killed = Plan::parse(Path::new("kill.toml"), kill).unwrap();
        plan.faults = killed.faults;
        let report = run(&plan);
        assert_eq!(
            (report.updates >= 6, report.sessions),
            (true, 2),
            "seed {seed}"
        );
    }
}

#[test]
fn losses_cost_work_and_a_plan_without_them_does_not() {
    let calm = run(&cluster(7, [0.0; 4]));
    assert_eq!((calm.lost_s, losses(&calm, RoleKind::Sandbox)), (0.0, 0));
    assert!(calm.roles.iter().all(|r| r.up == 1.0), "{:?}", calm.roles);
    let stormy = run(&cluster(7, [20.0, 20.0, 20.0, 30.0]));
    assert!(stormy.lost_s > 0.0 && stormy.virtual_s > calm.virtual_s);
    let ups: Vec<f64> = stormy.roles.iter().map(|r| r.up).collect();
    assert!(ups.iter().all(|up| (0.2..1.0).contains(up)), "{ups:?}");
    // Three engines, three workers, four hosts and two nodes at 2 an hour.
    for report in [&calm, &stormy] {
        assert!((report.cost.per_hour - 24.0).abs() < 1e-9);
        let total = report.cost.per_hour * report.window_s / 3600.0;
        assert!((report.cost.total - total).abs() < 1e-9);
        assert!(report.cost.trained_tokens_per_unit > 0.0);
    }
    assert!(calm.cost.trained_tokens_per_unit > stormy.cost.trained_tokens_per_unit);
    let used = |kind: RoleKind| {
        let role = calm.roles.iter().find(|r| r.kind == kind).unwrap();
        role.utilization.unwrap()
    };
    for kind in [
        RoleKind::Engine,
        RoleKind::Rollout,
        RoleKind::Sandbox,
        RoleKind::Trainer,
    ] {
        assert!(
            (0.0..=1.0).contains(&used(kind)) && used(kind) > 0.0,
            "{kind:?}"
        );
    }
}

#[test]
fn links_take_time_and_a_plan_with_equal_roles_is_as_one_without() {
    let near = run(&cluster(3, [0.0; 4]));
    let mut far = cluster(3, [0.0; 4]);
    let links = "[[role]]\nkind = \"engine\"\nhost = \"engines\"\n[[role]]\nkind = \"rollout\"\nhost = \"rollouts\"\n\
         [[role]]\nkind = \"trainer\"\nhost = \"trainers\"\n\
         [[link]]\nfrom = \"engines\"\nto = \"rollouts\"\nlatency_ms = 400\n\
         [[link]]\nfrom = \"trainers\"\nto = \"engines\"\nmbit_per_s = 1000\n";
    far.links = Plan::parse(Path::new("links.toml"), links).unwrap().links;
    far.weights.gigabytes = 1.0;
    let far = run(&far);
    // Each update waits 8 s for its weights, and each of three turns 0.8 s more.
    let slower = far.tail.episode_s.mean - near.tail.episode_s.mean;
    assert!(slower > 1.5, "{slower}");
    assert!(far.virtual_s > near.virtual_s + 10.0);
    // Roles that are never lost and lie side by side change nothing.
    let mut plain = cluster(3, [0.0; 4]);
    plain.roles = Vec::<Role>::new();
    let plain = run(&plain);
    assert_eq!((plain.events, plain.tail), (near.events, near.tail));
}

/// A thousand units that are lost all the time: what is looked up for each event does not grow with them.
#[test]
fn a_thousand_units_are_simulated() {
    let text = "[run]\nmode = \"async\"\nupdates = 100000\nwarm_up = 1\nmax_s = 120\n\
         [rollout]\ngroups_per_update = 64\ngroup_size = 8\nretries = 8\n\
         [episode]\nturns = 4\n[tools]\ncall_s = 5\n[engines]\ngrain = 256\n\
         [[role]]\nkind = \"engine\"\ncount = 200\nstart_s = 30\npreemptible = { mean_s = 600 }\n\
         [[role]]\nkind = \"rollout\"\ncount = 400\ncapacity = 8\nstart_s = 10\npreemptible = { mean_s = 600 }\n\
         [[role]]\nkind = \"sandbox\"\ncount = 400\ncapacity = 8\nstart_s = 10\npreemptible = { mean_s = 600 }\n\
         [trainer]\ntokens_per_s = 1000000\n";
    let plan = Plan::parse(Path::new("thousand.toml"), text).unwrap();
    let report = simulate(&plan, false).unwrap();
    assert!(
        report.roles.iter().all(|r| r.losses > 10),
        "{:?}",
        report.roles
    );
    assert!(report.trained > 0);
}
