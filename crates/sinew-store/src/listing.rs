//! Builds the SQL query of a filter. The query contains only the requested conditions, so that SQLite can use
//! an index instead of reading every row.

use crate::error::StoreError;
use crate::index;
use crate::store::{EndKind, EpisodeSummary, Filter, Page};
use rusqlite::types::Value;
use rusqlite::{Connection, params_from_iter};
use std::collections::HashSet;
use std::ops::RangeInclusive;

/// Conditions with their values, in order.
#[derive(Default)]
struct Conditions {
    sql: Vec<String>,
    values: Vec<Value>,
}

impl Conditions {
    /// Adds a condition with the values of its `?`.
    fn add(&mut self, sql: &str, values: impl IntoIterator<Item = Value>) {
        self.sql.push(sql.to_owned());
        self.values.extend(values);
    }

    fn when<T>(&mut self, asked: Option<T>, sql: &str, value: impl FnOnce(T) -> Value) {
        if let Some(asked) = asked {
            self.add(sql, [value(asked)]);
        }
    }

    fn range<T: Copy>(
        &mut self,
        asked: Option<&RangeInclusive<T>>,
        sql: &str,
        value: impl Fn(T) -> Value,
    ) {
        if let Some(range) = asked {
            self.add(sql, [value(*range.start()), value(*range.end())]);
        }
    }

    fn joined(&self) -> String {
        self.sql.join(" AND ")
    }
}

fn number(value: u64) -> Value {
    Value::Integer(i64::try_from(value).unwrap_or(i64::MAX))
}

/// Returns the conditions on the row of an episode, then those on its facets as a single one.
fn conditions(filter: &Filter) -> Conditions {
    let text = |text: &str| Value::Text(text.to_owned());
    let flag = |flag: bool| Value::Integer(flag.into());
    let mut row = Conditions::default();
    if filter.removed {
        // All but those of which only a mark is known.
        row.add("ended >= 0", [])
    } else {
        row.add("segment IS NOT NULL", [])
    }
    row.add(
        "seq > ?",
        [filter.after.map_or(Value::Integer(0), |c| number(c.0))],
    );
    let before = "started_unix_s + total_s < ?";
    row.when(filter.ended_before, before, Value::Real);
    row.range(filter.draws.as_ref(), "step BETWEEN ? AND ?", number);
    row.when(filter.purpose.as_deref(), "purpose = ?", text);
    row.when(filter.task_kind.as_deref(), "task_kind = ?", text);
    row.when(filter.success, "success = ?", flag);
    if filter.failed {
        let failed = Value::Integer(EndKind::Failed.code());
        row.add("(success = 0 OR ended = ?)", [failed]);
    }
    row.when(filter.group.as_ref().map(|g| g.as_str()), "grp = ?", text);
    row.when(filter.trained, "(batch IS NOT NULL) = ?", flag);
    row.when(filter.end, "ended = ?", |end| Value::Integer(end.code()));
    let turns = |turns: u32| Value::Integer(turns.into());
    row.range(filter.turns.as_ref(), "turns BETWEEN ? AND ?", turns);
    let scored = "reward BETWEEN ? AND ? AND success < 2";
    row.range(filter.reward.as_ref(), scored, Value::Real);
    let trained = "batch IN (SELECT b.batch FROM batches b WHERE b.step BETWEEN ? AND ?)";
    row.range(filter.updates.as_ref(), trained, number);
    if let Some(ids) = &filter.among {
        let ids: Vec<&str> = ids.iter().map(|id| id.as_str()).collect();
        let list = serde_json::json!(ids).to_string();
        let among = "episode IN (SELECT value FROM json_each(?))";
        row.add(among, [Value::Text(list)]);
    }
    let mut facets = Conditions::default();
    facets.when(filter.env.as_deref(), "env = ?", text);
    facets.when(filter.at_turn, "last_turn = ?", turns);
    if let Some(versions) = &filter.versions {
        let (first, last) = (number(*versions.start()), number(*versions.end()));
        facets.add("last_version >= ? AND first_version <= ?", [first, last]);
    }
    let below = "last_version < ?";
    facets.when(filter.below_version, below, number);
    if let Some(now) = &filter.env_changed {
        let pair = |(env, version): (&String, &String)| [text(env), text(version)];
        let pairs = vec!["(env = ? AND env_version <> ?)"; now.len()].join(" OR ");
        if now.is_empty() {
            facets.add("0", [])
        } else {
            facets.add(&format!("({pairs})"), now.iter().flat_map(pair))
        }
    }
    if !facets.sql.is_empty() {
        let sql = format!(
            "seq IN (SELECT f.seq FROM facets f WHERE {})",
            facets.joined()
        );
        row.add(&sql, facets.values);
    }
    row
}

