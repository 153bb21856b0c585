//! Times for users.

use chrono::{DateTime, Utc};

/// Seconds since 1970 (UTC) as a date and a time of day.
pub fn date(unix_s: f64) -> String {
    let time = DateTime::from_timestamp(unix_s.max(0.0) as i64, 0);
    let time = time.unwrap_or(DateTime::<Utc>::MAX_UTC);
    time.format("%Y-%m-%d %H:%M").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_dates() {
        for (seconds, expected) in [
            (0.0, "1970-01-01 00:00"),
            (951_782_400.0, "2000-02-29 00:00"),
            (1_709_251_199.0, "2024-02-29 23:59"),
            (1_735_689_600.0, "2025-01-01 00:00"),
            (4_107_542_400.0, "2100-03-01 00:00"),
        ] {
            assert_eq!(date(seconds), expected);
        }
    }
}
