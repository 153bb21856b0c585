//! Names of images in registries.

use crate::ImageError;
use crate::documents::sha256;
use std::net::IpAddr;

/// Beginning of a name whose registry is asked over HTTPS, or over HTTP on loopback.
const PREFIX: &str = "registry:";
/// Beginning of a name whose registry is asked over HTTP, wherever it is.
const PLAIN_PREFIX: &str = "registry+http:";
/// Maximum characters of a repository's name (OCI distribution specification 1.1).
const MAX_NAME: usize = 255;
/// Maximum characters of a tag (the same).
const MAX_TAG: usize = 128;

/// An image in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    /// Host with its port, as it was typed. Credentials are looked up by it.
    pub(crate) host: String,
    /// Name of the repository.
    pub(crate) repository: String,
    /// Tag, or digest if there is one.
    pub(crate) target: String,
    /// HTTP instead of HTTPS.
    pub(crate) plain: bool,
}

/// True if a text names an image in a registry: `registry:HOST/NAME:TAG`.
pub fn is_registry(image: &str) -> bool {
    image.starts_with(PREFIX) || image.starts_with(PLAIN_PREFIX)
}

/// True for this machine's own addresses and `localhost`. `host` may have a port.
pub(crate) fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

impl Reference {
    /// Reads `registry:HOST/NAME:TAG`, or with `@sha256:DIGEST` instead of or after the tag. If there is a
    /// digest, only it decides.
    ///
    /// # Errors
    /// [`ImageError::Reference`] with the part that is wrong.
    pub(crate) fn parse(text: &str) -> Result<Self, ImageError> {
        let wrong = |reason: &str| ImageError::Reference {
            text: text.chars().take(400).collect(),
            reason: reason.into(),
        };
        let (typed_plain, rest) = match text.strip_prefix(PLAIN_PREFIX) {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix(PREFIX).unwrap_or(text)),
        };
        let (host, rest) = rest
            .split_once('/')
            .ok_or_else(|| wrong("it has no host"))?;
        if !is_host(host) {
            return Err(wrong(
                "the host is none: it has a dot or a port, or is localhost",
            ));
        }
        let (rest, digest) = match rest.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest)),
            None => (rest, None),
        };
        if digest.is_some_and(|d| sha256(d).is_err()) {
            return Err(wrong("the digest is not sha256: and 64 hexadecimal digits"));
        }
        let (name, tag) = match rest.split_once(':') {
            Some((name, tag)) => (name, Some(tag)),
            None => (rest, None),
        };
        if !is_name(name) {
            return Err(wrong(
                "the name is not of a-z, 0-9 and single . _ - / between them",
            ));
        }
        if tag.is_some_and(|t| !is_tag(t)) {
            return Err(wrong("the tag is not of letters, digits and . _ -"));
        }
        let target = digest
            .or(tag)
            .ok_or_else(|| wrong("it has neither tag nor digest"))?;
        // Docker's hub keeps images without an owner under this one.
        let of_hub = host == "docker.io" && !name.contains('/');
        Ok(Self {
            host: host.into(),
            repository: if of_hub {
                format!("library/{name}")
            } else {
                name.into()
            },
            target: target.into(),
            plain: typed_plain || is_loopback(host),
        })
    }

    /// The digest that the image must have, if the name has one.
    pub(crate) fn digest(&self) -> Option<&str> {
        self.target.contains(':').then_some(self.target.as_str())
    }

    /// Address below which the repository lies.
    pub(crate) fn base(&self) -> String {
        let scheme = if self.plain { "http" } else { "https" };
        let host = match self.host.as_str() {
            "docker.io" => "registry-1.docker.io",
            host => host,
        };
        format!("{scheme}://{host}/v2/{}", self.repository)
    }

    /// True if a password may be sent to `host` over HTTP: on only loopback.
    pub(crate) fn may_see_password(&self) -> bool {
        !self.plain || is_loopback(&self.host)
    }
}

impl std::fmt::Display for Reference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let separator = if self.digest().is_some() { '@' } else { ':' };
        write!(
            f,
            "{}/{}{separator}{}",
            self.host, self.repository, self.target
        )
    }
}

