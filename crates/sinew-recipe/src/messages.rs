//! Explains errors in a recipe's text: the line, the allowed values, and the nearest spelling.
//!
//! A message has up to three parts: the text with its position, the allowed values, and the name that was
//! probably meant. It is built from the text, because a parsed table does not contain positions.

use crate::schema;
use sinew_env::Registry;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Keys of other systems (TRL, verl, OpenRLHF, Hugging Face): their name there, and their table and name
/// here. An empty table means any table.
const SYNONYMS: [(&str, &str, &str); 65] = [
    ("lr", "train", "learning_rate"),
    ("lr", "critic", "learning_rate"),
    ("peak_lr", "train", "learning_rate"),
    ("lr_schedule", "train", "schedule"),
    ("lr_scheduler", "train", "schedule"),
    ("scheduler", "train", "schedule"),
    ("warmup", "train", "warmup_steps"),
    ("max_steps", "train", "steps"),
    ("num_steps", "train", "steps"),
    ("total_steps", "train", "steps"),
    ("epochs", "train", "steps"),
    ("grad_clip", "train", "max_grad_norm"),
    ("clip_grad", "train", "max_grad_norm"),
    ("gradient_clip", "train", "max_grad_norm"),
    ("max_norm", "train", "max_grad_norm"),
    ("adam_beta1", "train", "beta1"),
    ("adam_beta2", "train", "beta2"),
    ("num_minibatches", "train", "minibatches"),
    ("mini_batches", "train", "minibatches"),
    ("micro_batch_size", "train", "micro_batch_tokens"),
    ("save_every", "train", "checkpoint_every"),
    ("save_steps", "train", "checkpoint_every"),
    ("lora_rank", "train.lora", "rank"),
    ("r", "train.lora", "rank"),
    ("lora_alpha", "train.lora", "alpha"),
    ("target_modules", "train.lora", "targets"),
    ("batch_size", "rollout", "tasks_per_step"),
    ("train_batch_size", "rollout", "tasks_per_step"),
    ("num_generations", "rollout", "group_size"),
    ("n_samples", "rollout", "group_size"),
    ("n", "rollout", "group_size"),
    ("temp", "rollout", "temperature"),
    ("max_tokens", "rollout", "max_turn_tokens"),
    ("max_new_tokens", "rollout", "max_turn_tokens"),
    ("max_completion_length", "rollout", "max_turn_tokens"),
    ("max_length", "rollout", "max_context_tokens"),
    ("max_seq_len", "rollout", "max_context_tokens"),
    ("max_model_len", "rollout", "max_context_tokens"),
    ("context_length", "rollout", "max_context_tokens"),
    ("concurrency", "rollout", "max_in_flight"),
    ("max_concurrency", "rollout", "max_in_flight"),
    ("coef", "algorithm.kl", "coefficient"),
    ("coeff", "algorithm.kl", "coefficient"),
    ("beta", "algorithm.kl", "coefficient"),
    ("kl_coef", "algorithm", "kl"),
    ("kl_coefficient", "algorithm", "kl"),
    ("eps_clip", "algorithm", "clip_low"),
    ("clip_eps", "algorithm", "clip_low"),
    ("clip_range", "algorithm", "clip_low"),
    ("epsilon", "algorithm", "std_epsilon"),
    ("entropy_coef", "algorithm", "entropy"),
    ("gae_lambda", "algorithm", "lambda"),
    ("discount", "algorithm", "gamma"),
    ("dtype", "engine", "weights"),
    ("precision", "engine", "weights"),
    ("quantization", "engine", "weights"),
    ("backend", "engine", "type"),
    ("base_url", "engine", "url"),
    ("path", "model", "source"),
    ("hidden_size", "model", "d_model"),
    ("num_layers", "model", "layers"),
    ("num_heads", "model", "heads"),
    ("intermediate_size", "model", "d_ff"),
    ("kind", "", "type"),
    ("timeout", "", "timeout_s"),
];

