//! What may leave: rules, first match wins, everything else is denied. Pure.

use crate::address::{Cidr, forbidden};
use crate::host::{Host, HostPattern};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;

/// Why something was denied; the name in audit lines and answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// No rule names this host, port and scheme.
    NoRule,
    /// A rule names the host, none allows the method.
    Method,
    /// A rule names the host and the method, none allows the path.
    Path,
    /// The name leads to an address that no rule opens.
    Address,
    /// A host, port, header or path that two readers could understand in two ways.
    Malformed,
    /// TLS for another host than the tunnel's, a hidden one, or no TLS.
    Tls,
    /// The episode's quota is used up.
    Quota,
    /// Nothing was recorded for this request.
    NotRecorded,
}

impl Reason {
    /// As in audit lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoRule => "no_rule",
            Self::Method => "method",
            Self::Path => "path",
            Self::Address => "address",
            Self::Malformed => "malformed",
            Self::Tls => "tls",
            Self::Quota => "quota",
            Self::NotRecorded => "not_recorded",
        }
    }
}

/// A refusal, as the audit log tells it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("egress denied ({}): {detail}", .reason.name())]
pub struct Denial {
    /// The kind.
    pub reason: Reason,
    /// What was asked and what is allowed.
    pub detail: String,
}

impl Denial {
    /// A refusal with its detail.
    pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
        Self {
            reason,
            detail: detail.into(),
        }
    }

    /// What the sandbox is told: not where names lead on the host's network.
    pub(crate) fn told(&self) -> String {
        match self.reason {
            Reason::Address => {
                let text = "the name leads to an address that no rule opens";
                Self::new(self.reason, text).to_string()
            }
            _ => self.to_string(),
        }
    }
}

/// `http` or `https`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Plain.
    Http,
    /// Over TLS.
    Https,
}

impl Scheme {
    /// 80 or 443.
    pub fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Http => "http",
            Self::Https => "https",
        })
    }
}

/// A path, or all paths with a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathPattern {
    /// This one.
    Exact(String),
    /// All that begin so: `/v1/*`.
    Prefix(String),
}

impl PathPattern {
    /// Reads `/v1/models` or `/v1/*`; a star is allowed at the end alone.
    ///
    /// # Errors
    /// What is wrong, and what is allowed.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (front, prefix) = text.strip_suffix('*').map_or((text, false), |f| (f, true));
        if !front.starts_with('/') || front.contains(['*', '?', '#']) || ambiguous(front) {
            return Err(format!(
                "path {text:?}; allowed: /v1/models, or /v1/* for all that begin so"
            ));
        }
        Ok(if prefix {
            Self::Prefix(front.into())
        } else {
            Self::Exact(front.into())
        })
    }

    fn matches(&self, path: &str) -> bool {
        match self {
            Self::Exact(p) => p == path,
            Self::Prefix(p) => path.starts_with(p.as_str()),
        }
    }
}

/// Characters beyond ASCII that some servers make dots and slashes of.
const ALIKE: [char; 10] = [
    '\u{2024}', '\u{fe52}', '\u{ff0e}', '\u{2044}', '\u{2215}', '\u{29f8}', '\u{ff0f}', '\u{2216}',
    '\u{fe68}', '\u{ff3c}',
];

/// The bytes of a path, or none where an escape is not one.
fn unescaped(path: &str) -> Option<Vec<u8>> {
    let mut bytes = path.bytes();
    let mut out = Vec::with_capacity(path.len());
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let digit = |b: Option<u8>| char::from(b?).to_digit(16);
                let (high, low) = (digit(bytes.next())?, digit(bytes.next())?);
                // Two digits of four bits each.
                (high * 16 + low) as u8
            }
            plain => plain,
        });
    }
    Some(out)
}

/// Whether a server could read this path as another one. All that a path may say in escapes is text
/// (so no overlong forms of UTF-8) without a second layer of escapes, slashes, backslashes and
/// control characters; no segment is dots alone, with or without what servers cut off (parameters,
/// white space).
fn ambiguous(path: &str) -> bool {
    if !path.bytes().all(|b| (0x21..0x7f).contains(&b)) || path.contains('\\') {
        return true;
    }
    let Some(text) = unescaped(path).and_then(|bytes| String::from_utf8(bytes).ok()) else {
        return true;
    };
    let slashes = |text: &str| text.matches('/').count();
    if slashes(&text) != slashes(path) {
        return true;
    }
    let odd = |c: char| matches!(c, '%' | '\\') || c.is_control() || ALIKE.contains(&c);
    text.contains(odd)
        || text.split('/').any(|segment| {
            let name = segment.split(';').next().unwrap_or_default();
            let name = name.trim_matches(char::is_whitespace);
            !name.is_empty() && name.chars().all(|c| c == '.' || c.is_whitespace())
        })
}

