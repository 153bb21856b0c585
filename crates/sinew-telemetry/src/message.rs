//! Alerts as messages of webhooks and mails. Pure.

use crate::alerts::Alert;
use crate::config::Format;
use serde_json::{Value, json};

/// The body of a message; `at` is in seconds since 1970.
pub(crate) fn body(format: Format, run: &str, alert: &Alert, at: f64) -> Value {
    let (title, more) = (title(run, alert), more(alert));
    match format {
        Format::Json => json!({
            "source": "sinew", "run": run, "rule": alert.rule.name(), "text": alert.text,
            "value": finite(alert.value), "threshold": alert.threshold, "held_back": alert.held_back, "at": at,
            "episode": alert.episode,
        }),
        // `<`, `>` and `&` begin links and mentions in Slack's text.
        Format::Slack => {
            let text = format!("{title}\n{}{more}", alert.text);
            let text = text
                .replace('&', "&amp;")
                .replace('<', "&lt;")
                .replace('>', "&gt;");
            json!({ "text": text })
        }
        Format::Apprise => json!({
            "title": title, "body": format!("{}{more}", alert.text), "type": "warning", "format": "text",
        }),
    }
}

/// A mail: its subject and its text.
pub(crate) fn mail(run: &str, alert: &Alert, folder: &std::path::Path) -> (String, String) {
    let text = format!(
        "{}{}\n\nrule: {}\nmeasured: {}\nthreshold: {}\nfolder: {}\n",
        alert.text,
        more(alert),
        alert.rule.name(),
        alert.value,
        alert.threshold,
        folder.display()
    );
    (title(run, alert), text)
}

fn title(run: &str, alert: &Alert) -> String {
    format!("sinew {run}: {}", alert.rule.name())
}

/// Number of alerts that were held back before it.
fn more(alert: &Alert) -> String {
    match alert.held_back {
        0 => String::new(),
        n => format!(" ({n} alerts before it were held back)"),
    }
}

/// JSON has no NaN.
fn finite(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alerts::Rule;

    #[test]
    fn each_form_has_its_fields() {
        let alert = Alert {
            rule: Rule::Disk,
            text: "<!channel> 1 & 2".into(),
            value: f64::NAN,
            threshold: 2.0,
            held_back: 3,
            episode: None,
        };
        let plain = body(Format::Json, "r", &alert, 5.0);
        assert_eq!(
            (&plain["rule"], &plain["value"]),
            (&json!("disk"), &Value::Null)
        );
        let slack = body(Format::Slack, "r", &alert, 5.0);
        let text = slack["text"].as_str().unwrap();
        assert!(
            text.contains("&lt;!channel&gt; 1 &amp; 2") && !text.contains('<'),
            "{text}"
        );
        let apprise = body(Format::Apprise, "r", &alert, 5.0);
        assert_eq!(apprise["title"], "sinew r: disk");
        assert!(apprise["body"].as_str().unwrap().contains("3 alerts"));
        let (subject, text) = mail("r", &alert, "runs/r".as_ref());
        assert_eq!(subject, "sinew r: disk");
        assert!(
            text.contains("3 alerts") && text.contains("folder: runs/r"),
            "{text}"
        );
    }
}
