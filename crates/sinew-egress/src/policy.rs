//! Rules for requests. The first match decides, and everything else is denied. Pure.
//!
//! A rule matches by scheme, port and host. Then its methods and paths must allow the request. The denial
//! names the most specific reason: path, then method, then no rule. The addresses of a host are checked after
//! resolution ([`Rule::address`]): a rule opens special addresses, such as loopback, only if it lists them.

use crate::address::{Cidr, forbidden};
use crate::error::PatternError;
use crate::host::{Host, HostPattern};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;

/// Reason of a denial, as named in audit lines and responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// No rule matches host, port and scheme.
    NoRule,
    /// Rules match the host, but none allows the method.
    Method,
    /// Rules match host and method, but none allows the path.
    Path,
    /// The name resolves to an address that no rule allows.
    Address,
    /// A host, port, header or path is ambiguous: two parsers could read it differently.
    Malformed,
    /// TLS for another host than the tunnel's, an encrypted server name, or no TLS.
    Tls,
    /// The quota of the episode is exhausted.
    Quota,
    /// The recording has no response for this request.
    NotRecorded,
}

impl Reason {
    /// Name in audit lines.
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

/// A denied request. The text is for the audit log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("egress denied ({}): {detail}", .reason.name())]
pub struct Denial {
    /// Kind of the denial.
    pub reason: Reason,
    /// The request and what is allowed.
    pub detail: String,
}

impl Denial {
    /// Creates a denial.
    pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
        Self {
            reason,
            detail: detail.into(),
        }
    }

    /// Message for the sandbox. It hides the addresses of the host's network.
    #[cfg(feature = "proxy")]
    pub(crate) fn public_message(&self) -> String {
        match self.reason {
            Reason::Address => {
                let text = "the name leads to an address that no rule opens";
                Self::new(self.reason, text).to_string()
            }
            _ => self.to_string(),
        }
    }
}

/// Scheme of a URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Plain HTTP, without TLS.
    Http,
    /// HTTP over TLS.
    Https,
}

impl Scheme {
    /// 80 for `http`, 443 for `https`.
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

/// Pattern for paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathPattern {
    /// Exactly this path.
    Exact(String),
    /// Every path with this prefix, from a pattern such as `/v1/*`.
    Prefix(String),
}

impl PathPattern {
    /// Parses `/v1/models` or `/v1/*`. A star is allowed only at the end.
    ///
    /// # Errors
    /// [`PatternError::Path`] with the value and the allowed forms.
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        let (front, prefix) = text.strip_suffix('*').map_or((text, false), |f| (f, true));
        if !front.starts_with('/') || front.contains(['*', '?', '#']) || ambiguous(front) {
            return Err(PatternError::Path(text.to_owned()));
        }
        Ok(if prefix {
            Self::Prefix(front.into())
        } else {
            Self::Exact(front.into())
        })
    }

    /// True if the pattern matches `path`, which must not be ambiguous.
    fn matches(&self, path: &str) -> bool {
        match self {
            Self::Exact(p) => p == path,
            Self::Prefix(p) => path.starts_with(p.as_str()),
        }
    }
}

