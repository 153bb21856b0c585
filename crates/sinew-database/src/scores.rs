//! Scores that come after an episode, and names that outside systems gave episodes.

use crate::about::About;
use crate::connection::Fault;
use sinew_store::backend::{ScoredEpisode, admit_scores, signed};
use sinew_store::{CommitOutcome, Cursor, MAX_PAGE, Score, ScorePage, ScoreRecord, ScoreRefused};
use sinew_types::EpisodeId;
use std::collections::{HashMap, HashSet};
use tokio_postgres::{Client, Row, Transaction};

/// Reads a record from the columns episode, name, source, at_us, value, reason.
fn record(row: &Row) -> Result<ScoreRecord, Fault> {
    let reason: Option<String> = row.try_get("reason")?;
    Ok(ScoreRecord {
        episode: EpisodeId(row.try_get("episode")?),
        name: row.try_get("name")?,
        source: row.try_get("source")?,
        at_us: row.try_get::<_, i64>("at_us")?.max(0) as u64,
        score: match row.try_get("value")? {
            Some(value) => Score::Value(value),
            None => Score::Unscored(reason.unwrap_or_default()),
        },
    })
}

/// Stores the new ones of several scores, each accepted or refused by itself.
pub(crate) async fn put(
    tx: &Transaction<'_>,
    about: About,
    records: &[ScoreRecord],
) -> Result<Vec<Result<CommitOutcome, ScoreRefused>>, Fault> {
    let names: HashSet<&str> = records.iter().map(|r| r.episode.as_str()).collect();
    let names: Vec<&str> = names.into_iter().collect();
    let mut known: HashMap<EpisodeId, ScoredEpisode> = HashMap::new();
    let episodes = "SELECT episode, NOT removed FROM episodes WHERE episode = ANY($1)";
    for row in tx.query(episodes, &[&names]).await? {
        let scored = ScoredEpisode {
            readable: row.try_get(1)?,
            records: Vec::new(),
        };
        known.insert(EpisodeId(row.try_get(0)?), scored);
    }
    let scores = "SELECT * FROM scores WHERE episode = ANY($1) ORDER BY seq";
    for row in &tx.query(scores, &[&names]).await? {
        let record = record(row)?;
        if let Some(scored) = known.get_mut(&record.episode) {
            scored.records.push(record);
        }
    }
    let (new, out) = admit_scores(records, &known)?;
    if new.is_empty() {
        return Ok(out);
    }
    insert(tx, about.scores, &new).await?;
    let last = about.scores + new.len() as i64;
    tx.execute("UPDATE about SET scores = $1", &[&last]).await?;
    Ok(out)
}

/// Inserts records after number `last`.
async fn insert(tx: &Transaction<'_>, last: i64, new: &[ScoreRecord]) -> Result<(), Fault> {
    let seqs: Vec<i64> = (last + 1..).take(new.len()).collect();
    let text = |of: fn(&ScoreRecord) -> &str| new.iter().map(of).collect::<Vec<&str>>();
    let at: Result<Vec<i64>, _> = new.iter().map(|r| signed("at", r.at_us)).collect();
    let value = |r: &ScoreRecord| match &r.score {
        Score::Value(value) => Some(*value),
        Score::Unscored(_) => None,
    };
    let values: Vec<Option<f64>> = new.iter().map(value).collect();
    let reasons = new.iter().map(|r| match &r.score {
        Score::Value(_) => None,
        Score::Unscored(reason) => Some(reason.as_str()),
    });
    let reasons: Vec<Option<&str>> = reasons.collect();
    let sql = "INSERT INTO scores SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], \
               $5::bigint[], $6::double precision[], $7::text[])";
    let (episodes, names) = (text(|r| r.episode.as_str()), text(|r| &r.name));
    let (sources, at) = (text(|r| &r.source), at?);
    tx.execute(
        sql,
        &[&seqs, &episodes, &names, &sources, &at, &values, &reasons],
    )
    .await?;
    Ok(())
}

/// All records of an episode in order of arrival.
pub(crate) async fn of_episode(client: &Client, episode: &str) -> Result<Vec<ScoreRecord>, Fault> {
    let sql = "SELECT * FROM scores WHERE episode = $1 ORDER BY seq";
    let rows = client.query(sql, &[&episode]).await?;
    rows.iter().map(record).collect()
}

/// The records after `after`, in order of arrival.
pub(crate) async fn page(client: &Client, after: Cursor, limit: usize) -> Result<ScorePage, Fault> {
    let sql = "SELECT * FROM scores WHERE seq > $1 ORDER BY seq LIMIT $2";
    let from = i64::try_from(after.0).unwrap_or(i64::MAX);
    let limit = limit.clamp(1, MAX_PAGE) as i64;
    let rows = client.query(sql, &[&from, &limit]).await?;
    let end = match rows.last() {
        Some(row) => Cursor(row.try_get::<_, i64>("seq")?.max(0) as u64),
        None => after,
    };
    Ok(ScorePage {
        scores: rows.iter().map(record).collect::<Result<_, _>>()?,
        end,
    })
}

/// The readable episodes with an id of an outside system, in commit order.
pub(crate) async fn named(
    client: &Client,
    external: &str,
    limit: usize,
) -> Result<Vec<EpisodeId>, Fault> {
    let sql = "SELECT e.episode FROM externals x JOIN episodes e ON e.episode = x.episode \
               WHERE x.external = $1 AND NOT e.removed ORDER BY e.seq LIMIT $2";
    let limit = limit.clamp(1, MAX_PAGE) as i64;
    let rows = client.query(sql, &[&external, &limit]).await?;
    let id = |row: &Row| -> Result<EpisodeId, Fault> { Ok(EpisodeId(row.try_get(0)?)) };
    rows.iter().map(id).collect()
}
