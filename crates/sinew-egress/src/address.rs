//! Addresses that the proxy must not connect to.

use crate::error::PatternError;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// Returns why an address is forbidden, or `None` for a public unicast address.
///
/// The ranges are those of IANA's special-purpose registries for IPv4 and IPv6 (RFC 6890 and its updates). An
/// address that contains an IPv4 address (mapped, compatible, NAT64, 6to4) is classified by the latter.
pub fn forbidden(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(a) => forbidden_v4(a),
        IpAddr::V6(a) => forbidden_v6(a),
    }
}

/// [`forbidden`] for IPv4.
fn forbidden_v4(address: Ipv4Addr) -> Option<&'static str> {
    const RANGES: [(&str, &str); 17] = [
        ("169.254.169.254/32", "a metadata service"),
        ("100.100.100.200/32", "a metadata service"),
        ("168.63.129.16/32", "a metadata service"),
        ("192.0.0.192/32", "a metadata service"),
        ("127.0.0.0/8", "loopback"),
        ("10.0.0.0/8", "private"),
        ("172.16.0.0/12", "private"),
        ("192.168.0.0/16", "private"),
        ("169.254.0.0/16", "link-local"),
        ("100.64.0.0/10", "shared by carriers"),
        ("0.0.0.0/8", "this network"),
        ("192.0.0.0/24", "reserved by IETF"),
        ("192.0.2.0/24", "documentation"),
        ("198.18.0.0/15", "for benchmarks"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        // Multicast, reserved and broadcast.
        ("224.0.0.0/3", "not unicast"),
    ];
    let found = RANGES.iter().find(|(range, _)| {
        range
            .parse::<Cidr>()
            .is_ok_and(|c| c.contains(IpAddr::V4(address)))
    });
    found.map(|(_, why)| *why)
}

/// [`forbidden`] for IPv6.
fn forbidden_v6(address: Ipv6Addr) -> Option<&'static str> {
    let s = address.segments();
    let low = || {
        let [.., a, b] = s;
        Ipv4Addr::from((u32::from(a) << 16) | u32::from(b))
    };
    match s {
        [0, 0, 0, 0, 0, 0, 0, 0] => Some("unspecified"),
        [0, 0, 0, 0, 0, 0, 0, 1] => Some("loopback"),
        // Mapped and compatible (RFC 4291, section 2.5.5).
        [0, 0, 0, 0, 0, 0xffff | 0, _, _] => {
            Some(forbidden_v4(low()).unwrap_or("IPv4 inside IPv6"))
        }
        // NAT64 (RFC 6052). The local-use prefix (RFC 8215) does not reveal the network of the address.
        [0x64, 0xff9b, 0, 0, 0, 0, _, _] => forbidden_v4(low()),
        [0x64, 0xff9b, 1, ..] => Some("a local NAT64"),
        // 6to4 (RFC 3056).
        [0x2002, a, b, ..] => {
            forbidden_v4(Ipv4Addr::from((u32::from(a) << 16) | u32::from(b))).or(Some("6to4"))
        }
        [0x2001, 0x0..=0x01ff, ..] => Some("reserved by IETF"),
        [0x2001, 0xdb8, ..] | [0x3fff, 0..=0x0fff, ..] => Some("documentation"),
        [0xfd00, 0x0ec2, ..] => Some("a metadata service"),
        [0xfc00..=0xfdff, ..] => Some("private"),
        [0xfe80..=0xfebf, ..] => Some("link-local"),
        [0xfec0..=0xfeff, ..] => Some("site-local"),
        [0x2000..=0x3fff, ..] => None,
        _ => Some("not global unicast"),
    }
}

/// An address range: `127.0.0.0/8`, `::1/128`, or one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    /// First address of the range, or any address in it.
    base: IpAddr,
    /// Number of leading bits that must match.
    prefix: u8,
}

impl Cidr {
    /// True if the range contains the address. IPv4-mapped addresses are IPv6 addresses.
    pub fn contains(&self, address: IpAddr) -> bool {
        let same = |a: u128, b: u128, bits: u32| {
            let rest = bits - u32::from(self.prefix).min(bits);
            a.checked_shr(rest).unwrap_or(0) == b.checked_shr(rest).unwrap_or(0)
        };
        match (self.base, address) {
            (IpAddr::V4(a), IpAddr::V4(b)) => same(u32::from(a).into(), u32::from(b).into(), 32),
            (IpAddr::V6(a), IpAddr::V6(b)) => same(a.into(), b.into(), 128),
            _ => false,
        }
    }
}

impl FromStr for Cidr {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let allowed = || PatternError::Range(text.to_owned());
        let (base, prefix) = text
            .split_once('/')
            .map_or((text, None), |(b, p)| (b, Some(p)));
        let base: IpAddr = base.parse().map_err(|_| allowed())?;
        let max = if base.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            None => max,
            Some(p) => p.parse().ok().filter(|&p| p <= max).ok_or_else(allowed)?,
        };
        Ok(Self { base, prefix })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn special_addresses_are_forbidden_and_public_ones_are_not() {
        for bad in [
            "127.0.0.1",
            "127.255.255.254",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.0.1",
            "169.254.169.254",
            "169.254.0.1",
            "100.64.0.1",
            "100.127.255.255",
            "192.0.0.192",
            "192.0.2.1",
            "198.18.0.1",
            "198.19.255.255",
            "203.0.113.9",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::127.0.0.1",
            "::ffff:8.8.8.8",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::1",
            "2002:7f00:1::1",
            "2002:a00:1::",
            "2001::1",
            "2001:db8::1",
            "3fff::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "100::1",
            "4000::1",
            "5f00::1",
        ] {
            assert!(forbidden(bad.parse().unwrap()).is_some(), "{bad}");
        }
        for good in [
            "8.8.8.8",
            "172.15.255.255",
            "172.32.0.1",
            "100.63.255.255",
            "100.128.0.1",
            "192.0.1.1",
            "198.17.255.255",
            "198.20.0.1",
            "223.255.255.255",
            "1.1.1.1",
            "2606:4700::1111",
            "2001:4860:4860::8888",
            "64:ff9b::808:808",
        ] {
            assert_eq!(forbidden(good.parse().unwrap()), None, "{good}");
        }
    }

    #[test]
    fn ranges_contain_exactly_their_addresses() {
        let range: Cidr = "10.2.0.0/15".parse().unwrap();
        assert!(range.contains("10.3.255.255".parse().unwrap()));
        assert!(!range.contains("10.4.0.0".parse().unwrap()));
        assert!(!range.contains("::ffff:10.2.0.1".parse().unwrap()));
        assert!(
            "::/0"
                .parse::<Cidr>()
                .unwrap()
                .contains("ff02::1".parse().unwrap())
        );
        for bad in ["10.0.0.0/33", "::1/129", "10/8", "", "a/8", "10.0.0.0/-1"] {
            assert!(bad.parse::<Cidr>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn ipv4_addresses_inside_ipv6_are_forbidden_too(bits in any::<u32>()) {
            let v4 = Ipv4Addr::from(bits);
            let [a, b] = [(bits >> 16) as u16, bits as u16];
            if forbidden(v4.into()).is_some() {
                for inside in [
                    v4.to_ipv6_mapped(),
                    v4.to_ipv6_compatible(),
                    Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, a, b),
                    Ipv6Addr::new(0x2002, a, b, 0, 0, 0, 0, 1),
                ] {
                    prop_assert!(forbidden(inside.into()).is_some(), "{}", inside);
                }
            }
        }
    }
}