/// Returns the query of a filter, with its values.
fn query(filter: &Filter, limit: usize) -> (String, Vec<Value>) {
    let mut row = conditions(filter);
    let sql = format!(
        "SELECT *, (SELECT b.step FROM batches b WHERE b.batch = episodes.batch) AS trained_by
         FROM episodes WHERE {} ORDER BY seq LIMIT ?",
        row.joined()
    );
    row.values.push(number(limit as u64));
    (sql, row.values)
}

/// Returns one page of a listing, in commit order. It reads one row more than the page to find out whether
/// more follow.
pub(crate) fn list(connection: &Connection, filter: &Filter) -> Result<Page, StoreError> {
    let limit = filter.checked_limit()?;
    let mut episodes: Vec<EpisodeSummary> = if filter.unique {
        firsts(connection, filter, limit + 1)?
    } else {
        let (sql, values) = query(filter, limit + 1);
        let mut query = connection.prepare_cached(&sql)?;
        let rows = query.query_map(params_from_iter(values), index::summary)?;
        rows.collect::<Result<_, _>>()?
    };
    let more = episodes.len() > limit;
    episodes.truncate(limit);
    Ok(Page {
        next: episodes.last().filter(|_| more).map(|e| e.cursor),
        episodes,
    })
}

/// Returns the first `limit` episodes after the start of the page whose content no earlier matching episode
/// has. There is no index on content, since its random order would cost each insert a page; the rows before
/// the page are read again instead.
fn firsts(
    connection: &Connection,
    filter: &Filter,
    limit: usize,
) -> Result<Vec<EpisodeSummary>, StoreError> {
    let from = filter.after.map_or(0, |c| c.0);
    let whole = Filter {
        after: None,
        ..filter.clone()
    };
    let row = conditions(&whole);
    let sql = format!(
        "SELECT seq, (SELECT f.content FROM facets f WHERE f.seq = episodes.seq) AS content
         FROM episodes WHERE {} ORDER BY seq",
        row.joined()
    );
    let mut contents = connection.prepare_cached(&sql)?;
    let mut rows = contents.query(params_from_iter(row.values))?;
    let (mut seen, mut found) = (HashSet::new(), Vec::new());
    while let Some(row) = rows.next()? {
        let Some(content) = row.get::<_, Option<[u8; 16]>>("content")? else {
            continue;
        };
        let seq = index::unsigned(row, "seq")?;
        if seen.insert(content) && seq > from {
            found.push(seq);
            if found.len() == limit {
                break;
            }
        }
    }
    let mut one = connection.prepare_cached(
        "SELECT *, (SELECT b.step FROM batches b WHERE b.batch = episodes.batch) AS trained_by
         FROM episodes WHERE seq = ?",
    )?;
    let read = |seq: u64| one.query_row([number(seq)], index::summary);
    Ok(found.into_iter().map(read).collect::<Result<_, _>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SQLite's plan for finding the rows of a filter.
    fn plan(filter: &Filter) -> String {
        let connection = index::in_memory().unwrap();
        let (sql, values) = query(filter, 10);
        let mut explain = connection
            .prepare(&format!("EXPLAIN QUERY PLAN {sql}"))
            .unwrap();
        let rows = explain.query_map(params_from_iter(values), |r| r.get::<_, String>("detail"));
        let lines: Vec<String> = rows.unwrap().map(Result::unwrap).collect();
        lines.join("\n")
    }

    #[test]
    fn filters_are_answered_by_an_index() {
        let filters = [
            (
                Filter {
                    task_kind: Some("code".into()),
                    ..Filter::default()
                },
                "episodes_kind",
            ),
            (
                Filter {
                    turns: Some(3..=3),
                    ..Filter::default()
                },
                "episodes_turns",
            ),
            (
                Filter {
                    env: Some("shop".into()),
                    ..Filter::default()
                },
                "facets_env",
            ),
            (
                Filter {
                    at_turn: Some(3),
                    ..Filter::default()
                },
                "facets_turn",
            ),
            (
                Filter {
                    versions: Some(3..=4),
                    ..Filter::default()
                },
                "facets_version",
            ),
        ];
        for (filter, expected) in filters {
            let plan = plan(&filter);
            assert!(plan.contains(expected), "{plan}");
            assert!(!plan.contains("SCAN"), "{plan}");
        }
    }
}
