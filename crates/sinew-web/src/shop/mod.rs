//! A small shop with a task: pages of HTML and forms, a cart and orders that the server keeps.
//!
//! | part | what it is |
//! |---|---|
//! | `catalog` | products of a seed |
//! | `tasks` | what is to be bought, by level: the taskset |
//! | `gold` | how it is bought |
//! | `state`, `server` | cart, orders, the goal; requests that change them |
//! | `pages` | HTML |
//!
//! The score compares cart and orders at the end with those of the task, line by line. Only `POST` changes
//! them, prices come from the catalogue alone, and nothing on a page says what the goal is.

mod catalog;
mod gold;
mod pages;
mod server;
mod state;
mod tasks;

#[cfg(feature = "browser")]
pub(crate) use server::site;
pub(crate) use tasks::{LEVELS, ShopTasks};
