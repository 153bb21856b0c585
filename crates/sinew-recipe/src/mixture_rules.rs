//! Rules of a mixture as a whole, which a single table cannot check.
//!
//! A mixture is a list of `[[env]]` tables, each with a name and a weight. Names must differ, and one
//! tokenizer must support all environments.

use crate::env::{EnvMember, EnvSection};
use crate::rule::Rules;

/// Rules between the environments of a mixture.
///
/// Names must differ, because results are kept by name, and are part of the ids of tasks. Weights can have
/// any sum: the share of an environment is its weight divided by the sum.
pub(crate) fn rules(env: &EnvSection, rules: &mut Rules) {
    if !env.is_mixture() {
        return;
    }
    let members = env.members();
    rules.allowed(
        "env",
        "[]",
        "one environment as [env], or a mixture of [[env]] tables",
        !members.is_empty(),
    );
    for (i, member) in members.iter().enumerate() {
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-');
        let name = &member.name;
        let shown = format!("{name:?}");
        let key = format!("env[{i}].name");
        rules.allowed(
            &key,
            &shown,
            "1 to 60 letters, digits, `.`, `_` and `-`: it begins the ids of tasks",
            !name.is_empty() && name.len() <= 60 && name.chars().all(plain),
        );
        rules.allowed(
            &key,
            &shown,
            "a name that no other [[env]] has: results are kept by name",
            members.iter().filter(|m| m.name == *name).count() == 1,
        );
        rules.allowed(
            &format!("env[{i}].weight"),
            member.weight,
            "a number above 0, up to 1e9: its share of the draws is its weight over the sum of all",
            member.weight > 0.0 && member.weight <= 1e9,
        );
    }
    alphabets(members, rules);
}

/// Refuses environments with different alphabets, such as `tiny` and a text environment, since a policy has
/// only one tokenizer. The message names the first environment and the first one that differs from it.
fn alphabets(members: &[EnvMember], rules: &mut Rules) {
    let alphabet = |m: &EnvMember| m.needs().alphabet;
    let Some(first) = members.first() else { return };
    let other = members.iter().find(|m| alphabet(m) != alphabet(first));
    let Some(other) = other else { return };
    rules.allowed(
        "env",
        format!(
            "{:?} of type {:?} beside {:?} of type {:?}",
            first.name,
            first.kind_name(),
            other.name,
            other.kind_name()
        ),
        "environments for one tokenizer: a world with an alphabet of its own needs a model of its own; train \
         it in another run",
        false,
    );
}