/// Explains a parse error: its position, its cause, and the name that was probably meant.
pub fn explain(text: &str, error: &toml::de::Error, registry: Registry) -> String {
    explained(text, error.span(), error.message(), registry)
}

/// Like [`explain`], for an error message of serde and its position.
pub(crate) fn explained(
    text: &str,
    span: Option<Range<usize>>,
    message: &str,
    registry: Registry,
) -> String {
    let unknown = unknown_key(message);
    let better = span.as_ref().and_then(|span| {
        let of_choice = || choice(text, span, message, registry);
        unreadable(text, span)
            .or_else(of_choice)
            .or_else(|| scalar(text, span, message, registry))
    });
    let message = better.unwrap_or_else(|| with_suggestion(&in_words(message), registry));
    // For a table with `type`, serde reports only the place of the table, not that of an unknown key.
    let span = span.map(|span| match unknown {
        Some(key) => own_span(text, key, &span).unwrap_or(span),
        None => span,
    });
    match span {
        Some(span) => format!("{}{message}", place(text, &span)),
        None => message,
    }
}

/// A line with the passwords of its addresses as stars, one for each character.
fn masked(line: &str) -> String {
    let (mut out, mut rest) = (String::new(), line);
    while let Some((before, after)) = rest.split_once("://") {
        out.push_str(before);
        out.push_str("://");
        let end = after.find(['"', '\'', ' ']).unwrap_or(after.len());
        let (address, more) = after.split_at(end);
        match address.rsplit_once('@') {
            Some((user, host)) if user.contains(':') => {
                let (name, password) = user.split_once(':').unwrap_or((user, ""));
                let stars = "*".repeat(password.chars().count());
                out.push_str(&format!("{name}:{stars}@{host}"));
            }
            _ => out.push_str(address),
        }
        rest = more;
    }
    out + rest
}

/// Returns the line of a span, with its number and a mark below it. Lines and columns count from 1, columns
/// in characters. Only the first line of a longer span is shown.
pub(crate) fn place(text: &str, span: &Range<usize>) -> String {
    let start = span.start.min(text.len());
    let before = text.get(..start).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let begin = before.rfind('\n').map_or(0, |at| at + 1);
    let shown = masked(text[begin..].lines().next().unwrap_or_default());
    let column = before[begin..].chars().count();
    let wide = text.get(span.clone()).unwrap_or_default();
    let marks = wide.lines().next().map_or(0, |l| l.chars().count()).max(1);
    let (gap, number) = (" ".repeat(line.to_string().len()), line);
    format!(
        "at line {number}, column {}\n{gap} |\n{number} | {shown}\n{gap} | {}{}\n",
        column + 1,
        " ".repeat(column),
        "^".repeat(marks)
    )
}

/// Parses line and column at the start of a message, in the format of [`place`].
pub(crate) fn at(message: &str) -> Option<(usize, usize)> {
    let (line, rest) = message.strip_prefix("at line ")?.split_once(", column ")?;
    let (column, _) = rest.split_once('\n')?;
    Some((line.parse().ok()?, column.parse().ok()?))
}

/// Returns the path of the key at the position that a message starts with; `None` if the text is not TOML.
pub(crate) fn key_of(text: &str, message: &str) -> Option<String> {
    let (line, column) = at(message)?;
    let begin: usize = text
        .split_inclusive('\n')
        .take(line - 1)
        .map(str::len)
        .sum();
    let rest: usize = text[begin..]
        .chars()
        .take(column - 1)
        .map(char::len_utf8)
        .sum();
    let root = DeTable::parse(text).ok()?;
    path_at(root.get_ref(), begin + rest)
}

