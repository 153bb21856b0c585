//! Conversion of counts for SQLite.

use crate::error::StoreError;

/// Converts to a signed integer, since SQLite has no unsigned ones.
pub(crate) fn signed(field: &'static str, value: u64) -> Result<i64, StoreError> {
    i64::try_from(value).map_err(|_| StoreError::Argument {
        field,
        value,
        allowed: format!("up to {}", i64::MAX),
    })
}
