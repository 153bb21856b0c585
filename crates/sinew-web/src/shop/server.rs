//! Cart, orders and requests of one episode.

use super::catalog::{Product, SIZES, Search, find, products};
use super::gold::gold;
use super::pages;
use super::state::{Goal, Line, Order, SHIPPING, State};
use crate::plan::Step;
use crate::site::{Request, Response, Site};
use serde_json::Value;
use sinew_env::{EnvError, hash64};
use sinew_types::{Outcome, Task};

/// Pieces of one product at most.
const MAX_QUANTITY: u32 = 20;
/// Lines of a cart, and orders of a customer, at most.
const MAX_LINES: usize = 20;
/// Characters of a field of an order at most.
const MAX_FIELD: usize = 100;

/// The shop of one episode.
#[derive(Debug)]
struct Shop {
    /// What is to be reached.
    goal: Goal,
    /// The task in words.
    prompt: String,
    /// The catalogue.
    products: Vec<Product>,
    /// Cart and orders.
    state: State,
    /// Value of its cookie: one of another episode is not taken for its own.
    session: String,
    /// Requests whose cookie was of another session.
    strangers: u32,
}

impl Shop {
    /// The shop of a task.
    pub(super) fn new(goal: Goal, prompt: String, seed: u64) -> Self {
        Self {
            products: products(goal.catalog),
            state: State {
                cart: goal.start.clone(),
                orders: Vec::new(),
            },
            session: format!("{:016x}", hash64(format!("{seed}{prompt}").as_bytes())),
            goal,
            prompt,
            strangers: 0,
        }
    }

    /// A page with the number of pieces in the cart.
    fn page(&self, title: &str, body: &str) -> Response {
        let pieces = self.state.cart.iter().map(|l| l.quantity).sum();
        Response::html(200, pages::page(title, pieces, body))
    }

    /// The page of addresses that are not there.
    fn missing(&self) -> Response {
        let pieces = self.state.cart.iter().map(|l| l.quantity).sum();
        let body = pages::page("Not found", pieces, "<p>There is no such page.</p>");
        Response::html(404, body)
    }

    /// Products that fit the query's fields.
    fn search(&self, request: &Request) -> Response {
        let dollars = request.asked("most").trim_start_matches('$').parse::<u32>();
        let search = Search {
            words: request.asked("q").chars().take(MAX_FIELD).collect(),
            category: request.asked("category").into(),
            color: request.asked("color").into(),
            stars: request.asked("stars").parse().unwrap_or(0),
            cents: dollars.ok().and_then(|d| d.checked_mul(100)),
            by_price: request.asked("order") == "price",
        };
        let found = find(&self.products, &search);
        let at = request.asked("page").parse().unwrap_or(0).min(found.len());
        let kept = ["q", "category", "color", "stars", "most", "order"];
        let query: String = kept
            .iter()
            .map(|k| format!("{k}={}&amp;", encode(request.asked(k))))
            .collect();
        self.page("Products", &pages::results(&search, &found, at, &query))
    }

    /// The page of a product, with what was wrong.
    fn product(&self, id: &str, error: &str) -> Response {
        match id
            .parse::<usize>()
            .ok()
            .and_then(|id| self.products.get(id))
        {
            Some(p) => self.page(&p.name, &pages::product(p, error)),
            None => self.missing(),
        }
    }

    /// Puts pieces into the cart: with a size where there are some, and at most 20.
    fn add(&mut self, request: &Request) -> Response {
        let id = request.sent("id").parse::<usize>().ok();
        let Some(product) = id.and_then(|id| self.products.get(id)) else {
            return self.missing();
        };
        let size = request.sent("size");
        let right_size = match product.sizes {
            true => SIZES.contains(&size),
            false => size.is_empty(),
        };
        if !right_size {
            return self.product(request.sent("id"), "Choose a size.");
        }
        let Some(quantity) = quantity(request.sent("quantity")) else {
            return self.product(request.sent("id"), "The quantity must be 1 to 20.");
        };
        let (product, size) = (product.id, size.to_owned());
        let same = |l: &&mut Line| l.product == product && l.size == size;
        if let Some(line) = self.state.cart.iter_mut().find(same) {
            line.quantity = (line.quantity + quantity).min(MAX_QUANTITY);
        } else if self.state.cart.len() >= MAX_LINES {
            return self.product(request.sent("id"), "The cart is full.");
        } else {
            self.state.cart.push(Line {
                product,
                size,
                quantity,
            });
        }
        Response::see_other("/cart")
    }

    /// Changes or removes a line of the cart.
    fn change(&mut self, at: &str, request: &Request) -> Response {
        let at = at
            .parse::<usize>()
            .ok()
            .filter(|at| *at < self.state.cart.len());
        match (at, request.sent("do"), quantity(request.sent("quantity"))) {
            (None, _, _) => return self.missing(),
            (Some(at), "remove", _) => {
                self.state.cart.remove(at);
            }
            (Some(at), _, Some(quantity)) => self.state.cart[at].quantity = quantity,
            (Some(_), _, None) => return self.cart("The quantity must be 1 to 20."),
        }
        Response::see_other("/cart")
    }

