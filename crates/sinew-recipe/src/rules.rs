//! Rules of a whole plan. The rules of a single table are in the file of its keys.
//!
//! All rules of a plan are evaluated, even after a violation: the rules about keys without effect also decide
//! which keys the effective recipe omits.

use crate::RunPlan;
use crate::rule::{Rule, Rules};
use sinew_algo::Algorithm;

/// Returns the rules of every table, in the order of reporting: if one mistake violates several rules, the
/// rule nearest to its cause comes first.
pub(crate) fn all(plan: &RunPlan) -> Vec<Rule> {
    let mut rules = Rules::default();
    name(plan, &mut rules);
    crate::model::rules(plan, &mut rules);
    crate::env::rules(&plan.env, &mut rules);
    crate::mixture_rules::rules(&plan.env, &mut rules);
    crate::harness::rules(plan, &mut rules);
    crate::sandbox::rules(plan, &mut rules);
    crate::tasks::rules(plan, &mut rules);
    crate::reward::rules(plan, &mut rules);
    crate::judge::rules(plan, &mut rules);
    crate::user::rules(plan, &mut rules);
    crate::rollout::rules(plan, &mut rules);
    crate::train::rules(plan, &mut rules);
    crate::trainer::rules(plan, &mut rules);
    crate::trust::rules(plan, &mut rules);
    crate::mode::rules(plan, &mut rules);
    crate::eval::rules(plan, &mut rules);
    crate::engine::rules(plan, &mut rules);
    crate::tinker::rules(plan, &mut rules);
    plan.store.ranges(&mut rules);
    crate::launch::rules(plan, &mut rules);
    crate::store::rules(plan, &mut rules);
    crate::data::rules(plan, &mut rules);
    rules.0
}

/// Returns the rules that depend on the algorithm. They come last, since the algorithm is built from values
/// that the other rules allow.
pub(crate) fn of_algorithm(plan: &RunPlan, algorithm: &Algorithm) -> Vec<Rule> {
    let mut rules = Rules::default();
    crate::algorithm::rules(plan, algorithm, &mut rules);
    crate::mode::of_algorithm(plan, algorithm, &mut rules);
    crate::tinker::of_algorithm(plan, algorithm, &mut rules);
    rules.0
}

fn name(plan: &RunPlan, rules: &mut Rules) {
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | ' ');
    let name = &plan.name;
    rules.allowed(
        "name",
        format!("{name:?}"),
        "1 to 100 letters, digits, `.`, `_`, `-` and spaces, a letter or digit first: it names the run's \
         folder",
        name.starts_with(char::is_alphanumeric) && name.len() <= 100 && name.chars().all(plain),
    );
}
