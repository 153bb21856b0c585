//! Egress section of a recipe, and its conversion to a policy.

use crate::address::Cidr;
use crate::host::HostPattern;
use crate::policy::{Credential, PathPattern, Policy, Rule, Scheme};
use crate::quota::Quota;
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::path::PathBuf;

/// Minimum bytes of a secret. A shorter one could occur in ordinary responses.
const MIN_SECRET_BYTES: usize = 8;
/// Maximum number of rules. Every request is compared with all of them.
const MAX_RULES: usize = 256;

/// Source of responses.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The network.
    #[default]
    Live,
    /// The network. Responses are recorded for a replay of the episode.
    Record,
    /// The recordings of the episode only. The network is never used.
    Replay,
    /// A cache that all episodes share, else the network.
    Cache,
}

/// Section `[sandbox.egress]` of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EgressConfig {
    /// Source of responses.
    pub mode: Mode,
    /// Folder of the recordings and of the cache. Required by every mode except `live`.
    pub folder: Option<PathBuf>,
    /// Maximum bytes in the folder, over all episodes.
    pub folder_bytes: u64,
    /// Default of the rules' `intercept`: terminate TLS at the proxy.
    pub intercept: bool,
    /// Quota of one episode.
    pub quota: Quota,
    /// Rules. The first match decides. A request that no rule allows is denied.
    pub rules: Vec<RuleConfig>,
    /// Secrets that the proxy adds to requests.
    pub credentials: Vec<CredentialConfig>,
}

impl Default for EgressConfig {
    fn default() -> Self {
        Self {
            mode: Mode::Live,
            folder: None,
            folder_bytes: 16 << 30,
            intercept: true,
            quota: Quota::default(),
            rules: Vec::new(),
            credentials: Vec::new(),
        }
    }
}

/// Scheme of a rule.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum RuleScheme {
    /// HTTP over TLS.
    #[default]
    Https,
    /// Without TLS.
    Http,
}

/// Section `[[sandbox.egress.rules]]` of a recipe.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RuleConfig {
    /// Host: `api.example.com`, `*.example.com`, `192.0.2.1` or `[2001:db8::1]`.
    pub host: String,
    /// Scheme of the requests.
    #[serde(default)]
    pub scheme: RuleScheme,
    /// Ports. Default: 443 for `https`, 80 for `http`.
    #[serde(default)]
    pub ports: Vec<u16>,
    /// Methods such as `GET`. Default: all.
    #[serde(default)]
    pub methods: Vec<String>,
    /// Paths: `/v1/models`, or `/v1/*` for a prefix. Default: all.
    #[serde(default)]
    pub paths: Vec<String>,
    /// Special address ranges that the host may resolve to, such as `127.0.0.0/8`.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Terminate TLS at the proxy. Default: the setting of `[sandbox.egress]`.
    #[serde(default)]
    pub intercept: Option<bool>,
    /// Name of the credential to add.
    #[serde(default)]
    pub credential: Option<String>,
}

/// Section `[[sandbox.egress.credentials]]` of a recipe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CredentialConfig {
    /// Name for `credential` of rules.
    pub name: String,
    /// Header for the secret.
    #[serde(default = "authorization")]
    pub header: String,
    /// Text before the secret, such as `"Bearer "`.
    #[serde(default)]
    pub prefix: String,
    /// Environment variable of the Sinew process that holds the secret.
    pub env: String,
}

/// Default header of a credential.
fn authorization() -> String {
    "authorization".into()
}

/// An invalid field of an [`EgressConfig`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} = {value}: allowed: {allowed}")]
pub struct ConfigError {
    /// Path of the field, from `sandbox.egress`.
    pub field: String,
    /// The value. It is never a secret.
    pub value: String,
    /// Allowed values.
    pub allowed: String,
}

/// Creates a [`ConfigError`] for a field below `sandbox.egress`.
fn wrong(field: impl Into<String>, value: impl Display, allowed: &str) -> ConfigError {
    ConfigError {
        field: format!("sandbox.egress.{}", field.into()),
        value: value.to_string(),
        allowed: allowed.into(),
    }
}