/// A secret that the proxy adds to requests of a rule, outside of the sandbox.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    /// Name in the recipe and in audit lines.
    pub name: String,
    /// Header that carries it, in lower case; what the sandbox sent in it is dropped.
    pub header: String,
    /// The header's value.
    pub value: String,
    /// The secret part of the value: what must never come back.
    pub secret: String,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// One rule. Empty lists do not restrict, but for ports: none means the scheme's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Hosts that it opens.
    pub host: HostPattern,
    /// Scheme that it opens.
    pub scheme: Scheme,
    /// Ports that it opens.
    pub ports: Vec<u16>,
    /// Methods that it allows; none: all.
    pub methods: Vec<String>,
    /// Paths that it allows; none: all.
    pub paths: Vec<PathPattern>,
    /// Special addresses that it opens beside the public ones.
    pub addresses: Vec<Cidr>,
    /// Whether TLS ends at the proxy, which then sees requests.
    pub intercept: bool,
    /// A secret to add.
    pub credential: Option<Credential>,
}

impl Rule {
    fn names(&self, host: &Host, port: u16, scheme: Scheme) -> bool {
        let default = [scheme.default_port()];
        let ports = if self.ports.is_empty() {
            &default[..]
        } else {
            &self.ports
        };
        self.scheme == scheme && ports.contains(&port) && self.host.matches(host)
    }

    /// Whether an address of a resolved name may be connected to.
    ///
    /// # Errors
    /// [`Reason::Address`], for special addresses that the rule does not open.
    pub fn address(&self, host: &Host, address: IpAddr) -> Result<(), Denial> {
        match forbidden(address) {
            Some(why) if !self.addresses.iter().any(|c| c.contains(address)) => {
                let detail = format!(
                    "{host} leads to {address}, which is {why}; a rule must open it by `addresses`"
                );
                Err(Denial::new(Reason::Address, detail))
            }
            _ => Ok(()),
        }
    }
}

/// A request to be judged.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// Scheme.
    pub scheme: Scheme,
    /// Host.
    pub host: &'a Host,
    /// Port.
    pub port: u16,
    /// Method, as sent.
    pub method: &'a str,
    /// Path without query, as sent.
    pub path: &'a str,
}

/// How a tunnel goes on.
#[derive(Clone, Copy, Debug)]
pub enum Way<'a> {
    /// TLS ends at the proxy; each request is judged.
    Intercept,
    /// Bytes pass, to a host that this rule names.
    Pass(&'a Rule),
}

/// The rules of a session, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// First match wins.
    pub rules: Vec<Rule>,
}

impl Policy {
    /// Judges `CONNECT host:port`.
    ///
    /// # Errors
    /// [`Reason::NoRule`].
    pub fn connect(&self, host: &Host, port: u16) -> Result<Way<'_>, Denial> {
        let mut named = self
            .rules
            .iter()
            .filter(|r| r.names(host, port, Scheme::Https));
        match named.next() {
            None => Err(no_rule(Scheme::Https, host, port)),
            Some(first) if first.intercept || named.any(|r| r.intercept) => Ok(Way::Intercept),
            Some(first) => Ok(Way::Pass(first)),
        }
    }

    /// Judges a request that the proxy can read.
    ///
    /// # Errors
    /// [`Reason::NoRule`], [`Reason::Method`], [`Reason::Path`] or [`Reason::Malformed`].
    pub fn request(&self, ask: &Ask<'_>) -> Result<&Rule, Denial> {
        let (host, port) = (ask.host, ask.port);
        // TRACE sends back what it was sent, credentials included.
        if ["CONNECT", "TRACE", "TRACK"].contains(&ask.method) {
            return Err(Denial::new(
                Reason::Method,
                format!("method {} is never forwarded", ask.method),
            ));
        }
        let mut denial = no_rule(ask.scheme, host, port);
        for rule in self
            .rules
            .iter()
            .filter(|r| r.names(host, port, ask.scheme))
        {
            if !rule.methods.is_empty() && !rule.methods.iter().any(|m| m == ask.method) {
                if denial.reason == Reason::NoRule {
                    denial = Denial::new(
                        Reason::Method,
                        format!("no rule allows {} for {host}", ask.method),
                    );
                }
                continue;
            }
            if !rule.paths.is_empty() {
                if ambiguous(ask.path) {
                    let detail = format!("path {:?} can be read in more than one way", ask.path);
                    return Err(Denial::new(Reason::Malformed, detail));
                }
                if !rule.paths.iter().any(|p| p.matches(ask.path)) {
                    denial = Denial::new(
                        Reason::Path,
                        format!("no rule allows {} {host}{}", ask.method, ask.path),
                    );
                    continue;
                }
            }
            return Ok(rule);
        }
        Err(denial)
    }
}