/// Reports whether some servers drop the character or normalize it to ASCII, such as dots, slashes and
/// percent signs of other widths and scripts. Whole blocks are listed, since tables of normalization grow.
fn lookalike(c: char) -> bool {
    matches!(c,
        // Invisible characters.
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
        | '\u{180b}'..='\u{180f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}'
        | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'
        // Backslashes of Japanese and Korean encodings, and full stops of other scripts.
        | '\u{a5}' | '\u{20a9}' | '\u{589}' | '\u{660}' | '\u{66a}' | '\u{6d4}' | '\u{6f0}'
        | '\u{701}' | '\u{702}' | '\u{1362}' | '\u{1803}' | '\u{1809}' | '\u{2cf9}' | '\u{a4f8}'
        | '\u{a60e}' | '\u{10a50}' | '\u{1d16d}' | '\u{1735}' | '\u{2571}' | '\u{2572}'
        // Punctuation, letter-like and enclosed characters, fractions, mathematical operators.
        | '\u{bc}'..='\u{be}' | '\u{2000}'..='\u{206f}' | '\u{2100}'..='\u{218f}'
        | '\u{2200}'..='\u{22ff}' | '\u{2460}'..='\u{24ff}' | '\u{2980}'..='\u{29ff}'
        // Forms of other widths, and marks of Chinese, Japanese and Korean.
        | '\u{3000}'..='\u{303f}' | '\u{3200}'..='\u{33ff}' | '\u{fe10}'..='\u{fe1f}'
        | '\u{fe30}'..='\u{fe6f}' | '\u{ff00}'..='\u{ffef}' | '\u{1f100}'..='\u{1f1ff}'
    )
}

/// Decodes percent escapes. Returns `None` for an invalid escape.
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

/// True if a server could interpret this path as another one. The decoded path must be UTF-8 without a second
/// layer of escapes, slashes, backslashes and control characters. No segment may consist of dots only, also
/// after removal of parameters and white space, which some servers strip.
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
    let odd = |c: char| matches!(c, '%' | '\\') || c.is_control() || lookalike(c);
    text.contains(odd)
        || text.split('/').any(|segment| {
            let name = segment.split(';').next().unwrap_or_default();
            let name = name.trim_matches(char::is_whitespace);
            !name.is_empty() && name.chars().all(|c| c == '.' || c.is_whitespace())
        })
}

/// Secret that the proxy adds to the requests of a rule. The sandbox never sees it.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    /// Name in the recipe and in audit lines.
    pub name: String,
    /// Header for the secret, in lower case. The sandbox's own value of this header is dropped.
    pub header: String,
    /// Complete value of the header.
    pub value: String,
    /// Secret part of the value. It is removed from responses.
    pub secret: String,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A rule. Empty lists match everything, except that empty `ports` means the default port of the scheme.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Allowed hosts.
    pub host: HostPattern,
    /// Allowed scheme.
    pub scheme: Scheme,
    /// Allowed ports. Empty: the default port.
    pub ports: Vec<u16>,
    /// Allowed methods. Empty: all.
    pub methods: Vec<String>,
    /// Allowed paths. Empty: all.
    pub paths: Vec<PathPattern>,
    /// Allowed special addresses, in addition to public ones.
    pub addresses: Vec<Cidr>,
    /// Terminate TLS at the proxy, so that it sees the requests.
    pub intercept: bool,
    /// Credential to add.
    pub credential: Option<Credential>,
}

impl Rule {
    /// True if host, port and scheme match.
    fn names(&self, host: &Host, port: u16, scheme: Scheme) -> bool {
        let default = [scheme.default_port()];
        let ports = if self.ports.is_empty() {
            &default[..]
        } else {
            &self.ports
        };
        self.scheme == scheme && ports.contains(&port) && self.host.matches(host)
    }

    /// Checks one resolved address of a host.
    ///
    /// # Errors
    /// [`Reason::Address`] for a special address that the rule does not allow.
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

/// The parts of a request that rules check.
#[derive(Clone, Copy, Debug)]
pub struct RequestInfo<'a> {
    /// Scheme of the URL.
    pub scheme: Scheme,
    /// Host of the URL.
    pub host: &'a Host,
    /// Port of the URL, explicit or the default.
    pub port: u16,
    /// Method as sent.
    pub method: &'a str,
    /// Path as sent, without the query.
    pub path: &'a str,
}

/// Treatment of a tunnel.
#[derive(Clone, Copy, Debug)]
pub enum TunnelMode<'a> {
    /// The proxy terminates TLS and checks each request.
    Intercept,
    /// The proxy forwards bytes to a host that this rule allows.
    Pass(&'a Rule),
}

/// Rules of a session, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// The first match decides.
    pub rules: Vec<Rule>,
}

