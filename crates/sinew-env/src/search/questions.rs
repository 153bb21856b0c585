//! Generated pages, and questions whose facts lie on one to three of them.
//!
//! A world has people, companies, towns and countries. Names are made of syllables, so that no model knows
//! them. Pages say more than what is asked, and several share most of their words.

use super::corpus::CorpusPage;
use crate::rng::{Rng, hash64};
use crate::taskset::{Split, Taskset, TasksetError};
use serde_json::json;
use sinew_types::{Task, TaskId};
use std::collections::BTreeSet;

/// Things of each kind.
const THINGS: usize = 60;
/// Countries.
const COUNTRIES: usize = 8;
/// Parts of names.
const SYLLABLES: [&str; 24] = [
    "ba", "bel", "cor", "dan", "el", "fa", "gor", "hal", "in", "jor", "ka", "lem", "mar", "nor",
    "ost", "pel", "qui", "ras", "sol", "tam", "ul", "ver", "wen", "zor",
];
/// What companies make.
const TRADES: [&str; 6] = ["glass", "clocks", "ships", "paper", "maps", "lenses"];

/// What is known of the world.
struct World {
    /// They found companies and are born in towns.
    people: Vec<Person>,
    /// Questions begin with one of them.
    companies: Vec<Company>,
    /// They belong to countries.
    towns: Vec<Town>,
    /// Names and currencies.
    countries: Vec<(String, String)>,
}

/// Someone who was born somewhere.
struct Person {
    name: String,
    /// Index of a town.
    born: usize,
    /// Year of birth.
    year: i64,
}

/// Something that a person founded.
struct Company {
    name: String,
    /// Index of a person.
    founder: usize,
    /// What it makes.
    trade: &'static str,
}

/// A place with a river.
struct Town {
    name: String,
    /// Index of a country.
    country: usize,
    /// Name of its river.
    river: String,
}

/// A new name.
fn name(rng: &mut Rng, known: &mut BTreeSet<String>) -> String {
    loop {
        let parts: String = (0..3).map(|_| *rng.pick(&SYLLABLES)).collect();
        let mut letters = parts.chars();
        let first = letters.next().map(|c| c.to_ascii_uppercase());
        let name: String = first.into_iter().chain(letters).collect();
        if known.insert(name.clone()) {
            return name;
        }
    }
}

impl World {
    /// The world of a seed.
    fn new(seed: u64) -> Self {
        let (mut rng, mut known) = (Rng::labelled(seed, "search"), BTreeSet::new());
        let mut name = |rng: &mut Rng| name(rng, &mut known);
        let countries = (0..COUNTRIES)
            .map(|_| (name(&mut rng), name(&mut rng)))
            .collect();
        let towns = (0..THINGS).map(|_| Town {
            name: name(&mut rng),
            country: rng.below(COUNTRIES),
            river: name(&mut rng),
        });
        let towns = towns.collect();
        let people = (0..THINGS).map(|_| Person {
            name: format!("{} {}", name(&mut rng), name(&mut rng)),
            born: rng.below(THINGS),
            year: rng.range(1801, 1990),
        });
        let people = people.collect();
        let companies = (0..THINGS).map(|_| Company {
            name: name(&mut rng),
            founder: rng.below(THINGS),
            trade: rng.pick::<&str>(&TRADES),
        });
        Self {
            companies: companies.collect(),
            people,
            towns,
            countries,
        }
    }

    /// A page for each thing.
    fn pages(&self) -> Vec<CorpusPage> {
        let page = |kind: &str, at: usize, title: &str, text: String| CorpusPage {
            id: format!("{kind}-{at}"),
            title: title.into(),
            text,
        };
        let mut out = Vec::new();
        for (at, c) in self.companies.iter().enumerate() {
            let founder = &self.people[c.founder].name;
            let text = format!(
                "{} is a company that makes {}. It was founded by {founder}, and is known for its workers' \
                 choir. A museum shows its first {}.",
                c.name, c.trade, c.trade
            );
            out.push(page("company", at, &c.name, text));
        }
        for (at, p) in self.people.iter().enumerate() {
            let town = &self.towns[p.born].name;
            let text = format!(
                "{} was born in {town} in {}, and wrote letters all through life. A street bears the name.",
                p.name, p.year
            );
            out.push(page("person", at, &p.name, text));
        }
        for (at, t) in self.towns.iter().enumerate() {
            let country = &self.countries[t.country].0;
            let text = format!(
                "{} is a town on the river {}. It belongs to {country}, and has a market on Fridays.",
                t.name, t.river
            );
            out.push(page("town", at, &t.name, text));
        }
        for (at, (name, currency)) in self.countries.iter().enumerate() {
            let text = format!(
                "{name} is a country. People pay with the {currency}. It exports clocks and maps."
            );
            out.push(page("country", at, name, text));
        }
        out
    }

