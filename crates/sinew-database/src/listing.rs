//! Builds the query of a filter from the conditions that it asks for.

use crate::connection::Fault;
use sinew_store::backend::{end_code, end_of};
use sinew_store::{Cursor, EndKind, EpisodeSummary, Filter, Page};
use sinew_types::{EpisodeId, GroupId, TaskId};
use std::ops::RangeInclusive;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row};

type Value = Box<dyn ToSql + Sync + Send>;

/// Conditions with their values, in order.
#[derive(Default)]
struct Conditions {
    sql: Vec<String>,
    values: Vec<Value>,
}

impl Conditions {
    /// Adds a condition, whose `?` stand for the values.
    fn add(&mut self, sql: &str, values: impl IntoIterator<Item = Value>) {
        let mut given = values.into_iter();
        let mut numbered = String::new();
        for (place, part) in sql.split('?').enumerate() {
            if place > 0
                && let Some(value) = given.next()
            {
                self.values.push(value);
                numbered.push_str(&format!("${}", self.values.len()));
            }
            numbered.push_str(part);
        }
        self.sql.push(numbered);
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
}

fn number(value: u64) -> Value {
    Box::new(i64::try_from(value).unwrap_or(i64::MAX))
}

fn text(text: &str) -> Value {
    Box::new(text.to_owned())
}

fn flag(flag: bool) -> Value {
    Box::new(flag)
}

/// Returns the conditions of a filter, but for its beginning.
fn conditions(filter: &Filter) -> Conditions {
    let real = |value: f64| -> Value { Box::new(value) };
    let end = |end: EndKind| -> Value { Box::new(end_code(end)) };
    let turns = |turns: u32| number(turns.into());
    let mut all = Conditions::default();
    if !filter.removed || asks_contents(filter) {
        all.add("NOT removed", []);
    }
    all.when(filter.ended_before, "started_unix_s + total_s < ?", real);
    all.range(filter.draws.as_ref(), "draw BETWEEN ? AND ?", number);
    all.when(filter.purpose.as_deref(), "purpose = ?", text);
    all.when(filter.task_kind.as_deref(), "task_kind = ?", text);
    all.when(filter.success, "NOT unscored AND success = ?", flag);
    if filter.failed {
        let failed = end(EndKind::Failed);
        all.add("(NOT unscored AND NOT success OR ended = ?)", [failed]);
    }
    all.when(filter.group.as_ref().map(|g| g.as_str()), "grp = ?", text);
    all.when(filter.trained, "(batch IS NOT NULL) = ?", flag);
    all.when(filter.end, "ended = ?", end);
    all.range(filter.turns.as_ref(), "turns BETWEEN ? AND ?", turns);
    let scored = "NOT unscored AND reward BETWEEN ? AND ?";
    all.range(filter.reward.as_ref(), scored, real);
    let trained = "batch IN (SELECT b.batch FROM batches b WHERE b.step BETWEEN ? AND ?)";
    all.range(filter.updates.as_ref(), trained, number);
    if let Some(ids) = &filter.among {
        let ids: Vec<String> = ids.iter().map(|id| id.0.clone()).collect();
        all.add("episode = ANY(?)", [Box::new(ids) as Value]);
    }
    all.when(filter.env.as_deref(), "env = ?", text);
    all.when(filter.at_turn, "last_turn = ?", turns);
    if let Some(versions) = &filter.versions {
        let (first, last) = (number(*versions.start()), number(*versions.end()));
        all.add("last_version >= ? AND first_version <= ?", [first, last]);
    }
    all.when(filter.below_version, "last_version < ?", number);
    if let Some(now) = &filter.env_changed {
        let pairs = vec!["env = ? AND env_version <> ?"; now.len()].join(" OR ");
        let values = now
            .iter()
            .flat_map(|(env, version)| [text(env), text(version)]);
        if now.is_empty() {
            all.add("false", []);
        } else {
            all.add(&format!("({pairs})"), values);
        }
    }
    all
}

/// Whether a filter asks for what is known only of readable traces.
fn asks_contents(filter: &Filter) -> bool {
    let named = filter.env.is_some() || filter.at_turn.is_some() || filter.versions.is_some();
    named || filter.below_version.is_some() || filter.unique || filter.env_changed.is_some()
}

/// Returns the query of a filter, with its values.
fn query(filter: &Filter, limit: usize) -> (String, Vec<Value>) {
    let mut all = conditions(filter);
    let matching = match all.sql.as_slice() {
        [] => "true".to_owned(),
        some => some.join(" AND "),
    };
    let mut rest = Conditions {
        sql: Vec::new(),
        values: std::mem::take(&mut all.values),
    };
    // The choice of the first match must not depend on where the page begins.
    let (table, first) = if filter.unique {
        let nth = "row_number() OVER (PARTITION BY content ORDER BY seq) AS nth";
        (
            format!("(SELECT *, {nth} FROM episodes WHERE {matching})"),
            "nth = 1",
        )
    } else {
        (format!("(SELECT * FROM episodes WHERE {matching})"), "true")
    };
    rest.add("seq > ?", [number(filter.after.map_or(0, |c| c.0))]);
    rest.add("LIMIT ?", [number(limit as u64)]);
    let sql = format!(
        "SELECT *, (SELECT b.step FROM batches b WHERE b.batch = e.batch) AS trained_by \
         FROM {table} e WHERE {first} AND {} ORDER BY seq {}",
        rest.sql[0], rest.sql[1]
    );
    (sql, rest.values)
}

/// Reads the summary of an episode.
fn summary(row: &Row) -> Result<EpisodeSummary, Fault> {
    let count = |column: &str| Ok::<u64, Fault>(row.try_get::<_, i64>(column)?.max(0) as u64);
    let ended = end_of(row.try_get("ended")?);
    Ok(EpisodeSummary {
        cursor: Cursor(count("seq")?),
        episode: EpisodeId(row.try_get("episode")?),
        group: GroupId(row.try_get("grp")?),
        task: TaskId(row.try_get("task")?),
        task_kind: row.try_get("task_kind")?,
        draw: count("draw")?,
        purpose: row.try_get("purpose")?,
        reward: row.try_get("reward")?,
        success: row.try_get("success")?,
        unscored: row.try_get("unscored")?,
        end: ended.unwrap_or(EndKind::Failed),
        turns: u32::try_from(count("turns")?).unwrap_or(u32::MAX),
        sampled_tokens: count("sampled_tokens")?,
        started_unix_s: row.try_get("started_unix_s")?,
        total_s: row.try_get("total_s")?,
        trained_in: row.try_get("batch")?,
        update: row
            .try_get::<_, Option<i64>>("trained_by")?
            .map(|u| u.max(0) as u64),
    })
}

/// One page of a listing, in commit order. One row more is read, to find out whether others follow.
pub(crate) async fn list(client: &Client, filter: &Filter, limit: usize) -> Result<Page, Fault> {
    let (sql, values) = query(filter, limit + 1);
    let values = values.iter().map(|value| &**value as &(dyn ToSql + Sync));
    let values: Vec<&(dyn ToSql + Sync)> = values.collect();
    let rows = client.query(&sql, &values).await?;
    let read = rows.iter().take(limit).map(summary);
    let episodes: Vec<EpisodeSummary> = read.collect::<Result<_, _>>()?;
    Ok(Page {
        next: episodes
            .last()
            .filter(|_| rows.len() > limit)
            .map(|e| e.cursor),
        episodes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_numbered_in_the_order_of_their_conditions() {
        let filter = Filter {
            draws: Some(1..=2),
            env: Some("shop".into()),
            unique: true,
            ..Filter::default()
        };
        let (sql, values) = query(&filter, 7);
        let inner = "NOT removed AND draw BETWEEN $1 AND $2 AND env = $3";
        assert!(sql.contains(inner), "{sql}");
        assert!(
            sql.contains("nth = 1 AND seq > $4 ORDER BY seq LIMIT $5"),
            "{sql}"
        );
        assert_eq!(values.len(), 5);
    }
}