    /// The cart, with what was wrong.
    fn cart(&self, error: &str) -> Response {
        self.page(
            "Cart",
            &pages::cart(&self.state.cart, &self.products, error),
        )
    }

    /// Makes an order of the cart, if all fields are right.
    fn order(&mut self, request: &Request) -> Response {
        let field = |name| {
            request
                .sent(name)
                .chars()
                .take(MAX_FIELD)
                .collect::<String>()
        };
        let order = Order {
            lines: self.state.cart.clone(),
            name: field("name"),
            street: field("street"),
            city: field("city"),
            shipping: field("shipping"),
        };
        let error = if order.lines.is_empty() {
            "Your cart is empty."
        } else if [&order.name, &order.street, &order.city]
            .iter()
            .any(|f| f.is_empty())
        {
            "Name, street and city are needed."
        } else if !SHIPPING.contains(&order.shipping.as_str()) {
            "Choose a way of shipping."
        } else if self.state.orders.len() >= MAX_LINES {
            "You have too many orders."
        } else {
            self.state.orders.push(order);
            self.state.cart.clear();
            return Response::see_other("/thanks");
        };
        self.page("Check out", &pages::checkout(&order, error))
    }

    /// Pages, which change nothing.
    fn get(&mut self, request: &Request) -> Response {
        match request.path.as_str() {
            "/" => self.page("Shop", &pages::home()),
            "/search" => self.search(request),
            "/cart" => self.cart(""),
            "/checkout" => self.page("Check out", &pages::checkout(&Order::default(), "")),
            "/thanks" => self.page("Thank you", "<p>Your order is on its way.</p>"),
            path => match path.strip_prefix("/p/") {
                Some(id) => self.product(id, ""),
                None => self.missing(),
            },
        }
    }
}

/// The site of a task.
///
/// # Errors
/// If the data is not that of a task of the shop.
pub(crate) fn site(task: &Task) -> Result<Box<dyn Site>, EnvError> {
    let goal: Goal =
        serde_json::from_value(task.data["goal"].clone()).map_err(|e| EnvError::Task {
            task: task.id.to_string(),
            message: format!("data.goal is no goal of a shop: {e}"),
        })?;
    let known = products(goal.catalog).len();
    let mut lines = goal
        .start
        .iter()
        .chain(&goal.end.cart)
        .chain(goal.end.orders.iter().flat_map(|o| &o.lines));
    if lines.any(|l| l.product >= known) {
        return Err(EnvError::Task {
            task: task.id.to_string(),
            message: format!("data.goal names a product that is not among the {known} of its shop"),
        });
    }
    Ok(Box::new(Shop::new(goal, task.prompt.clone(), task.seed)))
}

/// A quantity that a form sent.
fn quantity(text: &str) -> Option<u32> {
    text.parse().ok().filter(|q| (1..=MAX_QUANTITY).contains(q))
}

/// A value of a query.
fn encode(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

impl Site for Shop {
    fn start(&self) -> String {
        "/".into()
    }

    fn begun(&mut self, _prepared: &Value) -> Result<String, String> {
        Ok(self.prompt.clone())
    }

    fn respond(&mut self, request: &Request) -> Response {
        let own = format!("session={}", self.session);
        if !request.cookie.is_empty() && request.cookie != own {
            self.strangers += 1;
            return Response::html(400, "<p>This session is of another customer.</p>".into());
        }
        let mut response = match (request.method.as_str(), request.path.as_str()) {
            ("GET", _) => self.get(request),
            ("POST", "/cart") => self.add(request),
            ("POST", "/checkout") => self.order(request),
            ("POST", path) => match path.strip_prefix("/cart/") {
                Some(at) => self.change(at, request),
                None => self.missing(),
            },
            _ => Response::html(405, "<p>Not allowed.</p>".into()),
        };
        if request.cookie.is_empty() {
            let cookie = format!("{own}; Path=/; HttpOnly");
            response.headers.push(("set-cookie".into(), cookie));
        }
        response
    }

    /// Reward 1 if cart and orders are those of the task, after the model said that it is done.
    fn outcome(&self, done: bool) -> Outcome {
        let right = self.state.clone().sorted() == self.goal.end.clone().sorted();
        let success = right && done && self.strangers == 0;
        let flag = |b: bool| f64::from(u8::from(b));
        let pieces: u32 = self.state.cart.iter().map(|l| l.quantity).sum();
        Outcome {
            reward: flag(success),
            success,
            metrics: [
                ("right_state", flag(right)),
                ("orders", self.state.orders.len() as f64),
                ("in_cart", f64::from(pieces)),
            ]
            .map(|(name, value)| (name.to_owned(), value))
            .into(),
            ..Outcome::default()
        }
    }

    fn state(&self) -> Option<u64> {
        let state = serde_json::to_vec(&self.state).ok()?;
        Some(hash64(&state))
    }

    fn gold(&self) -> Option<Vec<Step>> {
        Some(gold(&self.goal, &self.products))
    }
}
