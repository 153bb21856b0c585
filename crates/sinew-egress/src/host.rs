//! Canonical form of host names and addresses.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Maximum bytes of a name (RFC 1035, section 2.3.4).
const MAX_NAME_BYTES: usize = 253;
/// Maximum bytes of a label (RFC 1035, section 2.3.4).
const MAX_LABEL_BYTES: usize = 63;

/// A host in canonical form. Equal hosts are equal values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Host {
    /// Lower-case ASCII labels, without the final dot.
    Name(String),
    /// An address, parsed from its only accepted spelling.
    Address(IpAddr),
}

/// Reason why a host is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// IPv4 in decimal, octal, hexadecimal or short form, zone ids and similar: parsers disagree on them.
    #[error("host {0:?} is an address in an unusual spelling; allowed: 192.0.2.1 or [2001:db8::1]")]
    OddAddress(String),
    /// Not a valid name.
    #[error(
        "host {0:?} is no name; allowed: labels of a-z, 0-9, - and _ of 1 to 63 bytes, 253 in all"
    )]
    NotAName(String),
    /// Not a number from 1 to 65535.
    #[error("port {0:?}; allowed: 1 to 65535")]
    Port(String),
}

impl Host {
    /// Parses the host of a URL without a port: `example.com`, `192.0.2.1`, `[::1]`.
    ///
    /// # Errors
    /// [`HostError`] for a text that two parsers could read differently.
    pub fn parse(text: &str) -> Result<Self, HostError> {
        if let Some(inner) = text.strip_prefix('[') {
            return inner
                .strip_suffix(']')
                .and_then(|t| t.parse::<Ipv6Addr>().ok())
                .map(|a| Self::Address(IpAddr::V6(a)))
                .ok_or_else(|| HostError::OddAddress(text.into()));
        }
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        // std accepts only four decimal numbers without leading zeros.
        if let Ok(address) = name.parse::<Ipv4Addr>() {
            return Ok(Self::Address(IpAddr::V4(address)));
        }
        let last = name.rsplit('.').next().unwrap_or_default();
        // WHATWG URL, "ends in a number": browsers and libc read such a host as an IPv4 address.
        let numeric = !last.is_empty() && last.bytes().all(|b| b.is_ascii_digit());
        let hex = last
            .strip_prefix("0x")
            .is_some_and(|h| h.bytes().all(|b| b.is_ascii_hexdigit()));
        if numeric || hex || name.contains(':') {
            return Err(HostError::OddAddress(text.into()));
        }
        let label = |l: &str| {
            let plain =
                |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_';
            !l.is_empty()
                && l.len() <= MAX_LABEL_BYTES
                && l.bytes().all(plain)
                && !l.starts_with('-')
                && !l.ends_with('-')
        };
        if name.len() > MAX_NAME_BYTES || !name.split('.').all(label) {
            return Err(HostError::NotAName(text.into()));
        }
        Ok(Self::Name(name))
    }

    /// Parses `host` or `host:port`.
    ///
    /// # Errors
    /// Parses like [`Host::parse`]; the error is [`HostError::Port`] for an invalid port.
    pub fn parse_with_port(text: &str) -> Result<(Self, Option<u16>), HostError> {
        let after_bracket = text.rfind(']').map_or(0, |at| at + 1);
        let Some(colon) = text[after_bracket..].find(':') else {
            return Ok((Self::parse(text)?, None));
        };
        let (host, port) = text.split_at(after_bracket + colon);
        let digits = &port[1..];
        // `parse` itself would accept a sign.
        let valid =
            !digits.is_empty() && digits.len() <= 5 && digits.bytes().all(|b| b.is_ascii_digit());
        let number = digits.parse::<u16>().ok().filter(|&p| valid && p > 0);
        let number = number.ok_or_else(|| HostError::Port(digits.into()))?;
        Ok((Self::parse(host)?, Some(number)))
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(IpAddr::V4(a)) => a.fmt(f),
            Self::Address(IpAddr::V6(a)) => write!(f, "[{a}]"),
        }
    }
}

/// Pattern for hosts: one host, or `*.` and a name for all its subdomains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostPattern {
    /// One host.
    One(Host),
    /// Every subdomain of this name, but not the name itself.
    Below(String),
}

