//! Tables in PostgreSQL: each store and each queue has a schema of its own, with a number of its format.

use crate::connection::{Fault, Postgres};
use sinew_store::StoreError;
use tokio_postgres::Client;

/// Maximum bytes of the name of a store or a queue: with its prefix it is the name of a schema.
const MAX_NAME: usize = 48;

/// Returns the schema of a store or a queue.
///
/// # Errors
/// If the name has other characters than letters, digits, - and _.
pub(crate) fn schema_of(prefix: &str, name: &str) -> Result<String, StoreError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(fits) {
        return Err(StoreError::Queue(
            sinew_store::queue::QueueError::Argument {
                field: "name".into(),
                value: format!("{name:?}"),
                allowed: format!("1 to {MAX_NAME} letters, digits, - and _"),
            },
        ));
    }
    Ok(format!("{prefix}_{name}"))
}

/// Creates the schema with its tables in one transaction, or checks its format. `tables` is SQL, and names
/// the table `about` with a column `format`; `None`: the schema must be there.
pub(crate) fn prepare(
    postgres: &Postgres,
    format: i32,
    tables: Option<&str>,
) -> Result<(), StoreError> {
    postgres.first(async |client: &mut Client| {
        let schema = postgres.schema();
        let reason = match found(client, schema, tables).await? {
            Some(found) if found == format => return Ok(()),
            Some(found) => format!(
                "schema {schema} has format {found}, this program reads {format}; use the version of Sinew \
                 that wrote it"
            ),
            None => format!("it has no schema {schema}"),
        };
        Err(Fault::Refused(postgres.refuse(reason)))
    })
}

/// Creates what is missing, if `tables` is given, and returns the format that is there.
async fn found(
    client: &mut Client,
    schema: &str,
    tables: Option<&str>,
) -> Result<Option<i32>, Fault> {
    let tx = client.transaction().await?;
    // Two processes that create the same schema wait for each other.
    let lock = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))";
    tx.execute(lock, &[&schema]).await?;
    let find = "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = $1";
    if tx.query_opt(find, &[&schema]).await?.is_none() {
        let Some(tables) = tables else {
            return Ok(None);
        };
        let create =
            format!("CREATE SCHEMA \"{schema}\"; SET LOCAL search_path TO \"{schema}\"; {tables}");
        tx.batch_execute(&create).await?;
    }
    let format = format!("SELECT format FROM \"{schema}\".about");
    let format: i32 = tx.query_one(&format, &[]).await?.try_get(0)?;
    tx.commit().await?;
    Ok(Some(format))
}
