//! A page as text: Chromium's accessibility tree, flat, with numbers for the elements that can be acted on.
//!
//! Only what is inside of the window has a number and is shown; the last line says how much is above and
//! below. Elements that are no controls but listen for clicks have the role `text` and a number: pages that
//! are not accessible exist.

use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Characters of a name or value that are shown.
const MAX_NAME: usize = 160;
/// Options of a list that are shown.
const MAX_OPTIONS: usize = 40;
/// Roles that can be acted on.
const CONTROLS: [&str; 18] = [
    "button",
    "link",
    "textbox",
    "searchbox",
    "checkbox",
    "radio",
    "combobox",
    "listbox",
    "menuitem",
    "menuitemcheckbox",
    "menuitemradio",
    "tab",
    "slider",
    "spinbutton",
    "switch",
    "treeitem",
    "DisclosureTriangle",
    "option",
];

/// A node of `Accessibility.getFullAXTree`.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AxNode {
    /// Id within the answer.
    node_id: String,
    /// It is not shown to people either.
    #[serde(default)]
    ignored: bool,
    /// What it is.
    role: Option<AxValue>,
    /// What it is called.
    name: Option<AxValue>,
    /// What it holds.
    value: Option<AxValue>,
    /// States, such as `checked`.
    #[serde(default)]
    properties: Vec<AxProperty>,
    /// Children in order.
    #[serde(default)]
    child_ids: Vec<String>,
    /// Chromium's id of the DOM node.
    #[serde(default, rename = "backendDOMNodeId")]
    backend: i64,
}

/// A value with its type, which is not read.
#[derive(Clone, Debug, Deserialize)]
struct AxValue {
    #[serde(default)]
    value: Value,
}

/// A named state.
#[derive(Clone, Debug, Deserialize)]
struct AxProperty {
    name: String,
    value: AxValue,
}

impl AxNode {
    /// The role, or nothing.
    fn role(&self) -> &str {
        self.role
            .as_ref()
            .and_then(|r| r.value.as_str())
            .unwrap_or_default()
    }

    /// The name as one line.
    fn name(&self) -> String {
        text(self.name.as_ref().map(|n| &n.value))
    }

    /// A state by name.
    fn property(&self, name: &str) -> Option<&Value> {
        let found = self.properties.iter().find(|p| p.name == name);
        found.map(|p| &p.value.value)
    }

    /// Whether it can be acted on.
    fn is_control(&self) -> bool {
        !self.ignored && CONTROLS.contains(&self.role())
    }
}

/// A value as one line.
fn text(value: Option<&Value>) -> String {
    let text = match value {
        None | Some(Value::Null) => return String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MAX_NAME) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// The part of `DOMSnapshot.captureSnapshot` that is used.
#[derive(Debug, Default)]
struct Layout {
    /// Top and bottom in the window, by backend id.
    boxes: BTreeMap<i64, (f64, f64)>,
    /// Backend id of the element that listens for clicks, by the backend id of a node inside of it.
    listeners: BTreeMap<i64, i64>,
}

/// Steps from a text to an element that listens for its clicks.
const MAX_DEPTH: usize = 3;

impl Layout {
    /// Reads boxes and listeners for clicks.
    fn read(snapshot: &Value) -> Self {
        let document = &snapshot["documents"][0];
        let nodes = &document["nodes"];
        let numbers = |value: &Value| -> Vec<i64> {
            let list = value.as_array().into_iter().flatten();
            list.map(|n| n.as_i64().unwrap_or(-1)).collect()
        };
        let backend = numbers(&nodes["backendNodeId"]);
        let parent = numbers(&nodes["parentIndex"]);
        let clickable: BTreeSet<i64> = numbers(&nodes["isClickable"]["index"])
            .into_iter()
            .collect();
        let id = |index: i64| {
            usize::try_from(index)
                .ok()
                .and_then(|i| backend.get(i))
                .copied()
        };
        let mut layout = Self::default();
        let scroll = document["scrollOffsetY"].as_f64().unwrap_or(0.0);
        let shown = numbers(&document["layout"]["nodeIndex"]);
        let bounds = document["layout"]["bounds"]
            .as_array()
            .into_iter()
            .flatten();
        for (index, bounds) in shown.iter().zip(bounds) {
            let (top, height) = (bounds[1].as_f64(), bounds[3].as_f64());
            if let (Some(id), Some(top), Some(height)) = (id(*index), top, height) {
                layout
                    .boxes
                    .insert(id, (top - scroll, top - scroll + height));
            }
        }
        // Document, html and body are the first elements of every page: a listener there says nothing.
        let whole = 4;
        for index in 0..backend.len() as i64 {
            let up = std::iter::successors(Some(index), |i| {
                parent.get(usize::try_from(*i).ok()?).copied()
            });
            let found = up
                .take(MAX_DEPTH)
                .find(|i| *i >= whole && clickable.contains(i));
            if let (Some(own), Some(listener)) = (id(index), found.and_then(id)) {
                layout.listeners.insert(own, listener);
            }
        }
        layout
    }
}

/// Where an item is, seen from the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Scrolled past.
    Above,
    /// Shown.
    Inside,
    /// Not scrolled to yet.
    Below,
}