impl HostPattern {
    /// Parses `example.com`, `*.example.com`, `192.0.2.1` or `[2001:db8::1]`.
    ///
    /// # Errors
    /// Same as [`Host::parse`]. A wildcard is allowed only in front of a name with at least two labels.
    pub fn parse(text: &str) -> Result<Self, HostError> {
        let Some(rest) = text.strip_prefix("*.") else {
            return Ok(Self::One(Host::parse(text)?));
        };
        match Host::parse(rest)? {
            Host::Name(name) if name.contains('.') => Ok(Self::Below(name)),
            _ => Err(HostError::NotAName(text.into())),
        }
    }

    /// True if the pattern matches the host.
    pub fn matches(&self, host: &Host) -> bool {
        match (self, host) {
            (Self::One(one), host) => one == host,
            (Self::Below(parent), Host::Name(name)) => name
                .strip_suffix(parent.as_str())
                .is_some_and(|front| front.len() > 1 && front.ends_with('.')),
            (Self::Below(_), Host::Address(_)) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn unusual_spellings_of_loopback_are_refused() {
        for text in [
            "2130706433",
            "0x7f000001",
            "0x7f.1",
            "017700000001",
            "0177.0.0.1",
            "127.1",
            "127.0.1",
            "127.0.0.01",
            "127.0.0.1.",
            "1.2.3.4.5",
            "[::1%25lo]",
            "[::1",
            "::1",
            "0x",
            "127.0.0.0x1",
            "[127.0.0.1]",
            "256.1.1.1",
        ] {
            let host = Host::parse(text);
            // The final dot is removed, which yields the usual form.
            if text == "127.0.0.1." {
                assert_eq!(host, Ok(Host::Address(Ipv4Addr::LOCALHOST.into())));
            } else {
                assert!(
                    matches!(host, Err(HostError::OddAddress(_))),
                    "{text}: {host:?}"
                );
            }
        }
    }

    #[test]
    fn invalid_names_are_refused() {
        let long = "a".repeat(64);
        for text in [
            "",
            ".",
            "a..b",
            "user@host",
            "a b",
            "a\tb",
            "ex%61mple.com",
            "exämple.com",
            "-a.com",
            "a-.com",
            "a/b",
            "a\\b",
            "a#b",
            "a?b",
            long.as_str(),
        ] {
            assert!(
                matches!(Host::parse(text), Err(HostError::NotAName(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn case_and_final_dot_do_not_matter() {
        let host = Host::parse("api.example.com").unwrap();
        assert_eq!(Host::parse("API.Example.COM.").unwrap(), host);
        assert_eq!(host.to_string(), "api.example.com");
    }

    #[test]
    fn ports_are_1_to_65535() {
        assert_eq!(Host::parse_with_port("a.b:8443").unwrap().1, Some(8443));
        assert_eq!(Host::parse_with_port("[::1]:80").unwrap().1, Some(80));
        assert_eq!(Host::parse_with_port("[::1]").unwrap().1, None);
        for port in [
            "0", "65536", "+80", "-1", "", " 80", "80 ", "0x50", "000080",
        ] {
            let parsed = Host::parse_with_port(&format!("a.b:{port}"));
            assert!(
                matches!(parsed, Err(HostError::Port(_))),
                "{port}: {parsed:?}"
            );
        }
    }

    #[test]
    fn wildcards_match_subdomains_only() {
        let pattern = HostPattern::parse("*.example.com").unwrap();
        let matches = |host| pattern.matches(&Host::parse(host).unwrap());
        assert!(matches("a.example.com") && matches("a.b.example.com"));
        assert!(
            !matches("example.com")
                && !matches("badexample.com")
                && !matches("example.com.evil.org")
        );
        for bad in ["*", "*.com", "a.*.com", "*a.com", "*.1.2.3.4"] {
            assert!(HostPattern::parse(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn canonical_form_parses_to_itself(text in "\\PC{0,40}|[0-9a-fx.:\\[\\]]{0,20}") {
            if let Ok(host) = Host::parse(&text) {
                prop_assert_eq!(Host::parse(&host.to_string()).unwrap(), host);
            }
        }
    }
}
