//! The gold policy: steps on elements by their names.

use super::catalog::Product;
use super::state::{Goal, Line};
use crate::plan::{Step, Verb};

/// Steps from any page to a line in the cart.
fn buy(line: &Line, all: &[Product]) -> Vec<Step> {
    let name = &all[line.product].name;
    let mut steps = vec![
        Step::on(Verb::Type(name.clone()), "textbox", "Search"),
        Step::click("button", "Search"),
        Step::click("link", name),
    ];
    steps.extend(put(line));
    steps
}

/// Steps on the page of a product.
fn put(line: &Line) -> Vec<Step> {
    let mut steps = Vec::new();
    if !line.size.is_empty() {
        steps.push(Step::on(
            Verb::Select(line.size.clone()),
            "combobox",
            "Size",
        ));
    }
    if line.quantity != 1 {
        let quantity = line.quantity.to_string();
        steps.push(Step::on(Verb::Type(quantity), "textbox", "Quantity"));
    }
    steps.push(Step::click("button", "Add to cart"));
    steps
}

/// The gold policy.
pub(super) fn gold(goal: &Goal, all: &[Product]) -> Vec<Step> {
    let mut steps = Vec::new();
    match goal.level {
        1 | 2 => steps.extend(goal.end.cart.iter().flat_map(|l| buy(l, all))),
        3 => {
            let line = &goal.end.cart[0];
            steps.extend([
                Step::on(Verb::Type(goal.kind.clone()), "textbox", "Search"),
                Step::click("button", "Search"),
                Step::on(Verb::Select(goal.color.clone()), "combobox", "Color"),
                Step::on(
                    Verb::Select("price, lowest first".into()),
                    "combobox",
                    "Order",
                ),
            ]);
            if goal.stars > 0 {
                let stars = format!("{}.{} or more", goal.stars / 10, goal.stars % 10);
                steps.push(Step::on(Verb::Select(stars), "combobox", "Stars"));
            }
            steps.push(Step::click("button", "Filter"));
            steps.push(Step::click("link", &all[line.product].name));
            steps.extend(put(line));
        }
        4 => {
            let order = &goal.end.orders[0];
            steps.extend(order.lines.iter().flat_map(|l| buy(l, all)));
            steps.extend([
                Step::click("link", "Check out"),
                Step::on(Verb::Type(order.name.clone()), "textbox", "Name"),
                Step::on(Verb::Type(order.street.clone()), "textbox", "Street"),
                Step::on(Verb::Type(order.city.clone()), "textbox", "City"),
                Step::click("radio", order.shipping.clone()),
                Step::click("button", "Place order"),
            ]);
        }
        _ => steps.extend(edit(goal, all)),
    }
    steps.push(Step::done());
    steps
}

/// Steps that change the cart of level 5.
fn edit(goal: &Goal, all: &[Product]) -> Vec<Step> {
    let pieces: u32 = goal.start.iter().map(|l| l.quantity).sum();
    let mut steps = vec![Step::click("link", format!("Cart ({pieces})"))];
    for line in &goal.start {
        let name = &all[line.product].name;
        let kept = goal.end.cart.iter().find(|l| l.product == line.product);
        match kept.map(|l| l.quantity) {
            None => steps.push(Step::click("button", format!("Remove {name}"))),
            Some(quantity) if quantity != line.quantity => {
                let field = format!("Quantity of {name}");
                steps.push(Step::on(Verb::Type(quantity.to_string()), "textbox", field));
                steps.push(Step::click("button", format!("Update {name}")));
            }
            Some(_) => {}
        }
    }
    steps
}
