use super::*;
use sinew_algo::Spread;

/// A step of 16 episodes of which so many succeed, and that trained.
fn step(step: u64, successes: usize) -> StepRecord {
    let mut r = StepRecord {
        step,
        rows: 8,
        trained_tokens: 50,
        updates_applied: 1,
        grad_norm: 0.5,
        rollout: stats(16, successes),
        ..StepRecord::default()
    };
    r.samples.scored = 16;
    r
}

fn stats(n: usize, successes: usize) -> EpisodeStats {
    let share = successes as f64 / n as f64;
    EpisodeStats {
        episodes: n,
        success: share,
        reward: share,
        reward_spread: Some(Spread {
            std: (share * (1.0 - share)).sqrt(),
            min: 0.0,
            max: 1.0,
        }),
        ..EpisodeStats::default()
    }
}

fn eval(when: &str, at: u64, n: usize, successes: usize) -> EvalRecord {
    EvalRecord {
        when: when.into(),
        step: at,
        wall_s: 1.0,
        stats: stats(n, successes),
        gain: None,
    }
}

fn idle(at: u64, successes: usize) -> StepRecord {
    let mut r = StepRecord {
        rows: 0,
        trained_tokens: 0,
        updates_applied: 0,
        dropped: [(EQUAL.into(), 16)].into(),
        ..step(at, successes)
    };
    r.samples.equal.count = 16;
    r
}

fn steps(successes: &[usize]) -> Vec<StepRecord> {
    let numbered = (1..).zip(successes);
    numbered.map(|(at, s)| step(at, *s)).collect()
}

fn judged(steps: &[StepRecord], evals: &[EvalRecord]) -> Verdict {
    Verdict::of(steps, evals, Process::Ended, None)
}

#[test]
fn a_run_whose_success_fell_to_nothing_has_collapsed() {
    let mut way = vec![4, 8, 12, 16, 16, 16];
    way.extend([6, 0, 0, 0, 0]);
    let v = judged(&steps(&way), &[]);
    assert_eq!(v.verdict, Judgement::Collapsed, "{v:?}");
    assert!(
        v.why.contains("-> 0.0 % (0 of 64, 0.0 to 5.7 %)"),
        "{}",
        v.why
    );
    assert!(v.change.unwrap().contains("train.learning_rate"));
    // Held-out success is enough for a verdict, also for a run that has just been resumed.
    let evals = [eval("before", 0, 50, 13), eval("after", 4, 50, 0)];
    let v = judged(&steps(&[16, 16]), &evals);
    assert_eq!(v.verdict, Judgement::Collapsed, "{v:?}");
    assert!(v.why.starts_with("held-out success 26.0 %"), "{}", v.why);
}

#[test]
fn harder_tasks_and_chance_are_no_collapse() {
    // A half of the best is what harder tasks do.
    let v = judged(&steps(&[16, 16, 16, 16, 8, 8, 8, 8]), &[]);
    assert_ne!(v.verdict, Judgement::Collapsed, "{v:?}");
    // Training tasks became too hard, and held-out ones go well.
    let mut way = vec![16; 8];
    way.extend([0, 0, 0, 0]);
    let evals = [eval("before", 0, 50, 5), eval("after", 12, 50, 40)];
    assert_eq!(judged(&steps(&way), &evals).verdict, Judgement::Learning);
    // Few episodes fall by chance.
    let evals = [eval("before", 0, 8, 2), eval("after", 4, 8, 0)];
    assert_eq!(
        judged(&steps(&[2, 2, 2, 2]), &evals).verdict,
        Judgement::Healthy
    );
}

#[test]
fn a_run_without_success_is_judged_by_its_reward() {
    let of = |at, reward: f64| {
        let mut r = step(at, 0);
        r.rollout.reward = reward;
        r.rollout.reward_spread = Some(Spread {
            std: 0.1,
            min: reward - 0.2,
            max: reward + 0.2,
        });
        r
    };
    let way = |rewards: &[f64]| -> Vec<StepRecord> {
        let numbered = (1..).zip(rewards);
        numbered.map(|(at, reward)| of(at, *reward)).collect()
    };
    let fell = way(&[0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.1, 0.0, 0.0, 0.0]);
    assert_eq!(judged(&fell, &[]).verdict, Judgement::Collapsed);
    let rose = way(&[0.1, 0.1, 0.1, 0.1, 0.8, 0.8, 0.8, 0.8]);
    let v = judged(&rose, &[]);
    assert_eq!(v.verdict, Judgement::Learning);
    assert_eq!(v.why, "training reward 0.100 (n = 64) -> 0.800 (n = 64)");
}

#[test]
fn a_solved_task_is_solved_though_nothing_is_trained_any_more() {
    let mut run = steps(&[4, 8, 12, 16]);
    run.extend((5..60).map(|at| idle(at, 16)));
    let v = judged(&run, &[]);
    assert_eq!(v.verdict, Judgement::Solved, "{v:?}");
    assert!(!v.verdict.is_bad());
    // Everything succeeded before training: there was nothing to learn, and nothing is wrong.
    let run: Vec<_> = (1..4).map(|at| idle(at, 16)).collect();
    assert_eq!(judged(&run, &[]).verdict, Judgement::Solved);
}