/// Returns the path of the innermost key whose name or value contains a byte offset of the text.
fn path_at(table: &DeTable<'_>, byte: usize) -> Option<String> {
    table.iter().find_map(|(name, value)| {
        let key = name.get_ref().to_string();
        let below = match value.get_ref() {
            DeValue::Table(table) => path_at(table, byte),
            DeValue::Array(items) => items.iter().enumerate().find_map(|(index, item)| {
                let below = path_at(item.get_ref().as_table()?, byte)?;
                Some(format!("[{index}].{below}"))
            }),
            _ => None,
        };
        match below {
            Some(below) if below.starts_with('[') => Some(key + &below),
            Some(below) => Some(format!("{key}.{below}")),
            None => {
                let here = name.span().contains(&byte) || value.span().contains(&byte);
                here.then_some(key)
            }
        }
    })
}

/// Refuses a whole number beyond 64 bits with a sign: keys of more bits could be read, but not written again.
pub(crate) fn too_large(text: &str, table: &DeTable<'_>) -> Option<String> {
    let span = table.values().find_map(beyond_i64)?;
    let key = path_at(table, span.start)?;
    let place = place(text, &span);
    let most = i64::MAX;
    Some(format!(
        "{place}{key} = {}: allowed: at most {most}",
        text.get(span)?
    ))
}

/// Position of the first such number in a value.
fn beyond_i64(value: &Spanned<DeValue<'_>>) -> Option<Range<usize>> {
    match value.get_ref() {
        DeValue::Integer(n) => {
            let fits = i64::from_str_radix(n.as_str(), n.radix()).is_ok();
            (!fits).then(|| value.span())
        }
        DeValue::Array(items) => items.iter().find_map(beyond_i64),
        DeValue::Table(table) => table.values().find_map(beyond_i64),
        _ => None,
    }
}

/// Returns the key that a message reports as unknown.
fn unknown_key(message: &str) -> Option<&str> {
    let named = message
        .strip_prefix("unknown field `")
        .or_else(|| message.strip_prefix("unknown key `"))?;
    named.split('`').next()
}

/// Finds `key`. If the text contains the name several times, the first one at or after the start of `near` is
/// chosen, or the last one if none follows.
fn own_span(text: &str, key: &str, near: &Range<usize>) -> Option<Range<usize>> {
    let table = DeTable::parse(text).ok()?;
    let mut found = Vec::new();
    keys(table.get_ref(), key, &mut found);
    found.sort_by_key(|span| span.start);
    let behind = found.iter().find(|span| span.start >= near.start);
    behind.or(found.last()).cloned()
}

fn keys(table: &DeTable<'_>, key: &str, found: &mut Vec<Range<usize>>) {
    for (name, value) in table {
        if *name.get_ref() == *key {
            found.push(name.span());
        }
        inside(value.get_ref(), key, found);
    }
}

fn inside(value: &DeValue<'_>, key: &str, found: &mut Vec<Range<usize>>) {
    match value {
        DeValue::Table(table) => keys(table, key, found),
        DeValue::Array(items) => {
            for item in items {
                inside(item.get_ref(), key, found);
            }
        }
        _ => {}
    }
}

/// Explains a value that is not TOML, if the rest of its line shows what was meant: text without quotes, or a
/// number with a unit.
fn unreadable(text: &str, span: &Range<usize>) -> Option<String> {
    DeTable::parse(text).err()?;
    let begin = text.get(..span.start)?.rfind('\n').map_or(0, |at| at + 1);
    let (key, value) = text.get(begin..)?.lines().next()?.split_once('=')?;
    let value = value.split('#').next().unwrap_or_default().trim();
    let plain = |c: char| c.is_alphanumeric() || "_-.:/".contains(c);
    let first = value.chars().next().filter(|_| value.chars().all(plain))?;
    let (key, typed) = (key.trim(), format!("{} = {value}", key.trim()));
    if first.is_ascii_digit() {
        return Some(format!(
            "{typed}: expected a number without a unit, such as {key} = 1000\n  hint: text needs quotes: {key} = {value:?}"
        ));
    }
    Some(format!("{typed}: text needs quotes: {key} = {value:?}"))
}