fn no_rule(scheme: Scheme, host: &Host, port: u16) -> Denial {
    Denial::new(
        Reason::NoRule,
        format!("no rule opens {scheme}://{host}:{port}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rule(host: &str) -> Rule {
        Rule {
            host: HostPattern::parse(host).unwrap(),
            scheme: Scheme::Https,
            ports: vec![],
            methods: vec![],
            paths: vec![],
            addresses: vec![],
            intercept: true,
            credential: None,
        }
    }

    fn ask(policy: &Policy, method: &str, host: &str, path: &str) -> Result<(), Reason> {
        let host = Host::parse(host).unwrap();
        let ask = Ask {
            scheme: Scheme::Https,
            host: &host,
            port: 443,
            method,
            path,
        };
        policy.request(&ask).map(|_| ()).map_err(|d| d.reason)
    }

    #[test]
    fn nothing_is_allowed_without_a_rule() {
        let policy = Policy::default();
        assert_eq!(ask(&policy, "GET", "example.com", "/"), Err(Reason::NoRule));
        let host = Host::parse("example.com").unwrap();
        assert!(policy.connect(&host, 443).is_err());
    }

    #[test]
    fn method_path_port_and_scheme_must_all_match() {
        let mut one = rule("api.example.com");
        one.methods = vec!["GET".into()];
        one.paths = vec![
            PathPattern::parse("/v1/*").unwrap(),
            PathPattern::parse("/health").unwrap(),
        ];
        let policy = Policy { rules: vec![one] };
        assert_eq!(ask(&policy, "GET", "api.example.com", "/v1/models"), Ok(()));
        assert_eq!(ask(&policy, "GET", "api.example.com", "/health"), Ok(()));
        assert_eq!(
            ask(&policy, "GET", "api.example.com", "/healthy"),
            Err(Reason::Path)
        );
        assert_eq!(
            ask(&policy, "POST", "api.example.com", "/v1/models"),
            Err(Reason::Method)
        );
        assert_eq!(
            ask(&policy, "get", "api.example.com", "/v1/models"),
            Err(Reason::Method)
        );
        assert_eq!(
            ask(&policy, "TRACE", "api.example.com", "/v1/models"),
            Err(Reason::Method)
        );
        assert_eq!(
            ask(&policy, "GET", "example.com", "/v1/models"),
            Err(Reason::NoRule)
        );
        let host = Host::parse("api.example.com").unwrap();
        for port in [22, 25, 80, 8443] {
            assert_eq!(
                policy.connect(&host, port).unwrap_err().reason,
                Reason::NoRule
            );
        }
        let plain = Ask {
            scheme: Scheme::Http,
            host: &host,
            port: 443,
            method: "GET",
            path: "/v1/a",
        };
        assert_eq!(policy.request(&plain).unwrap_err().reason, Reason::NoRule);
    }

    #[test]
    fn paths_that_leave_their_prefix_are_refused() {
        let mut one = rule("a.com");
        one.paths = vec![PathPattern::parse("/v1/*").unwrap()];
        let policy = Policy { rules: vec![one] };
        for path in [
            "/v1/../admin",
            "/v1/%2e%2e/admin",
            "/v1/.%2E/admin",
            "/v1/..;/admin",
            "/v1/..%2fadmin",
            "/v1/..\\admin",
            "/v1/..%5cadmin",
            "/v1/%252e%252e/admin",
            "/v1/./x",
            "/v1/a%00b",
            "/v1/\u{e4}",
            // Overlong slashes and dots, and bytes that are no text.
            "/v1/..%c0%af/admin",
            "/v1/..%C0%AFadmin",
            "/v1/%c0%ae%c0%ae/admin",
            "/v1/%e0%80%af",
            "/v1/%ff",
            // What some servers cut off.
            "/v1/..%09/admin",
            "/v1/..%20/admin",
            "/v1/%20../admin",
            "/v1/..%0d%0a/admin",
            "/v1/..%c2%a0/admin",
            "/v1/.%20./admin",
            "/v1/.../admin",
            "/v1/..;a=b/admin",
            "/v1/a%7fb",
            // What some make dots and slashes of.
            "/v1/%ef%bc%8e%ef%bc%8e/admin",
            "/v1/..%ef%bc%8fadmin",
            "/v1/..%u2215admin",
            "/v1/..%2",
            "/v1/%zz",
        ] {
            assert_eq!(
                ask(&policy, "GET", "a.com", path),
                Err(Reason::Malformed),
                "{path}"
            );
        }
        for fine in [
            "/v1/a..b/...x",
            "/v1/a%20b;c=d/%C3%A4.txt",
            "/v1//x",
            "/v1/",
        ] {
            assert_eq!(ask(&policy, "GET", "a.com", fine), Ok(()), "{fine}");
        }
    }

    #[test]
    fn a_tunnel_passes_only_if_no_rule_for_it_wants_to_look_inside() {
        let (mut pass, look) = (rule("a.com"), rule("a.com"));
        pass.intercept = false;
        let host = Host::parse("a.com").unwrap();
        let policy = Policy {
            rules: vec![pass.clone(), look],
        };
        assert!(matches!(policy.connect(&host, 443), Ok(Way::Intercept)));
        let policy = Policy { rules: vec![pass] };
        assert!(matches!(policy.connect(&host, 443), Ok(Way::Pass(_))));
    }

    #[test]
    fn special_addresses_need_a_rule_that_opens_them() {
        let mut one = rule("a.com");
        let host = Host::parse("a.com").unwrap();
        let judge = |rule: &Rule, ip: &str| rule.address(&host, ip.parse().unwrap());
        assert_eq!(
            judge(&one, "127.0.0.1").unwrap_err().reason,
            Reason::Address
        );
        assert!(judge(&one, "8.8.8.8").is_ok());
        one.addresses = vec!["127.0.0.0/8".parse().unwrap()];
        assert!(judge(&one, "127.0.0.1").is_ok());
        assert!(judge(&one, "169.254.169.254").is_err() && judge(&one, "::1").is_err());
        assert!(judge(&one, "::ffff:127.0.0.1").is_err());
    }

    proptest! {
        /// What is in an allowed path after its escapes is text in which nothing parts segments but
        /// slashes.
        #[test]
        fn an_allowed_path_is_plain_text(tail in proptest::collection::vec(any::<u8>(), 0..6)) {
            let mut one = rule("a.com");
            one.paths = vec![PathPattern::parse("/v1/*").unwrap()];
            let policy = Policy { rules: vec![one] };
            let escaped: String = tail.iter().map(|b| format!("%{b:02x}")).collect();
            if ask(&policy, "GET", "a.com", &format!("/v1/..{escaped}/x")).is_ok() {
                let text = String::from_utf8(tail).unwrap();
                prop_assert!(text.chars().any(|c| !c.is_whitespace() && c != '.' && c != ';'));
                prop_assert!(!text.contains(['/', '\\', '%', '\0', '\t', '\r', '\n']));
            }
        }

        /// Whatever a server makes of a path that a prefix rule lets through, segment by segment,
        /// it stays below the prefix.
        #[test]
        fn an_allowed_path_stays_below_its_prefix(tail in "([a-z.;%2eE/5cCfF\\\\]{0,4}/?){0,6}") {
            let mut one = rule("a.com");
            one.paths = vec![PathPattern::parse("/v1/*").unwrap()];
            let policy = Policy { rules: vec![one] };
            let path = format!("/v1/{tail}");
            if ask(&policy, "GET", "a.com", &path).is_ok() {
                let decoded = path.to_lowercase().replace("%2e", ".").replace("%2f", "/").replace("%5c", "/");
                let mut depth = 0;
                for segment in decoded.replace('\\', "/").split('/').skip(2) {
                    let segment = segment.split(';').next().unwrap();
                    depth += match segment { "" | "." => 0, ".." => -1, _ => 1 };
                    prop_assert!(depth >= 0, "{}", path);
                }
            }
        }
    }
}