/// A line of a page.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Item {
    /// Number for actions: of those inside of the window that can be acted on.
    pub(crate) number: Option<u32>,
    /// Role of the accessibility tree; `text` for text.
    pub(crate) role: String,
    /// Accessible name, or the text.
    pub(crate) name: String,
    /// Content of a field or choice of a list.
    pub(crate) value: Option<String>,
    /// `checked`, `disabled`, `expanded`, ...
    pub(crate) states: Vec<String>,
    /// Choices of a list.
    pub(crate) options: Vec<String>,
    /// Chromium's id of the element.
    pub(crate) backend: i64,
    /// Whether it is in the window.
    pub(crate) place: Place,
    /// It can be acted on.
    pub(crate) clickable: bool,
}

/// A page at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tree {
    /// Path and query of the page.
    pub(crate) url: String,
    /// Title of the page.
    pub(crate) title: String,
    /// Its lines in order.
    pub(crate) items: Vec<Item>,
}

/// The walk from the root to the lines.
struct Walk<'a> {
    /// By id.
    nodes: BTreeMap<&'a str, &'a AxNode>,
    /// Where nodes are.
    layout: Layout,
    /// Height of the window.
    height: f64,
    /// Lines so far.
    items: Vec<Item>,
}

impl Walk<'_> {
    /// Where a node is, seen from the window; one without a box counts as inside.
    fn place(&self, backend: i64) -> Place {
        match self.layout.boxes.get(&backend) {
            Some((_, bottom)) if *bottom <= 0.0 => Place::Above,
            Some((top, _)) if *top >= self.height => Place::Below,
            _ => Place::Inside,
        }
    }

    /// Adds a line.
    fn push(&mut self, node: &AxNode, role: &str, backend: i64, clickable: bool) -> &mut Item {
        let item = Item {
            number: None,
            role: role.into(),
            name: node.name(),
            value: None,
            states: Vec::new(),
            options: Vec::new(),
            backend,
            place: self.place(node.backend),
            clickable,
        };
        self.items.push(item);
        let last = self.items.len() - 1;
        &mut self.items[last]
    }

    /// All nodes below one, in order.
    fn below<'b>(&'b self, node: &'b AxNode, depth: usize, out: &mut Vec<&'b AxNode>) {
        for id in node.child_ids.iter().filter(|_| depth < 100) {
            if let Some(child) = self.nodes.get(id.as_str()) {
                out.push(child);
                self.below(child, depth + 1, out);
            }
        }
    }

    /// Adds a control with its value, states and options; what is inside of it is not shown again.
    fn control(&mut self, node: &AxNode) {
        let mut inside = Vec::new();
        self.below(node, 0, &mut inside);
        let is_option = |n: &&&AxNode| n.role() == "option" && !n.ignored;
        let options: Vec<String> = inside.iter().filter(is_option).map(|n| n.name()).collect();
        let mut states = Vec::new();
        for name in [
            "checked", "pressed", "selected", "expanded", "disabled", "required", "focused",
        ] {
            match node.property(name) {
                Some(Value::Bool(true)) => states.push(name.to_owned()),
                Some(Value::String(s)) if s == "true" => states.push(name.to_owned()),
                Some(Value::String(s)) if s == "mixed" => states.push(format!("{name}: mixed")),
                Some(Value::Bool(false)) if name == "expanded" => states.push("collapsed".into()),
                _ => {}
            }
        }
        let value = node.value.as_ref().map(|v| text(Some(&v.value)));
        let item = self.push(node, node.role(), node.backend, true);
        item.states = states;
        item.options = options;
        item.value = value;
    }

    /// Adds the lines of a node and of all below it.
    fn walk(&mut self, node: &AxNode, depth: usize) {
        if depth > 100 {
            return;
        }
        if node.is_control() {
            return self.control(node);
        }
        if !node.ignored {
            match node.role() {
                "StaticText" => return self.text(node),
                "image" | "img" if !node.name().is_empty() => {
                    let listener = self.layout.listeners.get(&node.backend).copied();
                    self.push(
                        node,
                        "image",
                        listener.unwrap_or(node.backend),
                        listener.is_some(),
                    );
                    return;
                }
                "heading" => {
                    let mut inside = Vec::new();
                    self.below(node, 0, &mut inside);
                    let listener = self.layout.listeners.get(&node.backend).copied();
                    if !inside.iter().any(|n| n.is_control()) && !node.name().is_empty() {
                        let id = listener.unwrap_or(node.backend);
                        self.push(node, "heading", id, listener.is_some());
                        return;
                    }
                }
                _ => {}
            }
        }
        for id in node.child_ids.clone() {
            if let Some(child) = self.nodes.get(id.as_str()).copied() {
                self.walk(child, depth + 1);
            }
        }
    }

    /// A text: an element of its own if it listens for clicks, else a part of the text before it.
    fn text(&mut self, node: &AxNode) {
        let words = node.name();
        if words.is_empty() {
            return;
        }
        if let Some(listener) = self.layout.listeners.get(&node.backend).copied() {
            self.push(node, "text", listener, true);
            return;
        }
        let place = self.place(node.backend);
        match self.items.last_mut() {
            Some(last) if last.role == "text" && !last.clickable && last.place == place => {
                last.name.push(' ');
                last.name.push_str(&words);
            }
            _ => {
                self.push(node, "text", node.backend, false);
            }
        }
    }
}

