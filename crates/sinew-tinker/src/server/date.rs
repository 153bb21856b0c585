//! Times in the SDK's form.

use chrono::{DateTime, SecondsFormat, Utc};

/// Milliseconds since 1970 (UTC) as ISO 8601.
pub(crate) fn iso(unix_ms: u64) -> String {
    let time = i64::try_from(unix_ms).ok();
    let time = time.and_then(DateTime::from_timestamp_millis);
    let time = time.unwrap_or(DateTime::<Utc>::MAX_UTC);
    time.to_rfc3339_opts(SecondsFormat::Millis, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_are_dates() {
        for (ms, expected) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_007, "2000-02-29T00:00:00.007Z"),
            (1_709_251_199_999, "2024-02-29T23:59:59.999Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(iso(ms), expected);
        }
    }
}
