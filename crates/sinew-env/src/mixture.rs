//! Mixture: several environments used as one, each with its own tasks.
//!
//! A task of a mixture belongs to one member, whose name begins its id and its type: `math:tasks/train/3` of
//! type `math:easy`. [`MixtureFactory`] removes the name before it passes the task to that member, so that
//! members do not depend on the mixture. Names have no `:`, and are unique.
//!
//! The training tasks of the members follow one after the other; the caller decides how often each is drawn
//! ([`Taskset::members`]). Held-out tasks alternate between members, so that the first `n` of them measure
//! all members equally.

use crate::port::{Action, Capabilities, Env, EnvError, EnvFactory};
use crate::reward::{GroupReward, Reward};
use crate::taskset::{Split, Taskset, TasksetError};
use sinew_types::{Component, Task, TaskId};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Separator between the name of a member and the rest of a task's id or type.
const SEPARATOR: char = ':';

/// The tasks of several environments.
pub struct MixtureTasks {
    /// Tasks by the name of their environment, in the order of the recipe.
    members: Vec<(String, Arc<dyn Taskset>)>,
}

impl std::fmt::Debug for MixtureTasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.members.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("MixtureTasks")
            .field("members", &names)
            .finish()
    }
}

/// Checks the names of members.
///
/// # Errors
/// If a name is empty, has other characters than letters, digits, `.`, `_` and `-`, or is that of another
/// member.
fn check_names<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), TasksetError> {
    let mut seen = std::collections::BTreeSet::new();
    for name in names {
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-');
        let allowed = match (
            seen.insert(name),
            !name.is_empty() && name.chars().all(plain),
        ) {
            (true, true) => continue,
            (false, _) => "a name that no other environment has",
            (_, false) => "letters, digits, `.`, `_` and `-`",
        };
        return Err(TasksetError::Config {
            taskset: "mixture".into(),
            field: "name",
            value: format!("{name:?}"),
            allowed: allowed.into(),
        });
    }
    Ok(())
}

impl MixtureTasks {
    /// Joins the tasks of members, each with its name.
    ///
    /// # Errors
    /// If a name is invalid, or two are equal.
    pub fn new(members: Vec<(String, Arc<dyn Taskset>)>) -> Result<Self, TasksetError> {
        check_names(members.iter().map(|(name, _)| name.as_str()))?;
        Ok(Self { members })
    }

    /// Returns the member of a task with its name, and the task's index there.
    fn place(
        &self,
        split: Split,
        index: usize,
    ) -> Result<(&str, &dyn Taskset, usize), TasksetError> {
        let place = match split {
            Split::Train => {
                let ranges = self.members();
                let member = ranges.iter().position(|(_, range)| range.contains(&index));
                member.map(|m| (m, index - ranges[m].1.start))
            }
            Split::HeldOut => {
                let len = |(_, tasks): &(_, Arc<dyn Taskset>)| tasks.len(Split::HeldOut);
                let lens: Vec<usize> = self.members.iter().map(len).collect();
                in_turn(&lens, index)
            }
        };
        let (member, inner) = place.ok_or_else(|| TasksetError::Index {
            taskset: self.name().to_owned(),
            split,
            index,
            len: self.len(split),
        })?;
        let (name, tasks) = &self.members[member];
        Ok((name, tasks.as_ref(), inner))
    }
}

/// Returns list and position of the `index`-th item when lists alternate, each until its end.
fn in_turn(lens: &[usize], mut index: usize) -> Option<(usize, usize)> {
    let mut done = 0;
    loop {
        let open: Vec<usize> = (0..lens.len()).filter(|&i| lens[i] > done).collect();
        // All members take part in every round until the shortest of them ends.
        let until = open.iter().map(|&i| lens[i]).min()?;
        let items = (until - done).saturating_mul(open.len());
        if index < items {
            return Some((open[index % open.len()], done + index / open.len()));
        }
        index -= items;
        done = until;
    }
}

impl Taskset for MixtureTasks {
    fn name(&self) -> &str {
        "mixture"
    }

    fn len(&self, split: Split) -> usize {
        self.members.iter().map(|(_, tasks)| tasks.len(split)).sum()
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        let (name, tasks, index) = self.place(split, index)?;
        let task = tasks.get(split, index)?;
        Ok(Task {
            id: TaskId::new(format!("{name}{SEPARATOR}{}", task.id)),
            kind: format!("{name}{SEPARATOR}{}", task.kind),
            ..task
        })
    }

