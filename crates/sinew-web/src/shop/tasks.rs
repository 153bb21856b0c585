//! Tasks of the shop, from a seed: what should be in the cart and among the orders at the end.

use super::catalog::{Product, SIZES, Search, find, products};
use super::state::{Goal, Line, Order, SHIPPING, State};
use serde_json::json;
use sinew_env::{Rng, Split, Taskset, TasksetError};
use sinew_types::{Task, TaskId};

/// Levels: 1 a product by name; 2 with quantity and size; 3 by properties; 4 two products and an order;
/// 5 a cart that is to be changed.
pub(crate) const LEVELS: std::ops::RangeInclusive<u8> = 1..=5;

/// Who gets an order.
const PEOPLE: [&str; 8] = [
    "Ana Silva",
    "Ben Okoro",
    "Chen Wei",
    "Dina Haddad",
    "Emil Larsen",
    "Fay Jones",
    "Goro Abe",
    "Hana Novak",
];
/// Where they live.
const STREETS: [&str; 6] = [
    "Mill Lane",
    "High Street",
    "Oak Road",
    "Lake View",
    "Station Road",
    "Hill Top",
];
/// In which city.
const CITIES: [&str; 6] = ["Leeds", "Porto", "Turin", "Ghent", "Malmo", "Brno"];

/// Tasks of a shop.
#[derive(Clone, Debug)]
pub(crate) struct ShopTasks {
    /// Seed of the run.
    seed: u64,
    /// Levels, in turn.
    levels: Vec<u8>,
    /// Number of training tasks.
    train: usize,
    /// Number of held-out tasks.
    held_out: usize,
}

impl ShopTasks {
    /// Tasks of some levels in turn, each of a shop of its own.
    pub(crate) fn new(seed: u64, levels: Vec<u8>, train: usize, held_out: usize) -> Self {
        Self {
            seed,
            levels,
            train,
            held_out,
        }
    }
}

impl Taskset for ShopTasks {
    fn name(&self) -> &str {
        "shop"
    }

    fn len(&self, split: Split) -> usize {
        match split {
            Split::Train => self.train,
            Split::HeldOut => self.held_out,
        }
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        let level = self.levels.get(index % self.levels.len().max(1)).copied();
        let level = level.filter(|_| index < self.len(split));
        let level = level.ok_or_else(|| TasksetError::Index {
            taskset: "shop".into(),
            split,
            index,
            len: self.len(split),
        })?;
        // The two splits have other shops: the last bit of the seed of the products says which.
        let label = format!("shop/{}/{index}", split.as_str());
        let seed = Rng::labelled(self.seed, &label).next_u64();
        let catalog = seed & !1 | u64::from(split == Split::HeldOut);
        let (goal, prompt) = goal(level, catalog);
        Ok(Task {
            id: TaskId::new(format!("shop-{}-{}-{index}", self.seed, split.as_str())),
            kind: format!("shop/{level}"),
            preamble: Vec::new(),
            prompt,
            data: json!({ "site": "shop", "goal": goal }),
            seed: catalog,
        })
    }
}

/// A goal of a level and its words.
fn goal(level: u8, catalog: u64) -> (Goal, String) {
    let all = products(catalog);
    let mut rng = Rng::labelled(catalog, "goal");
    let mut goal = Goal {
        level,
        catalog,
        start: Vec::new(),
        end: State::default(),
        color: String::new(),
        kind: String::new(),
        stars: 0,
    };
    let prompt = match level {
        1 | 2 => {
            let line = draw(&mut rng, &all, level == 2);
            let prompt = format!("Put {} into the cart.", words(&line, &all));
            goal.end.cart = vec![line];
            prompt
        }
        3 => {
            let product = described(&mut rng, &all, &mut goal);
            goal.end.cart = vec![one(product, &mut rng)];
            let size = match goal.end.cart[0].size.as_str() {
                "" => String::new(),
                size => format!(" in size {size}"),
            };
            let stars = format!("{}.{}", goal.stars / 10, goal.stars % 10);
            format!(
                "Put the cheapest {} {} with at least {stars} stars into the cart{size}.",
                goal.color, goal.kind
            )
        }
        4 => ordered(&mut rng, &all, &mut goal),
        _ => changed(&mut rng, &all, &mut goal),
    };
    let prompt = format!("{prompt} Change nothing else. Call done at the end.");
    (goal, prompt)
}

/// Two lines and an order of them.
fn ordered(rng: &mut Rng, all: &[Product], goal: &mut Goal) -> String {
    let lines = several(rng, all, 2);
    let order = Order {
        name: (*rng.pick(&PEOPLE)).into(),
        street: format!("{} {}", rng.range(1, 99), rng.pick(&STREETS)),
        city: (*rng.pick(&CITIES)).into(),
        shipping: (*rng.pick(&SHIPPING)).into(),
        lines,
    };
    let prompt = format!(
        "Order {} and {} in one order for {}, {}, {}, with {} shipping.",
        words(&order.lines[0], all),
        words(&order.lines[1], all),
        order.name,
        order.street,
        order.city,
        order.shipping
    );
    goal.end.orders = vec![order];
    prompt
}

