//! The rules of a whole plan. The rules of a table stand with its keys.
//!
//! All rules of a plan are made, even after one is broken: the rules of keys without effect also decide which
//! keys the effective recipe leaves out.

use crate::RunPlan;
use crate::rule::{Rule, Rules};
use sinew_algo::Algorithm;

/// The rules of every table, in the order in which they are reported: where one mistake breaks
/// several rules, the one nearest to its cause comes first.
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
    crate::rollout::rules(plan, &mut rules);
    crate::train::rules(plan, &mut rules);
    crate::trust::rules(plan, &mut rules);
    crate::mode::rules(plan, &mut rules);
    crate::eval::rules(plan, &mut rules);
    crate::engine::rules(plan, &mut rules);
    plan.store.ranges(&mut rules);
    crate::data::rules(plan, &mut rules);
    rules.0
}

/// The rules of an algorithm that can run. They follow the others, since an algorithm is built from
/// values that those allow.
pub(crate) fn of_algorithm(plan: &RunPlan, algorithm: &Algorithm) -> Vec<Rule> {
    let mut rules = Rules::default();
    crate::algorithm::rules(plan, algorithm, &mut rules);
    crate::mode::of_algorithm(plan, algorithm, &mut rules);
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
