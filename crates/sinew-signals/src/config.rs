//! The file of `--signals`: what is sent where. Unknown keys are refused.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Why the file is refused.
#[derive(Debug, thiserror::Error)]
pub enum SignalsError {
    /// It cannot be read.
    #[error("{path}: {why}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// In words.
        why: String,
    },
    /// It is no such file: syntax, an unknown key, a wrong type.
    #[error("{path}: {why}", path = path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// With the line.
        why: String,
    },
    /// A value that is not allowed.
    #[error("{key} = {value}: allowed: {allowed}")]
    Value {
        /// As in the file.
        key: &'static str,
        /// As typed.
        value: String,
        /// In words.
        allowed: &'static str,
    },
    /// Something outside could not be opened.
    #[error("{0}")]
    System(String),
}

/// What a run says to other systems. A table that is absent says nothing.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct SignalsConfig {
    /// Prometheus.
    pub prometheus: Option<PrometheusConfig>,
    /// TensorBoard.
    pub tensorboard: Option<TensorboardConfig>,
    /// OpenTelemetry.
    pub otlp: Option<OtlpConfig>,
    /// Alerts.
    pub alerts: Option<AlertsConfig>,
}

/// `[prometheus]`: at least one of its keys.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct PrometheusConfig {
    /// Address of `/metrics`; it needs no token, as a scraper has none.
    pub listen: Option<SocketAddr>,
    /// File for the text-file collector of the node exporter, written anew every 15 seconds.
    pub textfile: Option<PathBuf>,
}

/// `[tensorboard]`
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct TensorboardConfig {
    /// Folder of the event files; left out: `tensorboard` in the folder of the run.
    pub folder: Option<PathBuf>,
}

/// `[otlp]`: at least one of its addresses.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct OtlpConfig {
    /// Where traces are posted, such as `http://127.0.0.1:4318/v1/traces`.
    pub url: Option<String>,
    /// Where log records are posted, such as `http://127.0.0.1:4318/v1/logs`.
    pub logs_url: Option<String>,
    /// `service.name` of all spans and records.
    #[serde(default = "service")]
    pub service: String,
    /// Further headers, such as a key.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// Share of the episodes whose spans are sent, chosen by their ids; left out: all.
    pub share: Option<f64>,
}

impl OtlpConfig {
    fn check(&self) -> Result<(), SignalsError> {
        if self.url.is_none() && self.logs_url.is_none() {
            return refused("otlp", "{}", "`url` (traces), `logs_url` or both");
        }
        for (key, url) in [("otlp.url", &self.url), ("otlp.logs_url", &self.logs_url)] {
            url.as_deref().map_or(Ok(()), |url| address(key, url))?;
        }
        let Some(share) = self.share else {
            return Ok(());
        };
        if self.url.is_none() {
            return refused("otlp.share", &share.to_string(), "only with `url`");
        }
        match (0.0..=1.0).contains(&share) {
            true => Ok(()),
            false => refused("otlp.share", &share.to_string(), "0 to 1"),
        }
    }

    /// Share of the episodes whose spans are sent: none without an address for them.
    pub(crate) fn traced(&self) -> f64 {
        match self.url {
            Some(_) => self.share.unwrap_or(1.0),
            None => 0.0,
        }
    }
}

/// The form of an alert's message.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// Rule, run, text, value, threshold and time as JSON.
    #[default]
    Json,
    /// `{"text": ...}`, as Slack, Mattermost and Rocket.Chat take it.
    Slack,
    /// Title, body and type, as the API of Apprise takes it.
    Apprise,
}

/// `[alerts]`: where to, how often, and when. A threshold of 0 switches its rule off.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct AlertsConfig {
    /// Where alerts are posted.
    pub webhook: String,
    /// Form of the message.
    pub format: Format,
    /// Seconds until the same rule may speak again.
    pub every_s: f64,
    /// Alerts of all rules in an hour.
    pub max_per_hour: u32,
    /// Collapse: entropy of the policy, in nats, below this for three steps.
    pub entropy_below: f64,
    /// Collapse: share of episodes in groups of equal reward, above this for three steps.
    pub equal_above: f64,
    /// Jump of the mean reward between a step and the ten before it, in their standard deviations.
    pub reward_jump: f64,
    /// Share of episodes of a step that the system failed.
    pub failed_above: f64,
    /// Staleness: updates that the oldest trained row was behind.
    pub staleness_above: u64,
    /// Hang: seconds of a live episode in one phase, and seconds without an event of the run.
    pub hang_s: f64,
    /// Disk: free space of the run's folder in GiB.
    pub disk_free_below_gb: f64,
    /// Memory: share of the machine's or the container's memory that is in use.
    pub memory_above: f64,
}