impl Policy {
    /// Checks `CONNECT host:port`.
    ///
    /// # Errors
    /// [`Reason::NoRule`] if no `https` rule matches.
    pub fn connect(&self, host: &Host, port: u16) -> Result<TunnelMode<'_>, Denial> {
        let mut named = self
            .rules
            .iter()
            .filter(|r| r.names(host, port, Scheme::Https));
        match named.next() {
            None => Err(no_rule(Scheme::Https, host, port)),
            Some(first) if first.intercept || named.any(|r| r.intercept) => {
                Ok(TunnelMode::Intercept)
            }
            Some(first) => Ok(TunnelMode::Pass(first)),
        }
    }

    /// Checks a request that the proxy can read, and returns the rule that allows it.
    ///
    /// # Errors
    /// [`Reason::NoRule`], [`Reason::Method`], [`Reason::Path`] or [`Reason::Malformed`].
    pub fn request(&self, request: &RequestInfo<'_>) -> Result<&Rule, Denial> {
        let (host, port) = (request.host, request.port);
        // TRACE returns the request to the client, with credentials.
        if ["CONNECT", "TRACE", "TRACK"].contains(&request.method) {
            return Err(Denial::new(
                Reason::Method,
                format!("method {} is never forwarded", request.method),
            ));
        }
        let mut denial = no_rule(request.scheme, host, port);
        for rule in self
            .rules
            .iter()
            .filter(|r| r.names(host, port, request.scheme))
        {
            if !rule.methods.is_empty() && !rule.methods.iter().any(|m| m == request.method) {
                if denial.reason == Reason::NoRule {
                    denial = Denial::new(
                        Reason::Method,
                        format!("no rule allows {} for {host}", request.method),
                    );
                }
                continue;
            }
            if !rule.paths.is_empty() {
                if ambiguous(request.path) {
                    let detail =
                        format!("path {:?} can be read in more than one way", request.path);
                    return Err(Denial::new(Reason::Malformed, detail));
                }
                if !rule.paths.iter().any(|p| p.matches(request.path)) {
                    denial = Denial::new(
                        Reason::Path,
                        format!("no rule allows {} {host}{}", request.method, request.path),
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

    fn check(policy: &Policy, method: &str, host: &str, path: &str) -> Result<(), Reason> {
        let host = Host::parse(host).unwrap();
        let request = RequestInfo {
            scheme: Scheme::Https,
            host: &host,
            port: 443,
            method,
            path,
        };
        policy.request(&request).map(|_| ()).map_err(|d| d.reason)
    }

    #[test]
    fn requests_without_a_rule_are_denied() {
        let policy = Policy::default();
        assert_eq!(
            check(&policy, "GET", "example.com", "/"),
            Err(Reason::NoRule)
        );
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
        assert_eq!(
            check(&policy, "GET", "api.example.com", "/v1/models"),
            Ok(())
        );
        assert_eq!(check(&policy, "GET", "api.example.com", "/health"), Ok(()));
        assert_eq!(
            check(&policy, "GET", "api.example.com", "/healthy"),
            Err(Reason::Path)
        );
        assert_eq!(
            check(&policy, "POST", "api.example.com", "/v1/models"),
            Err(Reason::Method)
        );
        assert_eq!(
            check(&policy, "get", "api.example.com", "/v1/models"),
            Err(Reason::Method)
        );
        assert_eq!(
            check(&policy, "TRACE", "api.example.com", "/v1/models"),
            Err(Reason::Method)
        );
        assert_eq!(
            check(&policy, "GET", "example.com", "/v1/models"),
            Err(Reason::NoRule)
        );
        let host = Host::parse("api.example.com").unwrap();
        for port in [22, 25, 80, 8443] {
            assert_eq!(
                policy.connect(&host, port).unwrap_err().reason,
                Reason::NoRule
            );
        }
        let plain = RequestInfo {
            scheme: Scheme::Http,
            host: &host,
            port: 443,
            method: "GET",
            path: "/v1/a",
        };
        assert_eq!(policy.request(&plain).unwrap_err().reason, Reason::NoRule);
    }

    #[test]
    fn ambiguous_paths_are_refused() {
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
            // Overlong encodings of slashes and dots, and bytes that are not UTF-8.
            "/v1/..%c0%af/admin",
            "/v1/..%C0%AFadmin",
            "/v1/%c0%ae%c0%ae/admin",
            "/v1/%e0%80%af",
            "/v1/%ff",
            // Characters that some servers strip.
            "/v1/..%09/admin",
            "/v1/..%20/admin",
            "/v1/%20../admin",
            "/v1/..%0d%0a/admin",
            "/v1/..%c2%a0/admin",
            "/v1/.%20./admin",
            "/v1/.../admin",
            "/v1/..;a=b/admin",
            "/v1/a%7fb",
            // Characters that some servers normalize to dots and slashes.
            "/v1/%ef%bc%8e%ef%bc%8e/admin",
            "/v1/..%ef%bc%8fadmin",
            "/v1/%e2%80%a5/admin",
            "/v1/%e3%80%82%ef%bd%a1/admin",
            "/v1/.%c2%ad./admin",
            "/v1/.%e2%80%8b./admin",
            "/v1/..%c2%a5admin",
            "/v1/..%e2%a7%b5admin",
            "/v1/%ef%b8%b0/admin",
            "/v1/%e2%92%88./admin",
            "/v1/%ef%bc%852e/admin",
            "/v1/..%u2215admin",
            "/v1/..%2",
            "/v1/%zz",
        ] {
            assert_eq!(
                check(&policy, "GET", "a.com", path),
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
            assert_eq!(check(&policy, "GET", "a.com", fine), Ok(()), "{fine}");
        }
    }

    #[test]
    fn tunnels_pass_only_if_no_rule_intercepts_them() {
        let (mut pass, look) = (rule("a.com"), rule("a.com"));
        pass.intercept = false;
        let host = Host::parse("a.com").unwrap();
        let policy = Policy {
            rules: vec![pass.clone(), look],
        };
        assert!(matches!(
            policy.connect(&host, 443),
            Ok(TunnelMode::Intercept)
        ));
        let policy = Policy { rules: vec![pass] };
        assert!(matches!(
            policy.connect(&host, 443),
            Ok(TunnelMode::Pass(_))
        ));
    }

    #[test]
    fn special_addresses_need_a_rule_that_allows_them() {
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
        /// The decoded form of an allowed path is text in which only slashes separate segments.
        #[test]
        fn decoded_allowed_paths_are_plain_text(tail in proptest::collection::vec(any::<u8>(), 0..6)) {
            let mut one = rule("a.com");
            one.paths = vec![PathPattern::parse("/v1/*").unwrap()];
            let policy = Policy { rules: vec![one] };
            let escaped: String = tail.iter().map(|b| format!("%{b:02x}")).collect();
            if check(&policy, "GET", "a.com", &format!("/v1/..{escaped}/x")).is_ok() {
                let text = String::from_utf8(tail).unwrap();
                prop_assert!(text.chars().any(|c| !c.is_whitespace() && c != '.' && c != ';'));
                prop_assert!(!text.contains(['/', '\\', '%', '\0', '\t', '\r', '\n']));
            }
        }

        /// An allowed path stays below its prefix, however a server normalizes the segments.
        #[test]
        fn allowed_paths_stay_below_their_prefix(tail in "([a-z.;%2eE/5cCfF\\\\]{0,4}/?){0,6}") {
            let mut one = rule("a.com");
            one.paths = vec![PathPattern::parse("/v1/*").unwrap()];
            let policy = Policy { rules: vec![one] };
            let path = format!("/v1/{tail}");
            if check(&policy, "GET", "a.com", &path).is_ok() {
                let decoded = path.to_lowercase().replace("%2e", ".");
                let decoded = decoded.replace("%2f", "/").replace("%5c", "/");
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