/// A cart of three lines: one is to go, one is to get another quantity.
fn changed(rng: &mut Rng, all: &[Product], goal: &mut Goal) -> String {
    goal.start = several(rng, all, 3);
    let gone = rng.below(3);
    let changed = (gone + 1 + rng.below(2)) % 3;
    let quantity = 1 + (goal.start[changed].quantity + rng.below(3) as u32) % 5;
    let mut end = goal.start.clone();
    end[changed].quantity = quantity;
    let name = |at: usize| &all[goal.start[at].product].name;
    let prompt = format!(
        "In the cart, remove the {} and set the quantity of the {} to {quantity}.",
        name(gone),
        name(changed)
    );
    end.remove(gone);
    goal.end.cart = end;
    prompt
}

/// One piece of a product, in some size if it has sizes.
fn one(product: &Product, rng: &mut Rng) -> Line {
    let size = match product.sizes {
        true => *rng.pick(&SIZES),
        false => "",
    };
    Line {
        product: product.id,
        size: size.into(),
        quantity: 1,
    }
}

/// A line with a product; with several pieces if `many`.
fn draw(rng: &mut Rng, all: &[Product], many: bool) -> Line {
    let product = &all[rng.below(all.len())];
    let mut line = one(product, rng);
    if many {
        line.quantity = rng.range(2, 5) as u32;
    }
    line
}

/// Lines of different products.
fn several(rng: &mut Rng, all: &[Product], count: usize) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    while lines.len() < count {
        let line = draw(rng, all, true);
        if lines.iter().all(|l| l.product != line.product) {
            lines.push(line);
        }
    }
    lines
}

/// A product by properties that others lack: the cheapest of its color and kind with enough stars.
fn described<'a>(rng: &mut Rng, all: &'a [Product], goal: &mut Goal) -> &'a Product {
    let example = &all[rng.below(all.len())];
    let stars = [40, 35, 30, 0];
    let stars = stars.into_iter().find(|s| example.stars >= *s).unwrap_or(0);
    (goal.color, goal.kind, goal.stars) = (example.color.into(), example.kind.into(), stars);
    let search = Search {
        words: goal.kind.clone(),
        color: goal.color.clone(),
        stars,
        by_price: true,
        ..Search::default()
    };
    // The example itself fits, so that there is one.
    find(all, &search).first().copied().unwrap_or(example)
}

/// A line in words.
fn words(line: &Line, all: &[Product]) -> String {
    let name = &all[line.product].name;
    let pieces = if line.quantity == 1 {
        "piece"
    } else {
        "pieces"
    };
    match line.size.as_str() {
        "" => format!("{} {pieces} of the {name}", line.quantity),
        size => format!("{} {pieces} of the {name} in size {size}", line.quantity),
    }
}

#[cfg(test)]
mod tests {
    use super::super::server::site;
    use super::*;
    use sinew_env::hash64;
    use std::collections::BTreeSet;

    /// Hash of a task's problem.
    fn problem(task: &Task) -> u64 {
        hash64(format!("{}{}", task.prompt, task.data["goal"]["catalog"]).as_bytes())
    }

    #[test]
    fn the_splits_share_no_problem_and_every_level_is_there() {
        let tasks = ShopTasks::new(3, LEVELS.collect(), 200, 200);
        let all = |split| -> Vec<Task> { (0..200).map(|i| tasks.get(split, i).unwrap()).collect() };
        let (train, held_out) = (all(Split::Train), all(Split::HeldOut));
        let problems = |tasks: &[Task]| tasks.iter().map(problem).collect::<BTreeSet<_>>();
        assert!(problems(&train).is_disjoint(&problems(&held_out)));
        let kinds: BTreeSet<_> = train.iter().map(|t| t.kind.as_str()).collect();
        assert_eq!(kinds.len(), 5);
        assert!(tasks.get(Split::Train, 200).is_err());
        for task in &train {
            assert!(site(task).unwrap().gold().unwrap().len() < 25);
        }
    }

    #[test]
    fn doing_nothing_and_buying_everything_score_nothing() {
        let tasks = ShopTasks::new(1, LEVELS.collect(), 40, 1);
        for i in 0..40 {
            let mut site = site(&tasks.get(Split::Train, i).unwrap()).unwrap();
            assert!(!site.outcome(true).success, "task {i}");
            for id in 0..36 {
                let form = [
                    ("id", id.to_string()),
                    ("quantity", "1".into()),
                    ("size", "small".into()),
                ];
                let request = crate::site::Request {
                    method: "POST".into(),
                    path: "/cart".into(),
                    form: form.map(|(n, v)| (n.to_owned(), v)).into(),
                    ..Default::default()
                };
                site.respond(&request);
            }
            assert!(!site.outcome(true).success, "task {i}");
        }
    }
}