/// Explains a plain value in place of a table, and shows the table with the value at its first key that fits.
fn scalar(text: &str, span: &Range<usize>, message: &str, registry: Registry) -> Option<String> {
    if !message.starts_with("invalid type") || !message.contains("expected struct") {
        return None;
    }
    let typed = text.get(span.clone())?;
    let number = typed.parse::<f64>().is_ok();
    let key = path_at(DeTable::parse(text).ok()?.get_ref(), span.start)?;
    let keys = schema::keys(&schema::run_schema(registry));
    let inner = keys.iter().find_map(|k| {
        let name = k.path.strip_prefix(&key)?.strip_prefix('.')?;
        let kind = k.schema["type"].as_str().unwrap_or_default();
        let fits = !number || ["number", "integer"].contains(&kind);
        (fits && !name.contains('.') && k.only_with.is_none()).then_some(name)
    })?;
    let name = key.rsplit('.').next().unwrap_or(&key);
    Some(format!(
        "{key} = {typed}: expected a table, such as {name} = {{ {inner} = {typed} }}"
    ))
}

/// Returns a hint with the name and the table of a key of other systems, if that table is not `table`.
pub(crate) fn elsewhere(key: &str, table: &str) -> Option<String> {
    let mut synonyms = SYNONYMS
        .iter()
        .filter(|s| s.0 == key && !s.1.is_empty() && s.1 != table);
    let (_, table, name) = synonyms.next()?;
    Some(format!(
        "the `{key}` of other systems is `{name}` in [{table}]"
    ))
}

/// Replaces names of Rust types by words for recipes.
fn in_words(message: &str) -> String {
    const WORDS: [(&str, &str); 19] = [
        ("expected variant identifier", "expected a name"),
        ("struct variant", "struct"),
        ("expected u64", "expected a whole number from 0 on"),
        ("expected usize", "expected a whole number from 0 on"),
        (
            "expected u32",
            "expected a whole number from 0 to 4294967295",
        ),
        ("expected u8", "expected a whole number from 0 to 255"),
        ("expected f64", "expected a number"),
        ("expected f32", "expected a number"),
        ("expected a boolean", "expected true or false"),
        ("expected a sequence", "expected a list"),
        ("expected a map", "expected a table"),
        ("type: map", "type: table"),
        ("type: sequence", "type: list"),
        ("type: floating point", "type: number"),
        ("internally tagged enum", "a table with `type`:"),
        (
            "expected string or map",
            "expected a name, or a table with one",
        ),
        ("tuple variant", "a list"),
        ("unit variant", "a name"),
        (" as i128", ""),
    ];
    let mut text = message.to_owned();
    for (rust, words) in WORDS {
        text = text.replace(rust, words);
    }
    for (kind, words) in [
        ("struct ", "a table"),
        ("enum ", "a name"),
        ("a table with `type`: ", "a table with `type`"),
    ] {
        text = without_names(&text, kind, words);
    }
    text
}

/// Replaces `kind` and the following type name, as in `struct TrainSection`, by `words`.
fn without_names(message: &str, kind: &str, words: &str) -> String {
    let mut out = String::new();
    let mut rest = message;
    while let Some(at) = rest.find(kind) {
        let (before, after) = (&rest[..at], &rest[at + kind.len()..]);
        let name = after.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
        let (name, behind) = after.split_at(name.unwrap_or(after.len()));
        out.push_str(before);
        if name.starts_with(|c: char| c.is_ascii_uppercase()) {
            out.push_str(words)
        } else {
            out.push_str(&rest[at..at + kind.len() + name.len()])
        }
        rest = behind;
    }
    out + rest
}

/// Adds the probable name to a message about an unknown field or variant.
fn with_suggestion(message: &str, registry: Registry) -> String {
    let message = message.trim_end();
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let unknown = ["unknown field", "unknown variant", "unknown key"];
    let Some((typed, allowed)) = quoted
        .split_first()
        .filter(|_| unknown.iter().any(|u| message.contains(u)))
    else {
        return message.into();
    };
    match meant(typed, allowed, registry) {
        Some(hint) => format!("{message}\n  hint: {hint}"),
        None => message.into(),
    }
}

