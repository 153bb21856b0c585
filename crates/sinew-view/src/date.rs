//! Times for users.

/// Seconds since 1970 as a date and a time of day (days to a civil date: Howard Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms").
pub fn date(unix_s: f64) -> String {
    let seconds = unix_s.max(0.0) as u64;
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute) = (rest / 3600, rest % 3600 / 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}")
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
