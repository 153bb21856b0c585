//! The log of a shared queue in PostgreSQL. The primary key of the entries decides which of two processes was
//! faster; values and entry are one transaction.

use crate::address::Address;
use crate::connection::{DatabaseOptions, Fault, Postgres};
use crate::schema::{prepare, schema_of};
use bytes::Bytes;
use sinew_store::StoreError;
use sinew_store::backend::signed;
use sinew_store::queue::{Log, LogEntry, LogMark, LogPage, LogSnapshot, LogWrite};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row, Transaction};

/// Format of the tables. Any change of [`TABLES`] creates another one.
const FORMAT: i32 = 1;

/// Maximum entries of one read.
const PAGE: i64 = 256;

/// Tables of a queue. `IDENTITY` and `EMPTY` are replaced by the id of the first entry, and by the encoded
/// state of an empty queue in hexadecimal digits.
const TABLES: &str = "
CREATE TABLE about (one boolean PRIMARY KEY DEFAULT true CHECK (one), format integer NOT NULL);
CREATE TABLE entries (position bigint PRIMARY KEY, id text NOT NULL, changes bytea NOT NULL);
CREATE TABLE snapshot (
    one boolean PRIMARY KEY DEFAULT true CHECK (one), position bigint NOT NULL, state bytea NOT NULL
);
CREATE TABLE fields (
    seq bigint, field integer, value bytea NOT NULL, PRIMARY KEY (seq, field)
);
ALTER TABLE fields ALTER value SET STORAGE EXTERNAL;
INSERT INTO about (format) VALUES (1);
INSERT INTO entries VALUES (0, 'IDENTITY', decode('EMPTY', 'hex'));
INSERT INTO snapshot (position, state) VALUES (0, decode('EMPTY', 'hex'));
";

/// The log of one queue.
#[derive(Debug)]
pub(crate) struct PostgresLog {
    postgres: Postgres,
}

impl PostgresLog {
    /// Opens the log of queue `name`, or creates it.
    pub(crate) fn open(
        address: &Address,
        name: &str,
        options: DatabaseOptions,
    ) -> Result<Self, StoreError> {
        let schema = schema_of("sinew_queue", name)?;
        let postgres = Postgres::new(address, &schema, options)?;
        let empty = LogSnapshot::empty()?.state;
        let digits = empty.iter().map(|byte| format!("{byte:02x}"));
        let tables = TABLES.replace("IDENTITY", postgres.session());
        let tables = tables.replace("EMPTY", &digits.collect::<String>());
        prepare(&postgres, FORMAT, Some(&tables))?;
        Ok(Self { postgres })
    }
}

/// Reads one entry from the columns position, id, changes; `None` where they are null.
fn entry(row: &Row) -> Result<Option<LogEntry>, Fault> {
    let Some(position) = row.try_get::<_, Option<i64>>("position")? else {
        return Ok(None);
    };
    Ok(Some(LogEntry {
        mark: LogMark {
            position: position.max(0) as u64,
            id: row.try_get("id")?,
        },
        changes: Bytes::from(row.try_get::<_, Vec<u8>>("changes")?),
    }))
}

/// Appends an entry with its values; `false` if another process was faster.
async fn append(tx: &Transaction<'_>, after: &LogMark, write: &LogWrite) -> Result<bool, Fault> {
    let (position, id) = (
        signed("position", write.entry.mark.position)?,
        &write.entry.mark.id,
    );
    let before = signed("position", after.position)?;
    let insert = "INSERT INTO entries SELECT $1::bigint, $2::text, $3::bytea \
                  WHERE EXISTS (SELECT 1 FROM entries WHERE position = $4 AND id = $5) \
                  ON CONFLICT (position) DO NOTHING";
    let changes: &[u8] = &write.entry.changes;
    let values: [&(dyn ToSql + Sync); 5] = [&position, id, &changes, &before, &after.id];
    if tx.execute(insert, &values).await? == 0 {
        let own = "SELECT 1 FROM entries WHERE position = $1 AND id = $2";
        return Ok(tx.query_opt(own, &[&position, id]).await?.is_some());
    }
    let rows = write.values.iter().map(|(row, ..)| signed("row", *row));
    let rows: Vec<i64> = rows.collect::<Result<_, _>>()?;
    let fields: Vec<i32> = write
        .values
        .iter()
        .map(|(_, field, _)| *field as i32)
        .collect();
    let values: Vec<&[u8]> = write.values.iter().map(|(.., value)| &value[..]).collect();
    if !rows.is_empty() {
        let insert = "INSERT INTO fields SELECT * FROM unnest($1::bigint[], $2::integer[], $3::bytea[]) \
                      ON CONFLICT (seq, field) DO UPDATE SET value = excluded.value";
        tx.execute(insert, &[&rows, &fields, &values]).await?;
    }
    let finished = write.finished.iter().map(|row| signed("row", *row));
    let finished: Vec<i64> = finished.collect::<Result<_, _>>()?;
    if !finished.is_empty() {
        tx.execute("DELETE FROM fields WHERE seq = ANY($1)", &[&finished])
            .await?;
    }
    Ok(true)
}

