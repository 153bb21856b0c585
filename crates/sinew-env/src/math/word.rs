//! Generated word problems.

use super::generated::{MathTaskConfig, Problem, fill, numbers, shape, task_at};
use super::templates::{PEOPLE, TEMPLATES, THINGS, Template};
use crate::rng::Rng;
use crate::taskset::{Split, Taskset, TasksetError};
use sinew_types::Task;

/// Taskset of word problems with one to three steps.
#[derive(Clone, Debug)]
pub struct Word {
    config: MathTaskConfig,
}

impl Word {
    /// Creates the taskset.
    ///
    /// # Errors
    /// [`TasksetError::Config`] for an invalid setting.
    pub fn new(config: MathTaskConfig) -> Result<Self, TasksetError> {
        config.check("word")?;
        Ok(Self { config })
    }
}

/// Draws a problem of a level.
fn draw(rng: &mut Rng, level: u8) -> Problem {
    let of_level: Vec<&Template> = TEMPLATES.iter().filter(|t| t.level == level).collect();
    let template = rng.pick(&of_level);
    let mut values = numbers(rng);
    let first = rng.below(PEOPLE.len());
    // The offset is less than the number of people, so that the second person differs from the first.
    let second = (first + 1 + rng.below(PEOPLE.len() - 1)) % PEOPLE.len();
    values.insert("n", PEOPLE[first].to_owned());
    values.insert("m", PEOPLE[second].to_owned());
    values.insert("i", (*rng.pick(&THINGS)).to_owned());
    Problem {
        question: fill(template.text, &values),
        solution: fill(template.solution, &values),
        shape: shape(template.solution),
    }
}

impl Taskset for Word {
    fn name(&self) -> &str {
        "word"
    }

    fn len(&self, split: Split) -> usize {
        self.config.len(split)
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        task_at(&self.config, self.name(), split, index, draw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::expr::evaluate;

    /// Every template has an exact positive answer for all numbers.
    #[test]
    fn templates_are_sound() {
        let mut rng = Rng::labelled(9, "templates");
        for template in &TEMPLATES {
            assert!((1..=3).contains(&template.level));
            for _ in 0..200 {
                let values = numbers(&mut rng);
                let solution = fill(template.solution, &values);
                let answer = evaluate(&solution);
                assert!(answer.is_some_and(|a| a > 0), "{} = {answer:?}", solution);
            }
            let mut named = numbers(&mut rng);
            named.extend([("n", "A".into()), ("m", "B".into()), ("i", "x".into())]);
            let question = fill(template.text, &named);
            assert!(!question.contains(['{', '}']), "{question}");
        }
    }
}