/// A host with an optional port. A host without dot or port could be the first part of a name.
fn is_host(host: &str) -> bool {
    let (name, port) = match host.strip_prefix('[').and_then(|h| h.split_once(']')) {
        Some((address, rest)) => {
            let port = rest.strip_prefix(':');
            let fine = address.parse::<std::net::Ipv6Addr>().is_ok();
            return fine && (rest.is_empty() || port.is_some_and(|p| p.parse::<u16>().is_ok()));
        }
        None => match host.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (host, None),
        },
    };
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'.';
    let named = !name.is_empty() && name.len() <= 253 && name.bytes().all(plain);
    let clear = name.contains('.') || port.is_some() || name == "localhost";
    named && clear && port.is_none_or(|p| p.parse::<u16>().is_ok())
}

/// A repository's name (OCI distribution specification 1.1, section 4.1).
fn is_name(name: &str) -> bool {
    let part = |part: &str| {
        let ends = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b);
        let bytes = part.as_bytes();
        ends(bytes.first().copied())
            && ends(bytes.last().copied())
            && part.bytes().all(plain)
            && !part.contains("..")
    };
    name.len() <= MAX_NAME && name.split('/').all(part)
}

/// A tag (the same).
fn is_tag(tag: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    let first = tag
        .bytes()
        .next()
        .is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_');
    first && tag.len() <= MAX_TAG && tag.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_registries_have_them() {
        let digest = format!("sha256:{}", "a".repeat(64));
        for (text, base, target) in [
            (
                "registry:ghcr.io/a/b-c:1.2",
                "https://ghcr.io/v2/a/b-c",
                "1.2",
            ),
            (
                "registry:127.0.0.1:5000/a:x",
                "http://127.0.0.1:5000/v2/a",
                "x",
            ),
            ("registry:[::1]:5000/a:x", "http://[::1]:5000/v2/a", "x"),
            ("registry:localhost/a:x", "http://localhost/v2/a", "x"),
            (
                "registry+http:box.lan:5000/a:x",
                "http://box.lan:5000/v2/a",
                "x",
            ),
            (
                "registry:docker.io/debian:12",
                "https://registry-1.docker.io/v2/library/debian",
                "12",
            ),
            (
                &format!("registry:ghcr.io/a/b@{digest}"),
                "https://ghcr.io/v2/a/b",
                &digest,
            ),
            (
                &format!("registry:ghcr.io/a/b:1@{digest}"),
                "https://ghcr.io/v2/a/b",
                &digest,
            ),
        ] {
            let read = Reference::parse(text).unwrap();
            assert_eq!((read.base().as_str(), read.target.as_str()), (base, target));
        }
    }

    #[test]
    fn what_is_no_name_is_refused_with_the_part() {
        for (text, why) in [
            ("registry:debian:12", "no host"),
            ("registry:library/debian:12", "the host"),
            ("registry:a.b:port/x:1", "the host"),
            ("registry:a@b.c/x:1", "the host"),
            ("registry:ghcr.io/A:1", "the name"),
            ("registry:ghcr.io/../x:1", "the name"),
            ("registry:ghcr.io/a?b:1", "the name"),
            ("registry:ghcr.io/:1", "the name"),
            ("registry:ghcr.io/a:", "the tag"),
            ("registry:ghcr.io/a:1/../2", "the tag"),
            ("registry:ghcr.io/a", "neither tag nor digest"),
            ("registry:ghcr.io/a@sha256:12", "the digest"),
        ] {
            let error = Reference::parse(text).unwrap_err().to_string();
            assert!(
                error.contains(why) && error.contains("registry:HOST/NAME:TAG"),
                "{error}"
            );
        }
    }

    #[test]
    fn passwords_go_over_https_or_stay_on_this_machine() {
        let may = |text: &str| Reference::parse(text).unwrap().may_see_password();
        assert!(may("registry:ghcr.io/a:1") && may("registry:127.0.0.1:5000/a:1"));
        assert!(!may("registry+http:10.0.0.7:5000/a:1"));
        assert!(!may("registry+http:localhost.example.org/a:1"));
    }
}
