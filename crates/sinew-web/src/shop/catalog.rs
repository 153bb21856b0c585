//! Products of a seed: equal seeds give equal shops.

use sinew_env::Rng;

/// Products of a shop.
const PRODUCTS: usize = 36;

/// First words of names.
const MAKERS: [&str; 12] = [
    "Alder", "Birch", "Cedar", "Dune", "Ember", "Fjord", "Grove", "Harbor", "Iris", "Juniper",
    "Kestrel", "Lumen",
];
/// Colors of products.
pub(super) const COLORS: [&str; 5] = ["red", "blue", "green", "black", "white"];
/// Sizes of clothes.
pub(super) const SIZES: [&str; 3] = ["small", "medium", "large"];
/// Categories with their kinds of products. Those of the last one have sizes.
pub(super) const CATEGORIES: [(&str, [&str; 3]); 4] = [
    ("Kitchen", ["kettle", "mug", "pan"]),
    ("Office", ["lamp", "notebook", "chair"]),
    ("Garden", ["spade", "hose", "bench"]),
    ("Clothes", ["jacket", "scarf", "shirt"]),
];

/// A product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Product {
    /// Index in the catalogue.
    pub(super) id: usize,
    /// Maker and kind: unique.
    pub(super) name: String,
    /// One of the four.
    pub(super) category: &'static str,
    /// Last word of the name.
    pub(super) kind: &'static str,
    /// One of the five.
    pub(super) color: &'static str,
    /// The price.
    pub(super) cents: u32,
    /// Tenths of stars, 20 to 50.
    pub(super) stars: u32,
    /// It comes in [`SIZES`].
    pub(super) sizes: bool,
}

impl Product {
    /// The price in words.
    pub(super) fn price(&self) -> String {
        money(self.cents)
    }

    /// Stars with one digit.
    pub(super) fn rating(&self) -> String {
        format!("{}.{}", self.stars / 10, self.stars % 10)
    }
}

/// An amount in words.
pub(super) fn money(cents: u32) -> String {
    format!("${}.{:02}", cents / 100, cents % 100)
}

/// All products of a seed. No two have one name or one price.
pub(super) fn products(seed: u64) -> Vec<Product> {
    let mut rng = Rng::labelled(seed, "shop");
    let mut out: Vec<Product> = Vec::with_capacity(PRODUCTS);
    while out.len() < PRODUCTS {
        let (category, kinds) = *rng.pick(&CATEGORIES);
        let kind = *rng.pick(&kinds);
        let name = format!("{} {kind}", rng.pick(&MAKERS));
        let cents = rng.range(4, 120) as u32 * 100 + *rng.pick(&[0, 25, 50, 95]);
        if out.iter().any(|p| p.name == name || p.cents == cents) {
            continue;
        }
        out.push(Product {
            id: out.len(),
            name,
            category,
            kind,
            color: rng.pick::<&str>(&COLORS),
            cents,
            stars: rng.range(20, 50) as u32,
            sizes: category == "Clothes",
        });
    }
    out
}

/// Conditions of a search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Search {
    /// Words that the name contains.
    pub(super) words: String,
    /// Empty: all.
    pub(super) category: String,
    /// Empty: all.
    pub(super) color: String,
    /// Stars at least, in tenths.
    pub(super) stars: u32,
    /// Cents at most.
    pub(super) cents: Option<u32>,
    /// By price, lowest first; else by name.
    pub(super) by_price: bool,
}

/// The products that fit, in the order of the search.
pub(super) fn find<'a>(all: &'a [Product], search: &Search) -> Vec<&'a Product> {
    let words = search.words.to_lowercase();
    let fits = |p: &&Product| {
        let name = p.name.to_lowercase();
        words.split_whitespace().all(|w| name.contains(w))
            && (search.category.is_empty() || p.category == search.category)
            && (search.color.is_empty() || p.color == search.color)
            && p.stars >= search.stars
            && search.cents.is_none_or(|most| p.cents <= most)
    };
    let mut found: Vec<&Product> = all.iter().filter(fits).collect();
    match search.by_price {
        true => found.sort_by_key(|p| p.cents),
        false => found.sort_by(|a, b| a.name.cmp(&b.name)),
    }
    found
}