impl Tree {
    /// Reads the answers of `Accessibility.getFullAXTree` and `DOMSnapshot.captureSnapshot` for a window of
    /// `height` pixels.
    ///
    /// # Errors
    /// If the answers are not what the protocol says.
    pub(crate) fn read(ax: &Value, snapshot: &Value, height: f64) -> Result<Self, String> {
        let nodes: Vec<AxNode> = Vec::deserialize(&ax["nodes"]).map_err(|e| e.to_string())?;
        let root = nodes.first().ok_or("the accessibility tree is empty")?;
        let mut walk = Walk {
            nodes: nodes.iter().map(|n| (n.node_id.as_str(), n)).collect(),
            layout: Layout::read(snapshot),
            height,
            items: Vec::new(),
        };
        walk.walk(root, 0);
        let mut items = walk.items;
        let shown = items
            .iter_mut()
            .filter(|i| i.clickable && i.place == Place::Inside);
        for (number, item) in (1..).zip(shown) {
            item.number = Some(number);
        }
        Ok(Self {
            url: String::new(),
            title: root.name(),
            items,
        })
    }

    /// The element of a number.
    ///
    /// # Errors
    /// Which numbers there are, for the model.
    pub(crate) fn element(&self, number: i64) -> Result<&Item, String> {
        let found = |i: &&Item| i.number.is_some_and(|n| i64::from(n) == number);
        self.items.iter().find(found).ok_or_else(|| {
            let most = self.items.iter().filter_map(|i| i.number).max();
            match most {
                Some(most) => format!("there is no element {number}; the page has 1 to {most}"),
                None => format!("there is no element {number}; the page has none"),
            }
        })
    }

    /// The page for the model, at most about `max_chars` characters.
    pub(crate) fn show(&self, max_chars: usize) -> String {
        let mut out = format!("page {:?} {}", self.title, self.url);
        let mut left_out = 0;
        for item in self.items.iter().filter(|i| i.place == Place::Inside) {
            let line = line(item);
            match out.len() + line.len() <= max_chars {
                true => out.push_str(&line),
                false => left_out += 1,
            }
        }
        if left_out > 0 {
            let _ = write!(out, "\n({left_out} more lines are not shown)");
        }
        let count = |place| self.items.iter().filter(|i| i.place == place).count();
        match (count(Place::Above), count(Place::Below)) {
            (0, 0) => {}
            (above, below) => {
                let _ = write!(out, "\n({above} lines above, {below} below: scroll)");
            }
        }
        out
    }
}

/// One line for the model.
fn line(item: &Item) -> String {
    let mut out = String::from("\n");
    if let Some(number) = item.number {
        let _ = write!(out, "[{number}] ");
    }
    out.push_str(&item.role);
    if !item.name.is_empty() {
        let _ = write!(out, " {:?}", item.name);
    }
    if let Some(value) = item.value.as_ref().filter(|v| !v.is_empty()) {
        let _ = write!(out, " = {value:?}");
    }
    if !item.states.is_empty() {
        let _ = write!(out, " ({})", item.states.join(", "));
    }
    if !item.options.is_empty() {
        let shown: Vec<_> = item
            .options
            .iter()
            .take(MAX_OPTIONS)
            .map(String::as_str)
            .collect();
        let _ = write!(out, " of {}", shown.join(" | "));
    }
    out
}
