//! Templates of word problems. Level 1 has one step, level 2 two steps, and level 3 more steps, an irrelevant
//! number or a division.
//!
//! `{n}` and `{m}` are people, `{i}` is a thing, `{a}`, `{b}`, `{c}` and `{k}` are numbers, `{p}` is a
//! multiple of `{b}`, and `{l}` is larger than `{a}` plus `{c}`.

/// A kind of word problem.
#[derive(Debug)]
pub(super) struct Template {
    /// Level, 1 to 3.
    pub(super) level: u8,
    /// Question with placeholders.
    pub(super) text: &'static str,
    /// Expression that solves it.
    pub(super) solution: &'static str,
}

const fn template(level: u8, text: &'static str, solution: &'static str) -> Template {
    Template {
        level,
        text,
        solution,
    }
}

/// Names for `{n}` and `{m}`.
pub(super) const PEOPLE: [&str; 24] = [
    "Ana", "Ben", "Carla", "Dev", "Ella", "Finn", "Grace", "Hugo", "Iris", "Jack", "Kira", "Liam",
    "Mona", "Noah", "Omar", "Pia", "Quinn", "Rosa", "Sam", "Tara", "Uma", "Victor", "Wendy",
    "Yusuf",
];

/// Words for `{i}`.
pub(super) const THINGS: [&str; 20] = [
    "apples", "books", "pencils", "coins", "cards", "stamps", "cookies", "marbles", "eggs",
    "bottles", "tickets", "shells", "buttons", "oranges", "bricks", "candles", "roses", "nails",
    "tiles", "beads",
];