impl Log for PostgresLog {
    fn read(&mut self, from: u64) -> Result<LogPage, StoreError> {
        let from = signed("position", from)?;
        self.postgres.run(async |client: &mut Client| {
            let sql = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms, \
                       (SELECT s.position FROM snapshot s) AS snapshot, e.position, e.id, e.changes \
                       FROM (SELECT 1) one LEFT JOIN entries e ON e.position >= $1 \
                       ORDER BY e.position LIMIT $2";
            let rows = client.query(sql, &[&from, &(PAGE + 1)]).await?;
            let first = rows.first();
            let count = |column: &str| match first {
                Some(row) => Ok::<u64, Fault>(row.try_get::<_, i64>(column)?.max(0) as u64),
                None => Ok(0),
            };
            let mut entries = Vec::with_capacity(rows.len());
            for row in rows.iter().take(PAGE as usize) {
                entries.extend(entry(row)?);
            }
            Ok(LogPage {
                now_ms: count("now_ms")?,
                snapshot: count("snapshot")?,
                entries,
                more: rows.len() > PAGE as usize,
            })
        })
    }

    fn snapshot(&mut self) -> Result<LogSnapshot, StoreError> {
        self.postgres.run(async |client: &mut Client| {
            let sql = "SELECT position, state FROM snapshot";
            let row = client.query_one(sql, &[]).await?;
            Ok(LogSnapshot {
                position: row.try_get::<_, i64>(0)?.max(0) as u64,
                state: Bytes::from(row.try_get::<_, Vec<u8>>(1)?),
            })
        })
    }

    fn append(&mut self, after: &LogMark, write: &LogWrite) -> Result<bool, StoreError> {
        self.postgres.run(async |client: &mut Client| {
            let tx = client.transaction().await?;
            let stored = append(&tx, after, write).await?;
            tx.commit().await?;
            Ok(stored)
        })
    }

    fn compact(&mut self, snapshot: &LogSnapshot, keep_from: u64) -> Result<(), StoreError> {
        let position = signed("position", snapshot.position)?;
        let keep_from = signed("position", keep_from)?;
        self.postgres.run(async |client: &mut Client| {
            let tx = client.transaction().await?;
            let state: &[u8] = &snapshot.state;
            let replace = "UPDATE snapshot SET position = $1, state = $2 WHERE position < $1";
            tx.execute(replace, &[&position, &state]).await?;
            tx.execute("DELETE FROM entries WHERE position < $1", &[&keep_from])
                .await?;
            tx.commit().await?;
            Ok(())
        })
    }

    fn values(
        &mut self,
        rows: &[u64],
        fields: &[usize],
    ) -> Result<Vec<(u64, usize, Bytes)>, StoreError> {
        let rows: Vec<i64> = rows
            .iter()
            .map(|row| signed("row", *row))
            .collect::<Result<_, _>>()?;
        let fields: Vec<i32> = fields.iter().map(|field| *field as i32).collect();
        self.postgres.run(async |client: &mut Client| {
            let sql =
                "SELECT seq, field, value FROM fields WHERE seq = ANY($1) AND field = ANY($2)";
            let found = client.query(sql, &[&rows, &fields]).await?;
            let value = |row: &Row| -> Result<(u64, usize, Bytes), Fault> {
                let (seq, field): (i64, i32) = (row.try_get(0)?, row.try_get(1)?);
                let value = Bytes::from(row.try_get::<_, Vec<u8>>(2)?);
                Ok((seq.max(0) as u64, field.max(0) as usize, value))
            };
            found.iter().map(value).collect()
        })
    }
}
