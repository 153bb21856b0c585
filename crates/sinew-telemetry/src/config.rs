//! The file of `--signals`: data and destinations. Unknown keys are refused.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Reasons why the file is refused.
#[derive(Debug, thiserror::Error)]
pub enum SignalsError {
    /// It cannot be read.
    #[error("{path}: {why}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Reason, in words.
        why: String,
    },
    /// The file is invalid: syntax, an unknown key, or a wrong type.
    #[error("{path}: {why}", path = path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Reason, with the line.
        why: String,
    },
    /// A value that is not allowed.
    #[error("{key} = {value}: allowed: {allowed}")]
    Value {
        /// Key as in the file.
        key: &'static str,
        /// Value as typed.
        value: String,
        /// Allowed values, in words.
        allowed: &'static str,
    },
    /// Something outside could not be opened.
    #[error("{0}")]
    System(String),
}

/// Destinations of a run's exports. A table that is absent exports nothing.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct SignalsConfig {
    /// Prometheus.
    pub prometheus: Option<PrometheusConfig>,
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
    /// File for the text-file collector of the node exporter, written again every 15 seconds.
    pub textfile: Option<PathBuf>,
}

/// `[otlp]`: at least one of its addresses.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct OtlpConfig {
    /// URL for traces, such as `http://127.0.0.1:4318/v1/traces`.
    pub url: Option<String>,
    /// URL for log records, such as `http://127.0.0.1:4318/v1/logs`.
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
    /// # Errors
    /// If both addresses are missing, one is not an address of HTTP, or the share is not from 0 to 1.
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
        if (0.0..=1.0).contains(&share) {
            Ok(())
        } else {
            refused("otlp.share", &share.to_string(), "0 to 1")
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

/// Whether a connection is encrypted.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Tls {
    /// TLS from the first byte.
    #[default]
    Always,
    /// TLS after the server agreed to it; otherwise nothing is sent.
    Starttls,
    /// Not at all: on this machine only.
    Never,
}

/// `[alerts.mail]`
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct MailConfig {
    /// `HOST` or `HOST:PORT` of an SMTP server.
    pub server: String,
    /// Encryption.
    #[serde(default)]
    pub tls: Tls,
    /// Address of the sender.
    pub from: String,
    /// Addresses of the receivers, up to 20.
    pub to: Vec<String>,
    /// Login at the server.
    pub user: Option<String>,
    /// Environment variable with its password.
    pub password_env: Option<String>,
}

/// Receivers of a mail.
const MAX_RECEIVERS: usize = 20;

impl MailConfig {
    /// Host without the port.
    pub(crate) fn host(&self) -> &str {
        let (host, _) = self.parts();
        host.trim_start_matches('[').trim_end_matches(']')
    }

    /// Port as typed, or the usual one (RFC 8314, RFC 5321).
    pub(crate) fn port(&self) -> u16 {
        let usual = match self.tls {
            Tls::Always => 465,
            Tls::Starttls => 587,
            Tls::Never => 25,
        };
        self.parts().1.and_then(|p| p.parse().ok()).unwrap_or(usual)
    }

    /// The host and the port as typed.
    fn parts(&self) -> (&str, Option<&str>) {
        match self.server.rsplit_once(':') {
            // The colons of an address of version 6 stand in brackets.
            Some((host, port)) if !port.contains(']') => (host, Some(port)),
            _ => (self.server.as_str(), None),
        }
    }

    /// # Errors
    /// If the server is not a host, mail would leave this machine without encryption, or receivers or a login
    /// are wrong.
    fn check(&self) -> Result<(), SignalsError> {
        let (host, port) = self.parts();
        let odd = |c: char| c.is_whitespace() || c == '/';
        if host.is_empty() || host.contains(odd) || port.is_some_and(|p| p.parse::<u16>().is_err())
        {
            return refused("alerts.mail.server", &self.server, "HOST or HOST:PORT");
        }
        let address: Result<std::net::IpAddr, _> = self.host().parse();
        let here = self.host() == "localhost" || address.is_ok_and(|a| a.is_loopback());
        if self.tls == Tls::Never && !here {
            let allowed = "`always` or `starttls`; `never` with a server of this machine only";
            return refused("alerts.mail.tls", "never", allowed);
        }
        if self.to.is_empty() || self.to.len() > MAX_RECEIVERS {
            return refused(
                "alerts.mail.to",
                &format!("{:?}", self.to),
                "1 to 20 addresses",
            );
        }
        match (&self.user, &self.password_env) {
            (Some(user), None) => refused("alerts.mail.user", user, "only with `password_env`"),
            (None, Some(name)) => refused("alerts.mail.password_env", name, "only with `user`"),
            _ => Ok(()),
        }
    }
}