#[test]
fn failures_of_a_quarter_are_failing_with_their_cause() {
    let mut run = steps(&[4, 4, 4, 4]);
    for r in &mut run {
        (r.rollout.failed, r.failed_cause) = (4, Some("sandbox: worker died".into()));
    }
    let v = judged(&run, &[]);
    assert_eq!(v.verdict, Judgement::Failing);
    assert_eq!(
        v.why,
        "the system failed 16 of 64 training episodes: sandbox: worker died"
    );
    for r in &mut run {
        r.rollout.failed = 3;
    }
    assert_eq!(judged(&run, &[]).verdict, Judgement::Healthy);
    let mut measured = eval("after", 4, 8, 2);
    measured.stats.failed = 2;
    assert_eq!(judged(&run, &[measured]).verdict, Judgement::Failing);
}

#[test]
fn a_run_that_did_not_learn_says_what_kept_it_and_which_key_to_change() {
    let mut run: Vec<_> = (1..=20).map(|at| idle(at, 0)).collect();
    for r in &mut run {
        r.rollout.truncated = 16;
        r.rollout.truncated_by = [("turn_tokens".into(), 16)].into();
        r.rollout.longest_turn = 48;
    }
    let v = judged(&run, &[]);
    assert_eq!(v.verdict, Judgement::Stalled);
    assert!(v.why.contains("trained no token"), "{}", v.why);
    assert_eq!(v.change.unwrap(), "raise rollout.max_turn_tokens");
    // It trains a little, most groups are equal, and there is no gain.
    let mut run = steps(&[0; 20]);
    for r in &mut run {
        r.samples.equal.count = 15;
    }
    let evals = [eval("before", 0, 64, 0), eval("after", 20, 64, 0)];
    let v = judged(&run, &evals);
    assert_eq!(v.verdict, Judgement::Stalled, "{v:?}");
    let wanted = "300 of 320 episodes are in groups of equal reward";
    assert!(v.why.contains(wanted), "{}", v.why);
    assert!(v.change.unwrap().contains("rollout.group_size"));
    // A short run is not judged so hard, and still shows it.
    let v = judged(&run[..8], &[]);
    assert_eq!(v.verdict, Judgement::Healthy);
    assert!(
        v.line().contains("in groups of equal reward"),
        "{}",
        v.line()
    );
}

#[test]
fn a_late_stall_counts_and_a_short_one_does_not() {
    let mut run = steps(&[4; 4]);
    run.extend((5..24).map(|at| idle(at, 4)));
    assert_eq!(judged(&run, &[]).verdict, Judgement::Healthy);
    run.push(idle(24, 4));
    let v = judged(&run, &[]);
    assert_eq!(v.verdict, Judgement::Stalled);
    assert!(v.why.contains("last 20 steps trained nothing"), "{}", v.why);
    let zero = StepRecord {
        grad_norm: 0.0,
        ..step(1, 4)
    };
    assert!(judged(&[zero], &[]).why.contains("gradient is 0"));
}

#[test]
fn the_process_decides_where_the_records_do_not() {
    let run = steps(&[4, 4]);
    let of = |process, end| Verdict::of(&run, &[], process, end);
    assert_eq!(of(Process::Running, None).verdict, Judgement::Healthy);
    let v = of(Process::Failed, Some("no space left\n  hint: x"));
    assert_eq!(v.verdict, Judgement::Dead);
    assert_eq!(v.why, "the process failed after step 2: no space left");
    assert_eq!(of(Process::Killed, None).verdict, Judgement::Dead);
    let none = Verdict::of(&[], &[], Process::Running, None);
    assert_eq!(none.verdict, Judgement::Starting);
    for name in ["running", "ended", "interrupted", "failed", "killed"] {
        assert_eq!(Process::parse(name).unwrap().name(), name);
    }
    assert_eq!(Process::parse("other"), None);
}

#[test]
fn demonstrations_that_succeed_do_not_solve_held_out_tasks() {
    let run = steps(&[16, 16, 16, 16]);
    let evals = [eval("before", 0, 50, 0), eval("after", 4, 50, 0)];
    let v = judged(&run, &evals);
    assert_eq!(v.verdict, Judgement::Healthy, "{v:?}");
    let evals = [eval("before", 0, 50, 0)];
    assert_eq!(judged(&run, &evals).verdict, Judgement::Solved);
}

#[test]
fn rewards_of_few_episodes_are_no_gain() {
    let reward = |at, n, reward| {
        let mut r = eval("after", at, n, 0);
        r.stats.reward = reward;
        r.stats.reward_spread = Some(Spread {
            std: 0.0,
            min: reward,
            max: reward,
        });
        r
    };
    for (n, verdict) in [(1, Judgement::Healthy), (8, Judgement::Learning)] {
        let evals = [reward(0, n, 0.1), reward(4, n, 0.9)];
        assert_eq!(judged(&steps(&[0; 4]), &evals).verdict, verdict, "{n}");
    }
}