    fn kind(&self, split: Split, index: usize) -> Result<String, TasksetError> {
        let (name, tasks, index) = self.place(split, index)?;
        Ok(format!("{name}{SEPARATOR}{}", tasks.kind(split, index)?))
    }

    fn members(&self) -> Vec<(&str, Range<usize>)> {
        let (mut end, mut ranges) = (0, Vec::with_capacity(self.members.len()));
        for (name, tasks) in &self.members {
            let start = end;
            end += tasks.len(Split::Train);
            ranges.push((name.as_str(), start..end));
        }
        ranges
    }
}

/// Returns the name of the member that a task of a mixture belongs to; for other tasks, the whole id.
pub fn member_of(task: &TaskId) -> &str {
    task.0.split(SEPARATOR).next().unwrap_or_default()
}

/// Factory of the environments of a mixture.
pub struct MixtureFactory {
    /// Factories by name, in the order of the recipe.
    members: Vec<(String, Arc<dyn EnvFactory>)>,
}

impl std::fmt::Debug for MixtureFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MixtureFactory")
            .field("members", &self.members())
            .finish()
    }
}

impl MixtureFactory {
    /// Joins factories, each with the name that its tasks have in [`MixtureTasks`].
    pub fn new(members: Vec<(String, Arc<dyn EnvFactory>)>) -> Self {
        Self { members }
    }

    /// Returns the factory for a task, and the task with the id that the member uses.
    fn member(&self, task: &Task) -> Result<(&dyn EnvFactory, Task), EnvError> {
        let name = member_of(&task.id);
        let found = self.members.iter().find(|(n, _)| n == name);
        let Some((_, envs)) = found else {
            return Err(EnvError::Task {
                task: task.id.to_string(),
                message: format!("no environment of the mixture is called {name:?}"),
            });
        };
        let own = |text: &str| {
            let rest = text.strip_prefix(name);
            let rest = rest.and_then(|rest| rest.strip_prefix(SEPARATOR));
            rest.unwrap_or(text).to_owned()
        };
        let task = Task {
            id: TaskId::new(own(&task.id.0)),
            kind: own(&task.kind),
            ..task.clone()
        };
        Ok((envs.as_ref(), task))
    }
}

impl EnvFactory for MixtureFactory {
    fn name(&self) -> &str {
        "mixture"
    }

    fn members(&self) -> BTreeMap<String, Component> {
        let member = |(name, envs): &(String, Arc<dyn EnvFactory>)| {
            let component = Component {
                name: name.clone(),
                version: format!("{} {}", envs.name(), envs.version()),
            };
            (name.clone(), component)
        };
        self.members.iter().map(member).collect()
    }

    fn tools(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        for (name, envs) in &self.members {
            let tools = envs.tools().into_iter();
            all.extend(tools.map(|(tool, version)| (format!("{name}{SEPARATOR}{tool}"), version)));
        }
        all
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        let (envs, task) = self.member(task)?;
        envs.create(&task)
    }

    fn capabilities(&self) -> Capabilities {
        let all = self.members.iter().map(|(_, envs)| envs.capabilities());
        let both = |a: Capabilities, b: Capabilities| Capabilities {
            concurrent: a.concurrent && b.concurrent,
            deterministic: a.deterministic && b.deterministic,
            gives: a.gives.and(b.gives),
            // All episodes of a moment may be those of the member with the fewest places.
            places: a.places.into_iter().chain(b.places).min(),
        };
        all.reduce(both).unwrap_or_default()
    }

    fn hosts_programs(&self, task: &Task) -> bool {
        let member = self.member(task);
        member.is_ok_and(|(envs, task)| envs.hosts_programs(&task))
    }

    fn group_reward(&self, task: &Task) -> Option<Arc<dyn GroupReward>> {
        let (envs, task) = self.member(task).ok()?;
        envs.group_reward(&task)
    }

