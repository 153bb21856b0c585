//! Counts as SQLite keeps them.

use crate::error::StoreError;

/// SQLite's integers are signed.
pub(crate) fn signed(field: &'static str, value: u64) -> Result<i64, StoreError> {
    i64::try_from(value).map_err(|_| StoreError::Argument {
        field,
        value,
        allowed: format!("up to {}", i64::MAX),
    })
}