/// `[alerts]`: where to, how often, and when. A threshold of 0 switches its rule off.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct AlertsConfig {
    /// URL for alerts.
    pub webhook: Option<String>,
    /// Form of what is posted; left out: `json`.
    pub format: Option<Format>,
    /// Mail.
    pub mail: Option<MailConfig>,
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
            webhook: None,
            format: None,
            mail: None,
            every_s: 900.0,
            max_per_hour: 20,
            entropy_below: 0.02,
            equal_above: 0.95,
            reward_jump: 6.0,
            failed_above: 0.1,
            staleness_above: 0,
            hang_s: 600.0,
            disk_free_below_gb: 2.0,
            memory_above: 0.95,
        }
    }
}

/// `service.name`, where none is typed.
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
    /// Same as [`SignalsConfig::load`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, SignalsError> {
        let config: Self = toml::from_str(text).map_err(|e| SignalsError::Syntax {
            path: path.into(),
            why: e.to_string(),
        })?;
        config.check()?;
        Ok(config)
    }

    /// # Errors
    /// Names the first value that is not allowed.
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
        let logged = self.otlp.as_ref().is_some_and(|o| o.logs_url.is_some());
        if a.webhook.is_none() && a.mail.is_none() && !logged {
            let allowed = "`webhook`, `[alerts.mail]`, or log records (`otlp.logs_url`)";
            return refused("alerts", "{}", allowed);
        }
        let webhook = a.webhook.as_deref();
        webhook.map_or(Ok(()), |url| address("alerts.webhook", url))?;
        if let (None, Some(format)) = (webhook, a.format) {
            return refused(
                "alerts.format",
                &format!("{format:?}"),
                "only with `webhook`",
            );
        }
        a.mail.as_ref().map_or(Ok(()), MailConfig::check)?;
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
/// If it is not an address of HTTP.
fn address(key: &'static str, url: &str) -> Result<(), SignalsError> {
    if url.starts_with("http://") || url.starts_with("https://") {
        Ok(())
    } else {
        refused(key, url, "an address that begins with http:// or https://")
    }
}

/// # Errors
/// Always: the value of a key is not allowed.
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
        let config = parse("[alerts]\nwebhook = \"http://x/\"\nformat = \"slack\"").unwrap();
        let alerts = config.alerts.unwrap();
        assert_eq!(
            (alerts.format, alerts.max_per_hour),
            (Some(Format::Slack), 20)
        );
        assert_eq!(parse("").unwrap(), SignalsConfig::default());
    }

    #[test]
    fn mail_is_checked_and_its_ports_are_the_usual_ones() {
        let mail = |more: &str| {
            let head = "[alerts.mail]\nfrom = \"a@x.org\"\n";
            parse(&format!("{head}{more}")).map(|c| c.alerts.unwrap().mail.unwrap())
        };
        let to = "to = [\"b@x.org\"]\n";
        for (server, tls, host, port) in [
            ("mail.x.org", "always", "mail.x.org", 465),
            ("mail.x.org", "starttls", "mail.x.org", 587),
            ("[::1]:2525", "never", "::1", 2525),
            ("[::1]", "never", "::1", 25),
        ] {
            let config = mail(&format!("{to}server = \"{server}\"\ntls = \"{tls}\"")).unwrap();
            assert_eq!((config.host(), config.port()), (host, port));
        }
        for (more, named) in [
            ("server = \"x\"\nto = []", "alerts.mail.to"),
            (
                "server = \"smtp://x\"\nto = [\"b@x.org\"]",
                "alerts.mail.server",
            ),
            (
                "server = \"x:99999\"\nto = [\"b@x.org\"]",
                "alerts.mail.server",
            ),
            (
                "server = \"x\"\ntls = \"never\"\nto = [\"b@x.org\"]",
                "alerts.mail.tls",
            ),
            (
                "server = \"x\"\nuser = \"u\"\nto = [\"b@x.org\"]",
                "alerts.mail.user",
            ),
            (
                "server = \"x\"\npassword_env = \"P\"\nto = [\"b@x.org\"]",
                "password_env",
            ),
            (
                "server = \"x\"\nformat = \"json\"\nto = [\"b@x.org\"]",
                "format",
            ),
        ] {
            let error = mail(more).unwrap_err();
            assert!(error.contains(named), "{more}: {error}");
        }
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
            ("[alerts]", "`webhook`, `[alerts.mail]`"),
            ("[alerts]\nwebhook = \"x\"", "alerts.webhook"),
            ("[wandb]\nproject = \"a\"", "wandb"),
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