    fn reward(&self, task: &Task) -> Option<Arc<dyn Reward>> {
        let (envs, task) = self.member(task).ok()?;
        envs.reward(&task)
    }

    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        let (envs, task) = self.member(task)?;
        envs.gold(&task, turn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiny::{ShapedTinyFactory, TinyFactory, TinyTaskset};
    use futures::executor::block_on;
    use proptest::prelude::*;

    fn tasks() -> MixtureTasks {
        let member = |name: &str| {
            let tasks: Arc<dyn Taskset> = Arc::new(TinyTaskset::new(0));
            (name.to_owned(), tasks)
        };
        MixtureTasks::new(vec![member("plain"), member("paid")]).unwrap()
    }

    #[test]
    fn a_task_reaches_its_own_environment() {
        let (tasks, paid) = (
            tasks(),
            ShapedTinyFactory {
                process_reward: 0.25,
            },
        );
        let plain: Arc<dyn EnvFactory> = Arc::new(TinyFactory);
        let envs = MixtureFactory::new(vec![
            ("plain".into(), plain),
            ("paid".into(), Arc::new(paid)),
        ]);
        let ranges = tasks.members();
        let half = TinyTaskset::new(0).len(Split::Train);
        assert_eq!(ranges, [("plain", 0..half), ("paid", half..2 * half)]);
        for (index, reward) in [(0, 0.0), (half, 0.25)] {
            let task = tasks.get(Split::Train, index).unwrap();
            let mut env = envs.create(&task).unwrap();
            block_on(env.reset()).unwrap();
            let gold = envs.gold(&task, 0).unwrap().unwrap();
            let step = block_on(env.step(gold)).unwrap();
            assert_eq!(step.process_reward, reward, "{}", task.id);
        }
        let mut stray = tasks.get(Split::Train, 0).unwrap();
        assert_eq!(
            (member_of(&stray.id), stray.id.0.as_str()),
            ("plain", "plain:tiny/train/0")
        );
        assert_eq!(stray.kind, "plain:corridor-1");
        stray.id = TaskId::new("other:tiny/train/0");
        let Err(e) = envs.create(&stray) else {
            panic!("a task of no member was accepted");
        };
        assert!(e.to_string().contains("\"other\""), "{e}");
        let members = envs.members();
        assert_eq!(members["paid"].name, "paid");
        assert!(members["paid"].version.starts_with("tiny "));
    }

    #[test]
    fn solutions_of_all_members_are_validated() {
        let tasks = tasks();
        let tiny: Arc<dyn EnvFactory> = Arc::new(TinyFactory);
        let envs = MixtureFactory::new(vec![
            ("plain".into(), Arc::clone(&tiny)),
            ("paid".into(), tiny),
        ]);
        let all = 0..tasks.len(Split::HeldOut);
        let all: Vec<Task> = all.map(|i| tasks.get(Split::HeldOut, i).unwrap()).collect();
        assert!(block_on(crate::validate(&envs, &all)).unwrap() >= all.len());
        assert!(envs.capabilities().states());
        let e = tasks.get(Split::HeldOut, all.len()).unwrap_err();
        assert!(matches!(e, TasksetError::Index { .. }), "{e}");
    }

    #[test]
    fn names_are_plain_and_unique() {
        for names in [["a", "a"], ["a", ""], ["a", "b:c"], ["a", "b/c"]] {
            let member = |name: &str| {
                let tasks: Arc<dyn Taskset> = Arc::new(TinyTaskset::new(0));
                (name.to_owned(), tasks)
            };
            let e = MixtureTasks::new(names.map(member).into()).unwrap_err();
            assert!(e.to_string().contains("name"), "{e}");
        }
    }

    proptest! {
        /// Every item comes once, and no list is more than one item ahead of another that continues.
        #[test]
        fn held_out_tasks_take_turns(lens in prop::collection::vec(0usize..9, 0..6)) {
            let all: usize = lens.iter().sum();
            let mut seen = vec![0usize; lens.len()];
            for index in 0..all {
                let (list, at) = in_turn(&lens, index).unwrap();
                prop_assert_eq!(at, seen[list]);
                seen[list] += 1;
                for (other, &taken) in seen.iter().enumerate() {
                    prop_assert!(taken + 1 >= seen[list] || taken == lens[other]);
                }
            }
            prop_assert_eq!(&seen, &lens);
            prop_assert_eq!(in_turn(&lens, all), None);
        }
    }
}