impl EgressConfig {
    /// Converts the section to a policy. `secret` returns the value of an environment variable.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn policy(&self, secret: &dyn Fn(&str) -> Option<String>) -> Result<Policy, ConfigError> {
        if self.mode != Mode::Live && self.folder.is_none() {
            return Err(wrong(
                "folder",
                "nothing",
                "a folder, for every mode but live",
            ));
        }
        if self.mode == Mode::Live && self.folder.is_some() {
            return Err(wrong(
                "folder",
                "a folder",
                "nothing, as mode = \"live\" keeps nothing",
            ));
        }
        if self.folder_bytes == 0 {
            return Err(wrong("folder_bytes", "0", "at least 1"));
        }
        self.quota
            .check()
            .map_err(|(field, value, allowed)| wrong(format!("quota.{field}"), value, allowed))?;
        if self.rules.len() > MAX_RULES {
            return Err(wrong("rules", self.rules.len().to_string(), "at most 256"));
        }
        let credentials = self
            .credentials
            .iter()
            .enumerate()
            .map(|(at, c)| c.compile(at, secret));
        let credentials: Vec<Credential> = credentials.collect::<Result<_, _>>()?;
        let rules = self.rules.iter().enumerate();
        let rules = rules
            .map(|(at, r)| r.compile(at, self, &credentials))
            .collect::<Result<_, _>>()?;
        Ok(Policy { rules })
    }
}

impl CredentialConfig {
    /// Reads the secret and checks the header. `at` is the index in the list.
    fn compile(
        &self,
        at: usize,
        secret: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Credential, ConfigError> {
        let field = |name: &str| format!("credentials[{at}].{name}");
        let header = hyper::header::HeaderName::from_bytes(self.header.as_bytes())
            .map_err(|_| wrong(field("header"), &self.header, "a header's name"))?;
        let framing = ["host", "content-length", "transfer-encoding", "connection"];
        if framing.contains(&header.as_str()) {
            return Err(wrong(
                field("header"),
                &self.header,
                "no header that frames the message",
            ));
        }
        let found = secret(&self.env).ok_or_else(|| {
            wrong(
                field("env"),
                &self.env,
                "an environment variable that is set where Sinew runs",
            )
        })?;
        // Errors never contain the secret.
        let value = format!("{}{found}", self.prefix);
        let plain = value.bytes().all(|b| (0x20..0x7f).contains(&b));
        if found.trim().len() < MIN_SECRET_BYTES || !plain {
            return Err(wrong(
                field("env"),
                &self.env,
                "a variable with at least 8 bytes of printable ASCII",
            ));
        }
        Ok(Credential {
            name: self.name.clone(),
            header: header.as_str().into(),
            value,
            secret: found.trim().into(),
        })
    }
}

impl RuleConfig {
    /// Checks the rule at index `at` and resolves its defaults.
    fn compile(
        &self,
        at: usize,
        config: &EgressConfig,
        credentials: &[Credential],
    ) -> Result<Rule, ConfigError> {
        let field = |name: &str| format!("rules[{at}].{name}");
        let host = HostPattern::parse(&self.host).map_err(|e| {
            wrong(
                field("host"),
                &self.host,
                &format!("api.example.com, *.example.com, an address ({e})"),
            )
        })?;
        let scheme = match self.scheme {
            RuleScheme::Https => Scheme::Https,
            RuleScheme::Http => Scheme::Http,
        };
        if self.ports.contains(&0) {
            return Err(wrong(field("ports"), "0", "1 to 65535"));
        }
        let upper =
            |m: &&String| m.is_empty() || !m.bytes().all(|b| b.is_ascii_uppercase() || b == b'-');
        if let Some(bad) = self.methods.iter().find(upper) {
            return Err(wrong(
                field("methods"),
                bad,
                "methods in capitals, such as GET",
            ));
        }
        let paths = self.paths.iter().map(|p| PathPattern::parse(p));
        let paths = paths
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| wrong(field("paths"), e, "/v1/models, /v1/*"))?;
        let addresses = self
            .addresses
            .iter()
            .map(|a| a.parse::<Cidr>())
            .collect::<Result<Vec<_>, _>>();
        let addresses =
            addresses.map_err(|e| wrong(field("addresses"), e, "ranges such as 127.0.0.0/8"))?;
        let https = scheme == Scheme::Https;
        let intercept = https && self.intercept.unwrap_or(config.intercept);
        let looks = !paths.is_empty() || !self.methods.is_empty() || self.credential.is_some();
        if https && !intercept && (looks || config.mode != Mode::Live) {
            let why = "true, as methods, paths, credentials and recordings need to see requests";
            return Err(wrong(field("intercept"), "false", why));
        }
        if !https && self.intercept.is_some() {
            return Err(wrong(
                field("intercept"),
                "set",
                "nothing, where the scheme is http",
            ));
        }
        let credential = self.credential(at, credentials)?;
        Ok(Rule {
            host,
            scheme,
            ports: self.ports.clone(),
            methods: self.methods.clone(),
            paths,
            addresses,
            intercept,
            credential,
        })
    }