impl Default for AlertsConfig {
    fn default() -> Self {
        Self {
            webhook: String::new(),
            format: Format::Json,
            every_s: 900.0,
            max_per_hour: 20,
            entropy_below: 0.02,
            equal_above: 0.95,
            reward_jump: 6.0,
            failed_above: 0.5,
            staleness_above: 0,
            hang_s: 600.0,
            disk_free_below_gb: 2.0,
            memory_above: 0.95,
        }
    }
}

fn service() -> String {
    "sinew".into()
}

impl SignalsConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, has an unknown key, or a value that is not allowed.
    pub fn load(path: &Path) -> Result<Self, SignalsError> {
        let text = std::fs::read_to_string(path).map_err(|e| SignalsError::Read {
            path: path.into(),
            why: e.to_string(),
        })?;
        Self::parse(path, &text)
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// As [`SignalsConfig::load`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, SignalsError> {
        let config: Self = toml::from_str(text).map_err(|e| SignalsError::Syntax {
            path: path.into(),
            why: e.to_string(),
        })?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), SignalsError> {
        if self
            .prometheus
            .as_ref()
            .is_some_and(|p| p.listen.is_none() && p.textfile.is_none())
        {
            return refused("prometheus", "{}", "`listen`, `textfile` or both");
        }
        self.otlp.as_ref().map_or(Ok(()), OtlpConfig::check)?;
        let Some(a) = &self.alerts else {
            return Ok(());
        };
        address("alerts.webhook", &a.webhook)?;
        let shares = [
            ("alerts.equal_above", a.equal_above),
            ("alerts.failed_above", a.failed_above),
            ("alerts.memory_above", a.memory_above),
        ];
        for (key, value) in shares {
            if !(0.0..=1.0).contains(&value) {
                return refused(key, &value.to_string(), "0 (off) to 1");
            }
        }
        for (key, value) in [
            ("alerts.every_s", a.every_s),
            ("alerts.entropy_below", a.entropy_below),
            ("alerts.reward_jump", a.reward_jump),
            ("alerts.hang_s", a.hang_s),
            ("alerts.disk_free_below_gb", a.disk_free_below_gb),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                return refused(key, &value.to_string(), "0 or a number above");
            }
        }
        Ok(())
    }
}

/// # Errors
/// If it is no address of HTTP.
fn address(key: &'static str, url: &str) -> Result<(), SignalsError> {
    match url.starts_with("http://") || url.starts_with("https://") {
        true => Ok(()),
        false => refused(key, url, "an address that begins with http:// or https://"),
    }
}

fn refused(key: &'static str, value: &str, allowed: &'static str) -> Result<(), SignalsError> {
    Err(SignalsError::Value {
        key,
        value: value.to_owned(),
        allowed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<SignalsConfig, String> {
        SignalsConfig::parse("s.toml".as_ref(), text).map_err(|e| e.to_string())
    }

    #[test]
    fn defaults_stand_for_what_is_not_said() {
        let config =
            parse("[tensorboard]\n[alerts]\nwebhook = \"http://x/\"\nformat = \"slack\"").unwrap();
        let alerts = config.alerts.unwrap();
        assert_eq!((alerts.format, alerts.max_per_hour), (Format::Slack, 20));
        assert_eq!(config.tensorboard, Some(TensorboardConfig::default()));
        assert_eq!(parse("").unwrap(), SignalsConfig::default());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, named) in [
            ("[prometheus]", "prometheus"),
            ("[prometheus]\nlisten = \"nine\"", "listen"),
            ("[promethius]", "promethius"),
            ("[otlp]\nurl = \"x\"", "otlp.url"),
            ("[otlp]\nurl = \"http://x\"\nshare = 2.0", "otlp.share"),
            ("[otlp]\nlogs_url = \"http://x\"\nshare = 0.5", "otlp.share"),
            ("[otlp]\nlogs_url = \"x\"", "otlp.logs_url"),
            ("[otlp]", "logs_url"),
            ("[alerts]", "alerts.webhook"),
            (
                "[alerts]\nwebhook = \"http://x\"\nmemory_above = 95.0",
                "memory_above",
            ),
            ("[alerts]\nwebhook = \"http://x\"\nhang_s = -1.0", "hang_s"),
            ("[alerts]\nwebhook = \"http://x\"\nentropy = 1.0", "entropy"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(named), "{text}: {error}");
        }
    }
}
