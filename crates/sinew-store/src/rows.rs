//! Reading of all rows of a query.

use crate::error::StoreError;
use rusqlite::{Connection, Params, Row};

/// The values that `read` makes of the rows, in the order of the query.
pub(crate) fn all<T>(
    connection: &Connection,
    sql: &str,
    values: impl Params,
    read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
) -> Result<Vec<T>, StoreError> {
    let mut query = connection.prepare_cached(sql)?;
    let rows = query.query_map(values, read)?;
    Ok(rows.collect::<Result<_, _>>()?)
}