/// All templates. Tasks depend on their texts and order.
pub(super) const TEMPLATES: [Template; 36] = [
    template(
        1,
        "{n} has {a} boxes with {b} {i} in each box. How many {i} does {n} have?",
        "{a} * {b}",
    ),
    template(
        1,
        "{n} buys {b} {i} for {a} cents each. How many cents does {n} pay?",
        "{b} * {a}",
    ),
    template(
        1,
        "There are {b} rows with {a} {i} in each row. How many {i} are there?",
        "{b} * {a}",
    ),
    template(
        1,
        "A machine makes {a} {i} an hour. How many {i} does it make in {b} hours?",
        "{a} * {b}",
    ),
    template(
        1,
        "{n} had {l} {i} and gave {a} to {m}. How many {i} does {n} have left?",
        "{l} - {a}",
    ),
    template(
        1,
        "{n} has {l} {i} and {m} has {a}. How many more {i} does {n} have than {m}?",
        "{l} - {a}",
    ),
    template(
        1,
        "A shop sold {a} of its {l} {i}. How many {i} are left?",
        "{l} - {a}",
    ),
    template(
        1,
        "{n} has {l} {i} and {m} has {a} {i}. How many {i} do they have together?",
        "{l} + {a}",
    ),
    template(
        1,
        "{n} had {l} {i} and found {a} more. How many {i} does {n} have now?",
        "{l} + {a}",
    ),
    template(
        1,
        "{n} reads {b} pages a day. How many pages does {n} read in {a} days?",
        "{b} * {a}",
    ),
    template(
        1,
        "{p} {i} are shared equally by {b} people. How many {i} does each one get?",
        "{p} / {b}",
    ),
    template(
        1,
        "{n} puts {p} {i} into {b} equal bags. How many {i} are in each bag?",
        "{p} / {b}",
    ),
    template(
        2,
        "{n} has {a} boxes of {b} {i} and sells {c} {i}. How many {i} are left?",
        "{a} * {b} - {c}",
    ),
    template(
        2,
        "{n} makes {a} {i} a day for {b} days, then {c} more. How many {i} is that in all?",
        "{a} * {b} + {c}",
    ),
    template(
        2,
        "{n} has {c} {i} and buys {b} packs of {a} {i}. How many {i} does {n} have now?",
        "{c} + {b} * {a}",
    ),
    template(
        2,
        "{n} had {l} {i}, gave {a} to {m} and lost {c}. How many {i} are left?",
        "{l} - {a} - {c}",
    ),
    template(
        2,
        "{n} has {a} {i} and {m} has {c} more than {n}. How many {i} do they have together?",
        "{a} + {a} + {c}",
    ),
    template(
        2,
        "{n} has {a} red and {c} blue {i} in each of {b} boxes. How many {i} is that?",
        "({a} + {c}) * {b}",
    ),
    template(
        2,
        "{n} earns {a} dollars a day for {b} days and spends {c} dollars. How many dollars are left?",
        "{a} * {b} - {c}",
    ),
    template(
        2,
        "A shop has {b} shelves with {a} {i} each and {c} {i} in the cellar. How many {i} does it have?",
        "{b} * {a} + {c}",
    ),
    template(
        2,
        "{n} has {a} {i}. {m} has {k} times as many. How many {i} do they have together?",
        "{a} + {k} * {a}",
    ),
    template(
        2,
        "{n} collects {a} {i} a day and {m} collects {c} a day. How many {i} do they collect in {k} days?",
        "({a} + {c}) * {k}",
    ),
    template(
        2,
        "A farmer picks {p} {i} and fills {b} equal crates, then eats {k} {i} from one crate. How \
         many {i} are in that crate?",
        "{p} / {b} - {k}",
    ),
    template(
        2,
        "{n} walks {a} steps to school and {c} steps to the park each day. How many steps is that \
         in {b} days?",
        "({a} + {c}) * {b}",
    ),
    template(
        2,
        "{n} bought {l} {i}, used {c} and then bought {a} more. How many {i} does {n} have?",
        "{l} - {c} + {a}",
    ),
    template(
        2,
        "A train has {b} cars with {a} seats each. {c} seats are taken. How many seats are free?",
        "{b} * {a} - {c}",
    ),
    template(
        3,
        "{n} has {a} boxes of {b} {i} and {m} has {c} boxes of {k} {i}. How many {i} do they have together?",
        "{a} * {b} + {c} * {k}",
    ),
    template(
        3,
        "{n} is {k} years old and has {a} bags of {b} {i}. {n} gives {c} {i} away. How many {i} are left?",
        "{a} * {b} - {c}",
    ),
    template(
        3,
        "{n} sells {a} {i} at {b} cents and {c} {i} at {k} cents. How many cents does {n} get?",
        "{a} * {b} + {c} * {k}",
    ),
    template(
        3,
        "{n} makes {l} {i} a day for {b} days and gives {c} {i} to each of {k} friends. How many \
         {i} are left?",
        "{l} * {b} - {c} * {k}",
    ),
    template(
        3,
        "A school has {b} classes of {k} children. Each child gets {a} {i}. How many {i} is that?",
        "{b} * {k} * {a}",
    ),
    template(
        3,
        "{p} {i} are packed into {b} equal boxes. {n} buys {k} of the boxes. How many {i} does {n} buy?",
        "{p} / {b} * {k}",
    ),
    template(
        3,
        "{n} has {l} {i}, {m} has {a} fewer. How many {i} do they have together?",
        "{l} + {l} - {a}",
    ),
    template(
        3,
        "A box with {k} trays holds {b} {i} on each tray. {n} has {a} boxes and loses {c} {i}. How \
         many {i} are left?",
        "{k} * {b} * {a} - {c}",
    ),
    template(
        3,
        "{n} runs {a} meters in the morning and {c} meters at night for {b} days, and rests for {k} \
         days. How many meters is that?",
        "({a} + {c}) * {b}",
    ),
    template(
        3,
        "{n} buys {b} {i} for {a} cents each and pays with {l} coins of 100 cents. How many cents \
         does {n} get back?",
        "{l} * 100 - {b} * {a}",
    ),
];
