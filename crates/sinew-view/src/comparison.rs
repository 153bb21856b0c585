//! The table of held-out measurements before and after training.

use sinew_orchestrator::EpisodeStats;

/// Rows of the table before/after: name and both values as text.
pub(crate) fn comparison(
    before: &EpisodeStats,
    after: &EpisodeStats,
) -> Vec<(String, String, String)> {
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    let number = |x: f64| format!("{x:.2}");
    // A measure that is missing is not 0.
    let known = |x: Option<f64>| x.map_or_else(|| "-".to_owned(), percent);
    let success = |s: &EpisodeStats| known((s.scored() > 0).then_some(s.success));
    let interval = |s: &EpisodeStats| {
        let interval = s.success_interval;
        interval.map_or_else(|| "-".to_owned(), |i| i.percent())
    };
    let mut rows = vec![
        ("success".into(), success(before), success(after)),
        ("  95 % interval".into(), interval(before), interval(after)),
        (
            "  scored episodes".into(),
            before.scored().to_string(),
            after.scored().to_string(),
        ),
    ];
    let reward = (before.reward, after.reward);
    if reward != (before.success, after.success) {
        rows.push(("reward".into(), number(reward.0), number(reward.1)));
    }
    if let (Some(b), Some(a)) = (before.greedy_success, after.greedy_success) {
        rows.insert(3, ("success, greedy".into(), percent(b), percent(a)));
    }
    for (env, b) in &before.by_env {
        let a = after.by_env.get(env).map_or_else(|| known(None), success);
        rows.push((format!("success: {env}"), success(b), a));
    }
    for kind in before.success_by_kind.keys() {
        let of = |stats: &EpisodeStats| stats.success_of_kind(kind);
        rows.push((format!("success: {kind}"), of(before), of(after)));
    }
    for (name, b) in &before.metrics {
        let a = after.metrics.get(name).copied();
        // It stands above.
        if name == "success" && (*b, a) == (before.success, Some(after.success)) {
            continue;
        }
        let a = a.map_or_else(|| "-".to_owned(), number);
        rows.push((name.clone(), number(*b), a));
    }
    rows.push(("turns".into(), number(before.turns), number(after.turns)));
    rows.push((
        "sampled tokens".into(),
        number(before.sampled_tokens),
        number(after.sampled_tokens),
    ));
    let count = |n: usize| n.to_string();
    rows.push((
        "truncated".into(),
        count(before.truncated),
        count(after.truncated),
    ));
    rows.push(("failed".into(), count(before.failed), count(after.failed)));
    if before.unscored + after.unscored > 0 {
        rows.push((
            "without a reward".into(),
            before.unscored_text(),
            after.unscored_text(),
        ));
    }
    rows
}