    /// A question: words, answer, pages in the order in which their facts are needed.
    fn question(&self, hops: u8, rng: &mut Rng) -> (String, String, Vec<String>) {
        let at = rng.below(THINGS);
        let (company, person) = (&self.companies[at], self.companies[at].founder);
        let town = self.people[person].born;
        let country = self.towns[town].country;
        let pages = [
            format!("company-{at}"),
            format!("person-{person}"),
            format!("town-{town}"),
        ];
        let (words, answer) = match (hops, rng.below(2)) {
            (1, 0) => (
                format!("Who founded {}?", company.name),
                self.people[person].name.clone(),
            ),
            (1, _) => (
                format!("What does the company {} make?", company.name),
                company.trade.into(),
            ),
            (2, 0) => {
                let words = format!("In which town was the founder of {} born?", company.name);
                (words, self.towns[town].name.clone())
            }
            (2, _) => {
                let words = format!("In which year was the founder of {} born?", company.name);
                (words, self.people[person].year.to_string())
            }
            (_, 0) => {
                let words = format!(
                    "On which river is the town where the founder of {} was born?",
                    company.name
                );
                (words, self.towns[town].river.clone())
            }
            _ => {
                let words = format!("In which country was the founder of {} born?", company.name);
                (words, self.countries[country].0.clone())
            }
        };
        let pages = pages.into_iter().take(usize::from(hops)).collect();
        (words, answer, pages)
    }
}

/// Pages of a seed.
pub(super) fn pages(seed: u64) -> Vec<CorpusPage> {
    World::new(seed).pages()
}

/// Hops of questions.
pub(super) const HOPS: std::ops::RangeInclusive<u8> = 1..=3;

/// Questions over generated pages. All of them are about one corpus; the company that is asked about says
/// which split a question is in.
#[derive(Clone, Debug)]
pub struct Questions {
    /// Seed of the run.
    seed: u64,
    /// Seed of the pages.
    corpus: u64,
    /// Hops, in turn.
    hops: Vec<u8>,
    /// Number of training tasks.
    train: usize,
    /// Number of held-out tasks.
    held_out: usize,
}

impl Questions {
    /// Questions of some hops in turn, over the pages of `corpus`.
    pub fn new(seed: u64, corpus: u64, hops: Vec<u8>, train: usize, held_out: usize) -> Self {
        Self {
            seed,
            corpus,
            hops,
            train,
            held_out,
        }
    }
}

impl Taskset for Questions {
    fn name(&self) -> &str {
        "search"
    }

    fn len(&self, split: Split) -> usize {
        match split {
            Split::Train => self.train,
            Split::HeldOut => self.held_out,
        }
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        let missing = || TasksetError::Index {
            taskset: "search".into(),
            split,
            index,
            len: self.len(split),
        };
        let hops = self.hops.get(index % self.hops.len().max(1)).copied();
        let hops = hops
            .filter(|_| index < self.len(split))
            .ok_or_else(missing)?;
        let label = format!("search/{}/{index}", split.as_str());
        let mut rng = Rng::labelled(self.seed, &label);
        let world = World::new(self.corpus);
        // The company of a question is its first page: one of five is held out.
        let held_out = |page: &str| hash64(page.as_bytes()).is_multiple_of(5);
        let drawn = std::iter::repeat_with(|| world.question(hops, &mut rng)).take(2000);
        let mut fitting =
            drawn.filter(|(_, _, pages)| held_out(&pages[0]) == (split == Split::HeldOut));
        let (words, answer, citations) = fitting.next().ok_or_else(missing)?;
        Ok(Task {
            id: TaskId::new(format!("search-{}-{}-{index}", self.seed, split.as_str())),
            kind: format!("search/{hops}"),
            preamble: Vec::new(),
            prompt: words,
            data: json!({ "answer": answer, "citations": citations }),
            seed: hash64(label.as_bytes()),
        })
    }
}