fn meant(typed: &str, allowed: &[&str], registry: Registry) -> Option<String> {
    let synonyms = || SYNONYMS.iter().filter(|s| s.0 == typed);
    if let Some((_, _, key)) = synonyms().find(|s| allowed.contains(&s.2)) {
        return Some(format!("did you mean `{key}`?"));
    }
    if let Some((_, table, key)) = synonyms().find(|s| !s.1.is_empty()) {
        return Some(format!("that is `{key}` in [{table}]"));
    }
    if let Some(table) = table_with(typed, registry) {
        return Some(format!("`{typed}` belongs to [{table}]"));
    }
    let distance = |a: &&&str| strsim::damerau_levenshtein(typed, a);
    let near = |a: &&&str| {
        distance(a)
            <= (typed.len().min(a.len()) + 1)
                .div_ceil(2)
                .min(a.len() / 3 + 1)
    };
    let nearest = allowed.iter().filter(near).min_by_key(distance);
    nearest.map(|a| format!("did you mean `{a}`?"))
}

/// Returns the table that has a key with this name.
fn table_with(key: &str, registry: Registry) -> Option<String> {
    let keys = schema::keys(&schema::run_schema(registry)).into_iter();
    let tables = keys.filter_map(|k| {
        let (table, name) = k.path.rsplit_once('.')?;
        let plain = k.only_with.is_none() && !table.contains("[]");
        (plain && name == key && key != "type").then(|| table.to_owned())
    });
    tables.min_by_key(String::len)
}

/// Returns a value as written, or `{ ... }` for a table, a list, a value of several lines and a missing one.
pub(crate) fn value(text: &str, span: Option<Range<usize>>) -> String {
    let typed = span.and_then(|span| text.get(span)).unwrap_or_default();
    if typed.is_empty() || typed.starts_with(['{', '[']) || typed.contains('\n') {
        "{ ... }".into()
    } else {
        typed.into()
    }
}

/// Returns a hint about a name that is not allowed.
fn note(key: &str, typed: &str) -> String {
    match (key, typed) {
        ("sandbox.level", "null") => {
            "; the null sandbox isolates nothing and serves tests only".into()
        }
        _ => String::new(),
    }
}

/// Explains a name that a key does not accept: names the key and the accepted names.
fn choice(text: &str, span: &Range<usize>, message: &str, registry: Registry) -> Option<String> {
    let rest = message.strip_prefix("unknown variant `")?;
    let quoted: Vec<&str> = rest.split('`').step_by(2).collect();
    let (typed, names) = quoted.split_first()?;
    let root = DeTable::parse(text).ok()?;
    let key = key_at(root.get_ref(), span)?;
    let names: Vec<&str> = names.iter().copied().filter(|n| !n.is_empty()).collect();
    let hint = meant(typed, &names, registry).map(|hint| format!("\n  hint: {hint}"));
    Some(format!(
        "{key} = {typed:?}: allowed: {}{}{}",
        names.join(", "),
        note(&key, typed),
        hint.unwrap_or_default()
    ))
}

/// Returns the key whose value is at a position.
fn key_at(table: &DeTable<'_>, span: &Range<usize>) -> Option<String> {
    table
        .iter()
        .find_map(|(name, value)| match value.get_ref() {
            DeValue::String(_) if value.span() == *span => Some(name.get_ref().to_string()),
            DeValue::Table(table) => {
                let below = key_at(table, span)?;
                Some(format!("{}.{below}", name.get_ref()))
            }
            DeValue::Array(items) => {
                let mut tables = items.iter().filter_map(|item| item.get_ref().as_table());
                let below = tables.find_map(|table| key_at(table, span))?;
                Some(format!("{}.{below}", name.get_ref()))
            }
            _ => None,
        })
}
