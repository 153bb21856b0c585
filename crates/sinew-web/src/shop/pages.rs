//! The shop's pages.

use super::catalog::{CATEGORIES, COLORS, Product, SIZES, Search, money};
use super::state::{Line, Order, SHIPPING};
use crate::site::escape;
use std::fmt::Write as _;

/// Results on a page.
pub(super) const PER_PAGE: usize = 6;

/// A whole page.
pub(super) fn page(title: &str, in_cart: u32, body: &str) -> String {
    format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>\
         <style>body{{font:15px sans-serif;margin:12px}}nav a{{margin-right:12px}}\
         li{{margin:4px 0}}label{{display:block;margin:6px 0}}.error{{color:#b00}}</style>\
         <nav><a href=\"/\">Home</a><a href=\"/cart\">Cart ({in_cart})</a></nav>\
         <form action=\"/search\"><input name=q aria-label=\"Search\"><button>Search</button></form>\
         <h1>{title}</h1>{body}</html>",
        title = escape(title),
    )
}

/// The first page.
pub(super) fn home() -> String {
    let mut out = String::from("<ul>");
    for (name, _) in CATEGORIES {
        let _ = write!(
            out,
            "<li><a href=\"/search?category={name}\">{name}</a></li>"
        );
    }
    out.push_str("<li><a href=\"/search\">All products</a></li></ul>");
    out
}

/// A list of choices, with the chosen one.
fn choices(label: &str, name: &str, choices: &[(&str, &str)], chosen: &str) -> String {
    let mut out = format!("<label>{label} <select name={name}>");
    for (value, shown) in choices {
        let on = if *value == chosen { " selected" } else { "" };
        let _ = write!(out, "<option value=\"{value}\"{on}>{shown}</option>");
    }
    out.push_str("</select></label>");
    out
}

/// The form with what is searched for.
fn filters(search: &Search) -> String {
    let mut categories = vec![("", "any")];
    categories.extend(CATEGORIES.iter().map(|(name, _)| (*name, *name)));
    let mut colors = vec![("", "any")];
    colors.extend(COLORS.iter().map(|c| (*c, *c)));
    let stars = [
        ("0", "any"),
        ("30", "3.0 or more"),
        ("35", "3.5 or more"),
        ("40", "4.0 or more"),
    ];
    let order = [("name", "name"), ("price", "price, lowest first")];
    let mut out = format!(
        "<form action=\"/search\"><input type=hidden name=q value=\"{}\">",
        escape(&search.words)
    );
    out.push_str(&choices(
        "Category",
        "category",
        &categories,
        &search.category,
    ));
    out.push_str(&choices("Color", "color", &colors, &search.color));
    out.push_str(&choices(
        "Stars",
        "stars",
        &stars,
        &search.stars.to_string(),
    ));
    let most = search
        .cents
        .map(|c| (c / 100).to_string())
        .unwrap_or_default();
    let _ = write!(
        out,
        "<label>Price at most <input name=most value=\"{most}\"></label>"
    );
    let chosen = if search.by_price { "price" } else { "name" };
    out.push_str(&choices("Order", "order", &order, chosen));
    out.push_str("<button>Filter</button></form>");
    out
}

/// Filters, and one page of what was found.
pub(super) fn results(search: &Search, found: &[&Product], at: usize, query: &str) -> String {
    let mut out = filters(search);
    let _ = write!(out, "<p>{} found</p><ul>", found.len());
    for p in found.iter().skip(at * PER_PAGE).take(PER_PAGE) {
        let _ = write!(
            out,
            "<li><a href=\"/p/{}\">{}</a> {}, {}, {} stars</li>",
            p.id,
            p.name,
            p.color,
            p.price(),
            p.rating()
        );
    }
    out.push_str("</ul>");
    if at > 0 {
        let _ = write!(
            out,
            "<a href=\"/search?{query}page={}\">Previous page</a> ",
            at - 1
        );
    }
    if (at + 1) * PER_PAGE < found.len() {
        let _ = write!(
            out,
            "<a href=\"/search?{query}page={}\">Next page</a>",
            at + 1
        );
    }
    out
}

/// One product. `error`: why it was not put into the cart.
pub(super) fn product(p: &Product, error: &str) -> String {
    let mut out = format!(
        "<p>{}, {}, {} stars, {}</p><p class=error role=alert>{}</p>\
         <form method=post action=\"/cart\"><input type=hidden name=id value={}>",
        p.category,
        p.color,
        p.rating(),
        p.price(),
        escape(error),
        p.id
    );
    if p.sizes {
        let mut sizes = vec![("", "choose")];
        sizes.extend(SIZES.iter().map(|s| (*s, *s)));
        out.push_str(&choices("Size", "size", &sizes, ""));
    }
    out.push_str(
        "<label>Quantity <input name=quantity value=1></label><button>Add to cart</button></form>",
    );
    out
}

/// The cart.
pub(super) fn cart(lines: &[Line], products: &[Product], error: &str) -> String {
    if lines.is_empty() {
        return "<p>Your cart is empty.</p>".into();
    }
    let mut out = format!("<p class=error role=alert>{}</p><ul>", escape(error));
    let mut total = 0;
    for (at, line) in lines.iter().enumerate() {
        let p = &products[line.product];
        total += p.cents * line.quantity;
        let size = if line.size.is_empty() {
            String::new()
        } else {
            format!(", {}", line.size)
        };
        let _ = write!(
            out,
            "<li>{name}{size}, {price} <form method=post action=\"/cart/{at}\">\
             <input name=quantity value={quantity} aria-label=\"Quantity of {name}\">\
             <button name=do value=update>Update {name}</button>\
             <button name=do value=remove>Remove {name}</button></form></li>",
            name = p.name,
            price = p.price(),
            quantity = line.quantity,
        );
    }
    let _ = write!(
        out,
        "</ul><p>Total {}</p><a href=\"/checkout\">Check out</a>",
        money(total)
    );
    out
}

/// The form of an order, with what was typed.
pub(super) fn checkout(typed: &Order, error: &str) -> String {
    let mut out = format!(
        "<p class=error role=alert>{}</p><form method=post action=\"/checkout\">",
        escape(error)
    );
    for (label, name, value) in [
        ("Name", "name", &typed.name),
        ("Street", "street", &typed.street),
        ("City", "city", &typed.city),
    ] {
        let value = escape(value);
        let _ = write!(
            out,
            "<label>{label} <input name={name} value=\"{value}\"></label>"
        );
    }
    out.push_str("<fieldset><legend>Shipping</legend>");
    for shipping in SHIPPING {
        let _ = write!(
            out,
            "<label><input type=radio name=shipping value={shipping}>{shipping}</label>"
        );
    }
    out.push_str("</fieldset><button>Place order</button></form>");
    out
}
