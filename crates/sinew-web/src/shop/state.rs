//! What the server keeps, and the goal of a task.

use serde::{Deserialize, Serialize};

/// Ways of shipping.
pub(super) const SHIPPING: [&str; 3] = ["standard", "express", "pickup"];
/// A line of a cart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Line {
    /// Index in the catalogue.
    pub(super) product: usize,
    /// One of the sizes, or nothing.
    pub(super) size: String,
    /// Pieces.
    pub(super) quantity: u32,
}

/// An order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Order {
    /// What is ordered.
    pub(super) lines: Vec<Line>,
    /// Who gets it.
    pub(super) name: String,
    /// With the number.
    pub(super) street: String,
    /// Where it goes.
    pub(super) city: String,
    /// One of the three ways.
    pub(super) shipping: String,
}

/// What the server keeps, and what it should be at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    /// In the order in which lines were added.
    pub(super) cart: Vec<Line>,
    /// In the order in which they were made.
    pub(super) orders: Vec<Order>,
}

impl State {
    /// Lines in an order that does not depend on the way.
    pub(super) fn sorted(mut self) -> Self {
        self.cart.sort();
        self.orders.iter_mut().for_each(|o| o.lines.sort());
        self
    }
}

/// Data of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Goal {
    /// Which kind of task.
    pub(super) level: u8,
    /// Seed of the products.
    pub(super) catalog: u64,
    /// The cart at the start.
    pub(super) start: Vec<Line>,
    /// Cart and orders at the end.
    pub(super) end: State,
    /// The search that finds a product of level 3.
    pub(super) color: String,
    /// Kind of the product of level 3.
    pub(super) kind: String,
    /// Tenths of stars at least, of level 3.
    pub(super) stars: u32,
}