    /// Finds the credential that the rule names.
    fn credential(
        &self,
        at: usize,
        credentials: &[Credential],
    ) -> Result<Option<Credential>, ConfigError> {
        let Some(name) = &self.credential else {
            return Ok(None);
        };
        let invalid =
            |value: &str, allowed: &str| wrong(format!("rules[{at}].credential"), value, allowed);
        if self.scheme == RuleScheme::Http {
            let why = "nothing, where the scheme is http: it would travel in the open";
            return Err(invalid("set", why));
        }
        let found = credentials.iter().find(|c| c.name == *name).cloned();
        let unknown = || invalid(name, "the name of one of sandbox.egress.credentials");
        found.ok_or_else(unknown).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(rule: RuleConfig) -> EgressConfig {
        EgressConfig {
            rules: vec![rule],
            credentials: vec![CredentialConfig {
                name: "key".into(),
                header: "Authorization".into(),
                prefix: "Bearer ".into(),
                env: "KEY".into(),
            }],
            ..EgressConfig::default()
        }
    }

    fn rule(host: &str) -> RuleConfig {
        RuleConfig {
            host: host.into(),
            ..RuleConfig::default()
        }
    }

    fn compile(config: &EgressConfig) -> Result<Policy, ConfigError> {
        config.policy(&|name| (name == "KEY").then(|| "0123456789".into()))
    }

    #[test]
    fn credentials_are_read_from_the_environment_and_hidden() {
        let config = with(RuleConfig {
            credential: Some("key".into()),
            ..rule("a.com")
        });
        let policy = compile(&config).unwrap();
        let credential = policy.rules[0].credential.as_ref().unwrap();
        assert_eq!(
            (credential.header.as_str(), credential.value.as_str()),
            ("authorization", "Bearer 0123456789")
        );
        assert!(!format!("{policy:?}").contains("0123456789"));
    }

    #[test]
    fn errors_name_the_field_of_an_invalid_rule() {
        let changed = |change: fn(&mut RuleConfig)| {
            let mut rule = rule("a.com");
            change(&mut rule);
            rule
        };
        let cases = [
            (rule("10.1"), "host"),
            (changed(|r| r.paths = vec!["v1".into()]), "paths"),
            (changed(|r| r.paths = vec!["/a*b".into()]), "paths"),
            (changed(|r| r.methods = vec!["get".into()]), "methods"),
            (changed(|r| r.addresses = vec!["127".into()]), "addresses"),
            (changed(|r| r.ports = vec![0]), "ports"),
            (
                changed(|r| r.credential = Some("other".into())),
                "credential",
            ),
            (
                changed(|r| {
                    r.intercept = Some(false);
                    r.methods = vec!["GET".into()];
                }),
                "intercept",
            ),
            (
                changed(|r| {
                    r.credential = Some("key".into());
                    r.scheme = RuleScheme::Http;
                }),
                "credential",
            ),
            (
                changed(|r| {
                    r.intercept = Some(false);
                    r.scheme = RuleScheme::Http;
                }),
                "intercept",
            ),
        ];
        for (rule, field) in cases {
            assert_eq!(
                compile(&with(rule)).unwrap_err().field,
                format!("sandbox.egress.rules[0].{field}")
            );
        }
    }

    #[test]
    fn recordings_and_credentials_need_their_settings() {
        let no_intercept = RuleConfig {
            intercept: Some(false),
            ..rule("a.com")
        };
        let mut config = with(no_intercept);
        assert!(compile(&config).is_ok());
        config.mode = Mode::Record;
        assert_eq!(compile(&config).unwrap_err().field, "sandbox.egress.folder");
        config.folder = Some("x".into());
        assert_eq!(
            compile(&config).unwrap_err().field,
            "sandbox.egress.rules[0].intercept"
        );
        config.credentials[0].env = "UNSET".into();
        assert_eq!(
            compile(&config).unwrap_err().field,
            "sandbox.egress.credentials[0].env"
        );
        config.credentials.clear();
        config.quota.requests = 0;
        assert_eq!(
            compile(&config).unwrap_err().field,
            "sandbox.egress.quota.requests"
        );
    }
}
